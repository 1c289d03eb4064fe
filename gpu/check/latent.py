"""Caches of latent vectors (MLA) for tests of the kernel, and attention over them in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..ops.source import LATENT_DIM, LATENT_KEY_DIM
from .cases import Case, Host, OnDevice, case, expected

#: DeepSeek-V3's, without YaRN's factor: a head has 128 dimensions and 64 rotary ones before its projection is absorbed.
SOFTMAX_SCALE = 192**-0.5


@dataclass(frozen=True)
class LatentCase:
    """The arguments of ``latent_attention.forward``: ``given``, with the vectors as keys of one KV head; its values are not used."""

    given: Case
    softmax_scale: float = SOFTMAX_SCALE

    def arguments(self) -> dict[str, Any]:
        """By name."""
        named = vars(self.given) | {"kv_cache": self.given.key_cache[:, :, 0], "softmax_scale": self.softmax_scale}
        return {name: value for name, value in named.items() if name not in ("key_cache", "value_cache")}

    def expected(self, query_lens: Sequence[int] | None = None) -> Any:
        """As :func:`cases.expected`."""
        values = self.given.key_cache[..., :LATENT_DIM]
        return expected(replace(self.given, value_cache=values), query_lens, self.softmax_scale)


def latent_case(
    dtype: str,
    heads: int,
    block_size: int,
    contexts: Sequence[int],
    seed: int = 0,
    *,
    num_blocks: int | None = None,
    make: Host | OnDevice | None = None,
) -> LatentCase:
    """As :func:`cases.case`, with a cache of vectors: the first two sequences share blocks, and unused slots are NaN."""
    shape = (dtype, (heads, 1), LATENT_KEY_DIM, block_size)
    return LatentCase(case(*shape, contexts, seed, num_blocks=num_blocks, make=make))
