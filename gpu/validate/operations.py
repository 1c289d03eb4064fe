"""Times of the operations of a step while the step runs, each compared with its prediction.

A step of the skeleton runs call by call under a clock. On a CPU the clock is the CPU time of the thread. On a
GPU events surround the calls. The calls are queued behind a kernel that waits, so that the device never waits for
the host; host time is therefore not included.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...sim.cost.calibration import Calibration
from ...sim.cost.operations import OPERATIONS
from ...sim.recording.plans import Plan
from ...sim.spec import ModelSpec
from ...sim.spec.deployment import padded_batch
from ..calibrate import points
from ..calibrate.points import Point
from ..devices import timing
from ..model.batch import Inputs
from ..model.calls import StepCalls
from ..model.executor import MOVES, moves_of
from ..model.layers import Matrix, multiply
from ..model.skeleton import Skeleton
from .validate import batch_of, compared

#: The short operations: all except GEMMs, attention and moves. A calibration assigns the overhead of a step beyond its
#: individually measured operations to ``step``, so only the sum of these operations can be compared.
BESIDE = ("embedding", "elementwise", "kv_write", "step")
#: GPU cycles, about 50 ms: enough time to queue a step.
AHEAD_CYCLES = 100_000_000


#: Times by name; a name that never ran is left out.
Microseconds = dict[str, float]


class Clock(Protocol):
    """Adds up microseconds by name; calls may be nested."""

    def begin(self) -> None:
        """Start a step and reset the times."""

    def timed(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function, add its time to ``name``, and return its result."""

    def read(self) -> Microseconds:
        """The times since :meth:`begin`."""


