"""Matrices of quantised checkpoints that tensor-parallel ranks cannot divide, because blocks or groups share a scale.

    fp8 in blocks   inputs of a rank in multiples of the block, of matrices that ranks divide by inputs (``validate_fp8_block_shape``)
    its experts     the width of a rank in multiples of the block (``validate_fp8_block_shape_moe``); since 0.30 their scales are repeated
                    for the largest block that divides block, width and hidden size, of 32 at least (``refine_fp8_moe_block_shape``)
    awq             inputs of a rank in multiples of the group (``AWQLinearMethod``, to which vLLM falls back from Marlin); experts have
                    kernels with smaller groups
    w4a16           the same, of ``CompressedTensorsWNA16``, where an assertion fails
    gptq            the same up to 0.21 by ``GPTQLinearMethod``, which ``--quantization gptq`` asks for, and cards that Marlin does not run on. Else by
                    the kernels (``can_implement``): Marlin's and Triton's refuse a split group, Machete's (compute capability 9.0), Exllama's
                    (float16) and since 0.23 Humming's take it

as the wheels of 0.10 to 0.33 say, of which 0.15, 0.21, 0.25, 0.29, 0.31 and 0.32 were not read: their neighbours are taken, the earlier; those of gptq are of
0.19, 0.20, 0.22 to 0.24, 0.28 and 0.33. Not checked are outputs, which have no such group in these formats. A checkpoint's dtype is not stored, so that up to
0.22 a split group in gptq is refused for ``--dtype bfloat16`` alone; ``split_group`` names the others.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from ...types.optional import not_none
from ..deployment import ExpertRanks
from ..matrix import QUANTIZATIONS, Matrix, format_of
from ..shape import ModelSpec
from ..weights import layer_matrices
from .launch import Launch

_FIRST_REFINED, _SMALLEST = 30, 32
_GROUPED = ("awq", "w4a16", "w4a16-g32")
#: The last minor release with a method of Exllama's kernels alone, the last without Humming's, and Marlin's least compute capability by the first release.
_LAST_EXLLAMA, _LAST_WITHOUT_HUMMING = 21, 22
_MARLIN = ((0, 80), (14, 75))
#: Multiples of inputs and outputs of a rank that Machete's kernels have, on its compute capability alone.
_MACHETE, _MACHETE_SHAPE = 90, (64, 128)


def broken_shard(launch: Launch) -> str | None:
    """vLLM's message where ranks cannot divide the blocks or groups of a quantised checkpoint; None where they can."""
    form, minor = launch.deployment.quantization, launch.release.since[1]
    if form is None:
        return None
    found = _broken(launch.model, launch.tensor_parallel, launch.expert_ranks, form, minor)
    return _broken_gptq(launch) if found is None else found


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
    split = _split_matrices(launch.model, launch.tensor_parallel, launch.expert_ranks, launch.deployment.quantization)
    return (split[0].inputs // split[0].ranks, QUANTIZATIONS["gptq"].group) if split else None


@lru_cache
def _split_matrices(
    model: ModelSpec, tensor_parallel: int, expert_ranks: ExpertRanks, quantization: str | None
) -> tuple[Matrix, ...]:
    """The matrices in gptq with groups that ranks split, each shape once."""
    found: dict[Matrix, None] = {}
    for layer in range(model.num_layers) if quantization is not None and tensor_parallel > 1 else ():
        for matrix in layer_matrices(model, layer, tensor_parallel, expert_ranks):
            divided = matrix.by_inputs and matrix.ranks > 1 and matrix.part != "expert"
            if divided and format_of(matrix, quantization) == "gptq":
                found |= {matrix: None} if matrix.inputs // matrix.ranks % QUANTIZATIONS["gptq"].group else {}
    return tuple(found)


def _broken_gptq(launch: Launch) -> str | None:
    """The message of a release without kernels for split groups of gptq, by the card and ``--dtype``."""
    minor = launch.release.since[1]
    split = _split_matrices(launch.model, launch.tensor_parallel, launch.expert_ranks, launch.deployment.quantization)
    capabilities = [card.compute_capability for card in launch.gpus or (launch.gpu,)]
    if not split or minor > _LAST_WITHOUT_HUMMING or None in capabilities:
        return None
    least = [capability for since, capability in _MARLIN if since <= minor][-1]
    below_marlin = any(capability is not None and capability < least for capability in capabilities)
    if minor <= _LAST_EXLLAMA and (launch.quantization_method == "gptq" or below_marlin):
        return _broken_group(split[0].inputs // split[0].ranks, "awq")
    if launch.dtype != "bfloat16":
        return None
    for matrix in split:
        inputs = matrix.inputs // matrix.ranks
        has_machete = {*capabilities} == {_MACHETE} and not (
            inputs % _MACHETE_SHAPE[0] or matrix.outputs % _MACHETE_SHAPE[1]
        )
        if not has_machete:
            kernels = f"MarlinLinearKernel: {inputs} inputs of a rank, groups of {QUANTIZATIONS['gptq'].group}; ExllamaLinearKernel: float16 activations alone"
            return f"Failed to find a kernel that can implement the WNA16 linear layer. Reasons: {kernels}."
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
