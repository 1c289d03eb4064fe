"""What every policy is: a decision for one step, and how long the decision holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..types.errors import SettingError
from ..types.sequence import Plan
from ..types.state import State
from ..workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler may put into one step; the names are vLLM's.

    Attributes:
        max_model_len: Longest prompt + output in tokens.
        max_num_seqs: Most sequences running at once; in static batching the batch size.
        max_num_batched_tokens: Most tokens computed in a step, a decode counting 1.
        watermark_blocks: Blocks that an admission must leave free.
        preemption_mode: "recompute" or "swap".
        waiting_served_ratio, max_waiting_tokens: When TGI takes a new batch.
        output_estimate: Share of ``max_tokens`` that LightLLM takes an output to have.
        schedule_policy: Order of SGLang's queue, "lpm" or "fcfs".
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark_blocks: int = 0
    preemption_mode: str = "recompute"
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    output_estimate: float = 1.0
    schedule_policy: str = "lpm"

    def __post_init__(self) -> None:
        for field in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, field) < 1:
                raise SettingError(field, getattr(self, field), "must be at least 1")
        if self.preemption_mode not in ("recompute", "swap"):
            raise SettingError("preemption_mode", self.preemption_mode, "one of recompute, swap")


class Policy(Protocol):
    """Decides who runs; moves neither blocks nor time.

    Attributes:
        name: As on the command line.
        leaves_together: Whether sequences leave when the last of their batch is done.
        preempted_first: Whether a preempted sequence goes to the front of those who wait, and not to its
            place by arrival.
        default_max_num_seqs, default_max_num_batched_tokens: Limits where the user names none.
    """

    name: str
    leaves_together: bool
    preempted_first: bool
    default_max_num_seqs: int | None
    default_max_num_batched_tokens: int

    def schedule(self, state: State, transaction: Any) -> Plan:
        """The plan of the next step. Grants are made in ``transaction``, queues are only read."""

    def horizon(self, state: State, memory: Any, limit: int) -> int:
        """Steps, this one included and at most ``limit``, in which the policy decides nothing new.

        Asked after the plan has been carried out and only of steady plans. The engine sees to
        finishes and arrivals itself; the policy answers for what memory does in between.
        """

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        """Blocks, int64 [n], of the smallest pool that can ever serve each request."""


def blocks_of(tokens: np.ndarray, block_size: int) -> np.ndarray:
    """Blocks that hold ``tokens``, elementwise."""
    return -(-tokens // block_size)
