"""The kernels that vLLM takes for linear layers and for experts, by release, as its lists choose them on an NVIDIA card.

    linear layers   the first of ``model_executor/kernels/linear`` that supports the number format, the card and the sizes of a rank
    experts         the first of ``fused_moe/oracle`` that supports the number format, the card and how ranks divide them

Both with the packages that the wheels require (FlashInfer, Humming, DeepGEMM), without environment variables, ``--linear-backend`` and
``--moe-backend``, and with the default exchange of tokens between engines. ``tests/real_vllm/kernels.py`` runs vLLM's own modules, and
their choices in the wheels of 0.20 and 0.22 to 0.33 are ``tests/data/kernel_choices.json``. Earlier releases are taken as 0.20, but for
experts in 16 bits and in mxfp4. Layers in 16 bits are cuBLAS's, of which there is no choice.
"""

from __future__ import annotations

from typing import NamedTuple

from .deployment import ExpertRanks
from .gpu import GpuSpec
from .matrix import formats_by_part
from .shape import ModelSpec

MARLIN, HUMMING, MACHETE, TRITON, CUTLASS, DEEPGEMM = "MARLIN", "HUMMING", "MACHETE", "TRITON", "CUTLASS", "DEEPGEMM"
#: FlashInfer's; of fp8 in blocks its own for few rows and DeepGEMM's for more.
FLASHINFER, FLASHINFER_CUTLASS, FLASHINFER_CUTEDSL = "FLASHINFER", "FLASHINFER_CUTLASS", "FLASHINFER_CUTEDSL"
FLASHINFER_DEEPGEMM, FLASHINFER_TRTLLM, TRTLLM_MXFP4 = (
    "FLASHINFER_DEEPGEMM",
    "FLASHINFER_TRTLLM",
    "FLASHINFER_TRTLLM_MXFP4_BF16",
)
#: Experts of vLLM's own CUTLASS kernels, as its logs name them.
VLLM_CUTLASS = "VLLM_CUTLASS"
#: Kernels that unpack weights to 16 bits and multiply in these.
UNPACKING = frozenset((MARLIN, HUMMING, MACHETE))
#: Ways in which weights of fp8 are scaled: by row and column (compressed-tensors), by tensor (ModelOpt), by block, or by tensor when vLLM
#: converts a checkpoint of 16 bits.
FP8, FP8_TENSOR, FP8_BLOCK, FP8_ONLINE = "fp8", "fp8-tensor", "fp8-block", "fp8-online"
_INT4 = frozenset(("awq", "gptq", "w4a16", "w4a16-g32"))
_HOPPER, _FIRST_FP8 = 90, 89
#: First minor releases in which Hopper's weights are unpacked by Humming, and its mxfp4 experts have Triton's kernels.
_FIRST_HUMMING, _FIRST_TRITON_MXFP4 = 32, 12
#: The same, in which experts in 16 bits run in FlashInfer by default, and compute capability 12 has DeepGEMM.
_FIRST_FLASHINFER, _FIRST_DEEPGEMM_12 = 20, 24


class ExpertsNeed(NamedTuple):
    """What the choice of the experts' kernels depends on.

    Attributes:
        capability: Compute capability, 90 for 9.0.
        form: Number format of the weights; None is 16 bits.
        whole: Whether ranks hold whole experts, not slices.
        engines: Whether several engines share them.
    """

    capability: int
    form: str | None
    whole: bool = False
    engines: bool = False


def scaled_form(model: ModelSpec, quantization: str | None, form: str | None) -> str | None:
    """A number format of a checkpoint, of fp8 with how it is scaled.

    Checkpoints in fp8 without blocks are taken for compressed-tensors', but for those with nvfp4 beside it, which are ModelOpt's.
    """
    if form != "fp8" or quantization is None:
        return form
    if "nvfp4" in formats_by_part(quantization).values():
        return FP8_TENSOR
    if quantization != model.quantization:
        return FP8_ONLINE
    return FP8_BLOCK if model.fp8_block else FP8


def experts_need(model: ModelSpec, gpu: GpuSpec, quantization: str | None, ranks: ExpertRanks) -> ExpertsNeed | None:
    """What the choice depends on; None on other vendors' cards and without experts."""
    if gpu.compute_capability is None or model.experts is None:
        return None
    by_part = {} if quantization is None else formats_by_part(quantization)
    form = scaled_form(model, quantization, by_part.get("expert"))
    return ExpertsNeed(gpu.compute_capability, form, ranks.holders > 1, ranks.engines > 1)


