"""Whether the probability of a plan is right on measured servers: answers for objectives around each measured TPOT.

    python benchmarks/plan_calibration.py            the table
    python benchmarks/plan_calibration.py --write    docs/plan.md, too

A case is a measured run (``experiments/measured/facts/server_errors.json``, without those that something was fitted to) with an
objective of TPOT: ``FACTORS`` times the measured mean. The answer is the weight of the five step times of a plan (``chance``) with which
the simulated mean meets the objective; the outcome is whether the measured one does. The interval that gives the step times is found
without the errors of the run's server, as in ``tools.servers.coverage``; a class without one has that of all other servers, as in a plan.

Only step times are judged: the runs have one draw, one replica and a pool that is known. TPOT is taken as proportional to the step time,
and the outcome is of the mean, not of the share of requests. A server has one vote, which its runs share.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from math import exp
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fragmeter.experiments.capacity.chance import SCALE_WEIGHTS
from fragmeter.experiments.capacity.uncertainty import quantiles
from fragmeter.experiments.measured.intervals import Calibrated, RunError, run_errors
from fragmeter.experiments.measured.servers_like import stored_rows

PAGE = Path(__file__).parents[1] / "docs/plan.md"
BEGIN, END = "<!-- calibration: python benchmarks/plan_calibration.py --write -->", "<!-- end of calibration -->"
#: Objectives over the measured TPOT: even in the logarithm, as many met as missed.
FACTORS = np.exp(np.linspace(-0.6, 0.6, 25)[np.arange(25) != 12])
#: Bands of the answers, and the share that is to be enough.
BANDS = ((0.0, 0.1, "-"), (0.4, 0.6, "35 to 65 %"), (0.9, 1.0, "at least 85 %"))
_ROUNDING = 1e-9


class Case(NamedTuple):
    """An answer and its outcome.

    Attributes:
        chance: The probability by the plan's step times.
        enough: Whether the measured server meets the objective.
        vote: Its share of the vote of its server.
    """

    chance: float
    enough: bool
    vote: float


def cases(errors: Iterable[RunError], *, own_class: bool = True) -> list[Case]:
    """The cases of every run.

    Args:
        errors: Of TPOT.
        own_class: Whether a class with an interval takes it; else every run takes that of all other servers.
    """
    every, found = list(errors), []
    runs = Counter(each.server for each in every)
    for server in sorted(runs):
        without = Calibrated(every, server)
        widest = without.widest()
        for run in (each for each in every if each.server == server):
            interval = (without.interval(run.levels) if own_class else None) or widest
            scales = quantiles(interval.low, interval.high)
            # The simulated TPOT with each step time, over the measured one.
            simulated = np.array(scales) / exp(run.error)
            for factor in FACTORS:
                chance = float(np.dot(SCALE_WEIGHTS, simulated <= factor) / sum(SCALE_WEIGHTS))
                found.append(Case(chance, bool(factor >= 1), 1 / runs[server]))
    return found


def share(found: Iterable[Case]) -> float:
    """Share of the votes for which the server was enough."""
    some = list(found)
    return sum(each.vote for each in some if each.enough) / sum(each.vote for each in some)


def brier(found: Iterable[Case], chance: float | None = None) -> float:
    """Brier score of the answers, or of one for all."""
    some = list(found)
    squares = [each.vote * ((each.chance if chance is None else chance) - each.enough) ** 2 for each in some]
    return sum(squares) / sum(each.vote for each in some)


def table() -> str:
    """The bands and the Brier scores, as Markdown."""
    errors = run_errors(stored_rows(), "tpot")
    found = cases(errors)
    lines = [
        f"{len(errors)} measured runs of {len({each.server for each in errors})} servers with {len(FACTORS)} objectives each, from"
        f" {FACTORS[0]:.2f} to {FACTORS[-1]:.2f} times the measured mean TPOT; intervals are found without the server:",
        "",
        "| probability of the answer | answers | were enough | asked for |",
        "|---|---|---|---|",
    ]
    for low, high, asked in BANDS:
        inside = [each for each in found if low - _ROUNDING <= each.chance <= high + _ROUNDING]
        lines.append(f"| {low:g} to {high:g} | {len(inside):,} | {100 * share(inside):.0f} % | {asked} |")
    base = share(found)
    lines += [
        "",
        f"The Brier score is {brier(found):.3f}; with the base rate of {100 * base:.0f} % for all it is {brier(found, base):.3f}, and"
        f" with the interval of all servers for each run {brier(cases(errors, own_class=False)):.3f}.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/plan.md")
    text = table()
    print(text)
    if parser.parse_args().write:
        page = PAGE.read_text("utf-8")
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", "utf-8")


if __name__ == "__main__":
    main()