class CpuClock:
    """:class:`Clock` of this thread's CPU time."""

    def begin(self) -> None:
        """As in :class:`Clock`."""
        self._us: Microseconds = {}

    def timed(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """As in :class:`Clock`."""
        start = time.thread_time_ns()
        found = call(*arguments)
        self._us[name] = self._us.get(name, 0.0) + (time.thread_time_ns() - start) / 1e3
        return found

    def read(self) -> Microseconds:
        """As in :class:`Clock`."""
        return self._us


class CudaClock:
    """:class:`Clock` of events on the current stream."""

    def begin(self) -> None:
        """As in :class:`Clock`; also makes the device wait."""
        self._spans: list[tuple[str, Any, Any]] = []
        torch.cuda._sleep(AHEAD_CYCLES)

    def timed(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """As in :class:`Clock`."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        found = call(*arguments)
        end.record()
        self._spans.append((name, start, end))
        return found

    def read(self) -> Microseconds:
        """As in :class:`Clock`; waits for the device."""
        torch.cuda.synchronize()
        found: Microseconds = {}
        for name, start, end in self._spans:
            found[name] = found.get(name, 0.0) + start.elapsed_time(end) * 1e3
        return found


class TimedStep:
    """Runs steps of a skeleton call by call."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._on_gpu = skeleton.device.torch_device.type == "cuda"
        self._clock: Clock = CudaClock() if self._on_gpu else CpuClock()

    @torch.inference_mode()
    def operations_us(self, plan: Plan, step: int) -> Microseconds:
        """Microseconds of each operation of a step, summed over its calls."""
        self._clock.begin()
        for name, pairs in moves_of(plan, plan.step(step)).items():
            self._clock.timed(name, MOVES[name], self._skeleton.pool, pairs)
        batch = batch_of(plan, step)
        self._clock.timed("whole", lambda: self._forward(self._skeleton.inputs(batch)))
        us = self._clock.read()
        in_layers = sum(us.get(name, 0.0) for name in ("gemm", "kv_write", "decode_attention", "prefill_attention"))
        beside = us.pop("whole") - us["layer"] - us["head"] - us["embedding"]
        if not self._on_gpu:
            us["step"] = beside
        us["elementwise"] = us.pop("layer") - in_layers
        us["gemm"] += us.pop("head")
        return us

    def _forward(self, inputs: Inputs) -> Tensor:
        weights, timed = self._skeleton.weights, self._clock.timed
        hidden, rotary = timed("embedding", weights.embed, inputs.token_ids, inputs.positions)
        calls = StepCalls(self._skeleton.device, inputs)
        for number, layer in enumerate(weights.layers):
            attending = functools.partial(self._attend, number, calls)
            hidden = timed("layer", layer.forward, hidden, rotary, attending, self._multiply)
        return timed("head", weights.logits, hidden[inputs.last_tokens])

    def _multiply(self, hidden: Tensor, matrix: Matrix) -> Tensor:
        return self._clock.timed("gemm", multiply, hidden, matrix)

    def _attend(self, layer: int, calls: StepCalls, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        caches, timed = self._skeleton.pool.layer(layer), self._clock.timed
        timed("kv_write", calls.write, key, value, *caches)
        out = torch.empty_like(query)
        for name, attention in (("decode_attention", calls.decodes), ("prefill_attention", calls.prefills)):
            if attention is not None:
                timed(name, attention, out[attention.tokens], query[attention.tokens], *caches)
        return out


def operations_compared(
    skeleton: Skeleton,
    plan: Plan,
    calibration: Calibration,
    steps: Sequence[int],
    rounds: int,
    watch: Callable[..., Any],
) -> dict[str, dict[str, Any]]:
    """Errors of each operation, over the selected steps that have it; ``beside`` is the sum of :data:`BESIDE`.

    Args:
        plan: A paged plan.
        steps: Indices of the steps to measure.
        rounds: Interleaved samples of each step, after one warm-up.
        watch: Passes the samples on and shows progress.
    """
    timed, quantile = TimedStep(skeleton), timing.stopwatch(skeleton.device).quantile
    samples: dict[int, list[Microseconds]] = {step: [] for step in steps}
    for step in watch([*steps] * (rounds + 1), len(steps) * (rounds + 1)):
        samples[step].append(timed.operations_us(plan, step))
    sides: dict[str, list[tuple[float, float]]] = {}
    for step, counted in samples.items():
        predicted = predicted_us(calibration, skeleton.model, plan, step, skeleton.captures, skeleton.kv_cache_dtype)
        measured = {
            name: float(np.quantile([one.get(name, 0.0) for one in counted[1:]], quantile)) for name in counted[0]
        }
        for one in (predicted, measured):
            one["beside"] = sum(one.get(name, 0.0) for name in BESIDE if name in measured)
        for name, us in measured.items():
            sides.setdefault(name, []).append((predicted.get(name, 0.0), us))
    return {name: compared(*np.transpose(both)) for name, both in sides.items()}


def predicted_us(
    calibration: Calibration,
    model: ModelSpec,
    plan: Plan,
    step: int,
    captures: bool = False,
    kv_cache_dtype: str = "auto",
) -> Microseconds:
    """The calibration's prediction for each operation of a step; ``captures``: steps that only decode are padded."""
    found, block_size = plan.step(step), plan.meta["block_size"]
    lens, contexts = found.query_tokens.tolist(), found.context_lens.tolist()
    padded = captures and max(lens, default=1) == 1
    rows = padded_batch(len(lens)) if padded else None
    calls = points.operations_of_step(model, lens, contexts, block_size, rows, kv_cache_dtype)
    moves = moves_of(plan, found).items()
    calls += [(1, points.move(name, model, len(pairs), block_size, kv_cache_dtype)) for name, pairs in moves]
    us: Microseconds = {}
    host = points.step(lens)
    if host["op"] not in calibration.ops:
        host = points.step([1] * len(lens))
    # By how much GEMMs are longer behind reads of KV is measured with whole steps.
    slot_bytes = model.slot_bytes(points.KV_DTYPES[kv_cache_dtype])
    decodes = [context for new, context in zip(lens, contexts, strict=True) if new == 1]
    alone, behind_kv = (points.step([1] * len(decodes), read) for read in (0, sum(decodes) * slot_bytes))
    us["gemm"] = _point_us(calibration, behind_kv) - _point_us(calibration, alone)
    for count, point in [*calls, (1, host)]:
        # What a step takes beyond its operations is measured under one name.
        name = "step" if point is host else point["op"]
        us[name] = us.get(name, 0.0) + count * _point_us(calibration, point)
    return us


def _point_us(calibration: Calibration, point: Point) -> float:
    sizes = {name: size for name, size in point.items() if name != "op"}
    return float(calibration.ops[point["op"]].us(OPERATIONS[point["op"]](**sizes)))


def selected_steps(plan: Plan, count: int) -> list[int]:
    """Steps to measure: half of them from the steps that prefill or move blocks, the others evenly from all steps."""
    moved = sum(np.diff(getattr(plan, f"{move}_offsets")) for move in ("swap_out", "swap_in", "copy"))
    special = np.flatnonzero((plan.prefill_tokens > 0) | (moved > 0))
    return sorted({*_evenly(special, count // 2), *_evenly(np.arange(plan.num_steps), count - count // 2)})


def _evenly(steps: np.ndarray, count: int) -> Iterable[int]:
    return steps[np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int)].tolist()
