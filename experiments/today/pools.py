"""Two allocators for models with several kinds of layers, beside vLLM's pool of equal pages.

A *kind* is the layers of a model that keep the same: every token, a window, or a state of fixed size. A page has
``block_tokens`` tokens, or one state, of one layer. vLLM pads pages to one size, and groups layers; these allocators do not.

``TwoLevelPool``, after Jenga (arXiv 2503.18292): large pages of the least common multiple of the page sizes, each divided into
small pages of one kind. A request takes its small pages, one for each layer,

    1. from a large page that it has begun,        else
    2. from a free large page, which it begins,    else
    3. from any large page of the kind.

    large pages     | A A A . | B B B . |  w w  |  w .  |       pages of 3 and 6 units, large pages of 12
    begun by          request A  request B   A       B           dots: free for their kind alone

A large page is free when its last small page is given back. Two things are assumed: that pages are those of a layer (of all
layers of a kind at once, the least common multiple would be hundreds of MiB in models with states), and that nothing is
cached, so that Jenga's eviction is left out.

``separate_pools``, after SGLang's server arguments: the memory is divided among the kinds when the server starts.
``swa_full_tokens_ratio`` 0.8 gives layers with a window room for 0.8 times the tokens of the others, and
``mamba_full_memory_ratio`` 0.9 gives states 0.9 times the bytes of attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum, lcm
from typing import NamedTuple

from ...sim.memory.accounting.kv_groups import FULL, SLIDING
from ...sim.spec.kv_cache import BLOCK_SIZE
from ...sim.spec.kv_layers import AttentionLayer, Layer

#: Defaults of SGLang's server arguments.
SWA_FULL_TOKENS_RATIO, MAMBA_FULL_MEMORY_RATIO = 0.8, 0.9


@dataclass(frozen=True, slots=True)
class PageKind:
    """The pages of the layers that keep the same.

    Attributes:
        name: "full", "sliding", "state", or "ring" for the buffer of an indexer, which is a state, too.
        layers: Number of layers.
        layer_bytes: Bytes of a page of one layer on one rank.
        block_tokens: Tokens of a page; 0 for a state.
        window_tokens: Length of the window; 0 where every token is kept.
    """

    name: str
    layers: int
    layer_bytes: int
    block_tokens: int = BLOCK_SIZE
    window_tokens: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of each layer."""
        return self.layers * self.layer_bytes


def page_kinds(layers: Sequence[Layer], block_tokens: int = BLOCK_SIZE) -> tuple[PageKind, ...]:
    """The kinds of a model's layers, in model order; layers with chunks keep every token."""
    kinds = Counter(_kind(layer, block_tokens) for layer in layers)
    return tuple(replace(kind, layers=number) for kind, number in kinds.items())


def _kind(layer: Layer, block_tokens: int) -> PageKind:
    """The kind of one layer alone."""
    size = layer.page_bytes(block_tokens)
    if not isinstance(layer, AttentionLayer):
        return PageKind(layer.kind, 1, size, block_tokens=0)
    window = layer.span.tokens if layer.span.kind == SLIDING else 0
    return PageKind(SLIDING if window else FULL, 1, size, block_tokens, window)


class Part(NamedTuple):
    """Small pages of one large page.

    Attributes:
        number: The large page.
        pages: How many of its small pages.
    """

    number: int
    pages: int


@dataclass(slots=True)
class _Large:
    """A large page in use: its kind, the request that began it, and its small pages in use."""

    kind: PageKind
    owner: Hashable
    used: int = 0


