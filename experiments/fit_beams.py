"""The one number of the beams that is fitted: the probability that a beam lives on for a step.

It is fitted on the value of two beams in Fig 15 alone. The fewer beams live on, the more they save. Scanned are 0.90,
0.91 ... 0.95, and steps of 0.001 where the published value is first crossed.
"""

from __future__ import annotations

from dataclasses import dataclass

from .paper import ALPACA_SET, FIG15, Source
from .scanning import scan
from .sharing import SAVED, SharingCase, measure_sharing

BEAMS_ALPACA, FITTED_ON_BEAMS = "beam search, Alpaca", 2
#: Alpaca's pairs are not to be had: they are drawn from a summary.
ALPACA = Source((0,), drawn_from=ALPACA_SET)
#: Thousandths of the survival.
_COARSE, _FINE_STEP = range(900, 951, 10), 1
#: The survivals at which the values of beams are told.
SURVIVALS = tuple(thousandths / 1000 for thousandths in _COARSE)


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
    published = FIG15.published()[BEAMS_ALPACA, FITTED_ON_BEAMS]
    best, values = scan(_measure, published, _COARSE, _FINE_STEP)
    return SurvivalFit(best / 1000, published, tuple((at / 1000, value) for at, value in values.items()))


def _measure(thousandths: range) -> dict[int, float]:
    cases = {at: SharingCase(FIG15, ALPACA.seeds[0], FITTED_ON_BEAMS, at / 1000) for at in thousandths}
    found = measure_sharing(list(cases.values()), {FIG15: ALPACA}, "fitting the beams' survival")
    return {at: found[case].values[SAVED] for at, case in cases.items()}
