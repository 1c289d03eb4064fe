"""The class of one slot, and the census of a whole pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

LIVE, RESERVED, OVER_ESTIMATE, BLOCK_TAIL, ROUND_UP = "live", "reserved", "over_estimate", "block_tail", "round_up"
FINISHED_HOLD, STRANDED, CACHED, FREE = "finished_hold", "stranded", "cached", "free"
BUCKETS = (LIVE, RESERVED, OVER_ESTIMATE, BLOCK_TAIL, ROUND_UP, FINISHED_HOLD, STRANDED, CACHED, FREE)


def classify_slot(i: int, computed_tokens: int, final_tokens: int, requested_tokens: int, block_end: int) -> str:
    """The bucket of a running sequence's slot ``i``.

    ``requested_tokens`` is the length asked of the allocator (on demand: ``computed_tokens``), ``block_end`` the end of
    the block in which that length ends; an arena without block tails passes ``requested_tokens`` for it.
    """
    if i < computed_tokens:
        return LIVE
    if i < final_tokens:
        return RESERVED
    if i < requested_tokens:
        return OVER_ESTIMATE
    if i < block_end:
        return BLOCK_TAIL
    return ROUND_UP


def census(slots: Iterable[str]) -> dict[str, int]:
    """Slots by bucket, every bucket named."""
    counted = Counter(slots)
    return {bucket: counted[bucket] for bucket in BUCKETS}


class SlotMap:
    """The pool's slots by address, each to be classified exactly once."""

    def __init__(self, num_slots: int) -> None:
        self.classes: list[str | None] = [None] * num_slots

    def put(self, slot: int, bucket: str) -> None:
        if self.classes[slot] is not None:
            raise AssertionError(f"slot {slot} is both {self.classes[slot]} and {bucket}")
        self.classes[slot] = bucket

    def census(self) -> dict[str, int]:
        unclassified = [slot for slot, bucket in enumerate(self.classes) if bucket is None]
        if unclassified:
            raise AssertionError(f"slots that no sequence holds and that are not free: {unclassified}")
        return census(bucket for bucket in self.classes if bucket is not None)
