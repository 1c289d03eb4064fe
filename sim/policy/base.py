"""The base class of policies. A policy schedules, and states for how many steps its decision stays valid.

A policy declares its name, its options, its default limits and the memory that it schedules over. ``registry`` finds
policies by name, those of other packages included.
"""

from __future__ import annotations

from typing import ClassVar, Generic, Never, TypeAlias, TypeVar

import numpy as np

from ..memory import Memory, Transaction
from ..memory.accounting.kv_groups import STATE, PageGroups
from ..types.sequence import StepPlan
from ..types.state import State
from ..workload.workload import Workload
from .options import Options
from .server import Limits, Pool, Server

#: Kinds of memory and of transaction that a policy reads.
MemoryT = TypeVar("MemoryT", bound=Memory, contravariant=True)
TransactionT = TypeVar("TransactionT", bound=Transaction, contravariant=True)


class Policy(Generic[MemoryT, TransactionT]):
    """Base class of policies. A policy decides which sequences run; it changes neither blocks nor time.

    A custom policy overrides at least ``name``, ``memory`` and ``schedule`` (example: docs/extending.md). For a type
    checker it names the kinds that it schedules over, such as ``Policy[PagedMemory, PagedTransaction]``; without one,
    ``Policy`` alone is enough.

    Args:
        limits: Limits of a step.
        options: The policy's options, an instance of ``options_type``.
        groups: KV groups of the pool, for policies that support them; None is one group, which keeps every token.

    Attributes:
        name: Name on the command line.
        system: The simulated system, for lists.
        options_type: Declares the options with type, default, bounds and help.
        leaves_together: Whether sequences release their memory when the last one of their batch has finished.
        preempted_first: Whether a preempted sequence goes to the front of the queue instead of its place by arrival.
        caches_prefixes: Whether freed blocks can keep their contents for prompts with the same prefix.
        caches_by_default: Whether they do so also if no contents are known: a preempted sequence finds its own blocks.
        default_enforce_eager: Default of ``enforce_eager``.
        reads_max_tokens: Whether reservations, or steps, depend on the ``max_tokens`` that a client declares.
        groups_sequences: Whether the sequences of a request are admitted and preempted together.
        disaggregates: Whether it can decode requests that another replica prefilled.
        serves_kv_groups: Whether it schedules over several KV groups.
        serves_block_sizes: Whether their blocks may have several sizes.
        serves_states: Whether some of them may keep fixed-size states.
        default_max_num_seqs: Default of ``max_num_seqs``; None is the number of sequences of the model's length that
            fit into the pool.
        default_max_num_batched_tokens: Default of ``max_num_batched_tokens``.
        has_token_budget: Whether it reads ``max_num_batched_tokens``.
        default_block_size: Default tokens per block.
        defaults_source, pool_source: Where these defaults, and the size of the pool, come from; for ``run.json``.
        schedules_ahead: Whether a step is decided while the step before it runs.
        pipelines: Whether the server keeps a batch in each pipeline stage.
        null_blocks: Blocks of the pool that hold no tokens, such as vLLM's block 0.
    """

    name: ClassVar[str]
    system: ClassVar[str] = ""
    options_type: ClassVar[type[Options]] = Options
    leaves_together: ClassVar[bool] = False
    preempted_first: ClassVar[bool] = False
    caches_prefixes: ClassVar[bool] = False
    caches_by_default: ClassVar[bool] = False
    default_enforce_eager: ClassVar[bool] = True
    reads_max_tokens: ClassVar[bool] = False
    groups_sequences: ClassVar[bool] = False
    disaggregates: ClassVar[bool] = False
    serves_kv_groups: ClassVar[bool] = False
    serves_block_sizes: ClassVar[bool] = False
    serves_states: ClassVar[bool] = False
    default_max_num_seqs: ClassVar[int | None] = 256
    default_max_num_batched_tokens: ClassVar[int] = 2048
    has_token_budget: ClassVar[bool] = True
    default_block_size: ClassVar[int] = 16
    defaults_source: ClassVar[str] = "default of the policy"
    pool_source: ClassVar[str] = "computed from model and GPU as in the paper"
    null_blocks: ClassVar[int] = 0

    schedules_ahead: bool = False
    pipelines: ClassVar[bool] = False
    #: A policy with its own options narrows the type.
    options: Options

    def __init__(self, limits: Limits, options: Options | None = None, groups: PageGroups | None = None) -> None:
        self.limits = limits
        self.options = self.options_type() if options is None else options
        self.groups = groups or PageGroups()

    @classmethod
    def variant(cls, options: Options) -> type[AnyPolicy]:
        """The class that serves with these options; another one where an option changes the memory and its defaults."""
        return cls

    @classmethod
    def pool_size(
        cls, server: Server, options: Options, num_blocks: int | None, block_size: int | None
    ) -> tuple[int, int]:
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
        """Default of ``max_num_seqs``.

        Args:
            longest_in_pool: Sequences of the model's length that the pool holds.
        """
        return max(1, longest_in_pool) if cls.default_max_num_seqs is None else cls.default_max_num_seqs

    @classmethod
    def step_limits(
        cls, server: Server, pool: tuple[int, int], seqs: int | None, tokens: int | None
    ) -> tuple[int, int]:
        """``max_num_seqs`` and ``max_num_batched_tokens`` of a run: those that the user gives, or the policy's defaults.

        Args:
            pool: Sequences of the model's length that it holds, and that length in tokens.
            seqs, tokens: What the user gives; None leaves it to the policy.
        """
        return seqs or cls.default_seqs(server, pool[0]), tokens or cls.default_max_num_batched_tokens

    @staticmethod
    def in_flight_tokens(limits: Limits, options: Options) -> int:
        """Maximum tokens of one sequence in the steps in flight: a whole prompt, unless prompts are split."""
        return limits.max_model_len

    def memory(self, pool: Pool) -> Memory:
        """The memory that the policy schedules over, of the kind ``MemoryT``."""
        raise NotImplementedError

    def schedule(self, state: State, transaction: TransactionT) -> StepPlan:
        """The plan of the next step. Blocks are reserved in ``transaction``; queues are only read."""
        raise NotImplementedError

    def horizon(self, state: State, memory: MemoryT, limit: int) -> int:
        """Steps, this one included and at most ``limit``, for which the decision stays the same.

        Called after the plan has been carried out, if it is ``valid_until_horizon``. The engine handles finishes and arrivals;
        the policy accounts for the growth of memory between them. 1 is always correct, and slow.
        """
        return 1

    def longest_tokens(self, workload: Workload) -> np.ndarray:
        """Most tokens with a slot of each request, int64 [n]: prompt and output without the last token, which is never stored."""
        return workload.prompt_tokens + workload.output_tokens - 1

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        """Blocks, int64 [n], of the smallest pool that can serve each request; requests that need more are refused.

        By default the blocks, of all KV groups, for an admission with all of ``longest_tokens``; a preemption may cause it.
        """
        tokens, groups = self.longest_tokens(workload), self.groups
        needed = np.full(len(workload), self.null_blocks)
        # A step that continues from a state at the end of a block holds that state and the new one, and perhaps one exported
        # from within. Where steps are scheduled ahead a state is released a step later, and drafts may pass more ends of blocks.
        entered = -(-(1 + groups.ahead) * (1 + groups.drafts) // block_size)
        held = 1 + entered + groups.exports_states if groups.states_by_block else 1
        for each in groups.classes(block_size):
            blocks, most = blocks_of(tokens, each.block_size), held if each.kind == STATE else each.most_prompt_blocks
            own = groups.drafts if each.kind == STATE else 0
            needed += each.number * (own + (blocks if most is None else np.minimum(blocks, most)))
        return needed


#: A policy over any kind of memory: what all have in common may be called, ``schedule`` and ``horizon`` may not.
AnyPolicy: TypeAlias = Policy[Never, Never]
#: A policy beside the memory that it schedules over; ``engine.replica`` makes the pair.
PairedPolicy: TypeAlias = Policy[Memory, Transaction]


def blocks_of(tokens: np.ndarray, block_size: int) -> np.ndarray:
    """Blocks that hold ``tokens``, elementwise."""
    return -(-tokens // block_size)
