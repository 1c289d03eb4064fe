"""Mooncake's traces and vLLM's ``timed_trace``, JSON lines.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

``hash_ids`` are blocks of the prompt; each id identifies its block and all blocks before it. The two formats differ in
block size and time unit, which the file does not state: Mooncake's blocks have 512 tokens and its times are milliseconds;
vLLM defaults to blocks of 16 tokens and to seconds (``--timed-trace-chunk-hash-size``, ``--timed-trace-sec-multiplier``).
The number of ids per prompt shows which format a file has. ``session_id`` identifies requests that are turns of one
session. ``delay`` is the time between the answer to the previous turn and this turn, in the unit of the timestamps. A
turn with a ``delay`` needs no ``timestamp``.

Sources: kvcache-ai/Mooncake, FAST25-release/traces; vllm-project/vllm, pull request 39795; of ``delay``
ai-dynamo/aiperf, pull requests 299 and 452.
"""

from dataclasses import replace

from ..parsing.form import MILLISECONDS, SECONDS, VLLM_BLOCK_TOKENS, Form
from ..parsing.reading import Reading
from ..parsing.times import PER_SECOND, Clock

#: Of the two formats, which have the same columns.
TITLES = ("Mooncake", "vLLM timed_trace")
MOONCAKE = Form(TITLES[0], {"timestamp": MILLISECONDS})


def timed(block_tokens: int, reading: Reading) -> Form:
    """The form of a file with blocks of ``block_tokens`` tokens; ``reading`` may set its time unit."""
    title, unit = TITLES[0], MILLISECONDS
    if block_tokens == VLLM_BLOCK_TOKENS:
        title, unit = TITLES[1], SECONDS
    multiplier = reading.timed_trace_sec_multiplier
    if multiplier is not None and round(multiplier * PER_SECOND) != unit.ticks:
        unit = Clock(f"{multiplier:g}", round(multiplier * PER_SECOND), reason="--timed-trace-sec-multiplier says so")
    elif multiplier is not None:
        unit = replace(unit, doubted=False, whole=False)
    return replace(MOONCAKE, title=title, clocks={"timestamp": unit}, block_tokens=block_tokens, delays={"delay": unit})
