"""``fragmeter.simulate``, and a finished run as a notebook wants it: data frames, two lines of text, a waste bar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from inspect import Parameter
from os import PathLike
from pathlib import Path
from typing import Any

from ...reports.figures.waste_bars import WasteBars, wasted
from ...sim.cluster import ClusterRun, cluster_table_of
from ...sim.engine.run import Run
from ...sim.metrics.result import table_of
from ...sim.metrics.views import HELD_VIEW
from ...sim.output import frames as pd
from ...sim.recording.blocks import BlockMap, BlockRecording
from ...sim.types.errors import SettingError
from ..runs.points import flat
from ..runs.serving import prepare, refuse_for_cluster, serve, serve_observed, summarize, write_result
from .arguments import arguments, signature


def simulate(*, record_blocks: bool = False, **keywords: Any) -> Simulation:
    """Serve a trace on a simulated replica, or on several, to the last request.

    Keyword arguments are the flags of ``fragmeter simulate`` with underscores, by the same names and with the same
    defaults and refusals; ``fragmeter simulate --help`` and docs/python.md explain them. Without a trace, requests are
    drawn from ``dataset``, and arrive at 1 request/s unless an argument says when.

    Args:
        record_blocks: Record what every block holds over time, for ``save`` and the block map of ``fragmeter report``.
            The results are the same with and without.
        keywords: Settings, requests, arrivals and replicas, such as ``policy="vllm-v1"``, ``request_rate=2`` or
            ``num_gpu_blocks_override=2000``. ``trace`` is a path, a pandas DataFrame with the columns of a trace file
            (``prompt_tokens``, ``output_tokens``, ``arrival_s``, ...), a ``traces.Trace`` or a ``sim.Workload``.

    Raises:
        UserError: A keyword is unknown, or a value or a trace cannot be: one line with field, value and remedy.
        SimulationFault: An invariant of the simulator does not hold.
    """
    if not isinstance(record_blocks, bool):
        raise SettingError("record_blocks", record_blocks, "must be True or False")
    inputs, cluster, given = arguments(keywords)
    load = prepare(inputs, cluster, given)
    refuse_for_cluster(cluster, record_blocks=record_blocks)
    if not record_blocks:
        return Simulation(serve(load), load.described)
    recording = BlockRecording(load.inputs.settings, load.work)
    run = serve_observed(load, [recording])
    return Simulation(run, load.described, recording.block_map(run))


_OWN = Parameter("record_blocks", Parameter.KEYWORD_ONLY, default=False, annotation="bool")
simulate.__signature__ = signature(_OWN)  # type: ignore[attr-defined]  # what help() shows


@dataclass(frozen=True, eq=False, repr=False)
class Simulation:
    """A finished run.

    Data frames have times in seconds from the start of the run (``_s``) and durations in milliseconds (``_ms``).

    Attributes:
        run: The simulator's own record, with times in ticks.
        described: How the requests were made, for ``run.json``.
        blocks: What every block held, if that was recorded.
    """

    run: Run | ClusterRun
    described: Mapping[str, Any] = field(default_factory=dict)
    blocks: BlockMap | None = None

    def as_dict(self) -> dict[str, Any]:
        """The summary as ``summary.json`` and ``fragmeter simulate --json`` have it."""
        return self._summary

    @cached_property
    def summary(self) -> pd.Series:
        """Every number of the summary by its path, such as ``mean_ttft_ms`` or ``preemptions.recompute``.

        The keys are those of ``vllm bench serve``. ``pandas.DataFrame([a.summary, b.summary])`` compares runs.
        """
        found = dict(flat({name: value for name, value in self._summary.items() if name != "refused_requests"}))
        return pd.Series(found, name=self.run.settings.policy, dtype=object)

    @cached_property
    def requests(self) -> pd.DataFrame:
        """A row a request, in order of arrival: lengths, times, ``ttft_ms``, ``tpot_ms``, ``e2el_ms``; NaN if refused."""
        return self.table("requests").rename_axis("request")

    @cached_property
    def memory(self) -> pd.DataFrame:
        """The KV pool over time: at each ``start_s`` the slots in each of the nine buckets."""
        return self.table("memory")

    def table(self, name: str) -> pd.DataFrame:
        """A table of the result folder without its columns of ticks.

        Args:
            name: "requests", "residencies", "preemptions", "steps", "memory" or "gaps" (inter-token latencies).
        """
        run = self.run
        found = cluster_table_of(run, name) if isinstance(run, ClusterRun) else table_of(run, name)
        return found[[column for column in found if column != "ticks" and not column.endswith("_ticks")]]

    @property
    def waste(self) -> dict[str, float]:
        """Percent of the pool, mean over iterations: live, reservation, internal, external, free (cached included).

        Reservation and internal fragmentation are as the paper counts them; free slots are no part of external here.
        """
        buckets = self._summary["waste"]["mean_over_iterations_pct"]["buckets"]
        return {group: sum(buckets[bucket] for bucket in parts) for group, parts in HELD_VIEW.items()}

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write the result folder of ``fragmeter simulate --out``, in place of an earlier result, and return its path.

        Raises:
            UserError: The folder holds something else, or cannot be written.
        """
        recordings = {} if self.blocks is None else {"blocks": self.blocks}
        return write_result(self.run, Path(folder), self.described, recordings)

    def __repr__(self) -> str:
        """Two lines: what was run, and what came of it."""
        settings, found = self.run.settings, self._summary
        gpus = settings.tensor_parallel_size * settings.pipeline_parallel_size * found.get("num_replicas", 1)
        refused = f", {found['refused']:,} refused" if found["refused"] else ""
        throughput = f"{found['request_throughput']:,.2f} requests/s, {found['output_throughput']:,.1f} output tokens/s"
        latencies = "; ".join(
            f"{name.upper()} p50 {found[f'median_{name}_ms']:,.1f} ms, p99 {found[f'p99_{name}_ms']:,.1f} ms"
            for name in ("ttft", "tpot")
        )
        return (
            f"{settings.policy}: {settings.model} on {gpus} x {settings.gpu}, {len(self.run.workload):,} requests{refused}\n"
            f"{throughput}; {latencies}; waste {wasted(self.waste):.1f} %"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>{waste_bars(self)._repr_html_()}"

    @cached_property
    def _summary(self) -> dict[str, Any]:
        return summarize(self.run)


def waste_bars(*runs: Simulation, labels: Sequence[str] | None = None) -> WasteBars:
    """What the KV pool of each run was used for, one bar below the other: text when printed, HTML in a notebook.

    Args:
        labels: What to call the runs; by default their policies.

    Raises:
        SettingError: There are more or fewer labels than runs.
    """
    named = [run.run.settings.policy for run in runs] if labels is None else [str(label) for label in labels]
    if len(named) != len(runs):
        raise SettingError("labels", len(named), f"must be one for each of {len(runs)} runs")
    return WasteBars(named, [run.waste for run in runs])
