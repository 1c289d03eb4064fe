"""Offloading of blocks to the host where sequences do not grow in lockstep: the parts of ``offload`` and of ``speculative`` together.

What vLLM 0.33 does beside drafts (vllm/v1/core/sched/scheduler.py):

    a load             takes no slots for the drafter's look-ahead, which its admission takes
    room for a load    beside it the next step of a sequence with drafts must fit (``_spec_decode_step_blocks``), and prefills in
                       progress, other loads included, still need their tokens, and those of such a step
"""

from __future__ import annotations

from ...types.sequence import Sequence
from ..accounting.drafts import Speculation
from ..accounting.kv_groups import STATE, PageGroups
from ..prefix import Chains, FreeKVCacheBlockQueue
from ..prefix.tiers import Offloaded
from .group_cache import NULL_BLOCK
from .host_tier_memory import HostTierMemory
from .offload import OffloadTransaction
from .speculative import SpeculativeMemory, SpeculativeTransaction


class SpeculativeOffloadTransaction(OffloadTransaction, SpeculativeTransaction):
    """As ``OffloadTransaction``; every grant takes effect at once."""

    __slots__ = ()
    memory: SpeculativeOffloadedMemory

    def enter(self, sequence: Sequence, tokens: int, blocks: int) -> None:
        super().enter(sequence, tokens, blocks)
        if sequence.computed_tokens + tokens < sequence.start_tokens:
            self.memory.in_progress[sequence] = None

    def _continue(self, sequence: Sequence, tokens: int) -> None:
        known = sequence.computed_tokens
        self.memory.resume(sequence, known)
        self._enter_with(sequence, known, tokens)


class SpeculativeOffloadedMemory(HostTierMemory, SpeculativeMemory):
    """As ``SpeculativeMemory`` with a second tier of the prefix cache in host memory.

    Args:
        num_blocks, block_size, speculation, chains, max_model_len, order, groups: See ``SpeculativeMemory``.
        host: See ``OffloadedMemory``.
        watermark_blocks, reserves_whole: See ``HostTierMemory``.

    Attributes:
        in_progress: Sequences that load their blocks, or prefill in chunks.
    """

    _transaction: SpeculativeOffloadTransaction

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        speculation: Speculation | None,
        chains: Chains,
        host: Offloaded,
        watermark_blocks: int,
        reserves_whole: bool,
        max_model_len: int,
        order: type[FreeKVCacheBlockQueue],
        groups: PageGroups,
    ) -> None:
        SpeculativeMemory.__init__(self, num_blocks, block_size, speculation, chains, max_model_len, order, groups)
        self._connect(host, watermark_blocks, reserves_whole)
        self._step_tokens = 1 + self.num_drafts + self._lookahead if self.num_drafts else 0
        sizes = zip(groups.kinds, groups.block_sizes(block_size), strict=True)
        self.step_blocks = sum(-(-self._step_tokens // size) for kind, size in sizes if kind != STATE)
        self.in_progress: dict[Sequence, None] = {}
        self._transaction = SpeculativeOffloadTransaction(self)

    # --- Loads ---

    def slots_of(self, tokens: int) -> int:
        return self.slots_with_lookahead(tokens)

    def blocks_to_come(self) -> int:
        tables, blocks = self.kept, 0
        for sequence in self.in_progress:
            start = sequence.start_tokens
            computed = self.tier.loaded.get(sequence, sequence.computed_tokens)
            slots = start + self._step_tokens
            blocks += tables.lacked(sequence, tables.tables[sequence], start, slots, computed, admits=True)
        return blocks

    def _hold_load(self, sequence: Sequence, tokens: int, known: int) -> None:
        """As ``HostTierMemory._hold_load``; the pool, whose tables have the blocks, says how many are free."""
        self.free = self.kept.pool.num_free
        self.in_progress[sequence] = None
        # Tokens that a window has passed count in every group as if they were there.
        tables = self.kept.tables[sequence]
        passed = (tables[place].count(NULL_BLOCK) * size for place, size, window, _ in self._seekers if window)
        self.stand(sequence, max([known, *passed]))

    def _loaded(self, sequence: Sequence) -> None:
        self.stand(sequence, sequence.computed_tokens)

    # --- Steps ---

    def admit(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0, past: bool = False) -> None:
        super().admit(sequence, decode_step, padded_tokens, past)
        self.in_progress.pop(sequence, None)

    def drop_table(self, sequence: Sequence) -> None:
        super().drop_table(sequence)
        self.in_progress.pop(sequence, None)
