"""``fragmeter diagnose``: why a vLLM server preempts or is slow, and the flags that change it (``diagnose``)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Group, Parameter
from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass as checked_dataclass

from ...sim.config.settings import setting_error
from ...sim.metrics.objectives import objectives
from ...sim.output.files import require_apart
from ...sim.types.bounds import Seed
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from ...traces import Pacing, Reading
from ..diagnose.load import Sources
from ..diagnose.look import Look, Question
from ..diagnose.page import write_look, write_metrics
from ..diagnose.text import print_told, told
from ..diagnose.window import clock, measured_now
from ..measured.get import is_address
from ..runs.inputs import READING, named_files
from ..runs.output import RESULT_FILE, JsonTarget, Report
from ..runs.parallel import Workers
from ..runs.random_lengths import RandomLengths
from ..runs.slo_check import Goal
from ..runs.unread import refuse_unread_reading
from .sweep import WORKERS

_SERVER = Group("Server", sort_key=-2)
_LOAD_GROUP = Group("Load", sort_key=-1)
_LINE, _LOAD = Parameter(group=_SERVER), Parameter(group=_LOAD_GROUP)


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Draws:
    """Objectives of a diagnosis, and its draws.

    Attributes:
        goodput: Objectives of every request, as vllm bench serve has them: ttft:500 tpot:50 e2el:10000, in ms. By default
            the geometric mean of p90 TTFT, p99 ITL and mean E2EL is to fall.
        attainment: Share of the requests that must meet the objectives; 0.9 by default.
        num_prompts: Requests of a draw.
        seeds: Draws of the load.
        seed: Seed of the first draw.
    """

    goodput: Annotated[list[str] | None, Parameter(consume_multiple=True, negative_iterable="")] = None
    attainment: Annotated[float, Field(gt=0, le=1)] | None = None
    num_prompts: Annotated[int, Field(ge=50, le=10**7)] = 1000
    seeds: Annotated[int, Field(ge=1, le=100)] = 4
    seed: Seed = 0

    @model_validator(mode="after")
    def _check(self) -> Draws:
        if self.attainment is not None and self.goodput is None:
            remedy = "is the share that meets objectives; give --goodput, or leave it out"
            raise SettingError("attainment", self.attainment, remedy)
        return self

    def goal(self) -> Goal | None:
        """The objectives and their share; None without objectives."""
        return None if self.goodput is None else Goal(objectives(self.goodput), self.attainment or Goal.attainment)


def _pacing(**given: Any) -> Pacing:
    """How requests arrive.

    Raises:
        SettingError: A number is out of range, or flags contradict each other.
    """
    try:
        return Pacing(**given)
    except ValidationError as error:
        raise setting_error(error) from None


DRAWS = Annotated[Draws, Parameter(name="*", group=Group("Objectives and draws", sort_key=0))]


def diagnose(
    *,
    serve: Annotated[str | None, _LINE] = None,
    gpu: Annotated[str | None, _LINE] = None,
    model: Annotated[str | None, _LINE] = None,
    vllm: Annotated[str | None, _LINE] = None,
    startup_log: Annotated[str | None, _LINE] = None,
    metrics: Annotated[str | None, _LINE] = None,
    prometheus: Annotated[str | None, _LINE] = None,
    window: Annotated[str | None, _LINE] = None,
    log: Annotated[str | None, _LINE] = None,
    cost: Annotated[str | None, _LINE] = None,
    bench: Annotated[Path | None, _LOAD] = None,
    probe: Annotated[Path | None, _LOAD] = None,
    trace: Annotated[Path | None, _LOAD] = None,
    request_rate: Annotated[float | None, _LOAD] = None,
    max_concurrency: Annotated[int | None, _LOAD] = None,
    users: Annotated[int | None, _LOAD] = None,
    requests_per_user_hour: Annotated[float | None, _LOAD] = None,
    think_time: Annotated[float | None, _LOAD] = None,
    lengths: Annotated[RandomLengths, Parameter(name="*", group=_LOAD_GROUP)] = RandomLengths(),
    reading: READING = Reading(),
    draws: DRAWS = Draws(),
    workers: WORKERS = Workers(),
    watch: Annotated[float | None, _LINE] = None,
    out: Annotated[Path | None, RESULT_FILE] = None,
    openmetrics: Annotated[Path | None, RESULT_FILE] = None,
    json: JsonTarget = None,
) -> None:
    """Say why a vLLM server preempts or is slow, what fills its KV cache, and what to change, now and at the next restart.

    What a running server shows by itself is printed first: by its address, a Prometheus, or its log.
    The server is simulated as it serves, and with each flag that may remove a symptom, on the same draws of its load. The
    load comes from the best source that is given: requests of a benchmark, a probe or a trace; else requests of given lengths;
    else lengths and rate of the metrics; else ShareGPT's lengths at 80 % of the rate that the server can serve.

    Args:
        serve: Command line of the server as pasted into a shell, or a file with it, or with its deployment. Without it the server's own
            words make one, and the answer says what it assumes.
        gpu: Its GPU: a preset, or a file (fragmeter list gpus).
        model: Preset, org/name on the Hugging Face hub, or path of a config.json or its folder, if the line names a model by another
            name.
        vllm: Release of vLLM, such as 0.16. By default the one in the container's tag, or the latest known release.
        startup_log: Start-up log of the server, or a file with it; sets the size of the KV cache.
        metrics: Address of the server, whose /metrics are read for 5 s, or several with commas between; or a file with them: one scrape,
            or several in sequence with their times.
        prometheus: Address of a Prometheus that scrapes the server; or a file with its answer of /api/v1/query_range.
        window: How far back a Prometheus is asked, as 30m or 2h; 1h by default.
        log: File with the server's log, as kubectl logs prints it: its periodic lines, and its start if it is there.
        cost: Step time, as for simulate. By default the GPU's profile where it covers the model, else the roofline.
        bench: Result file of vllm bench serve --save-result, or of another client that validate --against
            reads; steps are scaled to its TPOT.
        probe: File of fragmeter.probe, with the contents that requests share.
        trace: Trace file, as for simulate.
        request_rate: Poisson arrivals at this rate, in requests/s, in place of the load's own.
        max_concurrency: Users of a closed loop in place of arrivals.
        users: Number of users, with requests_per_user_hour or think_time, as for simulate.
        requests_per_user_hour: Requests of each of the users in an hour, at a rate.
        think_time: Mean seconds between an answer and a user's next request, in a closed loop.
        watch: Seconds from one look at a running server to the next, until Ctrl-C; a look is printed in full where its answer differs from
            the one before.
        out: File for the page.
        openmetrics: File for the simulated server's metrics, in OpenMetrics text with the timestamps of the readings.
    """
    report = Report(json, out=out)
    files = Files(out, openmetrics)
    given = {"serve": serve, "model": model, "startup_log": startup_log, "bench": bench, "probe": probe, "trace": trace}
    doors = {"metrics": metrics, "prometheus": prometheus, "log": log}
    require_apart({"out": out, "openmetrics": openmetrics, "json": json}, named_files(**given, **doors, cost=cost))
    pacing = _pacing(
        request_rate=request_rate, max_concurrency=max_concurrency, users=users, think_time=think_time,
        requests_per_user_hour=requests_per_user_hour,
    )  # fmt: skip
    sources = Sources(bench, probe, trace, lengths.random_load, pacing, draws.num_prompts, reading)
    refuse_unread_reading(reading, trace)
    if serve is None and not any(doors.values()):
        raise SettingError("serve", None, "is missing; give the server's line, or --metrics, --prometheus or --log")
    question = Question(
        serve=serve, gpu=gpu, model=model, vllm=vllm, startup_log=startup_log, cost=cost, window=window, **doors, sources=sources,
        goal=draws.goal(), seeds=range(draws.seed, draws.seed + draws.seeds), workers=workers,
    )  # fmt: skip
    if watch is not None and not 1 <= watch <= 86_400:
        raise SettingError("watch", watch, "must be 1 to 86,400 seconds")
    if watch is None:
        _tell(question.look(lambda lines: _print_all(lines, report)), report, files)
        return
    if not any(is_address(each or "") for each in (metrics, prometheus)):
        raise SettingError("watch", watch, "needs a server that runs; give its address as --metrics or --prometheus")
    _watch(question, watch, report, files)


class Files(NamedTuple):
    """Files of a look that are asked for."""

    page: Path | None
    metrics: Path | None


def _watch(question: Question, period_s: float, report: Report, files: Files) -> None:
    """Look again and again, until Ctrl-C, and tell a look in full only where its answer differs from the one before."""
    before = None
    while True:
        look = question.look(lambda lines: None)
        at = clock(time.time())
        if look.answer == before:
            report.print_line(f"{at} UTC: as before. {measured_now(not_none(look.now))}")
            _keep(look, report, files)
        else:
            report.print_line(f"{at} UTC: {'the answer' if before is None else 'another answer'}")
            _print_all(look.first, report)
            _tell(look, report, files)
        before = look.answer
        time.sleep(period_s)


def _print_all(lines: Sequence[str], report: Report) -> None:
    for text in (*lines, *([""] if lines else [])):
        report.print_line(text)


def _tell(look: Look, report: Report, files: Files) -> None:
    """Print what follows the first lines, and write page and data."""
    if look.found is None:
        report.print_line(look.lacking)
    else:
        print_told(told(look.found, look.goal, look.clients), report)
    _keep(look, report, files)
    for name, path in (("Page", files.page), ("Metrics", files.metrics)):
        if path is not None:
            report.point_to(name, path)


def _keep(look: Look, report: Report, files: Files) -> None:
    if files.page is not None:
        write_look(files.page, look)
    if files.metrics is not None:
        write_metrics(files.metrics, look)
    report.data(look.data())
