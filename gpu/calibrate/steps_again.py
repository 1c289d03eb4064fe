"""The whole steps of a calibration, measured again on another skeleton of the same model.

On a GPU the operations of a calibration come from replayed graphs, and two calibrations of one card agree to 0.5 %. What a step takes
beyond them is gaps between kernels and the host's work, which changes within minutes: 0.8 ms a step in one run and 1.3 ms in the next. A
validation therefore measures the calibration's steps again beside its own, by the same shapes, and keeps the operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..devices import timing
from ..model.skeleton import Skeleton
from . import points
from .calibrate import Watch, beside, unwatched, with_spread
from .fitting import fit
from .grid import CUDA, QUICK
from .probes import Probes, StepProbe

#: What is fitted to whole steps.
OF_STEPS = ("step", "prefill_step", "launches")


class StepsAgain:
    """Whole steps, measured in one or more parts.

    Args:
        skeleton: The skeleton that runs them.
        calibrated: The content of a calibration file of the same device. Steps that it lacks are left out.

    Attributes:
        count: Number of steps; 0 if the file has none of them, or is of another model or dtype, and nothing can be measured.
        drifts: By how much longer the steps took than in the calibration, as a share: the median, for each part.
    """

    def __init__(self, skeleton: Skeleton, calibrated: Mapping[str, Any]) -> None:
        self._stopwatch, self._calibrated = timing.stopwatch(skeleton.device), calibrated
        self._then, self._seed = calibrated.get("points", ()), calibrated.get("seed", 0)
        self._us_of = {points.key(point): point["us"] for point in self._then}
        self._grid = QUICK if calibrated.get("quick") else CUDA
        with torch.inference_mode():
            found = list(Probes(skeleton, self._grid, self._stopwatch, self._seed).steps())
        if _kind(calibrated) != (skeleton.model.name, skeleton.dtype, skeleton.kv_cache_dtype):
            found = []
        then_us = [(step, self._then_us(step)) for step in found]
        self._steps = [step for step, us in then_us if us is not None]
        self.count = len(self._steps)
        self._whole_us = np.array([us for _, us in then_us if us is not None])
        self._us: list[list[float]] = [[] for _ in self._steps]
        self._samplers: list[timing.Sampler] = []
        self.drifts: list[float] = []

    @torch.inference_mode()
    def measure(self, parts: int, watch: Watch = unwatched) -> None:
        """Measure one of so many parts: together they take as many samples of every step as the calibration, or more."""
        if not self._samplers:
            self._samplers = [self._stopwatch.sampler(step.work, captured=False) for step in self._steps]
        rounds = -(-self._grid.rounds // parts)
        part_us: list[list[float]] = [[] for _ in self._steps]
        samples = timing.interleaved(self._samplers, rounds, self._seed + len(self.drifts))
        for index, us in watch(samples, total=rounds * len(self._steps)):
            part_us[index].append(us)
        for every_us, us in zip(self._us, part_us, strict=True):
            every_us += us
        self.drifts.append(float(np.median(np.median(part_us, axis=1) / self._whole_us)) - 1)

    def document(self) -> dict[str, Any]:
        """The calibration file with the steps of all parts so far; ``step_drifts`` are :attr:`drifts`."""
        timings = [timing.timing(us, self._stopwatch.quantile) for us in self._us]
        again = [beside(step, taken, self._us_of) for step, taken in zip(self._steps, timings, strict=True)]
        # A step that the pool has no room for is as it was.
        others = [point for point in self._then if not any(_is_same_step(point, step) for step in again)]
        steps = again + [point for point in others if point["op"] in OF_STEPS]
        fitted = with_spread(fit(steps, overlapped=True), steps)
        # Those of steps with prompts belong together.
        stale = {*fitted, "launches"} if "prefill_step" in fitted else {*fitted}
        kept = {name: entry for name, entry in self._calibrated["ops"].items() if name not in stale}
        drifts = [round(drift, 4) for drift in self.drifts]
        return {**self._calibrated, "step_drifts": drifts, "ops": kept | fitted, "points": others + again}

    def _then_us(self, step: StepProbe) -> float | None:
        """Time of the step in the calibration, which is found by the time of its operations; None if it is not there."""
        if any(points.key(part) not in self._us_of for _, part in step.parts):
            return None
        parts_us = sum(count * self._us_of[points.key(part)] for count, part in step.parts)
        wanted = step.point | {"parts_us": parts_us}
        return next((point["whole_us"] for point in self._then if _is_same_step(point, wanted)), None)


def _kind(calibrated: Mapping[str, Any]) -> tuple[Any, ...]:
    return calibrated.get("model"), calibrated.get("dtype"), calibrated.get("kv_cache_dtype", "auto")


def _is_same_step(point: points.Point, step: points.Point) -> bool:
    """Whether a point is of a step: by its operation and sizes, and by the time of its operations, as lengths are not among the sizes."""
    sizes = ("op", "rows", "tokens", "kv_bytes")
    if "parts_us" not in point or any(point.get(name) != step.get(name) for name in sizes):
        return False
    return math.isclose(point["parts_us"], step["parts_us"])
