"""fragmeter's own columns, the SOSP'23 pairs (``input``, ``output``), and files with the same names.

``arrival_s`` is in seconds, and so is ``delay_s``, between a turn of a ``session_id`` and the answer before it.
``hash_ids`` and ``block_tokens`` are for JSON lines and Parquet.
"""

from ...sim.types import ticks
from ..parsing.form import MILLISECONDS, SECONDS, Form

OWN = Form(
    "our own columns",
    frozenset(),
    {"arrival_s": SECONDS, "timestamp": MILLISECONDS},
    delays={"delay_s": ticks.PER_SECOND, "delay": ticks.PER_MS},
)
