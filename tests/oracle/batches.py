"""Static batches: all start together, padded to the longest prompt, and all leave when the longest output is done."""

from __future__ import annotations

from .decode_step import System, Work
from .model import Limits, Pool, Sequence, allowed_output_tokens
from .slots import FINISHED_HOLD, FREE, census, classify_slot


class StaticBatches(System):
    """Naive static batching; ``running`` is the batch, its ended members too."""

    def __init__(self, pool: Pool, limits: Limits) -> None:
        super().__init__()
        if limits.max_num_seqs is None:
            raise ValueError("max_num_seqs = None: a static batch needs its size")
        self.pool = pool
        self.limits = limits
        self.step_index = 0

    def refusal(self, sequence: Sequence) -> str | None:
        # Such a request can only ever be a lone head: with it no batch would fit.
        if sequence.final_tokens > self.pool.slots:
            return f"needs {sequence.final_tokens} slots of a pool of {self.pool.slots}"
        return None

    def wanted_slots(self, batch: list[Sequence]) -> int:
        """R: the slots that each member of ``batch`` should have; padding comes on top of the model's maximum."""
        allowed = max(allowed_output_tokens(sequence.request, self.limits) for sequence in batch)
        needed = longest_prompt(batch) + max(sequence.request.output_tokens for sequence in batch)
        return max(min(longest_prompt(batch) + allowed, self.limits.max_model_len), needed)

    def may_run_together(self, batch: list[Sequence]) -> bool:
        """Whether a batch may grow to this."""
        fits = len(batch) * self.wanted_slots(batch) <= self.pool.slots
        return fits and len(batch) <= self.limits.max_num_seqs

    def reserved_slots(self) -> int:
        """R as reserved: a lone head that wants more than the pool gets the pool."""
        return min(self.wanted_slots(self.running), self.pool.slots)

    def schedule(self) -> Work:
        if self.running:
            return self._decode()
        self.running = [self.waiting.pop(0)]
        while self.waiting and self.may_run_together([*self.running, self.waiting[0]]):
            self.running.append(self.waiting.pop(0))
        self.step_index = 0
        return self._prefill()

    def _prefill(self) -> Work:
        size, padded = len(self.running), longest_prompt(self.running)
        return Work(
            running=list(self.running),
            prefilled=[(sequence, padded) for sequence in self.running],
            cost_arguments=(0, 0, size * padded, size * (padded * (padded + 1) // 2)),
        )

    def _decode(self) -> Work:
        size = len(self.running)
        context = size * (longest_prompt(self.running) + self.step_index)
        return Work(running=list(self.running), cost_arguments=(size, context, 0, 0))

    def complete(self, now_ticks: int) -> None:
        """A token for each that is not done; when all are, all leave."""
        for sequence in self.running:
            if not sequence.done:
                sequence.add_token(now_ticks)
        self.step_index += 1
        if all(sequence.done for sequence in self.running):
            for sequence in self.running:
                sequence.finish_ticks = now_ticks
            self.running = []

    def buckets(self) -> dict[str, int]:
        reserved = self.reserved_slots()
        slots = [FREE] * (self.pool.slots - len(self.running) * reserved)
        for sequence in self.running:
            slots += self._member_slots(sequence, reserved)
        return census(slots)

    def _member_slots(self, sequence: Sequence, reserved: int) -> list[str]:
        if sequence.done:
            return [FINISHED_HOLD] * reserved
        padding = longest_prompt(self.running) - sequence.request.prompt_tokens
        own = reserved - padding
        return [FINISHED_HOLD] * padding + [
            classify_slot(i, sequence.computed_tokens, sequence.final_tokens, own, own) for i in range(own)
        ]


class FasterTransformer(StaticBatches):
    """As above, and a batch does not grow past a longest prompt and longest true output of ``ft_max_tokens``."""

    def may_run_together(self, batch: list[Sequence]) -> bool:
        longest_output = max(sequence.request.output_tokens for sequence in batch)
        together = longest_prompt(batch) + longest_output <= self.limits.ft_max_tokens
        return together and super().may_run_together(batch)


def longest_prompt(batch: list[Sequence]) -> int:
    """Tokens that every member of the batch is padded to."""
    return max(sequence.request.prompt_tokens for sequence in batch)
