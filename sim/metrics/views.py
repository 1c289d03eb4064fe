"""Names for the slots of a KV pool: the ledger's buckets, and the paper's four categories, which are sums of buckets.

There are two views of a pool. Both have every slot exactly once:

    PAPER_VIEW   the categories of SOSP'23, Fig 2; every table, picture and bar shows it unless it says otherwise
    SLOTS_VIEW   what becomes of each slot: the buckets themselves, one by one

No name is in both views with two values. Labels and definitions are written here alone: what shows a category takes
them from here, and shows the definition beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import fsum
from typing import Literal

from ..memory.accounting.buckets import BUCKETS, DECLARED, NOT_HELD, OPTIONAL_BUCKETS, USABLE

ViewName = Literal["paper", "slots"]


@dataclass(frozen=True, slots=True)
class Category:
    """A group of slots.

    Attributes:
        label: Its name in tables and pictures.
        buckets: The buckets of the ledger that it adds up.
        which: Which slots it has, as a phrase behind "slots".
    """

    label: str
    buckets: tuple[str, ...]
    which: str

    @property
    def definition(self) -> str:
        """Which slots it has, behind its label."""
        return f"slots {self.which}"

    @property
    def defined(self) -> str:
        """One line: label and definition."""
        return f"{self.label}: {self.definition}"


@dataclass(frozen=True, slots=True)
class View:
    """A division of the pool.

    Attributes:
        title: Its name in the title of a table or picture.
        categories: By key of ``summary.json``, in the order in which they are stacked.
    """

    title: str
    categories: dict[str, Category]

    def grouped(self, amounts: Mapping[str, float]) -> dict[str, float]:
        """Amounts by bucket, added up to the categories, in the unit of the amounts."""
        return {key: fsum(amounts[bucket] for bucket in each.buckets) for key, each in self.categories.items()}

    def percent(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Shares of the pool by bucket, as fractions of 1, added up to the categories, in percent."""
        return {key: 100 * share for key, share in self.grouped(shares).items()}

    def definitions(self, keys: Iterable[str] | None = None) -> list[tuple[str, str]]:
        """Label and definition of each category, or of those with these keys."""
        chosen = self.categories if keys is None else keys
        return [(self.categories[key].label, self.categories[key].definition) for key in chosen]


def _paper(label: str, key: str, which: str) -> dict[str, Category]:
    """A category of the paper's view: the buckets that are declared to be in it."""
    return {key: Category(label, tuple(bucket for bucket in BUCKETS if DECLARED[bucket].paper == key), which)}


SLOT_CATEGORIES = {bucket: Category(each.label, (bucket,), each.which) for bucket, each in DECLARED.items()}
SLOTS_VIEW = View("what becomes of each slot", {bucket: SLOT_CATEGORIES[bucket] for bucket in BUCKETS})
PAPER_VIEW = View(
    "the paper's view",
    _paper("token states", "token_states", DECLARED["live"].which)
    | _paper("reservation", "reservation", DECLARED["reserved"].which)
    | _paper("internal", "internal", "for output that never comes, ended sequences, ends of blocks")
    | _paper("external & others", "external_and_others", "lost to rounding up and to gaps, and free or cached"),
)
if unknown := {DECLARED[bucket].paper for bucket in BUCKETS} - PAPER_VIEW.categories.keys():
    raise TypeError(f"buckets of categories that the paper's view does not have: {', '.join(sorted(unknown))}")
VIEWS: dict[ViewName, View] = {"paper": PAPER_VIEW, "slots": SLOTS_VIEW}
#: The part of external & others that the next request can use. In a pool that is not full it is no waste.
UNUSED = Category("of it free", USABLE, "of external & others that are free or cached")
#: What is neither token states nor unused.
WASTE = Category(
    "waste",
    tuple(bucket for bucket in BUCKETS if bucket not in ("live", *USABLE)),
    "of reservation, internal, and the part of external & others that is not free",
)
#: KV cache usage in vLLM's two units: ``vllm:kv_cache_usage_perc`` counts blocks in use, cached blocks without references
#: as free; ``vllm:kv_cache_token_usage_perc``, of its pull request 57336, counts slots with keys and values.
USAGE_VIEW = View(
    "KV cache usage, cached blocks free",
    {
        "by_blocks": Category(
            "by blocks",
            tuple(bucket for bucket in BUCKETS if bucket not in NOT_HELD),
            "in blocks that a sequence holds",
        ),
        "by_tokens": Category("by tokens", ("live",), DECLARED["live"].which),
    },
)


def definition_lines(definitions: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each label, which defines it."""
    return [f"{label}: {definition}" for label, definition in definitions]


def sums() -> list[str]:
    """A line for each category of the paper's view: the buckets that it adds up."""
    return [
        f"{category.label} = {' + '.join(SLOT_CATEGORIES[bucket].label for bucket in category.buckets)}"
        for category in PAPER_VIEW.categories.values()
    ]


def amount(shares: Mapping[str, float], category: Category) -> float:
    """The slots of a category, from amounts by bucket, in their unit."""
    return fsum(shares[bucket] for bucket in category.buckets)


def nine_buckets(buckets: Mapping[str, float]) -> dict[str, float]:
    """The nine buckets that views know: the others are added to those as which they count."""
    nine = dict(buckets)
    for bucket in OPTIONAL_BUCKETS:
        nine[DECLARED[bucket].counts_as] += nine.pop(bucket, 0)
    return nine


#: Percent of the pool that a table with one decimal shows as 0.0.
_LEAST_PCT = 0.05


def moved_text(percent: Mapping[str, float]) -> str:
    """From the paper's view to the slots: the buckets of each category that has several, as part of a sentence.

    Args:
        percent: Of the pool, by bucket.
    """
    return "; ".join(_moved(percent))


def _moved(percent: Mapping[str, float]) -> Iterator[str]:
    for category in PAPER_VIEW.categories.values():
        parts = [bucket for bucket in category.buckets if percent[bucket] >= _LEAST_PCT]
        if len(category.buckets) > 1 and parts:
            first, *others = (f"{percent[bucket]:.1f}{{}} slots {DECLARED[bucket].which}" for bucket in parts)
            of = f" of the {amount(percent, category):.1f} points of {category.label} are"
            yield ", ".join([first.format(of), *(other.format("") for other in others)])
