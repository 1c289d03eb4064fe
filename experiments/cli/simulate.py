"""``fragmeter simulate``: one run, its summary on the terminal, and its recordings."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from cyclopts import Parameter
from rich.console import Console

from ...reports.data.answer import sentence
from ...reports.page.table import Table
from ...reports.style.labels import counted
from ...sim.cluster import Cluster, ClusterRun
from ...sim.engine.observer import Observer
from ...sim.memory.accounting.kv_groups import STATE
from ...sim.metrics.openmetrics import DEFAULT_INTERVAL_S, LEAST_INTERVAL_S, MOST_INTERVAL_S
from ...sim.metrics.openmetrics import openmetrics as metrics_text
from ...sim.metrics.registry import LATENCIES, METRICS, STATISTICS, key, metric_text
from ...sim.metrics.result import check_target
from ...sim.metrics.views import (
    PAPER_VIEW,
    SLOT_CATEGORIES,
    SLOTS_VIEW,
    UNUSED,
    USAGE_VIEW,
    VIEWS,
    Category,
    View,
    ViewName,
    amount,
    definition_lines,
    nine_buckets,
)
from ...sim.output.files import require_apart, require_writable_file, write_whole
from ...sim.runs.run import Run
from ...sim.types.columns import spilling
from ...sim.types.errors import SettingError, UserError
from ...sim.types.optional import not_none
from ...traces import Pacing, Reading, Trace
from ..measured.evidence import engines_lines, evidence
from ..measured.servers_like import Served
from ..runs.inputs import CLUSTER, PACING, READING, REQUESTS, Inputs, Requests, left_out_lines, named_files
from ..runs.near_saturation import saturation_of
from ..runs.output import RESULTS, JsonTarget, Report
from ..runs.serving import (
    Load,
    prepare,
    refuse_for_cluster,
    serve,
    serve_observed,
    summarize,
    write_result,
)
from ..runs.unread import refuse_flags
from .replica_flags import SETTINGS, SettingsFlags

if TYPE_CHECKING:
    from ...sim.recording.blocks import BlockMap
    from ...sim.recording.plans import Plan


class WantedPlan(NamedTuple):
    """A requested recording of step plans.

    Attributes:
        file: Output file; None for ``plan.npz`` in the result folder.
        first_step, num_steps, shuffle_ids: See ``sim.recording.plans.record``.
    """

    file: Path | None
    first_step: int
    num_steps: int | None
    shuffle_ids: bool

    def path(self, out: Path | None) -> Path:
        """The path of the recording, with results in ``out``."""
        return not_none(out) / "plan.npz" if self.file is None else self.file


def wanted_plan(
    record_plan: bool | Path | None, record_steps: str | None, shuffle_ids: bool, out: Path | None
) -> WantedPlan | None:
    """The recording that the flags request; None without one.

    Raises:
        SettingError: It has no output file, or no steps.
        UserError: The file cannot be written.
    """
    if not record_plan:
        remedy = "applies only to a recorded plan; give --record-plan"
        refuse_flags(remedy, record_steps=record_steps, shuffle_ids=shuffle_ids)
        return None
    file = None if record_plan is True else record_plan
    if file is not None:
        require_writable_file(file)
    elif out is None:
        raise SettingError("record_plan", True, "has no place; name a file, or give --out")
    return WantedPlan(file, *_steps(record_steps), shuffle_ids)


def _steps(record_steps: str | None) -> tuple[int, int | None]:
    """First step and number of steps."""
    if record_steps is None:
        return 0, None
    found = re.fullmatch(r"(\d{1,12}):(\d{1,12})?", record_steps)
    if found is None or found[2] and not int(found[2]):
        remedy = "must be START:COUNT in whole steps, or START: for all that follow"
        raise SettingError("record_steps", record_steps, remedy)
    return int(found[1]), int(found[2]) if found[2] else None


#: Of fewer it takes no time worth a line what serves them.
_MANY_REQUESTS = 10_000


def print_summary(content: Mapping[str, Any], console: Console, view: ViewName = "paper") -> None:
    """Print the tables of ``sim.metrics.summary``: throughput, latency, the KV pool in a view, and KV groups if the model has
    several. Categories are defined below their table."""
    replicas = _shown_replicas(content["replicas"]) if "replicas" in content else []
    for table in (_throughput(content), *replicas, _latency(content)):
        console.print(table)
        console.print()
    _print_defined(_waste(content["waste"], VIEWS[view]), _pool_definitions(VIEWS[view]), console)
    if content.get("kv_groups"):
        buckets = _group_buckets(content["kv_groups"])
        defined = [(SLOT_CATEGORIES[bucket].label, SLOT_CATEGORIES[bucket].definition) for bucket in buckets]
        _print_defined(_groups(content["kv_groups"], buckets), defined, console)


def _print_defined(table: Table, definitions: Sequence[tuple[str, str]], console: Console) -> None:
    console.print(table)
    for text in definition_lines(definitions):
        console.print(text, style="dim", markup=False, highlight=False)
    console.print()


def _throughput(content: Mapping[str, Any]) -> Table:
    table = Table("throughput", "", "")
    table.add_row("completed", f"{content['completed']:,}", f"in {content['duration']:,.1f} s")
    table.add_row("refused", f"{content['refused']:,}", "")
    if "rejected" in content:
        table.add_row("rejected", f"{content['rejected']:,}", "by the API server's limits")
    arriving = content["request_throughput_while_arriving"]
    beside = "" if arriving is None else f"{metric_text('request_throughput', arriving)} while requests arrive"
    steps = f"over {content['waste']['num_steps']:,} steps"
    for path, more in (("request_throughput", beside), ("output_throughput", ""), ("mean_batch", steps)):
        table.add_row(METRICS[path].label, metric_text(path, content[path]), more)
    preemptions = content["preemptions"]
    table.add_row("preemptions", f"{sum(preemptions.values()):,}", f"{preemptions['swap']:,} by swapping")
    table.add_row("KV pool", f"{content['num_gpu_blocks']:,}", f"blocks of {counted(content['block_size'], 'slot')}")
    if content["copied_slots"]:
        table.add_row("copied", f"{content['copied_slots']:,}", "slots on the device")
    shared = content.get("sharing")
    if shared is not None:
        saved = f"fewer blocks, {shared['mean_saved_blocks']:,.1f} in the mean"
        table.add_row("saved by sharing", f"{shared['saved_pct']:.1f} %", saved)
    host = content.get("host_pool")
    if host is not None:
        table.add_row("swap space", f"{host['max_used_blocks']:,}", f"of {host['num_cpu_blocks']:,} blocks at most")
    moved = content.get("kv_transfer")
    if moved is not None:
        table.add_row("KV transferred, GB", f"{moved['bytes'] / 1e9:,.2f}", f"in {moved['mean_ms']:,.2f} ms on average")
    cache = content["prefix_cache"]
    if cache is not None:
        looked_up = f"of {cache['queried_tokens']:,} tokens looked up"
        table.add_row("prefix cache hits", f"{cache['hit_rate']:.1%}", looked_up)
    offloaded = content.get("kv_offloading")
    if offloaded is not None:
        looked_up = f"of {offloaded['queried_tokens']:,} tokens that the GPU did not have"
        table.add_row("hits on the host", f"{offloaded['hit_rate']:.1%}", looked_up)
        for label, tier in offloaded.get("tiers", {}).items():
            had = f"which had {tier['max_used_blocks']:,} blocks at most"
            table.add_row(f"of these from {label}", f"{tier['hit_rate']:.1%}", had)
        table.add_row(
            "blocks on the host", f"{offloaded['max_used_blocks']:,}", f"of {offloaded['num_blocks']:,} at most"
        )
        if "second_pool_blocks" in offloaded:
            most, used = offloaded["second_pool_blocks"], offloaded["max_used_second_pool_blocks"]
            kind = "states" if content["kv_groups"][-1]["name"] == STATE else "windows"
            table.add_row(f"{kind} on the host", f"{used:,}", f"of {most:,} at most")
    drafted = content.get("speculative_decoding")
    if drafted is not None:
        tokens = f"of {drafted['spec_decode_draft_tokens']:,} draft tokens"
        rate, length = (f"spec_decode_acceptance_{name}" for name in ("rate", "length"))
        table.add_row("acceptance rate", f"{metric_text(f'speculative_decoding.{rate}', drafted[rate])} %", tokens)
        steps = f"tokens a draft, of {drafted['spec_decode_num_drafts']:,} drafts"
        table.add_row("acceptance length", metric_text(f"speculative_decoding.{length}", drafted[length]), steps)
    return table


def _shown_replicas(content: Sequence[Mapping[str, Any]]) -> list[Table | str]:
    """The table of the first replicas, and how many more there are."""
    more = len(content) - REPLICAS_SHOWN
    rest = [f"{more:,} more replicas: summary.json of --out and --json have them all"] if more > 0 else []
    return [_replicas(content[:REPLICAS_SHOWN]), *rest]


def _replicas(content: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("replica", "requests", "tokens in", "tokens out", "batch", "KV used", "hits", "busy")
    for replica in content:
        seconds, hits = replica["work"]["seconds"], replica["prefix_cache_hit_rate"]
        busy = 1 - seconds["idle"] / fsum(seconds.values()) if fsum(seconds.values()) else 0.0
        counts = (f"{replica[name]:,}" for name in ("requests", "input_tokens", "output_tokens"))
        table.add_row(
            f"{replica['replica']}" if replica["role"] == "both" else f"{replica['replica']} {replica['role']}",
            *counts,
            metric_text("mean_batch", replica["mean_batch"]),
            f"{replica['kv_usage_pct']:.1f} %",
            "-" if hits is None else f"{hits:.1%}",
            f"{busy:.1%}",
        )
    return table


def _latency(content: Mapping[str, Any]) -> Table:
    table = Table("latency, ms", *STATISTICS)
    for name, latency in LATENCIES.items():
        table.add_row(
            latency.meaning, *(metric_text(path, content[path]) for path in (key(each, name) for each in STATISTICS))
        )
    return table


def _waste(content: Mapping[str, Any], view: View) -> Table:
    start_s, end_s = content["window_s"]
    table = Table(f"% of the KV pool, {start_s:g} to {end_s:,.1f} s", "mean over iterations", "mean over time")
    means = [nine_buckets(content[f"mean_over_{of}_pct"]["buckets"]) for of in ("iterations", "time")]
    for shown in (view, USAGE_VIEW):
        table.add_row(shown.title, bold=True)
        for category in (*shown.categories.values(), *_parts(shown)):
            table.add_row(f"  {category.label}", *(f"{amount(shares, category):.1f}" for shares in means))
    return table


def _parts(view: View) -> list[Category]:
    """Parts of a category that have a line of their own."""
    return [UNUSED] if view is PAPER_VIEW else []


def _pool_definitions(view: View) -> list[tuple[str, str]]:
    return [*view.definitions(), *((part.label, part.definition) for part in _parts(view)), *USAGE_VIEW.definitions()]


def _are_pools(content: Sequence[Mapping[str, Any]]) -> bool:
    """Whether KV groups have cached slots of their own: in two pools, or in one buffer for both."""
    return "cached" in content[0]["mean_over_iterations_pct"]


def _group_buckets(content: Sequence[Mapping[str, Any]]) -> list[str]:
    """Buckets with a column in the table of KV groups."""
    shares = [group["mean_over_iterations_pct"] for group in content]
    if _are_pools(content):
        # What they have, as all buckets would not fit on a line.
        return [bucket for bucket in shares[0] | shares[-1] if any(each.get(bucket) for each in shares)]
    return ["live", "reserved", "block_tail", *(["state"] if any("state" in each for each in shares) else [])]


def _groups(content: Sequence[Mapping[str, Any]], buckets: Sequence[str]) -> Table:
    names = [SLOT_CATEGORIES[bucket].label for bucket in buckets]
    title = "% of both KV pools" if _are_pools(content) else f"% of the KV pool, {SLOTS_VIEW.title}"
    table = Table(title, "layers", "window", *names, "padding")
    for group in content:
        shares = group["mean_over_iterations_pct"]
        held = (f"{shares[bucket]:.1f}" if bucket in shares else "-" for bucket in buckets)
        padding = f"{group['page_padding_pct']['mean_over_iterations']:.1f}"
        table.add_row(f"  {group['name']}", f"{group['layers']}", f"{group['window'] or '-'}", *held, padding)
    return table


#: Refused requests, and replicas, that the terminal names.
REFUSED_SHOWN, REPLICAS_SHOWN = 5, 32


def simulate(
    replica: SETTINGS = SettingsFlags(),
    reading: READING = Reading(),
    pacing: PACING = Pacing(),
    requests: REQUESTS = Requests(),
    cluster: CLUSTER = Cluster(),
    *,
    out: Annotated[Path | None, RESULTS] = None,
    record_plan: Annotated[bool | Path | None, Parameter(negative=""), RESULTS] = None,
    record_steps: Annotated[str | None, RESULTS] = None,
    shuffle_ids: Annotated[bool, Parameter(negative=""), RESULTS] = False,
    record_blocks: Annotated[bool, Parameter(negative=""), RESULTS] = False,
    openmetrics: Annotated[Path | None, RESULTS] = None,
    openmetrics_interval: Annotated[float | None, RESULTS] = None,
    view: Annotated[ViewName, RESULTS] = "paper",
    json: JsonTarget = None,
) -> None:
    """Simulate one or several replicas that serve a trace.

    Without a trace, requests are drawn from --dataset; their arrival rate is 1 request/s unless a flag sets it. Flags
    and units are vLLM's where vLLM has the flag.

    Args:
        out: Folder for the results: summary, requests, steps, memory, and the settings to repeat the run.
        record_plan: Record the block tables step by step into this file, or into plan.npz of --out if no file is
            given. Every step of the window is then simulated separately, and each sequence of a step stores its block
            table.
        record_steps: Steps to record, as START:COUNT. By default all.
        shuffle_ids: Allocate block ids in random order. Needs --record-plan.
        record_blocks: Record up to 2,048 blocks at up to 2,000 moments into blocks.npz of --out, for the block map of
            ``fragmeter report``. The results are the same with and without.
        openmetrics: Write the run as vLLM's metrics over simulated time, in OpenMetrics text with timestamps, into this file.
        openmetrics_interval: Simulated seconds between two scrapes of --openmetrics. By default 5.
        view: Division of the KV pool on the terminal: the four categories of the PagedAttention paper, or slots, what becomes
            of each slot. Results have both.
    """
    settings = replica.settings()
    interval_s = _interval(openmetrics, openmetrics_interval)
    report = Report(json)
    # Held until the results are written.
    claim = None if out is None else check_target(out)
    wanted = wanted_plan(record_plan, record_steps, shuffle_ids, out)
    plan_file = None if wanted is None else wanted.file
    read = named_files(settings=replica, requests=requests, pacing=pacing, reading=reading)
    require_apart({"out": out, "record_plan": plan_file, "openmetrics": openmetrics, "json": json}, read)
    if record_blocks and out is None:
        raise SettingError("record_blocks", True, "has no place; give --out")
    inputs = Inputs(settings=settings, requests=requests, reading=reading, pacing=pacing)
    load = prepare(inputs, cluster)
    refuse_for_cluster(cluster, record_plan=record_plan, record_blocks=record_blocks)
    with spilling(None if out is None else out.parent):
        with _progress(len(load.work)) as progress:
            run, plan, blocks = _served(load, wanted, record_blocks, progress)
        if plan is not None and not plan.num_steps:
            remedy = "no step is in the window; begin earlier, or serve more requests"
            raise SettingError("record_steps", record_steps or "0:", remedy)
        if plan is not None and plan_file is not None:
            plan.save(plan_file)
        recorded = {"plan": None if plan_file is not None else plan, "blocks": blocks}
        recordings = {name: recording for name, recording in recorded.items() if recording is not None}
        if openmetrics is not None:
            runs = run.runs if isinstance(run, ClusterRun) else (run,)
            write_whole(openmetrics, "".join(metrics_text(runs, settings.model, interval_s)))
        content = summarize(run, divided=out is not None or report.has_data)
        _keep(partial(write_result, run, request=load.described, recordings=recordings, content=content), out)
        _print(load, run, content, report, out, view)
        if plan is not None and wanted is not None:
            report.point_to(f"Plan of {plan.num_steps:,} steps", wanted.path(out))
        if openmetrics is not None:
            report.point_to("Metrics", openmetrics)
        if blocks is not None and out is not None:
            report.point_to(f"Block map of {_map_text(blocks)}", out / "blocks.npz")
    del claim


def _interval(openmetrics: Path | None, seconds: float | None) -> float:
    """Simulated seconds between two scrapes."""
    if openmetrics is not None:
        require_writable_file(openmetrics)
    if seconds is None:
        return DEFAULT_INTERVAL_S
    if openmetrics is None:
        raise SettingError(
            "openmetrics_interval", seconds, "applies only to --openmetrics; give a file, or leave it out"
        )
    if not MOST_INTERVAL_S >= seconds >= LEAST_INTERVAL_S:
        remedy = f"must be from {LEAST_INTERVAL_S:g} to {MOST_INTERVAL_S:g} seconds"
        raise SettingError("openmetrics_interval", seconds, remedy)
    return seconds


def _map_text(found: BlockMap) -> str:
    """The number of recorded moments and blocks, and their totals."""
    rows, blocks = len(found.block_ids), int(found.block_ids[-1]) + 1
    text = f"{found.num_columns:,} moments and {rows:,} "
    return text + ("blocks" if rows == blocks else f"of {blocks:,} blocks, evenly spaced")


def _served(
    load: Load, wanted: WantedPlan | None, record_blocks: bool, progress: Callable[[int], None] | None
) -> tuple[Run | ClusterRun, Plan | None, BlockMap | None]:
    """Serve the load; return the run, the recorded step plans and the block map, the last two None unless they are asked for."""
    if wanted is None and not record_blocks:
        return serve(load, progress), None, None
    from ...sim.recording.blocks import BlockRecording
    from ...sim.recording.plans import PlanRecording

    settings, work = load.inputs.settings, load.work
    plan = None if wanted is None else PlanRecording(settings, work, *wanted[1:])
    blocks = BlockRecording(settings, work) if record_blocks else None
    observers: list[Observer] = [each for each in (plan, blocks) if each is not None]
    run = serve_observed(load, observers, progress)
    return run, None if plan is None else plan.plan(run), None if blocks is None else blocks.block_map(run)


def _keep(write_to: Callable[..., Path], out: Path | None) -> None:
    """Write the results; beside ``out`` if during the run it became read-only or the folder of another program."""
    if out is None:
        return
    try:
        write_to(directory=out)
    except UserError as error:
        beside = out.with_name(f"{out.name}.new")
        write_to(directory=beside)
        raise UserError(f"{error}; the results of this run are in {beside}") from None


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None] | None]:
    """A progress bar of arrived requests, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda arrived: bar.update(task, completed=arrived)


