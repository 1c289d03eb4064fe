"""Fig 3: contents of the chunks reserved for two requests.

Set-up, from the paper: request A has a maximum of 2,048 tokens and request B of 512; each chunk is reserved whole. The
picture shows the iteration after the one that computed the prompt, which fills the slot of the token that the prompt
produced. Orca serves each request alone, and the counts are the slots of the ledger in the second iteration. Nothing is
fitted.
"""

from __future__ import annotations

import numpy as np

from ....sim.cost import PaperCost
from ....sim.engine.run import simulate
from ....sim.workload.workload import Workload
from ..comparison import Payload
from ..published import paper_figures
from ..rows import Row, as_finding, value_row
from ..settings import paper_settings

FIGURE = "fig3"
_SECOND, _BLOCK_SIZE = 1, 16


def fig3() -> Payload:
    """The figure as a document."""
    published = paper_figures()[FIGURE]
    requests = [name for name in published if name not in ("how", "what", "columns")]
    rows = [row for name in requests for row in _rows(name, dict(zip(published["columns"], published[name])))]
    exact = sum(row["error"] == 0 for row in rows)
    return {
        "figure": FIGURE,
        "workload": "Two requests, each alone in its chunk, in the iteration after its prompt's",
        "rows": rows,
        "findings": [as_finding(f"{exact} of {len(rows)} values are the paper's to the slot.", exact == len(rows))],
        "basis": ["Policy orca: prompt and longest possible output are reserved when a request starts."],
    }


def _rows(name: str, printed: dict[str, int]) -> list[Row]:
    prompt, longest = printed["prompt"], printed["max_model_len"]
    # The prompt's iteration produced the token being filled; the reserved slots are for later tokens.
    output = printed["being_filled"] + printed["reserved"]
    slots = slots_in_second_iteration(prompt, output, longest)
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
