"""Deployment of a model on GPUs: vLLM's flags that change its bytes, except tensor parallelism.

CUDA graphs: steps are captured for a few batch sizes, and a batch is padded to the next captured size. Sizes 1, 2, 4,
the multiples of 8 up to 256 and those of 16 up to 512 are captured, as vLLM 0.33 does (``cudagraph_capture_sizes``).
A larger batch runs without a graph and without padding.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from ..types.errors import NotSimulated, SettingError

#: How a token is chosen from the logits: the largest one, or by chance among those that top-p, or top-k and top-p, leave.
Sampling = Literal["greedy", "top-p", "top-k-top-p"]
DTYPE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8": 8, "int8": 8, "int4": 4, "fp8_ds_mla": 8, "nvfp4": 4}
#: vLLM's KV cache in 4 bits, with a scale of 8 bits for each 16 elements of a head.
NVFP4 = "nvfp4"
#: Formats of the KV cache with a scale for each token, group or head (``CacheDType``).
_UNCOUNTED_KV = (
    "nvfp4_ds_mla",
    "turboquant",
    "octave",
    "ultraquant",
    "int4_",
    "int8_",
    "fp8_per_token",
    "fp8_inc",
    "fp8_ds_mla",
)


def dtype_bits(dtype: str) -> int:
    """Width of one element in bits.

    Raises:
        SettingError: The dtype is unknown.
    """
    if dtype not in DTYPE_BITS:
        raise SettingError("dtype", dtype, f"one of {', '.join(DTYPE_BITS)}")
    return DTYPE_BITS[dtype]


def stored_bytes(elements: int, dtype: str) -> int:
    """Bytes of elements in a KV cache, with their scales (``nvfp4_kv_cache_full_dim`` of vLLM's torch_utils.py)."""
    return elements * 9 // 16 if dtype == NVFP4 else elements * dtype_bits(dtype) // 8


def element_bytes(dtype: str) -> float:
    """Bytes of an element in a KV cache, with its part of a scale."""
    return stored_bytes(16, dtype) / 16


def require_counted(field: str, dtype: str) -> None:
    """Raise NotSimulated for a format of vLLM's KV cache whose scales are not counted."""
    if dtype.startswith(_UNCOUNTED_KV):
        raise NotSimulated(field, dtype, "is vLLM's, and its scales are not counted", "take auto or fp8")


class ExpertRanks(NamedTuple):
    """Division of the routed experts among the GPUs of a pipeline stage, as in vLLM's ``FusedMoEParallelConfig``.

    Attributes:
        holders: Parts of the experts, each held by other GPUs.
        slices: GPUs that divide the matrices of each expert.
        engines: Engines that send their tokens to these experts.
        redundant: Experts that are held a second time.
    """

    holders: int = 1
    slices: int = 1
    engines: int = 1
    redundant: int = 0

    def held(self, count: int) -> int:
        """Experts of a layer on each GPU, whole or in slices, of ``count`` in all."""
        return -(-(count + self.redundant) // self.holders)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Settings that change bytes. The default is that of SOSP'23: one stage, everything in 16 bits, no CUDA graphs.

    With data parallelism a model with experts runs on several engines, each with its own requests and KV cache. Each
    holds all other weights; the experts of a layer are divided among the GPUs of all engines.

    Attributes:
        pipeline_parallel: Number of pipeline stages.
        kv_dtype: Number format of the KV cache. Scales are not counted: vLLM's fp8 has one per tensor or per head
            ("Quantized KV Cache" in its documentation). A format with a scale per token, such as LMDeploy's int4
            and int8, holds fewer tokens than computed here.
        quantization: Number format of the weights; None is 16 bits.
        cuda_graphs: Whether steps are captured; see ``padded_batch``.
        data_parallel: Engines that share the experts.
        expert_parallel: Whether each GPU holds whole experts, instead of a slice of every expert.
        decode_context_parallel: Tensor-parallel ranks that divide the tokens of a sequence (``context_parallel``).
        vllm_minor: Minor version of the release that chooses the kernels; None is the newest.
        attention_backend: Backend of attention that the user names (``attention_backends``); None is vLLM's choice.
        moe_backend: Kernels of experts that the user names (``kernels``); None is vLLM's choice.
        sampling: How tokens are chosen (``cost.sampler``). None of the four changes bytes.
    """

    pipeline_parallel: int = 1
    kv_dtype: str = "fp16"
    quantization: str | None = None
    cuda_graphs: bool = False
    data_parallel: int = 1
    expert_parallel: bool = False
    decode_context_parallel: int = 1
    vllm_minor: int | None = None
    attention_backend: str | None = None
    moe_backend: str | None = None
    sampling: Sampling = "greedy"

    @property
    def is_default(self) -> bool:
        """Whether all bytes are those of SOSP'23's deployment; bf16 is as wide as fp16."""
        wide = dtype_bits(self.kv_dtype) == 16
        alone = self.data_parallel == self.pipeline_parallel == self.decode_context_parallel == 1
        return wide and alone and self.quantization is None and not (self.cuda_graphs or self.expert_parallel)

    def expert_ranks(self, tensor_parallel: int = 1) -> ExpertRanks:
        """How experts are divided over all ranks, of which each data-parallel engine has ``tensor_parallel``: whole experts with expert parallelism, else slices."""
        ranks = self.data_parallel * tensor_parallel
        return ExpertRanks(*((ranks, 1) if self.expert_parallel else (1, ranks)), self.data_parallel)

    def describe(self) -> dict[str, object]:
        """The fields for ``run.json``; those of experts and of divided sequences only where they are given."""
        found = {name: value for name, value in asdict(self).items() if name not in _OF_KERNELS}
        return {name: value for name, value in found.items() if name not in _IF_GIVEN or value != _IF_GIVEN[name]}


_IF_GIVEN = {"data_parallel": 1, "expert_parallel": False, "decode_context_parallel": 1}
#: Settings that choose kernels: a description of a cost names the kernels instead.
_OF_KERNELS = frozenset(("vllm_minor", "attention_backend", "moe_backend", "sampling"))


def stages(num_layers: int, pipeline_parallel: int = 1, partition: tuple[int, ...] | None = None) -> list[range]:
    """The layers of each stage, as vLLM's ``get_pp_indices`` divides them (0.6.4 and later).

    If the number of stages does not divide the layers, the remaining layers go one each to the stages
    from the last but one backwards, because the last stage has the output head. 61 layers on 4 stages: 15,
    15, 16, 15.

    Args:
        partition: Layers of each stage, as the user divides them (``VLLM_PP_LAYER_PARTITION``).

    Raises:
        SettingError: A stage would be empty, or the partition is not one of these layers into as many stages.
    """
    if partition is not None:
        if len(partition) != pipeline_parallel or sum(partition) != num_layers or min(partition) < 1:
            remedy = f"must be the layers of {pipeline_parallel} stages, at least one each, of {num_layers}"
            raise SettingError("layer_partition", partition, remedy)
        ends = [*accumulate(partition)]
        return [range(end - size, end) for size, end in zip(partition, ends, strict=True)]
    if not 1 <= pipeline_parallel <= num_layers:
        raise SettingError("pipeline_parallel", pipeline_parallel, f"must be from 1 to the {num_layers} layers")
    each, left = divmod(num_layers, pipeline_parallel)
    longer = range(pipeline_parallel - 1 - left, pipeline_parallel - 1)
    found, start = [], 0
    for stage in range(pipeline_parallel):
        end = start + each + (stage in longer)
        found.append(range(start, end))
        start = end
    return found


MAX_CAPTURED = 512
#: Width up to which multiples of 8 are captured.
_FINE = 256
#: Memory of the captured graphs on each GPU: the low end of the "1~3 GiB" in a warning of vLLM's
#: ``model_runner.py``. Public logs of "Graph capturing finished ... took" show 0.1 to 1.0 GiB.
CUDA_GRAPH_BYTES = 1 << 30


def padded_batch(width: int) -> int:
    """Rows of a batch of ``width`` tokens with its padding; 0 for an empty batch."""
    if width > MAX_CAPTURED or width < 3:
        return width
    if width <= 4:
        return 4
    stride = 8 if width <= _FINE else 16
    return -(-width // stride) * stride
