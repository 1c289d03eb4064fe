"""What each kind of waste costs: the requests/s of the same load, policy and GPU with that bucket's slots given back.

Slots of a bucket that are given back are charged to no sequence: at every moment the pool has room for so many
more. Without them the policy would do something else, so what they are is a fixed point. With s(P) the bucket's mean
share of a pool of P blocks while requests wait, and C blocks in the GPU,

    P (1 - s(P)) = C      the pool P in which all but that bucket takes C blocks: P' = C / (1 - s(P)), until it stands

It is exact in the mean over time, not at every moment. It cannot be exact at every moment: a sequence that
gives a reserved slot away needs it when its token comes. Where pools jump over the fixed point, as those of buddy chunks do, what is said lies
on the line between the two beside it. A bucket that is empty costs nothing, exactly. Where the truth is known, as
another policy or block size, tests say how far off this is. ``free`` and ``cached`` slots are available to every
request: no sequence gives them back.

All requests are there at the start. What counts is the time in which some wait, before the server drains: requests
that finish in it, over its length. So it is what memory costs a server that is full; one that is not it costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...sim.engine.run import Run, simulate
from ...sim.engine.settings import Settings
from ...sim.metrics.requests import request_times
from ...sim.types.errors import UserError
from ...sim.types.ticks import PER_SECOND
from ...sim.workload.workload import Workload

#: Buckets that can be given back, one by one; ``ALL`` are they all at once, so that only live and free slots remain.
WASTE = ("reserved", "over_estimate", "block_tail", "round_up", "finished_hold", "stranded")
ALL = "all"
#: The pool stands once it moves by less than this share, or after so many rounds.
_STANDS, _MOST_ROUNDS = 0.002, 12


@dataclass(frozen=True, eq=False)
class Saturated:
    """A server for which some always wait.

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
        """What some buckets take of the pool."""
        return sum(self.shares[bucket] for bucket in buckets)


@dataclass(frozen=True)
class Cost:
    """What a bucket costs.

    Attributes:
        bucket: Of ``WASTE``, or ``ALL``.
        share: Its mean share of the pool that there is.
        num_blocks: The pool size at which the slots outside the bucket are nearest to the slots of the GPU.
        charged: Those slots, as a share of what there is: how well the pool stands.
        request_throughput, output_throughput: Requests/s and tokens/s without it.
    """

    bucket: str
    share: float
    num_blocks: int
    charged: float
    request_throughput: float
    output_throughput: float


def waste_cost(settings: Settings, work: Workload) -> tuple[Saturated, list[Cost]]:
    """The server as it is, and what each kind of waste costs it, those that are there.

    Args:
        work: When its requests come does not count: all are there at the start.

    Raises:
        UserError: As ``simulate``; a request that the pool cannot hold, or so few that none ever waits,
            or that none is finished while some do.
    """
    work = replace(work, arrival_ticks=np.zeros(len(work), dtype=np.int64), users=None)
    base = saturated(settings, work)
    wasted = [bucket for bucket in WASTE if base.shares[bucket]]
    kinds = [(bucket, [bucket]) for bucket in wasted] + ([(ALL, wasted)] if len(wasted) > 1 else [])
    return base, [_without(settings, work, base, *kind) for kind in kinds]


def _without(settings: Settings, work: Workload, base: Saturated, name: str, gone: list[str]) -> Cost:
    """The fixed point, from every pool that was tried on the way."""
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
    """A rate where as much is charged as there is: between the pools beside it, or of the nearest."""
    below, above = ({each: at for each, at in charged.items() if (at <= 1) == low} for low in (True, False))
    low = max(below, key=below.__getitem__)
    if not above:
        return getattr(low, rate)
    high = min(above, key=above.__getitem__)
    part = (1 - below[low]) / (above[high] - below[low])
    return (1 - part) * getattr(low, rate) + part * getattr(high, rate)


def saturated(settings: Settings, work: Workload) -> Saturated:
    """Serve requests that are all there at the start, and see what is done while some wait.

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
    """When the last request that waits is taken."""
    rows = run.log.rows
    waiting = np.flatnonzero(rows["waiting"])
    if not len(waiting):
        raise UserError(
            f"the pool of {run.replica.num_blocks} blocks holds all {len(run.workload)} requests at once, so that no"
            " waste costs anything; give more by num_prompts"
        )
    last = int(waiting[-1])
    return int(rows["start_ticks"][last] + rows["ticks"][last])
