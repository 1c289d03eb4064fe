"""The one number of the beams that is fitted: the probability that a beam lives on for a step.

It is fitted on the value of two beams in Fig 15 alone, and once more on what the paper's text says of two beams with
ShareGPT. The fewer beams live on, the more they save. Scanned are 0.90, 0.91 ... 0.95 (ShareGPT: 0.94, 0.95 ...
0.99), and steps of 0.001 where the published value is first crossed.

ShareGPT's, on the paper's own pairs for 1,800 s: 0.987, 0.988 and 0.989 save 44.5, 44.3 and 43.9 % with two beams,
where the text has 44.3; with six 0.988 saves 65.9, where it has 66.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ...sim.types.optional import not_none
from ..runs.scanning import scan
from .paper import ALPACA_SET, FIG15, FIG15_SHAREGPT, Experiment, Source
from .sharing import SAVED, SharingCase, measure_sharing

BEAMS_ALPACA, FITTED_ON_BEAMS = "beam search, Alpaca", 2
#: Alpaca's pairs are not to be had: they are drawn from a summary.
ALPACA = Source((0,), drawn_from=ALPACA_SET)
#: Thousandths of the survival.
_COARSE, _COARSE_SHAREGPT, _FINE_STEP = range(900, 951, 10), range(940, 991, 10), 1
#: Survivals at which the values of beams are reported.
SURVIVALS = tuple(thousandths / 1000 for thousandths in _COARSE)
BEAMS_SHAREGPT = "beam search, ShareGPT"
#: Of beams on ShareGPT, with outputs six times as long; fitted on the paper's own pairs.
SHAREGPT_BEAM_SURVIVAL = 0.988


@dataclass(frozen=True)
class SurvivalFit:
    """A survival and how it was found.

    Attributes:
        survival: The probability.
        published: The value that it was fitted on.
        scan: (survival, value) as scanned.
    """

    survival: float
    published: float
    scan: tuple[tuple[float, float], ...]


def fit_survival() -> SurvivalFit:
    """The scan done again, from which ``FITTED_BEAM_SURVIVAL`` comes; it takes about a minute of one core."""
    return _fit(FIG15, ALPACA, BEAMS_ALPACA, _COARSE)


def fit_sharegpt_survival(source: Source) -> SurvivalFit:
    """The scan from which ``SHAREGPT_BEAM_SURVIVAL`` comes, over the paper's own pairs; two minutes of one core."""
    return _fit(FIG15_SHAREGPT, source, BEAMS_SHAREGPT, _COARSE_SHAREGPT)


def _fit(experiment: Experiment, source: Source, series: str, coarse: range) -> SurvivalFit:
    published = not_none(FIG15.published()[series, FITTED_ON_BEAMS])
    best, values = scan(partial(_measure, experiment, source), published, coarse, _FINE_STEP)
    return SurvivalFit(best / 1000, published, tuple((at / 1000, value) for at, value in values.items()))


def _measure(experiment: Experiment, source: Source, thousandths: range) -> dict[int, float]:
    cases = {at: SharingCase(experiment, source.seeds[0], FITTED_ON_BEAMS, at / 1000) for at in thousandths}
    found = measure_sharing(list(cases.values()), {experiment: source}, "fitting the beams' survival")
    return {at: found[case].values[SAVED] for at, case in cases.items()}
