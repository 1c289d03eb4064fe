"""vLLM 0.2 to 0.6: a step that admits sequences prefills them alone, and all running ones wait for it.

Otherwise all running sequences decode, the last arrivals making room for the first; then the swapped come back. None is
admitted while one is swapped out.
"""

from __future__ import annotations

from .iteration import IterationSystem, known
from .model import Limits, Pool, Sequence


class VllmV0(IterationSystem):
    """Prefills before decodes, never both; whole prompts, blocks on demand, recompute or swap."""

    def __init__(self, pool: Pool, limits: Limits) -> None:
        super().__init__(pool, limits)
        self.swapped: list[Sequence] = []
        self.host_free = list(range(pool.host_blocks))
        self.host_tables: dict[Sequence, list[int]] = {}

    def has_work(self) -> bool:
        return super().has_work() or bool(self.swapped)

    def decide(self) -> None:
        if not self.swapped:
            self._prefill()
        if not self.computes:
            self._decode()
            if not self.work.preempted:
                self._swap_in()

    def _prefill(self) -> None:
        """Waiting sequences, first come first served, whatever that leaves to the decodes of later steps."""
        prompt_tokens = 0
        while self.waiting and len(self.running) < self.max_num_seqs:
            tokens = known(self.waiting[0])
            prompt_tokens += tokens
            # The first of a step goes, however long; with it no other.
            if self.computes and prompt_tokens > self.limits.max_num_batched_tokens:
                break
            if len(self.free) - self.blocks_for(tokens) < self.watermark_blocks():
                break
            self.admit(tokens)

    def _decode(self) -> None:
        """In arrival order, a free block a sequence or the last arrival goes, whether one is needed or not."""
        queue = sorted(self.running, key=lambda sequence: sequence.arrival_order)
        while queue:
            sequence = queue.pop(0)
            while not self.free and queue:
                self.preempt(queue.pop())
            if self.free:
                self.compute(sequence, 1)
            else:
                self.preempt(sequence)

    def preempt(self, victim: Sequence) -> None:
        """To the host where it has room and the victim can come back, with its blocks and one more."""
        blocks = len(self.tables[victim])
        returns = blocks < self.pool.num_blocks
        if self.limits.preemption_mode == "swap" and returns and blocks <= len(self.host_free):
            self._swap_out(victim)
        else:
            super().preempt(victim)

    def _swap_out(self, victim: Sequence) -> None:
        """Its blocks change owner now; what it computed and generated stays."""
        self.stop(victim)
        table = self.tables.pop(victim)
        self.free.extend(table)
        self.host_tables[victim] = [self.host_free.pop() for _ in table]
        self.work.swapped_out.append(victim)
        self.work.swapped_out_blocks += len(table)
        self.swapped.append(victim)
        self.swapped.sort(key=lambda sequence: sequence.arrival_order)

    def _swap_in(self) -> None:
        """First come first served, and each decodes in this same step."""
        while self.swapped:
            need = len(self.host_tables[self.swapped[0]]) + 1
            if len(self.free) - need < self.watermark_blocks():
                break
            self._bring_back(self.swapped.pop(0))

    def _bring_back(self, sequence: Sequence) -> None:
        host_table = self.host_tables.pop(sequence)
        self.host_free.extend(host_table)
        self.tables[sequence] = [self.free.pop() for _ in host_table]
        self.work.swapped_in.append(sequence)
        self.work.swapped_in_blocks += len(host_table)
        self.running.append(sequence)
        self.compute(sequence, 1)

    def buckets(self) -> dict[str, int]:
        on_host = sum(len(table) for table in self.host_tables.values())
        if on_host + len(self.host_free) != self.pool.host_blocks:
            raise AssertionError(f"{on_host} blocks held and {len(self.host_free)} free of {self.pool.host_blocks}")
        return super().buckets()
