"""Whether a release has the model, and the card its number formats.

    models    ``model_executor/models/registry.py``, in the wheels of 0.10.2 to 0.33; gpt-oss is in 0.10.1 and Qwen3-Next in 0.10.2
    wheels    compute capability 7.0; since 0.20, which are built with CUDA 13, 7.5 (the code of the wheels of 0.19.1, 0.20, 0.22 and 0.30)
    --dtype   bfloat16 from 8.0 on (``check_if_supports_dtype`` of ``platforms/cuda.py``); what "auto" is then, ``dtypes`` says. Float32 has
              Triton's and FlexAttention's kernels alone (``supported_dtypes`` of the backends), so that latent attention has none
    both      ``get_supported_act_dtypes`` of the methods in the wheels of 0.19, 0.20, 0.22 to 0.24, 0.28 and 0.33
    KV cache  nvfp4 (``refused_kv_format``)
    methods   ``get_min_capability`` in the wheels of 0.10 to 0.33, and of schemes of compressed-tensors where a format is its own alone

A checkpoint's method is not stored with its format: of those that have a format, the one with the least capability is taken.
"""

from __future__ import annotations

from ...sim.spec.attention_backends import FLEX, TRITON, refused_nvfp4
from ...sim.spec.deployment import NVFP4
from ...sim.spec.gpu import GpuSpec
from ...sim.spec.matrix import formats_by_part
from ...sim.spec.startup.dtypes import FIRST_BFLOAT16, NOT_IN_FLOAT16
from ...sim.spec.startup.launch import Launch
from ...sim.types.errors import NotSimulated

#: First releases of each least capability of the wheels.
_WHEELS = ((0, 70), (20, 75))
#: Least capabilities of methods, and of formats in a checkpoint, each with its first minor releases.
_METHODS = {
    "awq": ((0, 75),),
    "awq_marlin": ((0, 80), (14, 75)),
    "gptq": ((0, 60),),
    "gptq_marlin": ((0, 80), (14, 75)),
    "fp8": ((0, 80), (14, 75)),
    "modelopt": ((0, 89), (27, 80)),
    "modelopt_fp4": ((0, 80), (14, 75)),
    "modelopt_mixed": ((0, 89), (24, 75)),
    "mxfp4": ((0, 80),),
    "nvfp4": ((0, 80), (14, 75)),
    "mxfp8": ((0, 80),),
}
#: As ``_METHODS``, of formats that compressed-tensors alone has.
_SCHEMES = {"w4a16": ((0, 80), (12, 75)), "w4a16-g32": ((0, 80), (12, 75)), "int8": ((0, 75),)}
_ALIASES = {"gpt_oss_mxfp4": "mxfp4"}
#: Dtypes of the model that methods take, as their message names them; compressed-tensors takes float32 as well.
_ACTIVATIONS = {
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin"), ("torch.float16", "torch.bfloat16")),
    **dict.fromkeys(("fp8", "modelopt", "modelopt_mixed", "mxfp8"), ("torch.bfloat16", "torch.float16")),
    "modelopt_fp4": ("torch.bfloat16", "torch.float16", "torch.float8_e4m3fn"),
    "mxfp4": ("torch.bfloat16",),
}
#: The last minor releases in which a method that the line names takes float16 alone; without a name vLLM takes Marlin's.
_LAST_FLOAT16_ALONE = {"awq": 23, "gptq": 21}
#: Formats of which a checkpoint is known to have no method of compressed-tensors.
_NOT_COMPRESSED = ("awq", "gptq")
_GPT_OSS = "gpt_oss"


#: The last minor release without a model type, as far as its last patch was read or is older than the model.
_LAST_WITHOUT = {
    "gpt_oss": 9, "qwen3_next": 9, "deepseek_v32": 10, "qwen3_vl": 10, "qwen3_vl_moe": 10, "olmo3": 10, "kimi_linear": 10, "minimax_m2": 10,
    "mimo_v2_flash": 13, "glm_moe_dsa": 14, "kimi_k25": 14, "qwen3_5": 16, "qwen3_5_moe": 16, "qwen3_5_text": 16, "gemma4": 18,
    "minimax_m3": 22, "minimax_m3_vl": 22, "step3p7": 22, "kimi_k3": 26, "glm5_next": 28,
}  # fmt: skip


def refused_model(launch: Launch) -> str | None:
    """The message of a release that does not have the model's architecture; None if it has it."""
    kind = launch.model.model_type or ""
    if launch.release.since[1] > _LAST_WITHOUT.get(kind, -1):
        return None
    return f"Model architectures of model type {kind!r} are not supported for now (not in vLLM up to 0.{_LAST_WITHOUT[kind]})."


