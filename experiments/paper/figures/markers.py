"""Fig 14's Orca (Max) read off as its plots show it: from straight lines between the measured points.

The rate sweeps search the rate at which the mean normalised latency is 0.5 s/token. A plot shows less: a marker at each
rate that was run, and straight lines between them (``ax.plot`` in the artifact's plot/plot_fig14.py, cut at 1 s/token).
Orca (Max) was run at few rates, and with four and more sequences a request it serves one request at a time: its latency
rises from 0.3 to 17 s/token between two markers, so the line crosses 0.5 just beyond the lower one.

For each panel

  1. the rates are those of the artifact's scripts (experiments/fig14-parallel.sh and fig14-beam.sh of
     sosp-ae-39/sosp-ae-astra), up to the first with a latency above 0.5 s/token;
  2. each rate has a trace of its own, of an hour, as the artifact draws it;
  3. the reading is where the straight line between the last two points crosses 0.5 s/token.

Beams are also served with copies that take five times as long. Under Orca a beam that continues another one copies its
whole chunk of 2,048 slots, 1.7 GB; the simulation charges reading and writing it at the data sheet's bandwidth. The
rate of the artifact's copies was not published. Five is fitted here on Fig 14f's value; those of d and e are predicted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ....reports.page.table import Column, Table
from ....sim.types.optional import not_none
from ...runs.output import Report, track
from ...runs.parallel import in_parallel
from ..bench import Bench
from ..comparison import Payload
from ..paper import Source
from ..rate_sweep.panels import ALPACA, CROSSING, MAX, lengths_of, published_panel
from ..rate_sweep.rate_sweep import TARGET_S, latency_s
from ..rows import value_row
from .fig12 import SCALE
from .fig14 import BEAMS, PANELS, load_of, shares_of, system, trace_requests

FIGURE = "markers"
#: Requests/s of Orca (Max) in the artifact's scripts, by panel.
RATES = {
    "a": (1.0, 1.5, 2.0, 2.5),
    "b": (0.1, 0.25, 0.5, 0.75, 1.0),
    "c": (0.1, 0.25, 0.5, 0.75, 1.0),
    "d": (0.5, 1.0, 1.25, 1.5, 2.0),
    "e": (0.1, 0.25, 0.5, 0.75, 1.0),
    "f": (0.1, 0.25, 0.5, 0.75, 1.0),
}
#: How many times as long copies take, and the panel that the second is fitted on.
SLOWDOWNS, FITTED_ON = (1, 5), "f"
#: (rate, latency in s/token) of a marker.
Point = tuple[float, float]


def compare_markers(bench: Bench, letters: Collection[str] = tuple(RATES)) -> Payload:
    """The reading of each panel beside the published value, with the markers.

    Args:
        letters: The panels.
    """
    source = bench.source
    jobs = [
        (letter, slowdown, source)
        for letter in letters
        for slowdown in SLOWDOWNS
        if slowdown == 1 or PANELS[letter][0] == BEAMS
    ]
    found = zip(jobs, track(in_parallel(points_of, jobs), FIGURE, len(jobs)), strict=True)
    return {
        "figure": FIGURE,
        "workload": f"{MAX}, OPT-13B on 1 x a100-40gb, Alpaca ({source.alpaca.name}), seed {source.seeds[0]}",
        "rows": [_row(letter, slowdown, points) for (letter, slowdown, _), points in found],
    }


def _row(letter: str, slowdown: int, points: Sequence[Point]) -> dict[str, Any]:
    kind, n = PANELS[letter]
    published = published_panel("fig14", f"{letter} {kind} {n}")[MAX]
    fitted = slowdown > 1 and letter == FITTED_ON
    cells = value_row(
        f"Fig 14{letter}",
        CROSSING,
        published,
        [reading(points)],
        how="digitised",
        kind="fitted" if fitted else "predicted",
    )
    return {**cells, "copies_take": slowdown, "markers": [[rate, round(latency, 3)] for rate, latency in points]}


def points_of(letter: str, slowdown: int, source: Source) -> list[Point]:
    """The markers of a panel, up to the first above the target."""
    kind, n = PANELS[letter]
    plain = system(kind, n, MAX, shares_of(source))
    slowed = replace(plain, steps=replace(not_none(plain.steps), copy_slowdown=slowdown))
    points: list[Point] = []
    for rate in RATES[letter]:
        load = load_of(lengths_of(ALPACA, source), rate, trace_requests(letter, source), source.seeds[0])
        points.append((rate, latency_s(slowed, load, rate, SCALE.value)))
        if points[-1][1] > TARGET_S:
            break
    return points


def reading(points: Sequence[Point]) -> float:
    """The rate at which straight lines between these points reach the target; they end at the first point above it."""
    (rate, latency), (beyond, above) = points[-2:]
    return rate + (beyond - rate) * (TARGET_S - latency) / (above - latency)


def print_markers(payload: Payload, report: Report) -> None:
    """Print the readings and the markers."""
    report.print_line(f"{FIGURE}: {payload['workload']}; rates at {TARGET_S:g} s/token, requests/s")
    last = Column("markers: s/token at requests/s", is_text=True, wraps=True)
    table = Table("", "published", "read off", "error", "copies take", last)
    for row in payload["rows"]:
        error = "fitted" if row["kind"] == "fitted" else f"{row['error'] / row['published']:+.1%}"
        markers = ", ".join(f"{latency:g} at {rate:g}" for rate, latency in row["markers"])
        values = f"{row['published']:g}", f"{row['simulated']:.3g}", error, f"{row['copies_take']}x"
        table.add_row(row["series"], *values, markers)
    report.console.print(table)
