"""What the schedulers share that decide, step by step, how many tokens each sequence computes.

A sequence knows its prompt and what it generated; of these tokens some are computed and have their KV. A schedule says
how many more each computes in this step. After it a sequence that has computed all it knows yields one token, which it
then knows but has not computed: a prefill of p tokens yields the first, every decode of one token another, and the KV
of the last is never computed. A sequence is in its prefill from its admission to its next token, however many steps
that takes, and decodes after it. Recompute takes all blocks and what was computed; what was generated stays known.

Tables hold real block ids and reach to what is computed; a census classifies every slot of every table.
"""

from __future__ import annotations

from math import ceil

from .decode_step import System, Work
from .model import Limits, Pool, Sequence
from .slots import FREE, SlotMap, classify_slot


def known(sequence: Sequence) -> int:
    """Tokens of the prompt and tokens generated."""
    return sequence.request.prompt_tokens + sequence.generated


def pairs(start: int, end: int) -> int:
    """Tokens paired with those before them and themselves, over the tokens from ``start`` to before ``end``."""
    return end * (end + 1) // 2 - start * (start + 1) // 2


class IterationSystem(System):
    """``running`` is in order of admission. ``computed`` counts tokens before this step, ``computes`` those of it."""

    def __init__(self, pool: Pool, limits: Limits) -> None:
        super().__init__()
        self.pool = pool
        self.limits = limits
        self.max_num_seqs = 256 if limits.max_num_seqs is None else limits.max_num_seqs
        self.free = list(range(pool.num_blocks))
        self.tables: dict[Sequence, list[int]] = {}
        self.computed: dict[Sequence, int] = {}
        self.computes: dict[Sequence, int] = {}
        self.decoding: set[Sequence] = set()
        self.work = Work()

    def decide(self) -> None:
        """Preempt, compute and admit."""
        raise NotImplementedError

    def largest_tokens(self, sequence: Sequence) -> int:
        """Tokens that the empty pool must hold for the sequence; its last one is never computed."""
        return sequence.final_tokens - 1

    def computed_now(self, sequence: Sequence) -> int:
        """Tokens computed, those of this step included."""
        return self.computed[sequence] + self.computes.get(sequence, 0)

    def requested_tokens(self, sequence: Sequence) -> int:
        """R: the length asked of the allocator, on demand what is computed."""
        return self.computed_now(sequence)

    def refusal(self, sequence: Sequence) -> str | None:
        blocks = self.blocks_for(self.largest_tokens(sequence))
        if blocks > self.pool.num_blocks:
            return f"needs {blocks} blocks of a pool of {self.pool.num_blocks}"
        return None

    def blocks_for(self, tokens: int) -> int:
        return ceil(tokens / self.pool.block_size)

    def blocks_missing(self, sequence: Sequence, tokens: int) -> int:
        """Blocks to take until the sequence can hold so many tokens in all."""
        return max(0, self.blocks_for(tokens) - len(self.tables[sequence]))

    def watermark_blocks(self) -> int:
        """Blocks that an admission must leave free; none while nothing runs."""
        return int(self.limits.watermark_fraction * self.pool.num_blocks) if self.running else 0

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Let the table reach to so many tokens; the blocks are known to be free."""
        for _ in range(self.blocks_missing(sequence, tokens)):
            self.tables[sequence].append(self.free.pop())

    def compute(self, sequence: Sequence, tokens: int) -> None:
        """Let the sequence compute so many tokens in this step."""
        self.grow(sequence, self.computed[sequence] + tokens)
        self.computes[sequence] = tokens

    def admit(self, tokens: int) -> Sequence:
        """The first of the queue runs, and computes so many tokens in this step."""
        sequence = self.waiting.pop(0)
        self.tables[sequence] = []
        self.computed[sequence] = 0
        self.running.append(sequence)
        self.compute(sequence, tokens)
        return sequence

    def preempt(self, victim: Sequence) -> None:
        """Take all that it has, and put it at the front of the queue."""
        self.stop(victim)
        self.release(victim)
        self.waiting.insert(0, victim)

    def stop(self, victim: Sequence) -> None:
        """Off the device, for now."""
        if victim in self.computes:
            raise AssertionError(f"{victim.index} computes in this step and is preempted in it")
        victim.preemptions += 1
        self.work.preempted.append(victim)
        self.running.remove(victim)

    def make_room(self, sequence: Sequence, blocks: int) -> bool:
        """Preempt the last running until so many blocks are free; whether ``sequence`` still runs then."""
        while len(self.free) < blocks:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def release(self, sequence: Sequence) -> None:
        self.free.extend(self.tables.pop(sequence))
        del self.computed[sequence]
        self.decoding.discard(sequence)

    def schedule(self) -> Work:
        self.work, self.computes = Work(), {}
        self.decide()
        self.work.running = list(self.running) if self.computes else []
        self.work.paused = [s for s in self.running if s not in self.computes]
        self.work.decodes = [s for s in self.running if s in self.computes and s in self.decoding]
        prefills = [s for s in self.running if s in self.computes and s not in self.decoding]
        self.work.prefilled = [(s, self.computes[s]) for s in prefills]
        self.work.cost_arguments = (
            len(self.work.decodes),
            sum(self.computed_now(s) for s in self.work.decodes),
            sum(self.computes[s] for s in prefills),
            sum(pairs(self.computed[s], self.computed_now(s)) for s in prefills),
        )
        return self.work

    def complete(self, now_ticks: int) -> None:
        """The counts go up; a token for each that has computed all it knows, and those with all theirs leave."""
        for sequence, tokens in sorted(self.computes.items(), key=lambda item: item[0].index):
            self.computed[sequence] += tokens
            if self.computed[sequence] > known(sequence):
                raise AssertionError(f"{sequence.index} computed a token that it does not know yet")
            if self.computed[sequence] == known(sequence):
                sequence.add_token(now_ticks)
                self.decoding.add(sequence)
            if sequence.done:
                sequence.finish_ticks = now_ticks
                self.running.remove(sequence)
                self.release(sequence)

    def buckets(self) -> dict[str, int]:
        block_size = self.pool.block_size
        slot_map = SlotMap(self.pool.slots)
        for sequence, table in self.tables.items():
            computed, end = self.computed_now(sequence), len(table) * block_size
            if computed > end:
                raise AssertionError(f"{sequence.index} computed {computed} tokens and holds {end} slots")
            for i in range(end):
                bucket = classify_slot(i, computed, sequence.final_tokens, self.requested_tokens(sequence), end)
                slot_map.put(table[i // block_size] * block_size + i % block_size, bucket)
        for slot in (block * block_size + offset for block in self.free for offset in range(block_size)):
            slot_map.put(slot, FREE)
        return slot_map.census()