def refused_format(launch: Launch) -> str | None:
    """vLLM's message where the card or the model does not have a number format of the launch; None if it has all.

    Raises:
        NotSimulated: The model would be served in float32, and its states, its experts or what is quantised in it are not counted so.
    """
    cards = [card for card in launch.gpus or (launch.gpu,) if card.compute_capability is not None]
    if launch.dtype == "float16" and launch.model.model_type in NOT_IN_FLOAT16:
        reason = NOT_IN_FLOAT16[launch.model.model_type]
        return f"The model type {launch.model.model_type!r} does not support float16. Reason: {reason}"
    if not cards:
        return _refused_dtype(launch)
    card = min(cards, key=_capability)
    found = _refused_card(card, launch.release.since[1]) or _refused_weights(launch, card) or _refused_dtype(launch)
    if found is None and launch.dtype == "bfloat16" and _capability(card) < FIRST_BFLOAT16:
        return (
            "Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your"
            f" {card.name} GPU has compute capability {_version(card)}. You can use float16 instead by explicitly setting the `dtype` flag"
            " in CLI, for example: --dtype=half."
        )
    return found


def _refused_dtype(launch: Launch) -> str | None:
    """The failed check of the weights' method, or of an attention backend, for the model's dtype."""
    method, dtype = _dtype_method(launch), "torch.float32" if launch.element_bytes == 4 else f"torch.{launch.dtype}"
    if launch.element_bytes == 2 and launch.dtype == "auto":
        return None
    dtypes = () if method is None else _ACTIVATIONS[method]
    if launch.release.since[1] <= _LAST_FLOAT16_ALONE.get(launch.quantization_method or "", -1):
        dtypes = ("torch.float16",)
    if dtypes and dtype not in dtypes:
        return f"{dtype} is not supported for quantization method {method}. Supported dtypes: [{', '.join(dtypes)}]"
    if launch.element_bytes == 2:
        return None
    model, named = launch.model, launch.deployment.attention_backend
    if model.latent is not None:
        return "No valid attention backend found for cuda with dtype=torch.float32. Reasons: dtype not supported."
    if launch.deployment.quantization is not None or model.mixer is not None or model.experts is not None:
        parts = "weights in fewer bits" if launch.deployment.quantization is not None else "states and experts"
        why = f"is float32 for {model.name} on {launch.gpu.name}, in which {parts} are not counted"
        raise NotSimulated(
            "dtype", launch.dtype, why, "a card of compute capability 8.0 or more, and no --dtype float32"
        )
    if named is not None and named not in (TRITON, FLEX):
        return (
            f"Selected backend AttentionBackendEnum.{named} is not valid for this configuration. Reason: ['dtype not"
            " supported']"
        )
    return None


def _dtype_method(launch: Launch) -> str | None:
    """The method of the weights where the line, or the format of the checkpoint, says which; None for 16 bits, and where the method may be
    that of compressed-tensors."""
    form = launch.deployment.quantization
    named = launch.quantization_method or ""
    own = _ALIASES.get(named, named)
    if form is None:
        return None
    if own in _ACTIVATIONS:
        return own
    return form if form in _NOT_COMPRESSED or (form == "mxfp4" and launch.model.model_type == _GPT_OSS) else None


def refused_kv_format(launch: Launch) -> str | None:
    """vLLM's message where a release or a card has no kernels for a KV cache in nvfp4; None if it has, and for other formats."""
    if launch.deployment.kv_dtype != NVFP4:
        return None
    return refused_nvfp4(launch.model, launch.gpu, launch.release.since[1])


def _refused_card(card: GpuSpec, minor: int) -> str | None:
    least = _of_release(_WHEELS, minor)
    if _capability(card) >= least:
        return None
    code = f"the wheels have code for compute capability {least / 10} and more, {card.name} has {_version(card)}"
    return f"CUDA error: no kernel image is available for execution on the device: {code}."


def _refused_weights(launch: Launch, card: GpuSpec) -> str | None:
    form, minor = launch.deployment.quantization, launch.release.since[1]
    if form is None:
        return None
    forms, capability = {*formats_by_part(form).values()}, _capability(card)
    named = launch.quantization_method or ""
    own = _ALIASES.get(named, named)
    method = own if own in _METHODS else "modelopt_mixed" if len(forms) > 1 else next(iter(forms))
    if method in _SCHEMES:
        least = _of_release(_SCHEMES[method], minor)
        said = f"Quantization scheme is not supported for the current GPU. Min capability: {least}."
    else:
        least = _of_release(_METHODS[method], minor)
        said = f"The quantization method {method} is not supported for the current GPU. Minimum capability: {least}."
    return None if capability >= least else f"{said} Current capability: {capability}."


def _of_release(since: tuple[tuple[int, int], ...], minor: int) -> int:
    return [least for first, least in since if first <= minor][-1]


def _capability(card: GpuSpec) -> int:
    return card.compute_capability or 0


def _version(card: GpuSpec) -> str:
    return f"{_capability(card) // 10}.{_capability(card) % 10}"
