"""How a model is put on GPUs, tensor parallelism aside: what vLLM's flags change of its bytes."""

from __future__ import annotations

from dataclasses import dataclass

from .dtypes import dtype_bits


@dataclass(frozen=True, slots=True)
class Deployment:
    """The default is SOSP'23's: one stage, everything in 16 bits, no CUDA graphs.

    Attributes:
        pipeline_parallel: Stages that the layers are divided into.
        kv_dtype: Of the KV cache. Scales are not counted: vLLM's fp8 has one a tensor or a head ("Quantized
            KV Cache" in its documentation). Formats with a scale a token, as LMDeploy's int4 and int8, hold
            that much less than is said here.
        quantization: Number format of the weights; None leaves them in 16 bits.
        cuda_graphs: Whether steps are captured; see ``graphs``.
    """

    pipeline_parallel: int = 1
    kv_dtype: str = "fp16"
    quantization: str | None = None
    cuda_graphs: bool = False

    @property
    def is_default(self) -> bool:
        """Whether nothing differs from SOSP'23's; bf16 is as wide as fp16."""
        wide = dtype_bits(self.kv_dtype) == 16
        return wide and self.pipeline_parallel == 1 and self.quantization is None and not self.cuda_graphs
