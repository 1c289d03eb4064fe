"""The inputs that the bill of a recommendation depends on most: its change when one of them changes by a tenth.

    T         rate, requests/s, that the fleet sustains with 90 % of other seeds, with 95 % confidence
    f         the highest rate of the first seed with the change, over that without it; 1 for the price and the wanted rate
    bill      price x replicas x wanted rate / (T f): as if replicas were divisible
    replicas  with a change for the worse no fewer than without it, and as many as serve the wanted rate if T f is proportional to
              their number; with one for the better as many as before times the change of the bill, rounded up

The recommended fleet may take much more than the wanted rate, where one replica fewer is not confirmed: T does not say that fewer are
enough, with or without a change for the better.

Objectives and step times are changed in simulations of the fleet; price and wanted rate need none. A plan without a wanted rate has the price of a token
in place of the bill, and no replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import NamedTuple

from ...sim.cluster import Cluster
from ...sim.config.settings import Settings
from ..runs.slo_check import Goal, compiled_cost
from .fleet import first_fleet, highest_rate
from .load import Load

#: Relative change of an input.
CHANGE = 0.1
PRICE, WANTED, STEP_TIME = "price of a GPU", "wanted rate", "step time"


class Change(NamedTuple):
    """One changed input: ``STEP_TIME``, or the name of an objective; and the factor on it."""

    name: str
    factor: float


@dataclass(frozen=True)
class Effect:
    """The effect of one changed input.

    Attributes:
        factor: On the input.
        bill: Relative to the bill with nothing changed; None if no rate meets the goal.
        replicas: Replicas for the wanted rate; None without one, or if no rate meets the goal.
    """

    factor: float
    bill: float | None
    replicas: int | None

    @property
    def percent(self) -> float | None:
        """Change of the bill."""
        return None if self.bill is None else 100 * (self.bill - 1)


@dataclass(frozen=True)
class Influence:
    """The effects of an input that is a tenth lower, and a tenth higher."""

    name: str
    lower: Effect
    higher: Effect

    @property
    def label(self) -> str:
        """The name as text; objectives are in capitals."""
        return self.name if self.name in (PRICE, WANTED, STEP_TIME) else self.name.upper()

    @property
    def range(self) -> float:
        """Difference of the two bills; infinite if with one of them no rate meets the goal."""
        if self.higher.bill is None or self.lower.bill is None:
            return inf
        return abs(self.higher.bill - self.lower.bill)


def relative_bill(unchanged: float, rate: float) -> float:
    """The bill at the highest rate with a change, over that without it; infinite if no rate meets the goal."""
    return unchanged / rate if rate else inf


def changes(goal: Goal) -> list[Change]:
    """The changes that have to be simulated."""
    names = STEP_TIME, *goal.objectives.limits
    return [Change(name, factor) for name in names for factor in (1 - CHANGE, 1 + CHANGE)]


def changed_rate(
    settings: Settings,
    load: Load,
    goal: Goal,
    seed: int,
    cluster: Cluster,
    wanted: float,
    most: float | None,
    change: Change,
) -> float:
    """The highest rate of a fleet with one changed input, requests/s; arguments are those of ``highest_rate``."""
    name, factor = change
    if name == STEP_TIME:
        scale = getattr(compiled_cost(settings), "scale", 1.0)
        settings = replace(settings, step_scale=scale * factor)
        most = None if most is None else most / factor
    else:
        goal = goal.scaled(factor, [name])
    found = highest_rate(settings, load, goal, seed, cluster, wanted, most)
    return found if most is None else min(found, most)


def effect_of(
    factor: float,
    relative: float,
    margin: float,
    replicas: int | None,
    engines: int = 1,
    *,
    worse: bool,
    price: bool = False,
) -> Effect:
    """The effect of an input times a factor.

    Args:
        relative: The highest rate without the change, over that with it; infinite if no rate meets the goal.
        margin, replicas, engines: As ``influences`` has them.
        worse: Whether the change is one for the worse. A search may find a rate some per mil higher with it, or lower with one for the
            better.
        price: Whether the input is the price, which does not change the fleet.
    """
    if relative == inf:
        return Effect(factor, None, None)
    needed = replicas
    if replicas is not None and not price:
        counted = engines * first_fleet(replicas * relative, engines * margin if worse else engines)
        needed = max(replicas, counted) if worse else min(replicas, counted)
    return Effect(factor, relative, needed)


def influences(
    found: Mapping[Change, float], unchanged: float, margin: float, replicas: int | None, engines: int = 1
) -> tuple[Influence, ...]:
    """The influences, largest first.

    Args:
        found: The highest rate with each change.
        unchanged: The same with none.
        margin: T over the wanted rate.
        replicas: Replicas of the fleet; None without a wanted rate.
        engines: Fleets are multiples of so many replicas, which share experts.
    """

    effect = partial(effect_of, margin=margin, replicas=replicas, engines=engines)
    low, high = 1 - CHANGE, 1 + CHANGE
    prices = effect(low, low, worse=False, price=True), effect(high, high, worse=True, price=True)
    listed = [Influence(PRICE, *prices)]
    if replicas is not None:
        listed.append(Influence(WANTED, effect(low, low, worse=False), effect(high, high, worse=True)))
    for name in dict.fromkeys(change.name for change in found):
        effects = [
            # Longer steps are worse, and so are shorter objectives.
            effect(
                factor,
                relative_bill(unchanged, found[Change(name, factor)]),
                worse=(factor > 1) == (name == STEP_TIME),
            )
            for factor in (low, high)
        ]
        listed.append(Influence(name, *effects))
    return tuple(sorted(listed, key=lambda each: -each.range))
