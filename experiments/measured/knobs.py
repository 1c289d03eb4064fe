"""Calibration of single knobs: set each knob alone to its measured value, simulate the load again, and rank the knobs.

    step_scale        factor on the step time; brings the median over requests of measured over simulated TPOT to 1, in a
                      few runs, because slower steps make larger batches
    num_gpu_blocks    the server's own pool size, if its metrics have it
    ttft_offset_ms    time outside of the engine: its simulated value and measured minus simulated TTFT, as the mean of the middle half over the
                      quarter of requests that found the fewest requests running and so hardly waited; of a summary, the
                      difference of the medians

A last replay sets all knobs together, in the order pool, steps, offset. The value of a knob is the part of
``replay.total_error`` that its replay removes. A knob that only mimics the effect of another one removes less of the
error than that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from typing import Any

from ...sim import Settings
from ...sim import settings as checked
from ...sim.engine.replica import build
from ...sim.policy.options import VllmServeOptions
from ...sim.types import ticks
from ...sim.types.bounds import LEAST_SCALE, MOST_SCALE
from .replay import Benchmark, Replayed, compared, replay, total_error

#: Runs for a fit of the step scale, at most, and the error at which the fit stops.
MOST_RUNS, CLOSE = 8, 5e-4
#: Errors below this count as zero; a knob that removes a smaller share of the error than the second number has no effect.
NO_ERROR, EXPLAINS = 0.005, 0.1
#: Corrections of an offset in a closed loop, and the largest offset that counts as zero.
MOST_CORRECTIONS, _IN_TIME_TICKS = 4, ticks.PER_MS // 20


@dataclass(frozen=True, eq=False)
class Knob:
    """A knob, its new value, and the replay with that value.

    Attributes:
        name: One of the knobs above, or ``all``.
        was, value: Old and new value; None for all knobs together.
        error: ``replay.total_error`` of the replay.
        removed: Share of the original replay's error that this replay removes; negative if the error grows.
        advice: Advice to the user.
    """

    name: str
    was: float | None
    value: float | None
    error: float
    removed: float
    advice: str
    replayed: Replayed

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in ("name", "was", "value", "error", "removed", "advice")}


def vary_knobs(benchmark: Benchmark, settings: Settings, base: Replayed) -> Iterator[Knob]:
    """Replays with each knob alone, then with all knobs together.

    Args:
        base: The replay with none of them.
    """
    before = total_error(compared(benchmark, base))
    finish = partial(_turned, benchmark, before)
    scale, scaled = fitted_scale(benchmark, settings, base)
    yield finish("step_scale", _base_scale(base), scale * _base_scale(base), _scale_advice(base, scale), scaled)
    own = _own_pool(benchmark, settings, base)
    with_pool = base
    if own is not None:
        with_pool = base if _is_pool_of(base, own) else replay(benchmark, own)
        sizes = base.run.replica.num_blocks, own.num_gpu_blocks_override
        yield finish("num_gpu_blocks", *sizes, _pool_advice(base, own), with_pool)
    offset, shifted = fitted_offset(benchmark, settings, base)
    was = base.run.replica.outside_ticks / ticks.PER_MS
    yield finish("ttft_offset_ms", was, offset / ticks.PER_MS, _offset_advice(benchmark, base, offset), shifted)
    scale, scaled = fitted_scale(benchmark, own or settings, with_pool)
    offset, together = fitted_offset(benchmark, own or settings, scaled, scale)
    what = f"--step-scale {scale * _base_scale(base):.4g}, {with_pool.run.replica.num_blocks:,} KV blocks"
    yield finish("all", None, None, f"{what} and {offset / ticks.PER_MS:.3g} ms outside of the engine.", together)


def ranked(found: list[Knob]) -> list[Knob]:
    """The single knobs, sorted by the error that they remove, largest first."""
    return sorted((knob for knob in found if knob.name != "all"), key=lambda knob: -knob.removed)


def _turned(
    benchmark: Benchmark,
    before: float,
    name: str,
    was: float | None,
    value: float | None,
    advice: str,
    replayed: Replayed,
) -> Knob:
    error = total_error(compared(benchmark, replayed))
    return Knob(name, was, value, error, (before - error) / before if before else 0.0, advice, replayed)


def fitted_scale(benchmark: Benchmark, settings: Settings, base: Replayed) -> tuple[float, Replayed]:
    """The factor on the step time with which simulated TPOTs match the measured ones, and its replay."""
    ratio = benchmark.tpot_ratio(base)
    if ratio is None:
        return 1.0, base
    scale, found, _ = _root(partial(_scaled, benchmark, settings), (1.0, base, log(ratio)))
    return scale, found


def _scaled(benchmark: Benchmark, settings: Settings, scale: float) -> tuple[float, Replayed, float]:
    found = replay(benchmark, settings, scale)
    ratio = benchmark.tpot_ratio(found)
    return scale, found, 0.0 if ratio is None else log(ratio)


Tried = tuple[float, Replayed, float]


def _root(attempt: Callable[[float], Tried], first: Tried) -> Tried:
    """The scale at which the log ratio is 0, by secants on logarithms from a proportional guess.

    Each secant stays between the nearest scales known to be too small and too large. The result is the best scale
    tried.
    """
    best = here = first
    low, high = log(LEAST_SCALE), log(MOST_SCALE)
    slope = -1.0
    for _ in range(MOST_RUNS):
        if abs(best[2]) < CLOSE:
            break
        at = log(here[0])
        low, high = (max(low, at), high) if here[2] > 0 else (low, min(high, at))
        guess = at - here[2] / slope
        tried = attempt(exp(guess if low < guess < high else (low + high) / 2))
        step = log(tried[0]) - at
        # A longer step gives a smaller ratio; any other result is noise of single requests.
        slope = min(-0.1, (tried[2] - here[2]) / step) if step else -1.0
        here = tried
        best = min(best, here, key=lambda one: abs(one[2]))
    return best


def fitted_offset(
    benchmark: Benchmark, settings: Settings, replayed: Replayed, scale: float = 1.0
) -> tuple[int, Replayed]:
    """The time outside of the engine, in ticks, and its replay; 0 if the simulated engine alone takes longer, and not less than
    the constants of a server have.

    In a closed loop the offset also reduces the number of requests in the engine, so it is corrected a few times.
    Offsets that end within the same step of the engine have the same effect, because the request waits for the end of
    that step.
    """
    inside = _without_outside(settings)
    least = build(inside).outside_ticks
    own = outside_ticks = replayed.run.replica.outside_ticks
    for _ in range(MOST_CORRECTIONS):
        late_ticks = _late_ticks(benchmark, replayed)
        corrected = max(least, outside_ticks + late_ticks)
        if abs(late_ticks) < _IN_TIME_TICKS or corrected == outside_ticks:
            break
        outside_ticks = corrected
        if benchmark.measured.max_concurrency is None:
            return outside_ticks, replace(replayed, offset_ticks=outside_ticks - own)
        replayed = replay(benchmark, inside, scale, outside_ticks - least)
    return outside_ticks, replayed


def _without_outside(settings: Settings) -> Settings:
    """The settings without time outside of the engine, as far as it is a setting."""
    if isinstance(settings.policy_options, VllmServeOptions):
        return checked(**settings.as_dict() | {"outside_ms": 0.0})
    return settings


def _late_ticks(benchmark: Benchmark, replayed: Replayed) -> int:
    """Measured minus simulated TTFT of the requests that waited for few others, in ticks."""
    return ticks.from_seconds(benchmark.late_s(replayed)) if len(replayed.times.index) else 0


def _own_pool(benchmark: Benchmark, settings: Settings, base: Replayed) -> Settings | None:
    """The settings with the server's own pool size, if its metrics have it."""
    metrics = benchmark.metrics
    if metrics is None or metrics.num_gpu_blocks is None:
        return None
    size = metrics.block_size or _block_size(base)
    pool = {"num_gpu_blocks_override": metrics.num_gpu_blocks, "block_size": size}
    return checked(**settings.as_dict() | pool)


