"""The parts of a GPU's memory that vLLM logs at its start, by the words of its releases.

    Model loading took 14.99 GiB                                       all (0.5 to 0.7 say GB, which are GiB too)
    total_gpu_memory (79.19GiB) x gpu_memory_utilization (0.90) ...    V0 engine, with all parts
    Memory profiling takes ...; torch peak memory increase: ...        VLLM_LOGGING_LEVEL=DEBUG
    Free memory on device cuda:0 (78.68/79.19 GiB) on startup ...      since 0.10.2 at the end of a start; since 0.9 as a refusal
    Actual usage is ... for weight, ... peak activation, ...           0.10.2 to 0.26
    Actual usage is ... for consumed memory (weights + non-torch) ...  since 0.27, with the estimate of CUDA graphs in the peak
    Graph capturing finished in 20 secs, took 0.55 GiB                 what the capture took
    Estimated CUDA graph memory: 0.71 GiB total                        since 0.18, what is subtracted where the estimate counts

as ``gpu_worker.py``, ``gpu_model_runner.py`` and ``mem_utils.py`` of the wheels of 0.8 to 0.33 say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from ...sim.spec.gpu import GIB

#: A number of GiB, as a log writes it.
_GIB = r"(-?\d{1,7}(?:\.\d*)?)\s?Gi?B"
_NUMBER = r"(-?\d{1,7}(?:\.\d*)?)"


@dataclass(frozen=True)
class LoggedParts:
    """Parts of the memory of one GPU in GiB; None for what a log does not say.

    Of several ranks it is the largest of each, and the least that is free, since the rank with the least room decides.

    Attributes:
        total, free: Of the GPU, and free at the start of the worker.
        utilization: Share of the total that is requested.
        requested: That share in GiB.
        weights: As loaded, with a drafter's.
        peak_activation: Of the profiled step; beside ``consumed`` with the estimate of CUDA graphs.
        non_torch: Outside of torch, less what was there at the start of the worker.
        consumed: Weights, what else torch keeps, and memory outside of torch (since 0.27).
        graphs_estimated: CUDA graphs by the estimate before they are captured.
        graphs_captured: CUDA graphs by what the capture took.
    """

    total: float | None = None
    free: float | None = None
    utilization: float | None = None
    requested: float | None = None
    weights: float | None = None
    peak_activation: float | None = None
    non_torch: float | None = None
    consumed: float | None = None
    graphs_estimated: float | None = None
    graphs_captured: float | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) is not None for each in fields(self))

    def sizes(self) -> dict[str, int]:
        """Bytes of the parts by the names of ``sim.spec.startup``, where the log has them apart.

        What a capture took is no estimate of it, and consumed memory is no single part.
        """
        named = {
            "weights": self.weights,
            "activations": self.activations,
            "non_torch": self.non_torch,
            "cuda_graphs": self.graphs_estimated,
        }
        return {name: round(value * GIB) for name, value in named.items() if value is not None}

    @property
    def activations(self) -> float | None:
        """Peak of the profiled step without the estimate of CUDA graphs, which is in it since 0.27."""
        if self.peak_activation is None or self.consumed is None:
            return self.peak_activation
        return self.peak_activation - (self.graphs_estimated or 0.0)

    def left(self) -> float | None:
        """What the parts leave of the requested memory, without an estimate of CUDA graphs; None if one is missing."""
        if self.requested is None or self.peak_activation is None:
            return None
        if self.consumed is not None:
            return self.requested - self.consumed - self.peak_activation
        if self.weights is None or self.non_torch is None:
            return None
        return self.requested - self.weights - self.non_torch - self.peak_activation


#: The fields that the groups of an expression give.
_LINES = (
    (re.compile(rf"[Mm]odel (?:loading|weights) took {_GIB}"), ("weights",)),
    (
        re.compile(rf"total_gpu_memory \({_GIB}\) x gpu_memory_utilization \({_NUMBER}\) = {_GIB}"),
        ("total", "utilization", "requested"),
    ),
    (
        re.compile(
            rf"model weights take {_GIB}; non_torch_memory takes {_GIB}; PyTorch activation peak memory takes {_GIB}"
        ),
        ("weights", "non_torch", "peak_activation"),
    ),
    (re.compile(rf"torch peak memory increase: {_GIB}"), ("peak_activation",)),
    (re.compile(rf"non-torch (?:forward )?increase(?: memory)?: {_GIB}"), ("non_torch",)),
    (re.compile(rf"Free memory on device(?: \S+)? \({_NUMBER}/{_GIB}\) on startup"), ("free", "total")),
    (re.compile(rf"[Dd]esired GPU memory utilization (?:is )?\({_NUMBER}, {_GIB}\)"), ("utilization", "requested")),
    (
        re.compile(rf"Actual usage is {_GIB} for weight, {_GIB} for peak activation, {_GIB} for non-torch memory"),
        ("weights", "peak_activation", "non_torch"),
    ),
    (
        re.compile(rf"Actual usage is {_GIB} for consumed memory[^,]*, {_GIB} for peak activation"),
        ("consumed", "peak_activation"),
    ),
    (re.compile(rf"Graph capturing finished in {_NUMBER} secs?, took {_GIB}"), (None, "graphs_captured")),
    (re.compile(rf"Estimated CUDA graph memory: {_GIB}"), ("graphs_estimated",)),
    (
        re.compile(rf"CUDA graph pool memory: {_GIB} \(actual\), {_GIB} \(estimated\)"),
        ("graphs_captured", "graphs_estimated"),
    ),
)


def read_parts(text: str) -> LoggedParts:
    """The parts in a log."""
    found: dict[str, float] = {}
    for expression, names in _LINES:
        for groups in expression.findall(text):
            values = (groups,) if isinstance(groups, str) else groups
            for name, value in zip(names, values, strict=True):
                if name is not None:
                    least = min if name == "free" else max
                    found[name] = least(found.get(name, float(value)), float(value))
    return LoggedParts(**found)
