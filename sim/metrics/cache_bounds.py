"""How many blocks a run's own look-ups could have hit: in a cache without end, and in the best order of eviction.

*Fixed schedule*: the run's look-ups, its tables and its numbers of free blocks stay as they are, and only which contents the free
blocks keep is chosen anew. A name that tables have is found. Else it lies between two events,

    given back by its last table       the next look-up that asks for it
    |------------- kept in a free block, or not ------|

and a look-up hits it if it was kept all the time (``belady``). Between two events at most as many are kept as blocks are free. A span
whose name another table fills anew before the look-up is none. Who asks for a name takes it: until a table has it again it is not found.

Names that are in the same ranges of all events have the same spans. They are counted as one *segment*, whose events are sorted:

    look-up 7 asks for  |---------------------|
    it finds            |-------|
    a table fills               |--------|
    a table gives back  |----------------|
    segments            |   0   |   1    |  2 |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..memory.prefix.contents_log import LOOKED_UP, NAMED, RELEASED
from ..memory.prefix.host_copies import HostCopies
from ..runs.run import Run
from ..spec import gpu, model
from ..types.once import once
from ..types.optional import not_none
from ..types.sums import distinct
from ..types.ticks import PER_SECOND
from .belady import Spans, most_kept
from .cache_worth import CacheWorth, cache_worth
from .cached_names import CachedNames
from .prefix_cache import is_measured
from .tier_worth import tier_slot_ticks
from .time_to_live import shortest


@dataclass(frozen=True)
class CacheBounds:
    """Hits of the look-ups in the settings' window, in blocks.

    Attributes:
        asked: Blocks that the look-ups ask for.
        hits: The run's own.
        fixed_schedule: The most in any order of eviction, with the run's schedule.
        infinite: Those in a cache that evicts nothing, with the run's schedule.
        closing_blocks: The smallest pool, of this one and larger ones (``num_gpu_blocks``), with which ``fixed_schedule`` is ``infinite``;
            None where a hit takes blocks beside those that are counted.
    """

    asked: int
    hits: int
    fixed_schedule: int
    infinite: int
    closing_blocks: int | None


@once
def cache_bounds(run: Run) -> CacheBounds | None:
    """How many blocks other orders of eviction and larger pools could have hit; None where ``cache_worth`` is None.

    Of several KV groups, and with a drafter whose look-ups drop a block, the blocks are those of one group that keeps every token.
    ``fixed_schedule`` is then no less than the best order hits: the blocks of the other groups take no room. None without such a group.
    """
    worth, contents = cache_worth(run), run.replica.memory.contents_kept
    if worth is None or contents is None or not contents.has_bounds:
        return None
    names, could_hit = worth.names, contents.could_hit()
    counts, measured = np.diff(names.ranges), is_measured(run)
    asked = int((names.stop - names.first)[np.repeat(measured, counts)].sum())
    if could_hit is not None:
        names, asked = CachedNames(contents, could_hit), asked // contents.num_kv_groups
    looked_up = np.flatnonzero(names.events["kind"] == LOOKED_UP)
    looked_up = looked_up[measured[names.events["name"][looked_up]]]
    spans, held = _spans(_touches(names), np.isin(np.arange(len(names.events["kind"])), looked_up))
    kept = most_kept(names.events["free"], spans)
    return CacheBounds(
        asked=asked,
        hits=int(names.events["blocks"][looked_up].sum()),
        fixed_schedule=held + sum(kept.hits.values()),
        infinite=held + int(spans.blocks.sum()),
        closing_blocks=run.replica.num_blocks + kept.missing if could_hit is None else None,
    )


def cache_summary(run: Run) -> dict[str, Any] | None:
    """The worth of the cached slots in the settings' window, and the bounds, for the summary; None as ``cache_worth``.

    GB are 1e9 bytes on all GPUs of the replica.
    """
    worth = cache_worth(run)
    if worth is None:
        return None
    ticks, span = worth.slot_ticks(), run.window.end_ticks - run.window.start_ticks
    pool = run.log.capacity_slots * span
    found: dict[str, Any] = {**shares_of_pool(run, ticks, pool), **_bounds(run, worth, pool)}
    return found | worth_of_tiers([run])


def worth_of_tiers(runs: Sequence[Run]) -> dict[str, Any]:
    """The worth of the host's slots, and of each tier's behind it, over equal replicas; empty without a host, or where one logs no contents."""
    transfers, divided = runs[0].replica.memory.transfers, [tier_slot_ticks(run) for run in runs]
    if transfers is None or any(each is None for each in divided):
        return {}
    found, slots = {}, transfers.chunk_blocks * runs[0].replica.block_size
    for place, label in enumerate(("host", *transfers.labels)):
        if any(len(each or ()) <= place for each in divided):
            break
        ticks: Counter[str] = Counter()
        whole = 0
        for run, each in zip(runs, divided, strict=True):
            ticks.update(not_none(each)[place])
            span = run.window.end_ticks - run.window.start_ticks
            whole += _tier_blocks(not_none(run.replica.memory.transfers), place) * slots * span
        found[label] = shares_of_pool(runs[0], dict(ticks), whole)
    host = {"host": found.pop("host")}
    return host | ({"tiers": found} if transfers.behind else {})


def _tier_blocks(tier: HostCopies, place: int) -> int:
    """Blocks of the host, or of a tier behind it; one without end is taken to be as large as it grew."""
    if not place:
        return tier.cache.num_blocks
    store = tier.behind[place - 1].store
    return store.num_blocks or store.most_used_blocks


def shares_of_pool(run: Run, slot_ticks: dict[str, int], whole_slot_ticks: int) -> dict[str, dict[str, float]]:
    """Slots by worth over time, in three units.

    Args:
        run: Of a replica with these slots.
    """
    slot_gb = _slot_bytes(run) / 1e9
    return {
        "slot_seconds": {name: each / PER_SECOND for name, each in slot_ticks.items()},
        "gb_hours": {name: slot_gb * each / PER_SECOND / 3600 for name, each in slot_ticks.items()},
        "pool_pct": {
            name: 100 * each / whole_slot_ticks if whole_slot_ticks else 0.0 for name, each in slot_ticks.items()
        },
    }


def _bounds(run: Run, worth: CacheWorth, pool_slot_ticks: int) -> dict[str, Any]:
    bounds = cache_bounds(run)
    if bounds is None:
        return {}
    found: dict[str, Any] = {
        "asked_blocks": bounds.asked,
        "hit_blocks": bounds.hits,
        "fixed_schedule_hit_blocks": bounds.fixed_schedule,
        "infinite_hit_blocks": bounds.infinite,
    }
    if bounds.closing_blocks is None:
        # Nor does the loss of one block say how much of a hit is lost.
        return found
    kept = shortest(worth, bounds.asked)
    return found | {
        "closing_blocks": bounds.closing_blocks,
        "time_to_live": {
            "seconds": kept.ticks // PER_SECOND,
            "freed_pct": 100 * kept.freed_slot_ticks / pool_slot_ticks if pool_slot_ticks else 0.0,
            "lost_blocks": kept.lost_blocks,
        },
    }


def _slot_bytes(run: Run) -> float:
    """Bytes of a slot on all GPUs of a replica; of stages with fewer layers as of the one with most."""
    settings, page_bytes = run.settings, run.replica.page_bytes
    shape, card = model(settings.model), gpu(settings.gpu)
    dtype = settings.kind.kv_dtype(shape, card, settings.kv_cache_dtype)
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    if page_bytes:
        return ranks * page_bytes / run.replica.block_size
    on_a_rank = shape.slot_bytes(dtype, settings.tensor_parallel_size, settings.pipeline_parallel_size)
    # Ranks that divide the tokens have a share of them each.
    return ranks * on_a_rank / settings.given().get("decode_context_parallel_size", 1)


#: Touches of segments that are sorted at a time.
_SORTED = 1 << 20


class _Touches(NamedTuple):
    """What events do to ranges of names; int64 [touches], in the order of the events.

    Attributes:
        start, stop: Places.
        event: The event.
        tables: 1 where a table more has the names, -1 where one less, 0 of a look-up that misses them.
        asks: Whether it is a look-up; bool.
    """

    start: np.ndarray
    stop: np.ndarray
    event: np.ndarray
    tables: np.ndarray
    asks: np.ndarray


def _touches(names: CachedNames) -> _Touches:
    kind, name, blocks = (names.events[column] for column in ("kind", "name", "blocks"))
    looked_up, named = np.flatnonzero(kind == LOOKED_UP), np.flatnonzero((kind == NAMED) | (kind == RELEASED))
    # The ranges of each look-up, and what it finds of each.
    counts = np.diff(names.ranges)[name[looked_up]]
    before = np.cumsum(counts) - counts
    of_range = np.repeat(np.arange(len(counts)), counts)
    at = np.arange(len(of_range)) + (names.ranges[name[looked_up]] - before)[of_range]
    first, stop, event = names.first[at], names.stop[at], looked_up[of_range]
    deep = np.cumsum(stop - first) - (stop - first)
    found = first + np.clip(blocks[event] - (deep - deep[before[of_range]]), 0, stop - first)
    # Names that no later look-up asks for change nothing. Who asks for a place of a chain asks for those before it.
    place, next_look_up = names.place_of(name[named]), np.maximum.accumulate(np.where(kind == LOOKED_UP, name + 1, 0))
    asked = names.last(place) >= next_look_up[named]
    named, place = named[asked], place[asked]
    parts = (
        _Touches(first, found, event, np.ones_like(event), np.ones_like(event, dtype=bool)),
        _Touches(found, stop, event, np.zeros_like(event), np.ones_like(event, dtype=bool)),
        _Touches(
            place,
            place + blocks[named],
            named,
            np.where(kind[named] == NAMED, 1, -1),
            np.zeros_like(named, dtype=bool),
        ),
    )
    touches = _Touches(*map(np.concatenate, zip(*parts, strict=True)))
    some = np.flatnonzero(touches.start < touches.stop)
    some = some[np.argsort(touches.event[some], kind="stable")]
    return _Touches(*(column[some] for column in touches))


def _spans(touches: _Touches, measured: np.ndarray) -> tuple[Spans, int]:
    """Spans from an event to one that is ``measured`` (bool [events]), and blocks that these look-ups find in tables."""
    keys, blocks, held, most = [], [], 0, int(touches.event.max(initial=0)) + 1
    for segment, touch, length in _sorted_touches(touches):
        tables, event = touches.tables[touch], touches.event[touch]
        asks = touches.asks[touch] & measured[event]
        is_first = np.append(True, segment[1:] != segment[:-1])
        after = np.cumsum(tables)
        after -= (after - tables)[is_first][np.cumsum(is_first) - 1]
        held += int(length[asks & (after > tables)].sum())
        given_back = (tables < 0) & (after == 0)
        ends = 1 + np.flatnonzero(given_back[:-1] & asks[1:] & ~is_first[1:])
        keys.append(event[ends - 1] * most + event[ends])
        blocks.append(length[ends])
    found, which = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *keys]), return_inverse=True)
    counts = np.zeros(len(found), dtype=np.int64)
    np.add.at(counts, which, np.concatenate([np.zeros(0, dtype=np.int64), *blocks]))
    return Spans(found // most, found % most, counts), held


def _sorted_touches(touches: _Touches) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The touches of each segment in the order of time, and the names that they are of; some segments a yield, by rising number."""
    edges = distinct(np.concatenate([touches.start, touches.stop]))
    first, stop = np.searchsorted(edges, touches.start), np.searchsorted(edges, touches.stop)
    num_touches = np.cumsum(np.bincount(first, minlength=len(edges)) - np.bincount(stop, minlength=len(edges)))
    part = np.cumsum(num_touches) // _SORTED
    cuts = [*np.flatnonzero(np.diff(part, prepend=-1)).tolist(), len(edges)]
    for low, high in zip(cuts[:-1], cuts[1:], strict=True):
        since, until = np.clip(first, low, high), np.clip(stop, low, high)
        counts = until - since
        touch = np.repeat(np.arange(len(counts)), counts)
        segment = np.arange(len(touch)) - np.repeat(np.cumsum(counts) - counts - since, counts)
        order = np.argsort(segment, kind="stable")
        segment, touch = segment[order], touch[order]
        yield segment, touch, edges[segment + 1] - edges[segment]
