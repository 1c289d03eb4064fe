"""The probability that a fleet is enough: over draws of the load, what step times may be, and what the KV cache may be.

    scale       step times over the predicted ones: five quantiles of the interval that measured servers of the class give (``evidence``),
                with its logarithm taken for normal; without such servers, of that of all measured servers
    memory      the KV cache: the low end, the likely size and the high end of what is computed for the start (``Launch.outlook``)
    case        a draw with a scale and a memory: the fleet serves it at the wanted rate and meets the goal, or not
    chance      the weight of the cases that meet it; draws weigh alike
    1. of each draw the number of scales that are met is bisected with the likely memory: a goal that is missed with shorter steps is
       missed with longer ones, and one that is missed with more memory with less
    2. the low memory is tried at the longest scale that is met, the high one at the shortest that is missed; only where the
       outcome changes its scales are bisected, too
    3. sizes in strides that double, then bisected: the smallest with a chance of ``confidence``; none if requests served alone miss
       the goal with too much of the weight of the scales
    4. one size below, which shows what the last replica is for
    decisive    the longest scale for which it holds that a fleet that misses the goal with it in every draw has not the chance: a
                candidate of a search is closed by one run of each draw at it

So a draw takes four or five runs in place of fifteen. All weights are whole numbers, and a chance is a quotient of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, prod
from typing import TypeVar

from .tasks import Search, result, results, smallest
from .trials import MOST_REPLICAS, Case, Memory, Trials

#: Quantiles of the step times and their weights: the ends of the interval stand for a tenth each.
QUANTILES, SCALE_WEIGHTS = (0.05, 0.25, 0.5, 0.75, 0.95), (1, 3, 2, 3, 1)
#: Weights of the low end, the likely size and the high end of an interval that holds eight of ten (Keefer and Bodily 1983).
MEMORY_WEIGHTS = (3, 4, 3)
#: Draws, unless the plan begins with more.
NUM_DRAWS = 8
#: Sizes that are tried, relative to the first.
_MOST_TIMES = 4
#: Tolerance of a chance, for the rounding of floats.
_ROUNDING = 1e-9
_Value = TypeVar("_Value", float, Memory)


@dataclass(frozen=True)
class Uncertainty:
    """What step times and the KV cache may be.

    Attributes:
        scales: Step times over the predicted ones, ascending: one, or one for each of ``QUANTILES``.
        memories: KV caches, ascending: one, or one for each of ``MEMORY_WEIGHTS``.
        basis: What the interval of the scales rests on, in words.
        decode: Of replicas that only decode with settings of their own, with as many scales and memories; None without such.
    """

    scales: tuple[float, ...]
    memories: tuple[Memory, ...]
    basis: str
    decode: Uncertainty | None = None

    def beside(self, decode: Uncertainty) -> Uncertainty:
        """With that of replicas that only decode: both sides have the same quantile, as the rules that predict them are the same."""
        scales, other_scales = _alike(self.scales, decode.scales)
        memories, other_memories = _alike(self.memories, decode.memories)
        other = Uncertainty(other_scales, other_memories, decode.basis)
        return Uncertainty(scales, memories, self.basis, other)

    def likely(self, scale: float) -> Uncertainty:
        """With these step times, those of replicas that only decode in their place, and the likely KV cache alone."""
        place, middle = self.scales.index(scale) if scale in self.scales else None, len(self.memories) // 2
        decode = self.decode
        if decode is not None:
            other = 1.0 if place is None else decode.scales[place]
            decode = Uncertainty((other,), (decode.memories[middle],), decode.basis)
        return Uncertainty((scale,), (self.memories[middle],), self.basis, decode)

    def case(self, scale: int, memory: int) -> Case:
        """The case of places in ``scales`` and ``memories``."""
        decode = None if self.decode is None else self.decode.case(scale, memory)
        return Case(self.scales[scale], self.memories[memory], decode)

    def text(self) -> str:
        """The interval of step times, where it comes from, and that of the KV cache: what stands behind a probability in a plan's text."""
        times = f"{self.basis}, {self.scales[0]:.2f} to {self.scales[-1]:.2f} times as long"
        sizes = " to ".join(f"{each.num_blocks:,}" for each in dict.fromkeys((self.memories[0], self.memories[-1])))
        return f"{times if len(self.scales) > 1 else self.basis}; {sizes} blocks of KV cache"

    def decisive(self, confidence: float) -> float:
        """The longest scale that, with those above it and the likely memory or less, has more of the weight than the confidence leaves."""
        weights, above = self.scale_weights, 0
        total = sum(weights) * sum(self.memory_weights) / self.up_to_likely
        for scale, weight in zip(reversed(self.scales), reversed(weights), strict=True):
            above += weight
            if above > (1 - confidence + _ROUNDING) * total:
                return scale
        return self.scales[0]

    @property
    def up_to_likely(self) -> int:
        """Weight of the likely memory and of less."""
        return sum(self.memory_weights[: len(self.memories) // 2 + 1])

    @property
    def scale_weights(self) -> tuple[int, ...]:
        """Weights of the scales."""
        return SCALE_WEIGHTS if len(self.scales) > 1 else (1,)

    @property
    def memory_weights(self) -> tuple[int, ...]:
        """Weights of the memories."""
        return MEMORY_WEIGHTS if len(self.memories) > 1 else (1,)


@dataclass(frozen=True)
class Chance:
    """What the cases say of one size.

    Attributes:
        replicas: The size.
        chance: Weight of the cases in which the fleet meets the goal.
        by_scale, by_memory, by_draw: The same of the cases of each scale, memory and draw.
    """

    replicas: int
    chance: float
    by_scale: tuple[float, ...]
    by_memory: tuple[float, ...]
    by_draw: tuple[float, ...]

    @classmethod
    def of(cls, replicas: int, met: Mapping[tuple[int, int], int], about: Uncertainty) -> Chance:
        """From the number of scales that are met, by draw and place of the memory."""
        scales, memories = about.scale_weights, about.memory_weights
        seeds, places = sorted({seed for seed, _ in met}), range(len(memories))
        of_memory = sum(memories)

        def share(weight: int, total: int) -> float:
            return weight / total

        by_scale = tuple(
            share(sum(memories[at] for seed in seeds for at in places if met[seed, at] > scale), of_memory * len(seeds))
            for scale in range(len(scales))
        )
        weight = {key: sum(scales[:count]) for key, count in met.items()}
        by_memory = tuple(share(sum(weight[seed, at] for seed in seeds), sum(scales) * len(seeds)) for at in places)
        by_draw = [sum(memories[at] * weight[seed, at] for at in places) for seed in seeds]
        each = of_memory * sum(scales)
        return cls(
            replicas, share(sum(by_draw), each * len(seeds)), by_scale, by_memory,
            tuple(share(one, each) for one in by_draw),
        )  # fmt: skip


def all_enough(chances: Sequence[Chance]) -> float:
    """The probability that each of several fleets is enough: their step times are at one quantile, as one set of rules predicts them;
    draws and KV caches are independent."""
    of_scale = (
        weight * prod(each.by_scale[min(place, len(each.by_scale) - 1)] for each in chances)
        for place, weight in enumerate(SCALE_WEIGHTS)
    )
    return fsum(of_scale) / sum(SCALE_WEIGHTS)


class ChanceSearch:
    """The search for the smallest size with a chance, from one that is expected.

    Args:
        trials: Its runs.
        about: What is not known.
        seeds: The draws.
        confidence: The chance that is asked for.
        first, least, engines: The size to begin with, the fewest replicas that may be enough, and the number of which sizes are
            multiples.
    """

    def __init__(
        self,
        trials: Trials,
        about: Uncertainty,
        seeds: Sequence[int],
        confidence: float,
        first: int,
        least: int,
        engines: int = 1,
    ) -> None:
        self._trials, self._about, self._seeds, self._confidence = trials, about, seeds, confidence
        self._engines, self._least = engines, -(-least // engines)
        most = max(self._least, MOST_REPLICAS // engines)
        self._first = min(max(first // engines, self._least), most)
        self._most = min(_MOST_TIMES * self._first, most)
        self._found: dict[int, Chance] = {}
        #: Number of scales with which requests served alone meet the goal, where it was asked for.
        self._alone: int | None = None

    def steps(self) -> Search[tuple[int | None, tuple[Chance, ...]]]:
        """The size, if any, and what is known of each size that was tried."""
        sizes, stride = range(self._least, self._most + 1), max(1, self._first // 16)
        enough = yield from smallest(self._is_enough, sizes, self._first, stride, self._can_be_enough)
        # What the last replica is for; where none is enough, the size that was asked for.
        last = self._first if enough is None else enough
        if last > self._least:
            yield from self._is_enough(last - 1)
        of_size = tuple(self._found[each] for each in sorted(self._found))
        return None if enough is None else enough * self._engines, of_size

    def too_few(self) -> Search[bool]:
        """Whether the first size cannot have the chance, as too many draws miss the goal at the decisive scale.

        Half of the draws come first: mostly they decide.
        """
        replicas, about = self._first * self._engines, self._about
        case = about.case(about.scales.index(about.decisive(self._confidence)), len(about.memories) // 2)
        # Longer steps miss the goal, too, and so does less memory.
        scales = sum(
            weight for scale, weight in zip(about.scales, about.scale_weights, strict=True) if scale >= case.scale
        )
        weight, total = scales * about.up_to_likely, sum(about.scale_weights) * sum(about.memory_weights)
        half, misses = -(-len(self._seeds) // 2), 0
        for seeds in (self._seeds[:half], self._seeds[half:]):
            meets = yield from results(self._trials.case(replicas, seed, case) for seed in seeds)
            misses += len(meets) - sum(meets)
            if 1 - misses * weight / (len(self._seeds) * total) < self._confidence - _ROUNDING:
                return True
        return False

    def _can_be_enough(self) -> Search[bool]:
        """Whether requests served alone meet the goal with enough of the weight of the scales."""
        if self._alone is None:
            self._alone = yield from self._met_alone()
        weights = self._about.scale_weights
        return sum(weights[: self._alone]) >= (self._confidence - _ROUNDING) * sum(weights)

    def _is_enough(self, size: int) -> Search[bool]:
        if size not in self._found:
            met = yield from self._met(size * self._engines)
            self._found[size] = Chance.of(size * self._engines, met, self._about)
        return self._found[size].chance >= self._confidence - _ROUNDING

    def _met_alone(self) -> Search[int]:
        low, high = 0, len(self._about.scales)
        while low < high:
            middle = (low + high) // 2
            case = self._about.case(middle, len(self._about.memories) // 2)
            meets = yield from result(self._trials.case(0, self._seeds[0], case))
            low, high = (middle + 1, high) if meets else (low, middle)
        return low

    def _met(self, replicas: int) -> Search[dict[tuple[int, int], int]]:
        """Scales that are met, by draw and place of the memory."""
        scales, places = self._about.scales, range(len(self._about.memories))
        low = {(seed, at): 0 for seed in self._seeds for at in places}
        high = dict.fromkeys(low, len(scales) if self._alone is None else self._alone)
        while True:
            places_of = {seed: _next(low, high, seed, places) for seed in self._seeds}
            asked = [(seed, *chosen) for seed, chosen in places_of.items() if chosen is not None]
            if not asked:
                return low
            cases = (self._trials.case(replicas, seed, self._about.case(scale, at)) for seed, at, scale in asked)
            for (seed, at, scale), meets in zip(asked, (yield from results(cases)), strict=True):
                for other in places:
                    if meets and other >= at:
                        low[seed, other] = max(low[seed, other], scale + 1)
                    elif not meets and other <= at:
                        high[seed, other] = min(high[seed, other], scale)


def _alike(one: tuple[_Value, ...], other: tuple[_Value, ...]) -> tuple[tuple[_Value, ...], tuple[_Value, ...]]:
    """Both with as many values: one value stands for each of the other's."""
    most = max(len(one), len(other))
    return (one if len(one) == most else one * most), (other if len(other) == most else other * most)


def _next(
    low: Mapping[tuple[int, int], int], high: Mapping[tuple[int, int], int], seed: int, places: range
) -> tuple[int, int] | None:
    """The place of the memory and of the scale that a draw is tried with next; None if all is known of it."""
    middle = len(places) // 2
    if low[seed, middle] < high[seed, middle]:
        return middle, (low[seed, middle] + high[seed, middle]) // 2
    for at in places:
        begin, end = low[seed, at], high[seed, at]
        if begin < end:
            # Most likely the memory changes nothing: then one run says so.
            return at, end - 1 if at < middle else begin
    return None
