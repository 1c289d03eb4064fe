"""The blocks of a host tier, divided by what they were worth, as ``cache_worth`` divides the cached blocks of the GPU.

A block of the host is divided at its loads. As long as a block of the GPU has the same contents, in a table or cached, it is a
duplicate, whatever comes of it; the rest of each part belongs to the first worth that fits:

    host     stored                     loaded                evicted
    GPU      |--- has the contents ---|                 too late, or never
    worth    |       duplicate        |  hit later  |-----------------|

A look-up asks the host for the full blocks of its sequence after those that the GPU has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from ..memory.accounting.worths import HOST_WORTHS
from ..memory.prefix.chains import Paths
from ..memory.prefix.contents_log import Asked, ContentsKept, ContentsLog, SettledContentsLog
from ..memory.prefix.host_tier import HostTier
from ..runs.moments import ticks_of
from ..runs.run import Run
from ..types.once import once
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
    """Slots of the host of each worth, integrated over the run; None without a host tier, or where no contents are logged.

    They add up to the blocks of ``HostTier.levels``, over time.
    """
    tier, gpu = run.replica.memory.transfers, run.replica.memory.contents_kept
    log = None if tier is None else tier.cache.sealed_contents()
    if tier is None or gpu is None or log is None:
        return None
    names = CachedNames(_HostContents(tier, log, gpu))
    stays, kept, end = names.stays, names.kept, run.log.end_ticks
    hit = stays["hit"] > 0
    late = np.zeros(len(hit), dtype=np.int64)
    late[~hit] = asked_again(names, {name: column[~hit] for name, column in stays.items()})
    worths = np.select([hit, late > 0], ["hit_later", "too_late"], "never").tolist()
    held = _Held.of(run, gpu)
    found = dict.fromkeys(HOST_WORTHS, 0)
    for since, until, name, worth in [
        *zip(stays["since"].tolist(), stays["until"].tolist(), stays["name"].tolist(), worths, strict=True),
        *(
            (since, end, name, "undecided")
            for since, name in zip(*(kept[n].tolist() for n in ("since", "name")), strict=True)
        ),
    ]:
        duplicate = held.ticks(name, until) - held.ticks(name, since)
        found["duplicate"] += duplicate
        found[worth] += until - since - duplicate
    return {worth: run.replica.block_size * ticks for worth, ticks in found.items()}


@dataclass(frozen=True)
class _Held:
    """When blocks of the GPU had each hash.

    Attributes:
        starts: By hash, when spans with a block begin, ascending.
        ends: When they end.
        before: Ticks of all spans before each.
    """

    starts: dict[int, list[int]]
    ends: dict[int, list[int]]
    before: dict[int, list[int]]

    @classmethod
    def of(cls, run: Run, gpu: ContentsKept) -> _Held:
        """From the log of a run."""
        log = gpu.sealed_contents()
        assert isinstance(log, SettledContentsLog) and log.holdings is not None
        changes = log.holdings.columns()
        blocks: dict[int, int] = defaultdict(int)
        found = cls(defaultdict(list), defaultdict(list), defaultdict(list))
        ticks = ticks_of(run.log, changes["moment"]).tolist()
        for at, name, more in zip(ticks, changes["name"].tolist(), changes["more"].tolist(), strict=True):
            blocks[name] += more
            if more > 0 and blocks[name] == 1:
                found.starts[name].append(at)
            elif not blocks[name]:
                found.ends[name].append(at)
        for name, starts in found.starts.items():
            found.ends[name] += [run.log.end_ticks] * (len(starts) - len(found.ends[name]))
            lengths = (end - start for start, end in zip(starts, found.ends[name], strict=True))
            found.before[name] += [0, *np.cumsum([*lengths], dtype=np.int64).tolist()]
        return found

    def ticks(self, name: int, until: int) -> int:
        """How long blocks had a hash before a time, in ticks."""
        if name not in self.starts:
            return 0
        place = bisect_right(self.starts[name], until) - 1
        if place < 0:
            return 0
        return self.before[name][place] + min(until, self.ends[name][place]) - self.starts[name][place]
