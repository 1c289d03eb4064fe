"""The kernels that vLLM takes for linear layers and for experts, by release, as its lists choose them on an NVIDIA card.

    linear layers   the first of ``model_executor/kernels/linear`` that supports the number format, the card and the sizes of a rank
    experts         the first of ``fused_moe/oracle`` that supports the number format, the card and how ranks divide them

Both with the packages that the wheels require (FlashInfer, Humming, DeepGEMM), and with the default exchange of tokens between engines; linear
layers without ``--linear-backend``, experts as ``--moe-backend`` or environment variables ask for them. ``tests/real_vllm/kernels.py`` runs
vLLM's own modules, and their choices in the wheels of 0.20 and 0.22 to 0.33 are ``tests/data/kernel_choices.json`` and ``kernels_asked.json``. Earlier releases
are taken as 0.20, but for experts in 16 bits and in mxfp4. Layers in 16 bits are cuBLAS's, of which there is no choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..types.errors import SettingError
from .deployment import Deployment, ExpertRanks
from .gpu import GpuSpec
from .matrix import formats_by_part
from .releases import LAST_ORDERED
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
#: Other kernels of experts in mxfp4; those with activations in mxfp8 are not exact.
TRITON_UNFUSED, CUTLASS_MXFP4 = "TRITON_UNFUSED", "FLASHINFER_CUTLASS_MXFP4_BF16"
TRITON_MXFP8, DEEPGEMM_MXFP4 = "TRITON_MXFP8", "DEEPGEMM_MXFP4"
TRTLLM_MXFP8, CUTLASS_MXFP8 = "FLASHINFER_TRTLLM_MXFP4_MXFP8", "FLASHINFER_CUTLASS_MXFP4_MXFP8"
#: Kernels that unpack weights to 16 bits and multiply in these.
UNPACKING = frozenset((MARLIN, HUMMING, MACHETE))
#: Ways in which weights of fp8 are scaled: by row and column (compressed-tensors), by tensor (ModelOpt), by block, or by tensor when vLLM
#: converts a checkpoint of 16 bits.
FP8, FP8_TENSOR, FP8_BLOCK, FP8_ONLINE = "fp8", "fp8-tensor", "fp8-block", "fp8-online"
#: mxfp4 of DeepSeek V4, which has a list of kernels of its own (``select_deepseek_v4_mxfp4_moe_backend``).
MXFP4_V4 = "mxfp4-v4"
_INT4 = frozenset(("awq", "gptq", "w4a16", "w4a16-g32"))
_HOPPER, _FIRST_FP8 = 90, 89
#: First minor releases in which Hopper's weights are unpacked by Humming, and its mxfp4 experts have Triton's kernels.
_FIRST_HUMMING, _FIRST_TRITON_MXFP4 = 32, 12
#: The same, in which experts in 16 bits run in FlashInfer by default, and compute capability 12 has DeepGEMM.
_FIRST_FLASHINFER, _FIRST_DEEPGEMM_12 = 20, 24
#: The same, in which others support what a user asks for: Humming's have groups of 32, and Triton's 4-bit integers without zero points.
_FIRST_HUMMING_32, _FIRST_TRITON_INT4 = 29, 27
#: Releases with Triton's kernels of mxfp8.
_TRITON_MXFP8 = range(25, 27)
_FIRST_DEEPGEMM_MXFP8, _FIRST_WHOLE_CUTLASS, _FIRST_TRITON_MXFP4_12 = 24, 32, 32


#: Values of ``--moe-backend`` and the kernels that they ask for; of mxfp4 where it has others.
NAMED_EXPERTS = {
    "triton": TRITON, "deep_gemm": DEEPGEMM, "cutlass": VLLM_CUTLASS, "flashinfer_trtllm": FLASHINFER_TRTLLM,
    "flashinfer_cutlass": FLASHINFER_CUTLASS, "flashinfer_cutedsl": FLASHINFER_CUTEDSL, "marlin": MARLIN, "humming": HUMMING,
    "triton_unfused": TRITON_UNFUSED, "flashinfer_trtllm_afp8": TRTLLM_MXFP8, "flashinfer_cutlass_afp8": CUTLASS_MXFP8,
}  # fmt: skip
_NAMED_BY_FORM = {
    "mxfp4": {"flashinfer_trtllm": TRTLLM_MXFP4, "flashinfer_cutlass": CUTLASS_MXFP4},
    "mxfp8": {"triton": TRITON_MXFP8},
}
#: The flag among what a user asks for; all others are environment variables.
MOE_BACKEND = "moe-backend"
#: Environment variables that ask for kernels of experts, or leave them out.
_FLASHINFER_BY_FORM = {
    "16": "VLLM_USE_FLASHINFER_MOE_FP16", "fp8": "VLLM_USE_FLASHINFER_MOE_FP8", "nvfp4": "VLLM_USE_FLASHINFER_MOE_FP4",
    "mxfp4": "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
}  # fmt: skip
_FLASHINFER_KIND, _FORCE_MARLIN = "VLLM_FLASHINFER_MOE_BACKEND", "VLLM_TEST_FORCE_FP8_MARLIN"
_DEEP_GEMM = ("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM")
_MXFP4_VARIABLES = {
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": TRTLLM_MXFP8, "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS": CUTLASS_MXFP8,
    "VLLM_MXFP4_USE_MARLIN": MARLIN,
}  # fmt: skip
EXPERTS_VARIABLES = (
    *_FLASHINFER_BY_FORM.values(), _FLASHINFER_KIND, *_DEEP_GEMM, _FORCE_MARLIN, *_MXFP4_VARIABLES,
)  # fmt: skip
_OF_FLASHINFER = (FLASHINFER_TRTLLM, FLASHINFER_CUTLASS, FLASHINFER_CUTEDSL, TRTLLM_MXFP4, CUTLASS_MXFP4)
#: Kernels in place of those that a variable leaves out.
_AFTER = (DEEPGEMM, VLLM_CUTLASS, TRITON, MARLIN)
#: First minor release with choices that were compared with vLLM's own.
FIRST_COMPARED = 20
#: First minor releases without these variables, and without the one that forces Marlin.
_NO_VARIABLES, _NO_FORCE = 24, 29
#: First minor releases that heed ``--moe-backend`` for experts in 4-bit integers, have Humming, of mxfp4 and of others, and take the name of a kernel
#: that does not multiply 16 bits there for none.
_FIRST_NAMED_INT4, _FIRST_HUMMING_MXFP4, _FIRST_HUMMING_NAMED, _FIRST_MARLIN_16 = 25, 22, 25, 33


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
    if form == "mxfp4" and model.compressed:
        form = MXFP4_V4
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


def chosen_experts(need: ExpertsNeed, minor: int, asked: Mapping[str, str] | None = None) -> str | None:
    """vLLM's name of the backend of experts; None where it has not what the user asks for, and does not start.

    Args:
        minor: Minor version of the release.
        asked: ``MOE_BACKEND`` and ``EXPERTS_VARIABLES``, as far as the user gives them; other names are ignored.
    """
    default = _default_experts(need, minor)
    if not asked:
        return default
    if need.form == MXFP4_V4:
        # Its list reads no variables.
        asked, need = {MOE_BACKEND: asked.get(MOE_BACKEND, "auto")}, need._replace(form="mxfp4")
    named = asked.get(MOE_BACKEND, "auto")
    if named != "auto":
        if not _is_heeded(need, minor, named):
            return default
        kernel = _NAMED_BY_FORM.get(need.form or "", {}).get(named, NAMED_EXPERTS[named])
        return kernel if _has_experts(kernel, need, minor) else None
    only, without = _by_variables(need, minor, asked)
    if only:
        return next((kernel for kernel in only if _has_experts(kernel, need, minor)), None)
    if default not in without:
        return default
    return next(each for each in _AFTER if each not in without and _has_experts(each, need, minor))


def deployed_experts(need: ExpertsNeed, deployment: Deployment, minor: int | None = None) -> str | None:
    """``chosen_experts`` of a deployment.

    Args:
        minor: Minor version of the release; None is the deployment's.
    """
    named = deployment.moe_backend
    asked = {} if named is None else {MOE_BACKEND: named}
    return chosen_experts(need, minor or deployment.vllm_minor or LAST_ORDERED, asked)


def refuse_experts(model: ModelSpec, gpu: GpuSpec, deployment: Deployment, tensor_parallel: int) -> None:
    """Refuse ``moe_backend`` where it names nothing that runs.

    Raises:
        SettingError: The model has no experts, or vLLM has no such kernels for them on the GPU.
    """
    if (named := deployment.moe_backend) is None:
        return
    if model.experts is None:
        raise SettingError("moe_backend", named, f"{model.name} has no experts; leave it out")
    need = experts_need(model, gpu, deployment.quantization, deployment.expert_ranks(tensor_parallel))
    if need is None or deployed_experts(need, deployment) is None:
        remedy = (
            f"vLLM has no such kernels for experts in {form_text(need)} on {gpu.name}, and does not start; leave it out"
        )
        raise SettingError("moe_backend", named, remedy)


def form_text(need: ExpertsNeed | None) -> str:
    """The number format of experts in words."""
    return "16 bits" if need is None or need.form is None else need.form.partition("-")[0]


def experts_name(kernel: str) -> str:
    """The value of ``--moe-backend`` that asks for a kernel."""
    every = (NAMED_EXPERTS, *_NAMED_BY_FORM.values())
    return next(name for names in every for name, found in names.items() if found == kernel)


def named_experts(name: str) -> str | None:
    """The value of ``--moe-backend``; None for the default.

    Raises:
        SettingError: Its steps are not simulated.
    """
    found = name.lower().replace("-", "_")
    if found in ("", "auto"):
        return None
    if found not in NAMED_EXPERTS:
        raise SettingError("moe_backend", name, f"is not simulated; one of {', '.join(NAMED_EXPERTS)}, or leave it out")
    return found


def _is_heeded(need: ExpertsNeed, minor: int, named: str) -> bool:
    """Whether a release heeds ``--moe-backend`` for this number format."""
    if need.form in _INT4:
        return minor >= _FIRST_NAMED_INT4
    # Kernels of weights with fewer bits have nothing to unpack in 16.
    ignored_since = {"humming": _FIRST_HUMMING_NAMED, "marlin": _FIRST_MARLIN_16}.get(named)
    return need.form is not None or ignored_since is None or minor < ignored_since


def _by_variables(need: ExpertsNeed, minor: int, asked: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Kernels of which the first that runs is taken, and those that are left out."""
    form = need.form or "16"
    family = "fp8" if form.startswith("fp8") else form
    without: tuple[str, ...] = ()
    if minor < _NO_VARIABLES and (name := _FLASHINFER_BY_FORM.get(family, "")) in asked:
        if _is_on(asked[name]):
            return _flashinfer_asked(need, asked), ()
        without = _OF_FLASHINFER
    if family == "mxfp4" and minor < _NO_VARIABLES:
        for name, kernel in _MXFP4_VARIABLES.items():
            if _is_on(asked.get(name, "0")):
                return (kernel,), ()
    if family == "fp8" and (given := [asked[name] for name in _DEEP_GEMM if name in asked]):
        if all(map(_is_on, given)):
            return (DEEPGEMM,), ()
        without += (DEEPGEMM,)
    if family in ("fp8", "nvfp4") and minor < _NO_FORCE and _is_on(asked.get(_FORCE_MARLIN, "0")):
        return (MARLIN,), ()
    return (), without


