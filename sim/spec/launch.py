"""KV cache memory that vLLM computes at start-up: `determine_available_memory` of its `v1/worker/gpu_worker.py`.

    --gpu-memory-utilization of the GPU memory
    - weights                  as loaded, with the rotary table
    - activations              the peak of one dummy step: max_num_batched_tokens, then max_num_seqs samples
    - outside of torch         CUDA libraries, NCCL
    - CUDA graphs              since 0.20; before, they used the rest of the GPU memory
    = KV cache, in blocks of --block-size tokens of all layers (with KV groups: of the layers of a page)

Weights, blocks and the check follow vLLM's arithmetic. The activations are estimated:

    expert workspace + max(forward, sampler)
    forward   = 2 bytes * tokens * ((5 + blocks of attention residuals + twice the further hidden states of hyper-connections) hidden
                + outputs of the widest MLP, or of the projections of a state if these are wider)
    sampler   = 14 bytes (38 up to 0.16) * sequences * vocabulary + two hidden states of all tokens
    workspace = 2 bytes * tokens of all engines that share the experts * experts per token * (max(2 width, hidden) + width),
                as fused_moe.py allocates it

Sparse latent attention adds its reserved buffers: 4 bytes * tokens * top_k, 512 MiB of logits in place of the MLP's outputs if these
are less, and as workspace, if more than that of experts, keys of 40 (16 above 262,144) * max_model_len tokens. An indexer of blocks
has 4 bytes for each token, query head and chosen block.

The 14 bytes are the slope between the peaks in logs of vLLM 0.19 with Llama 3.1 8B and Qwen2.5 7B on an H100. All other
terms are sizes of tensors. docs/serve.md has the errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..types.errors import SettingError
from .attention import FP8_DS_MLA
from .deployment import CUDA_GRAPH_BYTES, DTYPE_BITS, MAX_CAPTURED, Deployment, stages
from .gpu import GpuSpec
from .hybrid import HybridLayout, formed_layout, hybrid_layout
from .kv_cache import CacheSettings, window_blocks
from .pool import GIB
from .releases import LATEST, Release
from .shape import ModelSpec
from .speculative import SpeculativeConfig
from .weights import stage_bytes

BLOCK_SIZE = 16
#: Multiples of the hidden size and of a rank's width of mxfp4 experts: of Marlin below compute capability 9, by
#: ``Mxfp4MoEMethod.create_weights`` of vLLM's ``mxfp4.py``. The Triton kernels of an H100 pad widths to 64, which gpt-oss has.
_PADDED = (256, 128)
_MARLIN = ("a100", "l40s", "rtx-4090")
#: Used memory of an H100 before anything is loaded: 79.19 - 78.68 GiB.
CONTEXT_BYTES = int(0.51 * GIB)
#: From vLLM's `get_batch_defaults` for a server: (max_num_batched_tokens, max_num_seqs).
_LARGEST, _LARGE, _OTHER = (16_384, 1024), (8192, 1024), (2048, 256)
_LARGEST_BYTES, _LARGE_BYTES = 160 * GIB, 70 * GIB
_VOCAB_PADDING = 64
#: GPUs with NVIDIA's compute capabilities 10 and 12; others that have kernels for sparse attention are of 9.
_BLACKWELL, _RTX_BLACKWELL = ("b200", "b300"), ("rtx-pro-6000",)
_INDEXER_LOGITS_BYTES = 512 << 20
#: GLM-5.3-Flash is in the releases from 0.30 on. Builds before (vllm-project/recipes#906, where the pool has 3,081 blocks) made the check
#: of ``capture_blocks`` while they profiled, in a pool with as many blocks as the largest graph has tokens; no release does.
_GLM5_NEXT, _FIRST_GLM5_NEXT = "glm5_next", (0, 30)
#: Tokens of the largest graph by default on GPUs of compute capability 10; elsewhere ``MAX_CAPTURED``.
_BLACKWELL_GRAPH = 1024


def checked_block_size(model: ModelSpec, given: int | None) -> int | None:
    """Tokens per block, before blocks are raised for states; None if neither the user nor the model decides.

    Raises:
        SettingError: The kernels of an indexer do not run such blocks.
    """
    if model.indexer is None:
        return given
    multiple = model.indexer.kernel_block_size
    size = given or multiple
    if size % multiple:
        remedy = f"must be a multiple of {multiple} tokens for the indexer of {model.name}"
        raise SettingError("block_size", size, remedy)
    return size


def resolved_kv_dtype(model: ModelSpec, gpu: GpuSpec, given: str, sixteen_bit: str = "fp16") -> str:
    """Number format of the KV cache that vLLM takes.

    "auto" is the format that the checkpoint asks for, or fp8 for GLM on B200 and B300, else 16 bit. With sparse attention fp8 is
    FlashMLA's format, but on B200 and B300, where vLLM prefers FlashInfer.

    Args:
        given: ``--kv-cache-dtype`` by fragmeter's name, or "auto".
        sixteen_bit: The model's format.

    Raises:
        SettingError: The checkpoint asks for a format that is not simulated.
    """
    indexer = model.indexer
    if given == "auto":
        by_default = indexer is not None and indexer.fp8_on_b200 and gpu.architecture in _BLACKWELL
        given = model.kv_dtype or ("fp8" if by_default else sixteen_bit)
        if given not in DTYPE_BITS:
            remedy = f"which the checkpoint of {model.name} asks for, is not simulated; give another --kv-cache-dtype"
            raise SettingError("kv_cache_dtype", given, remedy)
    if (
        model.latent
        and indexer
        and gpu.architecture not in _BLACKWELL
        and (given == "fp8" or gpu.architecture in _RTX_BLACKWELL)
    ):
        return FP8_DS_MLA
    return given


def batch_defaults(gpu: GpuSpec, release: Release = LATEST) -> tuple[int, int]:
    """Defaults of max_num_batched_tokens and max_num_seqs of a server; those of small GPUs apply to A100s."""
    if gpu.memory_bytes >= _LARGEST_BYTES and release.largest_batch:
        return _LARGEST
    is_small = gpu.memory_bytes < _LARGE_BYTES or (gpu.architecture == "a100" and not release.large_a100)
    return _OTHER if is_small else _LARGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings that decide the size of an engine's KV cache.

    Attributes:
        deployment: Pipeline stages, number formats, CUDA graphs.
        block_size: Tokens per block on a rank, before they are raised for states.
        hybrid: Whether layers with a window keep only the tokens within it.
        full_graphs: Whether CUDA graphs of whole decode steps are captured (``cudagraph_mode``), where graphs are.
        enable_prefix_caching: Whether states at ends of blocks are kept; of no effect on models without states.
        release: Release of vLLM.
        export_tokens: Of the layers with a state (``StateMixer.export_tokens``); None is that of the GPU and the release.
        kv_cache_memory_bytes: KV cache of a GPU, set by the user; None computes it.
        correction_bytes: Added to the computed KV cache memory, from an engine's log.
        num_gpu_blocks_override: Number of blocks, independent of the memory.
        speculative: The drafter, if any: its weights take memory, and its layers are in the blocks.
        async_scheduling: Whether a step is decided while the step before it runs; both have drafts.
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
    full_graphs: bool = True
    enable_prefix_caching: bool = True
    release: Release = LATEST
    export_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    correction_bytes: int = 0
    num_gpu_blocks_override: int | None = None
    speculative: SpeculativeConfig | None = None
    async_scheduling: bool = True

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel * self.deployment.pipeline_parallel

    @property
    def profiling(self) -> Release:
        """The release as it profiles this model; the model runner that it takes decides."""
        return self.release.profiling(self.model, self.deployment.quantization is not None)

    @property
    def layout(self) -> HybridLayout | None:
        """The KV groups that share the pool; None if all layers keep every token."""
        if self.model.mixer or (self.hybrid and self.model.window_heads):
            settings = CacheSettings(
                max_model_len=self.max_model_len,
                max_num_batched_tokens=self.max_num_batched_tokens,
                block_size=self.block_size,
                enable_prefix_caching=self.enable_prefix_caching,
            )
            exports, mixer = self.export_tokens or 0, self.model.mixer
            if mixer and self.export_tokens is None:
                exports = mixer.export_tokens(self.gpu.architecture, self.release.since[1])
            return formed_layout(self.model, settings, self.deployment.kv_dtype, self.tensor_parallel, exports)
        return hybrid_layout(self.model, self.max_model_len) if self.hybrid else None

    @property
    def block_tokens(self) -> int:
        """Tokens per block of the pool: on one rank, or on all that divide the tokens of a sequence."""
        return self.rank_block_tokens * self.deployment.decode_context_parallel

    @property
    def rank_block_tokens(self) -> int:
        """Tokens per block on one rank: ``block_size``, or more in a model with states."""
        layout = self.layout
        return layout.config.block_size if layout and layout.config else self.block_size

    def sequence_blocks(self, tokens: int) -> int:
        """Maximum of blocks that a sequence of ``tokens`` needs, over all KV groups.

        A group with a window also needs blocks for the tokens of a step, and one more block because the window may start
        within a block (``max_memory_usage_bytes`` of vLLM's ``SlidingWindowSpec``).
        """
        layout = self.layout
        if layout is None:
            return -(-tokens // self.block_tokens)
        if layout.config:
            return layout.config.sequence_blocks(tokens)
        within = min(layout.window_tokens - 1 + self.max_num_batched_tokens, tokens)
        full = len(layout.groups) - layout.num_sliding
        return full * -(-tokens // self.block_size) + layout.num_sliding * (-(-within // self.block_size) + 1)

    def decode_blocks(self, tokens: int) -> int:
        """Most blocks that a sequence with ``tokens`` of prompt and output holds in a step that decodes, over all KV groups.

        The last token is never stored. Drafts of the steps in flight are, with what a drafter looks ahead.
        """
        stored = max(1, tokens - 1)
        if self.speculative is not None:
            ahead = (1 + self.async_scheduling) * self.speculative.num_speculative_tokens
            stored = min(stored + ahead + self.speculative.lookahead_tokens, self.max_model_len)
        layout = self.layout
        if layout is None:
            return -(-stored // self.block_tokens)
        if layout.config:
            return layout.config.decode_blocks(stored)
        return sum(window_blocks(stored, group.span.tokens, self.block_size) for group in layout.groups)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of each GPU of a pipeline stage, in bytes."""

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
    """Memory of the GPUs of every pipeline stage.

    Raises:
        SettingError: The ranks or stages cannot divide the model.
    """
    require_divisible(launch.model, launch.tensor_parallel, launch.deployment)
    deployment, model = launch.deployment, launch.model
    ranks = deployment.expert_ranks(launch.tensor_parallel)
    weights = stage_bytes(model, launch.tensor_parallel, deployment.pipeline_parallel, deployment.quantization, ranks)
    parts = stages(model.num_layers, deployment.pipeline_parallel)
    return [
        _stage(launch, layers, weight, last=layers is parts[-1]) for layers, weight in zip(parts, weights, strict=True)
    ]


def _stage(launch: Launch, layers: range, weights: int, last: bool) -> StageMemory:
    requested = int(launch.gpu.memory_bytes * launch.gpu_memory_utilization)
    weights += _rotary_bytes(launch.model) + _padding_bytes(launch, layers)
    if launch.speculative is not None:
        weights += launch.speculative.drafter_bytes(launch.model, launch.tensor_parallel, launch.deployment)
    activations = activation_bytes(launch, layers, last)
    alone = launch.num_gpus == launch.deployment.data_parallel == 1
    non_torch = launch.release.alone_bytes if alone else launch.release.together_bytes
    graphs = CUDA_GRAPH_BYTES if launch.deployment.cuda_graphs and launch.profiling.counts_graphs else 0
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


def _padding_bytes(launch: Launch, layers: range) -> int:
    """What vLLM adds to experts in mxfp4, so that its default kernels of a card can multiply them."""
    model, deployment, experts = launch.model, launch.deployment, launch.model.experts
    if experts is None or deployment.quantization != "mxfp4":
        return 0
    multiples = _PADDED
    # Experts on a latent vector (Kimi K3) run in later releases alone.
    if not experts.latent_size and launch.gpu.architecture in _BLACKWELL:
        multiples = (_PADDED[0], launch.release.mxfp4_width)
    elif not experts.latent_size and launch.gpu.architecture not in _MARLIN:
        return 0
    ranks = deployment.expert_ranks(launch.tensor_parallel)
    hidden_size, width = experts.latent_size or model.hidden_size, experts.intermediate_size // ranks.slices
    padded = (-(-size // multiple) * multiple for size, multiple in zip((hidden_size, width), multiples, strict=True))
    added = _expert_bytes(next(padded), next(padded), experts.bias) - _expert_bytes(hidden_size, width, experts.bias)
    return len(set(layers) & set(experts.layers)) * -(-experts.count // ranks.holders) * added


def _expert_bytes(hidden_size: int, width: int, bias: bool) -> int:
    """Gate, up and down in 4 bits with an exponent of 8 bits for 32 values, and their biases in 16 bits."""
    return 3 * hidden_size * width * 17 // 32 + (2 * (2 * width + hidden_size) if bias else 0)


def _block_bytes(launch: Launch, layers: range) -> int:
    layout = launch.layout
    if layout and layout.config:
        return layout.block_bytes(launch.model, layers)
    groups = (layout.largest(layers),) if layout else launch.model.kv_groups(layers)
    dtype, ranks = launch.deployment.kv_dtype, launch.tensor_parallel
    kept = sum(launch.model.group_slot_bytes(group, dtype, ranks) for group in groups)
    if launch.speculative is not None:
        kept += launch.speculative.drafter_slot_bytes(launch.model, ranks, launch.deployment)
    return launch.block_size * kept


def activation_bytes(launch: Launch, layers: range, last: bool) -> int:
    """Peak of the step that vLLM profiles, in bytes; the module docstring has the formula."""
    model, tokens = launch.model, launch.max_num_batched_tokens
    dense = max(_dense_width(model, layer) for layer in layers) // launch.tensor_parallel
    widest, mixer = model.mlp_matrices * dense, model.state_mixer(launch.tensor_parallel)
    if mixer and set(layers) & set(model.state_layers):
        widest = max(widest, mixer.gemm_elements(launch.tensor_parallel))
    # Of several hidden states both those that a part of a layer reads and those that it writes.
    streams = 2 * (model.residual_streams - 1)
    residuals = (model.residual_blocks(model.num_layers) + streams) * model.hidden_size
    forward = 2 * tokens * (5 * model.hidden_size + residuals + widest)
    sampled = min(launch.max_num_seqs, tokens)
    sampler = launch.profiling.sampler_bytes * sampled * model.vocab_size + 4 * tokens * model.hidden_size
    workspace = 0
    if model.experts and set(layers) & set(model.experts.layers):
        ranks = launch.deployment.expert_ranks(launch.tensor_parallel)
        width, gathered = model.experts.intermediate_size // ranks.slices, tokens * ranks.engines
        hidden = model.experts.latent_size or model.hidden_size
        workspace = 2 * gathered * model.experts.used * (max(2 * width, hidden) + width)
    if model.indexer and model.indexer.block_tokens:
        chosen = model.indexer.top_k // model.indexer.block_tokens
        workspace += 4 * tokens * model.indexer.heads_on_rank(launch.tensor_parallel) * chosen
    elif model.indexer:
        factor = 40 if launch.max_model_len <= 1 << 18 else 16
        workspace = max(workspace, factor * launch.max_model_len * model.indexer.slot_bytes)
        workspace += 4 * tokens * model.indexer.top_k
        forward = max(forward, 2 * tokens * 5 * model.hidden_size + _INDEXER_LOGITS_BYTES)
    return workspace + max(forward, last * sampler)


def _dense_width(model: ModelSpec, layer: int) -> int:
    if model.experts and layer in model.experts.layers:
        return model.experts.shared_size
    return model.mlp_size(layer)


def _rotary_bytes(model: ModelSpec) -> int:
    """Bytes of the table of sines and cosines for ``model.max_model_len`` positions, which all layers share."""
    width = model.latent.rope_dim if model.latent else model.head_dim
    return 0 if model.learned_positions else 2 * model.max_model_len * width


def require_divisible(model: ModelSpec, tensor_parallel: int, deployment: Deployment = Deployment()) -> None:
    """Raise SettingError if the ranks cannot divide heads, vocabulary (padded to 64) or MLP evenly, as vLLM requires."""
    model.kv_heads_per_rank(tensor_parallel)
    vocabulary = -(-model.vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
    widths = {"MLP width": model.intermediate_size, "vocabulary": vocabulary}
    slices = deployment.expert_ranks(tensor_parallel).slices
    if model.experts and model.experts.intermediate_size % slices:
        remedy = f"must divide the expert width {model.experts.intermediate_size} of {model.name}"
        if deployment.data_parallel > 1:
            remedy = f"times data_parallel_size {deployment.data_parallel} {remedy}, without --enable-expert-parallel"
        raise SettingError("tensor_parallel", tensor_parallel, remedy)
    for what, width in widths.items():
        if width % tensor_parallel:
            raise SettingError("tensor_parallel", tensor_parallel, f"must divide the {what} {width} of {model.name}")


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of the KV cache.

    Attributes:
        stage: The stage with the fewest blocks, which limits the pool.
        num_blocks: Blocks of the pool, including the null block, which holds no tokens.
        max_concurrency: Concurrent sequences of max_model_len, as vLLM logs it.
        num_tokens: max_concurrency * max_model_len, as vLLM logs it.
    """

    stage: StageMemory
    num_blocks: int
    max_concurrency: float
    num_tokens: int


def capacity(launch: Launch) -> Capacity:
    """Capacity of the KV cache of a launch.

    Raises:
        SettingError: The ranks or stages cannot divide the model.
    """
    stage = min(stage_memories(launch), key=lambda memory: memory.num_blocks)
    blocks = launch.num_gpu_blocks_override or stage.num_blocks
    needed = launch.sequence_blocks(launch.max_model_len)
    return Capacity(stage, blocks, blocks / needed, blocks * launch.max_model_len // needed)


def users(launch: Launch, num_blocks: int, tokens: int) -> int:
    """Sequences with ``tokens`` of prompt and output that run at once in the pool without preemption, whatever max_num_seqs is.

    They may all be at their full length. A prompt takes more while it is computed, but waits for that without preempting any.
    """
    return max(0, num_blocks - 1) // launch.decode_blocks(tokens)


def fits(launch: Launch) -> bool:
    """Whether every GPU has room for one sequence of max_model_len: vLLM's ``check_enough_kv_cache_memory``.

    For models with states it also needs the null block, as in vLLM 0.33.
    """
    needed = launch.sequence_blocks(launch.max_model_len) + (launch.model.mixer is not None)
    return all(memory.kv_cache_bytes >= needed * memory.block_bytes > 0 for memory in stage_memories(launch))


def capture_blocks(launch: Launch) -> int | None:
    """Blocks that max_num_seqs must not exceed: each sequence of a captured decode step needs one for its states.

    vLLM compares it with ``KVCacheConfig.num_blocks``: all blocks of the pool, whatever the number of groups, and the null block too
    (``resolve_cudagraph_mode_and_sizes`` of its ``config/compilation.py``).

    Returns:
        None where nothing is compared: without states, without graphs of whole decode steps, and before 0.20.
    """
    captures = launch.deployment.cuda_graphs and launch.full_graphs
    if not (launch.model.state_layers and captures and launch.release.checks_states):
        return None
    blocks = capacity(launch).num_blocks
    if launch.model.model_type == _GLM5_NEXT and launch.release.since < _FIRST_GLM5_NEXT:
        return min(blocks, _BLACKWELL_GRAPH if launch.gpu.architecture in _BLACKWELL else MAX_CAPTURED)
    return blocks


def longest_model_len(launch: Launch) -> int:
    """The longest max_model_len that fits, up to the launch's; 0 if none fits (``estimate_max_model_len``)."""
    return _largest(lambda tokens: fits(replace(launch, max_model_len=tokens)), launch.max_model_len)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` for which ``holds`` is true; 0 if none. ``holds`` is true up to some number."""
    least = 0
    while least < most:
        middle = -(-(least + most) // 2)
        least, most = (middle, most) if holds(middle) else (least, middle - 1)
    return least
