"""Routers: which replica a request goes to.

    round-robin                 the next one in turn
    least-outstanding-tokens    the one with the fewest tokens, of prompts and of outputs so far, in hand
    kv-aware                    the one with the most room: fewest slots taken, and wanted by waiting requests
    prefix-affine               the one that was sent the longest prefix, if enough of it and loads are even

How long outputs will be no router knows. What a replica holds it knows as of its last step boundary, as from the
replica's metrics, and what it has sent since. Between equals it takes the one with the lowest number.

The rule of ``prefix-affine`` is ``cache_aware`` of the SGLang and vLLM routers (gateway 0.3.1 and vLLM Router
0.1.15; these are its defaults). The router keeps a record of the prefixes that it sent to each replica, in blocks
by their hashes:

    if the busiest has more than 64 requests over the idlest, and more than 1.5 times as many: the idlest
    else if more than 30 % of the prompt is on record somewhere: where most of it is
    else: the one with the smallest record

and enters the prompt into the record of the one it takes. Here records are of blocks instead of letters, and of as
many as the replica's pool has, of which the least recently used go first; so in the end all records are of one size,
and of equals the one with the fewest requests is taken. What a replica still holds the router does not ask: whether
there is a hit the replica's own prefix cache decides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from .config import Cluster


class Seen(Protocol):
    """What a router sees of a replica; ``now`` is the time of the arrival."""

    @property
    def num_requests(self) -> int:
        """Requests in hand."""

    def outstanding_tokens(self, now: int) -> int:
        """Tokens of prompts and outputs so far of the requests in hand."""

    def kv_tokens(self, now: int) -> int:
        """Slots taken, and tokens that wait for theirs."""


class Router(Protocol):
    """Chooses.

    Attributes:
        looks: Whether it looks at the replicas; else all its choices are known beforehand.
    """

    looks: bool

    def choose(self, request: int, replicas: Sequence[Seen], now: int) -> int:
        """The place of the replica that a request (a row of the workload) goes to."""


class RoundRobin:
    """One after the other."""

    looks = False

    def __init__(self, count: int) -> None:
        self._count, self._next = count, 0

    def choose(self, request: int, replicas: Sequence[Seen], now: int) -> int:
        """See ``Router``."""
        place = self._next
        self._next = (place + 1) % self._count
        return place


class LeastOutstandingTokens:
    """The fewest tokens in hand."""

    looks = True

    def choose(self, request: int, replicas: Sequence[Seen], now: int) -> int:
        """See ``Router``."""
        tokens = [replica.outstanding_tokens(now) for replica in replicas]
        return tokens.index(min(tokens))


class KvAware:
    """The most room in the KV cache."""

    looks = True

    def choose(self, request: int, replicas: Sequence[Seen], now: int) -> int:
        """See ``Router``."""
        tokens = [replica.kv_tokens(now) for replica in replicas]
        return tokens.index(min(tokens))


class PrefixAffine:
    """Where the longest prefix was sent, while loads are even.

    Args:
        count: How many replicas.
        cluster: The thresholds.
        names_of: Names of the full blocks of a request's prompt: equal names, equal tokens from the first one on.
        most_blocks: Blocks on record of each replica at the most.
    """

    looks = True

    def __init__(self, count: int, cluster: Cluster, names_of: Callable[[int], list[int]], most_blocks: int) -> None:
        self._cluster, self._names_of, self._most_blocks = cluster, names_of, most_blocks
        self._records: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]

    def choose(self, request: int, replicas: Sequence[Seen], now: int) -> int:
        """See ``Router``."""
        names = self._names_of(request)
        place = self._choose(names, [replica.num_requests for replica in replicas])
        self._enter(names, self._records[place])
        return place

    def _choose(self, names: list[int], loads: list[int]) -> int:
        limits, least = self._cluster, min(loads)
        gap = max(loads) - least
        if gap > limits.balance_abs_threshold and max(loads) > least * limits.balance_rel_threshold:
            return loads.index(least)
        known = [_leading(names, record) for record in self._records]
        if max(known) > limits.cache_threshold * len(names):
            return min(range(len(loads)), key=lambda place: (-known[place], loads[place]))
        return min(range(len(loads)), key=lambda place: (len(self._records[place]), loads[place]))

    def _enter(self, names: list[int], record: OrderedDict[int, None]) -> None:
        # From the end on, so that the beginning of a prefix outlives what follows it.
        for name in reversed(names):
            record[name] = None
            record.move_to_end(name)
        while len(record) > self._most_blocks:
            record.popitem(last=False)


def _leading(names: list[int], record: OrderedDict[int, None]) -> int:
    """How many of the first names are on record."""
    for place, name in enumerate(names):
        if name not in record:
            return place
    return len(names)


def router(name: str, count: int, cluster: Cluster, names_of: Callable[[int], list[int]], most_blocks: int) -> Router:
    """A router by its name, for so many replicas; the rest is as for ``PrefixAffine``."""
    if name == "prefix-affine":
        return PrefixAffine(count, cluster, names_of, most_blocks)
    return _plain(name, count)


def decode_router(cluster: Cluster) -> Router:
    """The router of requests that have been prefilled."""
    return _plain(cluster.decode_router, cluster.size - cluster.num_arriving)


def _plain(name: str, count: int) -> Router:
    if name == "round-robin":
        return RoundRobin(count)
    looking: dict[str, Callable[[], Router]] = {"least-outstanding-tokens": LeastOutstandingTokens, "kv-aware": KvAware}
    return looking[name]()
