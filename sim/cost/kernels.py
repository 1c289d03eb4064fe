"""The kernels of a simulated server (``spec.kernels``), and those of the tables that its step times are fitted to.

A table of aiconfigurator-core times vLLM's own layers, with the kernels that its release chooses on the card: the same rule says which. GEMMs in
16 bits are cuBLAS's on both sides. Weights that are unpacked to 16 bits have a table of TensorRT-LLM's kernels on the A100, and experts in 4 bits one
of SGLang's. Number formats without a table take the time of 16-bit GEMMs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from ..spec.deployment import Deployment
from ..spec.gpu import GpuSpec
from ..spec.kernels import (
    FP8,
    FP8_BLOCK,
    FP8_TENSOR,
    MXFP4_V4,
    TRTLLM_MXFP8,
    ExpertsNeed,
    chosen_experts,
    chosen_linear,
    deployed_experts,
    experts_need,
    scaled_form,
)
from ..spec.matrix import QUANTIZATIONS
from ..spec.releases import LAST_ORDERED
from ..spec.shape import ModelSpec
from .gemms import Gemm, layer_gemms
from .operations import OpName

#: Minor versions of vLLM in the tables; the A100's are older, and have 16 bits alone.
_TABLE_MINOR = 24
#: Operations of GEMMs by number format, and the compute capability from which vLLM multiplies in it.
_GEMM_TABLES = {"fp8": ("gemm_fp8", 89), "nvfp4": ("gemm_nvfp4", 100)}
#: SGLang's copy of Marlin's kernel for experts in 4 bits, in the tables of the A100.
_OTHER_ENGINE_TABLE = "SGLANG_MARLIN"
#: TensorRT-LLM's plug-in for weights that are unpacked, at most at the rate of these experts.
UNPACKING_TABLE = f"TRTLLM_WEIGHT_ONLY/{_OTHER_ENGINE_TABLE}"
_AMPERE = 80
#: Experts in mxfp4 with activations in mxfp8; the others have activations in 16 bits.
MXFP8_EXPERTS: OpName = "moe_mxfp4_mxfp8"


def unpacked_gemm(quantization: str) -> OpName:
    """The operation of GEMMs with weights of this number format, where they are unpacked to 16 bits."""
    return "gemm_w4" if QUANTIZATIONS[quantization].bits == 4 else "gemm_w8"


class Kernels(NamedTuple):
    """What runs, and what was timed.

    Attributes:
        run: vLLM's names, the shapes of a model joined by a slash; None where vLLM finds none.
        table: That of the tables; None where they have 16 bits alone.
    """

    run: str | None
    table: str | None

    @property
    def differ(self) -> bool:
        """Whether the time is that of other kernels."""
        return self.run != self.table


def gemm_kernels(
    gemms: Iterable[Gemm], model: ModelSpec, gpu: GpuSpec, deployment: Deployment, operations: Container[str]
) -> Mapping[str, Kernels]:
    """Of GEMMs other than experts, by number format; those of 16 bits have no choice. Empty on other vendors' cards.

    Args:
        operations: Names of the operations that a profile has.
    """
    capability = gpu.compute_capability
    if capability is None:
        return {}
    minor, found = deployment.vllm_minor or LAST_ORDERED, dict[str, set[str]]()
    for gemm in gemms:
        if gemm.quantization is not None and gemm.experts is None:
            form = scaled_form(model, deployment.quantization, gemm.quantization) or gemm.quantization
            kernel = chosen_linear(capability, form, minor, gemm.k, gemm.n)
            found.setdefault(gemm.quantization, set()).update([] if kernel is None else [kernel])
    return {
        form: Kernels("/".join(sorted(names)) or None, _gemm_table(capability, form, operations))
        for form, names in sorted(found.items())
    }


def model_gemm_kernels(
    model: ModelSpec, gpu: GpuSpec, deployment: Deployment, tensor_parallel: int, operations: Container[str]
) -> Mapping[str, Kernels]:
    """``gemm_kernels`` of all layers of a model."""
    ranks, quantization = deployment.expert_ranks(tensor_parallel), deployment.quantization
    gemms = {
        gemm
        for layer in range(model.num_layers)
        for gemm in layer_gemms(model, layer, tensor_parallel, quantization, ranks)
    }
    return gemm_kernels(gemms, model, gpu, deployment, operations)


def experts_kernels(
    model: ModelSpec, gpu: GpuSpec, deployment: Deployment, tensor_parallel: int, operations: Container[str]
) -> Kernels | None:
    """Of experts; None on other vendors' cards and without experts.

    Args:
        operations: As of ``gemm_kernels``.
    """
    need = experts_need(model, gpu, deployment.quantization, deployment.expert_ranks(tensor_parallel))
    if need is None:
        return None
    run, table = deployed_experts(need, deployment), chosen_experts(_in_tables(need), _TABLE_MINOR)
    if run == TRTLLM_MXFP8 and MXFP8_EXPERTS in operations:
        table = run
    if need.capability == _AMPERE and need.form is not None:
        # vLLM's table has 16 bits alone there.
        table = _OTHER_ENGINE_TABLE
    return Kernels(run, table)


def _gemm_table(capability: int, form: str, operations: Container[str]) -> str | None:
    operation, least = _GEMM_TABLES.get(form, ("", 0))
    if capability < least or not operation:
        return UNPACKING_TABLE if unpacked_gemm(form) in operations else None
    if operation not in operations:
        return None
    return chosen_linear(capability, FP8 if form == "fp8" else form, _TABLE_MINOR)


def _in_tables(need: ExpertsNeed) -> ExpertsNeed:
    """Experts as the tables have them: fp8 in blocks, on compute capability 12 by tensor; mxfp4 as of gpt-oss; one engine."""
    form = "mxfp4" if need.form == MXFP4_V4 else need.form
    if form is not None and form.startswith("fp8"):
        form = FP8_TENSOR if need.capability >= 120 else FP8_BLOCK
    return need._replace(form=form, engines=False)
