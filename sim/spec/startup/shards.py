"""Matrices of quantised checkpoints that tensor-parallel ranks cannot divide, because blocks or groups share a scale.

    fp8 in blocks   inputs of a rank in multiples of the block, of matrices that ranks divide by inputs (``validate_fp8_block_shape``)
    its experts     the width of a rank in multiples of the block (``validate_fp8_block_shape_moe``); since 0.30 their scales are repeated
                    for the largest block that divides block, width and hidden size, of 32 at least (``refine_fp8_moe_block_shape``)
    awq             inputs of a rank in multiples of the group (``AWQLinearMethod``, to which vLLM falls back from Marlin); experts have
                    kernels with smaller groups
    w4a16           the same, of ``CompressedTensorsWNA16``, where an assertion fails

as the wheels of 0.10 to 0.33 say, of which 0.15, 0.21, 0.23, 0.25, 0.29, 0.31 and 0.32 were not read: their neighbours are taken, the earlier. Not
checked are outputs, which have no such group in these formats, and gptq: Marlin's and Triton's kernels refuse a split group, Exllama's (float16 alone) and
Machete's (compute capability 9.0) take it (``can_implement`` in the wheel of 0.33), and a checkpoint's dtype is not stored. ``split_group`` names it.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from ...types.optional import not_none
from ..deployment import ExpertRanks
from ..matrix import QUANTIZATIONS, format_of
from ..shape import ModelSpec
from ..weights import layer_matrices
from .launch import Launch

_FIRST_REFINED, _SMALLEST = 30, 32
_GROUPED = ("awq", "w4a16", "w4a16-g32")


def broken_shard(launch: Launch) -> str | None:
    """vLLM's message where ranks cannot divide the blocks or groups of a quantised checkpoint; None where they can."""
    form, minor = launch.deployment.quantization, launch.release.since[1]
    return None if form is None else _broken(launch.model, launch.tensor_parallel, launch.expert_ranks, form, minor)


# A search for the longest sequence that fits asks a hundred times for the same model.
@lru_cache
def _broken(
    model: ModelSpec, tensor_parallel: int, expert_ranks: ExpertRanks, quantization: str, minor: int
) -> str | None:
    # Other fp8 than the checkpoint's has no blocks.
    block = model.fp8_block if quantization == model.quantization else None
    for layer in range(model.num_layers):
        for matrix in layer_matrices(model, layer, tensor_parallel, expert_ranks):
            form = format_of(matrix, quantization) if matrix.by_inputs else None
            inputs = matrix.inputs // matrix.ranks
            if form == "fp8" and block and matrix.part == "expert":
                text = _broken_experts(model, inputs, block, minor)
            elif form == "fp8" and block:
                text = _broken_block(inputs, block) if matrix.ranks > 1 else None
            elif form in _GROUPED and matrix.part != "expert" and matrix.ranks > 1:
                text = _broken_group(inputs, form)
            else:
                text = None
            if text is not None:
                return text
    return None


def split_group(launch: Launch) -> tuple[int, int] | None:
    """Inputs of a rank, and of a group, of a matrix in gptq with groups that ranks split; None where they do not."""
    form, ranks = launch.deployment.quantization, launch.tensor_parallel
    for layer in range(launch.model.num_layers) if form is not None and ranks > 1 else ():
        for matrix in layer_matrices(launch.model, layer, ranks, launch.expert_ranks):
            inputs = matrix.inputs // matrix.ranks
            if matrix.by_inputs and matrix.part != "expert" and format_of(matrix, form) == "gptq":
                group = QUANTIZATIONS["gptq"].group
                if matrix.ranks > 1 and inputs % group:
                    return inputs, group
    return None


def _broken_block(inputs: int, block: int) -> str | None:
    of_rank = f"Weight input_size_per_partition = {inputs}"
    return f"{of_rank} is not divisible by weight quantization block_k = {block}." if inputs % block else None


def _broken_experts(model: ModelSpec, width: int, block: int, minor: int) -> str | None:
    refined = gcd(block, width, not_none(model.experts).latent_size or model.hidden_size)
    if width % block == 0 or (minor >= _FIRST_REFINED and refined >= _SMALLEST):
        return None
    of_rank = f"The output_size of gate's and up's weight = {width}"
    return f"{of_rank} is not divisible by weight quantization block_n = {block}."


def _broken_group(inputs: int, form: str) -> str | None:
    group = QUANTIZATIONS[form].group
    if inputs % group == 0:
        return None
    sizes = f"({inputs} inputs of a rank, groups of {group})"
    if form != "awq":
        return f"AssertionError: assert input_size_per_partition % group_size == 0 {sizes}"
    aligned = "The input size is not aligned with the quantized weight shape."
    return f"{aligned} This can be caused by too large tensor parallel size. {sizes}"
