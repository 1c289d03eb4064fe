"""What the readings of a server show by themselves: what happens now, and since when.

1. A signal over the readings with times, of the busiest engine: requests that wait, if at some reading 3 or more do, else the use of
   the KV cache, else requests in flight.
2. Two shapes are fitted by least squares at each reading: a step, with a mean before and one after it, and a bend, constant up to it
   and a line behind it. The shape and the reading with the smallest error are the turning point, if they leave at most a half of the
   signal's variance and change it by ``_LEAST``.
3. Now is the time since the turning point, or all readings with requests in flight without one.
4. A symptom follows from the means of now alone: nothing is simulated here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import fsum

import numpy as np

from ..measured.scrapes import (
    HITS,
    KV_USAGE,
    PREEMPTIONS,
    QUERIES,
    RUNNING,
    SGLANG,
    WAITING,
    Readings,
    Samples,
    Scrape,
    arriving,
    engines_of,
    in_flight,
    server_of,
    total,
)
from ..measured.server_metrics import ServerMetrics, busiest
from .sides import Sides, sides_lines, sides_of

#: Least change of a signal that is a turning point: requests, or a share of the KV cache; and the variance left, relative.
_LEAST = {"requests waiting": 3.0, "KV cache": 0.1, "requests in flight": 3.0}
_LEFT = 0.5
#: Readings with which a turning point is looked for, and on each side of a step.
_READINGS, _BESIDE = 6, 2
#: Use of the KV cache from which on it is full, and from which on it has no room to spare; requests that are a queue, at least and
#: relative to those that run.
FULL, NEARLY_FULL, _QUEUE, _QUEUE_SHARE = 0.95, 0.9, 1.0, 0.05
#: Requests in flight of the busiest engine, over those of the others, from which on engines are out of balance.
_UNBALANCED = 2.0
#: Share of a request's time, and seconds, outside of the engine from which on the API server is a symptom.
_OUTSIDE_SHARE, _OUTSIDE_S = 0.1, 0.05
#: Share of the KV cache that is to be in use behind a limit at the gateway.
_FILLED = 0.9


@dataclass(frozen=True)
class Turn:
    """A turning point.

    Attributes:
        signal: What changes, a key of ``_LEAST``.
        at_s: When, in seconds.
        before, after: Its means before, and from then on; of a bend the last value of the line.
        grows: Whether it changes all the time since then.
    """

    signal: str
    at_s: float
    before: float
    after: float
    grows: bool


@dataclass(frozen=True)
class Now:
    """What the readings show of the server now: since the turning point, or without one over all readings with requests in flight.

    Attributes:
        symptom: "idle", "drains", "full", "limited", "queue", "nearly full" or "light".
        running, waiting: Mean requests.
        usage: Mean and greatest use of the KV cache; None where it is not known.
        preemptions: Their number; None where it is not known.
        passed_s: Seconds over which preemptions are counted; None without times.
        hit_rates: Of the prefix cache before the turning point and since then; None where either is not known.
        turn: The turning point; None without one.
        end_s: Time of the last reading; None without times.
        server: Name of the server's software.
        engine, num_engines: As in ``ServerMetrics``.
        others: Mean requests in flight of each other engine; None if there is none.
        limit: Requests that run where others wait, if that is a limit.
        at_gateway: Requests in flight with which the KV cache is filled to ``_FILLED``; None where it is not full.
        outside: Seconds of a request outside of the engine, and its whole time, if so much is a symptom; else None.
        sides: Prefill and decode servers, where they run apart; else None.
    """

    symptom: str
    running: float
    waiting: float
    usage: tuple[float, float] | None
    preemptions: float | None
    passed_s: float | None
    hit_rates: tuple[float, float] | None
    turn: Turn | None
    end_s: float | None
    server: str
    engine: str | None
    num_engines: int
    others: float | None
    limit: float | None
    at_gateway: int | None
    outside: tuple[float, float] | None
    sides: Sides | None


def now_of(readings: Readings, metrics: ServerMetrics) -> Now:
    """What happens, by the readings of the busiest engine."""
    _, scrapes = busiest(readings)
    turn = _turn(scrapes)
    begin = 0 if turn is None else next(place for place, each in enumerate(scrapes) if each.at_s == turn.at_s)
    # A counter of the reading at the turning point has counted since the one before it.
    before, since, counted = scrapes[:begin], scrapes[begin:], scrapes[max(0, begin - 1) :]
    busy = [each.samples for each in since if in_flight(each.samples) > 0]
    running, waiting = (_mean([total(each, names) or 0.0 for each in busy]) for names in (RUNNING, WAITING))
    used = [value for each in busy if (value := total(each, KV_USAGE)) is not None]
    usage = (_mean(used), max(used)) if used else None
    preemptions = _more(counted, PREEMPTIONS)
    if len(counted) == 1:
        preemptions = total(counted[-1].samples, PREEMPTIONS)
    symptom = _symptom(since, running, waiting, usage, preemptions, metrics.running_limit)
    at_gateway = None
    if symptom == "full" and usage is not None and running:
        at_gateway = max(1, int(_FILLED * running / usage[0]))
    hit_rates = None
    if turn is not None and (rates := (_hit_rate(before), _hit_rate(counted)))[0] is not None and rates[1] is not None:
        hit_rates = rates[0], rates[1]
    times = [each.at_s for each in counted if each.at_s is not None]
    return Now(
        symptom=symptom,
        running=running,
        waiting=waiting,
        usage=usage,
        preemptions=preemptions,
        passed_s=times[-1] - times[0] if len(times) > 1 else None,
        hit_rates=hit_rates,
        turn=turn,
        end_s=times[-1] if times else None,
        server=server_of(scrapes[-1].samples),
        engine=metrics.engine,
        num_engines=metrics.num_engines,
        others=_others(readings.scrapes[begin:], since),
        limit=metrics.running_limit,
        at_gateway=at_gateway,
        outside=_outside(metrics),
        sides=sides_of(readings.scrapes[begin:]),
    )


def _outside(metrics: ServerMetrics) -> tuple[float, float] | None:
    outside, whole = metrics.outside_engine_s, metrics.e2el_s
    if outside is None or whole is None or outside < max(_OUTSIDE_S, _OUTSIDE_SHARE * whole):
        return None
    return outside, whole


def _others(scrapes: Sequence[Scrape], of_busiest: Sequence[Scrape]) -> float | None:
    """Mean requests in flight of each engine but the busiest."""
    others = len(engines_of(scrapes[-1].samples)) - 1
    if others < 1:
        return None
    rest = [in_flight(each.samples) - in_flight(busy.samples) for each, busy in zip(scrapes, of_busiest, strict=True)]
    return _mean(rest) / others


def _symptom(
    scrapes: Sequence[Scrape],
    running: float,
    waiting: float,
    usage: tuple[float, float] | None,
    preemptions: float | None,
    limit: float | None,
) -> str:
    if not running and not waiting:
        return "idle"
    while_arriving, rate = arriving(scrapes)
    last = scrapes[-1].samples
    if rate and while_arriving.stop < 0.75 * len(scrapes) and in_flight(last) < running:
        return "drains"
    queue = waiting >= max(_QUEUE, _QUEUE_SHARE * running)
    mean, most = usage or (0.0, 0.0)
    if preemptions or (queue and (mean >= FULL or (most >= FULL and limit is None))):
        return "full"
    if queue:
        return "limited" if limit is not None else "queue"
    return "nearly full" if mean >= NEARLY_FULL else "light"


def _turn(scrapes: Sequence[Scrape]) -> Turn | None:
    timed = [each for each in scrapes if each.at_s is not None]
    if len(timed) < _READINGS:
        return None
    signals: dict[str, Callable[[Samples], float]] = {
        "requests waiting": lambda samples: total(samples, WAITING) or 0.0,
        "KV cache": lambda samples: total(samples, KV_USAGE) or 0.0,
        "requests in flight": in_flight,
    }
    times = np.array([each.at_s for each in timed])
    for signal, of in signals.items():
        values = np.array([of(each.samples) for each in timed])
        if values.max() - values.min() < _LEAST[signal]:
            continue
        found = _shape(times, values)
        if found is not None and abs(found[2] - found[1]) >= _LEAST[signal]:
            place, before, after, grows = found
            return Turn(signal, float(times[place]), before, after, grows)
    return None


def _shape(times: np.ndarray, values: np.ndarray) -> tuple[int, float, float, bool] | None:
    """Reading, value before, value after, and whether it is a bend; None if no shape leaves little of the variance."""
    whole = float(((values - values.mean()) ** 2).sum())
    best, found = _LEFT * whole, None
    for place in range(_BESIDE, len(values) - _BESIDE + 1):
        first, second = values[:place], values[place:]
        error = float(((first - first.mean()) ** 2).sum() + ((second - second.mean()) ** 2).sum())
        if error < best:
            best, found = error, (place, float(first.mean()), float(second.mean()), False)
        passed = np.maximum(times - times[place - 1], 0.0)
        columns = np.stack([np.ones(len(values)), passed], axis=1)
        line, *_ = np.linalg.lstsq(columns, values, rcond=None)
        error = float(((columns @ line - values) ** 2).sum())
        # A bend has one free number more than a step has means, and is as good only if it is better.
        if error < 0.9 * best:
            best, found = error, (place - 1, float(line[0]), float(line @ columns[-1]), True)
    return found


def _more(scrapes: Sequence[Scrape], names: tuple[str, ...]) -> float | None:
    """The increase of a counter from the first scrape to the last."""
    first, last = (total(each.samples, names) for each in (scrapes[0], scrapes[-1]))
    return None if last is None or len(scrapes) < 2 else max(0.0, last - (first or 0.0))


def _hit_rate(scrapes: Sequence[Scrape]) -> float | None:
    queries, hits = _more(scrapes, QUERIES), _more(scrapes, HITS)
    return hits / queries if queries and hits is not None else None


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values) if values else 0.0


def clock(at_s: float) -> str:
    """A time of day in UTC; that of a log without a zone is its own."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S")


