"""Lives of blocks, as vLLM's metrics of KV-cache residency have them; written when a block is taken again.

A block is born when it is taken, touched when a request hits it, and logged when it is taken again:

    take        hit    hit            hit                 taken again
     |-----------|------|--------------|---------------------|
                  <gap-> <----gap-----> <--idle before evict->
     <------------------------lifetime----------------------->

As in vLLM, birth and release are not touches, so the time before the first hit is not a gap; only the gaps between the last
four touches are logged; blocks that are never taken again are not logged; and blocks are logged with or without a hash. vLLM
samples one block in a hundred by default; here every block is recorded.

Source: vLLM, vllm/v1/core/kv_cache_metrics.py (``KVCacheMetricsCollector``, ``--kv-cache-metrics``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from ...types.columns import slices
from ..accounting.ledger import Table

#: Columns of lives, as moments: birth, last touch or birth, and next taking; and the blocks with them.
LIFE = ("born", "touched", "taken", "blocks")
#: Columns of the time between two touches of blocks that were taken again.
GAP = ("since", "until", "blocks")
#: Columns of blocks with a hash that were taken: the moment, and how many they are.
EVICTED = ("moment", "blocks")
#: Columns of lives and gaps as the compiled core has them, in ticks: ``CoreResidency``.
HIT_LIFE = ("ticks", "idle_ticks", "blocks")
HIT_GAP = ("ticks", "blocks")
KEPT_TOUCHES = 4
#: Lives, or gaps, that are read at a time.
_CHUNK = 1 << 17
#: Lives that gather before they become columns.
_GATHERED = 1 << 15
_NEVER = -1
#: Values, and the number of blocks with each value.
Observed = tuple[np.ndarray, np.ndarray]


class BlockResidency:
    """Births and touches of the blocks of a pool, and the lives that have ended.

    Args:
        logs_evictions: Whether evictions are logged; not where the cached level is logged as a whole.

    Attributes:
        lives, gaps, evictions: Tables with the columns ``LIFE``, ``GAP`` and ``EVICTED``; ``seal`` completes them.
    """

    def __init__(self, logs_evictions: bool = True) -> None:
        self._logs_evictions = logs_evictions
        self.lives, self.gaps, self.evictions = Table(LIFE), Table(GAP), Table(EVICTED)
        self._born: list[int] = []
        self._touches: dict[int, tuple[int, ...]] = {}
        # Columns that have gathered for the tables, without the blocks.
        self._ended: tuple[list[int], list[int], list[int]] = [], [], []
        self._evicted: list[int] = []

    def on_blocks_added(self, count: int) -> None:
        """So many more blocks are taken for the first time."""
        self._born += [_NEVER] * count

    def on_blocks_allocated(self, blocks: Sequence[int], moments: Sequence[int]) -> None:
        """Blocks are taken, each at its moment: they are born, and their lives before have ended."""
        born, touches = self._born, self._touches
        before = [*map(born.__getitem__, blocks)]
        for block, moment in zip(blocks, moments, strict=True):
            born[block] = moment
        touched = before
        if touches:
            touched = [touches[block][-1] if block in touches else at for block, at in zip(blocks, before, strict=True)]
            for times, count in Counter(map(touches.pop, filter(touches.__contains__, blocks))).items():
                for since, until in pairwise(times):
                    self.gaps.append((since, until, count))
        if _NEVER in before:
            kept = [place for place, at in enumerate(before) if at != _NEVER]
            before, touched, moments = ([column[place] for place in kept] for column in (before, touched, moments))
        for column, values in zip(self._ended, (before, touched, moments), strict=True):
            column += values
        if len(self._ended[0]) > _GATHERED:
            self.seal()

    def on_blocks_accessed(self, blocks: Sequence[int], moment: int) -> None:
        """A request hits blocks."""
        touches, last, more = self._touches, tuple[int, ...](), tuple[int, ...]((moment,))
        for block in blocks:
            # Blocks of a table have mostly been hit together.
            before = touches.get(block, ())
            if before is not last:
                last, more = before, (*before[1 - KEPT_TOUCHES :], moment)
            touches[block] = more

    def on_blocks_evicted(self, moments: Iterable[int]) -> None:
        """Blocks with a hash are taken, one at each moment."""
        if self._logs_evictions:
            self._evicted += moments

    def seal(self) -> None:
        """Turn what has gathered into columns, with equal lives that follow each other as one."""
        for table, columns in ((self.lives, self._ended), (self.evictions, (self._evicted,))):
            if columns[0]:
                table.extend(_counted(np.array(columns, dtype=np.int64).T))
                for column in columns:
                    column.clear()

    def observations(self, ticks_of: Callable[[np.ndarray], np.ndarray] = np.asarray) -> Iterator[dict[str, Observed]]:
        """Observations by vLLM's names of the metrics: values, and the number of blocks with each value; int64. In parts, as those of a
        long run are too many to be held at once; the gaps are all in the last one.

        Of a run without hits both names of the ages have the same tuple, in all parts.

        Args:
            ticks_of: Converts moments (int64) to ticks.
        """
        self.seal()
        untouched = all(np.array_equal(lives["born"], lives["touched"]) for lives in self.lives.parts())
        nothing = np.zeros(0, dtype=np.int64)
        for lives in self.lives.parts():
            for part in slices(len(lives["born"]), _CHUNK):
                some = {name: column[part] for name, column in lives.items()}
                yield _observed(some, (nothing, nothing), untouched, ticks_of)
        gaps = self.gaps.columns()
        between = ticks_of(gaps["until"]) - ticks_of(gaps["since"]), gaps["blocks"]
        yield _observed(dict.fromkeys(LIFE, nothing), between, untouched, ticks_of)


class CoreResidency(BlockResidency):
    """Lives that the compiled core has observed: it knows when each step ends, so they are in ticks and no moments.

    Attributes:
        lives: Lives of blocks without a hit, one value each: ticks, or below 0 how many more blocks had those before.
        hit_lives, gaps: Tables with the columns ``HIT_LIFE`` and ``HIT_GAP``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lives, self.hit_lives, self.gaps = Table(("ticks",)), Table(HIT_LIFE), Table(HIT_GAP)

    def observations(self, ticks_of: Callable[[np.ndarray], np.ndarray] = np.asarray) -> Iterator[dict[str, Observed]]:
        hit, gaps = self.hit_lives.columns(), self.gaps.columns()
        untouched, nothing = not len(hit["ticks"]), (np.zeros(0, dtype=np.int64),) * 2
        before = 0
        for lives in self.lives.parts():
            for part in slices(len(lives["ticks"]), _CHUNK):
                lifetime = _repeated(lives["ticks"][part], before)
                before = int(lifetime[0][-1])
                yield _named(lifetime, lifetime if untouched else (*lifetime,), nothing)
        between, blocks = (gaps["ticks"], gaps["blocks"]), hit["blocks"]
        lifetime = hit["ticks"], blocks
        yield _named(lifetime, lifetime if untouched else (hit["idle_ticks"], blocks), between)


