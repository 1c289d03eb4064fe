"""Orca: iteration-level first come first served, no preemption, all memory taken at admission.

``BuddyOrca`` is Orca as the SOSP'23 paper runs it, a buddy chunk a sequence; ``CountedOrca`` as its own paper has it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from .buddy import BuddyArena
from .decode_step import System, Work, cost_arguments
from .model import Limits, Pool, Request, Sequence, allowed_output_tokens
from .slots import FREE, STRANDED, SlotMap, census, classify_slot


def estimate_max(request: Request, limits: Limits) -> int:
    """Output tokens to expect: as many as the model can hold."""
    return limits.max_model_len


def estimate_pow2(request: Request, limits: Limits) -> int:
    """Output tokens to expect: the true output, up to a power of two."""
    return 1 << (request.output_tokens - 1).bit_length()


def estimate_oracle(request: Request, limits: Limits) -> int:
    """Output tokens to expect: the true output."""
    return request.output_tokens


class _IterationLevel(System):
    """The scheduler that both share; a subclass says what memory a sequence takes."""

    def __init__(self, pool: Pool, limits: Limits) -> None:
        super().__init__()
        self.pool = pool
        self.limits = limits
        self.max_num_seqs = 256 if limits.max_num_seqs is None else limits.max_num_seqs
        self.blocked_head: Sequence | None = None

    def fits(self, sequence: Sequence) -> bool:
        """Whether there is memory for the sequence now."""
        raise NotImplementedError

    def allocate(self, sequence: Sequence) -> None:
        """Take the memory of a sequence that fits."""
        raise NotImplementedError

    def schedule(self) -> Work:
        work = Work()
        self.blocked_head = None
        batched_tokens = len(self.running)
        while self.waiting:
            sequence = self.waiting[0]
            prompt_tokens = sequence.request.prompt_tokens
            # Memory is asked first: a head without room is blocked by memory, whatever else would stop it.
            if not self.fits(sequence):
                self.blocked_head = sequence
                break
            if self.running and batched_tokens + prompt_tokens > self.limits.max_num_batched_tokens:
                break
            if len(self.running) + 1 > self.max_num_seqs:
                break
            self.allocate(sequence)
            batched_tokens += prompt_tokens
            work.prefilled.append((sequence, prompt_tokens))
            self.running.append(self.waiting.pop(0))
        work.running = list(self.running)
        work.cost_arguments = cost_arguments(work.running, work.prefilled)
        return work


class BuddyOrca(_IterationLevel):
    """One buddy chunk a sequence, for its prompt and the output that ``estimate_tokens`` expects."""

    def __init__(self, pool: Pool, limits: Limits, estimate_tokens: Callable[[Request, Limits], int]) -> None:
        super().__init__(pool, limits)
        self.estimate_tokens = estimate_tokens
        self.arena = BuddyArena(pool.num_blocks)
        self.chunks: dict[Sequence, tuple[int, int]] = {}

    def requested_tokens(self, sequence: Sequence) -> int:
        """R: the length asked of the allocator."""
        expected = sequence.request.prompt_tokens + self.estimate_tokens(sequence.request, self.limits)
        return min(expected, self.limits.max_model_len)

    def chunk_blocks(self, sequence: Sequence) -> int:
        blocks = ceil(self.requested_tokens(sequence) / self.pool.block_size)
        return 1 << (blocks - 1).bit_length()

    def refusal(self, sequence: Sequence) -> str | None:
        blocks = self.chunk_blocks(sequence)
        if blocks > self.arena.largest_blocks:
            return f"needs a chunk of {blocks} blocks, the arena's largest is {self.arena.largest_blocks}"
        return None

    def fits(self, sequence: Sequence) -> bool:
        return any(blocks >= self.chunk_blocks(sequence) for _, blocks in self.arena.chunks())

    def allocate(self, sequence: Sequence) -> None:
        blocks = self.chunk_blocks(sequence)
        self.chunks[sequence] = (self.arena.allocate(blocks), blocks)

    def release(self, sequence: Sequence) -> None:
        self.arena.release(*self.chunks.pop(sequence))

    def free_chunks(self) -> tuple[tuple[int, int], ...]:
        return self.arena.chunks()

    def buckets(self) -> dict[str, int]:
        block_size = self.pool.block_size
        slot_map = SlotMap(self.pool.slots)
        for sequence, (start, blocks) in self.chunks.items():
            requested = self.requested_tokens(sequence)
            for i in range(blocks * block_size):
                bucket = classify_slot(i, sequence.computed_tokens, sequence.final_tokens, requested, requested)
                slot_map.put(start * block_size + i, bucket)
        needed_blocks = 0 if self.blocked_head is None else self.chunk_blocks(self.blocked_head)
        for start, blocks in self.arena.chunks():
            for slot in range(start * block_size, (start + blocks) * block_size):
                slot_map.put(slot, STRANDED if blocks < needed_blocks else FREE)
        return slot_map.census()


class CountedOrca(_IterationLevel):
    """Prompt and max_tokens reserved slot by slot, wherever they lie."""

    def requested_tokens(self, sequence: Sequence) -> int:
        """R: the slots reserved."""
        allowed = allowed_output_tokens(sequence.request, self.limits)
        return min(sequence.request.prompt_tokens + allowed, self.limits.max_model_len)

    def reserved_slots(self) -> int:
        return sum(self.requested_tokens(sequence) for sequence in self.running)

    def refusal(self, sequence: Sequence) -> str | None:
        slots = self.requested_tokens(sequence)
        return f"needs {slots} slots of a pool of {self.pool.slots}" if slots > self.pool.slots else None

    def fits(self, sequence: Sequence) -> bool:
        return self.reserved_slots() + self.requested_tokens(sequence) <= self.pool.slots

    def allocate(self, sequence: Sequence) -> None:
        """Nothing to take: what the running reserve is summed up afresh each time."""

    def release(self, sequence: Sequence) -> None:
        """Nothing to give back, for the same reason."""

    def buckets(self) -> dict[str, int]:
        slots = [FREE] * (self.pool.slots - self.reserved_slots())
        for sequence in self.running:
            requested = self.requested_tokens(sequence)
            for i in range(requested):
                slots.append(classify_slot(i, sequence.computed_tokens, sequence.final_tokens, requested, requested))
        return census(slots)
