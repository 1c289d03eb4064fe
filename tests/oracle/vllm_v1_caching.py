"""vLLM V1 with prefix caching, from the rule as docs/policies.md states it.

A block that is full has a name: all tokens of its sequence up to its end. An admitted sequence takes over the blocks
that are named as its own tokens are, first to last, until one is missing; never its last token. Blocks in no table lie
in a queue: taken from its head, which ends their name, given back to its tail, the end of a table first; without a name
to its head, the end of the table in front.
"""

from __future__ import annotations

from collections import defaultdict

from .iteration import known
from .model import Limits, Pool, Sequence
from .slots import BUCKETS, CACHED, FREE, SlotMap, classify_slot
from .vllm_v1 import VllmV1


def text(sequence: Sequence) -> tuple:
    """Its tokens, prompt and output."""
    return sequence.request.prompt_ids + sequence.request.output_ids


class CachingVllmV1(VllmV1):
    """As ``VllmV1``; ``Request.prompt_ids`` and ``output_ids`` are the tokens.

    ``named`` maps a block to its name, the block named first coming first. ``look_ups`` has the request, the tokens
    that it knows and those that it finds, of every admission.
    """

    def __init__(self, pool: Pool, limits: Limits) -> None:
        super().__init__(pool, limits)
        self.named: dict[int, tuple] = {}
        self.look_ups: list[tuple[int, int, int]] = []
        self.evicted = 0

    def find(self, sequence: Sequence) -> list[int]:
        size, found = self.pool.block_size, []
        for end in range(size, known(sequence), size):
            same = [block for block, name in self.named.items() if name == text(sequence)[:end]]
            if not same:
                break
            found.append(same[0])
        return found

    def grow(self, sequence: Sequence, tokens: int) -> None:
        for _ in range(self.blocks_missing(sequence, tokens)):
            block = self.free.pop(0)
            if self.named.pop(block, None) is not None:
                self.evicted += 1
            self.tables[sequence].append(block)

    def compute(self, sequence: Sequence, tokens: int) -> None:
        super().compute(sequence, tokens)
        size = self.pool.block_size
        for place in range(self.computed_now(sequence) // size):
            self.named.setdefault(self.tables[sequence][place], text(sequence)[: (place + 1) * size])

    def release(self, sequence: Sequence) -> None:
        table = self.tables.pop(sequence)
        freed = [block for block in reversed(table) if not any(block in other for other in self.tables.values())]
        unnamed = [block for block in freed if block not in self.named]
        self.free = unnamed + self.free + [block for block in freed if block in self.named]
        del self.computed[sequence]
        self.decoding.discard(sequence)

    def _admit(self, budget: int) -> None:
        size = self.pool.block_size
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            found = self.find(sequence)
            in_tables = [block for block in found if block not in self.free]
            if self.blocks_for(known(sequence)) - len(in_tables) + self.kept_free > len(self.free):
                break
            self.waiting.pop(0)
            self.running.append(sequence)
            self.tables[sequence] = found
            self.computed[sequence] = len(found) * size
            self.free = [block for block in self.free if block not in found]
            self.look_ups.append((sequence.index, known(sequence), len(found) * size))
            tokens = min(known(sequence) - self.computed[sequence], budget)
            self.compute(sequence, tokens)
            budget -= tokens

    def buckets(self) -> dict[str, int]:
        """A shared slot takes the earliest class that any table gives it; what is free and named is cached."""
        size = self.pool.block_size
        classes: dict[int, list[str]] = defaultdict(list)
        for sequence, table in self.tables.items():
            computed, end = self.computed_now(sequence), len(table) * size
            for i in range(end):
                bucket = classify_slot(i, computed, sequence.final_tokens, computed, end)
                classes[table[i // size] * size + i % size].append(bucket)
        slots = SlotMap(self.pool.slots)
        for slot, given in classes.items():
            slots.put(slot, min(given, key=BUCKETS.index))
        for block in self.free:
            for slot in range(block * size, (block + 1) * size):
                slots.put(slot, CACHED if block in self.named else FREE)
        return slots.census()
