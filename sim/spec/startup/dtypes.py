"""Whether vLLM runs a model in float32: weights, activations and the KV cache then have four bytes an element, and not two.

    --dtype float32   any model ("float" is the same)
    --dtype auto      below compute capability 8.0, which has no bfloat16, models that do not take float16 either. Elsewhere vLLM takes 16 bits of
                      a checkpoint in float32, too

as ``_resolve_auto_dtype`` of vLLM's ``config/model.py`` has it in the wheel of 0.33.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..gpu import GpuSpec
from ..shape import ModelSpec

FIRST_BFLOAT16 = 80
#: ``_FLOAT16_NOT_SUPPORTED_MODELS``, by ``model_type``.
NOT_IN_FLOAT16 = dict.fromkeys(
    ("gemma2", "gemma3", "gemma3_text", "glm4", "plamo2"),
    "Numerical instability. Please use bfloat16 or float32 instead.",
)


def is_in_float32(model: ModelSpec, cards: Sequence[GpuSpec], dtype: str) -> bool:
    """Whether the model runs in float32 on these cards.

    Args:
        dtype: ``--dtype``: "auto", "float16", "bfloat16" or "float32".
    """
    if dtype != "auto":
        return dtype == "float32"
    capability = min(card.compute_capability or FIRST_BFLOAT16 for card in cards)
    return capability < FIRST_BFLOAT16 and model.model_type in NOT_IN_FLOAT16
