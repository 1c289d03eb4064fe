"""Attention backends of vLLM on a GPU, and attention of steps that decode and prefill at once.

A step of vLLM V1 attends to its prompts and its decodes in one call. What a decode takes in that call follows from the backend:

    attention of the step = prefill + k x decode + blocks

``prefill`` and ``decode`` are the two calls apart. k is 1 for backends that give decodes a call of their own, and near 1 for kernels that pack
the query heads of a KV head into one tile in every call. FlashAttention 2 does not: it packs them, and splits long contexts, only where no sequence has more than one query
(``seqlenq_ngroups_swapped`` and ``set_params_splitkv`` of ``mha_varlen_fwd``, ``flash_api.cpp``). In a mixed call every query head of
a decode is a tile of its own, of 64 rows of which one is needed. So the decodes of a call take the longest of

    tiles: 64 rows a query head over the whole context, at the rate at which prompts are computed in the same kernel
    reads: decode x (1 + (passes - 1) x missed)

    passes = query heads of a KV head / those that run at the same time and share what they read
    missed = how far the KV of one KV head, over all decodes, exceeds the L2 cache: 0 up to its size, 1 from 1.5 times on

``blocks`` are the empty tiles: the grid of the call has, for each decode and query head, as many tiles as the longest prompt.

No coefficient is fitted to a server. On the four published tables of mixed calls of LLMServingSim
(casys-kaist/LLMServingSim at 5daddb2, profiler/perf, MIT; vLLM 0.19 on an RTX 4090 and an RTX PRO 6000, 4 and 8 query heads a KV
head) ``python -m tools.profiles.mixed_calls`` prints their errors. No such table is of an Ampere card, of Hopper, or of a
data-centre Blackwell. Which part of the A100's L2 counts, and that no reads are shared there, was chosen among variants after its bursts had been
simulated; ``PACKED_K`` was taken after H100 servers had been, and their median error of TPOT hardly depends on it (2.6 % with 1, 2.3 % with 2).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..spec.attention_backends import (
    FLASH,
    TRITON_FLASH,
    TRITON_FLASHINFER,
    chosen_attention,
    flash_version,
    need_of,
)
from ..spec.deployment import Deployment
from ..spec.gpu import GpuSpec
from ..spec.releases import LAST_ORDERED
from ..spec.shape import ModelSpec
from .base import coefficient


class Backend(NamedTuple):
    """What a mixed call of a backend does.

    Attributes:
        name: As vLLM's logs have it, with the version of FlashAttention.
        tile_rows: Rows of the tile that each query head of a decode takes in a mixed call; None where the heads of a KV head share a tile,
            or decodes have a call of their own.
        source: Where that is seen, and what it was tested on.
        k: Of backends without ``tile_rows``, where query heads share a KV head.
    """

    name: str
    tile_rows: int | None
    source: str
    k: float = 1.0


#: k of a kernel in which the heads of a KV head share a tile: between 1, which its source says, and 1.65, which the tables of Llama 3.1 8B in FlashAttention 2 have
#: over all calls (1.93 and 1.42 in the median: RTX 4090, RTX PRO 6000), as a geometric mean. It is assumed, not measured, and servers do not decide it.
PACKED_K = 1.3
_BY_SOURCE = "by the source of the kernel; no table of mixed calls has this backend"
#: The backends of which mixed calls are computed.
FLASH_ATTN_2 = Backend(
    "FLASH_ATTN 2",
    64,
    "kBlockM of run_mha_fwd_splitkv_dispatch (flash_fwd_launch_template.h); tables of RTX 4090 and RTX PRO 6000 in vLLM 0.19",
)
FLASH_ATTN_3 = Backend(
    "FLASH_ATTN 3",
    None,
    f"PackGQA for every batch of several lengths (should_pack_gqa, heuristics.h), one scheduler; {_BY_SOURCE}",
    PACKED_K,
)
FLASH_ATTN_4 = Backend("FLASH_ATTN 4", None, f"pack_gqa as in version 3; {_BY_SOURCE}", PACKED_K)
FLASHINFER = Backend("FLASHINFER", None, f"decodes are reordered first and have a call of their own; {_BY_SOURCE}")
TRITON_ATTN = Backend(
    "TRITON_ATTN",
    None,
    f"BLOCK_Q = BLOCK_M // num_queries_per_kv (triton_unified_attention.py); {_BY_SOURCE}",
    PACKED_K,
)
#: The project's own kernels, on which a device is calibrated.
TWO_CALLS = Backend("two calls", None, "the project's own kernels attend to prompts and to decodes in a call each")
BACKENDS = {each.name: each for each in (FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4, FLASHINFER, TRITON_ATTN)}

#: Microseconds of an empty tile in its place on a multiprocessor: on the RTX 4090 2.76 ns with 128 places, on the RTX PRO 6000 1.87 ns
#: with 188 (calls of 128 decodes of 16 tokens with chunks of 16 and of 2,048).
EMPTY_TILE_US = 0.35
_EMPTY_SOURCE = "calls of 128 decodes of 16 tokens in the tables of RTX 4090 and RTX PRO 6000"
#: A tile starts with a whole block of keys, of 128: half of one more than the context in the mean.
_KEYS_MORE = 64
#: L2 sizes between which the KV of one KV head stops being found there.
_MISSED_FROM, _MISSED_WHOLLY = 1.0, 1.5
#: Tiles of 80 KiB of shared memory (64 rows, 128 keys) that a multiprocessor of a data-centre card has places for; of others, with 100 KiB,
#: one.
_PLACES = 2


def attention_backend(model: ModelSpec, gpu: GpuSpec, deployment: Deployment, tensor_parallel: int = 1) -> Backend:
    """The backend of softmax attention that vLLM chooses (``spec.attention_backends``), or that the user names.

    Texts of a model with images run in the second backend of a pair. Backends of which no mixed call is known, and those of other
    vendors' cards, are taken to pack the heads of a KV head.
    """
    need = need_of(model, gpu, deployment.kv_dtype, tensor_parallel)
    minor = deployment.vllm_minor or LAST_ORDERED
    name = TRITON_ATTN.name if need is None else chosen_attention(need, minor, deployment.attention_backend)
    if name is None or need is None:
        return TRITON_ATTN
    same = {TRITON_FLASHINFER: FLASHINFER.name, TRITON_FLASH: f"{FLASH} {flash_version(need, minor)}"}.get(name, name)
    return BACKENDS.get(same, TRITON_ATTN)._replace(name=name)


def table_backend(gpu: GpuSpec) -> Backend:
    """The backend of the tables of attention that a profile is fitted to: the card's default for 16-bit KV caches and no sinks."""
    return {9: FLASH_ATTN_3, 10: FLASHINFER}.get(gpu.major or 0, FLASH_ATTN_2)


