"""llama.cpp's server with a KV cache that is split per slot."""

from __future__ import annotations

import numpy as np

from ..memory.accounting.kv_groups import PageGroups
from ..memory.paged.streams import StreamMemory, StreamTransaction
from ..types.sequence import CARRY_ON, NOT_DECODING, Sequence, StepPlan
from ..types.state import State
from ..workload.workload import Workload
from .base import Limits, Policy, Pool, blocks_of
from .options import Options


class LlamaCpp(Policy[StreamMemory, StreamTransaction]):
    """llama.cpp's server (``tools/server/server-context.cpp`` at 0c1e57098) with ``--no-kv-unified --no-context-shift``.

    The cells of ``--ctx-size`` are divided among ``--parallel`` slots (``max_num_seqs``); a request has a slot, and all
    cells of it, from its first token to its last. A step holds at most ``--batch-size`` tokens
    (``max_num_batched_tokens``): one of every decoding slot, then prompts by the number of their slots, split where the
    batch is full. A waiting request takes the slot that is idle for longest; slots that were never used come first, the one
    with the highest number before the others. No sequence is preempted.

    A slot is taken by a request before the batch has room for its prompt. Until then the request stays in the queue here,
    and its cells count as free.
    """

    name = "llama-cpp"
    system = "llama.cpp's server, split KV cache"
    default_max_num_seqs = None
    default_max_num_batched_tokens = 2048
    #: llama.cpp pads the context of a slot to a multiple of 256 cells.
    default_block_size = 256

    def __init__(self, limits: Limits, options: Options | None = None, groups: PageGroups | None = None) -> None:
        super().__init__(limits, options, groups)
        self._slot_of: dict[Sequence, int] = {}
        #: Idle slots: the step of their last finish and their number. The smallest was used least recently.
        self._idle = [(NOT_DECODING, -slot) for slot in range(limits.max_num_seqs)]

    def memory(self, pool: Pool) -> StreamMemory:
        return StreamMemory(pool.num_blocks, pool.block_size, self.limits.max_num_seqs, pool.ids)

    def schedule(self, state: State, transaction: StreamTransaction) -> StepPlan:
        """Give idle slots to waiting requests, and fill the batch with prompts in the order of the slots."""
        if not (state.waiting or state.prefilling):
            return CARRY_ON
        self._free_slots(state.decode_step)
        self._take_slots(state)
        budget = self.limits.max_num_batched_tokens - state.batch_size
        admitted: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        prefill_tokens, starved = 0, False
        prompts = (sequence for sequence in self._slot_of if sequence.start_step == NOT_DECODING)
        for sequence in sorted(prompts, key=self._slot_of.__getitem__):
            left = sequence.start_tokens - sequence.computed_tokens
            tokens = min(left, budget - prefill_tokens)
            if tokens <= 0:
                starved = True
                break
            if sequence not in state.prefilling:
                transaction.take_stream()
            prefill_tokens += tokens
            if tokens == left:
                admitted.append(sequence)
            else:
                chunks.append((sequence, tokens))
        return StepPlan(
            admitted=tuple(admitted),
            prefill_tokens=prefill_tokens,
            steady=not (chunks or starved),
            wakes=bool(self._idle),
            chunks=tuple(chunks),
            order=_queue(state, [*admitted, *(sequence for sequence, _ in chunks)]),
        )

    def _free_slots(self, decode_step: int) -> None:
        """Slots of finished sequences become idle; those of one step in the order of their numbers."""
        for sequence, slot in list(self._slot_of.items()):
            if sequence.start_step != NOT_DECODING and sequence.finish_step <= decode_step:
                del self._slot_of[sequence]
                self._idle.append((sequence.finish_step, slot))

    def _take_slots(self, state: State) -> None:
        """Waiting requests take idle slots in order of arrival, the least recently used one first."""
        for sequence in state.waiting:
            if not self._idle:
                break
            if sequence not in self._slot_of:
                least = min(self._idle)
                self._idle.remove(least)
                self._slot_of[sequence] = abs(least[1])

    def horizon(self, state: State, memory: StreamMemory, limit: int) -> int:
        """Sequences grow within their slots: only finishes and arrivals change the decision."""
        return limit

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        """Blocks for all slots, each with a cell for every token: the server truncates an output that leaves no cell."""
        return blocks_of(workload.prompt_tokens + workload.output_tokens, block_size) * self.limits.max_num_seqs


def _queue(state: State, leaving: list[Sequence]) -> tuple[Sequence, ...]:
    """The queue, with those that leave it first; empty where none leaves it."""
    first = dict.fromkeys(sequence for sequence in leaving if sequence not in state.prefilling)
    if not first:
        return ()
    return (*first, *(sequence for sequence in state.waiting if sequence not in first))
