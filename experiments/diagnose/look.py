"""One look at a server: what is asked, what its readings show, and what the simulation says of it.

Question -> look() -> Look      what is measured now; the diagnosis, or why there is none
Look -> data()                  as JSON
     -> answer                  what --watch compares from look to look
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...sim.types.errors import SettingError, UserError
from ...sim.types.optional import not_none
from ...traces import measured
from ...traces import read as read_trace
from ..measured.scrapes import POLICIES, SGLANG, VLLM, Readings
from ..measured.server_metrics import ServerMetrics
from ..measured.statements import contradictions, of_benchmark, of_metrics, of_probe, of_start
from ..runs.parallel import Workers
from ..runs.slo_check import Goal
from ..sglang_server.start import read_line, read_start_log
from ..vllm_serve.line import ServeLine, version
from .diagnosis import Diagnoser, Diagnosis
from .doors import Seen, opened, serve_line
from .load import Sources, served_load
from .measured import ClientLatencies, as_served, calibrated, seen_by_server
from .server import server_of
from .text import as_data
from .window import Now, lines, now_of

#: Servers whose flags are known.
_DIAGNOSED = (VLLM, SGLANG)


@dataclass(frozen=True)
class Look:
    """What one look found.

    Attributes:
        readings: Readings of the server; None without a door.
        now: What they show; None without them.
        contradictory, assumed: Sentences on the inputs.
        lacking: Why nothing is simulated; empty if something is.
        found: The diagnosis; None if nothing is simulated.
        clients: What a benchmark measured.
        goal: Objectives of the requests.
    """

    readings: Readings | None = None
    now: Now | None = None
    contradictory: Sequence[str] = ()
    assumed: Sequence[str] = ()
    lacking: str = ""
    found: Diagnosis | None = None
    clients: ClientLatencies | None = None
    goal: Goal | None = None

    @property
    def answer(self) -> tuple[Any, ...]:
        """The measured symptom, the diagnosis, and the advised flags, which do not change with every draw of the load."""
        found = self.found
        advised = () if found is None or found.advised is None else tuple(sorted(found.advised.change.items()))
        return None if self.now is None else self.now.symptom, None if found is None else found.state, advised

    @property
    def first(self) -> list[str]:
        """The lines before the diagnosis."""
        return [*self.contradictory, *self.assumed, *([] if self.now is None else lines(self.now))]

    def data(self) -> dict[str, Any]:
        """The look as JSON data."""
        first = {} if self.now is None else {"now": asdict(self.now)}
        if self.found is None:
            return first | {"diagnosis": self.lacking, "state": "measured"}
        inputs = {"contradictory_inputs": self.contradictory, "assumed": self.assumed}
        return as_data(self.found, self.goal, self.clients) | inputs | first


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is known of a server, and what is asked of it.

    Attributes:
        serve, gpu, model, vllm, startup_log, cost: The server, as flags of the command.
        metrics, prometheus, log, window: Door to its readings.
        sources: Its load; its ``pacing`` has its values as the user gave them.
        goal: Objectives.
        seeds: Draws.
        workers: Runs at a time.
    """

    serve: str | None
    gpu: str | None
    model: str | None
    vllm: str | None
    startup_log: str | None
    cost: str | None
    metrics: str | None
    prometheus: str | None
    log: str | None
    window: str | None
    sources: Sources
    goal: Goal | None
    seeds: Sequence[int]
    workers: Workers

    def look(self, show: Callable[[Sequence[str]], None]) -> Look:
        """Read the door, if one is given, and diagnose the server, if enough is known of it.

        Args:
            show: Gets the first lines, before anything is simulated.

        Raises:
            UserError, SimulationFault: As of the inputs and the runs.
        """
        bench, probe = self.sources.bench, self.sources.probe
        shown = opened(self.metrics, self.prometheus, self.log, self.window)
        seen = seen_by_server(None if shown is None else shown.readings, probe, self.sources.file is not None)
        now = None if shown is None else now_of(shown.readings, not_none(seen))
        given = None if self.serve is None else read_line(self.serve, None if self.vllm is None else version(self.vllm))
        if shown is not None and (lacking := _lacking(self.gpu, given, not_none(seen), not_none(now))):
            look = Look(shown.readings, now, lacking=lacking)
            show(look.first)
            return look
        if self.gpu is None:
            raise SettingError("gpu", None, "is missing; give the server's GPU, which its step times depend on")
        startup_log = not_none(shown).about.log if shown is not None and self.startup_log is None else self.startup_log
        line, assumed = (given, []) if given is not None else self._told(not_none(shown), not_none(seen))
        start = None if startup_log is None else read_start_log(line, startup_log)
        as_given = server_of(line, self.gpu, self.model, start, self.cost)
        server = as_served(as_given, line, self.gpu, self.model, start, seen, has_metrics=shown is not None)
        said = [*of_start(as_given.started, startup_log, start)]
        said += [] if shown is None else of_metrics(Path(shown.readings.source).name, not_none(seen))
        said += [] if probe is None else of_probe(probe)
        clients = None
        if bench is not None:
            said += of_benchmark(bench, measured(bench, read_trace(bench)), seen if shown is not None else None)
        look = Look(None if shown is None else shown.readings, now, contradictions(said), assumed, goal=self.goal)
        show(look.first)
        if bench is not None:
            server, clients = calibrated(server, bench, self.goal)
        with self.sources.pacing.names_as_given():
            load = served_load(self.sources, seen, server.settings())
            found = Diagnoser(server, load, seen, clients, self.goal, self.seeds, self.workers).diagnose()
        return replace(look, found=found, clients=clients)

    def _told(self, shown: Seen, seen: ServerMetrics) -> tuple[ServeLine, list[str]]:
        """The line that the server's own words make, and what is assumed of it."""
        line, assumed = serve_line(shown.about, seen)
        vllm = self.vllm or shown.about.vllm
        return read_line(line, None if vllm is None else version(vllm)), assumed


def _lacking(gpu: str | None, line: ServeLine | None, seen: ServerMetrics, now: Now) -> str:
    """What has to be given before the server can be simulated; empty where it can be."""
    if line is not None and seen.server != line.server:
        own = f"leave --serve out, or give {seen.server}'s own"
        remedy = (
            own if seen.server in _DIAGNOSED else f"validate --policy {POLICIES[seen.server]} simulates {seen.server}"
        )
        raise UserError(
            f"the readings are of {seen.server}, not of the {line.server} server that --serve starts; {remedy}"
        )
    if seen.server not in _DIAGNOSED:
        policy = POLICIES[seen.server]
        remedy = f"compare it with a benchmark by validate --policy {policy} --against FILE --metrics FILE"
        return f"Not simulated: the server is {seen.server}, and diagnose changes flags of vLLM and SGLang; {remedy}."
    if now.sides is not None:
        return "Not simulated: diagnose simulates one engine that computes prompts and outputs; fragmeter plan sizes both sides."
    if gpu is None:
        return "Not simulated: give the GPU (--gpu), on which step times depend, for what each change gains at the next restart."
    return ""
