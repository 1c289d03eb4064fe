"""Cases of the package, run through the kernels' CPU build with threads in any order, and bugs to plant."""

from __future__ import annotations

import numpy as np

from fragmeter.gpu.check.cases import TOLERANCE, Case, case, error, expected, numpy_dtype, slots_of
from fragmeter.gpu.ops import arrays, paged_attention, source
from fragmeter.gpu.ops.cpu_kernels import CpuKernels
from fragmeter.gpu.ops.source import Kernel

__all__ = [
    "DTYPES",
    "TOLERANCE",
    "Case",
    "case",
    "error",
    "expected",
    "plant_attention",
    "planted",
    "run",
    "slots_of",
]
#: numpy's dtypes by the kernels' names.
DTYPES = {name: numpy_dtype(name) for name in TOLERANCE}


def run(given: Case, blocks: int | None = None, seed: int = 0) -> np.ndarray:
    """The kernels over it, threads in the order of ``seed``."""
    named = vars(given) | {"out": np.full_like(given.query, np.nan)}
    sizes = {name: named.pop(name) for name in ("block_size", "max_context_len")}
    views = {name: arrays.view(name, array) for name, array in named.items()}
    call = paged_attention.checked(**views, **sizes)
    call.prepared(CpuKernels(seed), blocks).launch()
    return named["out"]


def planted(kernel: Kernel, right: str, wrong: str) -> Kernel:
    """The kernel with a bug.

    Raises:
        LookupError: The text has no place for it, or several. No assertion, which a test would take for the bug's discovery.
    """
    if kernel.text.count(right) != 1:
        raise LookupError(f"the bug has {kernel.text.count(right)} places: {right!r}")
    return Kernel(kernel.text.replace(right, wrong), kernel.expression)


def plant_attention(monkeypatch, right: str, wrong: str) -> None:
    """A bug in the attention kernels, wherever they are asked for."""
    whole = source.attention
    monkeypatch.setattr(source, "attention", lambda expression: planted(whole(expression), right, wrong))
