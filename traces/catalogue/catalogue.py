"""The sets that come with the package, and where their facts are from."""

from __future__ import annotations

from dataclasses import dataclass

from ..synthesis.summaries import length_summaries


@dataclass(frozen=True, slots=True)
class Entry:
    """One embedded set.

    Attributes:
        name: What ``sample`` calls it.
        description: What it is.
        source: Where the summarised data are from.
        licence: On what terms.
        rows: Pairs that were summarised.
        mean_prompt_tokens: Their mean prompt.
        mean_output_tokens: Their mean output.
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
