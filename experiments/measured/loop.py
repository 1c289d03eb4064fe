"""Whether the clients of a server wait for its answers, by the requests in flight at its scrapes.

    open loop     clients send at a rate of their own: the requests in flight change by arrivals less finishes
    closed loop   clients send a request after each answer: as many stay in flight, but for those on their way back

1. Requests in flight run or wait. By a scrape as many requests have arrived as have finished or are in flight.
2. The difference between two scrapes is a normal number in both loops; its mean is 0, and its variance differs.
3. Open: half of the requests that arrived or finished, which is what Poisson arrivals alone give, and at most the mean in flight,
   because counts that are far apart are independent. Bursts and a queue that grows make it larger.
4. Closed: the requests between an answer and the next request, twice the rate of finishes times ``_RETURN_S``, and ``_ROUNDING``.
5. Scrapes are skipped until as many requests have passed that the open variance is ``_APART`` times the closed one.
6. The product of the ratios of both densities are the odds. From ``_ODDS`` to 1 for one of them the loop is known.
7. Neither the idle scrape before the first request counts, nor the last scrape while requests arrive if two others are left:
   they may have ended before it. Where nearly none finish while others arrive, all were sent at once: that is no loop.

In the metrics of a vLLM 0.33 server with 12 clients 12 requests are in flight at each of 19 scrapes (``tests/data/real_server``).
Clients that pause, or become more, have requests in flight that vary: their closed loop is taken for an open one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum, log, sqrt
from typing import NamedTuple

#: Seconds from an answer to the client's next request in the scheduler, and a variance for counts that are whole numbers.
_RETURN_S, _ROUNDING = 0.1, 0.5
#: Least ratio of the variances of two scrapes that are compared.
_APART = 4.0
#: Odds from which on the loop is known: ten to one is strong evidence on Jeffreys' scale.
_ODDS = 10.0
#: Share of the arrived requests that must finish meanwhile.
_TURNOVER = 0.1
#: Standard deviations of arrivals and finishes by which requests in flight must rise to grow.
_GROWS = 2.0


class Point(NamedTuple):
    """A scrape while requests arrive: its time in seconds, and the requests that have finished by then and are in flight."""

    at_s: float
    finished: float
    in_flight: float

    @property
    def arrived(self) -> float:
        """Requests that have arrived by then."""
        return self.finished + self.in_flight


@dataclass(frozen=True)
class Loop:
    """What the scrapes say of the clients.

    Attributes:
        kind: "open", "closed", or "unknown".
        reason: Why, a clause for the report.
        arrival_rate: Requests/s that arrive between the scrapes that count; None with fewer than two.
        in_flight: Mean requests in flight at them; None without any.
    """

    kind: str
    reason: str
    arrival_rate: float | None = None
    in_flight: float | None = None


def loop_of(points: Sequence[Point]) -> Loop:
    """The loop of the clients.

    Args:
        points: The scrapes while requests arrive, the first with as many arrived as before them and the last with as many as after.
    """
    counted = _steady(points)
    if not counted:
        return Loop("unknown", "no scrape with a time has requests in flight while others arrive")
    mean = fsum(point.in_flight for point in counted) / len(counted)
    if len(counted) < 2:
        return Loop("unknown", "a single scrape with requests in flight does not tell", in_flight=mean)
    first, last = counted[0], counted[-1]
    passed_s, arrived, finished = last.at_s - first.at_s, last.arrived - first.arrived, last.finished - first.finished
    if finished < _TURNOVER * arrived or not arrived:
        return Loop("unknown", f"{finished:,.0f} requests finish while {arrived:,.0f} arrive", in_flight=mean)
    rate, closed, counts = arrived / passed_s, _log_odds(counted), [point.in_flight for point in counted]
    between = f"{min(counts):,.0f} to {max(counts):,.0f} at {len(counts)} scrapes within {passed_s:.3g} s"
    if closed >= log(_ODDS):
        return Loop("closed", f"requests in flight stay, {between}", rate, mean)
    if closed > -log(_ODDS):
        return Loop("unknown", f"requests in flight, {between}, do not tell", rate, mean)
    if last.in_flight - first.in_flight > _GROWS * sqrt(arrived + finished):
        grown = f"grow from {first.in_flight:,.0f} to {last.in_flight:,.0f} within {passed_s:.3g} s"
        return Loop("open", f"requests in flight {grown}", rate, mean)
    return Loop("open", f"requests in flight vary, {between}", rate, mean)


def _steady(points: Sequence[Point]) -> list[Point]:
    """The scrapes that count."""
    found: list[Point] = []
    for point in points:
        if point.at_s > found[-1].at_s if found else point.in_flight > 0:
            found.append(point)
    return found[:-1] if len(found) > 2 else found


def _log_odds(points: Sequence[Point]) -> float:
    """The logarithm of the odds for a closed loop."""
    return fsum(
        (log(open_ / closed) - change**2 * (1 / closed - 1 / open_)) / 2
        for change, open_, closed in _changes(points)
        if open_ > closed
    )


def _changes(points: Sequence[Point]) -> Iterator[tuple[float, float, float]]:
    """Changes of the requests in flight, and their variances in an open and in a closed loop."""
    before = points[0]
    for point in points[1:]:
        finished = point.finished - before.finished
        arrivals = (finished + point.arrived - before.arrived) / 2
        closed = _ROUNDING + 2 * _RETURN_S * finished / (point.at_s - before.at_s)
        if arrivals >= _APART * closed:
            yield point.in_flight - before.in_flight, min(arrivals, (point.in_flight + before.in_flight) / 2), closed
            before = point
