"""fragmeter's own columns, the SOSP'23 pairs (``input``, ``output``), and files with the same column names.

``arrival_s`` and ``delay_s`` are in seconds, ``timestamp`` and ``delay`` in milliseconds, as Mooncake's. ``delay_s`` is the time between the answer to the previous turn of a
``session_id`` and this turn. ``hash_ids`` and ``block_tokens`` exist in JSON lines and Parquet only.
"""

from ..parsing.form import MILLISECONDS, Form
from ..parsing.times import clock

_SECONDS = clock("s", doubted=False)

OWN = Form(
    "our own columns",
    frozenset(),
    {"arrival_s": _SECONDS, "timestamp": MILLISECONDS},
    delays={"delay_s": _SECONDS, "delay": MILLISECONDS},
)
