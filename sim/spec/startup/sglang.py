"""Defaults of SGLang's server by card, and the slots of its KV cache: ``arg_groups/memory_hook.py`` and
``mem_cache/kv_cache_configurator.py`` of 0.5.23.

    mem_fraction_static   what activations and CUDA graphs are expected to leave of the GPU, by a rule of thumb
    free memory           of the GPU, less what is in use before the weights are loaded
    x mem_fraction_static
    - weights
    = KV cache, in slots of a token of all layers

A slot has a token of the layers that keep all, and ``swa_full_tokens_ratio`` of one of the layers with a window where these have a pool
of their own (``model_executor/pool_configurator.py``).

``sglang_states`` has the pool of models with states, whose bytes the KV cache lacks.

Not computed: further room for data-parallel attention, DeepEP and drafts; and a pool of windows for the requests
alone (``SWARequestCapPoolConfigurator``: no radix cache, and ``--max-running-requests`` given).
"""

from __future__ import annotations

from typing import NamedTuple

from ...types.optional import not_none
from ..deployment import stages
from ..gpu import GIB, GpuSpec
from ..shape import ModelSpec
from .capacity import StageMemory
from .estimate import exactly
from .launch import Launch
from .loading import loaded_bytes
from .non_torch import used_at_start

_MIB = 1 << 20
#: Of cards with less than so many GiB: ``--chunked-prefill-size``, and the largest batch of a CUDA graph with fewer than four and with
#: more tensor-parallel ranks.
_BY_GIB = (
    (20, 2048, 8, 8),
    (35, 4096, 48, 160),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
    (float("inf"), 16384, 512, 512),
)
#: MiB that are kept for each token of a chunk, for each request of a decode graph, for each prefill graph or, with latent vectors, all
#: of them, and beside these; and the least on a card with more than so many MiB.
_CHUNK_MIB, _DECODE_MIB, _PREFILL_MIB, _LATENT_MIB, _OTHER_MIB = 1.5, 2, 8, 1536, 512
_LEAST_MIB, _LARGE_MIB = 10 * 1024, 60 * 1024
#: Models whose layers with a window have a pool of their own (``is_hybrid_swa_model``), by ``model_type``; and whether their window counts
#: the token itself, which SGLang leaves out. Gemma 2 and 3, Mistral and others keep every token in all layers.
_LESS = {"gpt_oss": 1, "gemma4": 1, "mimo_v2_flash": 0, "step3p5": 0, "step3p7": 0, "llama4": 0}
_WINDOWED = ("sliding", "chunked")
#: Attention by ``model_type`` on compute capability 10, where it is not that of most models (``arg_groups/model_overrides``).
_ON_BLACKWELL = {
    **dict.fromkeys(("granitemoehybrid", "lfm2", "kimi_linear"), "flashinfer"),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "kimi_k25", "kimi_k3", "pixtral"), "trtllm_mla"),
    **dict.fromkeys(("mimo_v2_flash", "minimax_m3", "minimax_m3_vl"), "fa4"),
}
#: There these have Triton's, with pages of one token; without a radix cache, or with ``extra_buffer`` given, TensorRT-LLM's.
_TRITON = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
#: Tokens of a page that an attention backend asks for.
_PAGES = dict.fromkeys(
    ("trtllm_mha", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "flashmla", "hpc_ops", "dsa", "nsa"), 64
)
#: Others that these have, too.
_ALSO = {"trtllm_mha": (16, 32, 128), "trtllm_mla": (32,), "cutedsl_mla": (32,), "tokenspeed_mla": (32,)}
#: The same of FlashAttention 4 on compute capability 10, without latent vectors.
_FA4_PAGE = 128
#: Models that are served without their encoder (``mm_disabled_models`` of ``configs/model_config.py``), by ``model_type``.
_TEXT_ALONE = frozenset({"gemma3", "llama4", "step3_vl"})
#: Multimodal models whose prefills have CUDA graphs (``multimodal_breakable_cuda_graph_supported_model_archs``).
_PREFILL_GRAPHS = frozenset({"minimax_m3", "minimax_m3_vl", "glm5_next", "qwen3_5", "qwen3_5_moe", "kimi_k25"})
#: Models with Kimi delta attention, whose prefills have none.
_KDA = frozenset({"kimi_linear", "kimi_k3"})
#: MiniMax M3, of which SGLang does not read the encoder; and with which compute capability and backend it has pages as of FlashAttention 4.
_M3, _M3_PAGED = frozenset({"minimax_m3", "minimax_m3_vl"}), frozenset({(9, None), (9, "fa3"), (10, "trtllm_mha")})
#: Layers and width of an encoder that SGLang does not find in a configuration, and takes for the least.
_VISION = 24, 1024
#: Share of the fraction that a multimodal model gets with such an encoder; of what a larger one costs; and the bounds of that factor.
_OF_VISION, _FOR_VISION, _VISION_BOUNDS = 0.95, 0.1, (0.8, 1.05)
#: GiB in use beside the weights, by SGLang's logs: of one rank 78.47 of 79.19 are free before the weights on an H100 (0.5.19, and another start of
#: 2026); with NVLink 77.43 of 79.19 on eight H100; without, four RTX 4090 have 23.08 of 23.52 before and 16.00 after weights of 6.87, four L4
#: 21.63 of 22.03 and 6.09 after 15.26. vLLM's ranks have less with NVLink and more without.
_USED_ONE, _USED_PCIE, _USED_NVLINK = 0.71, 0.56, 1.75
#: A chunk counts as at least so many tokens.
_LEAST_TOKENS = 2048