def _print(
    load: Load, run: Run | ClusterRun, content: dict[str, Any], report: Report, out: Path | None, view: ViewName
) -> None:
    """Print the summary."""
    kind, near = saturation_of(load, run)
    chosen = load.inputs.settings
    known = evidence(chosen, Served.of(kind, load.work, content))
    report.print_line(sentence(content, chosen.as_dict()), style="bold")
    if known.headline():
        report.print_line(f"In the mean {known.headline()}.")
    report.print_line(load.in_words)
    engines = engines_lines(chosen)
    for text in (known.text(), *engines, *_alone_lines(content, run)):
        report.print_line(text)
    print_summary(content, report.console, view)
    for text in (
        *([] if near is None else [near.text()]),
        *_thrashing_lines(content["work"]),
        *_refused_lines(content, load.trace),
        *_python_lines(run, len(load.work)),
        *left_out_lines(load.trace),
    ):
        report.print_line(text)
    if out is not None:
        report.point_to("Results", out)
    ranges = {} if near is None else {"near_saturation": near.as_dict()}
    assumed = {"engines": " ".join(engines)} if engines else {}
    report.data({"load": load.in_words} | content | {"evidence": known.as_dict()} | assumed | ranges)


def _python_lines(run: Run | ClusterRun, requests: int) -> Iterator[str]:
    """Why a long run was not served by the compiled core, if a setting or the requests are the reason."""
    if isinstance(run, Run) and run.in_python is not None and requests >= _MANY_REQUESTS:
        yield f"Served in Python, which takes longer than the compiled core: {run.in_python}."