def _flashinfer_asked(need: ExpertsNeed, asked: Mapping[str, str]) -> tuple[str, ...]:
    if need.form == "mxfp4":
        return TRTLLM_MXFP4, CUTLASS_MXFP4
    kind = asked.get(_FLASHINFER_KIND)
    if kind is None:
        return _OF_FLASHINFER[:2]
    # Those for low latency are there on the data-centre cards alone, and elsewhere the others are taken.
    return (FLASHINFER_TRTLLM if kind == "latency" and need.capability // 10 == 10 else FLASHINFER_CUTLASS,)


def _is_on(value: str) -> bool:
    return value.lower() in ("1", "true")


def _has_experts(kernel: str, need: ExpertsNeed, minor: int) -> bool:
    """Whether a kernel of experts supports the number format and the card (``is_supported_config``)."""
    capability, form = need.capability, need.form
    hopper, data_centre = capability == _HOPPER, capability // 10 == 10
    if kernel == MARLIN:
        return form not in (None, "int8")
    if kernel == HUMMING:
        first = {"mxfp4": _FIRST_HUMMING_MXFP4, "w4a16-g32": _FIRST_HUMMING_32}.get(form or "", _FIRST_HUMMING_NAMED)
        return form not in (None, FP8_ONLINE) and minor >= first
    if kernel == FLASHINFER_TRTLLM:
        return data_centre and form in (None, FP8_TENSOR, FP8_BLOCK, "nvfp4", "mxfp8")
    if kernel == FLASHINFER_CUTLASS:
        if form == FP8_BLOCK:
            return hopper
        return capability >= (100 if form == "nvfp4" else _HOPPER) and form in (None, FP8_TENSOR, "nvfp4")
    if kernel == FLASHINFER_CUTEDSL:
        return data_centre and form == "nvfp4"
    if kernel == DEEPGEMM:
        if form == "mxfp8":
            return data_centre and minor >= _FIRST_DEEPGEMM_MXFP8
        return form == FP8_BLOCK and (hopper or data_centre or (capability >= 120 and minor >= _FIRST_DEEPGEMM_12))
    if kernel == VLLM_CUTLASS:
        if form == "nvfp4":
            return capability >= 100 and (minor >= _FIRST_WHOLE_CUTLASS or not need.whole)
        return form == FP8 and (hopper or data_centre)
    if kernel == TRITON and form != "mxfp4":
        if form is not None and form.startswith("fp8"):
            return capability >= _FIRST_FP8
        return form in (None, "int8") or (form in ("w4a16", "w4a16-g32") and minor >= _FIRST_TRITON_INT4)
    if kernel == TRITON_MXFP8:
        return form == "mxfp8" and minor in _TRITON_MXFP8
    if form != "mxfp4":
        return False
    if kernel in (TRITON, TRITON_UNFUSED):
        return hopper or data_centre or (capability >= 120 and minor >= _FIRST_TRITON_MXFP4_12)
    if kernel == CUTLASS_MXFP4:
        return hopper
    return data_centre if kernel in (TRTLLM_MXFP4, TRTLLM_MXFP8) else capability >= 100


def _default_experts(need: ExpertsNeed, minor: int) -> str:
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
    if form == MXFP4_V4 and capability >= 100:
        return TRTLLM_MXFP8 if data_centre else DEEPGEMM_MXFP4
    if form == MXFP4_V4 or form in _INT4:
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
