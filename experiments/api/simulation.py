"""``fragmeter.simulate`` and its result: the keyword arguments, and a finished run as data frames, text and a waste bar.

The keyword arguments are the flags of ``fragmeter simulate`` with underscores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import cache, cached_property
from html import escape
from inspect import Parameter, Signature
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from pydantic import ValidationError

from ...reports.figures.waste_bars import WasteBars
from ...sim import Run, Settings, Workload
from ...sim.cluster import Cluster, ClusterRun, cluster_table_of
from ...sim.config.settings import default_of, setting_error
from ...sim.metrics.registry import METRICS, OF_REQUESTS, key, metric_text
from ...sim.metrics.result import table_of
from ...sim.metrics.views import PAPER_VIEW, WASTE, amount, nine_buckets
from ...sim.output import frames as pd
from ...sim.policy.registry import declaring, options_by_policy, policy
from ...sim.recording.blocks import BlockMap, BlockRecording
from ...sim.spec import gpu
from ...sim.types.errors import SettingError
from ...sim.types.plugins import plugin_code
from ...traces import Pacing, Reading, Trace, is_frame, trace_of_frame
from ..measured.evidence import Evidence, evidence
from ..measured.servers_like import Served
from ..runs.inputs import Inputs, Requests, say_start
from ..runs.near_saturation import ServedLoad
from ..runs.points import flat
from ..runs.serving import prepare, refuse_for_cluster, serve, serve_observed, summarize, write_result

#: Fields of ``Inputs`` that keyword arguments set.
_PARTS = {"settings": Settings, "requests": Requests, "reading": Reading, "pacing": Pacing, "cluster": Cluster}
_PART_OF = {field.name: part for part, kind in _PARTS.items() for field in fields(kind) if field.name != "options"}
#: Flags without a keyword argument, and the alternative to each.
_ELSEWHERE = {
    "out": "is a flag of the command line; call save(folder) of what simulate returns",
    "json": "is a flag of the command line; summary and as_dict() of what simulate returns have the data",
    "record_plan": "is a flag of the command line; use fragmeter simulate --record-plan",
    "record_steps": "applies only to a recorded plan; use fragmeter simulate --record-plan",
    "shuffle_ids": "applies only to a recorded plan; use fragmeter simulate --record-plan",
    "openmetrics": "is written by fragmeter simulate --openmetrics; sim.metrics.openmetrics has the function",
    "openmetrics_interval": "applies only to fragmeter simulate --openmetrics",
    "view": "chooses what a terminal shows; run.waste has the paper's view, and run.memory the buckets",
}
_TRACES = "a path, a pandas DataFrame, a Trace or a Workload"
#: Paths of the summary that the Series leaves out.
_NOT_READ = re.compile(r"^refused_requests|^prefix_cache\..*\.buckets\.")
_SINGLE = (str, bool, int, float, tuple, list, PathLike)


class Arguments(NamedTuple):
    """Arguments of one ``simulate`` call.

    Attributes:
        inputs, cluster: The same as for a command line.
        given: Requests in memory; None if the inputs name a trace file or a dataset.
    """

    inputs: Inputs
    cluster: Cluster
    given: Trace | Workload | None


def arguments(keywords: Mapping[str, Any]) -> Arguments:
    """Read keyword arguments.

    Raises:
        SettingError: An unknown keyword or an invalid value.
        TraceError: A data frame that is not a trace.
    """
    if isinstance(chosen := keywords.get("policy"), str):
        # The import of another package's policy declares its options.
        policy(chosen)
    values = {name: _plain(name, value) for name, value in keywords.items()}
    given = _given(values)
    by_part: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for name, value in values.items():
        by_part[_part_of(name) or ""][name] = value
    try:
        made = {part: kind(**by_part[part]) for part, kind in _PARTS.items()}
    except ValidationError as error:
        raise setting_error(error) from None
    return Arguments(Inputs(**{part: made[part] for part in made if part != "cluster"}), made["cluster"], given)


def _part_of(name: str) -> str | None:
    """The part of the inputs that a keyword sets, options of policies included; None for an unknown keyword."""
    return _PART_OF.get(name) or ("settings" if name in options_by_policy() else None)


def signature(*more: Parameter) -> Signature:
    """The signature of ``simulate``: every keyword with its default.

    Args:
        more: Parameters outside of the keywords.
    """
    keywords = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for kind in _PARTS.values()
        for field in fields(kind)
        if field.name in _PART_OF
    ]
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default_of(name), annotation=_types(name)[0])
        for name in options_by_policy()
    ]
    return Signature([*keywords, *options, *more])


def _plain(name: str, value: Any) -> Any:
    """The value of a keyword as a command line gives it: numpy numbers become Python numbers.

    Raises:
        SettingError: The keyword is unknown, or no flag accepts the type of the value.
    """
    if _part_of(name) is None:
        raise SettingError(name, _shown(value), _ELSEWHERE.get(name) or _nearest(name))
    if name == "trace":
        return value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if value is not None and not isinstance(value, _SINGLE):
        raise SettingError(name, _shown(value), "must be a number, a text, True or False")
    kinds = _types(name)
    if isinstance(value, bool) and bool not in kinds:
        raise SettingError(name, value, "is not a switch; give a value")
    if isinstance(value, PathLike) and str in kinds:
        # The flag takes a name or a path as text.
        return fspath(value)
    if name == "max_tokens" and isinstance(value, int):
        # The flag takes a rule or a number as text.
        return str(value)
    return value


def _shown(value: Any) -> Any:
    """A value as one line of an error message."""
    return value if isinstance(value, str | bool | int | float | None) else type(value).__name__


def _nearest(name: str) -> str:
    """The remedy for an unknown keyword: the nearest known one."""
    near = get_close_matches(name, [*_PART_OF, *options_by_policy(), "record_blocks"], n=3)
    found = f"did you mean {' or '.join(near)}?" if near else "help(fragmeter.simulate) has them all"
    return f"is not a keyword of simulate; {found}"


@cache
def _types(name: str) -> tuple[Any, ...]:
    """The types of a keyword's values."""
    part = _PART_OF.get(name)
    declared = declaring(name) if part is None else _PARTS[part]
    hint = get_type_hints(declared)[name]
    return (hint, *get_args(hint))


