"""The answer of a candidate, its bill, and the order of candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ...sim.types.optional import not_none
from .candidates import Candidate
from .confidence import mean_rate
from .detail import Detail
from .fleet import Fleet
from .load import Load
from .max_rate import MaxRate
from .prices import HOUR_S, MILLION, Prices
from .split import prefilling
from .trials import MOST_REPLICAS


@dataclass(frozen=True)
class Answer:
    """Results of a candidate.

    Attributes:
        error: Reason why it cannot be simulated.
        found: The rates of one replica; None if it does not start or cannot be simulated.
        wanted: The wanted rate, requests/s.
        fleet: The fleet for the wanted rate; None without one.
        known_rates: ``known_rate`` by seed, of the fleet or of one replica, requests/s; None if they are its highest rates.
        prefill_replicas: Replicas of the fleet that only prefill; None if every replica does both.
        detail: Results at the wanted or the recommended rate; None if no fleet or no rate meets the goal.
        least_replicas: The fewest replicas that may serve the wanted rate, without a run (``least``); None without a wanted rate. If they
            are more than a plan simulates, ``error`` says so.
        equal: Names of the other candidates with the same settings and the same fleet for the wanted rate.
        share: Share of the replicas that prefill, of a pair (``pairs``); None of others.
    """

    candidate: Candidate
    error: str | None = None
    found: MaxRate | None = None
    wanted: float | None = None
    fleet: Fleet | None = None
    known_rates: tuple[float, ...] | None = None
    prefill_replicas: int | None = None
    detail: Detail | None = None
    least_replicas: int | None = None
    equal: tuple[str, ...] = ()
    share: float | None = None

    def sides(self, replicas: int) -> tuple[tuple[Candidate, int], ...]:
        """The candidates of so many replicas of a fleet, with the replicas of each: two of a pair, else one."""
        decode = self.candidate.decode
        if decode is None:
            return ((self.candidate, replicas),)
        prefill = prefilling(replicas, not_none(self.share))
        return (self.candidate, prefill), (decode, replicas - prefill)

    def gpus_of(self, replicas: int) -> int:
        """GPUs of so many replicas of its fleet."""
        return sum(count * each.num_gpus for each, count in self.sides(replicas))

    def per_hour(self, replicas: int, prices: Prices) -> float:
        """Price of so many replicas of its fleet for an hour."""
        return sum(
            count * each.num_gpus * prices.of(each.started.launch.gpu.name) for each, count in self.sides(replicas)
        )

    @property
    def replicas(self) -> int:
        """Replicas for the wanted rate; without one a single replica, or the engines that share its experts."""
        return self.candidate.engines if self.fleet is None else not_none(self.fleet.replicas)

    @property
    def rate(self) -> float:
        """The recommended rate of one replica, or its share of the wanted rate, requests/s.

        0 if no rate meets the goal, infinite if every rate does.
        """
        if self.detail is None:
            return 0.0
        return self.rates.rate if self.fleet is None else not_none(self.wanted) / self.replicas

    @property
    def is_burst(self) -> bool:
        """Whether the first seeds' runs at the wanted or recommended rate are bursts (``known_rate``): then they are no load, the
        fleet is a lower bound, and nothing is sure of other seeds."""
        if self.known_rates is None:
            return False
        return self.fleet is None or min(self.known_rates) < not_none(self.wanted)

    @property
    def is_unsure(self) -> bool:
        """Whether no fleet is enough with the confidence that is asked for."""
        return self.fleet is not None and self.fleet.is_unsure

    @property
    def fleet_rate(self) -> float:
        """The highest rate of the fleet or of the replica, requests/s: the mean of its seeds, or the recommended rate.

        It is a lower bound where only ``known_rates`` are known.
        """
        if self.fleet is None:
            return self.rates.rate * self.replicas
        if self.known_rates is not None:
            return max(not_none(self.wanted), mean_rate(self.known_rates))
        return self.fleet.mean_rate

    @property
    def sure_rate(self) -> float | None:
        """The rate at which 90 % of other seeds meet the goal with the fleet, with 95 % confidence, requests/s; None without a
        fleet, with one seed, and where the rate is not known."""
        fleet = self.fleet
        if fleet is None or len(fleet.rates) < 2 or self.known_rates is not None:
            return None
        return fleet.sure_rate

    @property
    def full_rate(self) -> float:
        """``fleet_rate`` of one replica."""
        return self.fleet_rate / self.replicas

    @property
    def rates(self) -> MaxRate:
        """The rates of a candidate that was simulated."""
        return not_none(self.found)

    @property
    def at_rate(self) -> Detail:
        """The detail of a candidate with a recommended rate."""
        return not_none(self.detail)

    @property
    def is_too_large(self) -> bool:
        """Whether its fleet is larger than those that a plan simulates, whatever the runs say (``least_replicas``)."""
        return self.error is not None and (self.least_replicas or 0) > MOST_REPLICAS

    @property
    def every_rate_meets(self) -> bool:
        """Whether, without a wanted rate, the goal is met even if all requests arrive at once."""
        return self.rate == inf


@dataclass(frozen=True)
class Bill:
    """Cost of a candidate, in the currency of the prices, which is GPU-hours where a GPU has no price.

    Attributes:
        replicas, gpus: Number needed for the wanted rate, with the spare ones; without one a single replica, or the engines that share its
            experts.
        fewest_replicas: Replicas that may be enough, as far as the seeds say; ``replicas`` if their runs are bursts, which say
            nothing of fewer replicas under a load that lasts.
        per_hour, fewest_per_hour: Price of all GPUs for an hour.
        per_million: Price of a million tokens at the wanted rate, or at the full rate: the whole bill divided by prompt
            tokens, by output tokens, and by both together.
        full_per_million: Price of a million prompt and output tokens with every replica at its full rate; None if every
            rate meets the goal.
        spare_gpus: Of ``gpus`` those of spare replicas.
    """

    replicas: int
    gpus: int
    fewest_replicas: int
    per_hour: float
    fewest_per_hour: float
    per_million: dict[str, float]
    full_per_million: float | None
    spare_gpus: int = 0


def bill(answer: Answer, load: Load, prices: Prices, wanted: float | None, spare: int = 0) -> Bill:
    """Cost of serving the wanted rate, in requests/s, with ``spare`` replicas beside those that are enough."""
    beside = spare * answer.candidate.engines
    replicas = answer.replicas + beside
    fewest = replicas if answer.fleet is None or answer.is_burst else answer.fleet.fewest + beside
    per_hour, lowest = answer.per_hour(replicas, prices), answer.per_hour(fewest, prices)
    prompt, output = load.mean_tokens
    served = HOUR_S / MILLION * (answer.rate * replicas if wanted is None else wanted)
    tokens = {"input": prompt, "output": output, "total": prompt + output}
    per_million = {name: per_hour / (served * mean) for name, mean in tokens.items()}
    full = None
    if answer.fleet_rate < inf:
        full = answer.per_hour(answer.replicas, prices) / (HOUR_S / MILLION * answer.fleet_rate * tokens["total"])
    gpus, spares = answer.gpus_of(replicas), beside * answer.candidate.num_gpus
    return Bill(replicas, gpus, fewest, per_hour, lowest, per_million, full, spares)


def ranked(
    answers: Sequence[Answer], load: Load, prices: Prices, wanted: float | None, spare: int = 0
) -> list[tuple[Answer, Bill]]:
    """Candidates whose rate and price are known, each with its bill, in order of recommendation.

    With a wanted rate those of which only bursts are known come last: a load that lasts may need more of them; before them those of
    which no size is enough with the confidence that is asked for. Without one all
    come by their price, though it is a lower bound for those: else a candidate would win because fewer requests fill it.
    """
    able = [answer for answer in answers if answer.rate and not (wanted is None and answer.every_rate_meets)]
    billed = [(answer, bill(answer, load, prices, wanted, spare)) for answer in able]
    if wanted is None:
        return sorted(billed, key=lambda each: (each[1].full_per_million, each[1].gpus))
    # The price of a token falls as the rate rises. For the same money no answer of the model is changed.
    return sorted(
        billed,
        key=lambda each: (
            each[0].is_burst, each[0].is_unsure, each[1].per_hour, each[1].gpus, each[0].candidate.num_lossy,
            each[1].full_per_million or 0.0,
        ),
    )  # fmt: skip
