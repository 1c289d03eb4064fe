"""Cost models: the duration of a step."""

from __future__ import annotations

from functools import lru_cache
from os import sep
from os.path import basename

from ..spec.deployment import Deployment
from ..spec.gpu import GpuSpec
from ..spec.pool import block_bytes
from ..spec.shape import ModelSpec
from ..types.errors import SettingError
from ..types.user_files import content_of
from .base import ScaledCost, StepCost, outside_ticks
from .calibrated import CalibratedCost
from .calibration import Calibration, parsed, profile, profile_names, read
from .paper import PaperCost
from .parts import step_parts
from .roofline import RooflineCost
from .server import OperationCost, ServedCost, Server, ServerConstants, ServerFit, read_server
from .speculative import SpeculativeCost
from .steps import FittedSteps, is_steps, read_steps

__all__ = [
    "COST_NAMES",
    "CalibratedCost",
    "Calibration",
    "FittedSteps",
    "PaperCost",
    "RooflineCost",
    "ScaledCost",
    "ServedCost",
    "Server",
    "ServerConstants",
    "ServerFit",
    "SpeculativeCost",
    "StepCost",
    "cost",
    "default_cost",
    "outside_ticks",
    "prices_kv",
    "profile",
    "profile_names",
    "read_server",
    "step_parts",
]

COST_NAMES = ("paper", "roofline", "fitted")


def cost(
    name: str,
    model: ModelSpec,
    gpu: GpuSpec,
    tensor_parallel: int = 1,
    block_size: int = 16,
    scale: float = 1.0,
    deployment: Deployment = Deployment(),
    server: Server | None = None,
    asynchronous: bool = False,
    paged: bool = True,
    page_bytes: int = 0,
) -> StepCost:
    """The cost model ``name``, built for one model, GPU and deployment.

    Args:
        name: One of ``COST_NAMES``, or the path of a calibration file.
        tensor_parallel: Tensor-parallel ranks.
        block_size: Tokens per block.
        scale: Factor on the step time.
        deployment: Pipeline stages, number formats of KV and weights, CUDA graphs.
        server: Measured constants of the server (``sim.cost.server``), if known. Refused with "paper" and with a
            server's fitted steps, which include such constants.
        asynchronous: Whether the scheduler decides a step while the step before it runs.
        paged: Whether decodes read KV through block tables; False is contiguous KV.
        page_bytes: Bytes on each rank that one swapped block moves, for pools with several KV groups; 0 computes the
            bytes of a block of all layers.

    Raises:
        SettingError: The name is unknown; the calibration is invalid or does not cover the model; or "paper" is used
            for another deployment than its own: a model with the layers and width of OPT-13B on one A100-40GB, in 16
            bit, without CUDA graphs.
        UserError: The calibration file cannot be read.
    """
    if name == "paper":
        if server is not None:
            raise SettingError("cost", name, f"knows no server; leave --server {server.name} or --cost out")
        return _paper(model, gpu, tensor_parallel, block_size, scale, deployment)
    fit = None if name == "roofline" else _profile(gpu) if name == "fitted" else _file(name)
    found: StepCost
    if isinstance(fit, FittedSteps):
        if server is not None:
            raise SettingError("cost", name, f"has constants of its own; leave --server {server.name} or --cost out")
        found = fit
    else:
        operations: OperationCost = (
            RooflineCost(
                model, gpu, tensor_parallel, block_size=block_size, deployment=deployment, page_bytes=page_bytes
            )
            if fit is None
            else _calibrated(fit, model, gpu, tensor_parallel, block_size, deployment, paged, page_bytes)
        )
        hides = asynchronous and operations.host_ticks() > 0
        found = operations if server is None and not hides else ServedCost(operations, server, asynchronous)
    return found if scale == 1 else ScaledCost(found, scale)


@lru_cache(maxsize=8)
def _calibrated(
    fit: Calibration,
    model: ModelSpec,
    gpu: GpuSpec,
    tensor_parallel: int,
    block_size: int,
    deployment: Deployment,
    paged: bool,
    page_bytes: int,
) -> CalibratedCost:
    """One for all simulations of a deployment: they share its curves, which are drawn as batches ask for them."""
    return CalibratedCost(fit, model, gpu, tensor_parallel, block_size, deployment, paged, page_bytes)


def default_cost(model: ModelSpec, gpu: GpuSpec, quantization: str | None = None) -> str:
    """Name of the default cost model: "fitted" if the GPU has a profile that covers the model, else "roofline"."""
    if gpu.profile is None and gpu.name not in profile_names():
        return "roofline"
    covered = CalibratedCost.refusal(model, _profile(gpu), quantization or model.quantization) is None
    return "fitted" if covered else "roofline"


def prices_kv(name: str, kv_dtype: str) -> bool:
    """Whether the cost model ``name`` has step times for a KV cache in ``kv_dtype``.

    Only a calibration may not: it is measured over a KV cache in one number format.

    Raises:
        UserError, SettingError: As :func:`cost`.
    """
    fit = None if name in COST_NAMES else _file(name)
    return not isinstance(fit, Calibration) or fit.kv_refusal(kv_dtype) is None


def _paper(
    model: ModelSpec, gpu: GpuSpec, tensor_parallel: int, block_size: int, scale: float, deployment: Deployment
) -> PaperCost:
    default = f"use {default_cost(model, gpu, deployment.quantization)}, the default,"
    if not PaperCost.fits(model, gpu, tensor_parallel):
        where = f"{model.name} on {tensor_parallel} x {gpu.name}"
        raise SettingError("cost", "paper", f"is fitted to opt-13b on one a100-40gb; {default} for {where}")
    if not deployment.is_default:
        remedy = f"is measured with 16-bit weights and KV, on one GPU, without CUDA graphs; {default} for others"
        raise SettingError("cost", "paper", remedy)
    return PaperCost(scale, block_bytes(model, block_size=block_size))


def _profile(gpu: GpuSpec) -> Calibration:
    """The profile of a GPU: its own file, or that of the package."""
    return profile(gpu.name) if gpu.profile is None else read(gpu.profile, gpu.field("profile"))


def _file(path: str) -> Calibration | FittedSteps:
    """Read a calibration file; a name without a folder and without ``.json`` is a misspelt cost model."""
    if sep not in path and not path.endswith(".json"):
        raise SettingError("cost", path, f"one of {', '.join(COST_NAMES)}, or the path of a calibration file (.json)")
    text, name = content_of(path, "cost"), basename(path)
    return read_steps(text, name) if is_steps(text) else parsed(text, name)
