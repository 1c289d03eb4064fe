"""llama.cpp's server, with a KV cache that is split per slot, or one that all slots share."""

from __future__ import annotations

import numpy as np

from ..memory.accounting.kv_groups import PageGroups
from ..memory.paged.cells import CellMemory, CellTransaction
from ..memory.paged.streams import StreamMemory, StreamTransaction
from ..types.errors import SettingError
from ..types.sequence import CARRY_ON, NOT_DECODING, Sequence, StepPlan
from ..types.state import State
from ..workload.workload import Workload
from .base import AnyPolicy, Limits, MemoryT, Policy, Pool, Server, TransactionT, blocks_of
from .options import LlamaCppOptions, Options


class LlamaServer(Policy[MemoryT, TransactionT]):
    """llama.cpp's server (``tools/server/server-context.cpp`` at 0c1e57098) with ``--no-context-shift``: slots and batches.

    A request has one of ``--parallel`` slots (``max_num_seqs``) from before its first token to its last. A step holds at most
    ``--batch-size`` tokens (``max_num_batched_tokens``): one of every decoding slot, then prompts by the number of their
    slots, split where the batch is full. A waiting request takes the slot that is idle for longest; slots that were never used
    come first, the one with the highest number before the others. No sequence is preempted.

    A slot is taken by a request before the batch has room for its prompt. Until then the request stays in the queue here.
    """

    name = "llama-cpp"
    options_type = LlamaCppOptions
    default_max_num_batched_tokens = 2048
    #: llama.cpp pads the context of a slot to a multiple of 256 cells.
    default_block_size = 256

    def __init__(self, limits: Limits, options: Options | None = None, groups: PageGroups | None = None) -> None:
        super().__init__(limits, options, groups)
        self._slot_of: dict[Sequence, int] = {}
        #: Idle slots: the step of their last finish and their number. The smallest was used least recently.
        self._idle = [(NOT_DECODING, -slot) for slot in range(limits.max_num_seqs)]

    def schedule(self, state: State, transaction: TransactionT) -> StepPlan:
        """Give idle slots to waiting requests, and fill the batch with prompts in the order of the slots."""
        if not (state.waiting or state.prefilling):
            self._find_cells(state, transaction, 0)
            return CARRY_ON
        self._free_slots(state.decode_step)
        self._give_slots(state, transaction)
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
                self._begin(sequence, transaction)
            prefill_tokens += tokens
            if tokens == left:
                admitted.append(sequence)
            else:
                chunks.append((sequence, tokens))
        self._find_cells(state, transaction, prefill_tokens)
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

    def _give_slots(self, state: State, transaction: TransactionT) -> None:
        """Waiting requests take idle slots in order of arrival, the least recently used one first."""
        for sequence in state.waiting:
            if not self._idle:
                break
            if sequence not in self._slot_of:
                least = min(self._idle)
                self._idle.remove(least)
                self._slot_of[sequence] = abs(least[1])
                self._give_slot(abs(least[1]), transaction)

    def _give_slot(self, slot: int, transaction: TransactionT) -> None:
        """A slot was given to a request."""

    def _begin(self, sequence: Sequence, transaction: TransactionT) -> None:
        """The first chunk of a sequence's prompt is part of the batch."""

    def _find_cells(self, state: State, transaction: TransactionT, prefill_tokens: int) -> None:
        """Find cells for a batch of all decodes and so many tokens of prompts."""

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        """Blocks of a context with a cell for every token: the server truncates an output that leaves no cell."""
        return blocks_of(workload.prompt_tokens + workload.output_tokens, block_size)


class LlamaCpp(LlamaServer[StreamMemory, StreamTransaction]):
    """With ``--no-kv-unified``: the cells of ``--ctx-size`` are divided among the slots.

    A request has all cells of its slot from its first token to its last one; before that they count as free.
    """

    system = "llama.cpp's server"
    default_max_num_seqs = None

    @classmethod
    def variant(cls, options: Options) -> type[AnyPolicy]:
        """See ``Policy``."""
        assert isinstance(options, LlamaCppOptions)
        return UnifiedLlamaCpp if options.kv_unified else cls

    def memory(self, pool: Pool) -> StreamMemory:
        return StreamMemory(pool.num_blocks, pool.block_size, self.limits.max_num_seqs, pool.ids)

    def _begin(self, sequence: Sequence, transaction: StreamTransaction) -> None:
        transaction.take_stream()

    def horizon(self, state: State, memory: StreamMemory, limit: int) -> int:
        """Sequences grow within their slots: only finishes and arrivals change the decision."""
        return limit

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        """As many for each slot."""
        return super().smallest_pool_blocks(workload, block_size) * self.limits.max_num_seqs


class UnifiedLlamaCpp(LlamaServer[CellMemory, CellTransaction]):
    """With ``--kv-unified``: one cache of ``--ctx-size`` cells that all slots share, a cell for each computed token.

    An idle slot keeps the cells of its last request until a request is given a slot (``--cache-idle-slots``), or a batch lacks
    cells. If cells are lacking when no idle slot keeps any, the run ends with an error: the server would compute smaller
    batches as long as it finds cells, and then end all requests in slots with "Context size has been exceeded.".
    """

    #: ``--parallel`` where it is not given.
    default_max_num_seqs = 4
    default_block_size = 1

    @classmethod
    def pool_size(
        cls, server: Server, options: Options, num_blocks: int | None, block_size: int | None
    ) -> tuple[int, int]:
        """See ``Policy``: the cells of as many blocks as the split cache would have."""
        blocks, size = LlamaCpp.pool_size(server, options, num_blocks, block_size)
        return blocks * size, 1

    def memory(self, pool: Pool) -> CellMemory:
        return CellMemory(pool.num_blocks, pool.ids)

    def _give_slot(self, slot: int, transaction: CellTransaction) -> None:
        transaction.give_slot(slot)

    def _begin(self, sequence: Sequence, transaction: CellTransaction) -> None:
        transaction.begin(sequence, self._slot_of[sequence])

    def _find_cells(self, state: State, transaction: CellTransaction, prefill_tokens: int) -> None:
        """See ``LlamaServer``.

        Raises:
            SettingError: Too few cells are free.
        """
        lacking = transaction.find(prefill_tokens)
        if lacking:
            cells, batch = transaction.memory.num_blocks, state.batch_size + prefill_tokens
            raise SettingError(
                "kv_unified",
                True,
                f"a batch of {batch} tokens lacks {lacking} of the {cells} cells in step {state.decode_step}, where llama.cpp's server would"
                " end all running requests with an error, which is not simulated; give a larger pool, a smaller max_num_seqs"
                " or --no-kv-unified",
            )

    def horizon(self, state: State, memory: CellMemory, limit: int) -> int:
        """Steps for which cells are unused."""
        return min(limit, memory.unused // state.batch_size)


def _queue(state: State, leaving: list[Sequence]) -> tuple[Sequence, ...]:
    """The queue, with those that leave it first; empty where none leaves it."""
    first = dict.fromkeys(sequence for sequence in leaving if sequence not in state.prefilling)
    if not first:
        return ()
    return (*first, *(sequence for sequence in state.waiting if sequence not in first))
