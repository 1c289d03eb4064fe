"""Stopwatches: what counts as a sample, in which order samples are taken, and what they come to."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from itertools import groupby
from types import SimpleNamespace
from unittest.mock import ANY

import pytest

torch = pytest.importorskip("torch")

from fragmeter.gpu.devices import devices, timing


def test_what_samples_come_to():
    """Quartiles of 1 2 3 4 9 are 2 and 4; linear between neighbours, as numpy has it."""
    assert timing.timing([9, 1, 3, 2, 4], quantile=0.5) == timing.Timing(us=3, iqr_us=2, samples=5)
    assert timing.timing([9, 1, 3, 2, 4], quantile=0.25).us == 2
    assert timing.timing([1, 2], quantile=0.25) == timing.Timing(us=1.25, iqr_us=0.5, samples=2)


def test_each_round_samples_everything_once_in_another_order():
    taken = list(timing.interleaved([lambda number=number: number * 10.0 for number in range(20)], rounds=3, seed=1))
    rounds = [taken[start : start + 20] for start in (0, 20, 40)]
    for one in rounds:
        assert sorted(one) == [(number, number * 10.0) for number in range(20)]
    assert rounds[0] != rounds[1] != rounds[2] and taken == list(
        timing.interleaved([lambda number=number: number * 10.0 for number in range(20)], rounds=3, seed=1)
    )


def test_samples_of_a_kind_follow_each_other_from_the_largest_on_and_equal_ones_in_another_order_each_round():
    kinds = [(kind, number // 12) for number, kind in enumerate(["gemm", "step", "gemm", "move", "step", "gemm"] * 4)]
    samplers = [lambda number=number: number * 10.0 for number in range(24)]
    taken = [index for index, _ in timing.interleaved(samplers, 3, 1, kinds)]
    rounds = [taken[start : start + 24] for start in (0, 24, 48)]
    orders = []
    for one in rounds:
        assert sorted(one) == [*range(24)]
        orders.append([kind for kind, _ in groupby(kinds[index] for index in one)])
        assert [size for _, size in orders[-1]] == [1, 0] * 3 and len({kind for kind, _ in orders[-1]}) == 3
    assert len(set(map(tuple, orders))) > 1
    gemms = [[index for index in one if kinds[index] == ("gemm", 1)] for one in rounds]
    assert gemms[0] != gemms[1] != gemms[2]


@pytest.fixture()
def clock(monkeypatch):
    """A thread's CPU time in nanoseconds, which only the test advances."""
    now = SimpleNamespace(ns=0)
    monkeypatch.setattr(timing.time, "thread_time_ns", lambda: now.ns)
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: now.ns)
    return now


def test_a_short_call_is_sampled_many_at_a_time_and_every_call_has_a_number(clock):
    """Calls of 100 us, the first of 900: three make up the 300 us that a sample lasts, after one that leads."""
    numbers = []

    def work(number):
        numbers.append(number)
        clock.ns += 900_000 if number == 0 else 100_000

    sample = timing.stopwatch(devices.open("cpu")).sampler(work)
    assert numbers == [0, 1]  # Warming up, which is no sample.
    assert (sample(), sample()) == (100, 100)
    assert numbers == list(range(2 + 2 * (1 + 3)))
    clock.ns, numbers[:] = 0, []
    sample()
    assert clock.ns == 400_000 and numbers == [10, 11, 12, 13]


def test_a_long_call_is_a_sample_and_the_shortest_are_no_more_than_the_most(clock):
    def takes(ns):
        def work(number):
            clock.ns += ns

        return timing.CpuStopwatch().sampler(work)

    assert takes(7_000_000)() == 7000 and clock.ns == 7_000_000 * (timing.WARM_UPS + 1)
    before = clock.ns
    assert takes(1)() == 1e-3 and clock.ns - before == timing.WARM_UPS + 1 + timing.MOST_CALLS


def test_the_time_of_others_does_not_count(clock, monkeypatch):
    """On a CPU only the thread's own time is looked at."""
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: pytest.fail("looked at the wall clock"))

    def work(number):
        clock.ns += 400_000

    assert timing.CpuStopwatch().sampler(work)() == 400


def test_what_is_aside_does_not_count(clock):
    """A call of 500 us that does something else for 300 us in its middle."""
    stopwatch, others = timing.CpuStopwatch(), []

    def other():
        others.append(clock.ns)
        clock.ns += 300_000

    def work(number):
        clock.ns += 100_000
        stopwatch.aside(other)
        clock.ns += 400_000

    sample = stopwatch.sampler(work)
    assert sample() == sample() == 500 and len(others) == timing.WARM_UPS + 2 * (1 + 1)


@pytest.fixture
def small_caches():
    """None here: the size of the cache is judged."""


