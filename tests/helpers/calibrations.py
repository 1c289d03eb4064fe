"""Calibrations made up for tests, round enough to reckon with by hand."""

from __future__ import annotations

import json
from typing import Any

from fragmeter.sim.cost.calibration import Calibration

OPS: dict[str, dict[str, Any]] = {
    "gemm": {"coefficients": {"t0_us": 5, "flops_per_s": 100e12, "bytes_per_s": 1e12, "q": 2}},
    "decode_attention": {"coefficients": {"t0_us": 10, "flops_per_s": 50e12, "bytes_per_s": 1e12, "q": 1.5}},
    "prefill_attention": {"coefficients": {"t0_us": 10, "flops_per_s": 50e12, "bytes_per_s": 1e12, "q": 1}},
    "kv_write": {"coefficients": {"t0_us": 2, "bytes_per_s": 1e12}},
    "elementwise": {"coefficients": {"t0_us": 8, "bytes_per_s": 1e12}},
    "embedding": {"coefficients": {"t0_us": 2, "bytes_per_s": 1e12}},
    "block_copy": {"coefficients": {"t0_us": 4, "bytes_per_s": 0.5e12}},
    "swap_out": {"coefficients": {"t0_us": 20, "bytes_per_s": 20e9, "each_us": 2}},
    "swap_in": {"coefficients": {"t0_us": 20, "bytes_per_s": 25e9, "each_us": 3}},
    "step": {"coefficients": {"t0_us": 300, "each_us": 0.5}},
}
#: Twice as long from 4,096 tokens a sequence on, as before up to 1,024.
LONGER = {"axes": ["length"], "knots": [[1024, 4096]], "log_ratios": [0, 0.6931471805599453]}


def document(**ops: Any) -> dict[str, Any]:
    """A calibration file, with other entries for some operations; None leaves one out."""
    entries = {name: entry for name, entry in (OPS | ops).items() if entry is not None}
    head = {
        "schema_version": 1,
        "kind": "calibration",
        "source": "made up",
        "device": {"name": "test"},
        "dtype": "fp16",
    }
    return head | {"ops": entries}


def calibration(**ops: Any) -> Calibration:
    """The same, read."""
    return Calibration(json.dumps(document(**ops)).encode(), "made-up.json")