def lines(now: Now) -> list[str]:
    """The first screen by the readings alone: what happens, since when, why, and what to do without a restart."""
    if now.sides is not None:
        return [measured_now(now), *sides_lines(now.sides)]
    found = measured_now(now), _since(now), _why(now), _outside_text(now), _balance(now), _do(now)
    return [line for line in found if line]


def measured_now(now: Now) -> str:
    """The requests, the KV cache and the preemptions, in a sentence."""
    of = "" if now.engine is None else f" (engine {now.engine}, the busiest of {now.num_engines})"
    parts = [f"{now.running:,.1f} requests run and {now.waiting:,.1f} wait"]
    if now.usage is not None:
        parts.append(f"{now.usage[0]:.0%} of the KV cache is in use ({now.usage[1]:.0%} at most)")
    if now.preemptions is not None:
        passed = "" if now.passed_s is None else f" in {_length(now.passed_s)}"
        name = "retractions" if now.server == SGLANG else "preemptions"
        parts.append(f"{now.preemptions:,.0f} {name}{passed}")
    return f"Measured{of}: {', '.join(parts)}."


def _since(now: Now) -> str:
    turn = now.turn
    if turn is None:
        return "" if now.passed_s is None else "Since: no turning point; the same in all readings."
    shown = [
        f"{each:.0%}" if turn.signal == "KV cache" else f"{max(each, 0):,.0f}" for each in (turn.before, turn.after)
    ]
    ago = "" if now.end_s is None else f", {_length(now.end_s - turn.at_s)} before the last reading"
    how = "changes steadily from" if turn.grows else "from"
    hits = ""
    if now.hit_rates is not None and now.hit_rates[0] - now.hit_rates[1] >= 0.1:
        hits = f"; the prefix cache's hit rate falls from {now.hit_rates[0]:.0%} to {now.hit_rates[1]:.0%}: it evicts before it hits"
    return f"Since {clock(turn.at_s)}{ago}: {turn.signal} {how} {shown[0]} to {shown[1]}{hits}."


