"""Orca: iteration-level scheduling over contiguous reservations."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import numpy as np

from ..memory.contiguous.arena import Arena, arena
from ..memory.contiguous.contiguous import ContiguousMemory, ContiguousTransaction
from ..memory.contiguous.dialogue_copies import DialogueContiguousMemory
from ..types.sequence import CARRY_ON, Sequence, StepPlan, num_seqs_of
from ..types.state import State
from ..workload.workload import Workload
from .base import Policy, Source, blocks_of
from .options import ArenaOptions, BeamOptions, Options
from .server import Pool


class OrcaPaper(Policy[ContiguousMemory, ContiguousTransaction]):
    """Orca as in its own paper (OSDI'22, Algorithm 1).

    First come, first served; prompts and decodes in the same iteration. A request reserves slots for its prompt and its
    ``max_tokens``, without rounding, and is admitted if they are free. The first request that does not fit blocks the
    requests behind it. No sequence is preempted. A request of several sequences reserves slots for each, and each counts
    towards ``max_num_seqs``; the siblings start in the step after the prefill, with copies of the prompt.
    """

    name = "orca"
    source = Source("OSDI'22, Algorithm 1", "paper")
    system = "Orca, OSDI'22"
    options_type: ClassVar[type[Options]] = BeamOptions
    reads_max_tokens = True
    groups_sequences = True
    default_max_num_batched_tokens = 2560

    def memory(self, pool: Pool) -> ContiguousMemory:
        size = pool.num_blocks, pool.block_size
        if pool.dialogue is not None:
            return DialogueContiguousMemory(*size, pool.dialogue, self.arena(pool))
        return ContiguousMemory(*size, self.arena(pool))

    def arena(self, pool: Pool) -> Arena | None:
        """The arena that places reservations; None if slots are only counted."""
        return None

    def reserved_tokens(self, sequence: Sequence) -> int:
        """Tokens that the sequence reserves (R in the ledger's definitions)."""
        return min(sequence.prompt_tokens + sequence.max_tokens, self.limits.max_model_len)

    def schedule(self, state: State, transaction: ContiguousTransaction) -> StepPlan:
        """Admits from the head of the queue up to the first request that does not fit."""
        forked = tuple(sibling for group in state.forking for sibling in group.siblings)
        if not (state.waiting or forked or transaction.memory.searches):
            return CARRY_ON
        admitted: list[Sequence] = []
        # Each running sequence computes one token.
        decodes = running = tokens = state.batch_size + len(forked)
        valid_until_horizon, stops_at_arrival = True, False
        for sequence in state.waiting:
            reserved, num_seqs = self.reserved_tokens(sequence), num_seqs_of(sequence)
            transaction.memory.look_up(sequence, state.decode_step)
            if not transaction.fits(sequence, reserved, num_seqs):
                transaction.refuse(reserved)
                valid_until_horizon = valid_until_horizon and not transaction.memory.may_grow(
                    sequence, state.decode_step
                )
                break
            prefill = sequence.start_tokens - sequence.computed_tokens
            if running and running + num_seqs > self.limits.max_num_seqs:
                break
            # A prompt that alone exceeds the budget runs when nothing else is in the step.
            if running and tokens + prefill > self.limits.max_num_batched_tokens:
                # Sequences admitted now cost one token each in the next step; otherwise nothing changes until a finish.
                settled = not admitted and not transaction.memory.may_grow(sequence, state.decode_step)
                valid_until_horizon = valid_until_horizon and settled
                break
            transaction.place(sequence, reserved, num_seqs)
            running += num_seqs
            tokens += prefill
            admitted.append(sequence)
            # Its siblings begin in the next step.
            valid_until_horizon = valid_until_horizon and num_seqs == 1
        else:
            stops_at_arrival = True
        return StepPlan(
            admitted=tuple(admitted),
            prefill_tokens=tokens - decodes,
            valid_until_horizon=valid_until_horizon,
            stops_at_arrival=stops_at_arrival,
            forked=forked,
        )

    def horizon(self, state: State, memory: ContiguousMemory, limit: int) -> int:
        """Memory never runs out while the admitted sequences run. Beams copy in every step."""
        return 1 if memory.searches else limit

    def reserved_by_request(self, workload: Workload) -> np.ndarray:
        """``reserved_tokens`` of every request, int64 [n]."""
        outputs = self.limits.max_model_len if workload.max_tokens is None else workload.max_tokens
        return np.minimum(workload.prompt_tokens + outputs, self.limits.max_model_len)

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        return blocks_of(self.reserved_by_request(workload), block_size) * workload.num_sequences


class OrcaMax(OrcaPaper):
    """Orca (Max) of the SOSP'23 paper: every request reserves the model's maximum length.

    As in its artifact: chunks of a buddy allocator, in blocks rounded up to a power of two; at most 256 running
    sequences and 2,560 tokens per iteration; no watermark, no preemption.
    """

    name = "orca-max"
    source = Source("SOSP'23, its artifact", "paper, source")
    system = "Orca (Max), SOSP'23"
    options_type = ArenaOptions
    options: ArenaOptions
    reads_max_tokens = False

    def arena(self, pool: Pool) -> Arena:
        return arena(self.options.arena, pool.num_blocks, -(-pool.max_model_len // pool.block_size))

    def estimated_output(self, output_tokens: np.ndarray) -> np.ndarray:
        """Output length of the reservation, elementwise from the true output length."""
        return np.full_like(output_tokens, self.limits.max_model_len)

    @cached_property
    def _estimates(self) -> dict[int, int]:
        """Estimates so far, by true output length."""
        return {}

    def reserved_tokens(self, sequence: Sequence) -> int:
        estimate = self._estimates.get(sequence.output_tokens)
        if estimate is None:
            estimate = int(self.estimated_output(np.asarray(sequence.output_tokens)))
            self._estimates[sequence.output_tokens] = estimate
        return min(sequence.prompt_tokens + estimate, self.limits.max_model_len)

    def reserved_by_request(self, workload: Workload) -> np.ndarray:
        estimate = self.estimated_output(workload.output_tokens)
        return np.minimum(workload.prompt_tokens + estimate, self.limits.max_model_len)

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        if self.options.arena != "buddy":
            return super().smallest_pool_blocks(workload, block_size)
        piece = _next_power_of_two(blocks_of(self.reserved_by_request(workload), block_size))
        return piece * workload.num_sequences


class OrcaPow2(OrcaMax):
    """Orca (Pow2): as Orca (Max), reserving for the next power of two of the true output."""

    name = "orca-pow2"
    source = Source("SOSP'23, its artifact", "paper, source")
    system = "Orca (Pow2), SOSP'23"

    def estimated_output(self, output_tokens: np.ndarray) -> np.ndarray:
        return _next_power_of_two(output_tokens)


class OrcaOracle(OrcaMax):
    """Orca (Oracle): as Orca (Max), reserving for the true output, which no real server knows."""

    name = "orca-oracle"
    source = Source("SOSP'23, its artifact", "paper, source")
    system = "Orca (Oracle), SOSP'23"

    def estimated_output(self, output_tokens: np.ndarray) -> np.ndarray:
        return output_tokens


def _next_power_of_two(values: np.ndarray) -> np.ndarray:
    """Least power of two that is at least each value; float64 is exact for what fits in memory."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.left_shift(1, exponent - (mantissa == 0.5)).astype(np.int64)
