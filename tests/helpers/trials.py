"""The searches of a plan on known answers: what they ask for is a name in place of a task, and nothing is run."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

from fragmeter.experiments.capacity.tasks import Search
from fragmeter.experiments.capacity.trials import Case


class Kind(StrEnum):
    """What a search asks for; the names are those of ``Trials``."""

    SHARE = "share"
    RATE = "rate"
    MEETS = "takes"
    CASE = "case"


class Trial(NamedTuple):
    """What is asked for of a fleet with a seed; ``near`` is the rate that it may meet, or near which its own is sought."""

    kind: Kind
    replicas: int
    seed: int
    near: float | None = None
    case: Case | None = None


class Named:
    """``Trials`` by their names."""

    def share(self, replicas: int, seed: int) -> Any:
        return Trial(Kind.SHARE, replicas, seed)

    def rate(self, replicas: int, seed: int, near: float | None) -> Any:
        return Trial(Kind.RATE, replicas, seed, near)

    def takes(self, replicas: int, seed: int, rate: float) -> Any:
        return Trial(Kind.MEETS, replicas, seed, rate)

    def case(self, replicas: int, seed: int, case: Case) -> Any:
        return Trial(Kind.CASE, replicas, seed, case=case)


NAMED = Named()


def ended(search: Search[Any], value_of: Callable[[Any], Any]) -> tuple[Any, list[list[Any]]]:
    """What a search finds where tasks have these results, and the tasks of each of its rounds."""
    rounds: list[list[Any]] = []
    try:
        asked: list[Any] = next(search)
        while True:
            rounds.append(asked)
            asked = search.send([value_of(each) for each in asked])
    except StopIteration as end:
        return end.value, rounds