def _why(now: Now) -> str:
    limit = "--max-running-requests" if now.server == SGLANG else "--max-num-seqs"
    return {
        "idle": "Nothing runs and nothing waits.",
        "drains": "No request arrives any more: the server finishes those that it has.",
        "full": "The KV cache is full: requests wait for blocks of it, or lose theirs.",
        "limited": f"Never more than {now.limit or 0:,.0f} run while others wait, as with {limit} {now.limit or 0:.0f}.",
        "queue": "Requests wait though the KV cache has room: for steps, which take as many tokens as they can, or for"
        f" {limit}.",
        "nearly full": "Nothing waits yet; the KV cache has no room for a burst, or for requests that get longer.",
        "light": "Nothing waits, and the KV cache has room.",
    }[now.symptom]


def _outside_text(now: Now) -> str:
    if now.outside is None:
        return ""
    outside, whole = now.outside
    return (
        f"Outside of the engine: {1e3 * outside:,.0f} of the {1e3 * whole:,.0f} ms of a request pass in the API server, in front of the"
        " engine's queue or behind its last token. No flag of the engine shortens them; --api-server-count and --stream-interval do,"
        " at the next restart."
    )


def _balance(now: Now) -> str:
    busiest = now.running + now.waiting
    if now.others is None or busiest < _UNBALANCED * now.others or busiest - now.others < _LEAST["requests in flight"]:
        return ""
    return (
        f"Out of balance: engine {now.engine} has {busiest:,.1f} requests in flight, each of the other {now.num_engines - 1} has"
        f" {now.others:,.1f} in the mean. Now, without a restart: let the router send by requests in flight, and look at"
        " sessions or prefixes that it keeps on one engine."
    )


def _do(now: Now) -> str:
    if now.at_gateway is not None:
        return (
            f"Now, without a restart: let at most {now.at_gateway:,} requests be in flight (a limit at the gateway): as many fill"
            f" {_FILLED:.0%} of the KV cache. The others wait there, or go to another replica; nothing is lost."
        )
    if now.symptom in ("limited", "queue"):
        share = now.waiting / (now.running + now.waiting)
        return (
            f"Now, without a restart: send {share:.0%} of the requests to another replica, or refuse them; a limit at the gateway"
            " only moves the queue there."
        )
    return ""


def _length(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
