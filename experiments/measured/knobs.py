"""What to calibrate first: each knob is turned to what the measurement says, alone, and the load simulated again.

    step_scale        steps take so many times as long: the median over requests of measured over simulated TPOT is
                      brought to 1, in a few runs, since a slower step makes larger batches
    num_gpu_blocks    the pool is the server's own, where it says how large that is
    ttft_offset_ms    so much passes outside of the engine: measured less simulated TTFT, as the mean of the middle
                      half, over the quarter of requests that found the fewest running and so hardly waited

Then all together, in the order pool, steps, offset. A knob is worth what it takes off ``against.total_error``: no
formula, but the replay with it. So a knob that another one only looks like takes off less than that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from typing import Any

import numpy as np

from ...sim import Settings
from ...sim import settings as checked
from ...sim.types import ticks
from .replay import Benchmark, Replayed, compared, replay, total_error

#: Runs that a fit of the step scale may take, and the error in it that is good enough.
MOST_RUNS, CLOSE = 8, 5e-4
#: Errors below this are none, and shares of an error below the other explain nothing.
NO_ERROR, EXPLAINS = 0.005, 0.1
_SMALLEST, _LARGEST = 1e-3, 1e3
#: Corrections of an offset in a closed loop, and what is no delay.
MOST_CORRECTIONS, _IN_TIME_TICKS = 4, ticks.PER_MS // 20


@dataclass(frozen=True, eq=False)
class Turned:
    """A knob, what it was turned to, and the replay with it.

    Attributes:
        name: As above, or ``all``.
        was, value: What it was turned from and to; None of several.
        error: ``against.total_error`` of the replay.
        removed: Share of the error of the replay without it that is gone; below 0 where there is more.
        advice: What the user does about it.
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


