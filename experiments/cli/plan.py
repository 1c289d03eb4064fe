"""``fragmeter plan``: search for GPUs and flags (``capacity.search``), start-up check of a ``vllm serve`` line, and questions."""

from __future__ import annotations

import shlex
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter
from rich import box
from rich.table import Table

from ...sim.cost import default_cost
from ...sim.engine.replica import build
from ...sim.engine.settings import Settings
from ...sim.engine.unread import only_read
from ...sim.output.files import require_apart
from ...sim.output.folders import OutputFolder
from ...sim.spec.startup.capacity import Capacity, capacity, longest_model_len, users
from ...sim.spec.startup.launch import Launch
from ...sim.types.errors import ObjectivesMissed, SettingError, UserError
from ...traces import Pacing, Reading
from ..capacity.candidates import CHOICES, Choices, values_of
from ..capacity.page import PLAN
from ..capacity.questions import Flags, answers, questions_of, subject_of
from ..capacity.search import AIMS, Aims, PlanRequest, search
from ..capacity.service_checks import check_services
from ..measured.statements import contradictions, of_line, of_log
from ..runs.inputs import PACING, READING, REQUESTS, Inputs, Requests, named_files
from ..runs.output import RESULTS, JsonTarget, Report
from ..runs.parallel import Workers
from ..vllm_serve.checks import Refusal, gib
from ..vllm_serve.flags import Release, releases, text_of_release
from ..vllm_serve.line import ServeLine, parse_serve, pasted, version
from ..vllm_serve.log import StartupLog, read_log
from ..vllm_serve.remedies import Remedy, remedies
from ..vllm_serve.start import Started, started
from .sweep import WORKERS

_LINE_GROUP = Group("Command line", sort_key=-2)
_LINE = Parameter(group=_LINE_GROUP)


def plan(
    *,
    serve: Annotated[str | None, _LINE] = None,
    gpu: Annotated[list[str] | None, Parameter(group=_LINE_GROUP, negative_iterable="")] = None,
    model: Annotated[str | None, _LINE] = None,
    vllm: Annotated[str | None, _LINE] = None,
    startup_log: Annotated[str | None, _LINE] = None,
    mean_tokens: Annotated[int | None, _LINE] = None,
    ask: Annotated[str | None, _LINE] = None,
    check: Annotated[Path | None, _LINE] = None,
    aims: AIMS = Aims(),
    choices: CHOICES = Choices(),
    requests: REQUESTS = Requests(),
    pacing: PACING = Pacing(),
    reading: READING = Reading(),
    workers: WORKERS = Workers(),
    out: Annotated[Path | None, RESULTS] = None,
    json: JsonTarget = None,
) -> None:
    """Find the GPUs and flags for a load; check whether a vllm serve line starts.

    With --goodput every combination of --gpu and of the candidates' flags is simulated under the load. The plan finds
    the highest request rate that meets the objectives, the number of GPUs for the wanted rate (--request-rate, or the
    trace's own), their price, and the limiting resource. Without --goodput only --serve is checked.

    Args:
        serve: Command line as pasted into a shell, or a file with it: vllm serve, python -m
            vllm.entrypoints.openai.api_server or docker run ... vllm/vllm-openai. With --goodput: the base line of all
            candidates.
        gpu: Presets, or FILE.json of GPUs of your own, separated by commas or repeated.
        model: Preset, org/name on the Hugging Face hub, or path of a config.json or its folder; needed without --serve, and if the
            line names a model by another name.
        vllm: Release of vLLM, such as 0.16. By default the one in the container's tag, or the latest known release.
        startup_log: vLLM's start-up log, its lines with the size of the KV cache, or a file with them; replaces the
            computed size.
        mean_tokens: Print how many sequences of this many tokens (prompt + output) fit at once.
        ask: Questions, separated by commas: max-num-seqs (the largest without preemption), preemption-mode (swap or
            recompute), samples (memory of n samples; 4 without --n). They are answered for a load, given as to
            simulate, or for sequences of --mean-tokens.
        check: TOML file of services, each with its line, fleet, load and objectives: test whether every fleet meets its
            objectives. The exit status is 3 if one does not. Other flags are --seed, --jobs and --json.
        out: Folder for plan.html, plan.md, plan.json, plan.csv, plan.parquet, day.csv (with --rate-curve) and finished runs. The
            same command continues an interrupted plan there.
    """
    report = Report(json)
    if check is not None:
        alone = {
            "serve": serve, "gpu": gpu, "model": model, "vllm": vllm, "startup_log": startup_log, "mean_tokens": mean_tokens,
            "ask": ask, "out": out,
        }  # fmt: skip
        _require_no_others(check, alone, replace(aims, seed=0), choices, requests, pacing, reading)
        require_apart({"json": json}, {"check": [check]})
        if not check_services(check, workers, aims.seed, report):
            raise ObjectivesMissed
        return
    if gpu is None:
        raise SettingError("gpu", None, "is missing; give one or several, separated by commas")
    described = named_files(serve=serve, model=model, startup_log=startup_log, aims=aims, choices=choices)
    read = described | named_files(requests=requests, pacing=pacing, reading=reading)
    require_apart({"out": out, "json": json}, read)
    load = (requests, reading, pacing)
    planned = aims.goodput is not None
    if planned and ask is not None:
        raise SettingError("ask", ask, "applies to one server; leave it out, or --goodput")
    if planned and mean_tokens is not None:
        raise SettingError("mean_tokens", mean_tokens, "applies to one server; leave it out, or --goodput")
    if mean_tokens is not None and mean_tokens < 1:
        raise SettingError("mean_tokens", mean_tokens, "must be 1 or more")
    log = None if startup_log is None else read_log(startup_log)
    line = _line(serve, model, None if vllm is None else version(vllm))
    gpus = values_of("gpu", gpu)
    if planned:
        _require_one_launch(log, gpus, choices)
        inputs = Inputs(requests=requests, reading=reading, pacing=pacing)
        folder = None if out is None else OutputFolder(out, PLAN)
        search(aims, PlanRequest(line, gpus, choices, model, log, inputs), workers, folder, report)
        return
    _refuse_unused(serve, gpus, aims, choices, out)
    questions = questions_of(ask, load)
    answer = started(line, gpus[0], model, log)
    contradicted = contradictions([*of_line(answer), *([] if startup_log is None else of_log(startup_log))])
    _start(answer, log, questions, mean_tokens, load, contradicted, report)


