"""A made-up service: the jobs of a plan are answered by known functions of GPU, seed and fleet. Nothing is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import pytest

from fragmeter.experiments.capacity.confidence import NUM_SEEDS
from fragmeter.experiments.capacity.day import ServedDay, ServedStep, Targets
from fragmeter.experiments.capacity.detail import Bottleneck, Detail
from fragmeter.experiments.capacity.load import Load
from fragmeter.experiments.capacity.max_rate import STEP, Ahead, SeedRate
from fragmeter.experiments.capacity.tasks import Task
from fragmeter.experiments.runs.slo_check import Goal, SloCheck
from fragmeter.experiments.runs.sweeping import Outcome
from fragmeter.sim.cluster import Cluster

#: Exponents of 1.02 of the rate of one replica with the first seed: 9.94, 19.7 and 25.7 requests/s.
POWERS = {"a100-80gb": 116, "h100-80gb": 150.0, "h200": 164}
PRICES = {"a100-80gb": 2.0, "h100-80gb": 3.0, "h200": 5.0}
#: First seed of all plans.
FIRST = 3
_TIMES = {f"{rank}_{name}_ms": 9.0 for name in ("ttft", "tpot", "e2el") for rank in ("median", "p90", "p99")}
DETAIL = Detail(
    attained=1.0, metrics=_TIMES | dict.fromkeys(("request_throughput", "mean_batch", "num_gpu_blocks"), 1.0), preemptions=0,
    refused_requests=0, load="light", near_saturation=None, kv_cache_pct=1.0, buckets_pct={}, paper_view_pct={}, cache_worth=None,
    limit=Bottleneck(None, {}, "steps"), curve=(),
)  # fmt: skip


def factor_of(seed: int) -> float:
    """Rates of seeds differ by up to 5 %; that of the first is 1."""
    return 1 + ((seed - FIRST) * 31 % 97 - 48) / 1000 * ((seed - FIRST) > 0)


@dataclass
class Service:
    """Replicas of which each takes a rate that depends on the GPU and the seed.

    Attributes:
        saturated: Rate of a replica that always has requests waiting, relative to that of the first seed; None of none.
        known: Rate up to which runs are a load, relative to the highest one.
        scaled: Whether the rate of a case is inverse to its step times; else they change nothing.
        failing: Work that fails, with the GPU.
        calls: Work, GPU, seed, and further arguments.
    """

    saturated: float | None = 2.0
    known: float = 1.0
    failing: tuple[str, str] | None = None
    alone: bool = True
    scaled: bool = False
    share: float = 0.25
    in_flight: float = 3.0
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def of_one(self, gpu: str, seed: int = FIRST) -> float:
        return STEP ** int(POWERS[gpu]) * factor_of(seed)

    def rates(self, gpu: str, replicas: int = 1, count: int = NUM_SEEDS, first: int = FIRST) -> list[float]:
        return [replicas * self.of_one(gpu, seed) for seed in range(first, first + count)]

    def carry_out(self, name: str, asked: Task[Any], load: Load, goal: Goal) -> Outcome:
        gpu, stage, seed, more = str(asked.settings.gpu), asked.work.__name__, asked.seed, asked.more
        self.calls.append((stage, gpu, seed, *more))
        if self.failing == (stage, gpu):
            return Outcome(name, error="it fails")
        cluster = more[0] if more and isinstance(more[0], Cluster) else Cluster()
        assert len(more) < 3 or stage in ("known_rate", "served_day", "detail", "best_share") or cluster.disaggregated or (
            more[2 - (stage == "takes_rate")] == pytest.approx(self._most(gpu, cluster.size))
        )  # fmt: skip
        return Outcome(name, {"found": self._found(stage, gpu, seed, cluster, more)})

    def _most(self, gpu: str, replicas: int) -> float | None:
        return None if self.saturated is None else self.saturated * self.of_one(gpu) * replicas

    def _found(self, stage: str, gpu: str, seed: int, cluster: Cluster, more: Sequence[Any]) -> Any:
        rate = cluster.size * self.of_one(gpu, seed)
        match stage:
            case "go_ahead":
                alone = SloCheck(self.alone, 80, 80 * self.alone, {"ttft": 80})
                power = int(POWERS[gpu]) if self.alone else None
                return Ahead(alone, self._most(gpu, 1), SeedRate(power), self.in_flight)
            case "attained_share":
                return min(1.0, 0.9 * rate / more[1])
            case "meets_case":
                return not more[0] or rate >= more[1] * (more[3].scale if self.scaled else 1)
            case "takes_rate":
                return rate >= more[2]
            case "highest_rate" | "follow":
                return rate
            case "known_rate":
                return self.known * more[2]
            case "best_share":
                return self.share
            case "detail":
                return DETAIL
            case "served_day":
                return self._day(*more)
            case _:
                assert stage == "full_load"
                return Targets(7.0, 0.5)

    @staticmethod
    def _day(cluster: Cluster, day: Any, sizes: Sequence[int], startup_s: float) -> ServedDay:
        steps = tuple(
            ServedStep(round(rate * (end - start)), 0.95, 0.95, 0.95, 0.95, size * (end - start) / 3600)
            for rate, size, (start, end) in zip(day.rates, sizes, day.spans_s, strict=True)
        )
        return ServedDay(sum(each.requests for each in steps), 0.95, steps, sum(each.replica_hours for each in steps))

    def of_stage(self, stage: str, gpu: str | None = None) -> list[tuple[Any, ...]]:
        return [call[2:] for call in self.calls if call[0] == stage and gpu in (None, call[1])]


def smallest(service: Service, gpu: str, wanted: float) -> int:
    """The smallest fleet that at most one of 48 seeds misses."""
    return ceil(wanted / sorted(service.rates(gpu))[1])


class RateOnly:
    """A load that is not served: at a rate it is the rate."""

    def draw(self, seed: int, replicas: int = 1) -> RateOnly:
        return self

    def at(self, rate: float) -> float:
        return rate
