"""The attention backend that vLLM takes, by release, as its CUDA platform chooses it.

    up to 0.10   one function with a branch for each case (``CudaPlatformBase.get_attn_backend_cls``)
    since 0.11   the first in an order (``_get_backend_priorities`` of ``platforms/cuda.py``) that takes the model
                 (``AttentionBackend.validate_configuration``): the size of heads, the number format of the KV cache, attention sinks,
                 images, latent vectors, the compute capability
    then         the version of FlashAttention (``get_flash_attn_version`` of ``fa_utils.py``)

Read in the wheels of 0.8.5 to 0.33, with FlashInfer and without DeepGEMM's optional packages; ``tests/real_vllm/attention.py`` runs vLLM's own
functions, and their choices are ``tests/data/attention_backends.json``. Releases up to 0.10 serve fp8 KV caches in the V0 engine where
FlashAttention 3 is not there, which is left out: they get the backend of 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..types.errors import SettingError
from .deployment import NVFP4, dtype_bits
from .gpu import GpuSpec
from .releases import LAST_ORDERED
from .shape import ModelSpec

FLASH, FLASHINFER, TRITON, FLEX = "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"
#: Backends that attend to images in Triton and to all else in FlashAttention or FlashInfer, and the head sizes that they take.
TRITON_FLASH, TRITON_FLASHINFER = "TRITON_FLASH_ATTN", "TRITON_FLASHINFER"
_COMPOSITE_SIZES = (256, 512)
#: Backends of softmax attention that ``--attention-backend`` may name; which cards and models they take is vLLM's check.
NAMED = (FLASH, FLASHINFER, TRITON, FLEX)
#: ``model_type`` of models with image tokens that attend in both directions (``is_mm_prefix_lm``).
_BIDIRECTIONAL = frozenset(("gemma3", "gemma4", "paligemma", "molmo2"))
_FLASH_SIZES = frozenset((32, 64, 96, 128, 160, 192, 224, 256))
_FLASHINFER_SIZES = frozenset((64, 128, 256))
_FIRST_ORDERED = 11
#: First minor releases with the KV cache in nvfp4 among the parser's choices, with kernels for compute capability 10, and with FlashAttention 2's.
_FIRST_NVFP4, _FIRST_TRTLLM, _FIRST_FA2 = 20, 21, 32
#: The first one in which the choice of a backend refuses it, not the backend.
_FIRST_ORDERED_NVFP4 = 29


class AttentionNeed(NamedTuple):
    """What the choice depends on.

    Attributes:
        capability: Compute capability, 90 for 9.0.
        head_dim: Width of a head; of latent attention that of a latent vector and the shared key.
        heads: Query heads of a rank.
        latent, sparse: Latent vectors, and whether an indexer chooses among them.
        images: Whether image tokens attend in both directions.
        several_sizes: Whether layers have heads of several sizes.
    """

    capability: int
    head_dim: int
    heads: int
    fp8: bool = False
    latent: bool = False
    sparse: bool = False
    sinks: bool = False
    images: bool = False
    several_sizes: bool = False

    @property
    def major(self) -> int:
        """Major number of the compute capability."""
        return self.capability // 10


def need_of(model: ModelSpec, gpu: GpuSpec, kv_dtype: str = "fp16", tensor_parallel: int = 1) -> AttentionNeed | None:
    """What the choice depends on, of softmax or latent attention; None on other vendors' cards, without attention layers, and for compressed
    attention, which has kernels of its own."""
    if gpu.compute_capability is None or not model.attention_layers or model.compressed:
        return None
    window = model.window_heads
    return AttentionNeed(
        capability=gpu.compute_capability,
        head_dim=model.head_dim if model.latent is None else model.latent.kv_rank + model.latent.rope_dim,
        heads=model.num_heads // tensor_parallel,
        fp8=dtype_bits(kv_dtype) == 8,
        latent=model.latent is not None,
        sparse=model.latent is not None and model.indexer is not None,
        sinks=model.attention_sinks,
        images=model.encoder is not None and model.model_type in _BIDIRECTIONAL,
        several_sizes=window is not None and window.head_dim != model.head_dim,
    )


def refused_nvfp4(model: ModelSpec, gpu: GpuSpec, minor: int = LAST_ORDERED) -> str | None:
    """vLLM's message where a release or a card has no kernels for a KV cache in nvfp4; None if it has.

    ``supports_kv_cache_dtype`` and ``supports_combination`` of its flashinfer.py, in the wheels of 0.20 to 0.33.
    """
    if minor < _FIRST_NVFP4:
        return f"argument --kv-cache-dtype: invalid choice: '{NVFP4}'"
    if minor < _FIRST_TRTLLM:
        return f"{NVFP4} KV cache is not yet supported"
    has_fa2 = minor >= _FIRST_FA2 and gpu.major in (8, 9, 12) and model.head_dim != 64 and not model.attention_sinks
    if model.latent is None and (gpu.is_blackwell or has_fa2):
        return None
    if minor < _FIRST_ORDERED_NVFP4:
        return f"--kv-cache-dtype {NVFP4} requires sm100f, please try a different dtype or remove"
    return (
        f"No valid attention backend found for cuda with kv_cache_dtype={NVFP4}. Reasons: kv_cache_dtype not supported."
    )


def chosen_attention(need: AttentionNeed, minor: int = LAST_ORDERED, named: str | None = None) -> str | None:
    """vLLM's name of the backend, with the version of FlashAttention; None where it finds none and does not start.

    Args:
        minor: Minor version of the release.
        named: Of softmax attention: ``--attention-backend``, or ``VLLM_ATTENTION_BACKEND`` of releases up to 0.14.
    """
    asked = None if need.latent else named
    found = asked or (_before(need, minor) if minor < _FIRST_ORDERED else _first(need, minor))
    return f"{found} {flash_version(need, minor)}" if found == FLASH else found


def named_backend(name: str) -> str | None:
    """The backend that a user names; None for the default.

    Raises:
        SettingError: Its steps are not simulated.
    """
    found = name.upper().removesuffix("_VLLM_V1")
    if found in ("", "AUTO"):
        return None
    if found not in NAMED:
        raise SettingError("attention_backend", name, f"is not simulated; one of {', '.join(NAMED)}, or leave it out")
    return found


def flash_version(need: AttentionNeed, minor: int) -> int:
    """Version of FlashAttention that a layer with such heads runs."""
    head_dim = need.head_dim
    if need.major == 9:
        return 4 if head_dim > 256 and minor >= 21 else 3
    if need.major != 10 or minor < 17:
        return 2
    # The tensor memory of Blackwell is too small for wider heads.
    if head_dim == 192:
        return 4 if 18 <= minor < 27 else 2
    if head_dim == 256:
        fits = minor >= 29 and not (need.images or need.sinks or need.fp8)
        return 4 if minor == 27 or fits else 2
    return 4 if head_dim <= 128 else 2


def _before(need: AttentionNeed, minor: int) -> str:
    """Up to 0.10."""
    capability, head_dim = need.capability, need.head_dim
    if need.latent:
        if capability == 100 and minor >= 10:
            return "CUTLASS_MLA"
        return "FLASHMLA" if need.major == 9 else "TRITON_MLA"
    if need.major < 8:
        return "XFORMERS" if minor < 9 else FLEX
    if minor < 9:
        return FLASH
    if capability == 100 and head_dim in _FLASHINFER_SIZES:
        return FLASHINFER
    if need.sinks and capability != 90 and minor >= 10:
        return TRITON
    return FLASH if head_dim in _FLASH_SIZES else FLEX


def _first(need: AttentionNeed, minor: int) -> str | None:
    """Since 0.11."""
    # Gemma 4: one backend for all layers (``Gemma4Config``), where FlashAttention 4 does not take them.
    if need.several_sizes and need.head_dim > 256 and (minor < 24 or need.major not in (9, 10)):
        return TRITON
    return next((name for name in _order(need, minor) if _takes(name, need, minor)), None)


def _order(need: AttentionNeed, minor: int) -> Iterator[str]:
    """``_get_backend_priorities``."""
    blackwell = need.major == 10
    if not need.latent:
        if need.images and minor >= 30:
            yield TRITON_FLASHINFER if blackwell else TRITON_FLASH
        yield from (FLASHINFER, FLASH, TRITON, FLEX) if blackwell else (FLASH, FLASHINFER, TRITON, FLEX)
    elif need.sparse:
        yield from _sparse_order(need, minor)
    elif blackwell:
        yield from ("FLASHINFER_MLA", "CUTLASS_MLA") if minor >= 15 else ("CUTLASS_MLA",)
    else:
        yield from ("FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")


def _sparse_order(need: AttentionNeed, minor: int) -> Iterator[str]:
    if need.major == 9:
        # Latent vectors without a rotary key (GLM 5.3 Flash, since 0.30).
        if need.head_dim == 512:
            yield "FLASHINFER_MLA_SPARSE_SM90"
        yield from ("FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE")
    elif need.major == 10:
        few, rotary = need.heads <= 16 and not need.fp8, need.head_dim != 512
        if few and rotary and minor >= 33:
            yield "FLASH_ATTN_MLA_SPARSE_FA4"
        if not rotary or (few and minor >= 17) or (need.fp8 and minor >= (18 if need.heads <= 16 else 19)):
            yield "FLASHINFER_MLA_SPARSE"
        yield "FLASHMLA_SPARSE"
    elif need.major == 12 and minor >= 24:
        yield "FLASHINFER_MLA_SPARSE_SM120"


def _takes(name: str, need: AttentionNeed, minor: int) -> bool:
    """``validate_configuration`` of a backend; what its place in the order already says is not asked."""
    if need.latent:
        return _takes_latent(name, need, minor)
    # Before 0.14 no backend was asked about images.
    images = need.images and minor >= 14
    if name == FLASH:
        return _flash_takes(need, minor, images)
    if name == FLASHINFER:
        return _flashinfer_takes(need, minor) and not images
    if name == TRITON_FLASH:
        # It is in the releases from 0.30 on, there for heads of 512 alone.
        sized = need.head_dim == 512 if minor < 31 else need.head_dim in _COMPOSITE_SIZES
        return need.major == 9 and sized and _flash_takes(need, minor, False)
    if name == TRITON_FLASHINFER:
        return need.head_dim in _COMPOSITE_SIZES and _flashinfer_takes(need, minor)
    return name == TRITON


def _flash_takes(need: AttentionNeed, minor: int, images: bool) -> bool:
    version, head_dim = flash_version(need, minor), need.head_dim
    if need.major < 8 or (need.sinks and need.major not in ((9, 10) if minor >= 20 else (9,))):
        return False
    widest = 512 if minor >= 20 and need.major in (9, 10) else 256
    if head_dim not in _FLASH_SIZES if minor < 12 else (head_dim % 8 or head_dim > widest):
        return False
    if need.fp8:
        hopper = need.major == 9 and (version == 3 or minor < 27 or (minor >= 31 and head_dim == 512))
        if not hopper and not (minor >= 27 and version == 4 and need.major == 10):
            return False
    return not images or (minor >= 24 and version == 4 and not (need.fp8 and need.major == 9 and minor >= 27))


def _flashinfer_takes(need: AttentionNeed, minor: int) -> bool:
    # Turing was left out when its kernels broke.
    least = 75 if minor < 24 else 80
    if need.capability < least or not (need.head_dim in _FLASHINFER_SIZES or (need.head_dim == 512 and minor >= 22)):
        return False
    if not need.sinks:
        return True
    # Its own kernels of decodes take sinks on compute capability 12 since 0.28 and 9 since 0.30, all of them on 10.
    return (
        need.capability == 100
        or (need.major == 10 and minor >= 14)
        or (need.major == 12 and minor >= 28)
        or (need.capability == 90 and minor >= 30)
    )


def _takes_latent(name: str, need: AttentionNeed, minor: int) -> bool:
    if name == "FLASH_ATTN_MLA":
        return need.major == 9 and not need.fp8
    if name == "FLASHMLA":
        return need.major == 9
    if name == "TRITON_MLA":
        return not need.fp8 or minor >= 18
    if name == "FLASH_ATTN_MLA_SPARSE":
        return minor >= 25 and not need.fp8
    return True
