"""The base class of policies. A policy schedules, and states for how many steps its decision stays valid.

A policy declares its name, its options, its default limits and the memory that it schedules over. ``registry`` finds
policies by name, those of other packages included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..memory import Memory
from ..memory.accounting.kv_groups import PageGroups
from ..spec import Deployment, GpuSpec, HybridLayout, ModelSpec, paper_num_blocks
from ..types.errors import SettingError
from ..types.sequence import StepPlan
from ..types.state import State
from ..workload.content import Tokens
from ..workload.dialogue import Dialogue
from ..workload.workload import Workload
from .options import Options


@dataclass(frozen=True, slots=True)
class Limits:
    """What a scheduler may put into one step; the names are vLLM's.

    Attributes:
        max_model_len: Longest prompt + output in tokens.
        max_num_seqs: Most sequences running at once; in static batching the batch size.
        max_num_batched_tokens: Most tokens computed in a step, a decode counting 1.
        watermark_blocks: Blocks that an admission must leave free.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark_blocks: int = 0

    def __post_init__(self) -> None:
        for field in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, field) < 1:
                raise SettingError(field, getattr(self, field), "must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Server:
    """The model and the GPUs that a policy serves with, from which the size of its pool follows.

    Attributes:
        model, gpu, deployment: Their specifications.
        tensor_parallel: GPUs that share the model and the pool.
        layout: KV groups of the model; None where all layers keep every token.
    """

    model: ModelSpec
    gpu: GpuSpec
    deployment: Deployment
    tensor_parallel: int = 1
    layout: HybridLayout | None = None

    def num_blocks(self, block_size: int) -> int:
        """Blocks of ``block_size`` tokens that the GPUs' memory has room for, by the paper's reckoning.

        Raises:
            SettingError: The model leaves no room.
        """
        return paper_num_blocks(self.model, self.gpu, self.tensor_parallel, block_size, self.deployment, self.layout)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """What a policy's memory is built from.

    Attributes:
        num_blocks, block_size: Size of the pool, in blocks, and of a block, in tokens.
        max_model_len: Longest prompt + output in tokens.
        host_blocks: Blocks of the swap space on the host.
        ids: Whether physical block ids are to be handed out.
        token_runs: What the prompts are made of, where prefixes are to be cached; else None.
        caches_prefixes: Whether freed blocks keep their contents for prompts that begin alike.
        grouped: Whether sequences share blocks, or copy what they would share if memory were paged.
        dialogue: Parents of requests, where they have some.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    host_blocks: int = 0
    ids: bool = False
    token_runs: Tokens | None = None
    caches_prefixes: bool = True
    grouped: bool = False
    dialogue: Dialogue | None = None


class Policy:
    """Decides which sequences run; moves neither blocks nor time. Base class of every policy.

    A policy of your own overrides at least ``name`` and ``schedule`` (docs/extending.md has one).

    Args:
        limits: What a step may hold.
        options: The policy's options, as ``Options`` declares them.
        groups: KV groups of the pool, for policies that know them.

    Attributes:
        name: As on the command line.
        system: What it models, for lists.
        options_type: Its options, each declared with type, default, bounds and help.
        leaves_together: Whether sequences leave when the last of their batch has finished.
        preempted_first: Whether a preempted sequence goes to the front of the queue instead of its place by arrival.
        caches_prefixes: Whether freed blocks can keep their contents for prompts that begin alike.
        reads_max_tokens: Whether it reserves by the ``max_tokens`` that a client declares.
        groups_sequences: Whether the sequences of a request are admitted and preempted together.
        disaggregates: Whether it can decode what another replica has prefilled.
        default_max_num_seqs: Most sequences of a step where the user names none; None takes as many as the pool
            holds of the model's length.
        default_max_num_batched_tokens: Most tokens of a step where the user names none.
        has_token_budget: Whether it reads ``max_num_batched_tokens``.
        default_block_size: Tokens of a block where the user names none.
        null_blocks: Blocks of the pool that hold nothing, such as vLLM's block 0.
    """

    name: ClassVar[str]
    system: ClassVar[str] = ""
    options_type: ClassVar[type[Options]] = Options
    leaves_together: ClassVar[bool] = False
    preempted_first: ClassVar[bool] = False
    caches_prefixes: ClassVar[bool] = False
    reads_max_tokens: ClassVar[bool] = False
    groups_sequences: ClassVar[bool] = False
    disaggregates: ClassVar[bool] = False
    default_max_num_seqs: ClassVar[int | None] = 256
    default_max_num_batched_tokens: ClassVar[int] = 2048
    has_token_budget: ClassVar[bool] = True
    default_block_size: ClassVar[int] = 16
    null_blocks: ClassVar[int] = 0

    #: A policy with options of its own narrows the type.
    options: Options

    def __init__(self, limits: Limits, options: Any = None, groups: PageGroups | None = None) -> None:
        self.limits = limits
        self.options = self.options_type() if options is None else options

    @classmethod
    def pool_size(cls, server: Server, options: Any, num_blocks: int | None, block_size: int | None) -> tuple[int, int]:
        """Blocks of the pool, and tokens of a block.

        Args:
            num_blocks, block_size: What the user asks for; None leaves it to the policy.

        Raises:
            SettingError: The policy cannot serve with that, or the model leaves no room for a pool.
        """
        size = block_size or cls.default_block_size
        return num_blocks or server.num_blocks(size), size

    @classmethod
    def default_seqs(cls, server: Server, longest_in_pool: int) -> int:
        """``max_num_seqs`` where the user names none.

        Args:
            longest_in_pool: Sequences of the model's length that the pool holds.
        """
        return max(1, longest_in_pool) if cls.default_max_num_seqs is None else cls.default_max_num_seqs

    @staticmethod
    def in_flight_tokens(limits: Limits) -> int:
        """Most tokens of one sequence that a step computes: a whole prompt, where prompts are not split."""
        return limits.max_model_len

    def memory(self, pool: Pool) -> Memory:
        """The memory that the policy schedules over."""
        raise NotImplementedError

    # A policy narrows the types of transaction and memory to those of the memory that it makes.
    def schedule(self, state: State, transaction: Any) -> StepPlan:
        """The plan of the next step. Grants are made in ``transaction``; queues are only read."""
        raise NotImplementedError

    def horizon(self, state: State, memory: Any, limit: int) -> int:
        """Steps, this one included and at most ``limit``, in which the policy decides nothing new.

        Asked after the plan has been carried out and only of steady plans. The engine sees to finishes and arrivals
        itself; the policy answers for what memory does in between. 1 is always right, and slow.
        """
        return 1

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        """Blocks, int64 [n], of the smallest pool that can ever serve each request; the others are refused.

        Where tokens take blocks as they come: those of prompt and output, but for the last token, which is never
        stored.
        """
        return blocks_of(workload.prompt_tokens + workload.output_tokens - 1, block_size) + self.null_blocks


def blocks_of(tokens: np.ndarray, block_size: int) -> np.ndarray:
    """Blocks that hold ``tokens``, elementwise."""
    return -(-tokens // block_size)
