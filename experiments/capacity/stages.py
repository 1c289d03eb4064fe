"""The jobs of the steps of a plan (``planning``): each is a function of its settings, load, goal, seed and further arguments."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict
from math import inf
from typing import Any

from ...sim.cluster import Cluster
from ...sim.config.settings import Settings
from ...sim.config.unread import only_read
from ...sim.types.errors import UserError
from ...sim.types.optional import not_none
from ..runs.slo_check import Goal
from ..runs.sweeping import Outcome
from .confidence import Kind
from .day import full_load, served_day
from .detail import detail
from .fleet import apart, check_fleet, highest_rate, known_rate, meets_case, scaled, takes_rate
from .load import Load
from .max_rate import follow, go_ahead, limits
from .split import best_share
from .steady import Steady
from .what_if import changed_rates


def _fleet(chosen: Settings, load: Load, goal: Goal, seed: int, cluster: Cluster, rate: float) -> dict[str, Any]:
    drawn = load.draw(seed, cluster.size)
    return {Kind.SHARE: check_fleet(chosen, drawn.at(rate), cluster, goal).attained}


def _takes(*arguments: Any) -> dict[str, Any]:
    return {Kind.MEETS: takes_rate(*arguments)}


def _case(*arguments: Any) -> dict[str, Any]:
    return {Kind.CASE: meets_case(*arguments)}


def _headroom(*arguments: Any) -> dict[str, Any]:
    return _rate_data(highest_rate(*arguments))


def _known_rate(chosen: Settings, load: Load, goal: Goal, seed: int, *more: Any) -> dict[str, Any]:
    return _rate_data(known_rate(chosen, load, seed, *more))


def _rate_data(rate: float) -> dict[str, Any]:
    # JSON has no infinity.
    return {Kind.RATE: None if rate == inf else rate}


def _limits(*arguments: Any) -> dict[str, Any]:
    found = limits(*arguments)
    return {"alone": asdict(found.alone), "saturated": found.saturated}


def _rough(chosen: Settings, load: Load, goal: Goal, seed: int, scale: float) -> dict[str, Any]:
    return _rate_data(Steady(scaled(chosen, scale), load.draw(seed).at(1.0), goal).rate())


def _sides(chosen: Settings, load: Load, goal: Goal, seed: int, scale: float) -> dict[str, Any]:
    return {"sides": Steady(scaled(chosen, scale), load.draw(seed).at(1.0), goal).sides()}


def rate_of(outcome: Outcome) -> float:
    """The rate that a step found, requests/s."""
    found = not_none(outcome.summary)[Kind.RATE]
    return inf if found is None else found


_STAGES: dict[str, Callable[..., dict[str, Any]]] = {
    "rough": _rough,
    "sides": _sides,
    "apart": lambda *arguments: asdict(apart(*arguments)),
    "limits": _limits,
    "go ahead": lambda *arguments: asdict(go_ahead(*arguments)),
    "follow": lambda *arguments: _rate_data(follow(*arguments).rate),
    "prefill share": lambda *arguments: {"share": best_share(*arguments)},
    "fleets": _fleet,
    "headroom": _headroom,
    "other seeds": _takes,
    "cases": _case,
    "known": _known_rate,
    "detail": detail,
    "day": served_day,
    "what if": changed_rates,
    "full load": full_load,
}


def carry_out(name: str, stage: str, chosen: Settings, load: Load, goal: Goal, seed: int, *more: Any) -> Outcome:
    """Run one job of a step. Unread settings are not refused; errors are returned, never raised."""
    try:
        chosen = only_read(chosen, load.draw(seed).at(1.0))
        return Outcome(name, _STAGES[stage](chosen, load, goal, seed, *more))
    except UserError as error:
        return Outcome(name, error=str(error))
    except Exception:
        return Outcome(name, fault=traceback.format_exc())
