"""A search of settings for the best of one result, by optuna's tree of Parzen estimators.

    ask 8 trials -> run those that are not in the store -> tell all 8, in their order -> ask 8 more -> ...

The next trials depend only on the seed and on the results of earlier rounds. They do not depend on the workers, their
number, or the order in which trials finish. An interrupted search therefore asks for the same trials again, reads the
finished ones from its folder, and continues; its files equal those of an uninterrupted search. Rounds have one size for
the same reason. Within a round the estimator takes trials without a result to be bad (a constant liar), so that not
all trials are near one point.

A trial that cannot be run is reported as failed. For limits the estimator gets the amount by which a trial exceeds
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

from ...sim.metrics.objectives import Objectives
from ...sim.types.errors import MissingExtra, SettingError, UserError, install
from ...sim.types.optional import not_none
from ..runs.grid import PART_OF, Point, changed, known_name, listed
from ..runs.inputs import Inputs
from ..runs.parallel import Workers
from ..runs.points import Store, Workloads, flat
from ..runs.sweeping import Swept, sweep_points
from ..runs.unread import Unread, given

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

#: Trials that are asked for before any result is reported.
ROUND = 8
MOST_TRIALS = 100_000
_EXAMPLE = (
    "must be NAME=VALUE,VALUE or NAME=FIRST:LAST, with :STEP or :log behind, such as policy=orca,vllm-v1,"
    " block_size=1:128:log or request_rate=0.5:8.0"
)
_METRIC_EXAMPLE = "is not a number in the summary; name one of simulate --json but cache_worth, such as request_throughput, or of fragmeter list metrics"


@dataclass(frozen=True)
class Axis:
    """The values of a setting in a search.

    Attributes:
        text: The axis as the user wrote it.
        choices: The possible values; None for a range.
        first, last, step: The range, both ends included; whole numbers if the user gave whole numbers. Step None: any
            value between.
        log: Whether the search samples the logarithm of the value.
    """

    text: str
    choices: tuple[str, ...] | None = None
    first: int | float = 0
    last: int | float = 0
    step: int | float | None = None
    log: bool = False

    @property
    def ends(self) -> tuple[str, ...]:
        """Values that show whether any value of the axis is valid."""
        return self.choices or (flag_text(self.first), flag_text(self.last))

    def distribution(self) -> BaseDistribution:
        """The axis as optuna's distribution."""
        from optuna import distributions

        with catch_warnings():
            # A step that does not lead to the last value ends below it, as in a grid.
            simplefilter("ignore", UserWarning)
            return self._distribution(distributions)

    def _distribution(self, distributions: Any) -> BaseDistribution:
        if self.choices is not None:
            return distributions.CategoricalDistribution(self.choices)
        if isinstance(self.first, int):
            return distributions.IntDistribution(self.first, self.last, self.log, self.step or 1)
        return distributions.FloatDistribution(self.first, self.last, self.log, self.step)


@dataclass(frozen=True)
class Wanted:
    """The objective of a search.

    Attributes:
        metric: A number of the summary, by its path.
        maximize: Whether larger values are better.
        limits: Upper limits of other numbers.
    """

    metric: str
    maximize: bool
    limits: Mapping[str, float]

    def value(self, swept: Swept) -> float | None:
        """The metric of a trial; None if the trial could not be run.

        Raises:
            SettingError: The summary has no number of that path.
        """
        return self._number(swept, self.metric, "maximize" if self.maximize else "minimize")

    def beyond(self, swept: Swept) -> dict[str, float]:
        """Excess of a trial over each limit, as a share of the limit (absolute for a limit of 0); negative within the limit."""
        # A limit of 0 has no shares.
        return {
            name: (not_none(self._number(swept, name, "at_most")) - limit) / (abs(limit) or 1)
            for name, limit in self.limits.items()
        }

    @staticmethod
    def _number(swept: Swept, name: str, flag: str) -> float | None:
        if swept.outcome.summary is None:
            return None
        value = dict(flat(swept.outcome.summary)).get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise SettingError(flag, name, _METRIC_EXAMPLE)
        return float(value)

    def best(self, found: Sequence[Swept]) -> list[int]:
        """Indices of the trials within all limits, the best first; on a tie the earlier one first."""
        fit = [place for place, swept in enumerate(found) if self._fits(swept)]
        return sorted(fit, key=lambda place: not_none(self.value(found[place])) * (-1 if self.maximize else 1))

    def _fits(self, swept: Swept) -> bool:
        return swept.outcome.summary is not None and all(share <= 0 for share in self.beyond(swept).values())


def search_axes(texts: Sequence[str]) -> dict[str, Axis]:
    """Axes of a search by name.

    Raises:
        SettingError: An axis is invalid, names no setting, or is given twice.
    """
    found: dict[str, Axis] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = known_name(name, "search", text) if equals else ""
        if not name or not values:
            raise SettingError("search", text, _EXAMPLE)
        if name in found:
            raise SettingError("search", text, f"gives {name} a second time; put all its values into one")
        found[name] = _axis(values, text)
    return found


