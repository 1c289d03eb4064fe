"""Orca: iteration-level scheduling over contiguous reservations."""

from __future__ import annotations

import numpy as np

from ..memory.contiguous.contiguous import ContiguousMemory, ContiguousTransaction
from ..types.sequence import CARRY_ON, Plan, Sequence
from ..types.state import State
from ..workload.groups import seats
from ..workload.workload import Workload
from .base import Limits, blocks_of


class OrcaPaper:
    """Orca as its own paper has it (OSDI'22, Algorithm 1).

    First come first served, prompts and decodes in the same iteration. A request reserves the room
    of its prompt and its own ``max_tokens``, counted in slots and not rounded; it is admitted while
    the reservations fit the slots. The first that does not fit holds up those behind it. Nobody is
    preempted. A request of several sequences reserves for each of them, and seats them all; they begin in
    the step after the prompt's, with copies of it.
    """

    name = "orca"
    leaves_together = False
    preempted_first = False
    default_max_num_seqs = 256
    default_max_num_batched_tokens = 2560

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def reserved_tokens(self, sequence: Sequence) -> int:
        """Tokens that the sequence reserves (R in the ledger's definitions)."""
        return min(sequence.prompt_tokens + sequence.max_tokens, self.limits.max_model_len)

    def schedule(self, state: State, transaction: ContiguousTransaction) -> Plan:
        """The head of the queue and those behind it, up to the first that does not fit."""
        forked = tuple(sibling for group in state.forking for sibling in group.siblings)
        if not (state.waiting or forked or transaction.memory.searches):
            return CARRY_ON
        admitted: list[Sequence] = []
        # Each running sequence computes one token.
        decodes = running = tokens = state.width + len(forked)
        steady, wakes = True, False
        for sequence in state.waiting:
            reserved, num_seqs = self.reserved_tokens(sequence), seats(sequence)
            transaction.memory.look_up(sequence, state.clock)
            if not transaction.fits(sequence, reserved, num_seqs):
                transaction.refuse(reserved)
                steady = steady and not transaction.memory.ripens(sequence, state.clock)
                break
            prefill = sequence.start_tokens - sequence.computed_tokens
            if running and running + num_seqs > self.limits.max_num_seqs:
                break
            # A prompt that alone exceeds the budget runs when nothing else is in the step.
            if running and tokens + prefill > self.limits.max_num_batched_tokens:
                # Those admitted now cost only a token in the next step; else nothing changes until a finish.
                steady = steady and not admitted and not transaction.memory.ripens(sequence, state.clock)
                break
            transaction.place(sequence, reserved, num_seqs)
            running += num_seqs
            tokens += prefill
            admitted.append(sequence)
            # Its siblings begin in the next step.
            steady = steady and num_seqs == 1
        else:
            wakes = True
        return Plan(tuple(admitted), tokens - decodes, steady=steady, wakes=wakes, forked=forked)

    def horizon(self, state: State, memory: ContiguousMemory, limit: int) -> int:
        """However long memory lasts; beams copy in every step."""
        return 1 if memory.searches else limit

    def reserved_by_request(self, workload: Workload) -> np.ndarray:
        """``reserved_tokens`` of every request, int64 [n]."""
        outputs = self.limits.max_model_len if workload.max_tokens is None else workload.max_tokens
        return np.minimum(workload.prompt_tokens + outputs, self.limits.max_model_len)

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        return blocks_of(self.reserved_by_request(workload), block_size) * workload.num_sequences


class OrcaMax(OrcaPaper):
    """Orca (Max) of the SOSP'23 paper: every request reserves the model's maximum length.

    As its artifact runs it: chunks of a buddy allocator, in blocks rounded up to a power of two; at
    most 256 running and 2,560 tokens an iteration; no watermark, no preemption.
    """

    name = "orca-max"

    def estimated_output(self, output_tokens: np.ndarray) -> np.ndarray:
        """Output length that the reservation is made for, elementwise on the true one."""
        return np.full_like(output_tokens, self.limits.max_model_len)

    def reserved_tokens(self, sequence: Sequence) -> int:
        estimate = int(self.estimated_output(np.asarray(sequence.output_tokens)))
        return min(sequence.prompt_tokens + estimate, self.limits.max_model_len)

    def reserved_by_request(self, workload: Workload) -> np.ndarray:
        estimate = self.estimated_output(workload.output_tokens)
        return np.minimum(workload.prompt_tokens + estimate, self.limits.max_model_len)

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        piece = _next_power_of_two(blocks_of(self.reserved_by_request(workload), block_size))
        return piece * workload.num_sequences


class OrcaPow2(OrcaMax):
    """Orca (Pow2): as Orca (Max), reserving for the next power of two of the true output."""

    name = "orca-pow2"

    def estimated_output(self, output_tokens: np.ndarray) -> np.ndarray:
        return _next_power_of_two(output_tokens)


class OrcaOracle(OrcaMax):
    """Orca (Oracle): as Orca (Max), reserving for the true output, which no server knows."""

    name = "orca-oracle"

    def estimated_output(self, output_tokens: np.ndarray) -> np.ndarray:
        return output_tokens


def _next_power_of_two(values: np.ndarray) -> np.ndarray:
    """Least power of two that is at least each value; float64 is exact for what fits in memory."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.left_shift(1, exponent - (mantissa == 0.5)).astype(np.int64)
