"""Timing of calls on a device, with as little influence of other load on the machine as possible.

On the CPU the clock is the CPU time of this thread. With four busy processes on two cores the wall-clock time of a
step grew by a factor of 1.5 to 3, even in the shortest of ten tries, and the CPU time by 5 to 12 %. On an idle machine
the two agree to 1 %. The remaining influence of other processes (caches, memory, frequency) only adds time, so the result
is the lower quartile.

On a GPU a graph of some calls is replayed between two events, and the result is the median with its interquartile range.
Before the first event come a write that fills the L2 cache, and a kernel that waits while the host queues the rest, so
that no launch is part of the time. The number of calls follows from a short replay: calls timed by the host one by one
take as long as their launch.

A call receives its number and selects its buffers by it, at most as many as exceed the last-level cache, see
:attr:`Stopwatch.cold_bytes`. Warm-up calls run first and do not count. Samples of several operations are interleaved
(:func:`interleaved`), so a slow second affects one sample of each operation and no result. Samples of one kind follow each other, from
the largest on: on a CPU a step of 4 rows took 13 % more time behind six calls of other operations, and 8 % more as the third step behind them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from .devices import Device

#: A timed call; its argument is the number of previous calls.
Work = Callable[[int], object]
#: Takes one sample: microseconds per call.
Sampler = Callable[[], float]

WARM_UPS = 2
#: Calls shorter than this take noticeably longer when their code is cold.
SHORT_US = 2000.0
#: Minimum duration of a sample, and maximum number of calls in it.
LEAST_SAMPLE_US = {"cpu": 300.0, "cuda": 2000.0}
MOST_CALLS = 64
#: The same of a replayed graph, and calls of the replay that it follows from: 200 calls of 10 us are 2 ms, in which the
#: 0.5 us of an event's clock are 0.03 %.
MOST_REPLAYED, FIRST_REPLAYED = 256, 4
#: Cycles of the waiting kernel, about 0.2 ms: enough to queue two events and a graph.
QUEUE_CYCLES = 400_000
#: Size of the rotated buffers as a multiple of the last-level cache.
CACHES = 3
#: Cache size if the system does not report it.
USUAL_CACHE_BYTES = 32 << 20


class Timing(NamedTuple):
    """Microseconds per call.

    Attributes:
        us: The quantile that the stopwatch takes.
        iqr_us: Interquartile range.
        samples: Number of samples.
    """

    us: float
    iqr_us: float
    samples: int


class Stopwatch(Protocol):
    """Times calls on one device.

    Attributes:
        quantile: The quantile of the samples that is the result.
        cold_bytes: Total size of buffers that evict each other from the last-level cache.
        how: Description of the method, for a report.
    """

    @property
    def quantile(self) -> float: ...

    @property
    def cold_bytes(self) -> int: ...

    @property
    def how(self) -> str: ...

    def sampler(self, work: Work, captured: bool = True) -> Sampler:
        """Warm ``work`` up; ``captured`` says whether a GPU may replay it as a graph."""

    def aside(self, between: Callable[[], object]) -> None:
        """Run untimed work that a step does before a call, or in the middle of it.

        On a CPU this evicts the call's code from the caches, which makes a short call much slower. A GPU's kernels are not
        affected, so nothing runs there.
        """

    def before(self, work: Callable[[], object]) -> None:
        """Run work that comes before a call that the host takes part in, on every device. Its time does not count, to its end on a
        GPU."""

    def elapsed_us(self, work: Work, numbers: range) -> float:
        """Microseconds of a single execution of ``work`` for each of ``numbers``; on a GPU including the wait for completion."""


def stopwatch(device: Device) -> Stopwatch:
    """The stopwatch for a device."""
    return CudaStopwatch(device) if device.torch_device.type == "cuda" else CpuStopwatch()


class CpuStopwatch:
    """:class:`Stopwatch` of this thread's CPU time."""

    quantile = 0.25
    how = "time that the core spent on the thread, lower quartile of samples taken in turns"

    def __init__(self) -> None:
        self._aside_ns = 0

    @cached_property
    def cold_bytes(self) -> int:
        """Computed from the last-level cache of the first core."""
        return CACHES * _last_cache_bytes()

    def sampler(self, work: Work, captured: bool = True) -> Sampler:
        """As in :class:`Stopwatch`; a CPU captures nothing."""
        return _Repeated(work, self.elapsed_us, LEAST_SAMPLE_US["cpu"])

    def aside(self, between: Callable[[], object]) -> None:
        """As in :class:`Stopwatch`."""
        start = time.thread_time_ns()
        between()
        self._aside_ns += time.thread_time_ns() - start

    def before(self, work: Callable[[], object]) -> None:
        """As in :class:`Stopwatch`."""
        self.aside(work)

    def elapsed_us(self, work: Work, numbers: range) -> float:
        """As in :class:`Stopwatch`."""
        self._aside_ns, start = 0, time.thread_time_ns()
        for number in numbers:
            work(number)
        return (time.thread_time_ns() - start - self._aside_ns) / 1e3


