"""What a server measures that its simulation, in which no flag helps, contradicts.

A simulation that misses what makes a server slow is healthy, whatever the server does. So a server is called healthy, or one that misses
its objectives as well as its flags can, only if none of these is found:

    objectives   the simulation meets them, and by the server's histograms, or a benchmark, a smaller share of the requests than is asked for
    latencies    mean TTFT, TPOT or E2EL is some times as long as simulated
    in flight    while requests arrive, some times as many run or wait as simulated
    queue        while requests arrive, a share of those in flight waits that does not wait in the simulation

1. A histogram bounds the share of the requests within a limit, by the buckets beside it. At most the smallest of the upper bounds meets
   all objectives. At least all but the sum of the shares above the lower bounds does.
2. Where that many meet the objectives, longer latencies alone are no contradiction.
3. In an open loop of a steady load rate times mean E2EL are in flight (Little's law), more than in short draws, which begin empty. As
   many, or those of the draws if they are more, are compared with the measured ones; and not only by a factor, because the number at
   a scrape is random.

The factors leave room for the errors of step times, which a light load shows as they are and a heavy one enlarges; a server that is
some per cent slower than predicted is no contradiction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum, isfinite, sqrt

from ...sim.metrics.registry import METRICS
from ..measured.server_metrics import Histogram, ServerMetrics
from ..runs.slo_check import Goal
from .causes import Case
from .measured import ClientLatencies
from .run import Observation

#: Times the simulated mean from which on a latency is contradicted, and the least difference of TTFT, ms: it is shorter than a step
#: in an idle server.
_TPOT_TIMES, _E2EL_TIMES, _TTFT_TIMES, _TTFT_MS = 1.5, 1.5, 3.0, 100.0
#: Times the simulated requests in flight from which on they are contradicted, and standard deviations of a Poisson number.
_IN_FLIGHT_TIMES, _DEVIATIONS = 2.0, 4.0
#: Share of the requests in flight that waits, number of them, and times the simulated share, from which on there is a queue.
_QUEUE_SHARE, _QUEUE, _QUEUE_TIMES = 0.2, 3.0, 3.0
#: Use of the KV cache from which on it is taken for full.
_FULL = 0.9


@dataclass(frozen=True)
class Contradiction:
    """A value that the server has and its healthy simulation has not.

    Attributes:
        name: What it is of: an objective's name, "objectives", "mean_ttft_ms", "in_flight" or "waiting".
        measured, simulated: Both values; of objectives, the greatest share of the requests that can meet them.
        text: A clause for the report.
    """

    name: str
    measured: float
    simulated: float
    text: str


def contradictions(case: Case, clients: ClientLatencies | None, goal: Goal | None) -> tuple[Contradiction, ...]:
    """What contradicts that the server is healthy, the plainest first."""
    found = [] if goal is None or not meets(case.seen, goal) else [*_of_objectives(case, clients, goal)]
    if goal is None or not _surely_meets(case.metrics, clients, goal):
        found += _of_latencies(case, clients)
    if case.metrics is not None:
        found += _of_requests(case, case.metrics)
    return tuple(found)


def meets(seen: Observation, goal: Goal) -> bool:
    """Whether enough requests of a simulation meet the objectives."""
    return seen.cost <= 1 - goal.attainment


def queue(case: Case) -> bool:
    """Whether requests wait in the server, by its metrics, and nearly none do in the simulation."""
    metrics = case.metrics
    waiting, running = (0.0, 0.0) if metrics is None else (metrics.waiting or 0.0, metrics.running or 0.0)
    seen = case.seen
    share = seen.arriving_waiting / max(seen.arriving_running + seen.arriving_waiting, 1e-9)
    return waiting >= max(_QUEUE, _QUEUE_SHARE * (waiting + running), _QUEUE_TIMES * share * (waiting + running))


def queue_reason(case: Case) -> str:
    """What makes requests wait in the server and not in the simulation, a clause."""
    metrics, most = case.metrics, case.server.launch.max_num_seqs
    limit, usage = (None, None) if metrics is None else (metrics.running_limit, metrics.kv_usage)
    if limit is not None and limit < most:
        return (
            f"never more than {limit:,.0f} run while others wait, as with {case.server.line.flag_name('max-num-seqs')} {limit:.0f}, and the line has {most:,}:"
            " give the server's own"
        )
    if usage is not None and usage[0] >= _FULL:
        return "its KV cache is full: give its size (--startup-log)"
    return "a flag that the line lacks limits those that run, or steps are longer than predicted"


def _of_objectives(case: Case, clients: ClientLatencies | None, goal: Goal) -> Iterator[Contradiction]:
    simulated = 1 - case.seen.cost
    for name, (_, most) in _within(case.metrics, goal).items():
        if most < goal.attainment:
            limit = goal.objectives.limits[name]
            text = f"at most {most:.1%} have {_article(name)} {name.upper()} within {limit:g} ms by the server's own histogram"
            yield Contradiction(name, most, simulated, text)
    if clients is not None and clients.attained is not None and clients.attained < goal.attainment:
        text = f"{clients.attained:.1%} of the benchmark's requests meet the objectives"
        yield Contradiction("objectives", clients.attained, simulated, text)


def _article(name: str) -> str:
    return "an" if name == "e2el" else "a"


def _within(metrics: ServerMetrics | None, goal: Goal) -> dict[str, tuple[float, float]]:
    """The least and the greatest share of the requests that meet each objective, by name, for which there is a histogram."""
    if metrics is None:
        return {}
    histograms = {"ttft": metrics.ttfts, "tpot": metrics.tpots, "e2el": metrics.e2els}
    found = {}
    for name, limit in goal.objectives.limits.items():
        if (histogram := histograms[name]) is not None:
            least, most = histogram.shares_within(limit / 1e3)
            # Outputs of one token have no TPOT, and meet it.
            of = _share_of_finished(histogram, metrics) if name == "tpot" else 1.0
            found[name] = 1 - of * (1 - least), 1 - of * (1 - most)
    return found


def _share_of_finished(tpots: Histogram, metrics: ServerMetrics) -> float:
    return min(1.0, tpots.count / metrics.finished) if metrics.finished else 1.0


def _surely_meets(metrics: ServerMetrics | None, clients: ClientLatencies | None, goal: Goal) -> bool:
    """Whether the server's requests meet the goal by what it, or a benchmark, measured."""
    if clients is not None and clients.attained is not None:
        return clients.attained >= goal.attainment
    found = _within(metrics, goal)
    known = found.keys() == goal.objectives.limits.keys()
    return known and 1 - fsum(1 - least for least, _ in found.values()) >= goal.attainment