def turned(benchmark: Benchmark, settings: Settings, base: Replayed) -> Iterator[Turned]:
    """Each knob alone, then all together.

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
    yield finish("ttft_offset_ms", 0.0, offset / ticks.PER_MS, _offset_advice(benchmark, base, offset), shifted)
    scale, scaled = fitted_scale(benchmark, own or settings, with_pool)
    offset, together = fitted_offset(benchmark, own or settings, scaled, scale)
    what = f"--step-scale {scale * _base_scale(base):.4g}, {with_pool.run.replica.num_blocks:,} KV blocks"
    yield finish("all", None, None, f"{what} and {offset / ticks.PER_MS:.3g} ms outside of the engine.", together)


def ranked(found: list[Turned]) -> list[Turned]:
    """The single knobs, the one that takes off most first."""
    return sorted((knob for knob in found if knob.name != "all"), key=lambda knob: -knob.removed)


def _turned(
    benchmark: Benchmark,
    before: float,
    name: str,
    was: float | None,
    value: float | None,
    advice: str,
    replayed: Replayed,
) -> Turned:
    error = total_error(compared(benchmark, replayed))
    return Turned(name, was, value, error, (before - error) / before if before else 0.0, advice, replayed)


def fitted_scale(benchmark: Benchmark, settings: Settings, base: Replayed) -> tuple[float, Replayed]:
    """The factor on the steps with which simulated TPOTs are those measured, and the replay with it."""
    ratio = _tpot_ratio(benchmark, base)
    if ratio is None:
        return 1.0, base
    scale, found, _ = _root(partial(_scaled, benchmark, settings), (1.0, base, log(ratio)))
    return scale, found


def _scaled(benchmark: Benchmark, settings: Settings, scale: float) -> tuple[float, Replayed, float]:
    found = replay(benchmark, settings, scale)
    ratio = _tpot_ratio(benchmark, found)
    return scale, found, 0.0 if ratio is None else log(ratio)


Tried = tuple[float, Replayed, float]


def _root(attempt: Callable[[float], Tried], first: Tried) -> Tried:
    """The scale at which the log ratio is 0: from a proportional guess by secants of the logarithms, kept between the
    nearest scales that were too small and too large; the best of all that were tried."""
    best = here = first
    low, high = log(_SMALLEST), log(_LARGEST)
    slope = -1.0
    for _ in range(MOST_RUNS):
        if abs(best[2]) < CLOSE:
            break
        at = log(here[0])
        low, high = (max(low, at), high) if here[2] > 0 else (low, min(high, at))
        guess = at - here[2] / slope
        tried = attempt(exp(guess if low < guess < high else (low + high) / 2))
        step = log(tried[0]) - at
        # A longer step leaves a smaller ratio; anything else is noise of single requests.
        slope = min(-0.1, (tried[2] - here[2]) / step) if step else -1.0
        here = tried
        best = min(best, here, key=lambda one: abs(one[2]))
    return best


def _tpot_ratio(benchmark: Benchmark, replayed: Replayed) -> float | None:
    """Median over requests of measured over simulated TPOT; None where no answer has a second token."""
    measured = benchmark.tpot_s[replayed.times.index]
    both = (measured > 0) & (replayed.tpot_s > 0)
    return float(np.median(measured[both] / replayed.tpot_s[both])) if both.any() else None


def fitted_offset(
    benchmark: Benchmark, settings: Settings, replayed: Replayed, scale: float = 1.0
) -> tuple[int, Replayed]:
    """What passes outside of the engine, in ticks, and the replay behind it; 0 where the engine takes longer alone.

    In a closed loop, where it also makes for fewer requests in the engine, it is corrected a few times; offsets that
    end within one step of the engine, which the request waits for, are the same there.
    """
    offset_ticks = 0
    for _ in range(MOST_CORRECTIONS):
        late_ticks = _late_ticks(benchmark, replayed)
        if abs(late_ticks) < _IN_TIME_TICKS or offset_ticks + late_ticks <= 0:
            break
        offset_ticks += late_ticks
        if benchmark.measured.max_concurrency is None:
            return offset_ticks, replace(replayed, offset_ticks=offset_ticks)
        replayed = replay(benchmark, settings, scale, offset_ticks)
    return offset_ticks, replayed


def _late_ticks(benchmark: Benchmark, replayed: Replayed) -> int:
    """By how much first tokens that waited for few others came later than simulated."""
    served = replayed.times.index
    if not len(served):
        return 0
    others = benchmark.under_way()[served]
    alone = others <= np.quantile(others, 0.25)
    late_s = np.sort((benchmark.measured.ttft_s[served] - replayed.ttft_s)[alone])
    quarter = len(late_s) // 4
    return ticks.from_seconds(float(late_s[quarter : len(late_s) - quarter].mean()))


def _own_pool(benchmark: Benchmark, settings: Settings, base: Replayed) -> Settings | None:
    """The settings with the server's own pool, if it says how large that is."""
    metrics = benchmark.metrics
    if metrics is None or metrics.num_gpu_blocks is None:
        return None
    size = metrics.block_size or base.run.replica.block_size
    pool = {"num_gpu_blocks_override": metrics.num_gpu_blocks, "block_size": size}
    return checked(**settings.as_dict() | pool)


def _is_pool_of(base: Replayed, own: Settings) -> bool:
    return (base.run.replica.num_blocks, base.run.replica.block_size) == (own.num_gpu_blocks_override, own.block_size)


def _base_scale(base: Replayed) -> float:
    """``--step-scale`` of the replay, which of the paper's cost is no 1."""
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
    if base.run.replica.block_size != own.block_size:
        flags += f" --block-size {own.block_size}"
    sizes = f"The server has {there:,} KV blocks where {here:,} are simulated"
    return f"{sizes}: give {flags}, or its log as --startup-log."


def _offset_advice(benchmark: Benchmark, base: Replayed, offset_ticks: int) -> str:
    offset_ms = offset_ticks / ticks.PER_MS
    if offset_ms < 1:
        return "Nothing to speak of passes outside of the engine."
    text = f"{offset_ms:.3g} ms pass before a request reaches the engine (HTTP, tokenizer, network)"
    inside = benchmark.metrics and benchmark.metrics.ttft_s
    way_ms = (benchmark.measured.ttft_s.mean() - inside) * 1e3 if inside else 0
    if way_ms >= 1:
        text += f", {way_ms:.3g} ms of it between the clients and the server's own clock"
    return f"{text}: no setting of the replica; plan for a TTFT objective that is lower by so much."
