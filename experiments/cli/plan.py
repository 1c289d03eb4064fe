"""``fragmeter plan``: search for GPUs and flags (``capacity.several``), and start-up check of a ``vllm serve`` line."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from ...sim.output.files import require_apart
from ...sim.types.errors import SettingError, UserError
from ...sim.types.optional import not_none
from ...traces import Pacing, Reading
from ..capacity.candidates import CHOICES, Choices, values_of
from ..capacity.loads import Shared, by_model
from ..capacity.request import AIMS, Aims, PlanRequest
from ..capacity.several import plans
from ..llama_server.line import read_llama
from ..measured.scrapes import VLLM
from ..measured.statements import contradictions, of_start
from ..runs.inputs import PACING, READING, REQUESTS, Inputs, Requests, named_files
from ..runs.output import RESULTS, JsonTarget, Report
from ..runs.parallel import Workers
from ..sglang_server.start import SGLangStarted, read_line, read_start_log, started
from ..vllm_serve.line import ServeLine, read_pasted, version
from ..vllm_serve.log import StartupLog
from ..vllm_serve.start import Started
from .llama_answer import print_llama
from .sglang_answer import print_sglang
from .start_answer import doubt, facts, print_flags, print_refusal, print_start
from .sweep import WORKERS

_LINE_GROUP = Group("Command line", sort_key=-2)
_LINE = Parameter(group=_LINE_GROUP)
#: The flags of a load.
_Load = tuple[Requests, Reading, Pacing]
_NO_LOAD: _Load = (Requests(), Reading(), Pacing())


def plan(
    *,
    serve: Annotated[str | None, _LINE] = None,
    gpu: Annotated[list[str] | None, Parameter(group=_LINE_GROUP, consume_multiple=True, negative_iterable="")] = None,
    model: Annotated[str | None, _LINE] = None,
    vllm: Annotated[str | None, _LINE] = None,
    startup_log: Annotated[str | None, _LINE] = None,
    mean_tokens: Annotated[int | None, _LINE] = None,
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
            vllm.entrypoints.openai.api_server or docker run ... vllm/vllm-openai; or python -m
            sglang.launch_server ...; or llama-server ..., of which the memory is reported. With --goodput: the base line of all candidates.
        gpu: Presets, or FILE.json of GPUs of your own, separated by commas or spaces: the card of every rank, or with --goodput
            candidates; by default every preset with a price.
        model: Preset, org/name on the Hugging Face hub, or path of a config.json or its folder; needed without --serve, and if the
            line names a model by another name.
        vllm: Release of vLLM, such as 0.16. By default the one in the container's tag, or the latest known release.
        startup_log: vLLM's start-up log, its lines with the size of the KV cache, or a file with them; replaces the
            computed size.
        mean_tokens: Print how many sequences of this many tokens (prompt + output) fit at once.
        out: Folder for plan.html, plan.md, plan.json, plan.csv, plan.parquet, day.csv (with --rate-curve) and finished runs. The
            same command continues an interrupted plan there.
    """
    report = Report(json)
    planned = aims.goodput is not None or aims.loads is not None
    if gpu is None and (not planned or serve is not None):
        raise SettingError("gpu", None, "is missing; give one or several, separated by commas")
    described = named_files(serve=serve, model=model, startup_log=startup_log, aims=aims, choices=choices)
    read = described | named_files(requests=requests, pacing=pacing, reading=reading)
    loads: list[Shared | None] = [None]
    if aims.loads is not None:
        _require_no_load(aims, replace(requests, num_prompts=None), pacing, reading)
        loads = _loads(aims.loads, model, serve, startup_log)
        read |= {"loads": [aims.loads, *(trace for each in loads if each for trace in each.traces)]}
    require_apart({"out": out, "json": json}, read)
    load = (requests, reading, pacing)
    if mean_tokens is not None and planned:
        raise SettingError("mean_tokens", mean_tokens, "applies to one server; leave it out, or --goodput")
    if mean_tokens is not None and mean_tokens < 1:
        raise SettingError("mean_tokens", mean_tokens, "must be 1 or more")
    llama = None if serve is None else read_pasted(serve, read_llama)
    others = {"vllm": vllm, "startup_log": startup_log, "mean_tokens": mean_tokens, "out": out}
    if llama is not None:
        _require_alone("llama-server", others, load, aims, choices)
        print_llama(llama, _one_gpu(not_none(gpu)), model, report)
        return
    stated = None if vllm is None else version(vllm)
    lines = [_line(serve, model if each is None else each.model, stated) for each in loads]
    log = None if startup_log is None else read_start_log(lines[0], startup_log)
    gpus = values_of("gpu", gpu or [])
    if planned:
        _require_one_launch(log, gpus, choices)
        inputs = Inputs(requests=requests, reading=reading, pacing=pacing)
        wanted = [
            PlanRequest(line, gpus, choices, each.model if each else model, log, inputs, serve is None, each)
            for line, each in zip(lines, loads, strict=True)
        ]
        report.data(plans(aims, wanted, workers, out, report))
        return
    _refuse_unused(serve, gpus, aims, choices, load, out)
    (line,) = lines
    if line.server != VLLM:
        _require_alone(line.server, {"mean_tokens": mean_tokens}, load, aims, choices)
    answer = started(line, gpus, model, log)
    if isinstance(answer, SGLangStarted):
        print_sglang(answer, report)
        return
    contradicted = contradictions([*of_start(answer, startup_log, log)])
    _start(answer, log, mean_tokens, contradicted, report)


