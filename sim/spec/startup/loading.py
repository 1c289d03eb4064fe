"""Weights of a pipeline stage as vLLM's loader keeps them, with what its kernels and torch's allocator add.

The log's "Model loading took" is ``torch.cuda.max_memory_allocated``. Beside the checkpoint's parameters it has

    rotary tables     one for each width of a head that layers have; ``MRotaryEmbedding`` has four times the positions, Gemma 3's scaled ones
                      (``LinearScalingRotaryEmbedding``) eight times
    padding           of experts in mxfp4, by the kernels that a release chooses for a card; Triton's on Hopper keep biases in fp32, and up to 0.24
                      the checkpoint's scales beside their own
    balancing         of experts (``eplb``)
    latent attention  a copy of the up projection in 16 bits, where the checkpoint's has fewer (``MLAAttention``)
    deep stack        inputs of Qwen3-VL's first layers for a whole step (``deepstack_input_embeds``)
    ends of segments  torch takes memory for a tensor from 10 MiB on in multiples of 2 MiB, and leaves the end unused
    unsplit blocks    while vLLM loads since 0.24, torch splits no block of 20 MiB or more (``_scoped_allocator_max_split``), so that a tensor
                      may take a block with up to 20 MiB more: experts in mxfp4, which their kernels order anew. The high end

Where the checkpoint's files are at hand, their size (``model.safetensors.index.json``) says how much the parameters are off, as checkpoints
of one model keep different parts in 16 bits: all stages and ranks are off by that share. A drafter in the files is not counted.

Sources: the wheels of 0.10 to 0.30; torch's ``CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from ...types.errors import SettingError
from ..deployment import NVFP4, Deployment
from ..kernels import MARLIN, TRITON, TRTLLM_MXFP4, TRTLLM_MXFP8
from ..matrix import WEIGHT_BITS, Matrix, format_of, formats_by_part, matrix_bytes, value_bytes
from ..releases import MARLIN_MXFP4
from ..shape import ModelSpec
from ..speculative import one_layer
from ..weights import layer_matrices, layers_bytes, stage_bytes
from .eplb import kept_bytes
from .estimate import Estimate, exactly
from .launch import Launch
from .shards import broken_shard

#: Multiples of the hidden size and of a rank's width of mxfp4 experts on other kernels than Marlin: ``create_weights`` of vLLM's
#: ``mxfp4.py``, since 0.19 ``mxfp4_round_up_hidden_size_and_intermediate_size`` of ``oracle/mxfp4.py``.
_ROCM, _TRTLLM_HIDDEN = (256, 256), 256
_HOPPER = 9
_VOCAB_PADDING = 64
#: Values of a scale in mxfp4.
_MX_BLOCK = 32
#: Rotary tables of a model type, as numerator and denominator of one table of a head's width: heads that are rotated in part, four times
#: the positions (``MRotaryEmbedding``), another base for layers with a window, or no rotation.
_ROTARY_TABLES = {
    "qwen3_next": (1, 4), "glm4_moe": (1, 2), "chatglm": (1, 2), "glm4": (1, 2), "minimax_m2": (1, 2), "nemotron_h": (0, 1),
    "qwen3_vl": (4, 1), "qwen3_vl_moe": (4, 1), "qwen2_5_vl": (4, 1), "gemma3": (9, 1), "gemma3_text": (2, 1),
}  # fmt: skip
#: Tensors from this size on have segments of their own, in multiples of ``_SEGMENT`` (``kMinLargeAlloc``, ``kRoundLarge``).
_LARGE, _SEGMENT = 10 << 20, 2 << 20
#: Shares by which logs are below and above these weights, by number format: 31 logs of 0.10 to 0.31 (docs/results/start-up-logs.md).
_ERRORS = {None: (0.003, 0.004), "mxfp4": (0.005, 0.005), "nvfp4": (0.03, 0.01)}
_OTHER_ERROR = (0.004, 0.008)
#: The same where the checkpoint is another one of that shape: those in nvfp4 of one model keep other parts in 16 bits. Two of RedHat's log
#: 12 % less and 7 % more than nvidia's, and one of unsloth's is refused with about 25 % more. Of 15 in other formats the logs are from 2.8 % less
#: to 2.0 % more.
_TAKEN = {None: (0.003, 0.02), "nvfp4": (0.13, 0.25)}
_OTHER_TAKEN = (0.03, 0.03)
#: With Triton's kernels installed beside a wheel that has none, gpt-oss 120B has 64.38 GiB on Hopper, not 65.97.
_LESS_ON_HOPPER = 0.025
#: To what Triton's kernels on Hopper pad a rank's width, and the rows and columns of scales (``HopperMXScaleLayout``).
_TRITON_WIDTH, _SCALE_ROWS, _SCALE_COLUMNS = 64, 256, 2
#: What torch cannot use of its segments since these kernels ordered the experts of all layers anew, as multiples of a layer's larger matrix. With
#: padding of values each is copied before: 7.0 and 12.8 in two logs of gpt-oss 20B on one and two H100 (0.19, llm-d-planner, "reserved by
#: PyTorch but unallocated"). The layouts' code and a model of torch's allocator give 7.6 and 11.0 for these, 13 and 3.5 for 120B on two
#: and four; and without padding 1.6 to 3.6.
_REORDERED, _PADDED_AND_REORDERED = (1.6, 2.0, 3.6), (3.5, 7.0, 13.0)
#: gpt-oss 120B logs 19 MiB a layer more than its tensors on an H100 (0.30, mondegreens/apron), and 37 on eight RTX PRO 4500 (0.28,
#: vllm-project/vllm#51590).
_FIRST_UNSPLIT, _UNSPLIT = (0, 24), 20 << 20


def loaded_bytes(launch: Launch) -> list[Estimate]:
    """Bytes of each pipeline stage on one GPU: matrices and vectors, what is listed above, the drafter and buffers of LoRA, less
    what is on the host.

    The low end has no ends of segments: there are none with ``expandable_segments``.

    Raises:
        SettingError: The ranks or stages cannot divide the model.
    """
    require_divisible(launch.model, launch.tensor_parallel, launch.deployment)
    if (text := broken_shard(launch)) is not None:
        raise SettingError("tensor_parallel", launch.tensor_parallel, f"does not divide the weights: {text}")
    deployment, model = launch.deployment, launch.model
    ranks = launch.expert_ranks
    stored = stage_bytes(
        model,
        launch.tensor_parallel,
        deployment.pipeline_parallel,
        deployment.quantization,
        ranks,
        launch.layer_partition,
    )
    share, common = _file_share(launch), _rotary_bytes(model)
    stored = [round(share * size) for size in stored]
    if launch.speculative is not None:
        stored[-1] += launch.speculative.drafter_bytes(model, launch.tensor_parallel, deployment, ranks)
    stored[0] += _deep_stack_bytes(launch)
    below, above = _errors(launch)
    # In float32 nothing is quantised (``dtypes``).
    wider = launch.element_bytes * 8 // WEIGHT_BITS
    found = []
    drafter = None if launch.speculative is None else launch.speculative.drafter(model)
    if drafter is not None:
        stored[-1] += kept_bytes(launch, drafter, range(1))
    for layers, weights in zip(launch.stages, stored, strict=True):
        copies, ends = (sum(part(launch, layer) for layer in layers) for part in (_copied_bytes, _segment_ends))
        tensors = wider * (weights + common + copies) + _padding_bytes(launch, layers)
        most = round((tensors + ends) * (1 + above)) + _unsplit_bytes(launch, layers)
        kept = Estimate(round(tensors * (1 - below)), tensors + ends, most)
        moved, buffers = _offloaded(launch, layers), kept_bytes(launch, model, layers)
        if launch.lora is not None:
            buffers += wider * launch.lora.stage_bytes(model, layers, launch.tensor_parallel, ranks)
        buffers += _output_bytes(launch, layers)
        found.append(Estimate(*(size - off + buffers for size, off in zip(kept, reversed(moved), strict=True))))
    return found


def _output_bytes(launch: Launch, layers: range) -> int:
    """Outputs in 8 bits of a step's tokens, which each layer of TensorRT-LLM's kernels allocates beside a KV cache in nvfp4 (``_nvfp4_fp8_out``
    of vLLM's flashinfer.py, since 0.21)."""
    if launch.deployment.kv_dtype != NVFP4 or not launch.gpu.is_blackwell:
        return 0
    heads, kept = launch.model.heads_per_rank(launch.tensor_parallel), launch.model.attention_layers
    return len(set(layers) & set(kept)) * launch.max_num_batched_tokens * heads * launch.model.head_dim


def _file_share(launch: Launch) -> float:
    """Size of the checkpoint's files over the computed size, both without a drafter; 1 where the files are not known."""
    model, quantization = launch.model, launch.deployment.quantization
    if not _is_weighed(launch) or model.file_weights is None:
        return 1.0
    total, has_drafter = model.file_weights
    if has_drafter:
        projection = 2 * model.hidden_size**2 * WEIGHT_BITS // 8
        total -= layers_bytes(one_layer(model, with_experts=True), range(1), 1, quantization) + projection
    return total / sum(stage_bytes(model, 1, 1, quantization))


def _is_weighed(launch: Launch) -> bool:
    """Whether the checkpoint's files are those that are loaded, in their own format."""
    model = launch.model
    return (
        model.file_weights is not None and launch.deployment.quantization == model.quantization and not launch.is_taken
    )


def _offloaded(launch: Launch, layers: range) -> Estimate:
    """Weights of these layers on the host: tensor after tensor until they reach what the user set, so that the last may exceed it
    (``maybe_offload_to_cpu`` of vLLM's ``models/utils.py``, later ``UVAOffloader``)."""
    if not launch.cpu_offload_bytes:
        return exactly(0)
    deployment = launch.deployment
    ranks = launch.expert_ranks
    wider = launch.element_bytes * 8 // WEIGHT_BITS
    whole = wider * layers_bytes(launch.model, layers, launch.tensor_parallel, deployment.quantization, ranks)
    largest = wider * max(
        matrix_bytes(matrix, deployment.quantization)
        for layer in layers
        for matrix in layer_matrices(launch.model, layer, launch.tensor_parallel, ranks)
    )
    least = launch.cpu_offload_bytes
    return Estimate(*(min(whole, size) for size in (least, least + largest // 2, least + largest)))


def _errors(launch: Launch) -> tuple[float, float]:
    """Shares by which the weights may be less and more than computed: those of the least known format of the checkpoint."""
    quantization = launch.deployment.quantization
    formats = {None} if quantization is None else set(formats_by_part(quantization).values())
    if _is_weighed(launch):
        return _ERRORS[None]
    below, above = (max(_ERRORS.get(form, _OTHER_ERROR)[side] for form in formats) for side in range(2))
    if launch.model.experts and "mxfp4" in formats and launch.gpu.major == _HOPPER and _mxfp4_kernel(launch) == MARLIN:
        below = _LESS_ON_HOPPER
    if launch.is_taken:
        taken = [_TAKEN.get(form, _OTHER_TAKEN) for form in formats]
        below, above = max(below, *(each[0] for each in taken)), max(above, *(each[1] for each in taken))
    return below, above


def _copied_bytes(launch: Launch, layer: int) -> int:
    """The up projection of latent attention in 16 bits, which is a view of the checkpoint's where that has 16 bits too."""
    model, latent = launch.model, launch.model.latent
    up_projection = Matrix(1, 1, part="mixer")
    is_plain = format_of(up_projection, launch.deployment.quantization) is None or ("mixer", layer) in model.unquantized
    if latent is None or is_plain or not model.span(layer).keeps_tokens:
        return 0
    outputs = model.heads_per_rank(launch.tensor_parallel) * (latent.nope_dim + latent.v_dim)
    return latent.kv_rank * outputs * WEIGHT_BITS // 8


def _segment_ends(launch: Launch, layer: int) -> int:
    """Unused ends of the segments of a layer's MLP and experts. Those of attention are smaller, and padded experts end evenly."""
    if launch.model.shares_weights(layer):
        return 0
    deployment = launch.deployment
    ranks = launch.expert_ranks
    sizes = [
        value_bytes(matrix, deployment.quantization) * launch.element_bytes * 8 // WEIGHT_BITS
        for matrix in layer_matrices(launch.model, layer, launch.tensor_parallel, ranks)
        if matrix.part in ("mlp", "shared", "expert") and format_of(matrix, deployment.quantization) != "mxfp4"
    ]
    return sum(-size % _SEGMENT for size in sizes if size >= _LARGE)


def _unsplit_bytes(launch: Launch, layers: range) -> int:
    """What both tensors of a layer's experts in mxfp4 may keep beside them."""
    experts = launch.model.experts
    if experts is None or launch.deployment.quantization != "mxfp4" or launch.release.since < _FIRST_UNSPLIT:
        return 0
    return 2 * _UNSPLIT * len(set(layers) & set(experts.layers))


def _deep_stack_bytes(launch: Launch) -> int:
    encoder = launch.model.encoder
    levels = 0 if encoder is None else encoder.deep_stack
    return levels * launch.max_num_batched_tokens * launch.model.hidden_size * WEIGHT_BITS // 8


def _padding_bytes(launch: Launch, layers: range) -> int:
    """What vLLM adds to experts in mxfp4, so that its default kernels of a card can multiply them."""
    model, deployment, experts = launch.model, launch.deployment, launch.model.experts
    if experts is None or deployment.quantization != "mxfp4":
        return 0
    ranks = launch.expert_ranks
    hidden_size, width = experts.latent_size or model.hidden_size, experts.intermediate_size // ranks.slices
    if _reorders_experts(launch):
        kept = _triton_bytes(launch, hidden_size, width, experts.bias)
    else:
        of_hidden, of_width = _mxfp4_multiples(launch)
        kept = _expert_bytes(_up(hidden_size, of_hidden), _up(width, of_width), experts.bias)
    added = kept - _expert_bytes(hidden_size, width, experts.bias)
    return len(set(layers) & set(experts.layers)) * ranks.held(experts.count) * added


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _mxfp4_kernel(launch: Launch) -> str | None:
    """Kernels of experts in mxfp4; None is another vendor's. Experts on a latent vector (Kimi K3) run in later releases alone."""
    assert launch.model.experts is not None
    if launch.model.experts.latent_size:
        return MARLIN
    return None if launch.gpu.compute_capability is None else launch.experts_kernel


def _reorders_experts(launch: Launch) -> bool:
    """Whether Triton's kernels run, and order the experts anew."""
    if launch.model.experts is None or launch.deployment.quantization != "mxfp4" or not launch.release.mxfp4_triton:
        return False
    return launch.gpu.major == _HOPPER and _mxfp4_kernel(launch) == TRITON


def _mxfp4_multiples(launch: Launch) -> tuple[int, int]:
    """Multiples of the hidden size and of a rank's width by other kernels."""
    kernel = _mxfp4_kernel(launch)
    if kernel is None:
        return _ROCM
    trtllm = kernel in (TRTLLM_MXFP4, TRTLLM_MXFP8)
    return (_TRTLLM_HIDDEN, launch.release.mxfp4_width) if trtllm else MARLIN_MXFP4


def _triton_bytes(launch: Launch, hidden_size: int, width: int, bias: bool) -> int:
    """An expert as Triton's kernels on Hopper keep it."""
    multiple, found = launch.release.mxfp4_triton, 0
    width = _up(width, _TRITON_WIDTH)
    for rows, columns in ((2 * width, hidden_size), (hidden_size, width)):
        scales = columns // _MX_BLOCK
        found += _up(rows, multiple) * _up(columns // 2, multiple)
        found += (
            _up(rows, _SCALE_ROWS) * _up(scales, _SCALE_COLUMNS) + launch.release.keeps_block_scales * rows * scales
        )
    return found + (4 * (2 * width + hidden_size) if bias else 0)


def reordering_fragments(launch: Launch, layers: range) -> Estimate:
    """What torch cannot use of its segments, as these kernels order a stage's experts anew; none since torch splits no large block."""
    experts = launch.model.experts
    if experts is None or not set(layers) & set(experts.layers) or not _reorders_experts(launch):
        return exactly(0)
    if launch.release.since >= _FIRST_UNSPLIT:
        return exactly(0)
    ranks = launch.expert_ranks
    rows = 2 * _up(experts.intermediate_size // ranks.slices, _TRITON_WIDTH)
    largest = ranks.held(experts.count) * rows * launch.model.hidden_size // 2
    times = _PADDED_AND_REORDERED if launch.release.mxfp4_triton > _MX_BLOCK else _REORDERED
    return Estimate(*(round(size * largest) for size in times))


def _expert_bytes(hidden_size: int, width: int, bias: bool) -> int:
    """Gate, up and down in 4 bits with an exponent of 8 bits for 32 values, and their biases in 16 bits."""
    return 3 * hidden_size * width * 17 // 32 + (2 * (2 * width + hidden_size) if bias else 0)


def _rotary_bytes(model: ModelSpec) -> int:
    """Bytes of the tables of sines and cosines for ``model.max_model_len`` positions, which all layers share."""
    if model.learned_positions:
        return 0
    width = model.rotary_dim
    if model.window_heads and model.window_heads.head_dim != model.head_dim:
        width += model.window_heads.head_dim
    tables, shared = _ROTARY_TABLES.get(model.model_type or "", (1, 1))
    return 2 * model.max_model_len * width * tables // shared


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