class CudaStopwatch:
    """:class:`Stopwatch` of a GPU: graphs between events, or the wall clock if the host takes part in the work."""

    quantile = 0.5
    how = (
        "CUDA graphs of calls between events, behind a waiting kernel and a flushed L2; the wall clock where the host takes "
        "part; median"
    )

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        cache_bytes = torch.cuda.get_device_properties(device.torch_device).L2_cache_size
        self.cold_bytes = CACHES * cache_bytes
        self._flushed = scratch(device, cache_bytes)
        self._before_ns = 0

    def sampler(self, work: Work, captured: bool = True) -> Sampler:
        """As in :class:`Stopwatch`."""
        if not captured:
            return _Repeated(work, self.elapsed_us, LEAST_SAMPLE_US["cuda"])
        for number in range(WARM_UPS):
            work(number)
        self._device.synchronize()
        first = self._replayed(work, FIRST_REPLAYED)
        calls = max(1, min(MOST_REPLAYED, round(LEAST_SAMPLE_US["cuda"] / max(first(), 1e-3))))
        return first if calls == FIRST_REPLAYED else self._replayed(work, calls)

    def aside(self, between: Callable[[], object]) -> None:
        """As in :class:`Stopwatch`."""

    def before(self, work: Callable[[], object]) -> None:
        """As in :class:`Stopwatch`."""
        # The call before may still run, and counts.
        self._device.synchronize()
        start = time.perf_counter_ns()
        work()
        self._device.synchronize()
        self._before_ns += time.perf_counter_ns() - start

    def elapsed_us(self, work: Work, numbers: range) -> float:
        """As in :class:`Stopwatch`."""
        self._device.synchronize()
        self._before_ns, start = 0, time.perf_counter_ns()
        for number in numbers:
            work(number)
        self._device.synchronize()
        return (time.perf_counter_ns() - start - self._before_ns) / 1e3

    def _replayed(self, work: Work, calls: int) -> Sampler:
        """Samples of a graph of ``calls`` calls, which are warmed up before: compilation and creation are not captured."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            for number in range(calls):
                work(number)

        def sample() -> float:
            # A graph has the addresses of what its calls read, and `work` owns that memory.
            _ = work
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flushed.zero_()
            torch.cuda._sleep(QUEUE_CYCLES)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3 / calls

        sample()
        return sample


def scratch(device: Device, size: int) -> torch.Tensor:
    """So many bytes on a device, to be overwritten."""
    return torch.empty(size, dtype=torch.uint8, device=device.torch_device)


class _Repeated:
    """Samples with as many calls as a sample needs to be long enough.

    An uncounted sample precedes each sample of short calls: in a step the same code ran a layer ago, but between samples
    of other calls it gets cold.
    """

    def __init__(self, work: Work, elapsed_us: Callable[[Work, range], float], least_us: float) -> None:
        self._work, self._elapsed_us = work, elapsed_us
        self._next = 0
        self.calls, self._leads = 1, False
        warm_us = min(self() for _ in range(WARM_UPS))
        self.calls = max(1, min(MOST_CALLS, round(least_us / max(warm_us, 1e-3))))
        self._leads = warm_us < SHORT_US

    def __call__(self) -> float:
        if self._leads:
            self._work(self._take(1).start)
        return self._elapsed_us(self._work, self._take(self.calls)) / self.calls

    def _take(self, calls: int) -> range:
        """Numbers of the next ``calls`` calls."""
        numbers = range(self._next, self._next + calls)
        self._next = numbers.stop
        return numbers


def interleaved(
    samplers: Sequence[Sampler], rounds: int, seed: int, kinds: Sequence[tuple[str, float]] | None = None
) -> Iterator[tuple[int, float]]:
    """Index and sample of each sampler, ``rounds`` times, in a new random order each time.

    Args:
        kinds: Kind and size of each. Those of one kind follow each other, the largest first and equal ones in random order, so that
            they find the caches as calls like them leave them.
    """
    rng = np.random.default_rng(seed)
    groups: dict[str, list[int]] = {}
    known = kinds or [("", 0)] * len(samplers)
    for index, (kind, _) in enumerate(known):
        groups.setdefault(kind, []).append(index)
    parts = list(groups.values())
    for _ in range(rounds):
        for part in rng.permutation(len(parts)).tolist():
            drawn = rng.permutation(parts[part]).tolist()
            for index in sorted(drawn, key=lambda index: known[index][1], reverse=True):
                yield index, samplers[index]()


def timing(samples: Iterable[float], quantile: float) -> Timing:
    """Summary of the samples of one call."""
    found = np.asarray(list(samples))
    low, us, high = np.quantile(found, [0.25, quantile, 0.75])
    return Timing(float(us), float(high - low), len(found))


def _last_cache_bytes() -> int:
    """Size of the largest cache of the first core, from Linux."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    found = [int(size.read_text().strip().removesuffix("K")) << 10 for size in sizes]
    return max(found, default=USUAL_CACHE_BYTES)
