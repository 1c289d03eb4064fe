"""Hits of a prefix cache that serves one request at a time, by capacity and policy, beside an independent simulator's.

A request looks up the longest cached prefix of its blocks, then the cache inserts all its blocks. A
block stands for itself and all blocks before it (a node of the trie of prefixes).

``fifo``      A queue of blocks; the block cached first is evicted first, even if later blocks extend it.
``lru``       Only leaves are evicted, so that every prefix of a cached prefix is cached: the leaf that
              no request has used for longest, except leaves of the current request.
``optimal``   The most hits of any order of eviction (Belady with bypass): what no request uses before
              others is not cached. ``sim.metrics.belady`` chooses; along a chain the end goes first.
``infinite``  Nothing is evicted.

lru has no ties: the blocks of one request lie on one path, and a path has a single leaf.

Source: the rules of ``prefix_cache.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from heapq import heappop, heappush
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fragmeter.experiments.paper.comparison import Payload
from fragmeter.experiments.paper.rows import Row, as_finding
from fragmeter.experiments.reproduce.text import finding_lines
from fragmeter.experiments.runs.output import Report, track
from fragmeter.reports.page.table import Table
from fragmeter.sim.memory.prefix import HashChain
from fragmeter.sim.metrics.belady import Spans, most_kept
from fragmeter.sim.types.errors import TraceError, UserError
from fragmeter.sim.types.optional import not_none
from fragmeter.traces import Reading, Trace, read_with_content
from fragmeter.traces.types.pairs import frozen_column

POLICIES = ("fifo", "lru", "optimal")
INFINITE = "infinite"


@dataclass(frozen=True, slots=True, eq=False)
class HashedTrace:
    """A trace and the blocks of its prompts, concatenated over requests; int64, read-only.

    Attributes:
        trace: Arrivals and lengths.
        offsets: [n + 1]; request i has the blocks from ``offsets[i]`` up to ``offsets[i + 1]``.
        hash_ids: [blocks].
        block_tokens: [blocks], at least 1. The sum over a request equals its prompt length, or is at most
            that if the file states the sizes.
    """

    trace: Trace
    offsets: np.ndarray
    hash_ids: np.ndarray
    block_tokens: np.ndarray

    def __post_init__(self) -> None:
        for name in ("offsets", "hash_ids", "block_tokens"):
            object.__setattr__(self, name, frozen_column(getattr(self, name)))

    def __len__(self) -> int:
        return len(self.trace)


def read_hashed(path: str | PathLike[str], block_size: int | None = None) -> HashedTrace:
    """The trace in ``path`` with its blocks.

    Args:
        path: A file with ``hash_ids``.
        block_size: Tokens of a full block, for files without ``block_tokens``; None infers them.

    Raises:
        TraceError: As ``read``; or the file has no blocks, or blocks that do not fit their prompt.
    """
    trace = read_with_content(path, Reading(timed_trace_chunk_hash_size=block_size))
    if trace.content is None or not len(trace.content.ids):
        raise TraceError(path, None, None, None, "has no hash_ids; give JSON lines with a list of block ids a request")
    return HashedTrace(trace, trace.content.offsets, trace.content.ids, trace.content.tokens)


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
    def spans(self) -> Spans:
        """Blocks of each request that a later one uses again, by the two."""
        last = [-1] * len(self.parents)
        found = Counter[tuple[int, int]]()
        for request, path in enumerate(self.paths):
            found.update((last[prefix], request) for prefix in path if last[prefix] >= 0)
            for prefix in path:
                last[prefix] = request
        start, end = np.array([*found], dtype=np.int64).reshape(-1, 2).T
        return Spans(start, end, np.array([*found.values()], dtype=np.int64))


def prefix_trace(hashed: HashedTrace) -> PrefixTrace:
    """The prefixes of ``hashed``: one for each chained id; ids that are not chained get one for each distinct predecessor."""
    chain = HashChain()
    spans = [slice(start, end) for start, end in pairwise(hashed.offsets.tolist())]
    ids, tokens = hashed.hash_ids.tolist(), hashed.block_tokens.tolist()
    paths = [chain.extend(ids[span]) for span in spans]
    return PrefixTrace(paths, chain.parents, [tokens[span] for span in spans])


def hit_tokens(trace: PrefixTrace, policy: str, capacity_blocks: int | None = None) -> list[int]:
    """Tokens that each request hits in a cache of ``capacity_blocks`` (at least 1; ignored for ``infinite``)."""
    hits = _hits(trace, policy, trace.num_prefixes if policy == INFINITE else not_none(capacity_blocks))
    return [sum(tokens[:blocks]) for tokens, blocks in zip(trace.tokens, hits, strict=True)]


def _hits(trace: PrefixTrace, policy: str, capacity_blocks: int) -> list[int]:
    """Blocks that each request hits."""
    if policy == "optimal":
        hits = most_kept(np.full(len(trace.paths), capacity_blocks), trace.spans).hits
        return [hits.get(request, 0) for request in range(len(trace.paths))]
    cache = _Leaves(capacity_blocks, trace.parents) if policy == "lru" else _Fifo(capacity_blocks)
    return [*map(cache.serve, trace.paths)]


class _Fifo:
    """A queue of prefixes."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._queue: OrderedDict[int, None] = OrderedDict()

    def serve(self, path: Sequence[int]) -> int:
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
    """Cached prefixes; only those without cached children are evicted, first the one that no request has used for longest."""

    def __init__(self, capacity_blocks: int, parents: Sequence[int]) -> None:
        self._room = capacity_blocks
        self._parents = parents
        self._cached = bytearray(len(parents))
        self._children = [0] * len(parents)
        self._used = [0] * len(parents)
        self._request = 0
        # A heap of (last request, prefix). Entries that are out of date are skipped.
        self._leaves: list[tuple[int, int]] = []

    def serve(self, path: Sequence[int]) -> int:
        """Cache the prefixes of a request for which there is room beside its own; return the number of hits."""
        cached, children = self._cached, self._children
        hits, end = 0, HashChain.EMPTY
        self._request += 1
        for prefix in path:
            if cached[prefix]:
                hits += 1
            elif self._room or self._evict():
                self._room -= 1
                cached[prefix] = True
                children[end] += 1
            else:
                break
            self._used[prefix] = self._request
            end = prefix
        self._offer(end)
        return hits

    def _evict(self) -> bool:
        """Make room for a block; False where all leaves are of the current request."""
        leaves, children = self._leaves, self._children
        while leaves and leaves[0][0] < self._request:
            used, leaf = heappop(leaves)
            if self._cached[leaf] and not children[leaf] and used == self._used[leaf]:
                self._cached[leaf] = False
                self._room += 1
                parent = self._parents[leaf]
                children[parent] -= 1
                self._offer(parent)
                return True
        return False

    def _offer(self, prefix: int) -> None:
        if prefix != HashChain.EMPTY and not self._children[prefix]:
            heappush(self._leaves, (self._used[prefix], prefix))


FIGURE = "prefix-cache"
#: Capacities for a trace that the oracle does not have.
CAPACITY_BLOCKS = (100, 300, 1_000, 3_000, 10_000, 30_000, 50_000, 100_000)
_MEASURED, _ALL = "hit_tokens", "all_requests_hit_tokens"


@cache
def oracle() -> Mapping[str, Any]:
    """The whole of ``prefix_cache.json``."""
    return json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 2 for an error."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.prefix_cache", description="Hits by capacity and policy, beside the oracle's."
    )
    parser.add_argument("trace", type=Path, help="JSON lines with hash_ids")
    parser.add_argument("--json", help="file for the rows")
    chosen = parser.parse_args(arguments)
    try:
        report = Report(chosen.json)
        payload = compare_prefix_caches(read_hashed(chosen.trace))
        print_prefix_caches(payload, report)
        report.data(payload)
    except UserError as error:
        print(f"tools.prefix_cache: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
