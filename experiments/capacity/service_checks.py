"""``fragmeter plan --check FILE``: whether the fleets of services meet their objectives, for continuous integration.

FILE is TOML, with a table ``[[service]]`` for each service; ``Service`` has its keys. Each fleet is tested with as many seeds as
it takes to say whether 90 % of other seeds meet the goal, with 95 % confidence (``fleet``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from ...sim.cluster import Cluster
from ...sim.config.settings import Settings
from ...sim.types.bounds import Replicas
from ...sim.types.errors import UserError
from ..runs.output import Report
from ..runs.parallel import Workers
from ..runs.slo_check import Goal
from ..sglang_server.start import parse_line
from .candidates import Candidate, candidates
from .confidence import Decision, mean_rate
from .fleet import DEFAULT_FLEET_SEEDS
from .least import BY_DATA_SHEET, whole
from .load import Load
from .loads import LoadTable, read_tables
from .planning import Planner


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Service(LoadTable):
    """A service: a load with its replicas.

    Attributes:
        serve: Its ``vllm serve`` line.
        gpu: GPU preset.
        replicas: Number of replicas.
        router: As of ``simulate``.
        num_prompts: Requests of each seed, as of ``plan``.
        attainment: Share of the requests that must meet the objectives.
        cost: Step time, as of ``simulate``.
    """

    serve: str
    gpu: str
    replicas: Replicas = 1
    router: str = Cluster.router
    num_prompts: int | None = None
    attainment: Annotated[float, Field(gt=0, le=1)] = 0.9
    cost: str | None = None


@dataclass(frozen=True)
class Checked:
    """Result of a service.

    Attributes:
        result: "meets", "misses", "open" (the seeds do not decide it, or their runs are bursts), or why it cannot be simulated.
        shares: Share of the requests that meet the objectives, by seed.
        sure_rate: The rate that 90 % of other seeds take with 95 % confidence, requests/s; None if every rate meets them, and of bursts.
        highest_rate: Mean of the seeds, requests/s; None if every rate meets the objectives.
        is_bound: Whether ``highest_rate`` is a lower bound, because the runs have too few requests to fill a replica.
        is_burst: Whether the runs at the rate are bursts, which say nothing of a load that lasts.
        least_replicas: The fewest replicas that may serve the rate, of a smaller fleet, which was not simulated; None of others.
    """

    service: Service
    request_rate: float
    result: str
    shares: tuple[float, ...] = ()
    sure_rate: float | None = None
    highest_rate: float | None = None
    is_bound: bool = False
    is_burst: bool = False
    least_replicas: int | None = None

    @property
    def meets(self) -> bool:
        return self.result == _RESULTS[Decision.ENOUGH]

    @property
    def takes(self) -> str:
        """The highest rate as text: the headroom of a fleet that meets its objectives, or the rates that another takes."""
        rate = self.highest_rate
        if rate is None:
            return "-"
        if self.is_burst:
            return "unknown"
        if not self.meets:
            return f"takes {self.sure_rate:.3g} to {rate:.3g} requests/s" if self.sure_rate else "takes no rate"
        number = f"{rate / self.request_rate - 1:+.0%}"
        return f">{number}" if self.is_bound else number


_RESULTS = {Decision.ENOUGH: "meets", Decision.TOO_FEW: "misses", Decision.OPEN: "open"}


def check_services(path: Path, workers: Workers, seed: int, report: Report) -> bool:
    """Test every service of a file, report a table in Markdown, and return whether all meet their objectives.

    Raises:
        UserError: An invalid file or service.
    """
    services = read_tables(path, "check", "service", Service)
    prepared = [_prepare(service, path, seed) for service in services]
    checked = [_check(*each, workers, seed) for each in prepared]
    for line in table(checked):
        report.line(line)
    for each in checked:
        if each.is_burst:
            report.line("")
            report.line(
                f"{each.service.name}: at {each.request_rate:.3g} requests/s its runs are bursts, which say nothing of a load that lasts:"
                " they have too few requests to fill a replica (num_prompts)."
            )
        if each.least_replicas is not None:
            report.line("")
            report.line(
                f"{each.service.name}: {each.request_rate:.3g} requests/s need at least {whole(each.least_replicas)} replicas"
                f" {BY_DATA_SHEET}."
            )
    report.data({"services": [_data(each) for each in checked], "meets": all(each.meets for each in checked)})
    return all(each.meets for each in checked)


def _prepare(service: Service, path: Path, seed: int) -> tuple[Service, Candidate, Load, Goal, float]:
    """A service's candidate, load, goal and rate; errors name the service."""
    try:
        (candidate,) = candidates(
            parse_line(service.serve), [service.gpu], {"router": [service.router]}, cost=service.cost
        )
        settings = Settings(model=candidate.started.launch.model.name, seed=seed)
        load, wanted = service.load(path.parent, settings, service.num_prompts)
        goal = Goal(service.limits, service.attainment)
    except UserError as error:
        raise UserError(f"{path}: service {service.name}: {error}") from None
    return service, candidate, load, goal, wanted


