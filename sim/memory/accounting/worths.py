"""What a cached slot was worth, each kind declared once: the divisions of the ledger's ``cached`` bucket.

A worth needs the future, so it is known when the run is over (``metrics.cache_worth``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Worth:
    """A kind of cached slots. The first that matches counts.

    Attributes:
        name: Its key in ``summary.json``; with blanks in place of underscores its label.
        which: Which cached slots it has, as a phrase behind "slots".
        hue: Fill in the light and the dark form of a page.
    """

    name: str
    which: str
    hue: tuple[str, str]

    @property
    def label(self) -> str:
        """Its name in tables and pictures."""
        return self.name.replace("_", " ")


_ALL = (
    Worth("hit_later", "that a request hits while they are cached", ("#009e73", "#009e73")),
    Worth("too_late", "that are evicted before a request looks for their contents again", ("#e69f00", "#e69f00")),
    Worth("never", "that are evicted, and no request looks for their contents again", ("#d55e00", "#d55e00")),
    Worth("undecided", "that are still cached when the run ends", ("#8c959f", "#8b949e")),
)
#: By name, in the order in which they are stacked and written.
WORTHS = {each.name: each for each in _ALL}
#: Their columns in ``memory.parquet``.
WORTH_COLUMNS = {name: f"cached.{name}" for name in WORTHS}
#: Those of the blocks of a host tier.
HOST_WORTHS = {
    "duplicate": Worth("duplicate", "whose contents a block of the GPU has, too", ("#56b4e9", "#56b4e9")),
    **WORTHS,
}
