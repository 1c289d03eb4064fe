"""llama.cpp's server, with a KV cache that is split per slot, or one that all slots share."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain, islice

import numpy as np

from ..memory.accounting.kv_groups import PageGroups
from ..memory.paged.cells import CellMemory, CellTransaction
from ..memory.paged.streams import StreamMemory, StreamTransaction
from ..memory.prefix import first_tokens, shared_tokens
from ..types.errors import SettingError
from ..types.sequence import CARRY_ON, NOT_DECODING, Sequence, StepPlan
from ..types.state import State
from ..workload.content import Run, Tokens
from ..workload.workload import Workload
from .base import AnyPolicy, MemoryT, Policy, Source, TransactionT, blocks_of
from .options import LlamaCppOptions, Options
from .server import Limits, Pool, Server

#: ``--slot-prompt-similarity``: share of a prompt that a slot must keep to be chosen for it; more than this.
SLOT_PROMPT_SIMILARITY = Fraction(1, 10)


class LlamaServer(Policy[MemoryT, TransactionT]):
    """llama.cpp's server (``tools/server/server-context.cpp`` at 0c1e57098) with ``--no-context-shift``: slots and batches.

    A request has one of ``--parallel`` slots (``max_num_seqs``) from before its first token to its last. A step holds at most
    ``--batch-size`` tokens (``max_num_batched_tokens``): one of every decoding slot, then prompts by the number of their
    slots, split where the batch is full. A waiting request takes the slot that is idle for longest; slots that were never used
    come first, the one with the highest number before the others. No sequence is preempted.

    With prefix caching (``--cache-prompt --cache-ram 0``) a slot keeps the tokens of its last request, and a prompt is not computed
    as far as it begins with them. A request takes the slot that keeps most of its prompt, if that is more than a tenth.

    A slot is taken by a request before the batch has room for its prompt. Until then the request stays in the queue here.
    """

    name = "llama-cpp"
    options_type = LlamaCppOptions
    default_max_num_batched_tokens = 2048
    #: llama.cpp pads the context of a slot to a multiple of 256 cells.
    default_block_size = 256
    caches_prefixes = True

    def __init__(self, limits: Limits, options: Options | None = None, groups: PageGroups | None = None) -> None:
        super().__init__(limits, options, groups)
        self._slot_of: dict[Sequence, int] = {}
        #: Idle slots: the step of their last finish and their number, negative before that. The smallest was used least recently.
        self._idle = [(NOT_DECODING, -slot) for slot in range(limits.max_num_seqs)]
        #: Contents of requests, with prefix caching; and the tokens computed by the last request of each slot.
        self._tokens: Tokens | None = None
        self._last: dict[int, tuple[Run, ...]] = {}
        #: The first requests that found no idle slot in the last decision, in order of arrival.
        self._deferred: list[Sequence] = []

    def schedule(self, state: State, transaction: TransactionT) -> StepPlan:
        """Give idle slots to waiting requests, and fill the batch with prompts in the order of the slots."""
        if not (state.waiting or state.prefilling):
            self._find_cells(state, transaction, 0)
            return CARRY_ON
        freed = self._free_slots(state.decode_step)
        self._give_slots(state, freed, transaction)
        budget = self.limits.max_num_batched_tokens - state.batch_size
        admitted: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        prefill_tokens, starved = 0, False
        prompts = (sequence for sequence in self._slot_of if sequence.start_step == NOT_DECODING)
        for sequence in sorted(prompts, key=self._slot_of.__getitem__):
            if prefill_tokens >= budget:
                starved = True
                break
            if sequence not in state.prefilling:
                self._begin(sequence, transaction)
            left = sequence.start_tokens - sequence.computed_tokens
            tokens = min(left, budget - prefill_tokens)
            prefill_tokens += tokens
            if tokens == left:
                admitted.append(sequence)
            else:
                chunks.append((sequence, tokens))
        self._find_cells(state, transaction, prefill_tokens)
        return StepPlan(
            admitted=tuple(admitted),
            prefill_tokens=prefill_tokens,
            valid_until_horizon=not (chunks or starved),
            chunks=tuple(chunks),
            order=_queue(state, [*admitted, *(sequence for sequence, _ in chunks)]),
        )

    def _free_slots(self, decode_step: int) -> int:
        """Slots of finished sequences become idle; those of one step in the order of their numbers. Returns how many."""
        idle = len(self._idle)
        for sequence, slot in list(self._slot_of.items()):
            if sequence.start_step != NOT_DECODING and sequence.finish_step <= decode_step:
                del self._slot_of[sequence]
                self._idle.append((sequence.finish_step, slot))
                if self._tokens is not None:
                    runs = self._tokens.runs(sequence.index), self._tokens.output_runs(sequence.index)
                    self._last[slot] = first_tokens((*runs[0], *runs[1]), sequence.target_tokens - 1)
        return len(self._idle) - idle

    def _give_slots(self, state: State, freed: int, transaction: TransactionT) -> None:
        """Waiting requests take idle slots in order of arrival, but those that waited for the ``freed`` ones in reverse order.

        The server puts one deferred request at the front of its queue for each slot that is released.
        """
        for sequence in chain(reversed(self._deferred[:freed]), state.waiting):
            if not self._idle:
                break
            if sequence not in self._slot_of:
                chosen = self._choose(sequence, transaction)
                self._idle.remove(chosen)
                self._slot_of[sequence] = abs(chosen[1])
                self._give_slot(abs(chosen[1]), transaction)
        # At most one for each slot matters, and as many wait for room in the batch.
        first = islice(state.waiting, 2 * self.limits.max_num_seqs)
        self._deferred = [sequence for sequence in first if sequence not in self._slot_of]

    def _choose(self, sequence: Sequence, transaction: TransactionT) -> tuple[int, int]:
        """The idle slot that keeps most of a prompt, if that is enough, else the least recently used one."""
        if self._tokens is not None:
            found = [(self._found(sequence, abs(idle[1]), transaction), -abs(idle[1]), idle) for idle in self._idle]
            # Of slots that keep as much the one with the lowest number.
            most, _, chosen = max(found)
            if most > SLOT_PROMPT_SIMILARITY * sequence.prompt_tokens:
                return chosen
        return min(self._idle)

    def _found(self, sequence: Sequence, slot: int, transaction: TransactionT) -> int:
        """Tokens of a prompt that a slot keeps."""
        kept = self._kept_tokens(slot, transaction) if self._tokens is not None else 0
        if self._tokens is None or not kept:
            return 0
        return shared_tokens(self._tokens.runs(sequence.index), self._last[slot])

    def _begin(self, sequence: Sequence, transaction: TransactionT) -> None:
        """The first chunk of a sequence's prompt is part of the batch; the last token is always computed."""
        slot = self._slot_of[sequence]
        self._take(
            sequence, slot, min(self._found(sequence, slot, transaction), sequence.prompt_tokens - 1), transaction
        )

    def _give_slot(self, slot: int, transaction: TransactionT) -> None:
        """A slot was given to a request."""

    def _kept_tokens(self, slot: int, transaction: TransactionT) -> int:
        """Tokens that a slot keeps of its last request."""
        raise NotImplementedError

    def _take(self, sequence: Sequence, slot: int, found: int, transaction: TransactionT) -> None:
        """A sequence begins in a slot, of which it takes over the first ``found`` tokens."""
        raise NotImplementedError

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
    source = Source(
        "llama.cpp 0c1e57098", "real server", "2026-11-25: order of waiting requests in the slots of one step"
    )
    default_max_num_seqs = None

    @classmethod
    def variant(cls, options: Options) -> type[AnyPolicy]:
        assert isinstance(options, LlamaCppOptions)
        return UnifiedLlamaCpp if options.kv_unified else cls

    def memory(self, pool: Pool) -> StreamMemory:
        self._tokens = pool.token_runs
        caches = pool.token_runs is not None
        return StreamMemory(pool.num_blocks, pool.block_size, self.limits.max_num_seqs, pool.ids, caches)

    def _kept_tokens(self, slot: int, transaction: StreamTransaction) -> int:
        return transaction.kept_tokens(slot)

    def _take(self, sequence: Sequence, slot: int, found: int, transaction: StreamTransaction) -> None:
        transaction.begin(sequence, slot, found)

    def horizon(self, state: State, memory: StreamMemory, limit: int) -> int:
        """Sequences grow within their slots: only finishes and arrivals change the decision."""
        return limit

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        """As many for each slot."""
        return super().smallest_pool_blocks(workload, block_size) * self.limits.max_num_seqs


class UnifiedLlamaCpp(LlamaServer[CellMemory, CellTransaction]):
    """With ``--kv-unified``: one cache of ``--ctx-size`` cells that all slots share, a cell for each computed token.

    An idle slot keeps the cells of its last request until a batch lacks cells; without prefix caching only until a request is given
    a slot (``--cache-idle-slots``). If cells are lacking when no idle slot keeps any, the run ends with an error: the server would compute smaller
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
        self._tokens = pool.token_runs
        return CellMemory(pool.num_blocks, pool.ids, caches=pool.token_runs is not None)

    def _give_slot(self, slot: int, transaction: CellTransaction) -> None:
        transaction.give_slot(slot)

    def _kept_tokens(self, slot: int, transaction: CellTransaction) -> int:
        return transaction.kept_tokens(slot)

    def _take(self, sequence: Sequence, slot: int, found: int, transaction: CellTransaction) -> None:
        transaction.begin(sequence, slot, found)

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
