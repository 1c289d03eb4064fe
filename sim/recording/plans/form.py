"""Consistency checks of a plan's arrays: lengths, offsets and ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

STEP = ("start_ticks", "ticks", "prefill_tokens", "decodes", "padding_tokens")
ROW = ("sequence", "query_tokens", "context_lens", "slot_starts")
PAIRS = ("swap_outs", "swap_ins", "copies")
#: What the offsets by these names count.
OFFSETS = {
    "row": "sequence",
    "table": "block_ids",
    "slot": "token_ids",
    "held": "held_token_ids",
    "swap_out": "swap_outs",
    "swap_in": "swap_ins",
    "copy": "copies",
}
#: Offsets that have a place for each row; the others have one for each step.
OF_ROWS = ("table", "slot", "held")
PAGED, CONTIGUOUS = "paged", "contiguous"
_SIZES = ("block_size", "num_blocks", "host_blocks", "num_slots")


def complaints(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Inconsistencies of a plan, one line each; the first may cause the others."""
    yield from _meta_complaints(meta)
    yield from _kind_complaints(arrays)
    yield from _length_complaints(meta, arrays)
    for name, counted in OFFSETS.items():
        offsets = arrays[f"{name}_offsets"]
        if offsets[0] or offsets[-1] != len(arrays[counted]) or (np.diff(offsets) < 0).any():
            yield f"{name}_offsets must rise from 0 to the {len(arrays[counted])} of {counted}"
    new, contexts = arrays["query_tokens"], arrays["context_lens"]
    if not np.array_equal(np.diff(arrays["slot_offsets"]), new):
        yield "query_tokens are not those that slot_offsets tell"
    if (new < 1).any() or (contexts < new).any():
        yield "context_lens must hold the query_tokens, and these be 1 or more"


def _meta_complaints(meta: Mapping[str, Any]) -> Iterator[str]:
    for name in ("policy", "model"):
        if not isinstance(meta.get(name), str):
            yield f"meta.{name} = {meta.get(name)!r}: must be text"
    if meta.get("layout") not in (PAGED, CONTIGUOUS):
        yield f"meta.layout = {meta.get('layout')!r}: must be {PAGED} or {CONTIGUOUS}"
    for name in _SIZES:
        if type(size := meta.get(name)) is not int or size < 0:
            yield f"meta.{name} = {size!r}: must be a whole number"


def _kind_complaints(arrays: Mapping[str, np.ndarray]) -> Iterator[str]:
    for name, array in arrays.items():
        shape = (len(array), 2) if name in PAIRS and array.ndim else (array.size,)
        if array.dtype.kind != "i" or array.shape != shape:
            yield f"{name} is {array.dtype} {list(array.shape)}: must be integers, in pairs where it tells moves"


def _length_complaints(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Iterator[str]:
    steps, rows = len(arrays["ticks"]), len(arrays["sequence"])
    lengths = dict.fromkeys(STEP, steps) | dict.fromkeys(ROW, rows)
    lengths |= {f"{name}_offsets": 1 + (rows if name in OF_ROWS else steps) for name in OFFSETS}
    lengths |= {"slot_mapping": len(arrays["token_ids"]), "copied_slots": len(arrays["copies"])}
    for where in ("initial", "initial_host"):
        held = len(arrays[f"{where}_slots"])
        lengths |= {f"{where}_token_ids": held, f"{where}_positions": held}
    if meta["layout"] == PAGED:
        del lengths["slot_starts"]
    for name, length in lengths.items():
        if len(arrays[name]) != length:
            yield f"{name} has {len(arrays[name])} elements: must have {length}"
