"""BurstGPT, CSV.

    Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
    Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type

``Timestamp`` is in seconds from the first midnight. ``Response tokens`` of 0 marks a failed request, which is left out.
Requests with the same ``Session ID`` are turns of one session.

Source: HPMLL/BurstGPT, README.md.
"""

from ..parsing.form import SECONDS, SESSION, ZERO, Form, lengths
from ..parsing.jsonl_format import sessions
from ..parsing.table import Table

_SESSION = "Session ID"


def _renamed(table: Table) -> Table:
    session = table.columns.get(_SESSION)
    return table if session is None else table.having(**{SESSION: session})


BURSTGPT = Form(
    "BurstGPT",
    {"Timestamp": SECONDS},
    lengths("Request tokens", "Response tokens"),
    content={_SESSION: sessions},
    preparer=lambda: _renamed,
    failures=ZERO,
)
