"""Prepare, serve and write one load, for ``fragmeter simulate`` and ``fragmeter.simulate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...sim import Run, Workload, summary, write
from ...sim.cluster import Cluster, ClusterRun, cluster_summary, simulate_cluster, write_cluster
from ...sim.config.unread import refuse_unread_in_cluster
from ...sim.engine.observer import Observer
from ...sim.engine.run import simulate as serve_one
from ...sim.metrics.result import Recording
from ...sim.types.errors import SettingError
from ...sim.types.ticks import PER_SECOND
from ...traces import Pacing, Trace
from .inputs import DEFAULT_DATASET, DEFAULT_PROMPTS, Inputs
from .unread import refuse_unread

#: Requests/s of a drawn dataset without arrivals.
DEFAULT_RATE = 1.0


@dataclass(frozen=True)
class Load:
    """Requests to be served, and the replicas that serve them.

    Attributes:
        inputs: The inputs; a dataset without arrivals has ``DEFAULT_RATE``.
        cluster: The replicas; by default one, or all engines that share experts.
        work: The requests.
        trace: The trace of the requests; None if they are drawn or were given as a workload.
        unpaced: Whether the inputs have no arrivals.
        described: Origin of the requests, for ``run.json``.
    """

    inputs: Inputs
    cluster: Cluster
    work: Workload
    trace: Trace | None
    unpaced: bool
    described: Mapping[str, Any]

    @property
    def in_words(self) -> str:
        """The load in one line."""
        return f"{self.work.name}, {len(self.work):,} requests{_arriving(self.inputs, self.unpaced)}"


def load_in_words(inputs: Inputs) -> str | None:
    """The load that several runs have in common, in one line; None unless its lengths or its users are given."""
    requests, random = inputs.requests, inputs.requests.random_load
    if random is None and inputs.pacing.users is None:
        return None
    drawn = random.name if random is not None else f"Synthetic {requests.dataset or DEFAULT_DATASET}"
    name = drawn if requests.trace is None else requests.trace.name
    count = requests.num_prompts or (DEFAULT_PROMPTS if requests.trace is None else None)
    counted = "" if count is None else f", {count:,} requests"
    return f"{name}{counted}{_arriving(inputs, _is_unpaced(inputs))}"


def _is_unpaced(inputs: Inputs) -> bool:
    return inputs.requests.trace is None and inputs.pacing == Pacing()


def _arriving(inputs: Inputs, unpaced: bool) -> str:
    """How requests arrive, behind their lengths; empty where a file or a data set has flags that say it."""
    if unpaced:
        return f"; no arrivals are given, so {DEFAULT_RATE:g} request/s (--request-rate)"
    is_given = inputs.requests.random_load is not None or inputs.pacing.users is not None
    return f"; {inputs.pacing.in_words}" if is_given else ""


def prepare(inputs: Inputs, cluster: Cluster = Cluster(), given: Trace | Workload | None = None) -> Load:
    """Prepare a load, and refuse flags that nothing reads.

    Args:
        given: Requests in memory, in place of those of the inputs.

    Raises:
        UserError: Requests that cannot be made, or a flag that nothing reads.
    """
    unpaced = given is None and _is_unpaced(inputs)
    if unpaced:
        inputs = replace(inputs, pacing=Pacing(request_rate=DEFAULT_RATE))
    if isinstance(given, Workload):
        trace, work, described = None, given, {"trace": given.name, "num_prompts": len(given)}
    else:
        lengths = inputs.lengths() if given is None else inputs.taken(given, given.name)
        work = inputs.workload(lengths)
        trace = None if given is None and inputs.requests.trace is None else lengths
        described = inputs.describe(work, None if given is None else given.name)
    if cluster == Cluster():
        cluster = Cluster(num_replicas=inputs.settings.data_parallel_size)
    refuse_unread([(inputs, work)])
    refuse_unread_in_cluster(cluster, work)
    return Load(inputs, cluster, work, trace, unpaced, described)


def refuse_for_cluster(cluster: Cluster, **recordings: object) -> None:
    """Refuse recordings with several replicas: a recording covers a single replica.

    Raises:
        SettingError: Names the requested recording.
    """
    for field, value in recordings.items():
        if value and cluster != Cluster():
            shown = str(value) if isinstance(value, Path) else value
            raise SettingError(
                field,
                shown,
                "needs a single replica; leave out --num-replicas, --prefill-replicas and --decode-replicas",
            )


def serve(load: Load, progress: Callable[[int], None] | None = None) -> Run | ClusterRun:
    """Serve a load to the last request, on one replica or on several.

    Args:
        progress: Called now and then with the number of arrived requests.

    Raises:
        UserError, SimulationFault: As ``sim.simulate``.
    """
    settings = load.inputs.settings
    run: Run | ClusterRun
    if load.cluster != Cluster():
        run = simulate_cluster(settings, load.work, load.cluster, progress=progress)
    else:
        run = serve_one(settings, load.work, progress=progress)
    _require_measured(run)
    return run


def serve_observed(load: Load, observers: Sequence[Observer], progress: Callable[[int], None] | None = None) -> Run:
    """Serve a load on one replica, with block ids for its observers; the results are those of ``serve``.

    Raises:
        UserError, SimulationFault: As ``sim.simulate``.
    """
    settings = load.inputs.settings
    run = serve_one(replace(settings, ids=True), load.work, None, progress, observers)
    _require_measured(run)
    return replace(run, settings=settings)


def _require_measured(run: Run | ClusterRun) -> None:
    """Raise SettingError where the settings' window begins after the run."""
    end_ticks = run.end_ticks if isinstance(run, ClusterRun) else run.log.end_ticks
    if run.settings.edges[:1] > (end_ticks,):
        remedy = f"begins after the run, which ends at {end_ticks / PER_SECOND:.1f} s; begin earlier"
        raise SettingError("window", run.settings.window, remedy)


def summarize(run: Run | ClusterRun, *, divided: bool = True) -> dict[str, Any]:
    """The content of a run's ``summary.json``; ``divided`` as in ``summary``."""
    return cluster_summary(run, divided=divided) if isinstance(run, ClusterRun) else summary(run, divided=divided)


def write_result(
    run: Run | ClusterRun,
    directory: str | Path,
    request: Mapping[str, Any],
    recordings: Mapping[str, Recording] | None = None,
    content: Mapping[str, Any] | None = None,
) -> Path:
    """Write the result folder of a run.

    Args:
        request: Origin of the workload.
        recordings: Recordings of a single replica.
        content: ``summarize(run)``, where it is known.

    Raises:
        UserError: As ``sim.metrics.result.write``.
    """
    if isinstance(run, ClusterRun):
        return write_cluster(run, directory, request, content)
    return write(run, directory, request, recordings, content)
