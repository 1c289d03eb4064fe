"""The fewest replicas that can serve a rate, whatever the runs say: by the data sheet of their GPUs (``sim.cost.ideal``).

At a rate far above what a replica serves, the requests of a run all arrive at once and are over soon: a burst, which a few
replicas serve within the objectives, and a load that lasts they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from ...sim.config.unread import only_read
from ...sim.cost.ideal import IdealReplica
from ...sim.engine.replica import build
from ...sim.types.optional import not_none
from ...sim.workload.workload import Workload
from .answer import Answer
from .candidates import Candidate
from .prices import Prices
from .trials import MOST_REPLICAS

#: Tolerance for the rounding of floats.
_ROUNDING = 1e-9
#: Most replicas that are counted, so that all their GPUs are a float; and from which number on they are written by their magnitude.
_MOST, _MOST_WRITTEN = 1e300, 10**15
#: What a number of replicas follows from.
BY_DATA_SHEET = "by the bandwidth and the flops of the data sheet"
BY_SATURATION = "by the rate of a replica that always has requests waiting"


def ideal_replica(candidate: Candidate) -> IdealReplica:
    """What bounds the rate of a replica of a candidate that starts."""
    launch, chosen = candidate.started.launch, not_none(candidate.settings)
    limits = build(only_read(chosen)).policy.limits
    drafts = 0 if launch.speculative is None else launch.speculative.num_speculative_tokens
    return IdealReplica(
        launch.model, launch.gpu, launch.tensor_parallel, launch.deployment, limits.max_num_seqs, 1 + drafts
    )


def fewest(candidate: Candidate, work: Workload, wanted: float, attainment: float) -> int:
    """The fewest replicas that serve a share of the requests of a load, whichever these are, at a rate.

    Args:
        work: Requests of the load.
        wanted: The rate, requests/s.
        attainment: The share.
    """
    served = ceil(attainment * len(work) - _ROUNDING)
    least_s = max(float(np.sort(each)[:served].sum()) for each in ideal_replica(candidate).seconds(work)) / len(work)
    return max(1, ceil(min(wanted * least_s, _MOST) * (1 - _ROUNDING)))


def too_many(candidate: Candidate, replicas: int, wanted: float | None, why: str = BY_DATA_SHEET) -> str:
    """Why no fleet of a candidate is simulated, which needs at least so many replicas."""
    return (
        f"{not_none(wanted):.3g} requests/s need at least {whole(replicas)} replicas"
        f" ({whole(replicas * candidate.num_gpus)} GPUs) {why}; a plan simulates fleets of up to {MOST_REPLICAS:,}"
    )


def least_headline(answers: Sequence[Answer], prices: Prices) -> str:
    """The answer where every candidate needs more replicas than a plan simulates: a bound of the cheapest one."""

    def per_hour(answer: Answer) -> float:
        launch = answer.candidate.started.launch
        return not_none(answer.least_replicas) * launch.num_gpus * prices.of(launch.gpu.name)

    best = min(answers, key=per_hour)
    gpus = whole(not_none(best.least_replicas) * best.candidate.num_gpus)
    return f"Buy at least {gpus} x {best.candidate.started.launch.gpu.name}: {best.error}, so that this is a bound and no plan."


def whole(count: int) -> str:
    """A number of replicas or GPUs as text."""
    return f"{count:,}" if count < _MOST_WRITTEN else f"{count:.3g}"
