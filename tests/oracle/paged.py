"""vLLM as in the SOSP'23 paper: paged, blocks on demand, three phases a step. Groups of one sequence."""

from __future__ import annotations

from math import ceil

from .decode_step import System, Work, cost_arguments
from .model import Limits, Pool, Sequence
from .slots import FREE, SlotMap, classify_slot


class Paged(System):
    """Phase 1 keeps the running going, phase 2 swaps in, phase 3 admits."""

    def __init__(self, pool: Pool, limits: Limits) -> None:
        super().__init__()
        self.pool = pool
        self.limits = limits
        self.max_num_seqs = 2048 if limits.max_num_seqs is None else limits.max_num_seqs
        self.watermark_blocks = int(limits.watermark_fraction * pool.num_blocks)
        self.swapped: list[Sequence] = []
        self.free = list(range(pool.num_blocks))
        self.tables: dict[Sequence, list[int]] = {}
        self.host_free = list(range(pool.host_blocks))
        self.host_tables: dict[Sequence, list[int]] = {}
        self.work = Work()

    def refusal(self, sequence: Sequence) -> str | None:
        # The last output token's KV is never computed, so it never needs a slot.
        blocks = ceil((sequence.final_tokens - 1) / self.pool.block_size)
        if blocks > self.pool.num_blocks:
            return f"needs {blocks} blocks of a pool of {self.pool.num_blocks}"
        return None

    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.swapped)

    def schedule(self) -> Work:
        self.work = Work()
        self._keep_running()
        if not self.work.swapped_out:
            self._swap_in()
        if not self.swapped:
            self._admit()
        self.work.running = list(self.running)
        self.work.cost_arguments = cost_arguments(self.work.running, self.work.prefilled)
        return self.work

    def _keep_running(self) -> None:
        """Phase 1: in arrival order, a free block a sequence or the last arrival goes, whether one is needed or not."""
        queue = sorted(self.running, key=lambda sequence: sequence.arrival_order)
        self.running = []
        while queue:
            sequence = queue.pop(0)
            while len(self.free) < 1 and queue:
                self._preempt(queue.pop())
            if len(self.free) < 1:
                self._preempt(sequence)
            else:
                self._append_slot(sequence)
                self.running.append(sequence)

    def _swap_in(self) -> None:
        """Phase 2: first come first served, its blocks and one for the slot that it appends."""
        while self.swapped:
            sequence = self.swapped[0]
            need = len(self.host_tables[sequence]) + 1
            watermark_blocks = self.watermark_blocks if self.running else 0
            if len(self.free) - need >= watermark_blocks:
                self._bring_back(self.swapped.pop(0))
            else:
                break

    def _admit(self) -> None:
        """Phase 3: first come first served; a sequence admitted while nothing runs need not keep the watermark."""
        batched_tokens = len(self.running)
        while self.waiting:
            sequence = self.waiting[0]
            prompt_tokens = sequence.computed_tokens
            blocks = ceil(prompt_tokens / self.pool.block_size)
            if sequence in self.work.preempted:
                break
            watermark_blocks = self.watermark_blocks if self.running else 0
            if len(self.free) - blocks < watermark_blocks:
                break
            if self.running and batched_tokens + prompt_tokens > self.limits.max_num_batched_tokens:
                break
            if len(self.running) + 1 > self.max_num_seqs:
                break
            self.tables[sequence] = []
            self._append_slot(sequence)
            batched_tokens += prompt_tokens
            self.work.prefilled.append((sequence, prompt_tokens))
            self.running.append(self.waiting.pop(0))

    def _append_slot(self, sequence: Sequence) -> None:
        """Let the table reach to the tokens computed in this step."""
        table = self.tables[sequence]
        while len(table) * self.pool.block_size < sequence.computed_tokens:
            table.append(self.free.pop())

    def _preempt(self, victim: Sequence) -> None:
        victim.preemptions += 1
        self.work.preempted.append(victim)
        table = self.tables.pop(victim)
        self.free.extend(table)
        # Only a sequence that can come back is swapped out: with its blocks and one more.
        returns = len(table) < self.pool.num_blocks
        if self.limits.preemption_mode == "swap" and returns and len(table) <= len(self.host_free):
            self.host_tables[victim] = [self.host_free.pop() for _ in table]
            self.work.swapped_out.append(victim)
            self.work.swapped_out_blocks += len(table)
            self.swapped.append(victim)
            self.swapped.sort(key=lambda sequence: sequence.arrival_order)
        else:
            self._requeue(victim)

    def _requeue(self, sequence: Sequence) -> None:
        """Back to waiting, in arrival order; its prompt is now prompt and generated tokens."""
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda waiting: waiting.arrival_order)

    def _bring_back(self, sequence: Sequence) -> None:
        host_table = self.host_tables.pop(sequence)
        self.tables[sequence] = [self.free.pop() for _ in host_table]
        self.host_free.extend(host_table)
        self.work.swapped_in.append(sequence)
        self.work.swapped_in_blocks += len(host_table)
        self._append_slot(sequence)
        self.running.append(sequence)

    def release(self, sequence: Sequence) -> None:
        self.free.extend(self.tables.pop(sequence))

    def buckets(self) -> dict[str, int]:
        on_host = sum(len(table) for table in self.host_tables.values())
        if on_host + len(self.host_free) != self.pool.host_blocks:
            raise AssertionError(f"{on_host} blocks held and {len(self.host_free)} free of {self.pool.host_blocks}")
        block_size = self.pool.block_size
        slot_map = SlotMap(self.pool.slots)
        for sequence, table in self.tables.items():
            for i in range(len(table) * block_size):
                computed_tokens, end = sequence.computed_tokens, len(table) * block_size
                bucket = classify_slot(i, computed_tokens, sequence.final_tokens, computed_tokens, end)
                slot_map.put(table[i // block_size] * block_size + i % block_size, bucket)
        for block in self.free:
            for offset in range(block_size):
                slot_map.put(block * block_size + offset, FREE)
        return slot_map.census()
