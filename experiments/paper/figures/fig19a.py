"""Fig 19a: time to swap 256 tokens of OPT-13B out and in, and time to recompute them, by block size.

    swap = bytes / bandwidth + blocks * start-up time of a copy

Bytes and blocks follow from the model's shape. The two unknowns of each direction are fitted on two labelled points,
block sizes 8 and 256, and predict the other seven. Recomputation is one prompt of 256 tokens at every block size. Its
slope per token is fitted on block size 16, above the 25.7 ms of a step in Fig 1. The roofline and the GPU's profile are
reported beside it, fitted to none of these values.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import fsum
from typing import Any

from ....sim.cost import PaperCost, cost
from ....sim.cost.paper import STEP_MS
from ....sim.spec import block_bytes, gpu, model
from ....sim.types.ticks import PER_MS
from ..comparison import Payload
from ..constants import STEP_LINE, Constant, constant
from ..published import paper_figures
from ..rows import Row, accuracy, as_finding, value_row

FIGURE, METRIC = "fig19a", "time_ms"
TOKENS = 256
SWAPS = ("swap_in", "swap_out")
FITTED_ON, RECOMPUTE_FITTED_ON = (8, 256), 16
#: Block sizes of the stated accuracy goal.
_AIM = range(8, 257)
_MODEL, _GPU = "opt-13b", "a100-40gb"
_OTHER_COSTS = {"fitted": "recompute, profile of the GPU", "roofline": "recompute, roofline"}


def fig19a() -> Payload:
    """The figure as a document."""
    rows = [row for direction in SWAPS for row in _swaps(direction)] + list(_recomputes())
    aimed = [row for row in rows if row["x"] in _AIM and row["series"] not in _OTHER_COSTS.values()]
    return {
        "figure": FIGURE,
        "workload": f"{TOKENS} tokens of {_MODEL}, one {_GPU}",
        "x_is": "block size, tokens",
        "rows": rows,
        "constants": [STEP_LINE[0], *_constants()],
        "findings": [
            accuracy(aimed, f"Swaps and the fitted recomputing, block sizes {_AIM[0]} to {_AIM[-1]}"),
            accuracy([row for row in rows if row["series"] in _names()], "All swaps, down to block size 1"),
            quicker_from(rows),
        ],
        "basis": [_fit_text(direction) for direction in SWAPS]
        + [
            f"Recompute: {STEP_MS} ms + {TOKENS} tokens of {recompute_slope_ms():.4f} ms, fitted on block size"
            f" {RECOMPUTE_FITTED_ON}.",
        ],
        "remarks": [
            "Runs swap at costs fitted to all nine block sizes by least squares (sim/cost/paper.py). They differ from"
            f" these by at most {_apart():.1%}."
        ],
    }


def fitted_swap(direction: str) -> tuple[float, float]:
    """(ms for the bytes, ms for each block), through the two labelled points."""
    at = _published(direction)
    few, many = (TOKENS // size for size in reversed(FITTED_ON))
    per_block = (at[FITTED_ON[0]] - at[FITTED_ON[1]]) / (many - few)
    return at[FITTED_ON[1]] - few * per_block, per_block


def _apart() -> float:
    """The largest difference between the swap times of the runs and these, as a share of these."""
    apart = []
    for size in _published(SWAPS[0]):
        own = PaperCost(block_bytes=block_bytes(model(_MODEL), block_size=size), block_size=size)
        blocks = TOKENS // size
        ticks = {"swap_in": own.swap_in_ticks(blocks), "swap_out": own.swap_out_ticks(blocks)}
        for direction in SWAPS:
            bytes_ms, block_ms = fitted_swap(direction)
            apart.append(abs(ticks[direction] / PER_MS / (bytes_ms + blocks * block_ms) - 1))
    return max(apart)


def recompute_slope_ms() -> float:
    """ms per prompt token, from the one labelled point."""
    return (_published("recompute")[RECOMPUTE_FITTED_ON] - STEP_MS) / TOKENS


def _published(series: str) -> dict[int, float]:
    figure = paper_figures()[FIGURE]
    return dict(zip(figure["block_sizes"], figure[series], strict=True))


def _swaps(direction: str) -> Iterator[Row]:
    bytes_ms, block_ms = fitted_swap(direction)
    for size, published in _published(direction).items():
        kind = "fitted" if size in FITTED_ON else "predicted"
        yield _row(_name(direction), size, published, bytes_ms + TOKENS // size * block_ms, kind)


def _recomputes() -> Iterator[Row]:
    own = STEP_MS + TOKENS * recompute_slope_ms()
    for size, published in _published("recompute").items():
        yield _row(
            "recompute", size, published, own, "fitted" if size == RECOMPUTE_FITTED_ON else "predicted", own / 100
        )
    for name, series in _OTHER_COSTS.items():
        ticks = cost(name, model(_MODEL), gpu(_GPU)).step_ticks(0, 0, TOKENS, TOKENS * (TOKENS + 1) // 2)
        published = _published("recompute")[RECOMPUTE_FITTED_ON]
        yield _row(series, RECOMPUTE_FITTED_ON, published, ticks / PER_MS, "predicted", ticks / PER_MS / 100)


def _row(series: str, size: int, published: float, found_ms: float, kind: str, step_1pct: float = 0.0) -> Row:
    how = paper_figures()[FIGURE]["how"]
    return value_row(series, METRIC, published, [found_ms], x=size, how=how, kind=kind, step_1pct=step_1pct)


def _name(direction: str) -> str:
    return direction.replace("_", " ")


def _names() -> list[str]:
    return [_name(direction) for direction in SWAPS]


def _constants() -> Iterator[Constant]:
    recompute_on = f"Fig 19a, recomputing at block size {RECOMPUTE_FITTED_ON}"
    yield constant("prompt token of a recomputed step (ms)", recompute_slope_ms(), recompute_on)
    on = f"Fig 19a, block sizes {FITTED_ON[0]} and {FITTED_ON[1]}"
    for direction in SWAPS:
        bytes_ms, block_ms = fitted_swap(direction)
        yield constant(f"{_name(direction)} (GB/s)", _moved_bytes() / bytes_ms / 1e6, on)
        yield constant(f"block of a {_name(direction)} (ms)", block_ms, on)


def _moved_bytes() -> int:
    return TOKENS * block_bytes(model(_MODEL), block_size=1)


def _fit_text(direction: str) -> str:
    bytes_ms, block_ms = fitted_swap(direction)
    moved = _moved_bytes()
    return (
        f"{_name(direction).capitalize()}: {moved / 1e6:,.1f} MB at {moved / bytes_ms / 1e6:.2f} GB/s + {block_ms:.3f}"
        f" ms a block, through block sizes {FITTED_ON[0]} and {FITTED_ON[1]}."
    )


def quicker_from(rows: list[Row]) -> dict[str, Any]:
    """A finding: the block size from which on a swap out and in is quicker than recomputation."""

    def first(side: str) -> int | None:
        at = {(row["series"], row["x"]): row[side] for row in rows}
        sizes = sorted(size for series, size in at if series == "recompute")
        return next((s for s in sizes if fsum(at[name, s] for name in _names()) < at["recompute", s]), None)

    published, found = first("published"), first("simulated")
    return as_finding(
        f"Out and in again is quicker than computing from block size {found or 'none'} on; published: {published}.",
        published == found,
    )
