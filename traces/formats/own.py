"""fragmeter's own columns, the SOSP'23 pairs (``input``, ``output``), and files with the same column names.

``arrival_s`` and ``delay_s`` are in seconds, ``timestamp`` and ``delay`` in milliseconds, as Mooncake's. ``delay_s`` is the time between the answer to the previous turn of a
``session_id`` and this turn. ``hash_ids`` and ``block_tokens`` exist in JSON lines and Parquet only.

Logs of requests have OpenAI's ``prompt_tokens`` and ``completion_tokens``, or ``input_tokens`` and ``output_tokens``, themselves or within
``usage``; spans of OpenTelemetry have ``gen_ai.usage.input_tokens``. Anthropic's ``input_tokens`` are those that were neither read from
nor written to its prompt cache: these are added (docs.anthropic.com, prompt caching).
"""

import numpy as np

from ..parsing import arrow as pa
from ..parsing.checks import numbers_of
from ..parsing.form import MILLISECONDS, OWN_NAMES, Form
from ..parsing.table import Table
from ..parsing.times import clock

_SECONDS = clock("s", doubted=False)
_CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")
_WITHIN = ("", "usage.")


def _with_cached(table: Table) -> Table:
    """The table with the tokens that Anthropic counts apart added to its prompts."""
    for within in _WITHIN:
        prompt = f"{within}input_tokens"
        apart = [name for name in (f"{within}{each}" for each in _CACHED) if name in table.columns]
        if apart and prompt in table.columns:
            filled = table.having(**{name: table.columns[name].fill_null(0) for name in apart})
            counts = [numbers_of(filled, name, "a number of tokens") for name in (prompt, *apart)]
            table = table.having(**{prompt: pa.array(np.sum(counts, axis=0))})
    return table


OWN = Form(
    "our own columns",
    {"arrival_s": _SECONDS, "timestamp": MILLISECONDS},
    OWN_NAMES | {"cached_tokens": tuple(f"{within}{name}" for within in _WITHIN for name in _CACHED)},
    delays={"delay_s": _SECONDS, "delay": MILLISECONDS},
    preparer=lambda: _with_cached,
)
