"""The blocks of a host tier, divided by what they were worth, as ``cache_worth`` divides the cached blocks of the GPU.

A block of the host is divided at its loads. As long as a block of the GPU has the same contents, in a table or cached, it is a
duplicate, whatever comes of it; the rest of each part belongs to the first worth that fits:

    host     stored                     loaded                evicted
    GPU      |--- has the contents ---|                 too late, or never
    worth    |       duplicate        |  hit later  |-----------------|

A look-up asks the host for the full blocks of its sequence after those that the GPU has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
class _HostContents:
    """The contents of a host as ``CachedNames`` reads them."""

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


@once
def host_slot_ticks(run: Run) -> dict[str, int] | None:
    """Slots of the host of each worth, integrated over the settings' window; None without a host tier, or where no contents are logged.

    They add up to the blocks of ``HostTier.levels``, over time.
    """
    tier, gpu = run.replica.memory.transfers, run.replica.memory.contents_kept
    log = None if tier is None else tier.cache.sealed_contents()
    if tier is None or gpu is None or log is None:
        return None
    names = CachedNames(_HostContents(tier, log, gpu))
    stays, kept, end = _single(names.stays), names.kept, run.log.end_ticks
    hit = stays["hit"] > 0
    late = np.zeros(len(hit), dtype=np.int64)
    late[~hit] = asked_again(names, {name: column[~hit] for name, column in stays.items()})
    since, until = np.append(stays["since"], kept["since"]), np.append(stays["until"], np.full(len(kept["since"]), end))
    since, until = (np.clip(each, run.window.start_ticks, run.window.end_ticks) for each in (since, until))
    duplicate = _held_ticks(run, gpu, np.append(stays["name"], kept["name"]), since, until)
    alone = until - since - duplicate
    which = {
        "hit_later": np.flatnonzero(hit),
        "too_late": np.flatnonzero(late),
        "never": np.flatnonzero(~hit & (late == 0)),
        "undecided": np.arange(len(hit), len(alone)),
    }
    found = {"duplicate": total(duplicate)} | {worth: total(alone[some]) for worth, some in which.items()}
    return {worth: run.replica.block_size * found[worth] for worth in HOST_WORTHS}


def _single(stays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stays of one block each, in place of those of consecutive names."""
    blocks = stays["blocks"]
    found = {name: np.repeat(column, blocks) for name, column in stays.items()}
    found["name"] += np.arange(len(found["name"])) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    return found | {"blocks": np.ones_like(found["name"])}


def _held_ticks(run: Run, gpu: ContentsKept, names: np.ndarray, since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """How long a block of the GPU had the contents of each name within its span, in ticks, int64."""
    log = gpu.sealed_contents()
    assert isinstance(log, SettledContentsLog) and log.holdings is not None
    changes = log.holdings.columns()
    order = np.argsort(changes["name"], kind="stable")
    name, more, at = changes["name"][order], changes["more"][order], ticks_of(run.log, changes["moment"])[order]
    # The blocks with each name are none at its first change.
    blocks = np.cumsum(more)
    first = np.append(True, name[1:] != name[:-1])[: len(name)]
    blocks -= (blocks - more)[first][np.cumsum(first) - 1]
    begins, ends = (more > 0) & (blocks == 1), blocks == 0
    starts, start_names = at[begins], name[begins]
    stops = np.full(len(starts), run.log.end_ticks)
    # Of each name spans end in the order in which they begin.
    stops[(np.cumsum(begins) - 1)[ends]] = at[ends]
    before = np.cumsum(stops - starts) - (stops - starts)
    held = [_held_before(names, edge, start_names, starts, stops, before) for edge in (until, since)]
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
