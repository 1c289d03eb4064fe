"""The parts of a step's time, for the compiled core."""

from __future__ import annotations

from .base import StepCost, StepParts
from .calibrated import CalibratedCost
from .roofline import RooflineCost
from .server import ServedCost


def step_parts(cost: StepCost) -> StepParts | None:
    """The parts of a cost model of this package; None for any other class, since a subclass may change step times."""
    if type(cost) is ServedCost:
        inner = step_parts(cost.inner)
        return inner and cost.parts(inner)
    if type(cost) in (CalibratedCost, RooflineCost):
        assert isinstance(cost, CalibratedCost | RooflineCost)
        return cost.parts()
    return None
