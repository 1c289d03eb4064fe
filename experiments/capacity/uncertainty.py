"""What step times and the KV cache of a candidate may be: by measured servers, and by the interval of its start (``chance``)."""

from __future__ import annotations

from math import exp, log
from statistics import NormalDist
from typing import Literal

from ...sim import Settings
from ...sim.types.optional import not_none
from ..measured.evidence import evidence
from ..measured.intervals import SHARE
from ..measured.servers_like import any_server
from .candidates import Candidate
from .chance import QUANTILES, Uncertainty
from .measurement import after_a_benchmark, spread_text
from .trials import Memory


def uncertainty(candidate: Candidate) -> Uncertainty:
    """What is not known of a candidate that starts, and of the one that decodes beside it."""
    own = _of_one(candidate)
    return own if candidate.decode is None else own.beside(_of_one(candidate.decode))


def _of_one(candidate: Candidate) -> Uncertainty:
    factors, basis = step_interval(not_none(candidate.settings))
    scales = (1.0,) if factors is None else quantiles(*factors)
    return Uncertainty(scales, _memories(candidate), basis)


def step_interval(chosen: Settings) -> tuple[tuple[float, float] | None, str]:
    """Lowest and highest step time over the predicted one, for ``SHARE`` of the servers, and by what; None where it is taken as given."""
    if chosen.step_scale is not None:
        return after_a_benchmark(), spread_text()
    found = evidence(chosen)
    if found.like is None:
        # A calibration, a server's constants, the paper: step times of the user's choice.
        return None, "step times taken as given"
    factors = next((each.factors for each in found.like.predicted if each.metric == "tpot" and each.factors), None)
    if factors is None:
        return any_server(), "no measured server is like this: the interval of all measured servers"
    return factors, "the interval of servers like this"


def quantiles(low: float, high: float) -> tuple[float, ...]:
    """``QUANTILES`` of a factor with the interval of ``SHARE``, its logarithm taken for normal."""
    normal, end = NormalDist(), NormalDist().inv_cdf((1 + SHARE) / 2)
    middle, half = log(low * high) / 2, log(high / low) / 2
    return tuple(exp(middle + half * normal.inv_cdf(each) / end) for each in QUANTILES)


def _memories(candidate: Candidate) -> tuple[Memory, ...]:
    server, chosen = candidate.started, not_none(candidate.settings)
    likely, blocks = server.pool().num_tokens, not_none(chosen.num_gpu_blocks_override)
    longest = not_none(chosen.max_model_len)
    found = []
    outlooks: tuple[Literal["low", "likely", "high"], ...] = ("low", "likely", "high")
    for outlook in outlooks:
        tokens = server.pool(outlook).num_tokens
        fits = min(longest, tokens) if server.launch.fits_length else longest
        found.append(Memory(blocks * tokens // likely, fits))
    low, middle, high = found
    return (middle,) if low == high else (low, middle, high)
