"""Open and closed loops distinguished by the requests in flight: scrapes of a real server, of queues, and by hand."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable

import numpy as np
import pytest

from fragmeter.experiments.measured.loop import Loop, Point, loop_of
from fragmeter.experiments.measured.scrapes import RUNNING, in_flight, read_scrapes, total
from fragmeter.experiments.measured.server_metrics import served_load
from paths import ROOT

SERVER = ROOT / "tests" / "data" / "real_server" / "1"
FIRST_TOKENS = ("vllm:time_to_first_token_seconds_count",)


def points(*rows: tuple[float, float, float]) -> list[Point]:
    return [Point(*row) for row in rows]


def written(path, rows: Iterable[Point]) -> None:
    """Scrapes with a time each."""
    path.write_text(
        "".join(
            f"{at_s}\nvllm:num_requests_running {in_flight}\nvllm:e2e_request_latency_seconds_count {finished}\n"
            for at_s, finished, in_flight in rows
        )
    )


def of_real_server(folder, name: str, every: int) -> Loop:
    """Every so many of its scrapes. The files have no count of finished requests: those with a first token that do not run any
    more have finished."""
    scrapes = read_scrapes(SERVER / f"{name}.metrics.txt").scrapes
    rows = []
    for at_s, samples in scrapes[::every]:
        finished = max(0.0, (total(samples, FIRST_TOKENS) or 0.0) - (total(samples, RUNNING) or 0.0))
        rows.append(Point(at_s, finished, in_flight(samples)))
    written(folder / "metrics.txt", rows)
    return served_load(read_scrapes(folder / "metrics.txt")).loop


class TestRealServer:
    @pytest.mark.parametrize("every", [1, 3, 5])
    def test_twelve_clients_that_wait(self, every, tmp_path):
        assert json.loads((SERVER / "ample" / "sharegpt-closed.json").read_text())["max_concurrency"] == 12
        found = of_real_server(tmp_path, "ample/sharegpt-closed", every)
        assert (found.kind, found.in_flight) == ("closed", 12) and "12 to 12 at" in found.reason

    @pytest.mark.parametrize("every", [1, 3, 5])
    @pytest.mark.parametrize(
        "name",
        [
            "ample/random-light", "ample/random-medium", "ample/sharegpt-medium", "ample/prefixes-medium", "ample/ramp",
            "tight/random-medium",
        ],
    )  # fmt: skip
    def test_arrivals_at_a_rate(self, name, every, tmp_path):
        found, bench = of_real_server(tmp_path, name, every), json.loads((SERVER / f"{name}.json").read_text())
        assert found.kind == "open" if every == 1 else found.kind != "closed"
        # Of the ramp the client states no rate.
        if every == 1 and name != "ample/ramp":
            assert found.arrival_rate == pytest.approx(bench["request_rate"], rel=0.1)

    @pytest.mark.parametrize("name", ["ample/random-saturated", "tight/random-saturated", "tight/sharegpt-saturated"])
    def test_requests_that_are_sent_at_once_are_no_loop(self, name, tmp_path):
        assert of_real_server(tmp_path, name, 1).kind == "unknown"


def queue(
    rng: np.random.Generator, servers: int, rate: float | None, users: int, end_s: float
) -> list[tuple[float, int]]:
    """Arrivals (1) and finishes (-1) of a queue with exponential service of 2 s, in order of time: Poisson arrivals, or users that
    send again 50 ms after an answer in the mean."""
    events: list[tuple[float, int]] = []
    coming = [0.0] * users if rate is None else np.cumsum(rng.exponential(1 / rate, int(2 * rate * end_s))).tolist()
    heapq.heapify(coming)
    free = [0.0] * servers
    while coming[0] < end_s:
        at_s = heapq.heappop(coming)
        done_s = max(at_s, heapq.heappop(free)) + rng.exponential(2.0)
        heapq.heappush(free, done_s)
        events += [(at_s, 1), (done_s, -1)]
        if rate is None:
            heapq.heappush(coming, done_s + rng.exponential(0.05))
    return sorted(events)


def scraped(events: list[tuple[float, int]], times: np.ndarray) -> list[Point]:
    at_s, kind = np.array([each[0] for each in events]), np.array([each[1] for each in events])
    place = np.searchsorted(at_s, times, side="right")
    finished, changed = (np.concatenate([[0], np.cumsum(each)])[place] for each in (kind < 0, kind))
    return [Point(*row) for row in zip(times.tolist(), finished.tolist(), changed.tolist(), strict=True)]


@pytest.mark.parametrize("every_s", [1.0, 15.0])
class TestQueues:
    """Sixty queues with 20 servers each, which serve 10 requests/s, from 60 s to 180 s."""

    def kinds(self, rate: float | None, users: int, every_s: float) -> list[str]:
        times = np.arange(60.0, 181.0, every_s)
        return [
            loop_of(scraped(queue(np.random.default_rng(seed), 20, rate, users, 185.0), times)).kind
            for seed in range(60)
        ]

    @pytest.mark.slow
    @pytest.mark.parametrize("users", [15, 40, 200])
    def test_clients_that_wait_are_a_closed_loop(self, users, every_s):
        kinds = self.kinds(None, users, every_s)
        assert kinds.count("closed") >= 54 and kinds.count("open") <= 3

    @pytest.mark.slow
    @pytest.mark.parametrize("rate", [5.0, 9.5, 11.0, 15.0])
    def test_clients_with_a_rate_are_an_open_loop(self, rate, every_s):
        """Below and above the rate that is served."""
        kinds = self.kinds(rate, 0, every_s)
        assert kinds.count("open") >= 54 and kinds.count("closed") <= 3


class TestByHand:
    def test_a_queue_that_grows(self):
        """Of 25 requests/s 15 are served."""
        found = loop_of(points((0, 100, 50), (20, 400, 250)))
        assert (found.kind, found.arrival_rate) == ("open", 25.0)
        assert found.reason == "requests in flight grow from 50 to 250 within 20 s"

    def test_one_scrape_does_not_tell(self):
        for rows in ([(20.0, 400.0, 250.0)], [(0.0, 0.0, 0.0), (20.0, 400.0, 250.0)]):
            found = loop_of(points(*rows))
            assert (found.kind, found.arrival_rate) == ("unknown", None) and "a single scrape" in found.reason
        assert loop_of([]).kind == "unknown"

    def test_the_drain_after_the_last_arrival_is_no_change(self):
        """The last requests arrive before the last scrape, by which most have finished."""
        rows = [(15.0 * place, 150.0 * place, 64.0) for place in range(5)]
        kinds = {left: loop_of(points(*rows, (75.0, 814.0 - left, left))).kind for left in (64.0, 20.0, 0.0)}
        assert kinds == dict.fromkeys((64.0, 20.0, 0.0), "closed")

    def test_a_request_on_its_way_back_is_no_change(self):
        rows = [(15.0 * place, 150.0 * place, 64.0 - place % 2) for place in range(6)]
        assert loop_of(points(*rows)).kind == "closed"

    def test_scrapes_without_progress_tell_nothing(self):
        assert loop_of(points((0, 10, 64), (1, 10, 64), (2, 10, 64), (3, 10, 64))).kind == "unknown"

    def test_a_clock_that_stands_is_no_time(self):
        assert loop_of(points((0, 0, 9), (0, 5, 90), (0, 9, 95))).kind == "unknown"


def test_of_several_engines_all_requests_in_flight_count(tmp_path):
    """Forty clients wait; the router moves them between two engines, so that in one of them the number varies."""
    lines = []
    for place, first in enumerate((10, 28, 16, 22, 12, 26)):
        lines.append(f"{1_790_000_000 + 15 * place}")
        for engine, requests in enumerate((first, 40 - first)):
            for name, value in (
                ("num_requests_running", requests),
                ("num_requests_waiting", 0),
                ("e2e_request_latency_seconds_count", 100 * place),
            ):
                lines.append(f'vllm:{name}{{engine="{engine}"}} {value}')  # fmt: skip
    (tmp_path / "metrics.txt").write_text("\n".join(lines) + "\n")
    found = served_load(read_scrapes(tmp_path / "metrics.txt"))
    assert found.loop.kind == "closed" and found.engine == "1"
    assert found.loop.in_flight == pytest.approx(np.mean([30, 12, 24, 18, 28]))
