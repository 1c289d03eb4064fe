"""Number of KV blocks that fit beside the weights, computed as in the SOSP'23 artifact."""

from __future__ import annotations

from ..types.errors import SettingError
from .deployment import CUDA_GRAPH_BYTES, Deployment, stages
from .gpu import GIB, GpuSpec
from .hybrid import HybridLayout
from .kv_layers import attention_layers
from .shape import ModelSpec, refuse_states
from .weights import stage_bytes

MAX_BATCHED_TOKENS = 2560
WORKSPACE_BYTES = GIB
SWAP_BYTES_PER_GPU = 20 * GIB
#: Memory pages of a host with x86-64.
HOST_PAGE_BYTES = 4096
#: Maximum of blocks of a swap space: with ids, each takes memory of the simulating machine.
MOST_HOST_BLOCKS = 1 << 26


def block_bytes(
    model: ModelSpec, num_gpus: int = 1, block_size: int = 16, dtype: str = "fp16", pipeline_parallel: int = 1
) -> int:
    """Bytes of one block of ``block_size`` slots on each of ``num_gpus`` tensor-parallel ranks.

    A block spans the layers of a pipeline stage; this is the stage with the most layers.
    """
    _require_block_size(block_size)
    return block_size * model.slot_bytes(dtype, num_gpus, pipeline_parallel)


def page_bytes(
    model: ModelSpec, hybrid: HybridLayout, num_gpus: int, block_size: int, deployment: Deployment = Deployment()
) -> int:
    """Bytes of one page of KV groups on each rank, on the pipeline stage with the largest pages."""
    parts = stages(model.num_layers, deployment.pipeline_parallel)
    return max(_stage_page_bytes(model, hybrid, num_gpus, block_size, deployment, layers) for layers in parts)


def _stage_page_bytes(
    model: ModelSpec, hybrid: HybridLayout, num_gpus: int, block_size: int, deployment: Deployment, layers: range
) -> int:
    if hybrid.config:
        return hybrid.block_bytes(model, layers)
    one_layer = attention_layers(model, deployment.kv_dtype, num_gpus)[0].page_bytes(block_size)
    return one_layer * hybrid.largest(layers).num_layers


def paper_num_blocks(
    model: ModelSpec,
    gpu: GpuSpec,
    num_gpus: int,
    block_size: int = 16,
    deployment: Deployment = Deployment(),
    hybrid: HybridLayout | None = None,
) -> int:
    """Blocks of the KV pool as in SOSP'23, with the model on ``num_gpus`` tensor-parallel ranks per pipeline stage.

    ``(int(0.95 * memory) - parameters - activations of 2560 tokens - 1 GiB) // block_bytes``. As in
    the artifact's analyzer, ranks divide the matrices, and every rank holds all vectors and the position
    table (without learned positions, a rotary table for each layer). Activations are the larger of twice a
    layer's widest tensors and twice the logits of all tokens.

    The output head of untied embeddings is not counted in addition to the embedding, and a gated MLP counts
    three activations. Only with these two choices does one formula give both the 984 blocks stated for
    LLaMA-13B and the three pools of OPT. The artifact's LLaMA analyzer counts the head, rotary tables of 8,192
    positions and two activations, which gives 965.

    The pipeline stage with the least room limits the pool, as in vLLM. CUDA graphs take ``CUDA_GRAPH_BYTES``.
    Models with features that the artifact did not support (windows, latent vectors, experts) have one rotary
    table for all layers, as in vLLM. With KV groups (``hybrid``) a block is a page, which spans the layers of
    the largest group.

    Raises:
        SettingError: The weights leave no slot, or less than one block; or the model has layers with a state of
            fixed size and ``hybrid`` has no groups for them.
    """
    if hybrid is None or hybrid.config is None:
        refuse_states(model, "a pool of KV blocks has no room for its states")
    slots = _blocks_that_fit(model, gpu, num_gpus, 1, deployment, hybrid)
    if slots < 1:
        remedy = f"{model.name} leaves no KV blocks on {gpu.name}; use more or larger GPUs"
        raise SettingError("num_gpus", num_gpus, remedy)
    blocks = _blocks_that_fit(model, gpu, num_gpus, block_size, deployment, hybrid)
    if blocks < 1:
        remedy = f"{model.name} leaves room for {slots} slots on {num_gpus} x {gpu.name}; take smaller blocks"
        raise SettingError("block_size", block_size, remedy)
    return blocks


