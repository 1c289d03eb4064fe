"""A slider of a page over finished results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True)
class Axis:
    """A slider.

    Attributes:
        name: Its setting.
        label, unit, about: In words.
        values: As a command line has them, in the order of the slider.
        start: Index of the first value that is shown.
        is_crossed: Whether every combination with the other crossed axes was run; else the other axes that are not
            crossed are at their start wherever it is not.
    """

    name: str
    label: str
    unit: str
    about: str
    values: tuple[str, ...]
    start: int
    is_crossed: bool


def axes_data(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """The axes for the script."""
    return [
        {
            "name": axis.name, "label": axis.label, "unit": axis.unit, "values": axis.values, "start": axis.start,
            "crossed": axis.is_crossed,
        }
        for axis in axes
    ]  # fmt: skip


def num_states(axes: Sequence[Axis]) -> int:
    """Positions of the sliders: each combination of the crossed axes, with one of the others away from its start, or none."""
    varied = sum(len(axis.values) - 1 for axis in axes if not axis.is_crossed)
    return prod(len(axis.values) for axis in axes if axis.is_crossed) * (1 + varied)
