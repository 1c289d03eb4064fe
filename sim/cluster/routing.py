"""Routers: they choose the replica of each request.

    round-robin                 the next replica in turn
    least-outstanding-tokens    the replica with the fewest tokens, prompts and outputs so far, of unfinished requests
    kv-aware                    the replica with the fewest KV slots in use or needed by waiting requests
    prefix-affine               the replica that received the longest prefix, if that is long enough and loads are even

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
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from .config import Cluster


class Seen(Protocol):
    """The state of a replica that a router reads; ``now`` is the time of the arrival."""

    @property
    def num_requests(self) -> int:
        """Number of unfinished requests."""

    def outstanding_tokens(self, now: int) -> int:
        """Tokens of prompts and outputs so far of unfinished requests."""

    def kv_tokens(self, now: int) -> int:
        """Slots in use, and tokens that need slots before waiting requests decode."""


class Router(Protocol):
    """Chooses the replica of each request.

    Attributes:
        looks: Whether it reads the state of the replicas; if not, all its choices are known in advance.
    """

    looks: bool

    def choose(self, request: int, replicas: Sequence[Seen], now: int, among: Sequence[int] | None = None) -> int:
        """The number of the replica for a request (a row of the workload).

        Args:
            among: Numbers of the replicas that take requests, rising; None if all do.
        """


class RoundRobin:
    """Replicas in turn."""

    looks = False

    def __init__(self, count: int) -> None:
        self._count, self._next = count, 0

    def choose(self, request: int, replicas: Sequence[Seen], now: int, among: Sequence[int] | None = None) -> int:
        """See ``Router``."""
        place = self._next % self._count
        if among is not None:
            place = among[bisect_left(among, place) % len(among)]
        self._next = place + 1
        return place


class LeastOutstandingTokens:
    """The replica with the fewest outstanding tokens."""

    looks = True

    def choose(self, request: int, replicas: Sequence[Seen], now: int, among: Sequence[int] | None = None) -> int:
        """See ``Router``."""
        numbers = range(len(replicas)) if among is None else among
        tokens = [replicas[number].outstanding_tokens(now) for number in numbers]
        return numbers[tokens.index(min(tokens))]


class KvAware:
    """The replica with the most room in its KV cache."""

    looks = True

    def choose(self, request: int, replicas: Sequence[Seen], now: int, among: Sequence[int] | None = None) -> int:
        """See ``Router``."""
        numbers = range(len(replicas)) if among is None else among
        tokens = [replicas[number].kv_tokens(now) for number in numbers]
        return numbers[tokens.index(min(tokens))]


class PrefixAffine:
    """The replica that received the longest prefix, while loads are even.

    Args:
        count: Number of replicas.
        cluster: The thresholds.
        names_of: Hashes of the full blocks of a request's prompt: equal hashes have equal tokens from the first on.
        most_blocks: Maximum number of blocks in the record of each replica.
    """

    looks = True

    def __init__(self, count: int, cluster: Cluster, names_of: Callable[[int], list[int]], most_blocks: int) -> None:
        self._cluster, self._names_of, self._most_blocks = cluster, names_of, most_blocks
        self._records: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]

    def choose(self, request: int, replicas: Sequence[Seen], now: int, among: Sequence[int] | None = None) -> int:
        """See ``Router``."""
        names = self._names_of(request)
        numbers = range(len(replicas)) if among is None else among
        place = self._choose(names, {number: replicas[number].num_requests for number in numbers})
        self._enter(names, self._records[place])
        return place

    def _choose(self, names: list[int], loads: dict[int, int]) -> int:
        limits, least, most = self._cluster, min(loads.values()), max(loads.values())
        if most - least > limits.balance_abs_threshold and most > least * limits.balance_rel_threshold:
            return min(loads, key=loads.__getitem__)
        known = {place: _leading(names, self._records[place]) for place in loads}
        if max(known.values()) > limits.cache_threshold * len(names):
            return min(loads, key=lambda place: (-known[place], loads[place]))
        return min(loads, key=lambda place: (len(self._records[place]), loads[place]))

    def _enter(self, names: list[int], record: OrderedDict[int, None]) -> None:
        # From the end on, so that the beginning of a prefix outlives what follows it.
        for name in reversed(names):
            record[name] = None
            record.move_to_end(name)
        while len(record) > self._most_blocks:
            record.popitem(last=False)


def _leading(names: list[int], record: OrderedDict[int, None]) -> int:
    """Number of leading hashes that are in the record."""
    for place, name in enumerate(names):
        if name not in record:
            return place
    return len(names)


def router(name: str, count: int, cluster: Cluster, names_of: Callable[[int], list[int]], most_blocks: int) -> Router:
    """A router by its name, for ``count`` replicas; other arguments are those of ``PrefixAffine``."""
    if name == "prefix-affine":
        return PrefixAffine(count, cluster, names_of, most_blocks)
    return _plain(name, count)


def decode_router(cluster: Cluster) -> Router:
    """The router of prefilled requests."""
    return _plain(cluster.decode_router, cluster.size - cluster.num_arriving)


def _plain(name: str, count: int) -> Router:
    if name == "round-robin":
        return RoundRobin(count)
    looking: dict[str, Callable[[], Router]] = {"least-outstanding-tokens": LeastOutstandingTokens, "kv-aware": KvAware}
    return looking[name]()
