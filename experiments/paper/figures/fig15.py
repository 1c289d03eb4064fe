"""Fig 15: memory saved by sharing blocks between parallel samples and between beams, published beside simulated.

One number is fitted for beams: the survival, the probability that a beam continues at a step. Lower survival increases
the shared prefix of the beams, and so the saved memory. The survival is fitted on Fig 15's value for two beams alone,
and again for ShareGPT on the paper's text for two beams. The scan tries 0.90, 0.91 ... 0.95 (ShareGPT: 0.94, 0.95 ...
0.99), then steps of 0.001 where the published value is first crossed.

For ShareGPT, on the paper's own pairs for 1,800 s, survivals of 0.987, 0.988 and 0.989 save 44.5, 44.3 and 43.9 % with
two beams; the text has 44.3. With six beams 0.988 saves 65.9 %; the text has 66.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from ....sim.engine.replica import FITTED_STEP_SCALE
from ....sim.policy.options import FITTED_BEAM_SURVIVAL
from ..comparison import Payload, row
from ..constants import STEP, SWAPS, constant
from ..fit import ON
from ..grades import POINTS
from ..paper import FIG15, FIG15_SHAREGPT, Experiment, Source
from ..published import Published
from ..rows import OTHER_SEEDS, STEP_CHANGES, Row, accuracy, as_finding, moved
from ..sharing import CLOSED_FORM, SAVED, Saved, SharingCase, measure_sharing

BEAMS_ALPACA, FITTED_ON_BEAMS = "beam search, Alpaca", 2
#: Survivals at which the values of beams are reported.
SURVIVALS = tuple(thousandths / 1000 for thousandths in range(900, 951, 10))
BEAMS_SHAREGPT = "beam search, ShareGPT"
#: Survival of beams on ShareGPT, with outputs six times as long; fitted on the paper's own pairs.
SHAREGPT_BEAM_SURVIVAL = 0.988


FIGURE = FIG15.figure
SEQUENCES = (2, 4, 6)
X_IS = "sequences a request"
SAMPLES_ALPACA = "parallel sampling, Alpaca"
SAMPLES_SHAREGPT, BEAMS_LIVING = "parallel sampling, ShareGPT", "beam search, ShareGPT, a survival of its own"
CLOSED = "closed form, ShareGPT"
#: Measurement and survival of each series.
_SERIES: dict[str, tuple[Experiment, float | None]] = {
    SAMPLES_ALPACA: (FIG15, None),
    BEAMS_ALPACA: (FIG15, FITTED_BEAM_SURVIVAL),
    SAMPLES_SHAREGPT: (FIG15_SHAREGPT, None),
    BEAMS_SHAREGPT: (FIG15_SHAREGPT, FITTED_BEAM_SURVIVAL),
    BEAMS_LIVING: (FIG15_SHAREGPT, SHAREGPT_BEAM_SURVIVAL),
}
_PUBLISHED_AS = {BEAMS_LIVING: BEAMS_SHAREGPT}
#: The values of two beams on which a survival is fitted.
_FITTED = {(BEAMS_ALPACA, FITTED_ON_BEAMS), (BEAMS_LIVING, FITTED_ON_BEAMS)}
#: Shorter duration for the sensitivity: it shows the movement of the values in a third of the time.
_SENSITIVITY = replace(FIG15, duration_s=300, window_s=(120, 300))
#: Length of the traces for the change with 1 % of step time and with other seeds.
_SHORT_S, _SHORT_WINDOW_S = 200, (100, 200)
_LIVING_TEXT = (
    f"ShareGPT's beams, with a survival of {SHAREGPT_BEAM_SURVIVAL:g} per step (fitted on the text's value for two beams),"
    " are predicted for six beams"
)
Runs = dict[tuple[str, int], list[Saved]]


class Movement(NamedTuple):
    """Movement of a value over a short trace.

    Attributes:
        step_1pct: The larger change if all steps are 1 % longer or 1 % shorter.
        seeds: Change from the first seed to each other seed; empty if several seeds are requested.
    """

    step_1pct: float
    seeds: tuple[float, ...]


def compare_sharing(source: Source) -> Payload:
    """The figure as a document: the table in design.md's form, and its basis.

    Args:
        source: Source of the lengths of both sets.
    """
    sources = {FIG15: source.alpaca, FIG15_SHAREGPT: source}
    rows = list(sharing_rows(_measured(sources), _moved(sources)))
    short = replace(source.alpaca, seeds=source.seeds[:1])
    return {
        "figure": FIGURE,
        "workload": "; ".join(lengths.description(experiment) for experiment, lengths in sources.items()),
        "x_is": X_IS,
        "rows": rows,
        "beam_survival": FITTED_BEAM_SURVIVAL,
        "constants": [
            *STEP,
            constant("step-time scale, without context", FITTED_STEP_SCALE, ON),
            *SWAPS,
            constant("survival of a beam", FITTED_BEAM_SURVIVAL, "Fig 15, two beams on Alpaca"),
            constant("survival of a beam", SHAREGPT_BEAM_SURVIVAL, "Fig 15's text, two beams on ShareGPT"),
        ],
        "seeds": list(source.seeds),
        "sensitivity": {"workload": short.description(_SENSITIVITY), "rows": list(_sensitivity(short))},
        "findings": list(findings(rows)),
        "basis": list(_basis()),
        "remarks": list(_remarks()),
    }


def _measured(sources: Mapping[Experiment, Source]) -> Runs:
    cases = {
        (series, n): [SharingCase(experiment, seed, n, survival) for seed in sources[experiment].seeds]
        for series, (experiment, survival) in _SERIES.items()
        for n in SEQUENCES
    }
    found = measure_sharing([case for group in cases.values() for case in group], sources, FIGURE)
    return {key: [found[case] for case in group] for key, group in cases.items()}


def _moved(sources: Mapping[Experiment, Source]) -> dict[tuple[str, int], Movement]:
    short = {each: replace(each, duration_s=_SHORT_S, window_s=_SHORT_WINDOW_S) for each in sources}
    cases = {
        (series, n): [
            SharingCase(short[experiment], seed, n, survival, round(FITTED_STEP_SCALE * change, 6))
            for change, seed in _variants(sources[experiment].seeds)
        ]
        for series, (experiment, survival) in _SERIES.items()
        for n in SEQUENCES
    }
    shortened = {short[experiment]: lengths for experiment, lengths in sources.items()}
    label = f"{FIGURE}, 1 % of step time and other seeds"
    found = measure_sharing([case for group in cases.values() for case in group], shortened, label)
    return {key: _movement([found[case].values[SAVED] for case in group]) for key, group in cases.items()}


def _variants(seeds: Sequence[int]) -> list[tuple[float, int]]:
    """Changes of step time with the first seed, starting with no change; then other seeds, if a single seed is requested."""
    others = [seed for seed in OTHER_SEEDS if seed not in seeds] if len(seeds) == 1 else []
    return [*((change, seeds[0]) for change in (1, *STEP_CHANGES)), *((1, seed) for seed in others)]


def _movement(values: Sequence[float]) -> Movement:
    first, *rest = values
    changed, seeds = rest[: len(STEP_CHANGES)], rest[len(STEP_CHANGES) :]
    return Movement(moved([first], *([value] for value in changed)), tuple(value - first for value in seeds))


def sharing_rows(runs: Runs, movements: Mapping[tuple[str, int], Movement]) -> Iterator[Row]:
    """Every value, published and simulated; samples on ShareGPT also beside the closed form."""
    for series, (experiment, _) in _SERIES.items():
        published, how = experiment.published(), "label" if experiment is FIG15 else "text"
        for n in SEQUENCES:
            reference = published[_PUBLISHED_AS.get(series, series), n]
            yield _row(series, n, reference, how, runs[series, n], movements[series, n])
    for n in SEQUENCES:
        mine, movement = runs[SAMPLES_SHAREGPT, n], movements[SAMPLES_SHAREGPT, n]
        yield _row(CLOSED, n, round(fmean(run.values[CLOSED_FORM] for run in mine), 3), "formula", mine, movement)


def _row(series: str, n: int, reference: float | None, how: str, runs: list[Saved], movement: Movement) -> Row:
    kind = "fitted" if (series, n) in _FITTED else "predicted"
    other_seeds = [runs[0].values[SAVED] + away for away in movement.seeds]
    columns = {"kind": kind, "x": n, "how": how, "other_seeds": other_seeds, "step_1pct": movement.step_1pct}
    return row(series, SAVED, reference, runs, **columns)


def _sensitivity(source: Source) -> Iterator[Row]:
    """Memory saved by beams at every survival of ``SURVIVALS``."""
    cases = [SharingCase(_SENSITIVITY, source.seeds[0], n, survival) for n in SEQUENCES for survival in SURVIVALS]
    found = measure_sharing(cases, {_SENSITIVITY: source}, f"{FIGURE}, survival {SURVIVALS[0]} to {SURVIVALS[-1]}")
    published: Published = FIG15.published()
    for case in cases:
        yield {
            "survival": case.survival,
            "series": BEAMS_ALPACA,
            "metric": SAVED,
            "x": case.n,
            "published": published[BEAMS_ALPACA, case.n],
            "simulated": round(found[case].values[SAVED], 3),
        }


def findings(rows: list[Row]) -> Iterator[dict[str, Any]]:
    """Findings on the accuracy of these rows."""
    texts = {
        SAMPLES_ALPACA: "Samples save what the paper printed for Alpaca",
        BEAMS_ALPACA: "Beams, fitted on two of them, save what the paper printed of four and six",
        CLOSED: "Samples save what the closed form makes of the requests that ran, on ShareGPT",
    }
    for series, text in texts.items():
        yield accuracy((row for row in rows if row["series"] == series), text, POINTS, X_IS)
    for series in (SAMPLES_SHAREGPT, BEAMS_SHAREGPT):
        yield _in_range(series, [row for row in rows if row["series"] == series])
    yield accuracy((row for row in rows if row["series"] == BEAMS_LIVING), _LIVING_TEXT, POINTS, X_IS)


def _in_range(series: str, rows: list[Row]) -> dict[str, Any]:
    low, high = (rows[end]["published"] for end in (0, -1))
    values = [row["simulated"] for row in rows]
    percents = ", ".join(f"{value:.1f}" for value in values)
    finding = f"{series}: {percents} %; the paper's text gives {low} to {high} %."
    return as_finding(finding, low <= min(values) and max(values) <= high)


def _basis() -> Iterator[str]:
    fitted = FIG15.published()[BEAMS_ALPACA, FITTED_ON_BEAMS]
    yield (
        "Saved: 100 * (1 - 1 / mean(logical / physical blocks)), a mean over iterations. Logical blocks are the"
        " entries of all block tables, physical ones the blocks that they name."
    )
    yield (
        f"Beams: in each step a beam survives with probability {FITTED_BEAM_SURVIVAL:g}; the others become copies of"
        f" surviving beams. Fitted beforehand, on {FITTED_ON_BEAMS} beams on Alpaca ({fitted:g}) alone."
    )
    yield (
        f"The changes with 1 % of step time and with other seeds are measured on traces of {_SHORT_S} s, which vary more"
        " between seeds than these."
    )


def _remarks() -> Iterator[str]:
    yield (
        "Why ShareGPT's beams save less than Alpaca's survival says: with one survival for both, four and six beams"
        " are far off at any request rate and length of the trace; with a survival of their own, fitted on two, six"
        " agree. So beams of long outputs replace each other more rarely, by the step, than those of short ones."
    )
    yield (
        "Closed form: n samples share the full blocks of the prompt and nothing else, so in each decode step"
        " (n - 1) * floor(prompt / 16) of n * ceil(tokens / 16) table entries are saved; added up over the decode"
        " steps of the requests that ran in the window."
    )
    yield (
        "The beams of a request have a parent in common, with one survival for all steps six of them some fifty steps"
        " back, so that of outputs as long as ShareGPT's nearly all is shared."
    )
    yield "Alpaca's pairs are drawn from a summary; the text's ranges for ShareGPT name no rate."
