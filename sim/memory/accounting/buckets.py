"""The buckets of the ledger, each declared once: where a slot of the pool may be counted.

A new bucket is a declaration here and its sum in ``runs.integrals``, which refuses at import to lack one. Views, tables, colours,
stacks, the block map and the columns of results follow from the declarations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: A colour of the block map: hue in degrees, lightness and saturation in percent.
Hls = tuple[float, float, float]
#: Text on a dark fill, and on a bright one.
_ON_DARK, _ON_BRIGHT = "#fefefe", "#0b0b0b"


@dataclass(frozen=True, slots=True)
class Bucket:
    """A kind of slots. The first that matches counts.

    Attributes:
        name: Its column, and its key in ``summary.json``; with blanks in place of underscores its label.
        which: Which slots it has, as a phrase behind "slots".
        use: Whether a sequence holds the slots, no request fits in them, or any request can take them.
        paper: Its category in the paper's view, a key of ``views.PAPER_VIEW``.
        hue: Fill in the light and the dark form of a page, text on it (light form), and hatching by plotly's name. The nine buckets
            take the eight colours of Okabe and Ito ("Color Universal Design", 2008) and a grey.
        on_map: Its colour in the block map in the light and the dark form, and by how much hue and lightness vary from request
            to request.
        counts_as: For a bucket that only some runs have: one of the nine, in which views count it.
    """

    name: str
    which: str
    use: Literal["held", "too small", "free"] = "held"
    paper: str = ""
    hue: tuple[str, str, str, str] = ("", "", "", "")
    on_map: tuple[Hls, Hls, float, float] = ((0, 0, 0), (0, 0, 0), 0, 0)
    counts_as: str = ""

    def __post_init__(self) -> None:
        if not self.counts_as and not (self.paper and all(self.hue[:3])):
            raise TypeError(f"bucket {self.name}: declare paper and hue, or counts_as")

    @property
    def label(self) -> str:
        """Its name in tables and pictures."""
        return self.name.replace("_", " ")


_ALL = (
    Bucket(
        "live",
        "that hold the keys and values of a token",
        paper="token_states",
        hue=("#0072b2", "#0a7abb", _ON_DARK, ""),
        on_map=((216, 37, 68), (214, 55, 66), 21, 13),
    ),
    Bucket(
        "reserved",
        "that a coming token fills",
        paper="reservation",
        hue=("#56b4e9", "#56b4e9", _ON_BRIGHT, ""),
        on_map=((211, 84, 64), (213, 27, 42), 16, 4),
    ),
    Bucket(
        "over_estimate",
        "for output that never comes",
        paper="internal",
        hue=("#d55e00", "#d55e00", _ON_BRIGHT, ""),
        on_map=((21, 55, 84), (20, 50, 78), 5, 6),
    ),
    Bucket(
        "block_tail",
        "past the end of a sequence, in its last block",
        paper="internal",
        hue=("#f0e442", "#f0e442", _ON_BRIGHT, ""),
        on_map=((54, 58, 84), (54, 60, 80), 3, 5),
    ),
    Bucket(
        "round_up",
        "past the requested size, where an allocator rounds it up",
        paper="external_and_others",
        hue=("#e69f00", "#e69f00", _ON_BRIGHT, ""),
        on_map=((41, 48, 92), (41, 50, 88), 3, 5),
    ),
    Bucket(
        "finished_hold",
        "of ended sequences of a static batch, and its padding",
        paper="internal",
        hue=("#cc79a7", "#cc79a7", _ON_BRIGHT, "/"),
        on_map=((350, 70, 42), (350, 62, 40), 5, 4),
    ),
    Bucket(
        "stranded",
        "in a gap too small for the first request that waits",
        use="too small",
        paper="external_and_others",
        hue=("#33383d", "#c3cad1", "#ffffff", "x"),
        on_map=((210, 20, 8), (210, 64, 8), 0, 0),
    ),
    Bucket(
        "cached",
        "that no request holds, kept with their contents",
        use="free",
        paper="external_and_others",
        hue=("#009e73", "#009e73", _ON_BRIGHT, "."),
        on_map=((163, 34, 100), (163, 40, 90), 0, 0),
    ),
    Bucket(
        "free",
        "that any request can take",
        use="free",
        paper="external_and_others",
        hue=("#e6e9ed", "#2c333b", "#1b1f24", ""),
        on_map=((214, 93, 18), (214, 12, 14), 0, 0),
    ),
    # A step writes the slots of rejected drafts again.
    Bucket("state", "of states, which do not grow with the tokens", counts_as="live"),
    Bucket("rejected", "of drafts that no output keeps", counts_as="reserved"),
)
#: By name, in the order in which they are stacked and written.
DECLARED = {each.name: each for each in _ALL}
#: The nine of every run.
BUCKETS = tuple(each.name for each in _ALL if not each.counts_as)
#: Buckets that only some runs have: states of fixed size, and slots of rejected drafts.
OPTIONAL_BUCKETS = tuple(each.name for each in _ALL if each.counts_as)
#: Buckets of slots that no sequence holds, and of those that any request can take.
NOT_HELD = tuple(bucket for bucket in BUCKETS if DECLARED[bucket].use != "held")
USABLE = tuple(bucket for bucket in BUCKETS if DECLARED[bucket].use == "free")