class MixedCalls:
    """Decodes of one layer in a mixed call, on one GPU.

    Args:
        heads, kv_heads: Of one GPU.
        flops_per_s: Rate at which long prompts are computed.
        token_bytes: Of one token in the KV cache of the layer, K and V of all its KV heads.
    """

    def __init__(
        self,
        backend: Backend,
        gpu: GpuSpec,
        heads: int,
        kv_heads: int,
        head_dim: int,
        flops_per_s: float,
        token_bytes: float,
    ) -> None:
        self.backend, self.group = backend, heads // kv_heads
        self._heads, self._head_bytes = heads, token_bytes / kv_heads
        multiprocessors = gpu.multiprocessors or 0
        self._places = multiprocessors * (_PLACES if gpu.is_data_centre else 1)
        # Half of a cache in two partitions counts. No table shows that query heads share reads there: none is assumed to.
        self._running = 0 if gpu.is_data_centre else multiprocessors
        self._cache = None if gpu.l2_bytes is None else gpu.l2_bytes / (2 if gpu.is_data_centre else 1)
        rows = backend.tile_rows or 0
        self._key_us = 4 * rows * head_dim * heads / flops_per_s * 1e6
        self._tiles = rows > 0

    def decode_us(
        self, batch: int, context: np.ndarray, alone_us: np.ndarray, distinct: np.ndarray | None = None
    ) -> np.ndarray:
        """k x decode: microseconds of ``batch`` decodes over ``context`` tokens, which take ``alone_us`` in a call of their own.

        Args:
            distinct: Tokens among them that are not those of another sequence too; None is all.
        """
        # With one query head a KV head both calls are the same kernel: there are no heads to pack.
        if self.group == 1:
            return alone_us
        if not self._tiles:
            return alone_us * self.backend.k
        tiles = self._key_us * (context + batch * _KEYS_MORE)
        together = min(self.group, max(1, self._running // batch))
        return np.maximum(
            tiles,
            alone_us * (1 + (self.group / together - 1) * self._missed(context if distinct is None else distinct)),
        )

    @property
    def caches_shared(self) -> bool:
        """Whether the time depends on how many of the tokens are distinct."""
        return self._tiles and self.group > 1 and self._cache is not None

    def is_cached(self, context: int) -> bool:
        """Whether the L2 cache holds the KV of one KV head, so that it does not matter which tokens are shared."""
        return not self._missed(np.array(float(context))).any()

    def block_us(self) -> float:
        """Microseconds for each decode and each 64 tokens of the longest prompt."""
        return self._heads * EMPTY_TILE_US / self._places if self._tiles and self._places else 0.0

    def describe(self) -> dict[str, dict[str, object]]:
        """For ``describe`` of a cost."""
        if not self._tiles:
            return {"mixed_attention.k": coefficient(self.backend.k if self.group > 1 else 1, "1", self.backend.source)}
        return {
            "mixed_attention.tile_rows": coefficient(self.backend.tile_rows or 0, "1", self.backend.source),
            "mixed_attention.empty_tile_us": coefficient(EMPTY_TILE_US, "us", _EMPTY_SOURCE),
        }

    def _missed(self, context: np.ndarray) -> np.ndarray:
        if self._cache is None:
            return np.ones(context.shape)
        over = context * self._head_bytes / self._cache
        return np.clip((over - _MISSED_FROM) / (_MISSED_WHOLLY - _MISSED_FROM), 0, 1)
