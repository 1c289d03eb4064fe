"""Test of a claim: measured numbers, and a stated rule that derives the outcome from them.

A ``Probe`` measures numbers by name, over several seeds where requests are drawn, and once more with all steps 1 %
longer. Its rule reads only their means. A rule consists of ``Part``s. Each part is a statement with one number and
its bounds:

    all parts pass                       pass
    some parts pass                      partial pass; the row lists the parts that pass and those that do not
    no part passes, some are open        not testable; the row names the experiment
    no part passes, none is open         fail
    the probe needs what is not here     not testable; the row names the experiment

A part is open if its number is a lower bound below the claimed value and effects that are not modelled could raise it
to that value. An open part refutes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .runs import Trial

#: Outcomes, in documents and in texts.
PASS, PARTIAL, FAIL, NOT_TESTABLE = "pass", "partial pass", "fail", "not testable"
OUTCOMES = (PASS, PARTIAL, FAIL, NOT_TESTABLE)
#: Sources of numbers that are available here. A probe that needs another one is not testable.
AT_HAND = ("simulation", "arithmetic", "published measurements")

Values = dict[str, float]
Measure = Callable[["Trial"], Values]
Rule = Callable[[Mapping[str, float]], "Judged"]
#: The code of claims, by number.
Code = Mapping[int, tuple[Measure, Rule]]


@dataclass(frozen=True)
class Part:
    """A statement and the number that decides it.

    Attributes:
        text: The statement, as what comes after "for" or "not for".
        value: The number.
        least, most: Bounds, both included, within which the statement is true; None is no bound.
        up_to: For a number that is a lower bound: the largest value that effects outside the model could give it,
            infinity where nothing limits it. None where the number is no bound.
    """

    text: str
    value: float
    least: float | None = None
    most: float | None = None
    up_to: float | None = None

    @property
    def passes(self) -> bool:
        """Whether the number lies within the bounds."""
        above = self.least is None or self.value >= self.least
        return above and (self.most is None or self.value <= self.most)

    @property
    def open(self) -> bool:
        """Whether the number decides nothing: it is below ``least``, and ``up_to`` is not."""
        if self.up_to is None or self.least is None:
            return False
        return self.value < self.least <= self.up_to


@dataclass(frozen=True)
class Judged:
    """Result of a rule.

    Attributes:
        parts: The statements that decide.
        gives: The numbers in a sentence; of arithmetic the formula with the numbers put in.
        why: One sentence.
    """

    parts: tuple[Part, ...]
    gives: str
    why: str

    @property
    def outcome(self) -> str:
        """One of ``OUTCOMES``."""
        passed = [part.passes for part in self.parts]
        if all(passed):
            return PASS
        if any(passed):
            return PARTIAL
        return NOT_TESTABLE if any(part.open for part in self.parts) else FAIL

    @property
    def condition(self) -> str | None:
        """The parts that pass, those that fail and those that are open; None where all parts have one outcome."""
        kinds = {
            "for": [part.text for part in self.parts if part.passes],
            "not for": [part.text for part in self.parts if not (part.passes or part.open)],
            "open for": [part.text for part in self.parts if part.open],
        }
        texts_of_kinds = [f"{kind} {'; '.join(texts)}" for kind, texts in kinds.items() if texts]
        return "; ".join(texts_of_kinds) if len(texts_of_kinds) > 1 else None


@dataclass(frozen=True)
class Expected:
    """A number that was known beforehand: ``low`` to ``high``, in the words of the facts."""

    name: str
    low: float
    high: float


@dataclass(frozen=True)
class Probe:
    """How a claim is tested: a row of the facts, and its code.

    Attributes:
        number: Its place in the facts, from 1.
        how: Source of the numbers.
        rule: Condition of a pass, in words.
        measure: The numbers of one trial.
        judge: The rule; reads the means over the seeds.
        decides: The number that is reported with its range; None where nothing is drawn and one trial is enough.
        stretches: Whether that number can depend on the step time that is fitted to OPT-13B.
        needs: Sources that the test needs. The claim is not testable if one of them is not ``AT_HAND``.
        experiment: The experiment that would test it.
        expected_values: Numbers that were known beforehand.
        expected: The outcome that was expected; None where none was.
    """

    number: int
    how: str
    rule: str
    measure: Measure
    judge: Rule
    decides: str | None = None
    stretches: bool = True
    needs: Sequence[str] = ()
    experiment: str | None = None
    expected_values: Sequence[Expected] = ()
    expected: str | None = None

    @property
    def missing(self) -> list[str]:
        """Needed sources that are not available."""
        return [need for need in self.needs if need not in AT_HAND]


@dataclass(frozen=True)
class Measured:
    """The numbers of a test.

    Attributes:
        values: Means over the seeds.
        lowest, highest: Range of the number that decides; None where nothing is drawn.
        step_1pct: How far that number moves, in the first seed, where all steps take 1 % longer; None where it cannot
            depend on it.
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
    outcome = NOT_TESTABLE if missing else judged.outcome
    return {
        "number": probe.number,
        "text": source.text,
        "claim": source.claim,
        "test": source.test,
        "expected": source.expected,
        "how": probe.how,
        "rule": probe.rule,
        "gives": judged.gives,
        "outcome": outcome,
        "condition": None if missing else judged.condition,
        "why": judged.why,
        "experiment": probe.experiment,
        "differs": differences(probe, measured.values, outcome),
        "values": dict(measured.values),
        "decides": probe.decides,
        "minimum": measured.lowest,
        "maximum": measured.highest,
        "step_1pct": measured.step_1pct,
    }


def differences(probe: Probe, values: Mapping[str, float], outcome: str) -> list[str]:
    """Numbers outside their expected ranges, and an outcome other than the expected one."""
    found = [
        f"{known.name.replace('_', ' ')}: {values[known.name]:.4g}, expected {_span(known)}"
        for known in probe.expected_values
        if not known.low <= values[known.name] <= known.high
    ]
    if probe.expected not in (None, outcome):
        found.append(f"outcome: {outcome}, expected {probe.expected}")
    return found


def _span(known: Expected) -> str:
    return f"{known.low:g}" if known.low == known.high else f"{known.low:g} to {known.high:g}"