def _start(
    answer: Started,
    log: StartupLog | None,
    questions: list[str],
    mean_tokens: int | None,
    load: Flags,
    contradicted: list[str],
    report: Report,
) -> None:
    """Report whether a line starts, and where it does the answers to questions; first what line and log contradict each other in.

    Raises:
        UserError: The load cannot be read, or served.
    """
    refused = answer.refusal()
    if refused is None:
        # Before any output, because the load may be refused.
        fitting = None if mean_tokens is None else _users(answer.launch, mean_tokens)
        about = subject_of(answer.settings(), mean_tokens, fitting, load)
    for text in contradicted:
        report.print_line(text)
    if refused is None:
        data = _print_start(answer, log, mean_tokens, report)
        data["answers"] = answers(questions, *about, report)
    else:
        data = _print_refusal(answer, refused, report)
    _print_flags(answer, report)
    report.data(_facts(answer) | data | {"contradictory_inputs": contradicted})


def _require_no_others(check: Path, alone: dict[str, Any], *groups: Any) -> None:
    """Refuse flags beside a file of services, each of which has its own.

    Args:
        alone: Flags without a group, None where they are not given.
        groups: Groups of flags, each of which can be made without arguments.

    Raises:
        SettingError: One is given.
    """
    given = [name for name, value in alone.items() if value is not None]
    given += [
        each.name
        for group in groups
        for each in fields(group)
        if getattr(group, each.name) != getattr(type(group)(), each.name)
    ]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise SettingError("check", str(check), f"has the services, loads and objectives; leave out {flags}")


def _line(serve: str | None, model: str | None, release: Release | None) -> ServeLine:
    """The pasted line, or a line with the model only."""
    if serve is not None:
        return parse_serve(pasted(serve), release)
    if model is None:
        raise UserError("plan needs a model: --model a preset, org/name or config.json, or --serve a vllm serve line")
    return ServeLine(model, {}, version=release)


def _require_one_launch(log: StartupLog | None, gpus: list[str], choices: Choices) -> None:
    """Require a single launch for a log: a log is from one server."""
    if log is not None and (len(gpus) > 1 or any(len(values) > 1 for values in choices.axes().values())):
        raise SettingError("startup_log", "given", "applies to one server; plan for its GPU and flags alone")


