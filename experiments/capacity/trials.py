"""What the searches of a plan ask for of the fleets of one candidate (``fleet``, ``chance``)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from .tasks import Task

#: Most replicas of a fleet (``Cluster.num_replicas``).
MOST_REPLICAS = 1024


class Memory(NamedTuple):
    """A KV cache: its blocks, and the longest sequence of the server."""

    num_blocks: int
    max_model_len: int


class Case(NamedTuple):
    """Step times over the predicted ones, and the KV cache; of replicas that only decode with settings of their own another case."""

    scale: float
    memory: Memory
    decode: Case | None = None


class Trials(Protocol):
    """Makes the tasks of a fleet of so many replicas with a seed; rates in requests/s."""

    def share(self, replicas: int, seed: int) -> Task[float]:
        """The share of the requests that meet the objectives at the wanted rate."""

    def rate(self, replicas: int, seed: int, near: float | None) -> Task[float]:
        """The highest rate that meets the goal, sought from ``near``."""

    def takes(self, replicas: int, seed: int, rate: float) -> Task[bool]:
        """Whether it meets the goal at a rate."""

    def case(self, replicas: int, seed: int, case: Case) -> Task[bool]:
        """Whether it meets the goal at the wanted rate in a case; of no replicas, one replica whose requests are served alone."""
