"""What it is to put a claim to the test: numbers first, then a stated rule that makes a verdict of them.

A ``Probe`` measures numbers by name, over several seeds where anything is drawn, and once more with all steps 1 %
longer. Its rule sees their means and nothing else. A rule is made of ``Part``s, each a statement that a number
decides by a bound:

    all parts hold               the claim holds
    some do                      it holds only for those, and the row says which and which not
    none does, some are open     it cannot be tested, and the row names the experiment
    none does, none is open      it does not hold
    what it needs is not here    it cannot be tested, and the row names the experiment

A part is open whose number only bounds what is claimed: it is too small, and what is not modelled could make it large
enough. That refutes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .runs import Trial

HOLDS, HOLDS_ONLY, FAILS, UNTESTED = "holds", "holds only", "does not hold", "cannot be tested"
VERDICTS = (HOLDS, HOLDS_ONLY, FAILS, UNTESTED)
#: What claims can be put to here; a test that needs something else cannot be made.
AT_HAND = ("simulation", "arithmetic", "published measurements")

Values = dict[str, float]


@dataclass(frozen=True)
class Part:
    """A statement and the number that decides it.

    Attributes:
        text: The statement, as what comes after "for" or "not for".
        value: The number.
        least, most: Bounds, both included, within which the statement holds; None is none.
        up_to: How large what is not modelled could at most make a number that is a lower bound; None where nothing
            is missing, infinity where nothing limits it.
    """

    text: str
    value: float
    least: float | None = None
    most: float | None = None
    up_to: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the number lies within the bounds."""
        above = self.least is None or self.value >= self.least
        return above and (self.most is None or self.value <= self.most)

    @property
    def open(self) -> bool:
        """Whether the number decides nothing: it is too small, and could be large enough."""
        if self.up_to is None or self.least is None:
            return False
        return self.value < self.least <= self.up_to


@dataclass(frozen=True)
class Judged:
    """What a rule makes of the numbers.

    Attributes:
        parts: What decides.
        gives: The numbers in a sentence; of arithmetic the formula with the numbers put in.
        why: One sentence.
    """

    parts: tuple[Part, ...]
    gives: str
    why: str

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``."""
        held = [part.holds for part in self.parts]
        if all(held):
            return HOLDS
        if any(held):
            return HOLDS_ONLY
        return UNTESTED if any(part.open for part in self.parts) else FAILS

    @property
    def condition(self) -> str | None:
        """For which parts it holds, for which not, and which are open, where that is not the same for all."""
        kinds = {
            "for": [part.text for part in self.parts if part.holds],
            "not for": [part.text for part in self.parts if not (part.holds or part.open)],
            "open for": [part.text for part in self.parts if part.open],
        }
        told = [f"{kind} {'; '.join(texts)}" for kind, texts in kinds.items() if texts]
        return "; ".join(told) if len(told) > 1 else None


@dataclass(frozen=True)
class Foreseen:
    """A number that was known beforehand: ``low`` to ``high``, in the words of the facts."""

    name: str
    low: float
    high: float


@dataclass(frozen=True)
class Probe:
    """How a claim is tested.

    Attributes:
        number: Its place in ``facts/claims.json``, from 1.
        how: What the numbers come from.
        rule: When it holds, in words.
        measure: The numbers of one trial.
        judge: The rule; gets the means over the seeds.
        decides: The number that is told with its range; None where nothing is drawn, and one trial is enough.
        stretches: Whether that number can hang on the step time that is fitted to OPT-13B.
        needs: What it takes, of which some is not ``AT_HAND`` where the claim cannot be tested.
        experiment: What would test it, then.
        foreseen: What was known beforehand.
        verdict: The verdict that was expected; None where none was.
    """

    number: int
    how: str
    rule: str
    measure: Callable[[Trial], Values]
    judge: Callable[[Mapping[str, float]], Judged]
    decides: str | None = None
    stretches: bool = True
    needs: Sequence[str] = ()
    experiment: str | None = None
    foreseen: Sequence[Foreseen] = ()
    verdict: str | None = None

    @property
    def missing(self) -> list[str]:
        """What it needs and is not here."""
        return [need for need in self.needs if need not in AT_HAND]


@dataclass(frozen=True)
class Measured:
    """The numbers of a test.

    Attributes:
        values: Means over the seeds.
        lowest, highest: Range of the number that decides; None where nothing is drawn.
        step_1pct: How far that number moves, in the first seed, where all steps take 1 % longer; None where it cannot
            hang on that.
    """

    values: Values
    lowest: float | None = None
    highest: float | None = None
    step_1pct: float | None = None


@dataclass(frozen=True)
class Source:
    """A claim as the facts have it."""

    text: str
    claim: str
    test: str
    expected: str


def table_row(source: Source, probe: Probe, measured: Measured) -> dict[str, Any]:
    """A line of the table of claims, as data.

    ``values`` are all numbers of the probe; ``decides`` names the one of which ``minimum``, ``maximum`` and
    ``step_1pct`` are.
    """
    judged, missing = probe.judge(measured.values), probe.missing
    verdict = UNTESTED if missing else judged.verdict
    return {
        "number": probe.number,
        "text": source.text,
        "claim": source.claim,
        "test": source.test,
        "expected": source.expected,
        "how": probe.how,
        "rule": probe.rule,
        "gives": judged.gives,
        "verdict": verdict,
        "condition": None if missing else judged.condition,
        "why": judged.why,
        "experiment": probe.experiment,
        "differs": differences(probe, measured.values, verdict),
        "values": dict(measured.values),
        "decides": probe.decides,
        "minimum": measured.lowest,
        "maximum": measured.highest,
        "step_1pct": measured.step_1pct,
    }


def differences(probe: Probe, values: Mapping[str, float], verdict: str) -> list[str]:
    """Where what came out is not what was known beforehand; a number is as foreseen within its range."""
    found = [
        f"{known.name.replace('_', ' ')}: {values[known.name]:.4g}, foreseen {_span(known)}"
        for known in probe.foreseen
        if not known.low <= values[known.name] <= known.high
    ]
    if probe.verdict not in (None, verdict):
        found.append(f"verdict: {verdict}, foreseen {probe.verdict}")
    return found


def _span(known: Foreseen) -> str:
    return f"{known.low:g}" if known.low == known.high else f"{known.low:g} to {known.high:g}"