def _refuse_unused(serve: str | None, gpus: list[str], aims: Aims, choices: Choices, out: Path | None) -> None:
    """Refuse flags of a plan if no objectives are given."""
    remedy = "give objectives, such as --goodput ttft:500 tpot:50"
    if serve is None or len(gpus) > 1:
        raise UserError(f"plan needs --serve, a vllm serve line, and one --gpu; or for a plan {remedy}")
    if aims != Aims() or choices != Choices() or out is not None:
        raise UserError(f"flags of a plan have no effect without objectives; {remedy}")


def _facts(answer: Started) -> dict[str, Any]:
    launch = answer.launch
    return {
        "model": launch.model.name,
        "gpu": launch.gpu.name,
        "num_gpus": launch.num_gpus * answer.replicas,
        "replicas": answer.replicas,
        "tensor_parallel_size": launch.tensor_parallel,
        "pipeline_parallel_size": launch.deployment.pipeline_parallel,
        "decode_context_parallel_size": launch.deployment.decode_context_parallel,
        "quantization": launch.deployment.quantization,
        "kv_cache_dtype": launch.deployment.kv_dtype,
        "gpu_memory_utilization": launch.gpu_memory_utilization,
        "max_model_len": launch.max_model_len,
        "max_num_seqs": launch.max_num_seqs,
        "max_num_batched_tokens": launch.max_num_batched_tokens,
        "block_size": launch.block_tokens,
        "vllm_since": ".".join(map(str, launch.release.since)),
        "ignored": answer.line.ignored,
        "not_simulated": answer.line.not_simulated,
        "uncounted": answer.line.uncounted,
        "of_other_releases": answer.line.of_other_releases,
    }


def _users(launch: Launch, tokens: int) -> int:
    """Sequences of ``tokens`` that run at once, whatever max_num_seqs is."""
    return users(launch, capacity(launch).num_blocks, tokens)


def _print_start(answer: Started, log: StartupLog | None, mean_tokens: int | None, report: Report) -> dict[str, Any]:
    launch = answer.launch
    if mean_tokens is not None and mean_tokens > launch.max_model_len:
        raise SettingError("mean_tokens", mean_tokens, f"is more than max_model_len = {launch.max_model_len}")
    found = capacity(launch)
    lengths = [launch.max_model_len] if mean_tokens is None else [launch.max_model_len, mean_tokens]
    held = {tokens: _users(launch, tokens) for tokens in lengths}
    settings = answer.settings()
    source = "by vLLM's own log" if log else "an estimate; --startup-log has vLLM's own"
    if log and log.assumes(launch):
        meaning = "up to 0.20.0" if launch.release.since < (0, 20) else "since 0.20.1"
        source += f"; its tokens are read as {meaning}, unless you add its line with the concurrency or the release"
    fitting = ", ".join(f"{number:,} with {tokens:,} tokens" for tokens, number in held.items())
    if max(held.values()) > launch.max_num_seqs:
        fitting += f"; --max-num-seqs {launch.max_num_seqs} runs no more"
    report.print_line(
        f"{_subject(answer)} starts: {_where(answer)} has a KV cache of {found.num_blocks:,} blocks ({found.num_tokens:,} tokens,"
        f" {source}), which holds {found.max_concurrency:.2f} sequences of {launch.max_model_len:,} tokens."
        f" Sequences that fit at once: {fitting}."
    )
    report.print_line()
    report.console.print(_memory_table(launch, found))
    cost = settings.cost or default_cost(launch.model, launch.gpu, launch.deployment.quantization)
    refused: list[str] = []
    try:
        simulated = replace(only_read(settings), cost=cost)
        build(simulated)
        report.line(f"As a simulation: {_simulate(simulated)}")
    except SettingError as error:
        report.line(f"Not simulated: {error}")
        refused.append(str(error))
    return {
        "starts": True,
        "refusal": None,
        "remedies": [],
        "memory": asdict(found.stage) | {"correction_bytes": launch.correction_bytes},
        "num_gpu_blocks": found.num_blocks,
        "kv_cache_tokens": found.num_tokens,
        "max_concurrency": found.max_concurrency,
        "users": [{"tokens": tokens, "users": number} for tokens, number in held.items()],
        "settings": settings.as_dict(),
        "not_simulated": [*answer.line.not_simulated, *refused],
    }


