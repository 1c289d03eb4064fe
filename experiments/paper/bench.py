"""Runs of the paper's measurements, each done once, in parallel where the start of worker processes pays off."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...sim import Run, Workload, simulate
from ...sim.cost import PaperCost
from ...sim.engine.run import simulate_window
from ...sim.metrics.result import memory_table
from ...sim.metrics.summary import waste
from ...sim.metrics.views import nine_buckets
from ...sim.output import frames as pd
from ...sim.types.ticks import PER_SECOND
from ..runs.output import track
from ..runs.parallel import in_parallel
from .context_cost import ContextCost
from .paper import Experiment, Source
from .settings import paper_settings

#: Metrics of cases that are served to the end only.
OVER_THE_RUN = ("requests_per_s", "output_tokens_per_s")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a measurement under a policy, with a seed and a scale of the step time.

    Attributes:
        by_context: Whether the step time depends on the context.
        to_the_end: Whether the run continues to the last request, for rates over the whole run.
    """

    experiment: Experiment
    seed: int
    policy: str
    scale: float
    by_context: bool = True
    to_the_end: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """What figures of the paper take from the simulation of one ``Case``: shares of the KV cache, and requests in a batch.

    Attributes:
        num_blocks, block_size: The pool; ``block_size`` in tokens.
        values: Means over iterations in the window, by metric: ``*_pct`` of the paper's categories and of the nine buckets,
            in percent of the pool; ``batched_requests``; and those of ``OVER_THE_RUN`` for a case that is served to the end.
        over_time: The percentages as means over time.
    """

    num_blocks: int
    block_size: int
    values: dict[str, float]
    over_time: dict[str, float]


class Bench:
    """Runs cases over one source of requests and keeps their results."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._workloads: dict[tuple[Experiment, int], Workload] = {}
        self._measured: dict[Case, Measured] = {}
        self._timelines: dict[Case, pd.DataFrame] = {}

    def measure(self, cases: Sequence[Case], subject: str) -> list[Measured]:
        """The results of the cases, in order; ``subject`` is the text of the progress bar."""
        missing = [case for case in dict.fromkeys(cases) if case not in self._measured]
        results = in_parallel(measure, [(self._workload(case), case) for case in missing])
        for case, measured in zip(missing, track(results, subject, len(missing)), strict=True):
            self._measured[case] = measured
        return [self._measured[case] for case in cases]

    def measure_groups(self, groups: Mapping[Key, Sequence[Case]], subject: str) -> dict[Key, list[Measured]]:
        """As ``measure``, for cases in groups."""
        results = iter(self.measure([case for group in groups.values() for case in group], subject))
        return {key: [next(results) for _ in group] for key, group in groups.items()}

    def timeline(self, case: Case) -> pd.DataFrame:
        """The ledger of a case over the span in which requests arrive, one row per change, from ``start_s``."""
        if case not in self._timelines:
            table = memory_table(_run(self._workload(case), case))
            start_s = table.pop("start_ticks") / PER_SECOND
            table.insert(0, "start_s", start_s)
            self._timelines[case] = table[start_s <= case.experiment.duration_s]
        return self._timelines[case]

    def _workload(self, case: Case) -> Workload:
        key = case.experiment, case.seed
        if key not in self._workloads:
            self._workloads[key] = self.source.workload(*key)
        return self._workloads[key]


def measure(workload: Workload, case: Case) -> Measured:
    """Serve a workload as far as the case needs it, and compute the case's results."""
    run = _run(workload, case)
    views = waste(run.window)
    return Measured(
        run.replica.num_blocks,
        run.replica.block_size,
        _percentages(views["mean_over_iterations_pct"])
        | {"batched_requests": run.window.mean_batch}
        | (_rates(run) if case.to_the_end else {}),
        _percentages(views["mean_over_time_pct"]),
    )


def _rates(run: Run) -> dict[str, float]:
    seconds, served = run.log.end_ticks / PER_SECOND, ~run.refused
    counts = int(served.sum()), int(run.workload.output_tokens[served].sum())
    return {name: count / seconds for name, count in zip(OVER_THE_RUN, counts, strict=True)}


def _run(workload: Workload, case: Case) -> Run:
    chosen = paper_settings(policy=case.policy, step_scale=case.scale, window=case.experiment.window_s)
    serve = simulate if case.to_the_end else simulate_window
    cost = ContextCost(case.scale) if case.by_context else PaperCost(case.scale)
    return serve(chosen, workload, cost)


def _percentages(views: dict[str, dict[str, float]]) -> dict[str, float]:
    shares = views["paper_view"] | nine_buckets(views["buckets"])
    return {f"{name}_pct": value for name, value in shares.items()}
