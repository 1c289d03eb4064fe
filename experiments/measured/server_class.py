"""The class of a server under a load, as the board of measured servers and the intervals of a prediction have it.

gpu         the card
backend     the attention kernels that vLLM takes there by default
kind        dense, MoE (experts), hybrid (layers with a state), MLA (latent attention); quantised in fewer than 16 bits
client      open loop (the client sends at its own rate), closed loop (users wait for answers), at once
"""

from __future__ import annotations

from typing import Literal

from ...sim import Settings, Workload
from ...sim.cost.backends import attention_backend
from ...sim.cost.kernels import experts_kernels, model_gemm_kernels
from ...sim.engine.replica import deployment_of
from ...sim.spec import gpu, model
from ...sim.spec.matrix import formats_by_part
from ...sim.spec.shape import ModelSpec

Client = Literal["open loop", "closed loop", "at once"]
_SHORT = {
    **{f"FLASH_ATTN {version}": f"FA{version}" for version in (2, 3, 4)},
    "FLASHINFER": "FlashInfer",
    "TRITON_ATTN": "Triton",
}


def backend_of(settings: Settings) -> str:
    """The attention kernels that vLLM takes by default (``sim.cost.backends``), shortened: FA2 is FlashAttention 2."""
    shape, card = model(settings.model), gpu(settings.gpu)
    if shape.has_vectors:
        return "MLA kernels, sparse" if shape.indexer or shape.compressed else "MLA kernels"
    own = deployment_of(settings, shape, card)
    return _SHORT.get(name := attention_backend(shape, card, own, settings.tensor_parallel_size).name, name)


def kernels_of(settings: Settings) -> dict[str, str]:
    """The kernels that vLLM takes by default, by number format and part, such as "fp8 GEMMs"; GEMMs in 16 bits have no choice."""
    shape, card = model(settings.model), gpu(settings.gpu)
    given = shape, card, deployment_of(settings, shape, card)
    ranks = settings.tensor_parallel_size
    found = {f"{form} GEMMs": kernels.run for form, kernels in model_gemm_kernels(*given, ranks, ()).items()}
    experts = experts_kernels(*given, ranks, ())
    if experts is not None:
        form = formats_by_part(given[2].quantization).get("expert") if given[2].quantization else None
        found[f"{form or '16-bit'} experts"] = experts.run
    return {part: name for part, name in found.items() if name is not None}


def kind_of(settings: Settings, shape: ModelSpec) -> str:
    """The kind of a model, and whether its weights are quantised."""
    kind = "hybrid" if shape.mixer else "MLA" if shape.has_vectors else "MoE" if shape.experts else "dense"
    return f"{kind} quantised" if settings.quantization or shape.quantization else kind


def client_of(work: Workload) -> Client:
    """How the client of a workload sends its requests."""
    if work.users is not None:
        return "closed loop"
    return "open loop" if work.arrival_ticks.any() else "at once"
