"""Whether a client sent its requests in a closed loop, where its file does not say so.

It did if nearly all requests were sent at once when another one had ended, and brought the requests in flight back to their
highest number: that many users.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Requests of each user, at least, and the share of the requests, that show a closed loop; and how soon one follows another.
_LEAST_TURNS, _NEARLY_ALL, _AT_ONCE_S = 3, 0.9, 0.05
#: Coefficient of variation of the gaps between the requests of several users, at least.
_LEAST_CV = 0.1


def users(starts_s: Sequence[float], ends_s: Sequence[float]) -> int | None:
    """Users of a closed loop that sent the requests; None for an open loop, and if there are too few requests to say."""
    starts, ends = np.sort(np.array(starts_s, dtype=np.float64)), np.sort(np.array(ends_s, dtype=np.float64))
    ended = np.searchsorted(ends, starts, side="right")
    in_flight = np.arange(1, len(starts) + 1) - ended
    found = int(in_flight.max(initial=0))
    if len(starts) < _LEAST_TURNS * found or not found:
        return None
    gaps = np.diff(starts[found:])
    if found > 1 and gaps.std() < _LEAST_CV * gaps.mean():
        # At a constant rate as many requests are in flight as in a closed loop.
        return None
    after = starts[found:] - ends[np.maximum(ended[found:] - 1, 0)]
    follows = (in_flight[found:] == found) & (after <= _AT_ONCE_S) & (ended[found:] > 0)
    return found if follows.mean() >= _NEARLY_ALL else None
