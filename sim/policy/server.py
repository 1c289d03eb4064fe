"""What a policy builds its replica from: the hardware, the limits of a step, and the parameters of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..memory.prefix.tiers import Offloaded
from ..spec import Deployment, GpuSpec, HybridLayout, ModelSpec, page_bytes, paper_num_blocks
from ..spec.startup.sglang_states import StatePool
from ..spec.startup.sglang_unified import SharedBuffer
from ..types.errors import SettingError
from ..workload.content import Tokens
from ..workload.dialogue import Dialogue

#: Sides of disaggregated prefill, as vLLM's ``kv_role`` names them.
PRODUCER, CONSUMER = "kv_producer", "kv_consumer"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a step; the names are vLLM's.

    Attributes:
        max_model_len: Longest prompt + output in tokens.
        max_num_seqs: Maximum number of running sequences; in static batching the batch size.
        max_num_batched_tokens: Maximum number of tokens in a step, where a decode counts 1.
        watermark_blocks: Blocks that an admission must leave free.
        kv_role: vLLM's name of what a KV connector does: ``PRODUCER`` sends blocks to other replicas, ``CONSUMER`` takes theirs; or None.
        stages: Pipeline stages that each work on a batch of their own; 1 where one batch passes all of them.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark_blocks: int = 0
    kv_role: str | None = None
    stages: int = 1

    def __post_init__(self) -> None:
        for field in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, field) < 1:
                raise SettingError(field, getattr(self, field), "must be at least 1")


class WindowPool(NamedTuple):
    """The pool of layers with a window beside that of the others.

    Attributes:
        tokens: Tokens of the window.
        blocks: Blocks of the pool.
        slot_bytes: Bytes of a slot of the other pool, and of this one.
        buffer: What both share; None where each has its own.
    """

    tokens: int
    blocks: int
    slot_bytes: tuple[int, int]
    buffer: SharedBuffer | None = None


@dataclass(frozen=True, kw_only=True)
class Server:
    """The model and the GPUs of a replica, which determine the size of the pool.

    Attributes:
        model, gpu, deployment: Their specifications.
        tensor_parallel: GPUs that share the model and the pool.
        layout: KV groups of the model; None if all layers keep every token.
        max_model_len: Longest prompt + output in tokens.
        max_num_seqs: The user's limit, or None for the policy's default.
        max_num_batched_tokens: The user's limit, or None for the policy's default.
        caches_prefixes: Whether freed blocks keep their contents for prompts with the same prefix.
    """

    model: ModelSpec
    gpu: GpuSpec
    deployment: Deployment
    tensor_parallel: int = 1
    layout: HybridLayout | None = None
    max_model_len: int
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    caches_prefixes: bool = True

    def num_blocks(self, block_size: int) -> int:
        """Blocks of ``block_size`` tokens that fit into the GPUs' memory, computed as in the paper.

        Raises:
            SettingError: The model leaves no room.
        """
        return paper_num_blocks(self.model, self.gpu, self.tensor_parallel, block_size, self.deployment, self.layout)

    def page_bytes(self, block_size: int) -> int:
        """Bytes of a block of one KV group on each rank; 0 if all layers keep every token."""
        if self.layout is None:
            return 0
        return page_bytes(self.model, self.layout, self.tensor_parallel, block_size, self.deployment)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The parameters of a memory, as ``Policy.memory`` receives them.

    Attributes:
        num_blocks: Blocks of the device pool.
        block_size: Tokens per block.
        max_model_len: Longest prompt + output in tokens.
        host_blocks: Blocks of host memory for swapping.
        offloaded: What is behind the GPU as tiers of the prefix cache; None without any.
        ids: Whether blocks have ids; False only counts them.
        token_runs: Contents of the prompts if prefixes are cached, else None.
        caches_prefixes: Whether freed blocks keep their contents for prompts with the same prefix.
        grouped: Whether sequences of a request share blocks; False copies the tokens that they would share.
        dialogue: For each request, the earlier request that it continues; None without any.
        seed: Seed of random draws.
        windows: The pool of layers with a window; None where these have none of their own.
        states: The pool of layers with a state; None where these have no pool of their own.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    host_blocks: int = 0
    offloaded: Offloaded | None = None
    ids: bool = False
    token_runs: Tokens | None = None
    caches_prefixes: bool = True
    grouped: bool = False
    dialogue: Dialogue | None = None
    seed: int = 0
    windows: WindowPool | None = None
    states: StatePool | None = None
