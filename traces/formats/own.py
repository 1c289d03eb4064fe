"""Our own columns, the SOSP'23 pairs (``input``, ``output``), and whoever calls them alike.

``arrival_s`` is in seconds. In any format; ``hash_ids``, ``block_tokens`` and ``session_id`` in JSON lines and Parquet.
"""

from ..form import MILLISECONDS, SECONDS, Form

OWN = Form("our own columns", frozenset(), {"arrival_s": SECONDS, "timestamp": MILLISECONDS})
