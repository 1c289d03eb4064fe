"""The hashes that blocks of KV groups have had, whatever became of the blocks: a cache that evicts nothing, as look-ups see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .chains import PLACE_BITS

#: Names of a page, as a power of 2.
_PAGE_BITS = 8


class Cached(Protocol):
    """What look-ups ask of a cache; ``BlockPool`` is one."""

    def get_cached_blocks(self, names: Sequence[int], /) -> Sequence[int]:
        """Blocks with the first of these hashes, up to the first that no block has."""

    def is_cached(self, name: int, /) -> bool:
        """Whether a block has this hash."""


class Published:
    """Hashes of blocks, of which none is lost.

    Args:
        num_kv_groups: KV groups; a hash modulo this is the block's.
    """

    def __init__(self, num_kv_groups: int) -> None:
        self._kv_groups = num_kv_groups
        # Pages of flags, by chain and place.
        self._pages: dict[int, bytearray] = {}

    def add(self, name: int, blocks: int) -> None:
        """Blocks get hashes, which follow one another from ``name`` on: as ``EVENT`` of ``contents_log`` has them."""
        pages, size = self._pages, 1 << _PAGE_BITS
        while blocks:
            page, first = pages.setdefault(name >> _PAGE_BITS, bytearray(size)), name % size
            some = min(blocks, size - first)
            page[first : first + some] = b"\1" * some
            name, blocks = name + some, blocks - some

    def get_cached_blocks(self, names: Sequence[int]) -> list[int]:
        """See ``Cached``; the hashes themselves in place of blocks."""
        found = []
        for name in names:
            if not self.is_cached(name):
                break
            found.append(name)
        return found

    def is_cached(self, name: int) -> bool:
        """See ``Cached``."""
        number, group = divmod(name, self._kv_groups)
        number += ((number >> PLACE_BITS) * (self._kv_groups - 1) + group) << PLACE_BITS
        page = self._pages.get(number >> _PAGE_BITS)
        return page is not None and page[number % (1 << _PAGE_BITS)] > 0
