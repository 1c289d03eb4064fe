"""The duration of one operation: a few coefficients, and a small table of residuals.

    t = ((t0^q + (flops / flops_per_s)^q + (bytes / bytes_per_s)^q)^(1/q) + each * pieces) * e^residual

``t0`` is the duration of the shortest call. ``q`` is the sharpness of the transition between the bounds: with 1 they
add up; the larger q, the closer t is to the largest of them. Residuals are logarithms of measured over modelled time
on a coarse grid, interpolated linearly in the logarithm of each axis and constant beyond the edges of the grid.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import field, replace
from functools import cached_property, lru_cache
from math import fsum, log2, prod
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from .op_work import Amount, Work

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: A residual beyond 10x is no residual any more.
LogRatio = Annotated[float, Field(ge=-2.4, le=2.4, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Coefficients:
    """The coefficients of an operation.

    Attributes:
        t0_us: Duration of the shortest call.
        flops_per_s, bytes_per_s: Rates of long calls; None if the operation has no such work.
        each_us: Time of each of the call's ``pieces``.
        q: See the module.
    """

    t0_us: NotNegative = 0.0
    flops_per_s: Positive | None = None
    bytes_per_s: Positive | None = None
    each_us: NotNegative = 0.0
    q: Annotated[float, Field(ge=0.25, le=32, allow_inf_nan=False)] = 1.0

    def with_bytes(self, times: float) -> Coefficients:
        """Those of calls that move so many times as many bytes."""
        return self if self.bytes_per_s is None else replace(self, bytes_per_s=self.bytes_per_s / times)

    def scaled(self, factor: float) -> Coefficients:
        """Those of calls that take so many times as long."""
        rates = {name: rate / factor for name in ("flops_per_s", "bytes_per_s") if (rate := getattr(self, name))}
        return replace(self, t0_us=self.t0_us * factor, each_us=self.each_us * factor, **rates)

    def us(self, work: Work) -> np.ndarray:
        """Microseconds of every call, before residuals."""
        calls = np.broadcast_shapes(*map(np.shape, (work.flops, work.bytes, work.pieces)))
        terms = [np.full(calls, self.t0_us, float)]
        for amount, per_s in ((work.flops, self.flops_per_s), (work.bytes, self.bytes_per_s)):
            if per_s is not None:
                terms.append(np.asarray(amount, float) / per_s * 1e6)
        bounds = np.stack(np.broadcast_arrays(*terms))
        # Divided by the largest, so that no power overflows.
        largest = np.maximum(bounds.max(axis=0), 1e-12)
        smooth = largest * np.sum((bounds / largest) ** self.q, axis=0) ** (1 / self.q)
        return smooth + self.each_us * np.asarray(work.pieces, float)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Residuals:
    """A table over ``axes``.

    Attributes:
        axes: Names of ``Work.at``.
        knots: Of each axis, increasing, in its own unit.
        log_ratios: ln(measured / modelled) at every combination of knots, the last axis fastest.
    """

    axes: tuple[str, ...]
    knots: tuple[tuple[Positive, ...], ...]
    log_ratios: tuple[LogRatio, ...]

    @model_validator(mode="after")
    def _check(self) -> Residuals:
        if len(self.axes) != len(self.knots):
            raise ValueError(f"{len(self.axes)} axes need as many lists of knots, not {len(self.knots)}")
        for name, knots in zip(self.axes, self.knots, strict=True):
            if len(knots) < 2 or any(low >= high for low, high in zip(knots, knots[1:])):
                raise ValueError(f"knots of {name} must be two or more, increasing")
        size = prod(map(len, self.knots))
        if len(self.log_ratios) != size:
            raise ValueError(f"log_ratios must be {size}, one a combination of knots, not {len(self.log_ratios)}")
        return self

    def __call__(self, at: Mapping[str, Amount]) -> np.ndarray:
        """Logarithm of measured over modelled time at this position."""
        return sum(weight * self._table[index] for index, weight in corners(self.axes, self.knots, at))

    @cached_property
    def _table(self) -> np.ndarray:
        return np.asarray(self.log_ratios)

    def single(self, at: Mapping[str, Amount]) -> float:
        """The same at one position; without arrays, which take ten times as long for a single one."""
        found = [(0, 1.0)]
        for name, places in zip(self.axes, self._places, strict=True):
            where = min(max(log2(max(float(at[name]), 1e-9)), places[0]), places[-1])
            low = min(bisect_right(places, where) - 1, len(places) - 2)
            share = (where - places[low]) / (places[low + 1] - places[low])
            found = [
                (index * len(places) + low + side, weight * part)
                for index, weight in found
                for side, part in ((0, 1 - share), (1, share))
            ]
        return fsum(weight * self.log_ratios[index] for index, weight in found)

    @cached_property
    def _places(self) -> list[list[float]]:
        return [[log2(knot) for knot in knots] for knots in self.knots]


@lru_cache
def _log2(knots: tuple[float, ...]) -> np.ndarray:
    return np.log2(knots)


def corners(
    axes: tuple[str, ...], knots: tuple[tuple[float, ...], ...], at: Mapping[str, Amount]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Flat index and weight of each knot around ``at``: interpolation in the logarithm of every axis."""
    found = [(np.asarray(0), np.asarray(1.0))]
    for name, values in zip(axes, knots, strict=True):
        places = _log2(values)
        where = np.minimum(np.maximum(np.log2(np.maximum(at[name], values[0])), places[0]), places[-1])
        low = np.minimum(places.searchsorted(where, side="right") - 1, len(places) - 2)
        share = (where - places[low]) / (places[low + 1] - places[low])
        found = [
            (index * len(places) + low + side, weight * part)
            for index, weight in found
            for side, part in ((0, 1 - share), (1, share))
        ]
    return found


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OtherMemory:
    """Times of a card from those of another card with the same chip and other memory.

    A call is bound by its memory and by all else (launches, compute, requests in flight), which is the same on both:

        t_measured^2 = rest^2 + (bytes / measured)^2        t^2 = rest^2 + (bytes / own)^2

    The exponent is that of the one pair of cards with tables of both, H100 and H200: of 1 to 8 it gives the smallest errors of GEMMs,
    attention and experts together (``tests/sim/cost/test_other_memory.py``).

    Attributes:
        measured_bytes_per_s, bytes_per_s: What the memory of the measured and of this card delivers.
    """

    measured_bytes_per_s: Positive
    bytes_per_s: Positive

    def us(self, measured: np.ndarray, work: Work) -> np.ndarray:
        """Microseconds of calls that take ``measured`` on the other card."""
        moved = np.asarray(work.bytes, float) * 1e6
        rest = np.maximum(measured**2 - (moved / self.measured_bytes_per_s) ** 2, 0)
        return np.sqrt(rest + (moved / self.bytes_per_s) ** 2)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OpModel:
    """One operation on one device.

    Attributes:
        source: Source of the numbers, if other than that of the file.
        fit: Description and errors of the fit, for readers.
        shapes: Models of single shapes, by ``experts_name``; they hold for no other.
        query_group: Query heads of a KV head of the measured model, for which alone mixed attention holds; None for any.
        memory: Of a card that has the model of another card with the same chip; None where the model is of the card's own calls.
    """

    coefficients: Coefficients
    residuals: Residuals | None = None
    source: str | None = None
    fit: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, OpModel] = field(default_factory=dict)
    query_group: Annotated[int, Field(ge=1)] | None = None
    memory: OtherMemory | None = None

    def us(self, work: Work) -> np.ndarray:
        """Microseconds of a call, or of an array of calls."""
        modelled = self.coefficients.us(work)
        found = modelled if self.residuals is None else modelled * np.exp(self.residuals(work.at))
        return found if self.memory is None else self.memory.us(found, work)
