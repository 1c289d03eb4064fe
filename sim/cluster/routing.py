"""Routers: they choose the replica of each request.

    round-robin                 the next replica in turn
    least-outstanding-tokens    the replica with the fewest tokens, prompts and outputs so far, of unfinished requests
    kv-aware                    the replica with the fewest KV slots in use or needed by waiting requests
    prefix-affine               the replica that received the longest prefix, if that is long enough and loads are even
    vllm-dp                     the engine with the fewest requests, as vLLM's client knows it (``--data-parallel-size``)

No router knows the length of an output. It knows the state of a replica at the last step boundary, as from the
replica's metrics, and the requests that it has sent since. Ties go to the replica with the lowest number. In a fleet
of changing size (``schedule``) it chooses among the replicas that have started and do not drain.

The rule of ``prefix-affine`` is ``cache_aware`` of the SGLang and vLLM routers (gateway 0.3.1 and vLLM Router
0.1.15; the defaults are theirs). The router keeps a record of the prefixes that it sent to each replica, as hashes of
blocks:

    if the busiest replica has over 64 requests more than the least busy one, and over 1.5 times as many: the least busy
    else if a record has more than 30 % of the prompt: the replica with the longest match
    else: the replica with the smallest record

and adds the prompt to the record of the chosen replica. The real routers record letters; here a record has blocks, at
most as many as the replica's pool, and the least recently used are removed first. Full records therefore have the same
size, and ties go to the replica with the fewest requests. The router does not know which blocks a replica still
caches: the replica's own prefix cache decides the hits.

``vllm-dp`` is ``DPLBAsyncMPClient.get_core_engine_for_request`` of vLLM 0.33.0 (``vllm/v1/engine/core_client.py``), with one API server:

    load = max(unfinished requests sent there, waiting + running), both as last published by the coordinator (``coordinator``)
         + waiting * 6 * (usage of the KV cache - 0.5), if that is positive

The client adds each request that it sends to the published ``waiting``, until the next publication. It begins its look one engine further
at each request, and takes the first with the lowest load.

A fleet of a thousand replicas gets a request every millisecond, so no router reads all of them for each: replicas report what
changes (``Seen.report_to``), and a choice reads those that did.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf
from typing import Protocol

import numpy as np

from ..config.cluster import Cluster
from .coordinator import Coordinator, Counts


class Seen(Protocol):
    """The state of a replica that a router reads; ``now`` is the time of the arrival.

    Attributes:
        kv_rises: Whether ``kv_tokens`` only rises between two reports.
    """

    @property
    def kv_rises(self) -> bool: ...

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests; constant between two reports."""

    def outstanding_tokens(self, now: int) -> int:
        """Tokens of prompts and outputs so far of unfinished requests; only rises between two reports."""

    def kv_tokens(self, now: int) -> int:
        """Slots in use, and tokens that need slots before waiting requests decode."""

    def report(self) -> tuple[int, int | None, Counts] | None:
        """The time, the end of the step in progress (None where one begins) and what the replica reports then; None while it rests."""

    def report_to(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever requests come or go, or steps begin."""


class Router(Protocol):
    """Chooses the replica of each request.

    Attributes:
        looks: Whether it reads the state of the replicas; if not, all its choices are known in advance.
        follows: Whether it must hear of every step as it begins.
    """

    looks: bool
    follows: bool

    def watch(self, replicas: Sequence[Seen]) -> None:
        """Choose among these from now on."""

    def choose(self, request: int, now: int, among: Sequence[int] | None = None) -> int:
        """Choose the replica of a request.

        Args:
            request: Row of the workload.
            now: Ticks.
            among: Numbers of the replicas that take requests, rising; None if all do.

        Returns:
            The number of the replica.
        """


class RoundRobin:
    """Sends each request to the next replica in order of their numbers, whatever their load."""

    looks = follows = False

    def __init__(self, count: int) -> None:
        self._count, self._next = count, 0

    def watch(self, replicas: Sequence[Seen]) -> None:
        """See ``Router``."""

    def choose(self, request: int, now: int, among: Sequence[int] | None = None) -> int:
        """See ``Router``."""
        place = self._next % self._count
        if among is not None:
            place = among[bisect_left(among, place) % len(among)]
        self._next = place + 1
        return place


class Lowest:
    """The replica with the lowest value.

    Args:
        value: Value of a replica, at a time.
        rises: Whether a replica's value only rises between two reports; else every choice reads all replicas.

    1. Between two reports of a replica its value only rises, so the last value read is a lower bound of the present one.
    2. A heap has the bounds, with the numbers of the replicas. A choice first reads the replicas that reported.
    3. It then reads the replica at the top, until the top has a value of now. No other value is lower, and of equals
       none has a lower number.
    """

    looks, follows = True, False

    def __init__(self, value: Callable[[Seen, int], int], rises: Callable[[Seen], bool]) -> None:
        self._value, self._rises = value, rises
        self._replicas: Sequence[Seen] = ()
        self._among: Sequence[int] | None = None
        self._changed: set[int] = set()
        # The last value read of each replica; None if it takes no requests. Entries of the heap with another one are old.
        self._bounds: list[int | None] = []
        self._heap: list[tuple[int, int]] = []

    def watch(self, replicas: Sequence[Seen]) -> None:
        """See ``Router``."""
        self._replicas, self._changed = replicas, set()
        for number, replica in enumerate(replicas):
            replica.report_to(partial(self._changed.add, number))
        self._take(None)

    def choose(self, request: int, now: int, among: Sequence[int] | None = None) -> int:
        """See ``Router``."""
        if among is not self._among:
            self._take(among)
        bounds, heap = self._bounds, self._heap
        # Sequences may give blocks back as they decode, under all replicas or none.
        for number in self._changed if self._rises(self._replicas[0]) else range(len(bounds)):
            if bounds[number] is not None:
                self._read(number, now)
        self._changed.clear()
        while True:
            bound, number = heap[0]
            if bound != bounds[number]:
                heappop(heap)
            elif self._read(number, now) == bound:
                return number

    def _take(self, among: Sequence[int] | None) -> None:
        """Choose among these from now on. Each value is more than -1."""
        self._among, count = among, len(self._replicas)
        takes = set(range(count) if among is None else among)
        self._bounds = [-1 if number in takes else None for number in range(count)]
        self._heap = [(-1, number) for number in sorted(takes)]

    def _read(self, number: int, now: int) -> int:
        value = self._value(self._replicas[number], now)
        if value != self._bounds[number]:
            self._bounds[number] = value
            heappush(self._heap, (value, number))
            if len(self._heap) > 4 * len(self._replicas):
                self._heap[:] = [(bound, place) for place, bound in enumerate(self._bounds) if bound is not None]
                heapify(self._heap)
        return value


class PrefixAffine:
    """The replica that received the longest prefix, while loads are even.

    Args:
        count: Number of replicas.
        cluster: The thresholds.
        names_of: Hashes of the full blocks of a request's prompt: equal hashes have equal tokens from the first on.
        most_blocks: Maximum number of blocks in the record of each replica.
    """

    looks, follows = True, False

    def __init__(self, count: int, cluster: Cluster, names_of: Callable[[int], list[int]], most_blocks: int) -> None:
        self._cluster, self._names_of, self._most_blocks = cluster, names_of, most_blocks
        self._records: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]
        # The replicas with a name on record. Those that have a name have all names before it in its prompt, too, as these
        # were used no less recently.
        self._holders: dict[int, set[int]] = {}
        self._sizes, self._loads = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        self._replicas: Sequence[Seen] = ()
        self._changed: set[int] = set()

    def watch(self, replicas: Sequence[Seen]) -> None:
        """See ``Router``."""
        self._replicas, self._changed = replicas, {*range(len(replicas))}
        for number, replica in enumerate(replicas):
            replica.report_to(partial(self._changed.add, number))

    def choose(self, request: int, now: int, among: Sequence[int] | None = None) -> int:
        """See ``Router``."""
        names = self._names_of(request)
        for number in self._changed:
            self._loads[number] = self._replicas[number].num_requests
        self._changed.clear()
        place = self._choose(names, np.arange(len(self._replicas)) if among is None else np.array(among))
        self._enter(names, place)
        return place

    def _choose(self, names: list[int], numbers: np.ndarray) -> int:
        limits, loads = self._cluster, self._loads[numbers]
        least, most = int(loads.min()), int(loads.max())
        if most - least > limits.balance_abs_threshold and most > least * limits.balance_rel_threshold:
            return int(numbers[loads.argmin()])
        known, holders = self._longest_match(names, numbers)
        if known > limits.cache_threshold * len(names):
            able = np.sort(np.fromiter(holders, np.int64, len(holders)))
        else:
            sizes = self._sizes[numbers]
            able = numbers[sizes == sizes.min()]
        return int(able[self._loads[able].argmin()])

    def _longest_match(self, names: list[int], numbers: np.ndarray) -> tuple[int, set[int]]:
        """Number of leading names that a record has at most, and the replicas with such records."""
        taking = None if len(numbers) == len(self._replicas) else {*numbers.tolist()}
        known, holders = 0, set[int]()
        for place, name in enumerate(names, 1):
            found = self._holders.get(name)
            if found and taking is not None:
                found = found & taking
            if not found:
                break
            known, holders = place, found
        return known, holders

    def _enter(self, names: list[int], place: int) -> None:
        record, holders = self._records[place], self._holders
        # From the end on, so that the beginning of a prefix outlives what follows it.
        for name in reversed(names):
            if name not in record:
                holders.setdefault(name, set()).add(place)
            record[name] = None
            record.move_to_end(name)
        while len(record) > self._most_blocks:
            name, _ = record.popitem(last=False)
            holders[name].discard(place)
            if not holders[name]:
                del holders[name]
        self._sizes[place] = len(record)


class VllmDataParallel:
    """vLLM's own router of data-parallel engines: to the engine with the fewest requests, by the counts that its client has.

    Args:
        count: Number of engines.
        lock_step: Whether they share experts.
    """

    looks = follows = True

    def __init__(self, count: int, lock_step: bool) -> None:
        self._coordinator, self._start = Coordinator(count, lock_step), 0
        self._replicas: Sequence[Seen] = ()
        self._known = [[0, 0.0, 0.0] for _ in range(count)]
        # What engines will report at the end of the step in which requests came to them: by engine, its tick and its counts.
        self._coming: dict[int, tuple[int, Counts]] = {}

    def watch(self, replicas: Sequence[Seen]) -> None:
        """See ``Router``."""
        self._replicas = replicas
        for number, replica in enumerate(replicas):
            replica.report_to(partial(self._hear, number))

    def choose(self, request: int, now: int, among: Sequence[int] | None = None) -> int:
        """See ``Router``."""
        self._report_before(now)
        if (news := self._coordinator.news(now)) is not None:
            self._known = [[*counts] for counts in news]
        count, place, least = len(self._replicas), 0, inf
        for number in ((self._start + step) % count for step in range(count)):
            if among is None or number in among:
                load = self._load(number)
                if load < least:
                    place, least = number, load
        self._known[place][0] += 1
        self._start = (self._start + 1) % count
        return place

    def _load(self, number: int) -> float:
        waiting, running, usage = self._known[number]
        # In vLLM's order: sums of floats depend on it.
        return max(self._replicas[number].num_requests, waiting + running) + waiting * 6.0 * max(0.0, usage - 0.5)

    def _hear(self, number: int) -> None:
        if (found := self._replicas[number].report()) is None:
            return
        now, until, counts = found
        self._report_before(now)
        self._coming.pop(number, None)
        if until is None:
            self._coordinator.report(number, now, counts)
        else:
            self._coming[number] = until, counts

    def _report_before(self, now: int) -> None:
        """Report what is due before a tick, in the order of time."""
        if self._coming:
            for until, number in sorted((until, number) for number, (until, _) in self._coming.items() if until < now):
                self._coordinator.report(number, until, self._coming.pop(number)[1])


def router(
    name: str,
    count: int,
    cluster: Cluster,
    names_of: Callable[[int], list[int]],
    most_blocks: int,
    lock_step: bool = False,
) -> Router:
    """A router by its name, for ``count`` replicas; other arguments are those of ``PrefixAffine`` and ``VllmDataParallel``."""
    if name == "prefix-affine":
        return PrefixAffine(count, cluster, names_of, most_blocks)
    return _plain(name, count, lock_step)


def decode_router(cluster: Cluster, lock_step: bool) -> Router:
    """The router of prefilled requests."""
    return _plain(cluster.decode_router, cluster.size - cluster.num_arriving, lock_step)


def _plain(name: str, count: int, lock_step: bool) -> Router:
    if name == "round-robin":
        return RoundRobin(count)
    if name == "vllm-dp":
        return VllmDataParallel(count, lock_step)
    if name == "kv-aware":
        return Lowest(lambda replica, now: replica.kv_tokens(now), lambda replica: replica.kv_rises)
    return Lowest(lambda replica, now: replica.outstanding_tokens(now), lambda replica: True)
