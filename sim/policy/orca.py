"""Orca: iteration-level scheduling over contiguous reservations."""

from __future__ import annotations

import numpy as np

from ..memory.contiguous import ContiguousTransaction
from ..sequence import CARRY_ON, Plan, Sequence
from ..state import State
from ..workload import Workload
from .base import Limits, blocks_of


class OrcaPaper:
    """Orca as its own paper has it (OSDI'22, Algorithm 1).

    First come first served, prompts and decodes in the same iteration. A request reserves the room
    of its prompt and its own ``max_tokens``, counted in slots and not rounded; it is admitted while
    the reservations fit the slots. The first that does not fit holds up those behind it. Nobody is
    preempted.
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
        if not state.waiting:
            return CARRY_ON
        admitted: list[Sequence] = []
        # Each running sequence computes one token.
        running = tokens = state.width
        steady, wakes = True, False
        for sequence in state.waiting:
            reserved = self.reserved_tokens(sequence)
            if not transaction.has_room(reserved):
                transaction.refuse(reserved)
                break
            if running == self.limits.max_num_seqs:
                break
            # A prompt that alone exceeds the budget runs when nothing else is in the step.
            if running and tokens + sequence.start_tokens > self.limits.max_num_batched_tokens:
                # Those admitted now cost only a token in the next step; else nothing changes until a finish.
                steady = not admitted
                break
            transaction.reserve(reserved)
            running += 1
            tokens += sequence.start_tokens
            admitted.append(sequence)
        else:
            wakes = True
        prefill = tokens - state.width
        return Plan(tuple(admitted), prefill, steady=steady, wakes=wakes)

    def horizon(self, state: State, memory: object, limit: int) -> int:
        return limit

    def reserved_by_request(self, workload: Workload) -> np.ndarray:
        """``reserved_tokens`` of every request, int64 [n]."""
        outputs = self.limits.max_model_len if workload.max_tokens is None else workload.max_tokens
        return np.minimum(workload.prompt_tokens + outputs, self.limits.max_model_len)

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        return blocks_of(self.reserved_by_request(workload), block_size)


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
        return _next_power_of_two(super().smallest_pool_blocks(workload, block_size))


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
