"""Hits of a prefix cache that serves one request at a time, by capacity and policy, beside an independent simulator's.

A request looks up the longest cached prefix of its blocks, then the cache inserts all its blocks. A
block stands for itself and all blocks before it (a node of the trie of prefixes).

``fifo``      A queue of blocks; the block cached first is evicted first, even if later blocks extend it.
``lru``       Only leaves are evicted, so that every prefix of a cached prefix is cached: the leaf that
              no request has used for longest, except leaves of the current request.
``optimal``   As lru, but the leaf that no request will use for longest; if all leaves are used again
              before the new block, the new block is not cached (Belady with bypass).
``infinite``  Nothing is evicted.

lru and optimal are one cache that evicts the leaf of least worth, if it is worth less than the new
block. The worth is the index of the last request with the block, or minus the index of the next one.
There are no ties: the blocks of one request lie on one path, and a path has a single leaf.

Source: the rules of ``facts/prefix_cache.json``.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from heapq import heappop, heappush
from importlib import resources
from itertools import pairwise
from os import PathLike
from typing import Any

from ...reports.page.table import Table
from ...sim.memory.prefix import HashChain
from ...sim.output.files import as_json
from ...sim.output.folders import OutputFolder
from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from ...traces import HashedTrace, read_hashed
from ..paper.comparison import Payload
from ..paper.rows import Row, as_finding
from ..runs.output import Report, track
from .text import finding_lines

POLICIES = ("fifo", "lru", "optimal")
INFINITE = "infinite"


@dataclass(frozen=True)
class PrefixTrace:
    """The blocks of a trace as prefixes.

    Attributes:
        paths: The prefixes that end with each block of a request, shortest first, by request.
        parents: The prefix that is one block shorter, by prefix; 0 is the empty prefix.
        tokens: Tokens in the blocks of each request.
    """

    paths: list[list[int]]
    parents: list[int]
    tokens: list[list[int]]

    @property
    def num_prefixes(self) -> int:
        """Number of distinct prefixes, the most blocks that a cache can use."""
        return len(self.parents) - 1

    @cached_property
    def last_requests(self) -> list[list[int]]:
        """Worth under lru, by request and block: the index of the last request with the block, which is this request."""
        return [[request] * len(path) for request, path in enumerate(self.paths)]

    @cached_property
    def next_requests(self) -> list[list[int]]:
        """Worth under optimal, by request and block: minus the index of the next request with it, or minus the number
        of requests.
        """
        nearest = [len(self.paths)] * len(self.parents)
        found = []
        for request in reversed(range(len(self.paths))):
            path = self.paths[request]
            found.append([-nearest[prefix] for prefix in path])
            for prefix in path:
                nearest[prefix] = request
        return found[::-1]


def prefix_trace(hashed: HashedTrace) -> PrefixTrace:
    """The prefixes of ``hashed``: one for each chained id; ids that are not chained get one for each distinct predecessor."""
    chain = HashChain()
    spans = [slice(start, end) for start, end in pairwise(hashed.offsets.tolist())]
    ids, tokens = hashed.hash_ids.tolist(), hashed.block_tokens.tolist()
    paths = [chain.extend(ids[span]) for span in spans]
    return PrefixTrace(paths, chain.parents, [tokens[span] for span in spans])


def hit_tokens(trace: PrefixTrace, policy: str, capacity_blocks: int | None = None) -> list[int]:
    """Tokens that each request hits in a cache of ``capacity_blocks`` (at least 1; ignored for ``infinite``)."""
    cache, worths = _cache(trace, policy, capacity_blocks)
    served = map(cache.serve, trace.paths, worths)
    return [sum(tokens[:hits]) for tokens, hits in zip(trace.tokens, served, strict=True)]


def _cache(trace: PrefixTrace, policy: str, capacity_blocks: int | None) -> tuple[_Fifo | _Leaves, list[list[int]]]:
    if policy == INFINITE:
        return _Fifo(trace.num_prefixes), trace.last_requests
    if policy == "fifo":
        return _Fifo(not_none(capacity_blocks)), trace.last_requests
    worths = trace.last_requests if policy == "lru" else trace.next_requests
    return _Leaves(not_none(capacity_blocks), trace.parents), worths


class _Fifo:
    """A queue of prefixes."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._queue: OrderedDict[int, None] = OrderedDict()

    def serve(self, path: Sequence[int], worths: Sequence[int]) -> int:
        """Cache all prefixes of a request, and return the number of hits."""
        queue = self._queue
        hits = next((place for place, prefix in enumerate(path) if prefix not in queue), len(path))
        # A block that later blocks of the same request evict is inserted again.
        for prefix in path:
            if prefix not in queue:
                if len(queue) == self._capacity:
                    queue.popitem(last=False)
                queue[prefix] = None
        return hits


