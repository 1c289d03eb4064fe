"""The blocks of the tiers behind the GPU, divided by what they were worth, as ``cache_worth`` divides the cached blocks of the GPU.

A block is divided at its loads, and in a tier behind the host at its promotions. As long as a faster tier has the same contents, on the
GPU in a table or cached, it is a duplicate, whatever comes of it; the rest of each part belongs to the first worth that fits:

    host     stored                     loaded                evicted
    GPU      |--- has the contents ---|                 too late, or never
    worth    |       duplicate        |  hit later  |-----------------|

A look-up asks every tier for the full blocks of its sequence after those that the GPU has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..memory.accounting.worths import HOST_WORTHS
from ..memory.prefix.chains import Paths
from ..memory.prefix.contents_log import Asked, ContentsKept, ContentsLog, SettledContentsLog
from ..memory.prefix.host_tier import HostTier
from ..runs.moments import ticks_of
from ..runs.run import Run
from ..types.once import once
from ..types.sums import total
from .cache_worth import asked_again
from .cached_names import CachedNames


@dataclass(frozen=True)
class _Contents:
    """The contents of a tier as ``CachedNames`` reads them."""

    tier: HostTier
    log: SettledContentsLog
    gpu: ContentsKept

    @property
    def num_kv_groups(self) -> int:
        return self.gpu.num_kv_groups

    def sealed_contents(self) -> ContentsLog:
        return self.log

    def asked(self) -> Asked:
        return self.tier.asked()

    def paths_of(self, requests: np.ndarray) -> Paths:
        return self.gpu.paths_of(requests)


class _Spans(NamedTuple):
    """When contents are somewhere: by name and begin, those of a name apart from each other; int64 [spans]."""

    name: np.ndarray
    start: np.ndarray
    stop: np.ndarray


@once
def tier_slot_ticks(run: Run) -> list[dict[str, int]] | None:
    """Slots of each worth, integrated over the settings' window, of the host and of each tier behind it; None without a host, or where no contents are
    logged. A tier that is shared, and those behind it, are left out.

    They add up to the blocks of ``HostTier.levels`` and ``Store.levels``, over time.
    """
    tier, gpu = run.replica.memory.transfers, run.replica.memory.contents_kept
    if not isinstance(tier, HostTier) or gpu is None or (log := tier.cache.sealed_contents()) is None:
        return None
    found, faster, slots = [], _on_gpu(run, gpu), run.replica.block_size * tier.chunk_blocks
    for link in (None, *tier.behind):
        if link is not None:
            log = None if link.store.shared else link.store.sealed_contents()
        if log is None:
            break
        ticks, faster = _divided(run, CachedNames(_Contents(tier, log, gpu)), faster)
        found.append({worth: slots * ticks[worth] for worth in HOST_WORTHS})
    return found


def _divided(run: Run, names: CachedNames, faster: _Spans) -> tuple[dict[str, int], _Spans]:
    """Blocks of a tier over time by worth, and when this tier or a faster one has contents."""
    stays, kept, end = _single(names.stays), names.kept, run.log.end_ticks
    hit = stays["hit"] > 0
    late = np.zeros(len(hit), dtype=np.int64)
    late[~hit] = asked_again(names, {name: column[~hit] for name, column in stays.items()})
    since, until = np.append(stays["since"], kept["since"]), np.append(stays["until"], np.full(len(kept["since"]), end))
    name, window = np.append(stays["name"], kept["name"]), (run.window.start_ticks, run.window.end_ticks)
    inside = np.clip(since, *window), np.clip(until, *window)
    duplicate = _held_ticks(faster, name, *inside)
    alone = inside[1] - inside[0] - duplicate
    which = {
        "hit_later": np.flatnonzero(hit),
        "too_late": np.flatnonzero(late),
        "never": np.flatnonzero(~hit & (late == 0)),
        "undecided": np.arange(len(hit), len(alone)),
    }
    found = {"duplicate": total(duplicate)} | {worth: total(alone[some]) for worth, some in which.items()}
    spans = [np.concatenate(columns) for columns in zip(faster, (name, since, until), strict=True)]
    more = np.repeat([1, -1], len(spans[0]))
    return found, _united(np.tile(spans[0], 2), more, np.append(spans[1], spans[2]), end)


def _single(stays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stays of one block each, in place of those of consecutive names."""
    blocks = stays["blocks"]
    found = {name: np.repeat(column, blocks) for name, column in stays.items()}
    found["name"] += np.arange(len(found["name"])) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    return found | {"blocks": np.ones_like(found["name"])}


def _on_gpu(run: Run, gpu: ContentsKept) -> _Spans:
    """When a block of the GPU has contents."""
    log = gpu.sealed_contents()
    assert isinstance(log, SettledContentsLog) and log.holdings is not None
    changes = log.holdings.columns()
    return _united(changes["name"], changes["more"], ticks_of(run.log, changes["moment"]), run.log.end_ticks)


def _united(name: np.ndarray, more: np.ndarray, at: np.ndarray, end_ticks: int) -> _Spans:
    """Spans with at least one block of each name.

    Args:
        more: Blocks that come (1) or go (-1) at each change.
        at: Its time, in ticks.
    """
    order = np.lexsort((-more, at, name))
    name, more, at = name[order], more[order], at[order]
    # The blocks with each name are none before its first change.
    blocks = np.cumsum(more)
    first = np.append(True, name[1:] != name[:-1])[: len(name)]
    blocks -= (blocks - more)[first][np.cumsum(first) - 1]
    begins, ends = (more > 0) & (blocks == 1), blocks == 0
    stops = np.full(np.count_nonzero(begins), end_ticks)
    # Of each name spans end in the order in which they begin.
    stops[(np.cumsum(begins) - 1)[ends]] = at[ends]
    return _Spans(name[begins], at[begins], stops)


def _held_ticks(spans: _Spans, names: np.ndarray, since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """How long the contents of each name are in their spans between two times, in ticks, int64."""
    lengths = spans.stop - spans.start
    before = np.cumsum(lengths) - lengths
    held = [_held_before(names, edge, *spans, before) for edge in (until, since)]
    return held[0] - held[1]


def _held_before(
    names: np.ndarray, until: np.ndarray, of: np.ndarray, starts: np.ndarray, stops: np.ndarray, before: np.ndarray
) -> np.ndarray:
    """Ticks of the spans, of any name, up to a time in those of each name.

    Args:
        of, starts, stops: Name, begin and end of each span, by name and time.
        before: Ticks of all spans before each.
    """
    # The last span that begins by then, by one sort of spans and times.
    order = np.lexsort(
        (np.append(np.zeros(len(of)), np.ones(len(names))), np.append(starts, until), np.append(of, names))
    )
    is_span = order < len(of)
    last = (np.cumsum(is_span) - 1)[~is_span]
    at = np.empty(len(names), dtype=np.int64)
    at[order[~is_span] - len(of)] = last
    first = np.searchsorted(of, names)
    known = np.maximum(at, 0)
    if not len(of):
        return np.zeros(len(names), dtype=np.int64)
    inside = before[known] + np.minimum(until, stops[known]) - starts[known]
    # Before its first span a name has the ticks of all names before it.
    return np.where(at >= first, inside, np.append(before, 0)[np.minimum(first, len(of))])
