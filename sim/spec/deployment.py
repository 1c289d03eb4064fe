"""Deployment of a model on GPUs: vLLM's flags that change its bytes, except tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import dtype_bits


@dataclass(frozen=True, slots=True)
class Deployment:
    """Settings that change bytes. The default is that of SOSP'23: one stage, everything in 16 bits, no CUDA graphs.

    Attributes:
        pipeline_parallel: Number of pipeline stages.
        kv_dtype: Number format of the KV cache. Scales are not counted: vLLM's fp8 has one per tensor or per head
            ("Quantized KV Cache" in its documentation). A format with a scale per token, such as LMDeploy's int4
            and int8, holds fewer tokens than computed here.
        quantization: Number format of the weights; None is 16 bits.
        cuda_graphs: Whether steps are captured; see ``graphs``.
    """

    pipeline_parallel: int = 1
    kv_dtype: str = "fp16"
    quantization: str | None = None
    cuda_graphs: bool = False

    @property
    def is_default(self) -> bool:
        """Whether all bytes are those of SOSP'23's deployment; bf16 is as wide as fp16."""
        wide = dtype_bits(self.kv_dtype) == 16
        return wide and self.pipeline_parallel == 1 and self.quantization is None and not self.cuda_graphs