def _of_latencies(case: Case, clients: ClientLatencies | None) -> Iterator[Contradiction]:
    seen, metrics = case.seen, case.metrics
    rows = [("mean_e2el_ms", None if clients is None else clients.mean_e2el_ms, _E2EL_TIMES, 0.0)]
    if metrics is not None:
        rows += [
            (name, None if histogram is None else 1e3 * histogram.mean, times, least)
            for name, histogram, times, least in (
                ("mean_tpot_ms", metrics.tpots, _TPOT_TIMES, 0.0),
                ("mean_ttft_ms", metrics.ttfts, _TTFT_TIMES, _TTFT_MS),
                ("mean_e2el_ms", metrics.e2els, _E2EL_TIMES, 0.0),
            )
        ]
    for name, measured, times, least in rows:
        simulated, metric = getattr(seen, name), METRICS[name]
        if measured is not None and measured > times * simulated and measured - simulated >= least:
            text = f"{metric.label} is {metric.text(measured)} ms in place of {metric.text(simulated)}"
            yield Contradiction(name, measured, simulated, text)


def _of_requests(case: Case, metrics: ServerMetrics) -> Iterator[Contradiction]:
    running, waiting, seen = metrics.running or 0.0, metrics.waiting or 0.0, case.seen
    simulated = seen.arriving_running + seen.arriving_waiting
    if case.load.max_concurrency is None and isfinite(case.load.mean_rate):
        simulated = max(simulated, case.load.mean_rate * seen.mean_e2el_ms / 1e3)
    measured = running + waiting
    if measured > max(_IN_FLIGHT_TIMES * simulated, simulated + _DEVIATIONS * sqrt(max(simulated, 1.0))):
        text = f"{measured:,.1f} requests are in flight in place of {simulated:,.1f} while requests arrive"
        yield Contradiction("in_flight", measured, simulated, text)
    if queue(case):
        text = f"{waiting:,.1f} requests wait in place of {seen.arriving_waiting:,.1f}"
        yield Contradiction("waiting", waiting, seen.arriving_waiting, text)