class _Leaves:
    """Cached prefixes; only those without cached children are evicted, the least worth first."""

    def __init__(self, capacity_blocks: int, parents: Sequence[int]) -> None:
        self._room = capacity_blocks
        self._parents = parents
        self._cached = bytearray(len(parents))
        self._children = [0] * len(parents)
        self._worths = [0] * len(parents)
        # A heap of (worth, prefix). Entries that are out of date are skipped.
        self._leaves: list[tuple[int, int]] = []

    def serve(self, path: Sequence[int], worths: Sequence[int]) -> int:
        """Cache those prefixes of a request that are worth more than the leaves that they replace; return the number of
        hits.
        """
        cached, kept_worths, children = self._cached, self._worths, self._children
        hits, end = 0, HashChain.EMPTY
        for prefix, worth in zip(path, worths, strict=True):
            if cached[prefix]:
                hits += 1
            elif self._room or self._evict(worth):
                self._room -= 1
                cached[prefix] = True
                children[end] += 1
            else:
                break
            # No block evicts one of its own path, which is worth as much or more; only the heap entry is out of date.
            kept_worths[prefix] = worth
            end = prefix
        self._offer(end)
        return hits

    def _evict(self, worth: int) -> bool:
        """Make room for a block of ``worth``; False where no leaf is worth less."""
        leaves, children = self._leaves, self._children
        while leaves and leaves[0][0] < worth:
            known_worth, leaf = heappop(leaves)
            if self._cached[leaf] and not children[leaf] and known_worth == self._worths[leaf]:
                self._cached[leaf] = False
                self._room += 1
                parent = self._parents[leaf]
                children[parent] -= 1
                self._offer(parent)
                return True
        return False

    def _offer(self, prefix: int) -> None:
        if prefix != HashChain.EMPTY and not self._children[prefix]:
            heappush(self._leaves, (self._worths[prefix], prefix))


FIGURE = "prefix-cache"
#: Capacities for a trace that the oracle does not have.
CAPACITY_BLOCKS = (100, 300, 1_000, 3_000, 10_000, 30_000, 50_000, 100_000)
_MEASURED, _ALL = "hit_tokens", "all_requests_hit_tokens"


@cache
def oracle() -> Mapping[str, Any]:
    """The whole of ``facts/prefix_cache.json``."""
    return json.loads(resources.files(__package__).joinpath("facts/prefix_cache.json").read_text("utf-8"))


def reproduce_prefix_cache(
    path: str | PathLike[str] | None, seeds: int | None, report: Report, folder: OutputFolder | None
) -> None:
    """Replay a trace's block hashes under every policy, report the hits, and write the document into the folder.

    Raises:
        UserError: No trace is given, or one without block hashes; seeds are given; the folder cannot be written.
    """
    if path is None:
        raise SettingError("trace", None, f"{FIGURE} replays block hashes; give a trace in JSON lines with hash_ids")
    if seeds is not None:
        raise SettingError("seeds", seeds, f"{FIGURE} replays a trace as it is; leave the seeds out")
    payload = compare_prefix_caches(read_hashed(path))
    print_prefix_caches(payload, report)
    if folder is not None:
        folder.write(f"{FIGURE}.json", as_json(payload))
    report.data(payload)


def compare_prefix_caches(hashed: HashedTrace) -> Payload:
    """The hits of every policy at every capacity, beside the oracle's if it has the trace."""
    trace = prefix_trace(hashed)
    counts = fingerprint(hashed, trace)
    name = recognised(counts)
    rows = list(_rows(trace, {} if name is None else oracle()["traces"][name]))
    return {
        "figure": FIGURE,
        "workload": (
            f"{hashed.trace.name}: {counts['requests']:,} requests, {counts['blocks']:,} blocks,"
            f" {counts['tokens']:,} tokens"
        ),
        "recognised": name,
        "fingerprint": counts,
        "rows": rows,
        "findings": _findings(rows),
        "basis": list(_basis(name)),
        "remarks": list(_remarks(name, rows)),
        "semantics": oracle()["semantics"],
    }


