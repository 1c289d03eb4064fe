"""Small kernels of a layer, which take no longer than their launch, as vLLM's own models launch them.

A layer's norms, rotary positions and activation are ``elementwise``, four kernels as aiconfigurator counts them, and operations of the tables
include the quantisation of what they multiply. Layers with experts or with states launch more, each for the time of the shortest calls in the
tables of its card (``small_kernel``):

    experts            the choice of a token's experts; adding the shared experts' output
    a gate on these    its product with the hidden state, which is one row of a GEMM, and its use
    norms of Q and K   one, of both heads; MiniMax M2 normalises over the heads of all ranks: two, around an all-reduce
    gated attention    the use of the gate
    a router in fp32   converting the hidden state (MiniMax M2)
    gated delta net    the product with both gates of the state, taking them apart, and clearing the output; before 0.18, which updates the
                       states from packed Q, K and V (pull request 36596), also a copy of each and the gating

Dense layers stay at the four: their times were compared with servers, and these showed none missing.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from ..spec.shape import ModelSpec
from ..spec.states import GatedDelta

#: ``MiniMaxText01RMSNormTP`` of vLLM, and its router with weights in fp32.
_MINIMAX_M2 = "minimax_m2"
#: First minor release that decodes gated delta nets from packed Q, K and V.
_FIRST_PACKED = 18


def small_kernels(model: ModelSpec, minor: int | None = None, modules: AbstractSet[int] = frozenset()) -> int:
    """Of all layers, beside ``elementwise``.

    Args:
        minor: Of the release, 0.``minor``; None is the newest.
        modules: Layers with attention in an operation of its own, which has its kernels.
    """
    if model.experts is None and model.mixer is None:
        return 0
    mixers = sum(_of_mixer(model, layer, minor) for layer in range(model.num_layers) if layer not in modules)
    return mixers + sum(_of_experts(model, layer) for layer in range(model.num_layers))


def norm_all_reduces(model: ModelSpec) -> int:
    """All-reduces of two sums of squares a token, of all layers."""
    return len(model.attention_layers) if model.model_type == _MINIMAX_M2 and model.qk_norm else 0


#: Bytes of a token in each of these: sums of the squares of Q and of K, in fp32.
NORM_BYTES = 8


def _of_mixer(model: ModelSpec, layer: int, minor: int | None) -> int:
    if model.span(layer).kind == "state":
        unpacked = minor is not None and minor < _FIRST_PACKED
        return 3 + 4 * unpacked if isinstance(model.mixer, GatedDelta) else 0
    if not model.span(layer).keeps_tokens:
        return 0
    norms = (2 if norm_all_reduces(model) else 1) if model.qk_norm else 0
    return norms + model.gated_attention


def _of_experts(model: ModelSpec, layer: int) -> int:
    experts = model.experts
    if experts is None or not model.has_experts(layer):
        return 0
    return 1 + bool(experts.shared_size) + 2 * experts.shared_gate + (model.model_type == _MINIMAX_M2)
