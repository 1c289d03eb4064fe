"""What the compiled core and Python both know, declared in Python alone: columns of records, and numbers.

``setup.py`` writes ``header()`` beside the core's sources before it compiles them (``_core_columns.h``). It has neither numpy nor
this package then: it runs this module over the declarations that the imports below name, so these are constants, or classes
of fields. A core that was compiled from other declarations than those of today is not used (``core.compiled``).
"""

from __future__ import annotations

from typing import NamedTuple

from ..cost.base import BLOCK_ROWS, StepParts
from ..cost.paper import StepTerms
from ..memory.accounting.cache_log import LOOK_UP
from ..memory.accounting.ledger import CACHE_CHANGE, CHUNK, COMPLETE, EVICTION, LEAP, METER, RECOMPUTE, RESIDENCY
from ..memory.accounting.moments import AFTER_ROW, AFTER_STEP, AT_ROW, IN_STEP, MOMENT_KINDS
from ..memory.prefix.block_pool import UNSHARED
from ..memory.prefix.chains import PLACE_BITS
from ..memory.prefix.contents_log import EVENT, LOOKED_UP, NAMED, RELEASED, STAY, TAKEN
from ..memory.prefix.residency import HIT_GAP, HIT_LIFE, KEPT_TOUCHES
from ..types.sequence import FRESH, NOT_DECODING, RECOMPUTED
from .engine import LONGEST_LEAP
from .observer import MapLimits


class CoreLimits(NamedTuple):
    """Limits of a replica, in blocks, tokens and sequences; and the tokens that each request arrives with, beside its computed prompt:
    1 where requests only decode, else 0."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark_blocks: int


#: Columns that ``PagedMemory`` fills in a row, for one KV group.
PAGED_METER = (*METER[:2], "prefill_tail")
#: Fields of ``StepParts`` that are numbers.
PART_NUMBERS = tuple(name for name, default in StepParts._field_defaults.items() if isinstance(default, int))
#: What a call of the core ends with, from 0 on.
STATUSES = ("GOES_ON", "ENDED", "STUCK", "UNPUBLISHED", "RESTS", "OVERDRAWN")
#: Structs of int64 fields in the core, by name.
_STRUCTS = {
    "row": LEAP + PAGED_METER,
    "residency": RESIDENCY,
    "eviction": EVICTION,
    "chunk": CHUNK,
    "hit_life": HIT_LIFE,
    "hit_gap": HIT_GAP,
    "change": CACHE_CHANGE,
    "look_up": LOOK_UP,
    "stay": STAY,
    "event": EVENT,
    "limits": CoreLimits._fields,
    "map_limits": MapLimits._fields,
    "terms": StepTerms._fields,
    "part_numbers": PART_NUMBERS,
}
_NUMBERS = {
    "AT_ROW": AT_ROW,
    "IN_STEP": IN_STEP,
    "AFTER_STEP": AFTER_STEP,
    "AFTER_ROW": AFTER_ROW,
    "MOMENT_KINDS": MOMENT_KINDS,
    "FRESH": FRESH,
    "RECOMPUTED": RECOMPUTED,
    "NOT_DECODING": NOT_DECODING,
    "RECOMPUTE": RECOMPUTE,
    "COMPLETE": COMPLETE,
    "UNSHARED": UNSHARED,
    "KEPT_TOUCHES": KEPT_TOUCHES,
    "LOOKED_UP": LOOKED_UP,
    "NAMED": NAMED,
    "RELEASED": RELEASED,
    "TAKEN": TAKEN,
    "PLACE_BITS": PLACE_BITS,
    "BLOCK_ROWS": BLOCK_ROWS,
    "LONGEST_LEAP": LONGEST_LEAP,
    **{name: status for status, name in enumerate(STATUSES)},
}


def header() -> str:
    """The text of ``_core_columns.h``."""
    lines = ["/* Written by setup.py from core_header.py: not to be edited. */", "", "enum {"]
    lines += [f"    {name} = {value}," for name, value in _NUMBERS.items()]
    lines += [f"    {name.upper()}_FIELDS = {len(fields)}," for name, fields in _STRUCTS.items()]
    lines += ["};", ""]
    for name, fields in _STRUCTS.items():
        lines += [f"struct {name} {{", f"    int64_t {', '.join(fields)};", "};", ""]
    return "\n".join(lines)