def _check(
    service: Service, candidate: Candidate, load: Load, goal: Goal, wanted: float, workers: Workers, seed: int
) -> Checked:
    if candidate.settings is None:
        return Checked(service, wanted, f"{candidate.refused_in_short}: {candidate.refused}")
    seeds = range(seed, seed + DEFAULT_FLEET_SEEDS)
    found = Planner(load, goal, seeds, workers, None, wanted).tested(candidate, service.replicas)
    if isinstance(found, str):
        return Checked(service, wanted, f"cannot be simulated: {found}")
    if found.least_replicas is not None:
        return Checked(service, wanted, _RESULTS[found.decision], least_replicas=found.least_replicas)
    known, sure, highest = found.known_rates, found.sure_rate, mean_rate(found.rates)
    decision = found.decision
    # A longer load of the rate is harder than a burst: a burst that misses the goal is decided.
    is_burst = known is not None and min(known) < wanted and decision is not Decision.TOO_FEW
    if known is not None and decision is Decision.ENOUGH:
        highest = max(wanted, mean_rate(known))
    return Checked(
        service,
        wanted,
        _RESULTS[Decision.OPEN if is_burst else decision],
        found.shares,
        sure_rate=None if sure == inf or is_burst else sure,
        highest_rate=None if highest == inf else highest,
        is_bound=known is not None,
        is_burst=is_burst,
    )


def table(checked: Sequence[Checked]) -> list[str]:
    """A table in Markdown, a row for each service."""
    lines = [
        "| service | fleet | requests/s | objectives | meet them, % | headroom | result |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in checked:
        service = each.service
        shares = f"{100 * min(each.shares):.1f} to {100 * max(each.shares):.1f}" if each.shares else "-"
        goal = f"{' '.join(service.goodput)}, {service.attainment:.0%}"
        fleet = f"{service.replicas} x {service.gpu}"
        result = each.result if each.meets else f"**{each.result}**"
        lines.append(
            f"| {_cell(service.name)} | {fleet} | {each.request_rate:.3g} | {goal} | {shares} | {each.takes} | {_cell(result)} |"
        )
    return lines


def _cell(text: str) -> str:
    """Text of a user, which must not end the cell."""
    return " ".join(text.replace("|", "\\|").split())


def _data(each: Checked) -> dict[str, Any]:
    return {
        "service": each.service.name,
        "gpu": each.service.gpu,
        "replicas": each.service.replicas,
        "request_rate": each.request_rate,
        "shares": list(each.shares),
        "sure_rate": each.sure_rate,
        "highest_rate": each.highest_rate,
        "highest_rate_is_bound": each.is_bound,
        "is_burst": each.is_burst,
        "least_replicas": each.least_replicas,
        "headroom": None if each.highest_rate is None else each.highest_rate / each.request_rate - 1,
        "result": each.result,
        "meets": each.meets,
    }
