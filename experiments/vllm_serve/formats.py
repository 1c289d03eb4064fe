"""Whether a release has the model, and the card its number formats.

    models    ``model_executor/models/registry.py``, in the wheels of 0.10.2 to 0.33; gpt-oss is in 0.10.1 and Qwen3-Next in 0.10.2
    wheels    compute capability 7.0; since 0.20, which are built with CUDA 13, 7.5 (the code of the wheels of 0.19.1, 0.20, 0.22 and 0.30)
    --dtype   bfloat16 from 8.0 on (``check_if_supports_dtype`` of ``platforms/cuda.py``); "auto" is then float16, or float32 for models that
              do not take that (``_resolve_auto_dtype`` of ``config/model.py``)
    KV cache  nvfp4 (``refused_kv_format``)
    methods   ``get_min_capability`` in the wheels of 0.10 to 0.33, and of schemes of compressed-tensors where a format is its own alone

A checkpoint's method is not stored with its format: of those that have a format, the one with the least capability is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...sim.spec.deployment import NVFP4
from ...sim.spec.gpu import GpuSpec
from ...sim.spec.matrix import formats_by_part
from ...sim.spec.startup.launch import Launch, resolved_kv_dtype
from ...sim.types.errors import NotSimulated

#: First releases of each least capability of the wheels.
_WHEELS = ((0, 70), (20, 75))
_FIRST_BFLOAT16 = 80
#: ``_FLOAT16_NOT_SUPPORTED_MODELS``, by ``model_type``.
_NOT_IN_FLOAT16 = dict.fromkeys(
    ("gemma2", "gemma3", "gemma3_text", "glm4", "plamo2"),
    "Numerical instability. Please use bfloat16 or float32 instead.",
)
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
        NotSimulated: The model would be served in 32 bits, which are not counted.
    """
    cards = [card for card in launch.gpus or (launch.gpu,) if card.compute_capability is not None]
    if launch.dtype == "float16" and launch.model.model_type in _NOT_IN_FLOAT16:
        reason = _NOT_IN_FLOAT16[launch.model.model_type]
        return f"The model type {launch.model.model_type!r} does not support float16. Reason: {reason}"
    if not cards:
        return None
    card = min(cards, key=_capability)
    found = _refused_card(card, launch.release.since[1]) or _refused_weights(launch, card)
    if found is None and _capability(card) < _FIRST_BFLOAT16:
        if launch.dtype == "bfloat16":
            return (
                "Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your"
                f" {card.name} GPU has compute capability {_version(card)}. You can use float16 instead by explicitly setting the `dtype` flag"
                " in CLI, for example: --dtype=half."
            )
        if is_in_float32(launch):
            why = (
                f"is float32 for {launch.model.model_type} on compute capability {_version(card)}, which is not counted"
            )
            raise NotSimulated("dtype", launch.dtype, why, "a card of compute capability 8.0 or more")
    return found


def is_in_float32(launch: Launch) -> bool:
    """Whether vLLM takes float32 for a model that has no other format on this card."""
    capability = min(card.compute_capability or _FIRST_BFLOAT16 for card in launch.gpus or (launch.gpu,))
    return capability < _FIRST_BFLOAT16 and launch.model.model_type in _NOT_IN_FLOAT16


#: First minor releases with the KV cache in nvfp4 among the parser's choices, with kernels for compute capability 10, and with FlashAttention 2's.
_FIRST_NVFP4, _FIRST_TRTLLM, _FIRST_FA2 = 20, 21, 32
#: The first one in which the choice of a backend refuses it, not the backend.
_FIRST_ORDERED_NVFP4 = 29


def refused_kv_format(launch: Launch) -> str | None:
    """vLLM's message where a release or a card has no kernels for a KV cache in nvfp4; None if it has, and for other formats.

    ``supports_kv_cache_dtype`` and ``supports_combination`` of its flashinfer.py, in the wheels of 0.20 to 0.33.
    """
    minor, model = launch.release.since[1], launch.model
    if launch.deployment.kv_dtype != NVFP4:
        return None
    if minor < _FIRST_NVFP4:
        return f"argument --kv-cache-dtype: invalid choice: '{NVFP4}'"
    if minor < _FIRST_TRTLLM:
        return f"{NVFP4} KV cache is not yet supported"
    has_trtllm = launch.gpu.is_blackwell
    has_fa2 = (
        minor >= _FIRST_FA2 and launch.gpu.major in (8, 9, 12) and model.head_dim != 64 and not model.attention_sinks
    )
    if model.latent is None and (has_trtllm or has_fa2):
        return None
    if minor < _FIRST_ORDERED_NVFP4:
        return f"--kv-cache-dtype {NVFP4} requires sm100f, please try a different dtype or remove"
    return (
        f"No valid attention backend found for cuda with kv_cache_dtype={NVFP4}. Reasons: kv_cache_dtype not supported."
    )


def corrections(launch: Launch) -> Iterator[tuple[str, object, Launch]]:
    """For each number format that may be refused the flag, the value and the launch with another: the dtype that vLLM takes by itself, unless
    that has 32 bits, and a KV cache in fp8 for one in nvfp4."""
    if launch.deployment.kv_dtype == NVFP4:
        kv_dtype = resolved_kv_dtype(launch.model, launch.gpu, "fp8")
        yield "--kv-cache-dtype", "fp8", replace(launch, deployment=replace(launch.deployment, kv_dtype=kv_dtype))
    if launch.dtype != "auto" and not is_in_float32(launch):
        yield "--dtype", "auto", replace(launch, dtype="auto")


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
