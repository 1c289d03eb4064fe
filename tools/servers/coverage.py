"""How many measured servers the intervals of ``experiments.measured.intervals`` hold, each found without the errors of the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np

from fragmeter.experiments.measured.intervals import (
    METRICS,
    SHARE,
    Calibrated,
    Interval,
    RunError,
    class_text,
    run_errors,
)

#: Coverage over all runs, each judged by intervals found without its server, that is neither too low nor too high.
COVERAGE = (0.80, 0.97)


def half_width(interval: Interval) -> float:
    """Half of the width of an interval, as a share of the simulated value."""
    return (interval.high - interval.low) / 2


def score(interval: Interval, value: float) -> float:
    """The interval score (Winkler): its width, and 2 / (1 - ``SHARE``) times the distance by which it misses a value."""
    return interval.high - interval.low + 2 / (1 - SHARE) * max(interval.low - value, value - interval.high, 0.0)


@dataclass(frozen=True)
class Judged:
    """A run and the interval found without the errors of its server.

    Attributes:
        name: Its class in words.
        measured: Measured over simulated.
        interval: Of its class.
        box: Lowest and highest measured over simulated value of the other servers of its class, or of the next wider one with others.
    """

    run: RunError
    name: str
    measured: float
    interval: Interval
    box: Interval


def judged(errors: Sequence[RunError]) -> list[Judged]:
    """Every run that has an interval, beside that interval as found without its server."""
    every = Calibrated(errors)
    found = []
    for server in sorted({each.server for each in errors if every.depth(each.levels) is not None}):
        without = Calibrated(errors, server)
        for each in (each for each in errors if each.server == server):
            depth, interval = without.depth(each.levels), without.interval(each.levels)
            if depth is not None and interval is not None:
                name, measured = class_text(each.levels, depth), exp(each.error)
                found.append(Judged(each, name, measured, interval, _box(errors, each, depth)))
    return found


def _box(errors: Sequence[RunError], run: RunError, depth: int) -> Interval:
    others = [each for each in errors if each.server != run.server]
    classes = (
        [exp(each.error) for each in others if each.levels[place] == run.levels[place]]
        for place in range(depth, len(run.levels))
    )
    past = next(filter(None, classes))
    return Interval(min(past), max(past))


def coverage(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How good the intervals are, by metric and class, each class after the whole metric (``class`` null).

    ``coverage`` is a share of the runs; ``half_width`` is the median of intervals found without the server, ``interval_score`` and
    ``box_score`` are means; ``low`` and ``high`` are of the interval from all runs. A metric without intervals is left out.

    Args:
        rows: As ``run_errors`` takes them.
    """
    every, found = list(rows), []
    for metric in METRICS:
        errors = run_errors(every, metric)
        runs, whole = judged(errors), Calibrated(errors)
        if not runs:
            continue
        measures = _measures(runs)
        inside = COVERAGE[0] <= measures["coverage"] <= COVERAGE[1]
        better = measures["interval_score"] < measures["box_score"]
        outcome = "pass" if inside and better else "fail"
        found.append({"metric": metric, "class": None, **measures, "outcome": outcome})
        for name in sorted({each.name for each in runs}):
            own = [each for each in runs if each.name == name]
            interval = whole.interval(own[0].run.levels)
            ends = {} if interval is None else interval._asdict()
            found.append({"metric": metric, "class": name, **_measures(own), **ends})
    return found


def _measures(runs: Sequence[Judged]) -> dict[str, Any]:
    return {
        "runs": len(runs),
        "servers": len({each.run.server for each in runs}),
        "coverage": float(np.mean([each.interval.holds(each.measured) for each in runs])),
        "half_width": float(np.median([half_width(each.interval) for each in runs])),
        "interval_score": float(np.mean([score(each.interval, each.measured) for each in runs])),
        "box_score": float(np.mean([score(each.box, each.measured) for each in runs])),
    }
