"""Sliders on the page of a plan: what the load would cost if its rate, its lengths or the objectives were others.

The page computes no fleet: a position of the sliders is the number of a state, of which it has the replicas of each candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from ..style.packing import packed

#: In place of replicas: no rate meets the objectives, and what is not known.
NO_RATE, NOT_KNOWN = -1, -2


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


@dataclass(frozen=True)
class Offer:
    """A candidate.

    Attributes:
        name: As the plan calls it.
        gpu: Name of its GPU.
        gpus_a_replica: Number of GPUs.
        price_a_replica: For an hour.
        replicas: By state, numbered by ``states`` of ``experiments.capacity.what_if``; ``NO_RATE`` or ``NOT_KNOWN`` without any.
    """

    name: str
    gpu: str
    gpus_a_replica: int
    price_a_replica: float
    replicas: Sequence[int]


@dataclass(frozen=True, eq=False)
class WhatIf:
    """The widget.

    Attributes:
        axes: The crossed ones first.
        offers: The candidates, that of the plan first.
        currency: Of the prices; None where GPUs are counted.
    """

    axes: Sequence[Axis]
    offers: Sequence[Offer]
    currency: str | None
    kind: ClassVar[str] = "what_if"
    figures: ClassVar[Sequence[go.Figure]] = ()
    constants: ClassVar[Mapping[str, Any]] = {}

    @property
    def sliders(self) -> Sequence[Axis]:
        """The axes."""
        return self.axes

    @property
    def data(self) -> Any:
        """All states, for the script: the replicas are int [states, candidates]."""
        return {
            "axes": axes_data(self.axes),
            "offers": [[each.name, each.gpu, each.gpus_a_replica, each.price_a_replica] for each in self.offers],
            "replicas": packed(np.array([each.replicas for each in self.offers]).T),
            "currency": self.currency,
            "why": {str(NO_RATE): "no rate meets these objectives", str(NOT_KNOWN): "not known"},
        }
