"""SGLang's one buffer for the KV cache and what lies beside it (``--enable-unified-memory``): ``mem_cache/unified_memory_pool.py`` and
``mem_cache/allocator/unified_sub_pool.py`` of 0.5.23.

    0        padding     units beside ->  | holes and gap |  <- pages of the KV cache        total

Pages grow from the end, units of the other kind (states, or pages of windows) from the beginning. A free unit below its kind's watermark is a *hole*: the kind itself
takes it again first. If it lacks room, the allocator moves the other kind's units into that kind's holes (compaction), and takes what the
watermark gave up. So an allocation fails for want of bytes alone, and admission counts the other kind's holes as free:

    pages that can be taken     (bytes - pages held x their size - units held x their size) // size of a page
    units that can be taken     the same // size of a unit

Holes of the kind itself are whole units, so they cancel out. Where a unit lies decides only what compaction has to move.
"""

from __future__ import annotations

from typing import NamedTuple

#: Bytes of a slot of the KV cache are a multiple (``ENTRY_ALIGN_BYTES``).
_SLOT_ALIGNMENT = 32
#: The budget is, too (``config_from_budget``).
BUDGET_ALIGNMENT = 4096


class SharedBuffer(NamedTuple):
    """The buffer of a rank.

    Attributes:
        bytes: What pages and units beside them may take: less the padding, and less the rest behind the last page.
        page_bytes: Bytes of a page of the KV cache.
        slot_bytes: Bytes of a slot of it.
        unit_bytes: Bytes of a unit beside it.
        ids: Names of such units, one for each that may be held.
        most_tokens: Tokens of the longest sequence. With states the slots of the KV cache if the pools were apart, with windows all that the buffer
            holds, or ``--max-total-tokens``.
    """

    bytes: int
    page_bytes: int
    slot_bytes: int
    unit_bytes: int
    ids: int
    most_tokens: int

    @classmethod
    def of(cls, total_bytes: int, slot_bytes: int, unit_bytes: int, page: int, most_tokens: int) -> SharedBuffer:
        """A buffer of so many bytes (``UnifiedKVPool``).

        Args:
            slot_bytes: Of all layers with a KV cache, before they are aligned.
            page: Tokens of a page.
        """
        slot_bytes = aligned(slot_bytes)
        page_bytes = page * slot_bytes
        # Padding is written to the first page and the first unit, which share their bytes.
        padding = -(-max(page_bytes, unit_bytes) // unit_bytes) * unit_bytes
        usable = total_bytes // page_bytes * page_bytes - padding
        return cls(usable, page_bytes, slot_bytes, unit_bytes, total_bytes // unit_bytes - 1, most_tokens)

    @classmethod
    def of_windows(
        cls, total_bytes: int, slot_bytes: int, window_bytes: int, page: int, most_tokens: int | None
    ) -> SharedBuffer:
        """As ``of`` with pages of windows, which have the names of pages of the KV cache.

        Args:
            window_bytes: As ``slot_bytes``, of the layers with a window.
            most_tokens: ``--max-total-tokens``, if it bounds the slots.
        """
        found = cls.of(total_bytes, slot_bytes, page * aligned(window_bytes), page, 0)
        padding = -(-max(found.page_bytes, found.unit_bytes) // found.page_bytes)
        most = found.most_pages * page
        ids = total_bytes // found.slot_bytes // page - padding
        return found._replace(ids=ids, most_tokens=min(most, most_tokens or most))

    def left(self, pages: int, units: int) -> int:
        """Bytes that so many pages and units leave."""
        return self.bytes - pages * self.page_bytes - units * self.unit_bytes

    def holds(self, slots: int, windows: int, page: int) -> bool:
        """Whether it holds so many slots of both kinds where it is empty, and one more of each."""
        if slots >= self.most_pages * page or windows >= min(self.ids, self.most_units) * page:
            return False
        return self.left(-(-slots // page), -(-windows // page)) >= 0

    @property
    def most_pages(self) -> int:
        """Pages that it holds without units."""
        return self.bytes // self.page_bytes

    @property
    def most_units(self) -> int:
        """Units that it holds without pages."""
        return self.bytes // self.unit_bytes

    @property
    def unit_slots(self) -> int:
        """Slots of the KV cache that have the bytes of a unit (``mamba_slot_full_token_cost``)."""
        return -(-self.unit_bytes // self.slot_bytes)


def aligned(slot_bytes: int) -> int:
    """Bytes of a slot in the buffer."""
    return -(-slot_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
