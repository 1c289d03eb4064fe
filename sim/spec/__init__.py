"""Shapes of models and GPUs, and the sizes of their KV cache pools."""

from .attention import Indexer, KvGroup, Latent, Span
from .deployment import Deployment, dtype_bits, padded_batch, stages
from .gpu import GpuSpec, gpu, gpu_names
from .hybrid import HybridLayout, hybrid_layout
from .kv_cache import CacheSettings, KvCacheConfig, KvCacheGroup, form_kv_cache
from .kv_layers import AttentionLayer, RingLayer, StateLayer, attention_layers, cache_layers
from .model import model, model_names, published_formats
from .pool import block_bytes, host_blocks, page_bytes, paper_num_blocks
from .shape import Experts, ModelSpec
from .states import GatedDelta, KimiDelta, Mamba, Mamba2, StateMixer
from .weights import stage_bytes

__all__ = [
    "AttentionLayer",
    "CacheSettings",
    "Deployment",
    "Experts",
    "GatedDelta",
    "GpuSpec",
    "HybridLayout",
    "Indexer",
    "KimiDelta",
    "KvCacheConfig",
    "KvCacheGroup",
    "KvGroup",
    "Latent",
    "Mamba",
    "Mamba2",
    "ModelSpec",
    "Span",
    "RingLayer",
    "StateLayer",
    "StateMixer",
    "attention_layers",
    "block_bytes",
    "cache_layers",
    "dtype_bits",
    "form_kv_cache",
    "gpu",
    "gpu_names",
    "host_blocks",
    "hybrid_layout",
    "model",
    "model_names",
    "published_formats",
    "padded_batch",
    "page_bytes",
    "paper_num_blocks",
    "stage_bytes",
    "stages",
]
