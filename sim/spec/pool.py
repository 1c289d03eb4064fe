"""How many KV blocks fit beside the weights, by the SOSP'23 artifact's own reckoning."""

from __future__ import annotations

from ..errors import SettingError
from .gpu import GpuSpec
from .shape import ModelSpec

GIB = 1 << 30
MAX_BATCHED_TOKENS = 2560
WORKSPACE_BYTES = GIB
SWAP_BYTES_PER_GPU = 20 * GIB
#: Most blocks of a swap space: with ids, every one takes memory of the machine that simulates.
MOST_HOST_BLOCKS = 1 << 26


def block_bytes(model: ModelSpec, num_gpus: int = 1, block_size: int = 16, dtype: str = "fp16") -> int:
    """Bytes of one block of ``block_size`` slots on each of ``num_gpus`` tensor-parallel ranks."""
    if block_size < 1:
        raise SettingError("block_size", block_size, "must be at least 1 slot")
    return block_size * model.slot_bytes(dtype, num_gpus)


def paper_num_blocks(model: ModelSpec, gpu: GpuSpec, num_gpus: int, block_size: int = 16) -> int:
    """Blocks of the KV pool as SOSP'23 sized it, in fp16 with the model split over ``num_gpus``.

    ``(int(0.95 * memory) - parameters - activations of 2560 tokens - 1 GiB) // block_bytes``. As in
    the artifact's analyzer, matrices are divided among the ranks while every rank holds all vectors
    and the position table (a rotary one a layer where none is learned), and activations are the
    larger of twice a layer's widest tensors and twice the logits of all tokens.

    The output head of untied embeddings is not counted, and a gated MLP counts three activations:
    only so does one formula give the 984 blocks stated for LLaMA-13B beside OPT's three pools. The
    artifact's own LLaMA analyzer counts the head, rotary tables of 8,192 positions and two
    activations, which comes to 965.

    Raises SettingError where the weights leave no slot, and where a block is larger than what they leave.
    """
    usable = int(0.95 * gpu.memory_bytes)
    taken = _parameter_bytes(model, num_gpus) + _activation_bytes(model, num_gpus) + WORKSPACE_BYTES
    slots = (usable - taken) // block_bytes(model, num_gpus, 1)
    if slots < 1:
        remedy = f"{model.name} leaves no KV blocks on {gpu.name}; use more or larger GPUs"
        raise SettingError("num_gpus", num_gpus, remedy)
    blocks = (usable - taken) // block_bytes(model, num_gpus, block_size)
    if blocks < 1:
        remedy = f"{model.name} leaves room for {slots} slots on {num_gpus} x {gpu.name}; take smaller blocks"
        raise SettingError("block_size", block_size, remedy)
    return blocks


def host_blocks(
    model: ModelSpec, num_gpus: int = 1, block_size: int = 16, swap_bytes_per_gpu: int = SWAP_BYTES_PER_GPU
) -> int:
    """Blocks of the swap space in host memory: 20 GiB a GPU in SOSP'23.

    Raises SettingError for more than ``MOST_HOST_BLOCKS``.
    """
    blocks = swap_bytes_per_gpu // block_bytes(model, num_gpus, block_size)
    if blocks > MOST_HOST_BLOCKS:
        remedy = f"comes to {blocks:,} blocks, more than {MOST_HOST_BLOCKS:,}; lower it or take larger blocks"
        raise SettingError("swap_space", swap_bytes_per_gpu / GIB, remedy)
    return blocks


def _parameter_bytes(model: ModelSpec, num_gpus: int) -> int:
    second_embedding = 0 if model.tied_embeddings else model.head_params(num_gpus)
    rotary = 0 if model.learned_positions else model.num_layers * model.max_model_len * model.head_dim
    return model.weight_bytes("fp16", num_gpus) + 2 * (rotary - second_embedding)


def _activation_bytes(model: ModelSpec, num_gpus: int) -> int:
    query_heads, kv_heads = model.heads_per_rank(num_gpus), model.kv_heads_per_rank(num_gpus)
    qkv = (query_heads + 2 * kv_heads) * model.head_dim
    mlp = model.mlp_matrices * model.intermediate_size // num_gpus
    widest = max(2 * (max(qkv, mlp) + model.hidden_size), 2 * model.vocab_size)
    return 2 * MAX_BATCHED_TOKENS * widest
