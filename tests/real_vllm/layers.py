"""vLLM's KV cache specs of a model's layers, made as vLLM's own layers make them.

This module reads the configuration as ``vllm serve`` leaves it on a CUDA device, with an attention backend that runs
blocks of any multiple of 16 tokens (FlashAttention, Triton).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from types import SimpleNamespace
from unittest import mock

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.attention import _largest_kernel_block_within
from vllm.model_executor.layers.mamba.abstract import MambaBase, get_mamba_prefill_checkpoint_grid
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MambaModelConfig
from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.platforms.interface import UnspecifiedPlatform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from .shapes import Layer


class Backend:
    """What block sizes depend on, of FlashAttention and Triton."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def customize_spec(spec: AttentionSpec) -> AttentionSpec:
        return spec


class KeyBackend(Backend):
    """Of the keys of GLM-5.3-Flash: ``Glm5NextIndexerBackend``, with keys of four tokens."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [4 * 32, 4 * 64]


class _State(MambaBase):
    """A layer with a state, without weights."""

    mamba_type = MambaMixer2.mamba_type

    def __init__(self, layer: Layer) -> None:
        self._shapes, self._dtypes = layer.state_shapes, tuple(getattr(torch, name) for name in layer.state_dtypes)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self._shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self._dtypes


class _Mamba2(_State, MambaMixer2):
    """A layer of Mamba-2, without weights."""

    __new__ = object.__new__


class _Delta(_State):
    """A gated delta net with FlashInfer's kernel for prefills: what ``QwenGatedDeltaNetAttention`` does then."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self._export_tokens = layer.export_tokens

    def get_prefill_checkpoint_alignment(self) -> int:
        return self._export_tokens

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        spec = super().get_kv_cache_spec(vllm_config)
        if vllm_config.cache_config.mamba_cache_mode != "align":
            return spec
        with mock.patch.dict(vllm_config.compilation_config.static_forward_context, {"state": self}):
            grid = get_mamba_prefill_checkpoint_grid(vllm_config)
        return replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=grid)


def _state(layer: Layer) -> MambaBase:
    return {0: _State, 1: _Mamba2}.get(layer.export_tokens, _Delta)(layer)


def _state_bytes(layer: Layer) -> int:
    pairs = zip(layer.state_shapes, layer.state_dtypes, strict=True)
    return sum(prod(shape) * getattr(torch, dtype).itemsize for shape, dtype in pairs)


def align_block_size(config: VllmConfig, layers: tuple[Layer, ...]) -> None:
    """What vLLM does to the block size of a model with states, before it asks its layers for their specs.

    Args:
        config: Its ``cache_config`` is changed.
    """
    states = [layer for layer in layers if layer.kind == "state"]
    if not states:
        return
    MambaModelConfig.verify_and_update_config(config)
    attention = [layer for layer in layers if layer.kind != "state"]
    if not attention:
        return
    largest = max(states, key=_state_bytes)
    first = attention[0]
    # All that the alignment reads; anything else raises.
    model = SimpleNamespace(
        dtype=getattr(torch, first.dtype),
        use_mla=first.kind in ("mla", "rows"),
        get_num_kv_heads=lambda parallel: 1 if first.kind in ("mla", "rows") else first.kv_heads,
        get_head_size=lambda: first.head_size,
        architecture="stand-in",
    )
    state = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda config: largest.state_shapes,
        get_mamba_state_dtype_from_config=lambda config: tuple(getattr(torch, dtype) for dtype in largest.state_dtypes),
    )
    stand_in = SimpleNamespace(
        cache_config=config.cache_config,
        model_config=model,
        parallel_config=config.parallel_config,
        compilation_config=SimpleNamespace(
            static_forward_context={str(n): _state(one) for n, one in enumerate(states)}
        ),
    )
    backends = [Backend, KeyBackend] if is_packed(layers) else [Backend]
    with (
        mock.patch.object(ModelRegistry, "resolve_model_cls", lambda *names, **keywords: (state, "")),
        mock.patch.object(UnspecifiedPlatform, "_find_non_ssm_backends", classmethod(lambda cls, config: backends)),
        mock.patch("vllm.config.vllm.set_current_vllm_config", lambda config: mock.MagicMock()),
    ):
        UnspecifiedPlatform._align_hybrid_block_size(stand_in, Backend)