def fingerprint(hashed: HashedTrace, trace: PrefixTrace) -> dict[str, int]:
    """The counts that identify a trace, independent of its file name."""
    return {
        "requests": len(hashed),
        "blocks": len(hashed.hash_ids),
        "block_ids": len(set(hashed.hash_ids.tolist())),
        "prefixes": trace.num_prefixes,
        "tokens": int(hashed.block_tokens.sum()),
    }


def recognised(counts: Mapping[str, int]) -> str | None:
    """The oracle's name of the trace with these counts, or None."""
    return next((name for name, facts in oracle()["traces"].items() if facts["fingerprint"] == counts), None)


def _rows(trace: PrefixTrace, facts: Mapping[str, Any]) -> Iterator[Row]:
    totals = {_ALL: sum(map(sum, trace.tokens)), _MEASURED: sum(map(sum, _last_half(trace.tokens)))}
    capacities = facts.get("capacity_blocks", CAPACITY_BLOCKS)
    published = {policy: facts.get(policy, [None] * len(capacities)) for policy in POLICIES}
    runs = [(policy, *at) for policy in POLICIES for at in zip(capacities, published[policy], strict=True)]
    for policy, capacity, value in track(runs, FIGURE, len(runs)):
        yield _row(policy, _MEASURED, capacity, value, hit_tokens(trace, policy, capacity), totals)
    hits = hit_tokens(trace, INFINITE)
    for metric in (_MEASURED, _ALL):
        yield _row(INFINITE, metric, None, facts.get(INFINITE, {}).get(metric), hits, totals)


def _last_half(by_request: list[Any]) -> list[Any]:
    return by_request[len(by_request) // 2 :]


def _row(
    policy: str, metric: str, capacity: int | None, published: int | None, hits: list[int], totals: dict[str, int]
) -> Row:
    """One value beside the oracle's, in design.md's form, with its share of the requested tokens."""
    simulated = sum(hits if metric == _ALL else _last_half(hits))
    return {
        "series": policy,
        "metric": metric,
        "x": capacity,
        "published": published,
        "how": None if published is None else "oracle",
        "simulated": simulated,
        "error": None if published is None else simulated - published,
        "kind": "predicted",
        "hit_rate_pct": round(100 * simulated / totals[metric], 3) if totals[metric] else 0.0,
    }


def _findings(rows: list[Row]) -> list[dict[str, Any]]:
    errors = [row["error"] for row in rows if row["error"] is not None]
    if not errors:
        return []
    text = f"{errors.count(0)} of {len(errors)} values equal the oracle's, to the token."
    return [as_finding(text, not any(errors))]


def _basis(name: str | None) -> Iterator[str]:
    if name is None:
        known = ", ".join(oracle()["traces"])
        yield f"Not recognised: the oracle was run on {known} (known by their counts), so there is nothing to compare."
    else:
        facts = oracle()["traces"][name]
        yield f"Recognised by its counts: {name} ({facts['origin']}; {facts['licence']}). Blocks: {facts['blocks']}."
    yield f"Oracle: {oracle()['source']}. Licence: {oracle()['licence']}."


def _remarks(name: str | None, rows: list[Row]) -> Iterator[str]:
    yield "Requests are served one at a time; hits count over the last half of them, where not said otherwise."
    if name is not None and any(row["published"] is None for row in rows):
        yield "The oracle gives no value where a cache is not full when that half begins."


def print_prefix_caches(payload: Payload, report: Report) -> None:
    """Print the table, whether all values are equal, and the basis."""
    report.print_line(f"{FIGURE}: tokens hit in a cache of so many blocks, the oracle's and ours", style="bold")
    report.print_line(payload["workload"])
    report.console.print(_table(payload["rows"]))
    report.print_line()
    for text in [*finding_lines(payload), *payload["basis"], *payload["remarks"]]:
        report.print_line(text)


def _table(rows: list[Row]) -> Table:
    table = Table("policy", "blocks", "oracle", "ours", "difference", "hit rate")
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        last = following is not None and following["series"] != row["series"]
        table.add_row(f"{row['series']}{', all' * (row['metric'] == _ALL)}", *_cells(row), ends_group=last)
    return table


def _cells(row: Row) -> Iterator[str]:
    yield "-" if row["x"] is None else f"{row['x']:,}"
    yield "-" if row["published"] is None else f"{row['published']:,}"
    yield f"{row['simulated']:,}"
    yield "-" if row["error"] is None else f"{row['error']:+,}" if row["error"] else "0"
    yield f"{row['hit_rate_pct']:.1f} %"
