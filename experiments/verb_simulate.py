"""``fragmeter simulate``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from rich.console import Console
from rich.progress import Progress

from ..sim.errors import SettingError, UserError
from ..sim.files import require_writable, user_paths
from ..sim.plan import Plan, record
from ..sim.result import check_target, write
from ..sim.run import Run
from ..sim.run import simulate as serve
from ..sim.settings import Settings
from ..sim.spec import model
from ..sim.summary import summary
from ..sim.workload import Workload
from ..traces import (
    Pacing,
    Reading,
    Trace,
    check_fits,
    draw,
    holds_load,
    paced,
    read_load,
    read_with_content,
    synthetic_pairs,
    users,
    workload,
)
from .output import RESULTS, JsonTarget, Report
from .plan_flags import WantedPlan, wanted_plan
from .summaries import print_summary
from .trace_files import READING, left_out_told

REPLICA = Group("Replica", sort_key=0)
REQUESTS = Parameter(group=Group("Requests", sort_key=1))
ARRIVALS = Group("Arrivals", sort_key=2)
DATASETS = {"sharegpt": "vllm_sosp23_sharegpt_opt", "alpaca": "alpaca52k_opt"}
DEFAULT_DATASET, DEFAULT_PROMPTS = "sharegpt", 1000
MOST_TOKENS = 2**31
#: Refused requests that are named on the terminal.
REFUSED_SHOWN = 5


def simulate(
    settings: Annotated[Settings, Parameter(name="*", negative_iterable="", group=REPLICA)] = Settings(),
    reading: READING = Reading(),
    pacing: Annotated[Pacing, Parameter(name="*", group=ARRIVALS)] = Pacing(),
    *,
    trace: Annotated[Path | None, REQUESTS] = None,
    dataset: Annotated[Literal["sharegpt", "alpaca"] | None, REQUESTS] = None,
    num_prompts: Annotated[int | None, REQUESTS] = None,
    max_tokens: Annotated[str | None, REQUESTS] = None,
    n: Annotated[int | None, REQUESTS] = None,
    out: Annotated[Path | None, RESULTS] = None,
    record_plan: Annotated[bool | Path | None, Parameter(negative=""), RESULTS] = None,
    record_steps: Annotated[str | None, RESULTS] = None,
    shuffle_ids: Annotated[bool, Parameter(negative=""), RESULTS] = False,
    json: JsonTarget = None,
) -> None:
    """Serve a trace on one simulated replica, and write what happened.

    Flags and units are vLLM's wherever vLLM has one.

    Args:
        trace: Requests, in any form that we know (README.md lists them); our own columns are prompt_tokens and
            output_tokens, and arrival_s, or --request-rate in its stead. hash_ids or session_id may say which prompts
            begin alike. Or a load that traces synth has fitted.
        dataset: Draw requests from a summary that comes with the package, where there is no --trace. By default
            sharegpt.
        num_prompts: How many requests. By default all of a trace, as many as a load's trace had, and 1000 of a dataset.
        max_tokens: What clients tell the server of the output to come: true, pow2 (the next power of two) or a
            number. By default what the trace says, or nothing.
        n: Sequences that every request asks for: samples, or beams with --use-beam-search. By default what the
            trace says, or one.
        out: Folder for the results: summary, requests, steps, memory, and the settings to rerun it.
        record_plan: Record what the block tables do, step by step, into this file, or into plan.npz of --out where
            none is named. The run goes step by step until the window is over, and each sequence of a step costs its
            block table.
        record_steps: The steps to record, as START:COUNT; by default all.
        shuffle_ids: Of a recorded plan: hand out block ids in a random order.
    """
    report = Report(json)
    _check_out(out)
    wanted = wanted_plan(record_plan, record_steps, shuffle_ids, out)
    requests = paced(_requests(settings, reading, trace, dataset, num_prompts), pacing, settings.seed)
    told = _rule(max_tokens)
    work = workload(requests, max_tokens=told, n=n, users=users(pacing, len(requests), settings.seed))
    with _progress(len(work)) as progress:
        run, plan = _served(settings, work, wanted, progress)
    if plan is not None and not plan.num_steps:
        raise SettingError("record_steps", record_steps or "0:", "no step is in the window; begin earlier, or serve more")
    # The hash says which file it was; its folder changes nothing.
    origin = {"trace": trace.name} if trace else {"dataset": dataset or DEFAULT_DATASET}
    _keep(run, out, origin | _drawn(work, pacing, told, n))
    if plan is not None:
        plan.save(wanted.path(out))
    _tell(run, requests if trace else None, report, out)
    if plan is not None:
        report.point_to(f"Plan of {plan.num_steps:,} steps", wanted.path(out))


def _check_out(out: Path | None) -> None:
    """Refuse a folder before work is put into it."""
    if out is not None:
        check_target(out)
        require_writable(out, out, create=True)


def _served(
    settings: Settings, work: Workload, wanted: WantedPlan | None, progress: Callable[[int], None] | None
) -> tuple[Run, Plan | None]:
    """The run, and the plan if one is wanted."""
    if wanted is None:
        return serve(settings, work, progress=progress), None
    return record(settings, work, *wanted[1:], progress=progress)


def _keep(run: Run, out: Path | None, request: dict[str, Any]) -> None:
    if out is not None:
        with user_paths(out):
            write(run, out, request)


def _rule(max_tokens: str | None) -> str | int | None:
    """What clients tell of, a number where it is one."""
    if max_tokens is None or not max_tokens.isdecimal():
        return max_tokens
    if len(max_tokens) > len(str(MOST_TOKENS)) or int(max_tokens) > MOST_TOKENS:
        raise SettingError("max_tokens", max_tokens, f"no model is that long; give at most {MOST_TOKENS}")
    return int(max_tokens)


def _requests(
    settings: Settings, reading: Reading, trace: Path | None, dataset: str | None, num_prompts: int | None
) -> Trace:
    """The requests asked for, none of them longer than the model."""
    if num_prompts is not None and num_prompts < 1:
        raise SettingError("num_prompts", num_prompts, "must be 1 or more")
    max_model_len = settings.max_model_len or model(settings.model).max_model_len
    if trace is None:
        name = dataset or DEFAULT_DATASET
        pairs = synthetic_pairs(DATASETS[name], num_prompts or DEFAULT_PROMPTS, settings.seed, max_model_len)
        return Trace(f"Synthetic {name}", pairs.prompt_tokens, pairs.output_tokens)
    if dataset is not None:
        raise UserError("--trace and --dataset exclude each other; give one of them")
    if holds_load(trace):
        found = draw(read_load(trace), num_prompts, settings.seed)
    else:
        # To skip what is bad is to skip what is too long.
        longest = max_model_len if reading.skip_bad else None
        found = _first(read_with_content(trace, reading, longest), num_prompts)
    check_fits(found, max_model_len, trace)
    return found


def _first(trace: Trace, num_prompts: int | None) -> Trace:
    if num_prompts is None or num_prompts == len(trace):
        return trace
    if num_prompts > len(trace):
        raise SettingError("num_prompts", num_prompts, f"the trace has no more than {len(trace)}; ask for fewer")
    return trace.first(num_prompts)


def _drawn(work: Workload, pacing: Pacing, told: str | int | None, n: int | None) -> dict[str, Any]:
    """How the workload was made, as JSON can say it."""
    rate = "inf" if pacing.request_rate == float("inf") else pacing.request_rate
    more = {name: value for name, value in asdict(pacing).items() if value is not None and name != "request_rate"}
    if pacing.rate_curve is not None:
        more["rate_curve"] = pacing.rate_curve.name
    return {"num_prompts": len(work), "request_rate": rate, "max_tokens": told, "n": n} | more


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None] | None]:
    """On a terminal, a bar of the requests that have arrived."""
    if not sys.stderr.isatty():
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda arrived: bar.update(task, completed=arrived)


def _tell(run: Run, trace: Trace | None, report: Report, out: Path | None) -> None:
    """The summary; ``trace`` is where the requests are from, if it is a file."""
    content = summary(run)
    chosen, work = run.settings, run.workload
    gpus = chosen.tensor_parallel_size * chosen.pipeline_parallel_size
    report.say(f"{chosen.policy}: {chosen.model} on {gpus} x {chosen.gpu}", style="bold")
    report.say(f"{work.name}, {len(work):,} requests")
    print_summary(content, report.console)
    for text in (*_thrashing_told(content["work"]), *_refused_told(content, trace), *left_out_told(trace)):
        report.say(text)
    if out is not None:
        report.point_to("Results", out)
    report.data(content)


def _thrashing_told(work: dict[str, Any]) -> Iterator[str]:
    """That most of the work was done again, if it was."""
    if work["thrashing"]:
        share = work["tokens"]["recomputed"] / sum(work["tokens"].values())
        yield f"Thrashing: {share:.0%} of the tokens computed were lost and computed again; admit fewer at once."


def _refused_told(content: dict[str, Any], trace: Trace | None) -> Iterator[str]:
    """How many requests were refused, and which and why of the first few."""
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
