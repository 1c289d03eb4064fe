"""Table 1: memory that the weights of each model leave for the KV cache, and its number of slots.

Set-up, from the paper: OPT-13B on an A100-40GB, OPT-66B on four, OPT-175B on eight A100-80GB. Nothing is fitted: shapes
and driver-reported memory are the inputs of the artifact's own computation (``sim.spec.paper_num_blocks``). Weights are
in GB of 10^9 bytes and the KV cache in GiB. Slots are counted before bytes are rounded down to blocks. Only with these
units do the printed numbers agree with one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....sim.spec import block_bytes, gpu, model, paper_num_blocks
from ....sim.spec.gpu import GIB
from ....sim.spec.weights import num_params
from ..comparison import Payload
from ..published import paper_figures
from ..rows import Row, accuracy, as_finding, value_row

FIGURE = "table1"
BLOCK_SIZE = 16
_GB = 10**9
_WEIGHT_BYTES = 2
#: The paper's name of a model, its name here, its GPU and the number of GPUs.
SERVERS = {
    "OPT-13B": ("opt-13b", "a100-40gb", 1),
    "OPT-66B": ("opt-66b", "a100-40gb", 4),
    "OPT-175B": ("opt-175b", "a100-80gb", 8),
}
#: Printed values of the KV cache, and their decimals.
_PRINTED = {"kv_slots_k": ("KV slots", 1), "kv_gb": ("The KV cache", 0)}


def table1() -> Payload:
    """The table as a document."""
    published = paper_figures()[FIGURE]
    rows = []
    for series, server in SERVERS.items():
        printed = dict(zip(published["columns"], published[series], strict=True))
        rows += [value_row(series, metric, printed[metric], [value]) for metric, value in _computed(*server)]
    return {
        "figure": FIGURE,
        "workload": "No requests: weights, KV cache and slots of each model",
        "rows": rows,
        "findings": list(findings(rows)),
        "basis": [
            "Slots: (95 % of the memory that the driver reports - weights - activations of 2,560 tokens - 1 GiB) /"
            f" bytes of a slot, rounded down, on each GPU. In blocks of {BLOCK_SIZE} there are {_in_blocks()}.",
            "Weights in GB of 10^9 bytes, KV cache in GiB.",
        ],
    }


def _computed(name: str, card: str, num_gpus: int) -> Iterator[tuple[str, float]]:
    shape = model(name)
    slots = paper_num_blocks(shape, gpu(card), num_gpus, block_size=1)
    yield "param_gb", num_params(shape) * _WEIGHT_BYTES / _GB
    yield "kv_gb", slots * num_gpus * block_bytes(shape, num_gpus, block_size=1) / GIB
    yield "kv_slots_k", slots / 1000


def _in_blocks() -> str:
    slots = [BLOCK_SIZE * paper_num_blocks(model(name), gpu(card), n, BLOCK_SIZE) for name, card, n in SERVERS.values()]
    return ", ".join(f"{number:,}" for number in slots)


def findings(rows: list[Row]) -> Iterator[dict[str, Any]]:
    """Whether slots and KV cache equal the printed values, as the paper rounds them, and the error of the weights."""
    for metric, (text, decimals) in _PRINTED.items():
        mine = [row for row in rows if row["metric"] == metric]
        same = sum(round(row["simulated"], decimals) == row["published"] for row in mine)
        yield as_finding(f"{text}, rounded as printed: {same} of {len(mine)} the same.", same == len(mine))
    yield accuracy((row for row in rows if row["metric"] == "param_gb"), "Weights")
