"""The data sets that the package embeds, and their sources."""

from __future__ import annotations

from dataclasses import dataclass

from ..synthesis.summaries import length_summaries


@dataclass(frozen=True, slots=True)
class Entry:
    """One embedded data set.

    Attributes:
        name: Its name for ``sample``.
        description: Its contents in a few words.
        source: Source of the summarised data.
        licence: Licence of the data.
        rows: Number of pairs in the summarised data.
        mean_prompt_tokens: Mean prompt length.
        mean_output_tokens: Mean output length.
    """

    name: str
    description: str
    source: str
    licence: str
    rows: int
    mean_prompt_tokens: float
    mean_output_tokens: float


def names() -> list[str]:
    """Names of the embedded sets."""
    return list(length_summaries()["sets"])


def describe() -> list[Entry]:
    """The embedded sets, in the order of ``names``."""
    return [
        Entry(
            name,
            summary["description"],
            summary["source"],
            summary["licence"],
            summary["n"],
            summary["prompt_tokens"]["mean"],
            summary["output_tokens"]["mean"],
        )
        for name, summary in length_summaries()["sets"].items()
    ]
