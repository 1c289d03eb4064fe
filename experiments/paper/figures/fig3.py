"""Fig 3: contents of the chunks reserved for two requests, and the free slots that are too few for a third.

Set-up, from the paper: request A has a maximum of 2,048 tokens and request B of 512; each chunk is reserved whole. The
picture shows the iteration after the one that computed the prompt, which fills the slot of the token that the prompt
produced. Orca serves each request alone, and the counts are the slots of the ledger in the second iteration. Nothing is
fitted.

The document also has two pools, slot by slot, in the second iteration of A, B and a third request C, which is as A and
arrives with them: under Orca, and in blocks. The paper's picture gives no size of the pool. Here it has room for the
chunks of A and B and 1,024 slots more, half of what C reserves.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ....reports.figures.slots import FREE_TOO_FEW
from ....sim import Workload, simulate
from ....sim.cost import PaperCost
from ....sim.recording.steps import record
from ..comparison import Payload
from ..published import paper_figures
from ..rows import Row, as_finding, value_row
from ..settings import paper_settings

FIGURE = "fig3"
CHUNKS, BLOCKS = "orca", "vllm-sosp23"
_SECOND, _BLOCK_SIZE, _FREE = 1, 16, 1024
_THIRD, _AS_THIRD = "Request C", "Request A"


class Request(NamedTuple):
    """Tokens of a request: of its prompt, of its output, and the most of both."""

    prompt: int
    output: int
    longest: int


def fig3() -> Payload:
    """The figure as a document."""
    published = paper_figures()[FIGURE]
    names = [name for name in published if name not in ("how", "what", "columns")]
    printed = {name: dict(zip(published["columns"], published[name])) for name in names}
    requests = {name: _request(printed[name]) for name in names}
    rows = [row for name in names for row in _rows(name, requests[name], printed[name])]
    exact = sum(row["error"] == 0 for row in rows)
    requests[_THIRD] = requests[_AS_THIRD]
    slots = sum(requests[name].longest for name in names) + _FREE
    pools = [pool(policy, requests, slots) for policy in (CHUNKS, BLOCKS)]
    return {
        "figure": FIGURE,
        "workload": "Two requests, each alone in its chunk, in the iteration after its prompt's",
        "rows": rows,
        "pools": pools,
        "findings": [as_finding(f"{exact} of {len(rows)} values are the paper's to the slot.", exact == len(rows))],
        "basis": ["Policy orca: prompt and longest possible output are reserved when a request starts."],
        "remarks": [_third_text(pools, requests[_THIRD])],
    }


def free_slots(pool: Mapping[str, Any]) -> int:
    """Free slots of a pool of the document."""
    return sum(part["slots"] for part in pool["parts"] if part["contents"] in ("free", FREE_TOO_FEW))


def _third_text(pools: list[dict[str, Any]], third: Request) -> str:
    chunks, blocks = pools
    return (
        f"In a pool of {chunks['slots']:,} slots, chosen here, the chunks of {' and '.join(chunks['running'])} leave"
        f" {free_slots(chunks):,} free, too few for the {third.longest:,} of {chunks['waiting'][0]}, which waits. In blocks"
        f" of {_BLOCK_SIZE} slots {', '.join(blocks['running'])} run in {blocks['slots'] - free_slots(blocks)} slots, and"
        f" {free_slots(blocks):,} are free."
    )


def _request(printed: Mapping[str, int]) -> Request:
    # The prompt's iteration produced the token being filled; the reserved slots are for later tokens.
    return Request(printed["prompt"], printed["being_filled"] + printed["reserved"], printed["max_model_len"])


def _rows(name: str, request: Request, printed: Mapping[str, int]) -> list[Row]:
    slots = slots_in_second_iteration(*request)
    published = {
        "token_slots": printed["held"] + printed["being_filled"],
        "reserved_slots": printed["reserved"],
        "internal_slots": printed["internal"],
    }
    rows = [value_row(name, metric, published[metric], [slots[metric]]) for metric in published]
    return [row | {"simulated": slots[row["metric"]]} for row in rows]


def slots_in_second_iteration(prompt_tokens: int, output_tokens: int, max_model_len: int) -> dict[str, int]:
    """Contents of a request's chunk in slots, in its second iteration, with no other request on the server."""
    chosen = paper_settings(
        policy="orca", block_size=_BLOCK_SIZE, num_gpu_blocks_override=max_model_len // _BLOCK_SIZE,
        max_model_len=max_model_len, leap=False,
    )  # fmt: skip
    arrivals, prompts, outputs = (np.array([value]) for value in (0, prompt_tokens, output_tokens))
    request = Workload("one request", arrivals, prompts, outputs)
    buckets = simulate(chosen, request, PaperCost()).accounts.at_rows()
    live, reserved, over = (int(buckets[name][_SECOND]) for name in ("live", "reserved", "over_estimate"))
    return {"token_slots": live, "reserved_slots": reserved, "internal_slots": over}


def pool(policy: str, requests: Mapping[str, Request], slots: int) -> dict[str, Any]:
    """The slots of a pool in the second iteration of requests that all arrive at once.

    Returns:
        ``policy``; ``slots`` of the pool; names of the requests ``running`` and ``waiting``; ``parts`` in order of address:
        their ``holder`` (None where free), their ``contents`` (a bucket of the ledger, or ``FREE_TOO_FEW``) and their
        number of ``slots``.
    """
    chosen = paper_settings(
        policy=policy, block_size=_BLOCK_SIZE, num_gpu_blocks_override=slots // _BLOCK_SIZE,
        max_model_len=max(each.longest for each in requests.values()),
    )  # fmt: skip
    names = list(requests)
    prompts, outputs, longest = np.array(list(requests.values())).T
    work = Workload("all at once", np.zeros(len(names), dtype=np.int64), prompts, outputs, longest - prompts)
    _, steps = record(chosen, work, PaperCost())
    step = steps[_SECOND]
    holder = {slot: names[each.sequence] for each in step.held for slot in each.slots}
    waiting = [names[sequence] for sequence in step.waiting]
    free = FREE_TOO_FEW if waiting else "free"
    each_slot = [(holder.get(slot), free if bucket == "free" else bucket) for slot, bucket in enumerate(step.buckets)]
    parts = [
        {"holder": name, "contents": contents, "slots": len(list(run))} for (name, contents), run in groupby(each_slot)
    ]
    running = [names[each.sequence] for each in step.held]
    return {"policy": policy, "slots": slots, "running": running, "waiting": waiting, "parts": parts}
