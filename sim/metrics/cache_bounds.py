"""How many blocks a run's own look-ups could have hit: in a cache without end, and in the best order of eviction.

*Fixed schedule*: the run's look-ups, its tables and its numbers of free blocks stay as they are, and only which contents the free
blocks keep is chosen anew. A name that tables have is found. Else it lies between two events,

    given back by its last table       the next look-up that asks for it
    |------------- kept in a free block, or not ------|

and a look-up hits it if it was kept all the time. Between two events at most as many are kept as blocks are free. Each such span is
one hit, so the best choice drops, whenever there are too many, the one with the last end (Belady's MIN; for intervals of weight 1 and
a capacity that varies it is optimal). Spans of one table that end with the same look-up are alike: they are counted, and which of
them go is left open; the deeper ones, so that chains go from the leaf. A span whose name another table fills anew before the look-up
is none. Who asks for a name takes it: until a table has it again it is not found.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np

from ..config.settings import Settings
from ..memory.prefix.contents_log import LOOKED_UP, NAMED, RELEASED
from ..runs.run import Run
from ..spec import gpu, model
from ..spec.startup.launch import resolved_kv_dtype
from ..types.once import once
from ..types.ticks import PER_SECOND
from .cache_worth import cache_worth
from .cached_names import CachedNames


@dataclass(frozen=True)
class CacheBounds:
    """Hits of the look-ups of a run, in blocks.

    Attributes:
        asked: Blocks that the look-ups ask for.
        hits: The run's own.
        fixed_schedule: The most in any order of eviction, with the run's schedule.
        infinite: Those in a cache that evicts nothing, with the run's schedule.
        closing_blocks: The smallest pool, of this one and larger ones (``num_gpu_blocks``), with which ``fixed_schedule`` is ``infinite``.
    """

    asked: int
    hits: int
    fixed_schedule: int
    infinite: int
    closing_blocks: int

    @property
    def policy_gap(self) -> int:
        """Hits that another order of eviction could have had."""
        return self.fixed_schedule - self.hits

    @property
    def capacity_gap(self) -> int:
        """Hits that only a larger pool could have had."""
        return self.infinite - self.fixed_schedule


@once
def cache_bounds(run: Run) -> CacheBounds | None:
    """How many blocks other orders of eviction and larger pools could have hit; None where ``cache_worth`` is None."""
    worth = cache_worth(run)
    if worth is None:
        return None
    names = worth.names
    spans, held, hits = _spans(names)
    kept, missing = _kept(names.events["free"], spans)
    return CacheBounds(
        asked=int((names.stop - names.first).sum()),
        hits=hits,
        fixed_schedule=held + kept,
        infinite=held + sum(spans.values()),
        closing_blocks=run.replica.num_blocks + missing,
    )


def cache_summary(run: Run) -> dict[str, Any] | None:
    """The worth of the cached slots over the whole run, and the bounds, for the summary; None as ``cache_worth``.

    GB are 1e9 bytes on all GPUs of the replica.
    """
    worth, bounds = cache_worth(run), cache_bounds(run)
    if worth is None or bounds is None:
        return None
    ticks, log = worth.slot_ticks(), run.log
    pool = log.capacity_slots * log.end_ticks
    slot_gb = _slot_bytes(run.settings) / 1e9
    return {
        "slot_seconds": {name: each / PER_SECOND for name, each in ticks.items()},
        "gb_hours": {name: slot_gb * each / PER_SECOND / 3600 for name, each in ticks.items()},
        "pool_pct": {name: 100 * each / pool if pool else 0.0 for name, each in ticks.items()},
        "asked_blocks": bounds.asked,
        "hit_blocks": bounds.hits,
        "fixed_schedule_hit_blocks": bounds.fixed_schedule,
        "infinite_hit_blocks": bounds.infinite,
        "closing_blocks": bounds.closing_blocks,
    }


def _slot_bytes(settings: Settings) -> float:
    """Bytes of a slot on all GPUs of a replica; of stages with fewer layers as of the one with most."""
    shape, card = model(settings.model), gpu(settings.gpu)
    dtype = resolved_kv_dtype(shape, card, settings.kv_cache_dtype)
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    on_a_rank = shape.slot_bytes(dtype, settings.tensor_parallel_size, settings.pipeline_parallel_size)
    # Ranks that divide the tokens have a share of them each.
    return ranks * on_a_rank / settings.given().get("decode_context_parallel_size", 1)


#: How many names lie between two events, by these.
Spans = Counter[tuple[int, int]]


def _spans(names: CachedNames) -> tuple[Spans, int, int]:
    """Spans between two events; blocks that look-ups find in tables; and hits of the run."""
    tables, since = np.zeros(names.size, dtype=np.int32), np.full(names.size, -1, dtype=np.int32)
    spans: Spans = Counter()
    held = hits = 0
    events = {name: column.tolist() for name, column in names.events.items()}
    is_named = (names.events["kind"] == NAMED) | (names.events["kind"] == RELEASED)
    place = np.zeros(len(is_named), dtype=np.int64)
    place[is_named] = names.place_of(names.events["name"][is_named])
    places = place.tolist()
    first, stop, ranges = names.first.tolist(), names.stop.tolist(), names.ranges.tolist()
    # Names that no later look-up asks for change nothing. Who asks for a place of a chain asks for those before it.
    looked_up = np.maximum.accumulate(np.where(names.events["kind"] == LOOKED_UP, names.events["name"] + 1, 0))
    matters = ~is_named
    matters[is_named] = names.last[place[is_named]] >= looked_up[is_named]
    for event in np.flatnonzero(matters).tolist():
        kind, name, blocks, at = events["kind"][event], events["name"][event], events["blocks"][event], places[event]
        if kind == NAMED:
            tables[at : at + blocks] += 1
            since[at : at + blocks] = -1
        elif kind == RELEASED:
            some = tables[at : at + blocks]
            some -= 1
            since[at : at + blocks][some == 0] = event
        elif kind == LOOKED_UP:
            hits += blocks
            for each in range(ranges[name], ranges[name + 1]):
                asked = slice(first[each], stop[each])
                length = stop[each] - first[each]
                begun = since[asked]
                held += int(np.count_nonzero(tables[asked]))
                if begun.max() >= 0:
                    for start, count in _counted(begun):
                        spans[start, event] += count
                    begun[:] = -1
                found = min(blocks, length)
                tables[asked.start : asked.start + found] += 1
                blocks -= found
    return spans, held, hits


def _counted(begun: np.ndarray) -> list[tuple[int, int]]:
    """Different values from 0 on, and how often they are there. Neighbours are mostly equal."""
    edges = [0, *(np.flatnonzero(begun[1:] != begun[:-1]) + 1).tolist(), len(begun)]
    found = ((int(begun[edge]), until - edge) for edge, until in pairwise(edges))
    return [(value, count) for value, count in found if value >= 0]


def _kept(free: np.ndarray, spans: Spans) -> tuple[int, int]:
    """The most spans that can be kept, and how many more blocks all of them need.

    Args:
        free: Blocks that are free from each event to the next, int64.
    """
    # What is kept changes at both ends of spans: between them only the fewest free blocks count.
    edges = sorted({edge for span in spans for edge in span})
    if not edges:
        return 0, 0
    starting: dict[int, list[tuple[int, int]]] = {}
    for (start, end), count in spans.items():
        starting.setdefault(start, []).append((end, count))
    kept = Counter[int]()
    ending = Counter[int]()
    last: list[int] = []
    held = wanted = hits = missing = 0
    for event, room in zip(edges, np.minimum.reduceat(free, edges).tolist(), strict=True):
        here = kept.pop(event, 0)
        hits, held, wanted = hits + here, held - here, wanted - ending.pop(event, 0)
        for end, count in starting.get(event, ()):
            if end not in kept:
                heappush(last, -end)
            kept[end] += count
            ending[end] += count
            held, wanted = held + count, wanted + count
        missing = max(missing, wanted - room)
        while held > room:
            end = -last[0]
            gone = min(held - room, kept.get(end, 0))
            held -= gone
            if gone == kept.get(end, 0):
                heappop(last)
                kept.pop(end, None)
            else:
                kept[end] -= gone
    return hits, missing