def _subject(answer: Started) -> str:
    """The subject of an answer, with the flags that it does not count."""
    names = answer.line.uncounted_names
    return f"Without {', '.join(names)}, not counted, it" if names else "It"


def _where(answer: Started) -> str:
    launch = answer.launch
    pipeline = launch.deployment.pipeline_parallel
    stages = f" in {pipeline} pipeline stages" if pipeline > 1 else ""
    kind = "engines that share the experts" if launch.deployment.data_parallel > 1 else "replicas"
    each = f" (each of {answer.replicas} {kind})" if answer.replicas > 1 else ""
    return f"{launch.model.name} on {launch.num_gpus} x {launch.gpu.name}{stages}{each}"


def _memory_table(launch: Launch, found: Capacity) -> Table:
    stage, encoder = found.stage, launch.model.encoder
    uncounted = encoder is not None and not encoder.is_known
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("of each GPU" if launch.num_gpus > 1 else "of the GPU")
    table.add_column("GiB", justify="right")
    for what, count_bytes in (
        ("memory", stage.total_bytes),
        (f"asked for ({launch.gpu_memory_utilization:g})", stage.requested_bytes),
        ("weights, without those of the vision encoder" if uncounted else "weights", stage.weight_bytes),
        ("activations (estimated)", stage.activation_bytes),
        ("non-torch", stage.non_torch_bytes),
        ("CUDA graphs", stage.cuda_graph_bytes),
        ("more than computed, by the log", launch.correction_bytes),
        ("KV cache", stage.kv_cache_bytes),
    ):
        if count_bytes:
            table.add_row(what, gib(count_bytes))
    return table


def _simulate(settings: Settings) -> str:
    """The ``simulate`` command for the computed launch."""
    words = ["fragmeter", "simulate"]
    for name, value in settings.given().items():
        flag = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return shlex.join(words)


def _print_refusal(answer: Started, refused: Refusal, report: Report) -> dict[str, Any]:
    found = remedies(answer.launch, answer.fits_length)
    report.print_line(f"{_subject(answer)} does not start: {_where(answer)}. {refused.text}")
    report.print_line()
    if found:
        report.print_line("Each of these alone would start:")
        for remedy in found:
            report.line(f"  {remedy.flag} {remedy.value:<8} {_remedy_text(answer, remedy)}")
    else:
        report.print_line(
            "No single change of ranks, length, number formats or utilisation starts it; take a larger GPU."
        )
    return {
        "starts": False,
        "refusal": asdict(refused),
        "remedies": [_remedy_data(answer, remedy) for remedy in found],
    }


def _remedy_data(answer: Started, remedy: Remedy) -> dict[str, Any]:
    found = capacity(_auto(answer, remedy))
    return {
        "flag": remedy.flag,
        "value": remedy.value,
        "num_gpus": remedy.launch.num_gpus,
        "num_gpu_blocks": found.num_blocks,
        "kv_cache_tokens": found.num_tokens,
        "max_concurrency": found.max_concurrency,
    }


def _auto(answer: Started, remedy: Remedy) -> Launch:
    """The remedy's launch, with the longest sequence that fits if the line leaves the length to vLLM."""
    launch = remedy.launch
    return replace(launch, max_model_len=longest_model_len(launch)) if answer.fits_length else launch


def _remedy_text(answer: Started, remedy: Remedy) -> str:
    data = _remedy_data(answer, remedy)
    length = _auto(answer, remedy).max_model_len
    gpus = f"on {data['num_gpus']} GPUs, " if data["num_gpus"] != answer.launch.num_gpus else ""
    return f"{gpus}{data['kv_cache_tokens']:,} tokens, {data['max_concurrency']:.2f} sequences of {length:,}"


def _print_flags(answer: Started, report: Report) -> None:
    line = answer.line
    for label, flags in (
        (f"Not in vLLM {text_of_release(line.version or releases()[-1])}, which refuses it", line.of_other_releases),
        ("Not simulated", line.not_simulated),
        ("Of no effect here", line.ignored),
    ):
        if flags:
            report.line(f"{label}: {', '.join(flags)}")
