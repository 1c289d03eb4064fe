"""The flags of ``vllm serve`` by release, as vLLM's own parsers have them, and what becomes of each here.

``facts/flags.json`` is written by ``tests/real_vllm/flags.py`` from the parser of the newest release and the sources of older ones, from
0.8 on; ``facts/effects.json`` is written by hand. Each flag is simulated, or has no effect on memory, scheduling and step times, or is not simulated, with the reason. What is
not simulated and takes memory, or changes which tokens are there, changes the answer to whether a line starts.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

Release = tuple[int, int]
#: Flags with their first and last releases and kinds, and their other spellings.
FILE = Path(__file__).with_name("facts") / "flags.json"

#: Flags that are simulated, and by reason those that are not: the second and third change the KV cache, or what is served from it, or
#: leave it as it is and change times, or the order of requests. All others have no effect.
_EFFECTS = json.loads(Path(__file__).with_name("facts").joinpath("effects.json").read_text("utf-8"))


def _reasons(group: str) -> dict[str, str]:
    return {name: why for why, names in _EFFECTS[group].items() for name in names}


READ = frozenset(_EFFECTS["simulated"])
CHANGES_MEMORY = _reasons("changes_memory")
#: The reason of each flag that is not simulated.
NOT_SIMULATED = CHANGES_MEMORY | _reasons("changes_times")
#: Values with which one of them changes nothing.
UNCHANGED: dict[str, list[str]] = _EFFECTS["unchanged"]
#: Environment variables that are not simulated and change the answer, and those that change times alone.
VARIABLES, VARIABLES_OF_TIMES = _reasons("variables"), _reasons("variables_of_times")

#: Flags of releases before 0.8, all with a value.
_OLDER = ("ngram-prompt-lookup-max", "num-speculative-tokens", "speculative-model")


class Flag(NamedTuple):
    """A flag of vLLM's parser.

    Attributes:
        first, last: Releases that have it; None for one before 0.8, and for the newest.
        kind: "switch", "value", or "values" for all words up to the next flag.
    """

    first: Release | None
    last: Release | None
    kind: str

    def is_of(self, release: Release) -> bool:
        """Whether a release has it; those before the oldest that was read are taken for that one."""
        return (self.first is None or self.first <= max(release, releases()[0])) and (
            self.last is None or release <= self.last
        )

    @property
    def range_text(self) -> str:
        """The releases that have it, as text."""
        since = None if self.first in (None, releases()[0]) else f"since {text_of_release(self.first)}"
        until = None if self.last is None else f"up to {text_of_release(self.last)}"
        return ", ".join(filter(None, (since, until))) or "of all releases"


def text_of_release(release: Release | None) -> str:
    """A release as ``0.16``; empty for None."""
    return "" if release is None else ".".join(map(str, release))


@cache
def _content() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return found


@cache
def releases() -> list[Release]:
    """The releases that were read, the oldest first."""
    return [_release(each) for each in _content()["releases"]]


@cache
def flags() -> dict[str, Flag]:
    """All flags by name."""
    oldest = releases()[0]
    found = {
        name: Flag(_release(first), None if last is None else _release(last), kind)
        for name, (first, last, kind) in _content()["flags"].items()
    }
    return found | {name: Flag(None, oldest, "value") for name in _OLDER}


@cache
def spellings() -> dict[str, str]:
    """Flags by their other spellings, such as ``tp``."""
    found: dict[str, str] = _content()["spellings"]
    return found


def _release(text: object) -> Release:
    major, minor = str(text).split(".")
    return int(major), int(minor)
