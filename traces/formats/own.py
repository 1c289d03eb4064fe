"""fragmeter's own columns, the SOSP'23 pairs (``input``, ``output``), and files with the same column names.

``arrival_s`` and ``delay_s`` are in seconds. ``delay_s`` is the time between the answer to the previous turn of a
``session_id`` and this turn. ``hash_ids`` and ``block_tokens`` exist in JSON lines and Parquet only.
"""

from ...sim.types import ticks
from ..parsing.form import MILLISECONDS, SECONDS, Form

OWN = Form(
    "our own columns",
    frozenset(),
    {"arrival_s": SECONDS, "timestamp": MILLISECONDS},
    delays={"delay_s": ticks.PER_SECOND, "delay": ticks.PER_MS},
)