def _is_pool_of(base: Replayed, own: Settings) -> bool:
    return (base.run.replica.num_blocks, _block_size(base)) == (own.num_gpu_blocks_override, own.block_size)


def _block_size(base: Replayed) -> int:
    """Tokens of a block on a rank, as servers state it."""
    return base.run.replica.stated_block_size // int(base.run.settings.value("decode_context_parallel_size"))


def _base_scale(base: Replayed) -> float:
    """``--step-scale`` of the replay; for the paper's cost it is not 1."""
    return getattr(base.run.replica.cost, "scale", 1.0)


def _scale_advice(base: Replayed, scale: float) -> str:
    if abs(scale - 1) < NO_ERROR:
        return "Steps take as long as predicted."
    way = f"Steps take {scale:.3g} times as long as predicted"
    how = "run fragmeter calibrate on the server's GPU and give its file to --cost"
    return f"{way}: {how}; until then --step-scale {scale * _base_scale(base):.4g}."


def _pool_advice(base: Replayed, own: Settings) -> str:
    here, there = base.run.replica.num_blocks, own.num_gpu_blocks_override
    if _is_pool_of(base, own):
        return "The pool is the server's."
    flags = f"--num-gpu-blocks-override {there}"
    if _block_size(base) != own.block_size:
        flags += f" --block-size {own.block_size}"
    sizes = f"The server has {there:,} KV blocks where {here:,} are simulated"
    return f"{sizes}: give {flags}, or its log as --startup-log."


def _offset_advice(benchmark: Benchmark, base: Replayed, offset_ticks: int) -> str:
    offset_ms = offset_ticks / ticks.PER_MS
    if offset_ms < 1:
        return "Requests reach the engine without a measurable delay."
    text = f"{offset_ms:.3g} ms pass before a request reaches the engine (HTTP, tokenizer, network)"
    inside = benchmark.metrics and benchmark.metrics.ttft_s
    by_clients = benchmark.values().get("mean_ttft_ms")
    way_ms = by_clients - inside * 1e3 if inside and by_clients is not None else 0
    if way_ms >= 1:
        text += f", {way_ms:.3g} ms of it between the clients and the server's own clock"
    if not isinstance(base.run.settings.policy_options, VllmServeOptions):
        return f"{text}: no setting of the replica; plan for a TTFT objective that is lower by so much."
    known = base.run.replica.outside_ticks
    if abs(offset_ticks - known) < _IN_TIME_TICKS:
        return f"{text}, as simulated."
    return f"{text}: give --outside-ms {offset_ms:.3g}; {known / ticks.PER_MS:g} are simulated."
