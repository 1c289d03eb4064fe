"""Prefill and decode apart, each on a card and with ranks of its own: the pairs that may cost less than replicas that do both.

side      a candidate that only prefills, or only decodes: the rate of a replica by a few step times and no run (``steady``)
replicas  of a side: the wanted rate over its rate; the cost of a pair is that of both sides
pair      two sides between which vLLM's NixlConnector moves a KV cache (``connects``)
tried     at most ``MOST_PAIRS`` pairs, cheapest first, that save ``SAVES`` if both rates are ``HOPE`` times as high
share     of the replicas that prefill, from the two sides; one draw then finds the size
division  cheaper ones of which both sides may serve the rate, by the same bound, are bisected by their cost with that draw
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import mul
from typing import NamedTuple

from ...sim.cost.backends import attention_backend
from ...sim.types.optional import not_none
from .candidates import DECODE, Candidate
from .fleet import first_fleet
from .prices import Prices
from .trials import MOST_REPLICAS

#: Most pairs that are simulated.
MOST_PAIRS = 5
#: Least share of the bill that a pair saves, to be worth two kinds of servers and a proxy.
SAVES = 0.05
#: By how much the rate of one replica is taken to be higher: so much may be missed without a candidate being left out.
HOPE = 1.15
#: Least relative difference of two costs.
_ROUNDING = 1e-9
#: The sides of a pair, and their ``kv_role``.
ROLES = ("prefill", "decode")
_KV_ROLES = dict(zip(ROLES, ("kv_producer", "kv_consumer"), strict=True))


@dataclass(frozen=True)
class Offer:
    """A pair that may be cheaper.

    Attributes:
        candidate: The one that prefills, with the one that decodes.
        likely: Replicas of each side, as estimated.
        share: Of the replicas the share that prefill, before they are rounded up.
        costs: Of one replica of each side by the hour.
        least: The fewest replicas of each side that may serve the rate: with both rates ``HOPE`` times as high.
    """

    candidate: Candidate
    share: float
    costs: tuple[float, float]
    likely: tuple[int, int]
    least: tuple[int, int]

    @property
    def replicas(self) -> int:
        """Of both sides together, as estimated."""
        return sum(self.likely)

    def cost_of(self, division: Sequence[int]) -> float:
        """Of so many replicas of each side by the hour."""
        return sum(map(mul, division, self.costs))

    @property
    def cost(self) -> float:
        """As estimated."""
        return self.cost_of(self.likely)

    @property
    def hoped(self) -> float:
        """Of the fewest replicas."""
        return self.cost_of(self.least)

    def cheaper(self, division: tuple[int, int]) -> list[tuple[int, int]]:
        """Divisions that cost less than one that serves the rate and may serve it, dearest first."""
        prefills, decodes = (range(least, sum(division) + 1) for least in self.least)
        most = self.cost_of(division) * (1 - _ROUNDING)
        found = [(one, other) for one in prefills for other in decodes if self.cost_of((one, other)) < most]
        return sorted(found, key=self.cost_of, reverse=True)


def may_be_side(candidate: Candidate) -> bool:
    """Whether replicas of a candidate can only prefill, or only decode."""
    chosen = candidate.settings
    return (
        chosen is not None
        and chosen.policy == "vllm-v1"
        and chosen.data_parallel_size == chosen.pipeline_parallel_size == 1
        and chosen.policy_options.speculative is None
    )


def connects(prefill: Candidate, decode: Candidate) -> bool:
    """Whether a KV cache moves between two candidates: the same checkpoint, format of the KV cache and attention backend
    (``compute_nixl_compatibility_hash`` of vLLM 0.33); and no more ranks that prefill than both ranks that decode and KV heads
    (``_validate_remote_agent_handshake``)."""
    one, other = prefill.started.launch, decode.started.launch
    formats = {not_none(each.settings).as_dict().get("kv_cache_dtype") for each in (prefill, decode)}
    backends = {
        attention_backend(each.model, each.gpu, each.deployment, each.tensor_parallel).name for each in (one, other)
    }
    repeats = one.tensor_parallel > max(other.tensor_parallel, one.model.num_kv_heads) and not one.model.has_vectors
    return prefill.checkpoint == decode.checkpoint and len(formats) == len(backends) == 1 and not repeats


def paired(prefill: Candidate, decode: Candidate) -> Candidate:
    """One candidate of the two."""
    name = f"{side_text(prefill)} to prefill, {side_text(decode)} to decode"
    return replace(prefill, axis_values={**prefill.axis_values, DECODE: side_text(decode)}, name=name, decode=decode)


def side_text(candidate: Candidate) -> str:
    """Card, ranks and checkpoint of one replica."""
    ranks = f"{candidate.started.launch.gpu.name} TP {not_none(candidate.settings).tensor_parallel_size}"
    return ranks if candidate.checkpoint is None else f"{ranks} {candidate.checkpoint}"


def hourly(candidate: Candidate, prices: Prices) -> float:
    """Price of one replica of a candidate, alone."""
    return candidate.num_gpus * prices.of(candidate.started.launch.gpu.name)


class Side(NamedTuple):
    """A candidate, and requests/s of a replica that only prefills and of one that only decodes; 0 if it misses the objectives."""

    candidate: Candidate
    prefill: float
    decode: float


def offers(sides: Sequence[Side], prices: Prices, wanted: float) -> list[Offer]:
    """All pairs for a wanted rate, requests/s, cheapest first."""
    found = []
    for one, other in product(sides, sides):
        prefill, decode, of_prefill, of_decode = one.candidate, other.candidate, one.prefill, other.decode
        if not of_prefill or not of_decode or not connects(prefill, decode):
            continue
        costs = hourly(prefill, prices), hourly(decode, prices)
        likely, hoped = (
            (first_fleet(wanted, of_prefill * factor), first_fleet(wanted, of_decode * factor))
            for factor in (1.0, HOPE)
        )
        if sum(likely) <= MOST_REPLICAS:
            share = of_decode / (of_prefill + of_decode)
            found.append(Offer(paired(prefill, decode), share, costs, likely, hoped))
    return sorted(found, key=lambda each: each.cost)


def serve_lines(flags: Sequence[str], model: str) -> list[str]:
    """The ``vllm serve`` lines of both sides.

    Args:
        flags: Flags of the side that prefills, and of the side that decodes.
    """
    lines = []
    for role, words in zip(ROLES, flags, strict=True):
        transfer = f"--kv-transfer-config '{transfer_config(role)}'"
        lines.append(" ".join(filter(None, ("vllm serve", model, words, transfer))))
    return lines


def transfer_config(role: str) -> str:
    """``--kv-transfer-config`` of a side."""
    return json.dumps({"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[role]})
