"""The base class of policies. A policy decides a step, and promises for how many steps the decision stays valid.

A policy declares its name, its options, its default limits and its memory. ``registry`` finds policies by name,
including policies of other packages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Generic, NamedTuple, Never, TypeAlias, TypeVar

import numpy as np

from ..memory import Memory, Transaction
from ..memory.accounting.kv_groups import STATE, PageGroups
from ..spec import GpuSpec, ModelSpec
from ..spec.startup.launch import resolved_kv_dtype
from ..spec.startup.sglang_states import StatePool
from ..types.errors import FragmeterError, SimulationFault
from ..types.sequence import Sequence, StepPlan
from ..types.state import State
from ..workload.workload import Workload
from .options import Options
from .server import Limits, Pool, Server, WindowPool

#: Kinds of memory and of transaction that a policy reads.
MemoryT = TypeVar("MemoryT", bound=Memory, contravariant=True)
TransactionT = TypeVar("TransactionT", bound=Transaction, contravariant=True)


class Source(NamedTuple):
    """What the rules of a policy are of, and how they are held to it.

    Attributes:
        rules_of: Release, commit or paper.
        held_by: ``wheel`` or ``real server`` where tests run the unmodified system beside the policy; ``source`` or
            ``paper`` where the rules were taken from it and nothing of the system runs.
        last_difference: Date and subject of the last rule that was found to differ; empty where none is on record.
    """

    rules_of: str = "release not stated"
    held_by: str = "not stated"
    last_difference: str = ""


class Policy(Generic[MemoryT, TransactionT]):
    """Base class of schedulers. A policy decides which sequences run; it changes neither memory nor time.

    A custom policy overrides at least ``name``, ``memory`` and ``schedule`` (docs/extending.md has an example). For a
    type checker, name the kinds of memory and transaction, such as ``Policy[PagedMemory, PagedTransaction]``; plain
    ``Policy`` runs, too.

    Args:
        limits: Limits of a step.
        options: The policy's options, an instance of ``options_type``.
        groups: KV groups of the pool, for policies that serve them; None is one group that keeps every token.

    Attributes:
        name: Name on the command line.
        system: The simulated system, for lists.
        source: What the rules are of, and how they are held to it; of the class that declares it, not of those derived from
            it.
        options_type: Dataclass of the policy's options, with type, default, bounds and help of each.
        leaves_together: Whether the sequences of a batch release their memory together, when the last one has
            finished.
        preempted_first: Whether a preempted sequence goes to the front of the queue; False puts it back by arrival.
        caches_prefixes: Whether freed blocks can keep their contents for prompts with the same prefix.
        caches_by_default: Whether they also do if prompt contents are unknown: a preempted sequence then finds its own
            blocks.
        default_enforce_eager: Default of ``enforce_eager``.
        reads_max_tokens: Whether decisions depend on the ``max_tokens`` that clients declare.
        groups_sequences: Whether the sequences of a request are admitted and preempted together.
        disaggregates: Whether it can decode requests that another replica prefilled.
        serves_kv_groups: Whether it supports several KV groups.
        serves_block_sizes: Whether it supports KV groups with different block sizes.
        admits_by_queue: Whether what it admits depends on how many wait, so that an arrival may let an earlier request in while nothing runs.
        serves_states: Whether it supports fixed-size states: as KV groups, or without these in a pool of their own (``state_pool``).
        default_max_num_seqs: Default of ``max_num_seqs``; None is the number of sequences of the model's length that
            fit into the pool.
        default_max_num_batched_tokens: Default of ``max_num_batched_tokens``.
        has_token_budget: Whether it reads ``max_num_batched_tokens``.
        default_block_size: Default tokens per block.
        defaults_source: Source of these defaults, for ``run.json``.
        pool_source: Source of the pool's size, for ``run.json``.
        schedules_ahead: Whether it decides a step while the step before it runs (asynchronous scheduling).
        pipelines: Whether the server keeps a batch in each pipeline stage.
        stages: Stages with a batch of their own; 1 if the server keeps one batch.
        null_blocks: Blocks of the pool that hold no tokens, such as vLLM's null block.
    """

    name: ClassVar[str]
    system: ClassVar[str] = ""
    source: ClassVar[Source] = Source()
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
    admits_by_queue: bool = False
    default_max_num_seqs: ClassVar[int | None] = 256
    default_max_num_batched_tokens: ClassVar[int] = 2048
    has_token_budget: ClassVar[bool] = True
    default_block_size: ClassVar[int] = 16
    defaults_source: ClassVar[str] = "default of the policy"
    pool_source: ClassVar[str] = "computed from model and GPU as in the paper"
    null_blocks: ClassVar[int] = 0

    schedules_ahead: bool = False
    pipelines: ClassVar[bool] = False
    #: Steps before the coming one of the engines that share experts and step together; None for an engine of its own.
    steps_together: Callable[[], int] | None = None
    #: A policy with its own options narrows the type.
    options: Options

    def __init__(self, limits: Limits, options: Options | None = None, groups: PageGroups | None = None) -> None:
        self.limits, self.stages = limits, limits.stages
        self.options = self.options_type() if options is None else options
        self.groups = groups or PageGroups()

    @classmethod
    def variant(cls, options: Options) -> type[AnyPolicy]:
        """The class that serves with these options; another class if an option changes the memory or its defaults."""
        return cls

    @classmethod
    def pool_size(
        cls, server: Server, options: Options, num_blocks: int | None, block_size: int | None
    ) -> tuple[int, int]:
        """Number of blocks of the pool, and tokens per block.

        Args:
            server: The model and the GPUs.
            options: The policy's options.
            num_blocks: The user's number of blocks; None leaves it to the policy.
            block_size: The user's tokens per block; None leaves it to the policy.

        Raises:
            SettingError: The policy does not support these values, or the model leaves no memory for a pool.
        """
        size = block_size or cls.default_block_size
        return num_blocks or server.num_blocks(size), size

    @classmethod
    def default_seqs(cls, server: Server, longest_in_pool: int) -> int:
        """Default of ``max_num_seqs``.

        Args:
            server: The model and the GPUs.
            longest_in_pool: Number of sequences of the model's length that fit into the pool.
        """
        return max(1, longest_in_pool) if cls.default_max_num_seqs is None else cls.default_max_num_seqs

    @classmethod
    def kv_dtype(cls, model: ModelSpec, gpu: GpuSpec, given: str) -> str:
        """Number format of the KV cache.

        Args:
            given: The user's ``kv_cache_dtype``, which may be "auto".

        Raises:
            SettingError: The checkpoint asks for a format that is not simulated.
        """
        return resolved_kv_dtype(model, gpu, given)

    @classmethod
    def step_limits(
        cls, server: Server, pool: tuple[int, int], seqs: int | None, tokens: int | None
    ) -> tuple[int, int]:
        """``max_num_seqs`` and ``max_num_batched_tokens`` of a run: the user's values, else the policy's defaults.

        Args:
            server: The model and the GPUs.
            pool: Tokens that the pool holds, and of the longest sequence.
            seqs: The user's ``max_num_seqs``, or None.
            tokens: The user's ``max_num_batched_tokens``, or None.
        """
        return seqs or cls.default_seqs(server, pool[0] // pool[1]), tokens or cls.default_max_num_batched_tokens

    @staticmethod
    def in_flight_tokens(limits: Limits, options: Options) -> int:
        """Most tokens of one sequence that the steps in flight compute: a whole prompt, unless prefills are chunked."""
        return limits.max_model_len

    @classmethod
    def serves_states_of(cls, shape: ModelSpec) -> bool:
        """Whether it serves a model with states."""
        return cls.serves_states

    @classmethod
    def window_pool(cls, server: Server, options: Options, num_blocks: int, block_size: int) -> WindowPool | None:
        """See ``Pool.windows``."""
        return None

    @classmethod
    def state_pool(
        cls, server: Server, options: Options, block_size: int, num_blocks: int | None = None
    ) -> StatePool | None:
        """See ``Pool.states``. It bounds the requests that run, too.

        Args:
            num_blocks: Blocks of the other pool; None while these are not known.
        """
        return None

    def memory(self, pool: Pool) -> Memory:
        """Create the memory of a replica, of the kind ``MemoryT``."""
        raise NotImplementedError

    def expects_end(self, sequence: Sequence) -> bool:
        """Whether a decision that does not know a sequence's last token expects its end, by the length of its output."""
        return sequence.output_tokens == sequence.max_tokens or sequence.target_tokens >= self.limits.max_model_len

    def schedule(self, state: State, transaction: TransactionT) -> StepPlan:
        """Decide the next step.

        Args:
            state: The queues; read only.
            transaction: Free blocks or slots. The policy reserves what it grants here.

        Returns:
            The plan, which the engine carries out.
        """
        raise NotImplementedError

    def horizon(self, state: State, memory: MemoryT, limit: int) -> int:
        """Number of steps, this one included and at most ``limit``, for which the decision stays the same.

        Called after a plan that is ``valid_until_horizon`` has been carried out. The engine handles finishes and
        arrivals; the policy accounts for the growth of memory between them. 1 is always correct, and slow.
        """
        return 1

    def stuck(self, waiting: int) -> FragmeterError:
        """Error of a run in which nothing runs and so many requests wait for ever: a defect, unless the simulated system waits as well."""
        return SimulationFault(f"policy {self.name} is stuck: nothing runs and {waiting} requests wait")

    def longest_tokens(self, workload: Workload) -> np.ndarray:
        """Most tokens of each request that occupy slots, int64 [n]: prompt and output less the last token, which is
        never
        stored."""
        return workload.prompt_tokens + workload.output_tokens - 1

    def slots_to_admit(self, workload: Workload, block_size: int, running: np.ndarray) -> np.ndarray:
        """Free slots below which a request of the mean lengths waits for memory beside so many running ones, [len(running)].

        By default its prompt in whole blocks, and a block. It explains waiting, and decides nothing.
        """
        blocks = 1 - -int(workload.prompt_tokens.mean()) // block_size
        return np.full(len(running), blocks * block_size)

    def windows_to_admit(self, workload: Workload, block_size: int) -> int:
        """As ``slots_to_admit``, in a pool of windows of their own; 0 where they have none."""
        return 0

    def smallest_pool_blocks(self, workload: Workload, block_size: int) -> np.ndarray:
        """Blocks of the smallest pool that can serve each request, int64 [n]; a request that needs more is refused.

        By default: the blocks, in all KV groups, of an admission with all ``longest_tokens``. A preemption can cause
        such an admission.
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
    """Number of blocks that hold ``tokens``, elementwise."""
    return -(-tokens // block_size)
