"""The worth of the cached slots of a fleet: that of its replicas together, and the copies that several of them cache.

    replica 0    |------ contents cached ------|
    replica 1              |------ contents cached ------|
    duplicates             |-------------------|            one copy beyond the first

A router that sends a request to the replica with its prefix saves these copies. Contents that a replica has only in tables are no
copies here, as requests use them.

Replicas number chains of blocks as they meet them; here a name is that of the chains of the whole workload.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ..memory.prefix.chains import PLACE_BITS, Chains, Paths
from ..metrics.cache_bounds import cache_summary, shares_of_pool, worth_of_tiers
from ..metrics.cache_worth import cache_worth
from ..output import frames as pd
from ..runs.cluster_run import ClusterRun
from ..runs.moments import ticks_of
from ..types.sums import total

#: Keys of the bounds of a replica that add up.
_BLOCKS = ("asked_blocks", "hit_blocks", "fixed_schedule_hit_blocks", "infinite_hit_blocks")


def cluster_cache_summary(run: ClusterRun) -> dict[str, Any] | None:
    """As ``cache_summary``, over all replicas, with ``duplicates``; None if the cached slots of one cannot be divided. Tiers are those of replicas
    that served requests.

    ``closing_blocks`` is the largest of a replica, each on its own schedule.
    """
    found = [cache_summary(part) for part in run.runs]
    parts = [part for part, each in zip(run.runs, found, strict=True) if each is not None]
    if not parts or any(
        each is None and part.window.slot_ticks["cached"] for each, part in zip(found, run.runs, strict=True)
    ):
        return None
    ticks: Counter[str] = Counter()
    for part in parts:
        worth = cache_worth(part)
        ticks.update({} if worth is None else worth.slot_ticks())
    first, pool = parts[0], sum(sum(part.window.slot_ticks.values()) for part in run.runs)
    together: dict[str, Any] = shares_of_pool(first, dict(ticks), pool)
    bounds = [each for each in found if each is not None and "asked_blocks" in each]
    if len(bounds) == len(parts):
        together |= {name: sum(each[name] for each in bounds) for name in _BLOCKS}
        if all("closing_blocks" in each for each in bounds):
            together["closing_blocks"] = max(each["closing_blocks"] for each in bounds)
    together |= worth_of_tiers([part for part in run.runs if len(part.workload)])
    copies = {"duplicates": duplicate_slot_ticks(run)}
    together["duplicates"] = {unit: found["duplicates"] for unit, found in shares_of_pool(first, copies, pool).items()}
    return together


def duplicate_slot_ticks(run: ClusterRun) -> int:
    """Cached slots of copies beyond the first of their contents on all replicas, integrated over the settings' window."""
    names, since, until = (np.concatenate(column) for column in zip(*_stays(run), strict=True))
    start, end = run.runs[0].window.start_ticks, max(part.window.end_ticks for part in run.runs)
    since, until = (np.clip(each, start, end) for each in (since, until))
    order = np.lexsort((since, names))
    names, since, until = names[order], since[order], until[order]
    before = pd.Series(until).groupby(names).cummax().to_numpy()
    same = np.append(False, names[1:] == names[:-1])
    # Up to the latest end so far of the same contents they are cached already.
    overlap = np.where(same, np.minimum(until, np.append(0, before[:-1])) - since, 0)
    return run.runs[0].replica.block_size * total(np.maximum(overlap, 0))


def _stays(run: ClusterRun) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of each replica the blocks that it cached: name in the whole workload, since when and until when, in ticks."""
    unit = run.runs[0].replica.memory.groups.hash_block_size(run.runs[0].replica.block_size)
    whole = Chains(run.workload.sequences.token_runs(), unit)
    found = []
    for number, part in enumerate(run.runs):
        worth, contents = cache_worth(part), part.replica.memory.contents_kept
        if worth is None or contents is None:
            continue
        stays, kept = worth.names.stays, worth.names.kept
        blocks = np.concatenate([stays["blocks"], kept["blocks"]])
        since = ticks_of(part.log, np.concatenate([stays["since"], kept["since"]]))
        until = np.concatenate([ticks_of(part.log, stays["until"]), np.full(len(kept["since"]), part.log.end_ticks)])
        before = np.cumsum(blocks) - blocks
        place = np.arange(int(blocks.sum())) - np.repeat(before, blocks)
        names = np.repeat(np.concatenate([stays["name"], kept["name"]]), blocks) + place
        requests = np.unique(contents.asked().requests)
        renamed = _Renamed(run.sequence_rows(number), contents.paths_of(requests), whole, contents.num_kv_groups)
        columns = renamed.names(names), np.repeat(since, blocks), np.repeat(until, blocks)
        known = columns[0] != 0
        found.append((columns[0][known], columns[1][known], columns[2][known]))
    return found


class _Renamed:
    """Names of one replica as those of the whole workload.

    Args:
        rows: Rows of the replica's sequences in the workload.
        paths: Paths of its requests.
        whole: Chains of the workload.
        num_kv_groups: Chains of hashes of each chain of blocks.
    """

    def __init__(self, rows: np.ndarray, paths: Paths, whole: Chains, num_kv_groups: int) -> None:
        self._kv_groups = num_kv_groups
        # Each range of places that a chain of the replica and one of the workload have in common: first name there and here.
        ours: list[int] = []
        theirs: list[int] = []
        stops: list[int] = []
        requests = np.repeat(paths.requests, np.diff(paths.offsets))
        starts = np.where(np.isin(np.arange(len(requests)), paths.offsets), 0, np.append(0, paths.stops[:-1]))
        # Of the requests with a chain one that has all of its blocks.
        order = np.lexsort((-paths.stops, paths.numbers))
        longest = order[np.append(True, np.diff(paths.numbers[order]) != 0)[: len(order)]]
        for chain, start, end, request in zip(
            *(column[longest].tolist() for column in (paths.numbers, starts, paths.stops, requests)), strict=True
        ):
            low = 0
            for other, stop in whole.path(int(rows[request])):
                if max(start, low) < min(end, stop):
                    ours.append((other.number << PLACE_BITS) + max(start, low))
                    theirs.append((chain << PLACE_BITS) + max(start, low))
                    stops.append((chain << PLACE_BITS) + min(end, stop))
                low = stop
        order = np.argsort(theirs)
        self._ours, self._theirs, self._stops = (
            np.array(column, dtype=np.int64)[order] for column in (ours, theirs, stops)
        )

    def names(self, names: np.ndarray) -> np.ndarray:
        """The names in the workload, by KV group; 0 of contents that no other request shares."""
        chain, group = np.divmod(names >> PLACE_BITS, self._kv_groups)
        plain = (chain << PLACE_BITS) + (names & ((1 << PLACE_BITS) - 1))
        at = np.searchsorted(self._theirs, plain, side="right") - 1
        known = (at >= 0) & (names > 0)
        known &= plain < self._stops[np.maximum(at, 0)] if len(self._stops) else False
        found = self._ours[at[known]] + plain[known] - self._theirs[at[known]]
        whole = np.zeros(len(names), dtype=np.int64)
        whole[known] = found * self._kv_groups + group[known]
        return whole