def _loads(path: Path, model: str | None, serve: str | None, log: str | None) -> list[Shared | None]:
    """The loads of a file, by model.

    Raises:
        SettingError: There are several models, and a flag is of one.
    """
    found = by_model(path, model)
    if len(found) > 1:
        for name, given in (("serve", serve), ("startup_log", log)):
            if given is not None:
                remedy = f"is of one model, and {path} has several; leave it out, or plan them one by one"
                raise SettingError(name, str(given), remedy)
    return [*found]


def _start(
    answer: Started, log: StartupLog | None, mean_tokens: int | None, contradicted: list[str], report: Report
) -> None:
    """Report whether a line starts; first what line and log contradict each other in."""
    judged = answer.outcome()
    refused = judged.refusal
    for text in contradicted:
        report.print_line(text)
    unrecognized = answer.line.parser_error
    if unrecognized is not None:
        report.print_line(
            f"It does not start: vllm: error: {unrecognized}. Leave that out; the rest is the answer without it."
        )
        report.print_line()
    if not judged.is_sure:
        report.print_line(doubt(judged))
    if refused is None:
        data = print_start(answer, log, mean_tokens, report, judged.is_sure)
    else:
        data = print_refusal(answer, refused, log, report, judged.is_sure)
    print_flags(answer, report)
    report.data(
        facts(answer)
        | {
            "outcome": judged.kind if unrecognized is None else "does not start",
            "kv_cache_bytes_needed": judged.needed_bytes,
            "free_bytes_needed": judged.needed_free_bytes,
        }
        | data
        | ({} if unrecognized is None else {"starts": False})
        | {"parser_error": unrecognized, "contradictory_inputs": contradicted}
    )


def _require_no_load(aims: Aims, *groups: Any) -> None:
    """Refuse objectives and flags of a load beside the file of ``--loads``, which has them.

    Args:
        groups: Groups of flags, each of which can be made without arguments.

    Raises:
        SettingError: One is given.
    """
    given = ["goodput"] * (aims.goodput is not None) + [
        each.name
        for group in groups
        for each in fields(group)
        if getattr(group, each.name) != getattr(type(group)(), each.name)
    ]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise SettingError("loads", str(aims.loads), f"has the loads and objectives; leave out {flags}")


def _require_alone(server: str, alone: dict[str, Any], load: _Load, aims: Aims, choices: Choices) -> None:
    """Refuse what is not answered for a line of another server than vLLM's."""
    given = [name for name, value in alone.items() if value is not None]
    if given or load != _NO_LOAD or aims != Aims() or choices != Choices():
        name = f"--{given[0].replace('_', '-')}" if given else "a load or objectives"
        raise UserError(
            f"serve: {name} is not read beside a line of {server}; without it the answer prints flags for simulate, and for sweep --grid"
            " request_rate=10,20 --goodput ttft:500"
        )


def _one_gpu(names: list[str]) -> str:
    gpus = values_of("gpu", names)
    if len(gpus) > 1:
        raise SettingError("gpu", ",".join(gpus), "the line of llama-server is read for one kind of GPU; name one")
    return gpus[0]


def _line(serve: str | None, model: str | None, stated: tuple[int, ...] | None) -> ServeLine:
    """The pasted line, or a line with the model only."""
    if serve is not None:
        return read_line(serve, stated)
    if model is None:
        raise UserError("plan needs a model: --model a preset, org/name or config.json, or --serve a vllm serve line")
    return ServeLine(model, {}, version=None if stated is None else (stated[0], stated[1]))


def _require_one_launch(log: StartupLog | None, gpus: list[str], choices: Choices) -> None:
    """Require a single launch for a log: a log is from one server."""
    if log is not None and (len(gpus) > 1 or any(len(values) > 1 for values in choices.axes().values())):
        raise SettingError("startup_log", "given", "applies to one server; plan for its GPU and flags alone")


def _refuse_unused(
    serve: str | None, gpus: list[str], aims: Aims, choices: Choices, load: _Load, out: Path | None
) -> None:
    """Refuse flags of a plan if no objectives are given."""
    remedy = "give objectives, such as --goodput ttft:500 tpot:50"
    if serve is None:
        raise UserError(f"plan needs --serve, a vllm serve line; or for a plan {remedy}")
    if aims != Aims() or choices != Choices() or load != _NO_LOAD or out is not None:
        raise UserError(f"flags of a plan have no effect without objectives; {remedy}")
