"""The division of a fleet into replicas that only prefill and replicas that only decode.

rate of p     the highest rate of n replicas of which p prefill, with the first seed: it rises with p while prefills
              limit the fleet, and falls once decodes do
share         p / n of the highest rate, found by bisection on its slope, for the fleet that the search begins with; where the two sides
              have settings of their own, from what each needs (``pairs``)
p of n        that of which the side that is shorter of its share is longest; at least 1 and at most n - 1
"""

from __future__ import annotations

from functools import cache

from ...sim.cluster import Cluster, Pair
from ...sim.config.settings import Settings
from ...sim.types.errors import SettingError
from ..runs.grid import NONE
from ..runs.slo_check import Goal
from .fleet import check_fleet, highest_rate
from .load import Load

#: The best share of replicas that prefill.
AUTO = "auto"
#: Most replicas of the fleet that the share is found for.
_MOST_TRIED = 16


def fewest_replicas(prefill_replicas: str) -> int:
    """The smallest fleet of a value of ``--prefill-replicas``.

    Raises:
        SettingError: It is neither none, auto nor a positive number.
    """
    if prefill_replicas == NONE:
        return 1
    if prefill_replicas == AUTO:
        return 2
    if not prefill_replicas.isdecimal() or not int(prefill_replicas):
        raise SettingError("prefill_replicas", prefill_replicas, "must be none, auto or a number of 1 or more")
    return int(prefill_replicas) + 1


def divided(
    replicas: int, router: str, prefill_replicas: str, share: float | None = None, decode: Settings | None = None
) -> Cluster:
    """A fleet of so many replicas. A router before one replica chooses nothing, so such a fleet has the default router.

    Args:
        prefill_replicas: As the flag.
        share: Share of the replicas that prefill, for auto.
        decode: Settings of the replicas that only decode, where they have others.
    """
    if prefill_replicas == NONE:
        return Cluster(num_replicas=replicas, router=router if replicas > 1 else Cluster.router)
    prefill = prefilling(replicas, share or 0.0) if prefill_replicas == AUTO else int(prefill_replicas)
    prefill = min(max(1, prefill), replicas - 1)
    router = router if prefill > 1 else Cluster.router
    fleet = Cluster(prefill_replicas=prefill, decode_replicas=replicas - prefill, router=router)
    return fleet if decode is None else Pair(**fleet.as_dict(), decode=decode)


def prefilling(replicas: int, share: float) -> int:
    """How many of so many replicas prefill, for a share between 0 and 1: of two that serve alike the fewer."""
    below = int(share * replicas)
    lower, upper = (min(each * (1 - share), (replicas - each) * share) for each in (below, below + 1))
    return min(max(1, below if lower >= upper else below + 1), replicas - 1)


def best_share(
    settings: Settings, load: Load, goal: Goal, seed: int, replicas: int, router: str, wanted: float
) -> float:
    """The share of replicas that prefill with which a fleet takes the highest rate.

    Args:
        replicas: Size of the fleet that the wanted rate needs, about; 2 or more.
        wanted: Requests/s of that fleet.
    """
    size = min(replicas, _MOST_TRIED)
    rate = wanted * size / replicas

    @cache
    def found(prefill: int) -> float:
        """The highest rate; where none meets the goal, less than any rate by the number of requests that miss it."""
        cluster = divided(size, router, str(prefill))
        highest = highest_rate(settings, load, goal, seed, cluster, rate, None)
        if not highest:
            missing = check_fleet(settings, load.draw(seed, size).at(rate), cluster, goal)
            highest = missing.met - missing.counted
        return highest

    low, high = 1, size - 1
    while low < high:
        middle = (low + high) // 2
        if found(middle) < found(middle + 1):
            low = middle + 1
        else:
            high = middle
    return low / size
