"""Detects drift of a machine since its calibration, by measuring some calls of the calibration again.

Other processes, a warmer chip or another clock frequency make every prediction wrong by the same factor, which is not an
error of the step model. The report states the drift, and no result is corrected by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..calibrate import points
from ..calibrate.grid import Grid
from ..calibrate.points import Point
from ..calibrate.probes import Probes
from ..devices import timing
from ..model.skeleton import Skeleton

#: Operations measured again: GEMMs of a decode step, the operations between them, and attention.
AGAIN = Grid(
    tokens=(16,),
    head_rows=(4, 16),
    batches=(8,),
    contexts=(64, 128),
    ragged=(),
    block_sizes=(),
    shared=(),
    contiguous=(),
    chunks=(),
    prefixes=(),
    prompts=(),
    mixed=(),
    moved_blocks=(),
    steps=(),
    rounds=5,
    pool_bytes=None,
)


class Drift:
    """Measures a machine's drift from time to time.

    Args:
        skeleton: Skeleton of the calibrated model.
        calibrated: The calibration's points.
        seed: The calibration's seed, so that lengths are the same.
    """

    def __init__(self, skeleton: Skeleton, calibrated: Sequence[Point], seed: int) -> None:
        self._stopwatch, self._seed = timing.stopwatch(skeleton.device), seed
        known, probes = {points.key(point) for point in calibrated}, Probes(skeleton, AGAIN, self._stopwatch, seed)
        again = [probe for probe in probes.operations() if points.key(probe.point) in known]
        self._keys = [points.key(probe.point) for probe in again]
        self._kinds = [points.kind(probe.point) for probe in again]
        self._samplers = [self._stopwatch.sampler(probe.work, probe.captured) for probe in again]
        self._now_us: list[np.ndarray] = []
        self.compare(calibrated)

    def compare(self, calibrated: Sequence[Point]) -> None:
        """Compare with these points instead, of the same calls: a calibration in parts changes after each of them."""
        us_of = {points.key(point): point["us"] for point in calibrated}
        self._then_us = np.array([us_of[key] for key in self._keys])

    @property
    def looks(self) -> list[float]:
        """Relative slowdown at each look; empty if nothing is compared."""
        return [float(np.median(now_us / self._then_us)) - 1 for now_us in self._now_us]

    @torch.inference_mode()
    def look(self) -> None:
        """Measure all calls."""
        samples: list[list[float]] = [[] for _ in self._samplers]
        for index, us in timing.interleaved(self._samplers, AGAIN.rounds, self._seed, self._kinds):
            samples[index].append(us)
        if samples:
            self._now_us.append(np.array([timing.timing(taken, self._stopwatch.quantile).us for taken in samples]))

    def as_dict(self) -> dict[str, Any]:
        """``calls``: number of compared calls; ``looks`` and ``median``: relative slowdowns and their median."""
        looks = [round(look, 4) for look in self.looks]
        return {"calls": len(self._samplers), "looks": looks, "median": float(np.median(looks)) if looks else None}
