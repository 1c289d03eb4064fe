"""The runs that the searches of a plan ask for (``fleet``, ``chance``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .confidence import Kind

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


class Trial(NamedTuple):
    """What is to be found of a fleet with a seed.

    Attributes:
        near: Where to seek its rate, or the rate that it may meet, requests/s.
        case: Where the goal is to be met at the wanted rate; of no replicas by requests served alone.
    """

    kind: Kind
    replicas: int
    seed: int
    near: float | None = None
    case: Case | None = None


Results = Mapping[Trial, float]
