"""The values of a replay: K, V and queries of a token as a function of its id and position.

Every element is a hash of (token id, position, kind, layer, head, dimension) in wrapping integer arithmetic,
so it is the same on every device and in every order. Two tokens have equal values only if id and position are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Increment and multipliers of SplitMix64 (Steele, Lea and Flood 2014), as signed integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
QUERY, KEY, VALUE = range(3)
#: Bits of an element: the precision of fp32.
_BITS = 24
#: Width of a uniform distribution with variance 1: 2 * sqrt(3).
_WIDTH = 3.4641016


def drawn(kind: int, layer: int, token_ids: Tensor, positions: Tensor, heads: int, head_dim: int) -> Tensor:
    """Elements of one layer, fp32 ``[tokens, heads, head_dim]``: uniform, with mean 0 and variance 1.

    Args:
        kind: ``QUERY``, ``KEY`` or ``VALUE``.
        layer: Layer of the model.
        token_ids: int64 ``[tokens]``, on the device that computes.
        positions: int64 ``[tokens]``, position of each token in its sequence.
        heads: Number of query heads, or of KV heads.
        head_dim: Head dimension.
    """
    tokens = _mixed(_mixed(token_ids) + positions)
    first = (layer * 3 + kind) << 32
    elements = torch.arange(first, first + heads * head_dim, device=token_ids.device)
    bits = _mixed(tokens[:, None] + _mixed(elements)) >> (64 - _BITS)
    return (bits.float() * (_WIDTH / 2**_BITS)).view(-1, heads, head_dim)


def _mixed(values: Tensor) -> Tensor:
    """SplitMix64 of int64 counters."""
    values = (values + 1) * _GOLDEN
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Logical right shift."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
