"""How long a step takes."""

from __future__ import annotations

from ..errors import SettingError
from ..spec.gpu import GpuSpec
from ..spec.pool import block_bytes
from ..spec.shape import ModelSpec
from .base import StepCost
from .paper import PaperCost
from .roofline import RooflineCost

__all__ = ["COST_NAMES", "PaperCost", "RooflineCost", "StepCost", "cost"]

COST_NAMES = ("paper", "roofline")


def cost(
    name: str, model: ModelSpec, gpu: GpuSpec, tensor_parallel: int = 1, block_size: int = 16, scale: float = 1.0
) -> StepCost:
    """The cost model of that name, compiled for a model on a GPU, in fp16.

    Args:
        scale: Factor on the paper's step time.

    Raises SettingError for an unknown name, for "paper" on anything but what it is fitted to (the
    layers and width of OPT-13B on one A100-40GB), and for a scale that has nothing to scale.
    """
    if name == "paper":
        if not PaperCost.fits(model, gpu, tensor_parallel):
            where = f"{model.name} on {tensor_parallel} x {gpu.name}"
            raise SettingError("cost", name, f"is fitted to opt-13b on one a100-40gb; use roofline for {where}")
        return PaperCost(scale, block_bytes(model, block_size=block_size))
    if name == "roofline":
        if scale != 1:
            raise SettingError("scale", scale, "applies to the cost 'paper' only; leave it at 1")
        return RooflineCost(model, gpu, tensor_parallel, block_size=block_size)
    raise SettingError("cost", name, f"one of {', '.join(COST_NAMES)}")