class ServerDefaults(NamedTuple):
    """What SGLang's server takes where its line says nothing.

    Attributes:
        chunked_prefill_size: Tokens of a prefill step.
        max_graph_batch: Requests of the largest CUDA graph of a decode.
        mem_fraction_static: Share of the free memory for weights and KV cache.
    """

    chunked_prefill_size: int
    max_graph_batch: int
    mem_fraction_static: float


def server_defaults(
    gpu_mib: float,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    *,
    latent: bool = False,
    cuda_graphs: bool = True,
    prefill_graphs: bool = True,
    vision: float = 1,
    chunked_prefill_size: int | None = None,
    max_running_requests: int | None = None,
) -> ServerDefaults:
    """SGLang's ``handle_gpu_memory_settings``.

    Args:
        gpu_mib: Memory of the card, in MiB.
        latent: Whether the model has multi-head latent attention.
        prefill_graphs: Whether its prefills have CUDA graphs.
        vision: Share of the fraction that its encoder leaves (``vision_share``).
        chunked_prefill_size, max_running_requests: What the line says; None is nothing.
    """
    _, tokens, few, many = next(row for row in _BY_GIB if gpu_mib < row[0] * 1024)
    chunk = chunked_prefill_size or tokens
    most = few if tensor_parallel < 4 else many
    if max_running_requests is not None:
        most = min(most, max_running_requests)
    kept = _OTHER_MIB + _CHUNK_MIB * max(chunk, _LEAST_TOKENS) + tensor_parallel * pipeline_parallel / 8 * 1024
    if cuda_graphs:
        kept += _DECODE_MIB * most
        # Pipeline stages run prefills without graphs.
        if pipeline_parallel == 1 and prefill_graphs:
            kept += _LATENT_MIB if latent else _PREFILL_MIB * len(prefill_graph_sizes(chunk))
    if gpu_mib > _LARGE_MIB:
        kept = max(kept, _LEAST_MIB)
    return ServerDefaults(chunk, most, round((gpu_mib - kept) / gpu_mib, 3) * vision)


def vision_share(model: ModelSpec) -> float:
    """Share of ``mem_fraction_static`` that SGLang takes for a multimodal model (``adjust_mem_fraction_for_vlm``)."""
    if not _sees(model):
        return 1
    encoder = not_none(model.encoder)
    layers, width = _VISION if model.model_type in _M3 else (encoder.layers or _VISION[0], encoder.width or _VISION[1])
    larger = layers * width**2 / (_VISION[0] * _VISION[1] ** 2) - 1
    least, most = _VISION_BOUNDS
    return _OF_VISION * max(least, min(most, 1 - _FOR_VISION * larger))


def prefill_graphs(model: ModelSpec) -> bool:
    """Whether prefills of a model have CUDA graphs (``disable_breakable_cudagraph_if_incompatible``)."""
    if model.model_type in _KDA:
        return False
    return not _sees(model) or model.model_type in _PREFILL_GRAPHS


def _sees(model: ModelSpec) -> bool:
    return model.encoder is not None and model.model_type not in _TEXT_ALONE


def window_of(model: ModelSpec) -> int | None:
    """``sliding_window_size`` of a model whose layers with a window have a pool of their own; None for all others, which keep every token."""
    less = _LESS.get(model.model_type or "")
    found = {group.span.tokens for group in model.kv_groups() if group.span.kind in _WINDOWED}
    return max(found) - less if found and less is not None else None


def page_size(
    gpu: GpuSpec,
    model: ModelSpec,
    backend: str | None = None,
    given: int | None = None,
    *,
    keeps: bool = True,
    strategy: str = "auto",
) -> int:
    """Tokens of a page, which the attention backend decides.

    Args:
        backend: ``--attention-backend``; None is SGLang's choice by card and model.
        given: ``--page-size``, which SGLang replaces where the backend does not have it.
        keeps: Whether there is a radix cache.
        strategy: ``--mamba-radix-cache-strategy``.
    """
    if model.indexer is not None and model.latent is not None:
        return _PAGES["dsa"]
    own = backend
    # Elsewhere SGLang takes backends with pages of one token.
    if backend is None and gpu.major == 10:
        if model.model_type in _TRITON:
            return _PAGES["trtllm_mha"] if not keeps or strategy == "extra_buffer" else 1
        others = "trtllm_mha" if model.latent is None else "flashinfer"
        backend = _ON_BLACKWELL.get(model.model_type or "", others)
    if backend == "fa4" and gpu.major == 10 and model.latent is None:
        return _FA4_PAGE
    if given is None and model.model_type in _M3 and (gpu.major, own) in _M3_PAGED:
        return _FA4_PAGE
    fixed = _PAGES.get(backend or "")
    if fixed is None or given in _ALSO.get(backend or "", ()):
        return given or 1
    return fixed