def _repeated(lives: np.ndarray, before: int) -> Observed:
    """Values, and the blocks with each, of some ``CoreResidency.lives``, which follow those with the value ``before``."""
    more = np.flatnonzero(lives < 0)
    blocks = np.ones(len(lives), dtype=np.int64)
    if lives[0] < 0:
        lives, blocks[0], more = np.append(before, lives[1:]), -lives[0], more[1:]
    np.subtract.at(blocks, more - 1, lives[more])
    return np.delete(lives, more), np.delete(blocks, more)


def _named(lifetime: Observed, idle: Observed, between: Observed) -> dict[str, Observed]:
    return {
        "vllm:kv_block_lifetime_seconds": lifetime,
        "vllm:kv_block_idle_before_evict_seconds": idle,
        "vllm:kv_block_reuse_gap_seconds": between,
    }


def _observed(
    lives: dict[str, np.ndarray], gaps: Observed, untouched: bool, ticks_of: Callable[[np.ndarray], np.ndarray]
) -> dict[str, Observed]:
    end, blocks = ticks_of(lives["taken"]), lives["blocks"]
    lifetime = end - ticks_of(lives["born"]), blocks
    # Where nothing was hit each block was touched last at its birth.
    return _named(lifetime, lifetime if untouched else (end - ticks_of(lives["touched"]), blocks), gaps)


def _counted(records: np.ndarray) -> np.ndarray:
    """Records, int64 [n, fields], with runs of equal ones as one, and how many they are as a last field."""
    starts = np.flatnonzero(np.append(True, (records[1:] != records[:-1]).any(axis=1)))
    return np.column_stack([records[starts], np.diff(starts, append=len(records))])