class TwoLevelPool:
    """Large pages divided into small pages of one kind, with an order of taking that knows requests.

    Args:
        kinds: The kinds of pages.
        pool_bytes: Bytes of the pool.

    Attributes:
        large_bytes: Bytes of a large page, the least common multiple of the bytes of a page of one layer.
        num_large, free_large: Large pages, and those that are free.
    """

    def __init__(self, kinds: Sequence[PageKind], pool_bytes: int) -> None:
        self.large_bytes = lcm(*(kind.layer_bytes for kind in kinds))
        self.num_large = self.free_large = pool_bytes // self.large_bytes
        # Large pages with a free small page, by request and by kind: dicts for their order.
        self._begun: dict[tuple[Hashable, PageKind], dict[int, None]] = {}
        self._open: dict[PageKind, dict[int, None]] = {kind: {} for kind in kinds}
        self._large: dict[int, _Large] = {}
        self._next = 0
        self._used: Counter[PageKind] = Counter()
        self._taken: Counter[PageKind] = Counter()

    def pages_of(self, kind: PageKind) -> int:
        """Small pages of a large one."""
        return self.large_bytes // kind.layer_bytes

    def take(self, owner: Hashable, kind: PageKind, count: int = 1) -> list[Part]:
        """Small pages for ``owner``: ``count``, or as many as can be had."""
        taken: list[Part] = []
        while count:
            number = self._next_large(owner, kind)
            if number is None:
                break
            large = self._large[number]
            pages = min(count, self.pages_of(kind) - large.used)
            large.used += pages
            self._used[kind] += pages
            if large.used == self.pages_of(kind):
                del self._begun[large.owner, kind][number], self._open[kind][number]
            taken.append(Part(number, pages))
            count -= pages
        return taken

    def _next_large(self, owner: Hashable, kind: PageKind) -> int | None:
        """The large page that gives the next small page; None if none does."""
        begun = self._begun.setdefault((owner, kind), {})
        if begun:
            return next(iter(begun))
        if not self.free_large:
            return next(iter(self._open[kind]), None)
        number, self._next = self._next, self._next + 1
        self.free_large -= 1
        self._taken[kind] += 1
        self._large[number] = _Large(kind, owner)
        begun[number] = self._open[kind][number] = None
        return number

    def give(self, parts: Iterable[Part]) -> None:
        """Small pages come back."""
        for number, pages in parts:
            large = self._large[number]
            large.used -= pages
            self._used[large.kind] -= pages
            begun = self._begun.setdefault((large.owner, large.kind), {})
            begun[number] = self._open[large.kind][number] = None
            if not large.used:
                del begun[number], self._open[large.kind][number], self._large[number]
                self.free_large += 1
                self._taken[large.kind] -= 1

    def forget(self, owner: Hashable) -> None:
        """A request has left: large pages that it began, and that others use, are begun by none."""
        for kind in self._open:
            for number in self._begun.pop((owner, kind), {}):
                self._large[number].owner = None
                self._begun.setdefault((None, kind), {})[number] = None

    def stranded_bytes(self, kind: PageKind) -> int:
        """Bytes of the free small pages of a kind, which no other kind can take."""
        return self._taken[kind] * self.large_bytes - self._used[kind] * kind.layer_bytes


def separate_pools(kinds: Sequence[PageKind], pool_bytes: int) -> dict[PageKind, int]:
    """Pages of each kind where the memory is divided when the server starts."""
    states = [kind for kind in kinds if not kind.block_tokens]
    attention = [kind for kind in kinds if kind.block_tokens]
    of_states = pool_bytes if not attention else 0
    if states and attention:
        of_states = int(pool_bytes * MAMBA_FULL_MEMORY_RATIO / (1 + MAMBA_FULL_MEMORY_RATIO))
    weights = {kind: SWA_FULL_TOKENS_RATIO if kind.window_tokens else 1.0 for kind in attention}
    if all(kind.window_tokens for kind in attention):
        weights = dict.fromkeys(attention, 1.0)
    # Bytes of a token position, with so many tokens of windows as the ratio says.
    position_bytes = fsum(weights[kind] * kind.page_bytes for kind in attention)
    pages = {kind: int((pool_bytes - of_states) * weights[kind] / position_bytes) for kind in attention}
    return pages | {kind: of_states // sum(each.page_bytes for each in states) for kind in states}
