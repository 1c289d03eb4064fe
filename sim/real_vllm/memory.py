"""The memory of policy ``vllm-real``: counts and block tables, read from the block pool of the installed vLLM.

vLLM's scheduler allocates and frees while it decides, and when a step is over. Here nothing is allocated: the calls of the
executor change nothing, and the ledger's levels are counted from vLLM's block tables at the end of every step, before its
finished requests release their blocks.

With asynchronous scheduling vLLM schedules step k + 1 before it gets the tokens of step k. The engine asks for that decision
when step k is over, so both happen in ``schedule``:

    advance             the levels of step k
    schedule            vLLM schedules step k + 1, then gets the tokens of step k, and frees finished requests
    release_finished    the engine learns of them
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ..memory.accounting.cache_log import CacheLog
from ..memory.accounting.kv_groups import FULL, RING, SLIDING, STATE, PageGroups
from ..memory.accounting.ledger import METER, Meter
from ..memory.interface.memory import Memory
from ..types.errors import SimulationFault
from ..types.sequence import Sequence
from ..types.state import State

if TYPE_CHECKING:
    from .core import Core, Scheduled

_SHARED = {FULL: "shared", SLIDING: "shared_in_windows", STATE: "shared_states"}


class RealTransaction:
    """What ``vllm-real`` schedules over: the memory itself, as vLLM makes its own grants."""

    def __init__(self, memory: RealMemory) -> None:
        self.memory = memory


class RealMemory(Memory):
    """Reads vLLM's block pool. See ``Memory``.

    Args:
        core: The engine core with the pool.
        num_blocks: Blocks of the pool, without vLLM's null block.
        block_size: Tokens per block.
        groups: KV groups of the model.
        caches_prefixes: Whether freed blocks keep their contents.
        ahead: Whether step k + 1 is scheduled before step k is over.

    Attributes:
        core: As above.
        sequences: The sequences that wait or run, by index.
        scheduled: The last step that vLLM scheduled.
    """

    scheduled: Scheduled

    def __init__(
        self, core: Core, num_blocks: int, block_size: int, groups: PageGroups, caches_prefixes: bool, ahead: bool
    ) -> None:
        self.core, self.num_blocks, self.block_size, self.groups = core, num_blocks, block_size, groups
        self._ahead = ahead
        self.sequences: dict[int, Sequence] = {}
        if caches_prefixes:
            self.cache_log: CacheLog | None = CacheLog(block_size)
            self.cached_level = self.cache_log
        self._transaction = RealTransaction(self)
        self._finished: set[int] = set()
        self.meter: tuple[str, ...] = (*METER[:2], "prefill_tail")
        if groups.sliding:
            self.meter += ("skipped",)
        if groups.states_by_block:
            self.meter += ("skipped_states",)
        if groups.rings or (groups.states and not groups.states_by_block):
            self.meter += ("states",)
        if caches_prefixes and self.has_groups:
            self.meter += tuple(_SHARED.values())

    @property
    def has_groups(self) -> bool:
        """Whether the model has more than layers that keep every token."""
        return self.groups.kinds != (FULL,)

    @property
    def evicted_blocks(self) -> int:
        return self.core.evicted_blocks

    def transaction(self, decode_step: int) -> RealTransaction:
        return self._transaction

    def schedule(self) -> Scheduled:
        """Let vLLM schedule a step; asynchronously, it gets the tokens of the step before only then."""
        self.scheduled = scheduled = self.core.schedule()
        if self._ahead:
            self._finished |= self.core.end_steps(in_flight=1)
        return scheduled

    def advance(self, state: State, steps: int) -> Meter:
        """See ``Memory``; tells vLLM that its step is over, unless ``schedule`` does."""
        counted = self._count(state)
        if self.cache_log is not None:
            self.cache_log.enter_row(self.core.cached_free_blocks())
        if not self._ahead:
            self._finished |= self.core.end_steps(in_flight=0)
            self._end_row()
        return counted

    def _end_row(self) -> None:
        if self.cache_log is not None:
            self.cache_log.end_row(self.core.cached_free_blocks())

    def release(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``; vLLM has freed their blocks.

        Raises:
            SimulationFault: vLLM finished other requests in this step.
        """
        left = {sequence.index for sequence in leaving}
        if left != self._finished:
            raise SimulationFault(f"vLLM finished requests {sorted(self._finished)}, and the engine {sorted(left)}")
        self._forget(left)

    def release_finished(self, leaving: Iterable[Sequence], decode_step: int) -> None:
        """See ``Memory``; as ``release``."""
        self.release(leaving, decode_step)
        self._end_row()

    def _forget(self, finished: set[int]) -> None:
        for index in finished:
            del self.sequences[index]
        self._finished -= finished

    def evict(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...], decode_step: int) -> None:
        """See ``Memory``; vLLM has freed their blocks. A sequence with its last token in flight does not come back."""
        self._forget(self._finished.intersection(sequence.index for sequence in preempted))

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        """See ``Memory``; vLLM has allocated its blocks."""

    def prefill(self, sequence: Sequence, decode_step: int) -> None:
        """See ``Memory``; vLLM has allocated its blocks."""

    def stall(self, sequence: Sequence, decode_step: int, finished: bool = False) -> None:
        """See ``Memory``; vLLM keeps its blocks."""

    def room_after(self, state: State, steps: int) -> int:
        """See ``Memory``; each group takes a block where a table is full, and none is released."""
        size, computed = self.block_size, self.core.computed_tokens()
        blocks = self.core.pool.get_num_free_blocks()
        for place in range(self.groups.number):
            for index, entries in self.core.table_lengths(place).items():
                blocks -= max(0, -(-(computed[index] + steps) // size) - entries)
        return blocks * size

    def cached_block_ids(self) -> np.ndarray:
        """See ``Memory``: blocks with a hash."""
        blocks = self.core.pool.blocks
        return np.array([each.block_id - 1 for each in blocks if each.block_hash is not None], dtype=np.int64)

    def _count(self, state: State) -> Meter:
        """The columns of ``meter``, after the scheduled step has taken its blocks."""
        size, groups = self.block_size, self.groups
        live = sum(self.core.computed_tokens().values())
        # All groups that grow have as many entries, those without a block included.
        fixed = (RING,) if groups.states_by_block else (STATE, RING)
        growing = next((place for place, kind in enumerate(groups.kinds) if kind not in fixed), 0)
        blocks = self.core.table_lengths(growing)
        held = sum(blocks.values())
        partial = (*state.prefilling, *state.stalled)
        tail = sum(max(0, blocks[each.index] * size - each.target_tokens) for each in partial)
        if not self.has_groups:
            twice = held - (self.num_blocks - self.core.pool.get_num_free_blocks())
            return live - twice * size, (held - twice) * size, tail
        tables = self.core.tables()
        columns = {"live": live, "held": held * size, "prefill_tail": tail, "states": size * len(tables)}
        by_kind = {kind: [place for place, each in enumerate(groups.kinds) if each == kind] for kind in _SHARED}
        for kind, name in ((SLIDING, "skipped"), (STATE, "skipped_states")):
            columns[name] = size * sum(
                table[place].count(0) for table in tables.values() for place in by_kind[kind][:1]
            )
        for kind, places in by_kind.items():
            entries = [block for table in tables.values() for place in places for block in table[place] if block]
            columns[_SHARED[kind]] = size * (len(entries) - len(set(entries)))
        return tuple(columns[name] for name in self.meter)