def _given(values: dict[str, Any]) -> Trace | Workload | None:
    """Take a trace in memory out of the values.

    Raises:
        SettingError: The value is not a trace, or another argument needs a trace file.
        TraceError: A data frame that is not a trace.
    """
    trace = values.get("trace")
    if trace is None or isinstance(trace, str | PathLike):
        return None
    if not (isinstance(trace, Trace | Workload) or is_frame(trace)):
        raise SettingError("trace", _shown(trace), f"must be {_TRACES}")
    kind = type(trace).__name__
    apart = {
        "reading": "applies only to a trace file",
        "requests": "is part of a Workload",
        "pacing": "is part of a Workload",
    }
    for name in values:
        part = _part_of(name) or ""
        if name == "dataset" or part == "reading" or (isinstance(trace, Workload) and part in apart):
            if name == "trace" or values[name] == getattr(_PARTS[part], name):
                continue
            why = "excludes trace" if name == "dataset" else apart[part]
            raise SettingError(name, _shown(values[name]), f"{why}, and trace is a {kind}; leave it out")
    del values["trace"]
    if not is_frame(trace):
        return trace
    found = trace_of_frame(trace)
    say_start(found, found.name)
    return found


@plugin_code()
def simulate(*, record_blocks: bool = False, **keywords: Any) -> Simulation:
    """Serve a trace on one or several simulated replicas until the last request has finished.

    Keyword arguments are the flags of ``fragmeter simulate`` with underscores: same names, units, defaults and
    refusals. ``fragmeter simulate --help-all`` and docs/python.md explain them. Without a trace, requests are drawn
    from ``dataset`` and arrive at 1 request/s unless another argument sets their arrivals.

    Args:
        record_blocks: Record the contents of every block over time, for ``save`` and the block map of ``fragmeter
            report``. The results are the same with and without.
        keywords: Settings, requests, arrivals and replicas, such as ``policy="vllm-v1"``, ``request_rate=2`` or
            ``num_gpu_blocks_override=2000``. ``trace`` is a path, a pandas DataFrame with the columns of a trace file
            (``prompt_tokens``, ``output_tokens``, ``arrival_s``, ...), a ``traces.Trace`` or a ``sim.Workload``.

    Raises:
        UserError: An unknown keyword, or an invalid value or trace. The message is one line with field, value and
            remedy.
        PluginError: A ``UserError``: a policy or an allocator of another package broke a rule of docs/extending.md, or
            raised an exception, which is the ``__cause__``.
        SimulationFault: A bug: an invariant of the simulator does not hold.
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
        described: Origin of the requests, for ``run.json``.
        blocks: The recorded contents of blocks; None without ``record_blocks``.
    """

    run: Run | ClusterRun
    described: Mapping[str, Any] = field(default_factory=dict)
    blocks: BlockMap | None = None

    def as_dict(self) -> dict[str, Any]:
        """The summary as in ``summary.json`` and ``fragmeter simulate --json``."""
        return self._summary

    @cached_property
    def summary(self) -> pd.Series:
        """The numbers of ``summary.json`` by path, such as ``mean_ttft_ms`` or ``preemptions.recompute``.

        Keys are those of ``vllm bench serve``. Histograms (see ``histograms``) and the list of refused requests (see
        ``requests``) are left out. ``pandas.DataFrame([a.summary, b.summary])`` compares runs.
        """
        found = {path: value for path, value in flat(self._summary) if not _NOT_READ.search(path)}
        return pd.Series(found, name=self.run.settings.policy, dtype=object)

    @cached_property
    def histograms(self) -> dict[str, pd.DataFrame]:
        """Histograms of the prefix cache by vLLM's metric names; empty without a prefix cache.

        Each is a data frame with one row per bucket: ``upto_s``, its upper bound in seconds, and ``blocks``, the
        cumulative number of blocks up to that bound.
        """
        cache = self._summary["prefix_cache"] or {}
        return {
            name: pd.DataFrame({"upto_s": map(float, each["buckets"]), "blocks": each["buckets"].values()})
            for name, each in cache.items()
            if isinstance(each, Mapping) and "buckets" in each
        }

    @cached_property
    def evidence(self) -> Evidence:
        """The measurements behind the step times, and the expected error.

        ``evidence.like.predicted`` has TPOT, TTFT and throughput, each with the interval of servers like this one
        (docs/limits.md).
        """
        load_class = ServedLoad.of(self.run, self.run.workload).load_class
        return evidence(self.run.settings, Served.of(load_class, self.run.workload, self._summary))

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per request in order of arrival: lengths, times, ``ttft_ms``, ``tpot_ms``, ``e2el_ms``; NaN if refused."""
        return self.table("requests").rename_axis("request")

    @cached_property
    def memory(self) -> pd.DataFrame:
        """The KV pool over time: slots in each of the nine buckets at each ``start_s``."""
        return self.table("memory")

    def table(self, name: str) -> pd.DataFrame:
        """A table of the result folder as a data frame, with times in seconds instead of ticks.

        Args:
            name: "requests", "residencies", "preemptions", "steps", "memory" or "gaps" (inter-token latencies).
        """
        run = self.run
        found = cluster_table_of(run, name) if isinstance(run, ClusterRun) else table_of(run, name)
        return found[[column for column in found if column != "ticks" and not column.endswith("_ticks")]]

    @property
    def waste(self) -> dict[str, float]:
        """Percent of the pool by the paper's categories, mean over iterations: ``token_states``, ``reservation``, ``internal``,
        ``external_and_others``. ``sim.metrics.views`` defines them."""
        return PAPER_VIEW.grouped(self._buckets)

    @property
    def _buckets(self) -> dict[str, float]:
        """Percent of the pool by the nine buckets, mean over iterations."""
        return nine_buckets(self._summary["waste"]["mean_over_iterations_pct"]["buckets"])

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write the result folder of ``fragmeter simulate --out``, in place of an earlier result, and return its path.

        Raises:
            UserError: The folder holds other files, or cannot be written.
        """
        recordings = {} if self.blocks is None else {"blocks": self.blocks}
        return write_result(self.run, Path(folder), self.described, recordings, self._summary)

    def __repr__(self) -> str:
        """Two lines: the settings of the run, and its main results."""
        settings, found = self.run.settings, self._summary
        gpus = settings.tensor_parallel_size * settings.pipeline_parallel_size * found.get("num_replicas", 1)
        refused = f", {found['refused']:,} refused" if found["refused"] else ""
        if found.get("rejected"):
            refused += f", {found['rejected']:,} rejected"
        rates = ("request_throughput", "output_throughput")
        throughput = ", ".join(f"{metric_text(path, found[path])} {METRICS[path].label}" for path in rates)
        latencies = "; ".join(
            f"{name.upper()} p50 {metric_text(path, found[path])} ms, p99 {metric_text(tail, found[tail])} ms"
            for name, path, tail in ((name, key("median", name), key("p99", name)) for name in OF_REQUESTS[:2])
        )
        return (
            f"{settings.policy}: {settings.model} on {gpus} x {gpu(settings.gpu).name}, {len(self.run.workload):,} requests{refused}\n"
            f"{throughput}; {latencies}; waste {amount(self._buckets, WASTE):.1f} %"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>{waste_bars(self)._repr_html_()}"

    @cached_property
    def _summary(self) -> dict[str, Any]:
        return summarize(self.run)


def waste_bars(*runs: Simulation, labels: Sequence[str] | None = None) -> WasteBars:
    """Waste bars of several runs, one below the other: text when printed, HTML in a notebook.

    Args:
        labels: Labels of the runs; by default their policies.

    Raises:
        SettingError: The number of labels differs from the number of runs.
    """
    named = [run.run.settings.policy for run in runs] if labels is None else [str(label) for label in labels]
    if len(named) != len(runs):
        raise SettingError("labels", len(named), f"must be one for each of {len(runs)} runs")
    return WasteBars(named, [run._buckets for run in runs])
