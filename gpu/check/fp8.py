"""Caches of fp8 (e4m3) for tests of the kernels: the numbers of the codes, by the format's definition, and attention over them.

A code has a sign, four bits of exponent with a bias of 7, and three of mantissa. An exponent of 0 is that of subnormals, and the
two codes with all other bits set are NaN; there is no infinity ("FP8 Formats for Deep Learning", arXiv 2209.05433).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .cases import Case, Host, OnDevice, case, expected, library_of

_CODES = np.arange(256)
_EXPONENTS, _MANTISSAS = _CODES >> 3 & 15, (_CODES & 7) / 8
_MAGNITUDES = np.where(_EXPONENTS, (1 + _MANTISSAS) * 2.0 ** (_EXPONENTS - 7), _MANTISSAS * 2.0**-6)
#: The number of each code, float64.
NUMBERS = np.where(_CODES & 127 == 127, np.nan, np.where(_CODES & 128, -_MAGNITUDES, _MAGNITUDES))
NAN_CODE, LARGEST_CODE = 0x7F, 0x7E


def encoded(numbers: np.ndarray) -> np.ndarray:
    """The nearest codes, uint8; of two as near the even one, and the largest for all larger numbers."""
    numbers = np.asarray(numbers, np.float64)
    magnitudes, positive = np.abs(numbers), NUMBERS[: LARGEST_CODE + 1]
    between = (positive[1:] + positive[:-1]) / 2
    codes = np.searchsorted(between, magnitudes)
    at = np.minimum(codes, len(between) - 1)
    codes = codes + ((magnitudes == between[at]) & (codes % 2 == 1))
    return np.where(np.isnan(numbers), NAN_CODE, codes | np.signbit(numbers) << 7).astype(np.uint8)


def decoded(codes: Any, scales: Any) -> Any:
    """The numbers of a cache ``[..., num_kv_heads, head_dim]`` with a scale per KV head, in float64."""
    library = library_of(codes)
    numbers = library.asarray(NUMBERS, device=codes.device)[library.asarray(codes, dtype=library.int64)]
    return numbers * library.asarray(scales, dtype=library.float64)[:, None]


@dataclass(frozen=True)
class Fp8Case:
    """The arguments of attention over caches of fp8: ``given``, with codes in its caches, and two scales."""

    given: Case
    k_scale: Any
    v_scale: Any

    def arguments(self) -> dict[str, Any]:
        """By name."""
        return vars(self.given) | {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def expected(self, query_lens: Sequence[int] | None = None) -> Any:
        """As :func:`cases.expected`, of the numbers that the caches hold."""
        keys, values = decoded(self.given.key_cache, self.k_scale), decoded(self.given.value_cache, self.v_scale)
        return expected(replace(self.given, key_cache=keys, value_cache=values), query_lens)


def fp8_case(
    dtype: str,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    contexts: Sequence[int],
    seed: int = 0,
    make: Host | OnDevice | None = None,
    *,
    query_lens: Sequence[int] | None = None,
) -> Fp8Case:
    """As :func:`cases.case`, with caches of fp8: every KV head has scales of its own, and unused slots are NaN.

    Scales let normal numbers use most of the range: the largest ones of some heads are beyond it.
    """
    make = make or Host(seed)
    full = case("float32", heads, head_dim, block_size, contexts, seed, query_lens=query_lens)
    k_scale, v_scale = np.random.default_rng(seed).uniform(0.006, 0.03, (2, heads[1])).astype(np.float32)
    given = Case(
        query=make.normal(full.query.shape, dtype),
        key_cache=make.ints(encoded(full.key_cache / k_scale[:, None])),
        value_cache=make.ints(encoded(full.value_cache / v_scale[:, None])),
        block_tables=make.ints(full.block_tables),
        context_lens=make.ints(full.context_lens),
        block_size=block_size,
        max_context_len=full.max_context_len,
    )
    return Fp8Case(given, make.ints(k_scale), make.ints(v_scale))
