"""What vLLM finds for the KV cache when it starts: `determine_available_memory` of its `v1/worker/gpu_worker.py`.

    --gpu-memory-utilization of the card
    - weights                  as loaded, with the rotary table
    - activations              the peak of one dummy step: max_num_batched_tokens, then max_num_seqs samples
    - outside of torch         CUDA libraries, NCCL
    - CUDA graphs              since 0.21; before, they came out of the rest of the card
    = KV cache, in blocks of --block-size tokens of all layers (of a page's layers, with KV groups)

Weights, blocks and the check are vLLM's own arithmetic. The activations are estimated:

    expert workspace + max(forward, sampler)
    forward   = 2 bytes * tokens * (5 hidden + what the widest MLP makes)
    sampler   = 14 bytes (38 up to 0.16) * sequences * vocabulary + two hidden states of all tokens
    workspace = 2 bytes * tokens * experts of a token * (max(2 width, hidden) + width), as fused_moe.py allocates it

The 14 bytes are the slope between the peaks that vLLM 0.19 logs of Llama 3.1 8B and Qwen2.5 7B on an H100; everything
else is what the tensors hold. docs/serve.md has the errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..types.errors import SettingError
from .deployment import Deployment
from .gpu import GpuSpec
from .graphs import CUDA_GRAPH_BYTES
from .hybrid import HybridLayout, hybrid_layout
from .pool import GIB
from .releases import LATEST, Release
from .shape import ModelSpec, refuse_states
from .stages import stages
from .weights import stage_bytes

BLOCK_SIZE = 16
#: What is not free on an H100 before anything is loaded: 79.19 - 78.68 GiB.
CONTEXT_BYTES = int(0.51 * GIB)
#: From vLLM's `get_batch_defaults` for a server: (max_num_batched_tokens, max_num_seqs).
_LARGEST, _LARGE, _OTHER = (16_384, 1024), (8192, 1024), (2048, 256)
_LARGEST_BYTES, _LARGE_BYTES = 160 * GIB, 70 * GIB
_VOCAB_PADDING = 64


def batch_defaults(gpu: GpuSpec) -> tuple[int, int]:
    """max_num_batched_tokens and max_num_seqs of a server that sets neither; A100s count as small."""
    if gpu.memory_bytes >= _LARGEST_BYTES:
        return _LARGEST
    return _LARGE if gpu.memory_bytes >= _LARGE_BYTES and gpu.architecture != "a100" else _OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What decides how much KV cache an engine has.

    Attributes:
        deployment: Pipeline stages, number formats, CUDA graphs.
        hybrid: Whether layers with a window keep only what it needs.
        release: Of vLLM.
        kv_cache_memory_bytes: The KV cache of a GPU, set by hand; None leaves it to the reckoning.
        correction_bytes: What is left for the KV cache beyond the reckoning, by an engine's own log.
        num_gpu_blocks_override: Blocks, whatever is left.
    """

    model: ModelSpec
    gpu: GpuSpec
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor_parallel: int = 1
    deployment: Deployment = Deployment(cuda_graphs=True)
    gpu_memory_utilization: float = LATEST.gpu_memory_utilization
    block_size: int = BLOCK_SIZE
    hybrid: bool = True
    release: Release = LATEST
    kv_cache_memory_bytes: int | None = None
    correction_bytes: int = 0
    num_gpu_blocks_override: int | None = None

    def __post_init__(self) -> None:
        """Refuse models with layers that keep a state of fixed size."""
        refuse_states(self.model, "what vLLM finds for its KV cache is not known yet")

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel * self.deployment.pipeline_parallel

    @property
    def layout(self) -> HybridLayout | None:
        """The KV groups that share the pool; None where all layers keep every token."""
        return hybrid_layout(self.model, self.max_model_len) if self.hybrid else None

    def sequence_blocks(self, tokens: int) -> int:
        """Blocks that a sequence of ``tokens`` needs at most, over all KV groups.

        A window needs what a step may compute beyond it, and a block because it need not begin with one
        (``max_memory_usage_bytes`` of vLLM's ``SlidingWindowSpec``).
        """
        layout = self.layout
        if layout is None:
            return -(-tokens // self.block_size)
        within = min(layout.window_tokens - 1 + self.max_num_batched_tokens, tokens)
        full = len(layout.groups) - layout.num_sliding
        return full * -(-tokens // self.block_size) + layout.num_sliding * (-(-within // self.block_size) + 1)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Where the memory of each GPU of a pipeline stage goes, in bytes."""

    total_bytes: int
    requested_bytes: int
    weight_bytes: int
    activation_bytes: int
    non_torch_bytes: int
    cuda_graph_bytes: int
    kv_cache_bytes: int
    block_bytes: int

    @property
    def num_blocks(self) -> int:
        return max(0, self.kv_cache_bytes // self.block_bytes)


def stage_memories(launch: Launch) -> list[StageMemory]:
    """The GPUs of every pipeline stage; raises SettingError where the model cannot be divided so."""
    require_divisible(launch.model, launch.tensor_parallel)
    deployment, model = launch.deployment, launch.model
    weights = stage_bytes(model, launch.tensor_parallel, deployment.pipeline_parallel, deployment.quantization)
    parts = stages(model.num_layers, deployment.pipeline_parallel)
    return [
        _stage(launch, layers, weight, last=layers is parts[-1]) for layers, weight in zip(parts, weights, strict=True)
    ]


def _stage(launch: Launch, layers: range, weights: int, last: bool) -> StageMemory:
    requested = int(launch.gpu.memory_bytes * launch.gpu_memory_utilization)
    weights += _rotary_bytes(launch.model)
    activations = activation_bytes(launch, layers, last)
    non_torch = launch.release.alone_bytes if launch.num_gpus == 1 else launch.release.together_bytes
    graphs = CUDA_GRAPH_BYTES if launch.deployment.cuda_graphs and launch.release.counts_graphs else 0
    left = requested - weights - activations - non_torch - graphs
    if launch.kv_cache_memory_bytes is not None:
        left = launch.kv_cache_memory_bytes
    return StageMemory(
        total_bytes=launch.gpu.memory_bytes,
        requested_bytes=requested,
        weight_bytes=weights,
        activation_bytes=activations,
        non_torch_bytes=non_torch,
        cuda_graph_bytes=graphs,
        kv_cache_bytes=left + launch.correction_bytes,
        block_bytes=_block_bytes(launch, layers),
    )


def _block_bytes(launch: Launch, layers: range) -> int:
    groups = (launch.layout.largest(layers),) if launch.layout else launch.model.kv_groups(layers)
    dtype, ranks = launch.deployment.kv_dtype, launch.tensor_parallel
    return launch.block_size * sum(launch.model.group_slot_bytes(group, dtype, ranks) for group in groups)


def activation_bytes(launch: Launch, layers: range, last: bool) -> int:
    """The peak of the step that vLLM profiles; see the head of this file."""
    model, tokens = launch.model, launch.max_num_batched_tokens
    dense = max(_dense_width(model, layer) for layer in layers) // launch.tensor_parallel
    forward = 2 * tokens * (5 * model.hidden_size + model.mlp_matrices * dense)
    sampled = min(launch.max_num_seqs, tokens)
    sampler = launch.release.sampler_bytes * sampled * model.vocab_size + 4 * tokens * model.hidden_size
    workspace = 0
    if model.experts and set(layers) & set(model.experts.layers):
        width = model.experts.intermediate_size // launch.tensor_parallel
        workspace = 2 * tokens * model.experts.used * (max(2 * width, model.hidden_size) + width)
    return workspace + max(forward, last * sampler)


def _dense_width(model: ModelSpec, layer: int) -> int:
    if model.experts and layer in model.experts.layers:
        return model.experts.shared_size
    return model.intermediate_size


def _rotary_bytes(model: ModelSpec) -> int:
    """One table of sines and cosines that all layers share, as long as the model's own longest sequence."""
    width = model.latent.rope_dim if model.latent else model.head_dim
    return 0 if model.learned_positions else 2 * model.max_model_len * width


def require_divisible(model: ModelSpec, tensor_parallel: int) -> None:
    """Raise SettingError where ranks cannot share heads, vocabulary (padded to 64) or MLP evenly, as vLLM must."""
    model.kv_heads_per_rank(tensor_parallel)
    vocabulary = -(-model.vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
    widths = {"MLP width": model.intermediate_size, "vocabulary": vocabulary}
    if model.experts:
        widths["expert width"] = model.experts.intermediate_size
    for what, width in widths.items():
        if width % tensor_parallel:
            raise SettingError("tensor_parallel", tensor_parallel, f"must divide the {what} {width} of {model.name}")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the KV cache holds.

    Attributes:
        stage: The stage with the fewest blocks, which decides.
        num_blocks: Of the pool; one of them, the null block, holds nothing.
        max_concurrency: Sequences of max_model_len at once, as vLLM logs it.
        num_tokens: As vLLM logs it, max_concurrency * max_model_len.
    """

    stage: StageMemory
    num_blocks: int
    max_concurrency: float
    num_tokens: int


def capacity(launch: Launch) -> Capacity:
    """The KV cache of a launch; raises SettingError where the model cannot be divided so."""
    stage = min(stage_memories(launch), key=lambda memory: memory.num_blocks)
    blocks = launch.num_gpu_blocks_override or stage.num_blocks
    needed = launch.sequence_blocks(launch.max_model_len)
    return Capacity(stage, blocks, blocks / needed, blocks * launch.max_model_len // needed)


def users(launch: Launch, num_blocks: int, tokens: int) -> int:
    """Sequences of ``tokens`` that the pool holds at once, at most max_num_seqs."""
    return min(launch.max_num_seqs, max(0, num_blocks - 1) // launch.sequence_blocks(tokens))


def fits(launch: Launch) -> bool:
    """Whether every GPU has room for one sequence of max_model_len: vLLM's ``check_enough_kv_cache_memory``."""
    needed = launch.sequence_blocks(launch.max_model_len)
    return all(memory.kv_cache_bytes >= needed * memory.block_bytes > 0 for memory in stage_memories(launch))


def longest_model_len(launch: Launch) -> int:
    """The longest max_model_len that fits, up to the launch's; 0 where none does (``estimate_max_model_len``)."""
    return _largest(lambda tokens: fits(replace(launch, max_model_len=tokens)), launch.max_model_len)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest whole number up to ``most`` for which ``holds``, which does so up to some number; 0 if none."""
    least = 0
    while least < most:
        middle = -(-(least + most) // 2)
        least, most = (middle, most) if holds(middle) else (least, middle - 1)
    return least
