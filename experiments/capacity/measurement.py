"""The measurement that would narrow a plan's answer most, and what a benchmark of a server narrows it to (``--measured``).

Step times of a server are known by a benchmark of it as well as the runs of one measured server agree: the logarithms of their errors
scatter about their mean (``spread_of_a_server``, runs of many loads; one under the plan's own load should scatter less).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import NormalDist

from ...sim.types.errors import SettingError
from ...sim.types.optional import not_none
from ...traces import measured, read
from ..measured.intervals import SHARE
from ..measured.knobs import fitted_scale
from ..measured.replay import benchmark_of, replay
from ..measured.servers_like import spread_of_a_server
from .answer import Answer
from .candidates import Candidate
from .chance import Chance, Uncertainty

#: What may decide whether a fleet is enough, by the attribute of ``Chance``.
CAUSES = ("step times", "the KV cache", "the draw of the load")


def with_measured_steps(candidates: Sequence[Candidate], path: Path) -> list[Candidate]:
    """The only candidate, with steps as long as a benchmark of its server says.

    Args:
        path: Result of ``vllm bench serve --save-result``.

    Raises:
        SettingError: There are several candidates, or one that does not start.
        UserError: The benchmark cannot be read or served.
    """
    if len(candidates) != 1 or candidates[0].settings is None:
        raise SettingError("measured", str(path), "is of one server; plan for its GPU and flags alone")
    trace, chosen = read(path), candidates[0].settings
    benchmark = benchmark_of(trace, measured(path, trace))
    scale, _ = fitted_scale(benchmark, chosen, replay(benchmark, chosen))
    return [replace(candidates[0], settings=replace(chosen, step_scale=scale))]


def after_a_benchmark() -> tuple[float, float]:
    """Lowest and highest step time over that of a benchmark, for 9 of 10 runs of its server."""
    half = NormalDist().inv_cdf((1 + SHARE) / 2) * spread_of_a_server()
    return exp(-half), exp(half)


def main_cause(chance: Chance) -> tuple[str, float, float]:
    """What it depends on most whether a fleet is enough: its name, and the chances with the best and the worst of it."""
    ends = (
        (chance.by_scale[0], chance.by_scale[-1]),
        (chance.by_memory[-1], chance.by_memory[0]),
        (max(chance.by_draw), min(chance.by_draw)),
    )
    name, (best, worst) = max(zip(CAUSES, ends, strict=True), key=lambda each: each[1][0] - each[1][1])
    return name, best, worst


def next_measurement(answer: Answer, about: Uncertainty, confidence: float) -> list[str]:
    """One sentence: the measurement that would narrow the number of GPUs most; empty where none would, of the sizes that were tried."""
    fleet = answer.fleet
    if fleet is None or fleet.chance is None or answer.is_burst:
        return []
    cause, _, _ = main_cause(fleet.chance)
    if cause == CAUSES[2]:
        return ["More draws would narrow this most: --seeds 16."] if fleet.chance.chance < 1 else []
    launch = answer.candidate.started.launch
    per_replica, server = launch.num_gpus, f"one replica ({launch.num_gpus} x {launch.gpu.name})"
    by_place = [
        each.by_scale if cause == CAUSES[0] else tuple(reversed(each.by_memory)) for each in fleet.chances
    ]  # fmt: skip
    enough = [_smallest(fleet.chances, by_place, place, confidence) for place in range(len(by_place[0]))]
    fewest, most = enough[0], enough[-1]
    if fewest is None or fewest == most:
        return []
    many = "more" if most is None else f"{most * per_replica:,}"
    if cause == CAUSES[1]:
        return [
            f"The start-up log of {server} would narrow this most (--startup-log): with the largest KV cache that it may name"
            f" {fewest * per_replica:,} GPUs are enough, with the smallest {many}."
        ]
    low, high = after_a_benchmark()
    if about.scales[-1] / about.scales[0] <= high / low:
        share = f"{high - 1:.0%}"
        return [
            f"No benchmark would narrow this: step times of servers like this are known as well as one tells, to {share}."
        ]
    longest = max(scale for scale, size in zip(about.scales, enough, strict=True) if size == fewest)
    return [
        f"Ten minutes of vllm bench serve on {server} at {answer.rate:.2g} requests/s with these lengths would narrow this most"
        f" (--measured takes its result): with steps of up to {longest:.2f} times the predicted time {fewest * per_replica:,} GPUs are enough,"
        f" with longer ones it takes {many}."
    ]


def _smallest(
    chances: Sequence[Chance], by_place: Sequence[Sequence[float]], place: int, confidence: float
) -> int | None:
    """Replicas of the smallest fleet that was tried and is enough at a place of what is not known."""
    sizes = [each.replicas for each, of in zip(chances, by_place, strict=True) if of[place] >= confidence]
    return min(sizes, default=None)


def measured_text(candidate: Candidate, path: Path) -> str:
    """What a benchmark says of the step times."""
    scale = not_none(not_none(candidate.settings).step_scale)
    return f"Steps take {scale:.3g} times as long as predicted, fitted to the TPOT of {path.name} (--measured)."


def spread_text() -> str:
    """What step times are known to with a benchmark, in words."""
    low, high = after_a_benchmark()
    return f"fitted to a benchmark, and as the runs of one server scatter ({log(high / low) / 2:.0%})"