def chosen_linear(capability: int, form: str, minor: int, inputs: int = 0, outputs: int = 0) -> str | None:
    """The kernels of a linear layer, as vLLM's classes are named; None where it finds none and does not start.

    Args:
        form: Number format of its weights; in 16 bits there is no choice.
        minor: Minor version of the release.
        inputs, outputs: Of a rank; 0 stands for multiples of 128.
    """
    if form in _INT4:
        if capability == _HOPPER and form != "w4a16-g32" and outputs % 128 == 0:
            return MACHETE
        # Marlin pads other sizes since 0.24.
        if minor < 24 and (inputs % 128 or outputs % 64):
            return None if minor < 23 else TRITON if form == "awq" else HUMMING
        return _unpacking(capability, minor)
    if form == "int8":
        return CUTLASS
    if form == FP8_BLOCK:
        return _linear_in_blocks(capability, minor, inputs, outputs)
    if form.startswith("fp8"):
        if capability < _FIRST_FP8:
            # ``CompressedTensorsW8A16Fp8`` has a list of its own.
            if form == FP8:
                return HUMMING if minor >= 25 else MARLIN
            # Two releases take CUTLASS's, which have no code for these cards.
            return CUTLASS if minor in (29, 30) else MARLIN
        return FLASHINFER if form == FP8_TENSOR and capability >= 100 else CUTLASS
    if capability < 100:
        return _unpacking(capability, minor)
    return FLASHINFER_CUTEDSL if capability < 120 and minor >= 24 else FLASHINFER_CUTLASS


def _linear_in_blocks(capability: int, minor: int, inputs: int, outputs: int) -> str:
    if capability < _FIRST_FP8:
        return MARLIN
    if capability == _FIRST_FP8:
        return TRITON if minor < 29 else MARLIN
    if inputs % 128 or outputs % 64:
        return CUTLASS
    if capability == _HOPPER:
        return FLASHINFER_DEEPGEMM
    return DEEPGEMM if capability < 120 or minor >= _FIRST_DEEPGEMM_12 else CUTLASS


def chosen_experts(need: ExpertsNeed, minor: int) -> str:
    """vLLM's name of the backend of experts.

    Args:
        minor: Minor version of the release.
    """
    capability, form = need.capability, need.form
    hopper, data_centre = capability == _HOPPER, capability // 10 == 10
    if form is None:
        # Before, FlashInfer's had to be asked for (``VLLM_USE_FLASHINFER_MOE_FP16``).
        if minor < _FIRST_FLASHINFER:
            return TRITON
        if data_centre:
            return FLASHINFER_TRTLLM
        of_flashinfer = capability >= 120 or (hopper and minor < 23)
        return FLASHINFER_CUTLASS if of_flashinfer and not need.engines else TRITON
    if form == "int8":
        return TRITON
    if form.startswith("fp8"):
        return _fp8_experts(need, minor)
    if form == "mxfp4":
        if data_centre:
            return TRTLLM_MXFP4
        return TRITON if hopper and minor >= _FIRST_TRITON_MXFP4 else MARLIN
    if form in _INT4:
        return _unpacking(capability, minor)
    if data_centre:
        return FLASHINFER_TRTLLM
    return FLASHINFER_CUTLASS if form == "nvfp4" and capability >= 120 else _unpacking(capability, minor)


def _fp8_experts(need: ExpertsNeed, minor: int) -> str:
    capability, form = need.capability, need.form
    if capability < _FIRST_FP8:
        return MARLIN
    hopper, data_centre = capability == _HOPPER, capability // 10 == 10
    if form == FP8:
        return VLLM_CUTLASS if hopper or data_centre else TRITON
    if form == FP8_ONLINE:
        return TRITON
    if data_centre:
        return FLASHINFER_TRTLLM
    if form == FP8_TENSOR:
        return FLASHINFER_CUTLASS if capability >= _HOPPER else TRITON
    if hopper:
        return FLASHINFER_CUTLASS if need.whole else TRITON
    return DEEPGEMM if capability >= 120 and minor >= _FIRST_DEEPGEMM_12 else TRITON


def _unpacking(capability: int, minor: int) -> str:
    return HUMMING if capability == _HOPPER and minor >= _FIRST_HUMMING else MARLIN