def test_buffers_are_cold_when_they_are_three_times_the_last_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "Path", lambda _: tmp_path)
    assert timing.CpuStopwatch().cold_bytes == 3 * timing.USUAL_CACHE_BYTES
    for index, size in enumerate(("32K", "1024K", "16384K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert timing.CpuStopwatch().cold_bytes == 3 * 16384 * 1024


class Cuda:
    """torch.cuda as far as a stopwatch needs it: what is captured runs when the graph is replayed."""

    def __init__(self, clock) -> None:
        self.clock, self.log, self.call_ns, self.busy_ns = clock, [], 500_000, 0

    def graph_pool_handle(self):
        return "memory"

    def get_device_properties(self, device):
        return SimpleNamespace(L2_cache_size=50 << 20)

    def synchronize(self, number=0):
        self.log.append("wait")
        self.clock.ns += self.busy_ns
        self.busy_ns = 0

    def CUDAGraph(self):
        graph = SimpleNamespace(calls=0)
        graph.replay = lambda: self.log.append("replay") or self.pass_time(graph.calls)
        return graph

    def pass_time(self, calls):
        """Each replayed call takes what the test says."""
        self.clock.ns += calls * self.call_ns

    def _sleep(self, cycles):
        assert cycles > 0
        self.log.append("sleep")
        self.clock.ns += 200_000

    @contextmanager
    def graph(self, graph, pool):
        assert pool == "memory"
        self.log.append("capture")
        before = len(self.log)
        yield
        graph.calls = len(self.log) - before
        self.log.append("captured")

    def Event(self, enable_timing):
        event = SimpleNamespace(at=None, synchronize=lambda: self.log.append("wait"))
        event.record = lambda: setattr(event, "at", self.clock.ns)
        event.elapsed_time = lambda end: (end.at - event.at) / 1e6
        return event


@pytest.fixture()
def cuda(clock, monkeypatch):
    fake = Cuda(clock)
    monkeypatch.setattr(timing.torch, "cuda", fake)
    flushed = SimpleNamespace(zero_=lambda: fake.log.append("flush"))
    monkeypatch.setattr(timing, "scratch", lambda device, size: size == 50 << 20 and flushed)
    return fake


def cuda_stopwatch(cuda):
    return timing.CudaStopwatch(SimpleNamespace(torch_device=torch.device("cuda", 0), synchronize=cuda.synchronize))


SAMPLE = ["flush", "sleep", "replay", "wait"]


@pytest.mark.parametrize(("call_ns", "calls"), [(500_000, 4), (10_000, 200), (3_000, 256), (9_000_000, 1)])
def test_a_gpu_replays_a_graph_of_calls_between_events(call_ns, calls, clock, cuda):
    """As many calls as 2 ms hold by a first replay of four. The host takes 700 us to launch each, which counts nowhere, nor
    do the flush of the cache and the kernel that waits."""
    stopwatch, cuda.call_ns = cuda_stopwatch(cuda), call_ns

    def work(number):
        cuda.log.append(number)
        clock.ns += 700_000

    sample = stopwatch.sampler(work)
    # Each graph is replayed once before it counts.
    first = [0, 1, "wait", "capture", 0, 1, 2, 3, "captured", *SAMPLE, *SAMPLE]
    second = [] if calls == 4 else ["capture", *range(calls), "captured", *SAMPLE]
    assert cuda.log == [*first, *second]
    cuda.log.clear()
    assert sample() == pytest.approx(call_ns / 1e3) and cuda.log == SAMPLE
    assert stopwatch.cold_bytes == 150 << 20 and stopwatch.quantile == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("call_ns", [500_000, 10_000])
def test_what_a_graph_reads_lives_as_long_as_its_sampler(call_ns, cuda):
    """A graph has addresses, and its memory would be freed with the call: on an H200 that was an illegal access."""
    stopwatch, cuda.call_ns = cuda_stopwatch(cuda), call_ns
    tensor = torch.zeros(1)
    alive = weakref.ref(tensor)
    sample = stopwatch.sampler(lambda number, tensor=tensor: cuda.log.append(number))
    del tensor
    gc.collect()
    assert alive() is not None and sample() > 0
    del sample
    gc.collect()
    assert alive() is None


def test_where_the_host_takes_part_a_gpu_is_waited_for_on_the_wall_clock(clock, cuda):
    def work(number):
        cuda.log.append(number)
        clock.ns += 1_000_000

    sample = cuda_stopwatch(cuda).sampler(work, captured=False)
    cuda.log.clear()
    assert sample() == 1000 and cuda.log == [2, "wait", 3, 4, "wait"]


def test_what_comes_before_is_waited_for_and_does_not_count(clock, cuda):
    """A step of 3,000 us behind two others, each queued in 100 us, for which the device takes 5,000 us."""
    stopwatch = cuda_stopwatch(cuda)

    def other():
        cuda.log.append("other")
        clock.ns += 100_000
        cuda.busy_ns = 5_000_000

    def work(number):
        for _ in range(2):
            stopwatch.before(other)
        cuda.log.append(number)
        clock.ns += 3_000_000

    sample = stopwatch.sampler(work, captured=False)
    cuda.log.clear()
    assert sample() == sample() == 3000
    other_waited = ["wait", "other", "wait"]
    assert cuda.log == 2 * ["wait", *other_waited, *other_waited, ANY, "wait"]


def test_what_runs_when_the_next_call_is_prepared_counts(clock, cuda):
    """Steps of 100 us of the host and 700 us of the device, of which a sample has more than one."""
    stopwatch = cuda_stopwatch(cuda)

    def other():
        cuda.busy_ns = 5_000_000

    def work(number):
        stopwatch.before(other)
        cuda.log.append(number)
        clock.ns += 100_000
        cuda.busy_ns = 700_000

    sample = stopwatch.sampler(work, captured=False)
    cuda.log.clear()
    assert sample() == 800
    assert len([number for number in cuda.log if number != "wait"]) > 2


def test_on_a_gpu_nothing_is_done_aside(cuda):
    cuda_stopwatch(cuda).aside(lambda: pytest.fail("done"))
