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
from .axis import Axis, axes_data

#: In place of replicas: no rate meets the objectives, and what is not known.
NO_RATE, NOT_KNOWN = -1, -2


@dataclass(frozen=True)
class Offer:
    """A candidate.

    Attributes:
        name: As the plan calls it.
        gpu: Name of its GPU.
        gpus_a_replica: Number of GPUs.
        price_a_replica: For an hour.
        replicas: By state, numbered as those of ``experiments.explore.axes``; ``NO_RATE`` or ``NOT_KNOWN`` without any.
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
