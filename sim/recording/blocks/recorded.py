"""A recorded block map: the state of every physical block at evenly spaced moments of a run.

    column       at_ticks start_ticks                     the moment, and the start of the step in progress
                 census_slots [columns, 9]                the ledger: slots of the whole pool by bucket
                 free_runs [columns, sizes]               the number of runs of free blocks, by length
                 largest_free_blocks
    row          block_ids                                the block; of a large pool some, evenly spaced
    both         bucket sequence live_slots references    [columns, rows]
    preemption   preempted_ticks preempted_sequence preempted_swapped

A block is in the bucket of most of its slots; ties go to the first in the ledger's order. A free block is
``GIVEN_UP`` if its last holder in the columns before was preempted; it counts as free in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any

import numpy as np

from ...memory import BUCKETS
from ...output.archives import load_archive, save_archive
from ...types.errors import UserError
from .occupancy import NO_SEQUENCE

#: Raised when an array changes its meaning.
SCHEMA_VERSION = 1
#: In ``bucket``, after the places in ``BUCKETS``: free since a preemption.
GIVEN_UP = len(BUCKETS)
#: Lengths of runs of free blocks are counted by powers of two: 1, 2-3, 4-7, ...
RUN_SIZES = 24


@dataclass(frozen=True, eq=False)
class BlockMap:
    """A block map, the content of ``blocks.npz``.

    Attributes:
        meta: ``schema_version``, ``fragmeter`` (its version), ``policy``, ``model``, ``layout`` ("paged", "contiguous",
            or "counted": pieces without addresses, each drawn in the lowest free space that holds it), ``block_size``,
            ``num_blocks``, ``end_ticks``, ``trace_sha256``.
        at_ticks: int64 [columns], ascending and evenly spaced.
        start_ticks: int64 [columns], start of the step in progress; ``at_ticks`` if the replica is idle.
        block_ids: int64 [rows], ascending.
        bucket: uint8 [columns, rows], an index of ``BUCKETS``, or ``GIVEN_UP``.
        sequence: int32 [columns, rows], a row of the workload's ``sequences``: the first one that holds slots of the
            block, or ``NO_SEQUENCE``.
        live_slots: int32 [columns, rows], slots with tokens.
        references: int32 [columns, rows], table entries (or pieces) and pins that reference the block.
        census_slots: int64 [columns, 9], slots of the pool in each bucket.
        free_runs: int64 [columns, RUN_SIZES], number of maximal runs of free blocks with a length of 1, 2 to 3, 4 to 7,
            ... blocks.
        largest_free_blocks: int64 [columns], the longest free run.
        preempted_ticks, preempted_sequence: int64 [preemptions], in order of time.
        preempted_swapped: int64 [preemptions], 1 if swapped to the host, 0 if its blocks were given up.
    """

    meta: Mapping[str, Any]
    at_ticks: np.ndarray
    start_ticks: np.ndarray
    block_ids: np.ndarray
    bucket: np.ndarray
    sequence: np.ndarray
    live_slots: np.ndarray
    references: np.ndarray
    census_slots: np.ndarray
    free_runs: np.ndarray
    largest_free_blocks: np.ndarray
    preempted_ticks: np.ndarray
    preempted_sequence: np.ndarray
    preempted_swapped: np.ndarray

    @property
    def num_columns(self) -> int:
        return len(self.at_ticks)

    def between(self, start_ticks: int, end_ticks: int) -> BlockMap:
        """The part of the map from a time to before another one, with times from the first one on."""
        columns = (self.at_ticks >= start_ticks) & (self.at_ticks < end_ticks)
        gone = (self.preempted_ticks >= start_ticks) & (self.preempted_ticks < end_ticks)
        kept = {name: getattr(self, name) for name in _ARRAYS}
        for name, values in kept.items():
            if name != "block_ids":
                kept[name] = values[gone if name.startswith("preempted_") else columns]
        for name in ("at_ticks", "start_ticks", "preempted_ticks"):
            kept[name] = kept[name] - start_ticks
        end = min(end_ticks, self.meta["end_ticks"]) - start_ticks
        return BlockMap({**self.meta, "end_ticks": end}, **kept)

    def save(self, path: str | PathLike[str]) -> None:
        """Write ``blocks.npz``; the same map gives the same bytes. Integers have the smallest type that fits.

        Raises:
            UserError: It cannot be written.
        """
        save_archive(path, self.meta, {name: _shortened(getattr(self, name)) for name in _ARRAYS}, _LEVEL)


_ARRAYS = tuple(field.name for field in fields(BlockMap) if field.name != "meta")
_TYPES = {"bucket": np.uint8, **dict.fromkeys(("sequence", "live_slots", "references"), np.int32)}
#: 2,048 blocks at 2,000 moments, 32 bytes each, and as much again seven times.
_MOST_BYTES = 2**30
#: Of deflate: a busy map takes a fifth of the time that it takes at 6, and a sixth more bytes.
_LEVEL = 4


def _shortened(values: np.ndarray) -> np.ndarray:
    least, most = (int(bound) for bound in (values.min(initial=0), values.max(initial=0)))
    # Signed ones all, so that they are subtracted from each other as they are.
    types = (np.int8, np.int16, np.int32, np.int64)
    return values.astype(next(kind for kind in types if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max))


def load(path: str | PathLike[str]) -> BlockMap:
    """Read the file of ``BlockMap.save``.

    Raises:
        UserError: The file is no map, has another schema version, or its arrays are inconsistent.
        OSError: It cannot be read.
    """
    remedy = "record it anew with fragmeter simulate --record-blocks"
    meta, arrays = load_archive(path, "recorded block map", _ARRAYS, SCHEMA_VERSION, remedy, _MOST_BYTES)
    for name, shape in _shapes(arrays).items():
        if arrays[name].shape != shape or arrays[name].dtype.kind not in "iu":
            raise UserError(f"{path}: {name} is {arrays[name].dtype} {list(arrays[name].shape)}; {remedy}")
    for complaint in _complaints(meta, arrays):
        raise UserError(f"{path}: {complaint}; {remedy}")
    return BlockMap(meta, **{name: array.astype(_TYPES.get(name, np.int64)) for name, array in arrays.items()})


def _complaints(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Inconsistencies of a map, one line each; the first may cause the others."""
    for name in ("policy", "model", "layout", "trace_sha256"):
        if not isinstance(meta.get(name), str):
            yield f"meta.{name} must be text"
    for name in ("block_size", "num_blocks", "end_ticks"):
        if type(meta.get(name)) is not int or not 0 <= meta[name] < 2**63:
            yield f"meta.{name} must be a whole number"
    blocks, slots = meta["num_blocks"], meta["num_blocks"] * meta["block_size"]
    most = {
        "block_ids": blocks - 1,
        "bucket": GIVEN_UP,
        "live_slots": meta["block_size"],
        "census_slots": slots,
        "free_runs": blocks,
        "largest_free_blocks": blocks,
        "preempted_swapped": 1,
    }
    for name, array in arrays.items():
        least = NO_SEQUENCE if name == "sequence" else 0
        if array.size and not (array.min() >= least and array.max() <= most.get(name, array.max())):
            yield f"{name} must lie between {least} and {most.get(name, 'what is there')}"
    for name in ("at_ticks", "block_ids"):
        if not arrays[name].size or (np.diff(arrays[name]) < 0).any():
            yield f"{name} must ascend, from one on"


def _shapes(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    columns, rows, evictions = (arrays[name].size for name in ("at_ticks", "block_ids", "preempted_ticks"))
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("at_ticks", "start_ticks", "largest_free_blocks"), (columns,))
    shapes |= dict.fromkeys(("bucket", "sequence", "live_slots", "references"), (columns, rows))
    shapes |= dict.fromkeys(("preempted_ticks", "preempted_sequence", "preempted_swapped"), (evictions,))
    return shapes | {"block_ids": (rows,), "census_slots": (columns, len(BUCKETS)), "free_runs": (columns, RUN_SIZES)}
