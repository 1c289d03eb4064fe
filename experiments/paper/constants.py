"""The fitted constants of a document, with their values and what they were fitted on.

A constant is fitted if published values of the paper decide it. A document lists every one that its simulated values depend
on: the coefficients of the step time (``STEP``), the scale of the step time (``scale``), the times of copies (``SWAPS``), and
its own. Constants of data sheets and of kernel tables are not fitted to the paper and are not listed.
"""

from __future__ import annotations

from typing import Any

from ...sim.cost.paper import (
    MS_PER_DECODE,
    MS_PER_PREFILL_TOKEN,
    STEP_MS,
    SWAP_IN_BYTES_PER_S,
    SWAP_IN_MS_PER_BLOCK,
    SWAP_OUT_BYTES_PER_S,
    SWAP_OUT_MS_PER_BLOCK,
)

Constant = dict[str, Any]


def constant(name: str, value: float, on: str) -> Constant:
    """A fitted constant: ``name`` with its unit in parentheses, and ``on``, the published values that decide it."""
    return {"name": name, "value": value, "on": on}


def scale(value: float, on: str) -> Constant:
    """A factor on the step time."""
    return constant("step-time scale", value, on)


_LINE, _SLOPE, _COPIES = "Fig 1, ten points", "Fig 19a, recomputing", "Fig 19a, swaps of all block sizes"
#: OPT-13B on one A100-40GB, which the paper measured.
STEP_LINE = (constant("step (ms)", STEP_MS, _LINE), constant("sequence of a step (ms)", MS_PER_DECODE, _LINE))
STEP = (*STEP_LINE, constant("prompt token of a step (ms)", MS_PER_PREFILL_TOKEN, _SLOPE))
#: Of all runs that swap; Fig 19a predicts its other points with fits of its own, through one and two of them.
SWAPS = (
    constant("swap out (GB/s)", SWAP_OUT_BYTES_PER_S / 1e9, _COPIES),
    constant("block of a swap out (ms)", SWAP_OUT_MS_PER_BLOCK, _COPIES),
    constant("swap in (GB/s)", SWAP_IN_BYTES_PER_S / 1e9, _COPIES),
    constant("block of a swap in (ms)", SWAP_IN_MS_PER_BLOCK, _COPIES),
)