def _thrashing_lines(work: dict[str, Any]) -> Iterator[str]:
    """A warning that most of the work was recomputation; empty otherwise."""
    if work["thrashing"]:
        share = work["tokens"]["recomputed"] / sum(work["tokens"].values())
        yield f"Thrashing: {share:.0%} of the tokens computed were lost and computed again; admit fewer at once."


def _alone_lines(content: Mapping[str, Any], run: Run | ClusterRun) -> Iterator[str]:
    """The number of prompts that had a step of their own."""
    one = run if isinstance(run, Run) else run.runs[0]
    if number := content.get("prompts_alone"):
        limit = one.replica.policy.limits.max_num_batched_tokens
        prompts = "prompt is" if number == 1 else "prompts are"
        yield (
            f"Alone: {number:,} {prompts} longer than max_num_batched_tokens = {limit:,}, and this policy divides no prompt: "
            "each has a step of its own, once no other prompt is in it."
        )


def _refused_lines(content: dict[str, Any], trace: Trace | None) -> Iterator[str]:
    """The number of refused requests, and the first few of them with the reason."""
    total = content["refused"]
    if not total:
        return
    yield f"Refused: {total} requests that the pool of {content['num_gpu_blocks']} blocks cannot hold."
    shown = content["refused_requests"][:REFUSED_SHOWN]
    for refused in shown:
        request = refused["request"]
        where = f"request {request}"
        if trace is not None:
            where = f"{trace.rows.unit} {trace.rows.number(request)} of the trace"
        yield f"  {where}: needs a pool of {refused['smallest_pool_blocks']} blocks"
    if total > len(shown):
        yield f"  and {total - len(shown)} more; requests.parquet of --out has them all"