def prefill_graph_sizes(most: int) -> list[int]:
    """Tokens of the CUDA graphs of a prefill, up to ``most``."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, most + 1, 512))
    return [size for step in steps for size in range(*step) if size <= most]


def max_running_requests(num_slots: int, context_len: int, given: int | None = None) -> int:
    """SGLang's ``resolve_max_num_reqs``: by the pool, and no more than it has pairs of slots."""
    by_pool = max(min(int(num_slots / context_len * 512), 4096), 2048)
    return max(1, min(by_pool if given is None else given, num_slots // 2))


def fraction_of(launch: Launch) -> float:
    """The default of ``mem_fraction_static``, with the chunk and the requests of a launch."""
    model, deployment = launch.model, launch.deployment
    return server_defaults(
        launch.gpu.memory_bytes / _MIB,
        launch.tensor_parallel,
        deployment.pipeline_parallel,
        latent=model.latent is not None,
        cuda_graphs=deployment.cuda_graphs,
        prefill_graphs=prefill_graphs(model),
        vision=vision_share(model),
        chunked_prefill_size=launch.max_num_batched_tokens,
        max_running_requests=launch.max_num_seqs or None,
    ).mem_fraction_static


def _used_at_start(launch: Launch) -> int:
    """Bytes in use on each GPU when SGLang loads its weights."""
    if launch.gpu.unified_memory:
        return used_at_start(launch).likely
    several = _USED_NVLINK if launch.gpu.has_nvlink else _USED_PCIE
    return round(GIB * (several if launch.num_gpus > 1 else _USED_ONE))


def stage_memories(
    launch: Launch, fraction: float | None = None, window_share: float = 1, of_states: int = 0
) -> list[StageMemory]:
    """Memory of the GPUs of every pipeline stage; a block is a page. What SGLang keeps for activations and CUDA graphs counts as activations.

    Args:
        launch, fraction, window_share, of_states: As for ``num_slots``.
    """
    model, deployment = launch.model, launch.deployment
    share = fraction_of(launch) if fraction is None else fraction
    total, used = launch.gpu.memory_bytes, _used_at_start(launch)
    budget = int((total - used) * share)
    parts = stages(model.num_layers, deployment.pipeline_parallel)
    found = []
    for layers, weights in zip(parts, loaded_bytes(launch), strict=True):
        left = budget - weights.likely - of_states
        found.append(
            StageMemory(
                gpu_name=launch.gpu.name,
                total_bytes=total,
                requested_bytes=budget,
                weights=weights,
                activations=exactly(total - used - budget),
                non_torch=exactly(used),
                cuda_graphs=exactly(0),
                kv_cache=exactly(left),
                kv_cache_bytes=left,
                block_bytes=round(launch.block_size * _slot_bytes(launch, layers, window_share)),
            )
        )
    return found


def slot_bytes(model: ModelSpec, kv_dtype: str, tensor_parallel: int, layers: range | None = None) -> tuple[int, int]:
    """Bytes on a GPU of a slot of the layers that keep every token, and of those with a window; of some layers, or all."""
    groups = model.kv_groups() if layers is None else model.kv_groups(layers)
    full, windowed = (
        sum(
            model.group_slot_bytes(each, kv_dtype, tensor_parallel)
            for each in groups
            if each.span.kind != "state" and (each.span.kind in _WINDOWED) == has_window
        )
        for has_window in (False, True)
    )
    return full, windowed


def _slot_bytes(launch: Launch, layers: range, window_share: float) -> float:
    """Bytes of a slot of some layers on a GPU."""
    full, windowed = slot_bytes(launch.model, launch.deployment.kv_dtype, launch.tensor_parallel, layers)
    return full + window_share * windowed


def num_slots(launch: Launch, fraction: float | None = None, window_share: float = 1, of_states: int = 0) -> int:
    """Slots of the KV cache; of pipeline stages, of the one with the fewest. 0 or less where the weights leave none.

    Args:
        launch: ``max_num_batched_tokens`` is the chunk; ``max_num_seqs`` is 0 where the line says nothing.
        fraction: ``--mem-fraction-static``; None is SGLang's default.
        window_share: Slots of layers with a window for each of the others, where these have a pool of their own.
        of_states: Bytes of the pool of states on each GPU.
    """
    parts = stages(launch.model.num_layers, launch.deployment.pipeline_parallel)
    memories = stage_memories(launch, fraction, window_share, of_states)
    return min(
        int(memory.kv_cache_bytes // _slot_bytes(launch, layers, window_share))
        for layers, memory in zip(parts, memories, strict=True)
    )