def is_packed(layers: tuple[Layer, ...]) -> bool:
    """Whether the model has sparse attention beside states, or compressed attention, and so backends that put the layers of a block side
    by side."""
    return any(layer.kind == "ring" or layer.kind in COMPRESSED for layer in layers)


#: Caches of DeepSeek V4.
COMPRESSED = ("window", "vectors", "keys", "inputs")


def _compressed(layer: Layer, config: VllmConfig) -> KVCacheSpec:
    """The spec that a cache of DeepSeek V4 returns; its own ``get_kv_cache_spec`` is called."""
    config.cache_config.cache_dtype = "fp8_ds_mla"
    if layer.kind == "vectors":
        attention = SimpleNamespace(
            compress_ratio=layer.tokens, kv_cache_dtype="fp8_ds_mla", kv_cache_torch_dtype=torch.uint8, head_dim=512
        )
        return DeepseekV4Attention.get_kv_cache_spec(attention, config)
    with set_current_vllm_config(config), mock.patch.dict(config.compilation_config.static_forward_context, clear=True):
        if layer.kind == "inputs":
            overlap = 1 + (layer.tokens == 4)
            cache = CompressorStateCache(2 * overlap * layer.head_size, torch.float32, layer.tokens, "cache")
        elif layer.kind == "keys":
            cache = DeepseekV4IndexerCache(layer.head_size, torch.uint8, "cache", config.cache_config, layer.tokens)
        else:
            cache = DeepseekV4SWACache(512, layer.tokens, torch.uint8, "cache", config.cache_config)
        return cache.get_kv_cache_spec(config)


def spec_of(layer: Layer, config: VllmConfig) -> KVCacheSpec:
    """The spec that vLLM's layer of this kind returns."""
    cache = config.cache_config
    if layer.kind == "state":
        return _state(layer).get_kv_cache_spec(config)
    if layer.kind in COMPRESSED:
        return _compressed(layer, config)
    shape = {"head_size": layer.head_size, "dtype": getattr(torch, layer.dtype)}
    if layer.kind == "mla":
        return MLAAttentionSpec(block_size=cache.block_size, num_kv_heads=1, **shape)
    if layer.kind == "rows":
        # ``align_blocks_to_rows`` of vLLM's backends.
        row = layer.head_size * shape["dtype"].itemsize
        return MLAAttentionSpec(block_size=cache.block_size, num_kv_heads=1, block_stride_alignment=row, **shape)
    if layer.kind == "key":
        # ``Glm5NextIndexerCache``; the alignment is that of ``vllm/v1/worker/utils.py`` for kernels of fixed blocks.
        return MLAAttentionSpec(
            block_size=cache.block_size,
            num_kv_heads=1,
            head_size=layer.head_size,
            dtype=torch.uint8,
            tokens_per_state=layer.tokens,
            block_stride_alignment=MultipleOf(64 * layer.tokens),
        )
    if layer.kind == "ring":
        # ``Glm5NextTailCache``.
        return CircularBufferSpec(
            block_size=layer.tokens,
            num_kv_heads=2,
            head_size=layer.head_size // 2,
            head_size_v=0,
            dtype=torch.bfloat16,
            dcp_sharded=False,
        )
    shape["num_kv_heads"] = layer.kv_heads
    if layer.kind == "chunked":
        return ChunkedLocalAttentionSpec(block_size=cache.block_size, attention_chunk_size=layer.tokens, **shape)
    if layer.kind == "sliding":
        one = SlidingWindowSpec(block_size=1, sliding_window=layer.tokens, **shape)
        token_bytes = one.real_page_size_bytes
        size = _largest_kernel_block_within(Backend, token_bytes, token_bytes * cache.block_size, cache.block_size, one)
        return SlidingWindowSpec(block_size=size, sliding_window=layer.tokens, **shape)
    if layer.kind == "full":
        return FullAttentionSpec(block_size=cache.block_size, **shape)
    raise ValueError(f"layers of kind {layer.kind!r} are not known")