def _blocks_that_fit(
    model: ModelSpec,
    gpu: GpuSpec,
    num_gpus: int,
    block_size: int,
    deployment: Deployment,
    hybrid: HybridLayout | None,
) -> int:
    """Blocks that fit on the stage with the least room."""
    _require_block_size(block_size)
    usable = int(0.95 * gpu.memory_bytes) - WORKSPACE_BYTES - deployment.cuda_graphs * CUDA_GRAPH_BYTES
    ranks = deployment.expert_ranks(num_gpus)
    weights = stage_bytes(model, num_gpus, deployment.pipeline_parallel, deployment.quantization, ranks)
    fitting = []
    for number, layers in enumerate(stages(model.num_layers, deployment.pipeline_parallel)):
        last = number == deployment.pipeline_parallel - 1
        taken = weights[number] + _rotary_bytes(model, layers) + _activation_bytes(model, num_gpus, layers, last)
        if number == 0 and last and not model.tied_embeddings:
            taken -= 2 * model.head_params(num_gpus)
        if hybrid and hybrid.config:
            fitting.append((usable - taken) // hybrid.block_bytes(model, layers))
            continue
        groups = (hybrid.largest(layers),) if hybrid else model.kv_groups(layers)
        slot_bytes = sum(model.group_slot_bytes(group, deployment.kv_dtype, num_gpus) for group in groups)
        fitting.append((usable - taken) // (block_size * slot_bytes))
    return min(fitting)


def _require_block_size(block_size: int) -> None:
    if block_size < 1:
        raise SettingError("block_size", block_size, "must be at least 1 slot")


def host_blocks(
    model: ModelSpec,
    num_gpus: int = 1,
    block_size: int = 16,
    swap_bytes_per_gpu: int = SWAP_BYTES_PER_GPU,
    deployment: Deployment = Deployment(),
    hybrid: HybridLayout | None = None,
) -> int:
    """Blocks of the swap space in host memory: 20 GiB per GPU in SOSP'23.

    Args:
        hybrid: KV groups, each of which has blocks of its own; None is one group of all layers.

    Raises:
        SettingError: There are more than ``MOST_HOST_BLOCKS``.
    """
    whole = block_bytes(model, num_gpus, block_size, deployment.kv_dtype, deployment.pipeline_parallel)
    if hybrid is not None:
        whole = page_bytes(model, hybrid, num_gpus, block_size, deployment)
    blocks = swap_bytes_per_gpu // whole
    if blocks > MOST_HOST_BLOCKS:
        remedy = f"comes to {blocks:,} blocks, more than {MOST_HOST_BLOCKS:,}; lower it or take larger blocks"
        raise SettingError("swap_space", swap_bytes_per_gpu / GIB, remedy)
    return blocks


def offloaded_bytes(
    model: ModelSpec,
    num_gpus: int,
    block_size: int,
    chunk_blocks: int,
    deployment: Deployment = Deployment(),
    hybrid: HybridLayout | None = None,
    drafter_bytes: int = 0,
) -> int:
    """Bytes of a chunk of vLLM's native KV offloading (``CPUOffloadingSpec`` of vLLM 0.33, vllm/v1/kv_offload/cpu/spec.py).

    It has the bytes of a rank of the first pipeline stage for every rank of all stages, and begins on a page of the host. Of latent
    attention all ranks have the same bytes, which are kept once, unless they divide the tokens, or there are stages.

    Args:
        block_size: Tokens of a block on a rank.
        chunk_blocks: Blocks of a chunk.
        hybrid: KV groups, each of which has blocks of its own; None is one group of all layers.
        drafter_bytes: Of a block on each rank of the last stage, what the layers of a drafter keep; KV groups have these layers.
    """
    parts = stages(model.num_layers, deployment.pipeline_parallel)
    if hybrid is not None:
        own = _stage_page_bytes(model, hybrid, num_gpus, block_size, deployment, parts[0])
    else:
        groups = model.kv_groups(parts[0])
        own = block_size * sum(model.group_slot_bytes(group, deployment.kv_dtype, num_gpus) for group in groups)
        own += drafter_bytes * (len(parts) == 1)
    alike = model.has_vectors and deployment.decode_context_parallel == 1 and len(parts) == 1
    whole = chunk_blocks * own * (1 if alike else num_gpus * len(parts))
    return -(-whole // HOST_PAGE_BYTES) * HOST_PAGE_BYTES


def _rotary_bytes(model: ModelSpec, layers: range) -> int:
    if model.learned_positions:
        return 0
    known_to_the_artifact = not (model.has_vectors or model.spans or model.experts)
    return 2 * (len(layers) if known_to_the_artifact else 1) * model.max_model_len * model.rotary_dim


def _activation_bytes(model: ModelSpec, num_gpus: int, layers: range, last: bool) -> int:
    attention = [model.attention(num_gpus, model.span(layer)).projected for layer in layers]
    widest = max(*attention, *(model.mlp_width(layer, num_gpus) for layer in layers))
    elements = 2 * (widest + model.hidden_size)
    return 2 * MAX_BATCHED_TOKENS * max(elements, last * 2 * model.vocab_size)
