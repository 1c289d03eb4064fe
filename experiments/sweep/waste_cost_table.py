"""Cost of each kind of waste for several settings over the same seeds, in requests/s.

For each bucket of waste, the same load runs on the same policy and GPU with the slots of that bucket returned to the
pool: no sequence is charged for them, and the pool has room for that many more. With more room the policy behaves
differently, so the number of returned slots is a fixed point. With s(P) the bucket's mean share of a pool of P blocks
while requests wait, and C blocks in the GPU,

    P (1 - s(P)) = C      the pool P in which everything outside the bucket takes C blocks

The iteration P' = C / (1 - s(P)) runs until P is stable. The balance is exact in the mean over time. It cannot be exact
at every moment, because a sequence that returns a reserved slot needs it when its token comes. If the pools jump over
the fixed point, as with buddy chunks, the result is interpolated linearly between the two neighbouring pools. An empty
bucket costs exactly nothing. If another policy or block size gives the true cost, tests measure the error of this
method. ``free`` and ``cached`` slots are available to every request, so they are not waste.

All requests arrive at the start. The measured time is the time in which some requests wait, before the server drains;
the rate is the number of requests that finish in that time over its length. The result is the cost of waste on a full
server; on a server that is not full, waste costs nothing.

The module runs the simulations and makes the rows, the terminal table and the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import fsum
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ...reports.figures import figures
from ...reports.page.page import Section, write_page
from ...reports.page.table import Table
from ...reports.style.labels import metric_label
from ...sim import Run, Settings, Workload, simulate
from ...sim.config.unread import only_read
from ...sim.metrics.registry import METRICS
from ...sim.metrics.requests import request_times
from ...sim.metrics.views import SLOTS_VIEW
from ...sim.metrics.views import WASTE as _WASTE
from ...sim.types.errors import SettingError, UserError
from ...sim.types.ticks import PER_SECOND
from ...traces import Pacing
from ..runs.inputs import Inputs
from ..runs.output import track
from ..runs.parallel import Workers, as_they_finish
from ..runs.unread import refuse_unread

#: Buckets that can be returned to the pool one by one; ``ALL`` returns all of them, so that only live and free slots remain.
WASTE = _WASTE.buckets
ALL = "all"
#: The pool is stable once it moves by less than this share; the iteration also ends after this many rounds.
_STANDS, _MOST_ROUNDS = 0.002, 12


@dataclass(frozen=True, eq=False)
class Saturated:
    """Results of a server while requests wait.

    Attributes:
        num_blocks: Its pool.
        request_throughput: Requests/s.
        output_throughput: Tokens/s.
        shares: Mean share of the pool over that time, by bucket.
    """

    num_blocks: int
    request_throughput: float
    output_throughput: float
    shares: dict[str, float]

    def share(self, buckets: Sequence[str]) -> float:
        """Share of the pool in some buckets."""
        return fsum(self.shares[bucket] for bucket in buckets)


@dataclass(frozen=True)
class Cost:
    """Cost of a bucket.

    Attributes:
        bucket: One of ``WASTE``, or ``ALL``.
        share: Its mean share of the real pool.
        num_blocks: The pool size at which the slots outside the bucket are nearest to the slots of the GPU.
        charged: Those slots, as a share of the GPU's slots: the accuracy of the fixed point.
        request_throughput, output_throughput: Requests/s and tokens/s without the bucket.
    """

    bucket: str
    share: float
    num_blocks: int
    charged: float
    request_throughput: float
    output_throughput: float


def waste_cost(settings: Settings, work: Workload) -> tuple[Saturated, list[Cost]]:
    """The server as it is, and the cost of each kind of waste that occurs.

    Args:
        work: The requests; their arrival times are ignored, all arrive at the start.

    Raises:
        UserError: As ``simulate``; a request is larger than the pool, no request ever waits, or no request finishes
            while others wait.
    """
    work = replace(work, arrival_ticks=np.zeros(len(work), dtype=np.int64), users=None)
    base = saturated(settings, work)
    wasted = [bucket for bucket in WASTE if base.shares[bucket]]
    kinds = [(bucket, [bucket]) for bucket in wasted] + ([(ALL, wasted)] if len(wasted) > 1 else [])
    return base, [_without(settings, work, base, *kind) for kind in kinds]


def _without(settings: Settings, work: Workload, base: Saturated, name: str, gone: list[str]) -> Cost:
    """The fixed point, from every pool tried by the iteration."""
    tried = {base.num_blocks: base}
    server = base
    for _ in range(_MOST_ROUNDS):
        num_blocks = round(base.num_blocks / (1 - server.share(gone)))
        if num_blocks in tried or abs(num_blocks - server.num_blocks) < _STANDS * num_blocks:
            break
        server = tried[num_blocks] = saturated(replace(settings, num_gpu_blocks_override=num_blocks), work)
    charged = {each: each.num_blocks * (1 - each.share(gone)) / base.num_blocks for each in tried.values()}
    nearest = min(charged, key=lambda each: abs(charged[each] - 1))
    requests, outputs = (_at_fixed_point(charged, rate) for rate in ("request_throughput", "output_throughput"))
    return Cost(name, base.share(gone), nearest.num_blocks, charged[nearest], requests, outputs)


def _at_fixed_point(charged: dict[Saturated, float], rate: str) -> float:
    """A rate at the fixed point: interpolated between the pools on either side, or that of the nearest pool."""
    below, above = ({each: at for each, at in charged.items() if (at <= 1) == low} for low in (True, False))
    low = max(below, key=below.__getitem__)
    if not above:
        return getattr(low, rate)
    high = min(above, key=above.__getitem__)
    part = (1 - below[low]) / (above[high] - below[low])
    return (1 - part) * getattr(low, rate) + part * getattr(high, rate)


def saturated(settings: Settings, work: Workload) -> Saturated:
    """Serve requests that all arrive at the start, and measure the rates while some wait.

    Raises:
        UserError: As ``waste_cost``.
    """
    run = simulate(settings, work)
    if run.refused.any():
        first = int(np.flatnonzero(run.refused)[0])
        raise UserError(
            f"request {first} needs a pool of {run.smallest_pool_blocks[first]} blocks, and there are"
            f" {run.replica.num_blocks}; leave it out, or give a larger pool"
        )
    end_ticks = _full_until(run)
    window = run.accounts.window(0, end_ticks)
    done = request_times(run)
    done_by_then = done.finish_ticks <= end_ticks
    if not done_by_then.any():
        raise UserError(
            f"none of {len(run.workload)} requests is finished while others wait, so there is no rate to report; give more"
            " by num_prompts"
        )
    per_second = PER_SECOND / end_ticks
    return Saturated(
        num_blocks=run.replica.num_blocks,
        request_throughput=int(done_by_then.sum()) * per_second,
        output_throughput=int(done.output_tokens[done_by_then].sum()) * per_second,
        shares={bucket: window.share_of_time(bucket) for bucket in window.slot_ticks},
    )


def _full_until(run: Run) -> int:
    """Time at which the last waiting request is admitted."""
    rows = run.log.rows
    waiting = np.flatnonzero(rows["waiting"])
    if not len(waiting):
        raise UserError(
            f"the pool of {run.replica.num_blocks} blocks holds all {len(run.workload)} requests at once, so that no"
            " waste costs anything; give more by num_prompts"
        )
    last = int(waiting[-1])
    return int(rows["start_ticks"][last] + rows["ticks"][last])


Row = dict[str, Any]
#: Bucket name of the row with nothing returned.
AS_IT_IS = "none"
_HOUR_S, _MILLION = 3600, 1_000_000
_TITLE = "Cost of waste"
#: The basis of the figures.
BASIS = (
    "All requests are there at the start, and what is done while some wait counts. Without a bucket the pool is so"
    " much larger that all but that bucket takes what there is, in the mean over time."
)


@dataclass(frozen=True)
class Side:
    """One side of the comparison: settings and their label."""

    name: str
    inputs: Inputs


def waste_costs(sides: Sequence[Side], seeds: int, workers: Workers, price: float | None = None) -> list[Row]:
    """One row for each side and bucket; the first row of each side has nothing returned. Values are means over the seeds.

    Seeds start at each side's own.

    Args:
        price: Price of one GPU for an hour; None without a price.

    Raises:
        UserError: As ``waste_cost``; a setting that no side reads, before anything is run.
    """
    everything = (_seeded(side.inputs, 0) for side in sides)
    refuse_unread((inputs, inputs.workload(inputs.lengths())) for inputs in everything)
    places = product(range(len(sides)), range(seeds))
    jobs = [(place, number, _seeded(sides[place].inputs, number)) for place, number in places]
    found = dict(track(as_they_finish(_run, jobs, len(jobs), workers, light=True), "runs", len(jobs)))
    rows: list[Row] = []
    for place, side in enumerate(sides):
        rows += _rows(side, [found[place, number] for number in range(seeds)], price)
    return rows


def _seeded(inputs: Inputs, number: int) -> Inputs:
    """All requests at once, drawn by one of the seeds."""
    settings = inputs.settings
    everything = Pacing(request_rate=float("inf"))
    return replace(inputs, settings=replace(settings, seed=settings.seed + number), pacing=everything)


def _run(place: int, number: int, inputs: Inputs) -> tuple[tuple[int, int], tuple[Saturated, dict[str, Cost]]]:
    work = inputs.workload(inputs.lengths())
    base, costs = waste_cost(only_read(inputs.settings, work), work)
    return (place, number), (base, {cost.bucket: cost for cost in costs})


def _rows(side: Side, runs: Sequence[tuple[Saturated, dict[str, Cost]]], price: float | None) -> list[Row]:
    chosen = side.inputs.settings
    hour = None if price is None else price * chosen.tensor_parallel_size * chosen.pipeline_parallel_size
    bases = [base for base, _ in runs]
    rows = [_row(side.name, AS_IT_IS, [0.0] * len(runs), bases, bases, hour)]
    for bucket in dict.fromkeys(bucket for _, costs in runs for bucket in costs):
        # A seed without slots in the bucket has no cost for it.
        without = [costs.get(bucket, base) for base, costs in runs]
        shares = [costs[bucket].share if bucket in costs else 0.0 for _, costs in runs]
        rows.append(_row(side.name, bucket, shares, without, bases, hour))
    return rows


def _row(
    name: str,
    bucket: str,
    shares: Sequence[float],
    servers: Sequence[Saturated | Cost],
    bases: Sequence[Saturated],
    hour: float | None,
) -> Row:
    gains = [server.request_throughput / base.request_throughput for server, base in zip(servers, bases, strict=True)]
    tokens = fmean(server.output_throughput for server in servers)
    return {
        "side": name,
        "without": bucket,
        "share_pct": 100 * fmean(shares),
        "num_gpu_blocks": fmean(server.num_blocks for server in servers),
        "charged_pct": 100 * fmean(getattr(server, "charged", 1.0) for server in servers),
        "request_throughput": fmean(server.request_throughput for server in servers),
        "output_throughput": tokens,
        "gain": fmean(gains),
        "least_gain": min(gains),
        "most_gain": max(gains),
        "cost_per_million_output_tokens": None if hour is None else hour / _HOUR_S / tokens * _MILLION,
    }


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """The terminal tables, each with a column per side and a line per bucket.

    The tables show the gain in requests/s without the bucket, its share, and with a price the cost of a million tokens
    without it.
    """
    rate = METRICS["request_throughput"]
    yield _table(rows, rate.heading, lambda row: rate.text(row[rate.path]), lambda row: f"x {row['gain']:.2f}")
    if any(row["without"] != AS_IT_IS for row in rows):
        yield _table(rows, "% of the pool", None, lambda row: f"{row['share_pct']:.1f}")
    if rows[0]["cost_per_million_output_tokens"] is not None:
        yield _table(rows, "per million output tokens", _money, _money)


def _money(row: Row) -> str:
    return f"{row['cost_per_million_output_tokens']:,.2f}"


def _table(rows: Sequence[Row], what: str, base: Callable[[Row], str] | None, cell: Callable[[Row], str]) -> Table:
    sides = list(dict.fromkeys(row["side"] for row in rows))
    at = {(row["side"], row["without"]): row for row in rows}
    found = Table(what, *(side.replace("=", "=\n").replace(",", ",\n") for side in sides))
    if base is not None:
        found.add_row("as it is", *(base(at[side, AS_IT_IS]) for side in sides))
    for bucket in (*WASTE, ALL):
        mine = [at.get((side, bucket)) for side in sides]
        if any(mine):
            name = metric_label(bucket)
            found.add_row(f"without {name}" if base else name, *(cell(row) if row else "-" for row in mine))
    return found


def definitions(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Label and definition of each kind of waste in the rows."""
    return SLOTS_VIEW.definitions(bucket for bucket in WASTE if any(row["without"] == bucket for row in rows))


def page(rows: Sequence[Row], load: str, path: str | PathLike[str]) -> Path:
    """Write the rows as a page, and print its path."""
    return write_page(path, _TITLE, load, [Section(_TITLE, BASIS, [figures.waste_cost(rows)])])


def check(price: float | None) -> None:
    """Refuse a price that is not positive and finite."""
    if price is not None and not 0 < price < float("inf"):
        raise SettingError("price", price, "must be positive: what an hour of one GPU costs")