def _axis(values: str, text: str) -> Axis:
    parts = values.split(":")
    if "," in values or not 2 <= len(parts) <= 3 or not _is_number(parts[0]):
        return Axis(text, choices=tuple(part.strip() for part in listed(values)))
    log = parts[2:] == ["log"]
    numbers = parts[:2] if log else parts
    if not all(map(_is_number, numbers)):
        raise SettingError("search", text, _EXAMPLE)
    whole = all(map(_is_whole, numbers))
    first, last, *step = ((int if whole else float)(number) for number in numbers)
    if not first < last or any(each <= 0 for each in step) or log and first <= 0:
        raise SettingError("search", text, f"is a range without values; {_EXAMPLE}")
    if any(each > last - first for each in step):
        raise SettingError("search", text, "is a range of one value; give a smaller step")
    return Axis(text, None, first, last, step[0] if step else None, log)


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _is_whole(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def flag_text(value: str | float) -> str:
    """A value as text of a command line; fractions with six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def limits(texts: Sequence[str]) -> dict[str, float]:
    """Read METRIC=VALUE, the upper limit of a number of the summary.

    Raises:
        SettingError: The text has another form, the value is not a number, or a metric is given twice.
    """
    found: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals or not _is_number(value):
            raise SettingError("at_most", text, "must be METRIC=VALUE, such as p99_ttft_ms=500")
        name = name.strip()
        if name in found:
            raise SettingError("at_most", text, f"gives {name} a second time; leave one out")
        found[name] = float(value)
    return found


def search(
    base: Inputs,
    axes: Mapping[str, Axis],
    wanted: Wanted,
    trials: int,
    workers: Workers,
    store: Store | None = None,
    goal: Objectives | None = None,
) -> list[Swept]:
    """Run the trials, in the order in which the estimator asks for them.

    The seed of the search is that of the settings; ``goal`` is as in ``sweep_points``.

    Raises:
        UserError: An invalid value, requests that cannot be made, or no number of that path in the summary.
        MissingExtra: optuna is not installed.
        SimulationFault: A trial fails because of an internal fault.
    """
    if not 1 <= trials <= MOST_TRIALS:
        raise SettingError("trials", trials, f"must be from 1 to {MOST_TRIALS}")
    study, distributions = _study(base.settings.seed, wanted, axes)
    for name, axis in axes.items():
        for value in axis.ends:
            changed(base, {name: value})
    _refuse_unread(base, axes)
    found: list[Swept] = []
    while len(found) < trials:
        proposed = [study.ask(distributions) for _ in range(min(ROUND, trials - len(found)))]
        values = [{name: flag_text(value) for name, value in trial.params.items()} for trial in proposed]
        swept = sweep_points([Point(each, changed(base, each)) for each in values], workers, store, goal, checked=True)
        for trial, each in zip(proposed, swept, strict=True):
            _tell(study, trial, each, wanted)
        found += swept
    return found


def _refuse_unread(base: Inputs, axes: Mapping[str, Axis]) -> None:
    """Refuse settings that no combination of the ends of the axes reads.

    Raises:
        SettingError: Names the first one.
    """
    # Settings of the replica change fastest, so that each workload is made once.
    names = sorted(axes, key=lambda name: PART_OF[name] == "settings")
    left = {name for name, _ in given(base)} | axes.keys()
    unread, workloads = Unread(), Workloads()
    for ends in product(*(axes[name].ends for name in names)):
        try:
            inputs = changed(base, dict(zip(names, ends, strict=True)))
            unread.see(inputs, workloads.of(inputs))
        except UserError:
            # A trial that cannot be run reports the reason itself.
            continue
        if left <= unread.read:
            return
    unread.refuse()


def _study(seed: int, wanted: Wanted, axes: Mapping[str, Axis]) -> tuple[Any, dict[str, BaseDistribution]]:
    try:
        import optuna
    except ImportError:
        raise MissingExtra(f"search: the package optuna is not installed; {install('optuna')}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed % 2**32, constant_liar=True)
    study = optuna.create_study(sampler=sampler, direction="maximize" if wanted.maximize else "minimize")
    return study, {name: axis.distribution() for name, axis in axes.items()}


def _tell(study: Any, trial: Any, swept: Swept, wanted: Wanted) -> None:
    value = wanted.value(swept)
    if value is None:
        from optuna.trial import TrialState

        study.tell(trial, state=TrialState.FAIL)
        return
    for name, share in wanted.beyond(swept).items():
        trial.set_constraint(name, share)
    study.tell(trial, value)


def check_found(found: Sequence[Swept]) -> None:
    """Whether any trial could be run.

    Raises:
        UserError: No trial could be run; gives the reason for the first one.
    """
    if all(swept.outcome.error for swept in found):
        raise UserError(found[0].outcome.error)
