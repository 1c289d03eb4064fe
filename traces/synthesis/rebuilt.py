"""Requests with the statistics of a benchmark's summary, which has no list of them.

lengths    by percentiles and the mean: between two percentiles as in ``traces.synthesis.marginal``, all strata with the
           same exponent, so that the mean is the stated one; by mean and deviation: lognormal; by the mean alone: all equal
ranks      even, not drawn: n requests have the stated mean and total exactly; the order, and which output belongs to
           which prompt, are drawn
arrivals   at a rate: drawn gaps, scaled so that their mean is the one of the rate, as vLLM's client scales them; all at
           0 if all are sent at once; none in a closed loop, where an answer releases the next request
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, log, log1p, sqrt
from os import fspath
from pathlib import Path
from statistics import NormalDist

import numpy as np

from ...sim.types.errors import TraceError
from ..arrivals.pacing import unit_gaps
from ..arrivals.streams import stream
from ..clients.load import EVEN
from ..clients.summary import REQUESTS, BenchmarkSummary, Statistics
from ..parsing.table import shown
from .marginal import inverse

#: Percentiles from which on the shortest and the longest lengths are known.
_LOW, _HIGH = 10, 90
#: Bounds of the place of a mean between two percentiles, for a mean that does not fit its percentiles.
_LEAST, _MOST = 0.02, 0.98


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """Requests of a summary.

    Attributes:
        prompt_tokens, output_tokens: Lengths, int64 [n], at least 1.
        arrival_s: Seconds from the first request on, float64 [n], ascending; None in a closed loop.
        max_concurrency: Most requests in flight; None without a limit.
        assumed: One line on what is in the file and what is assumed.
    """

    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    arrival_s: np.ndarray | None
    max_concurrency: int | None
    assumed: str


def rebuilt(summary: BenchmarkSummary) -> Rebuilt:
    """The requests of a summary, always the same.

    Raises:
        TraceError: The file lacks the lengths, or what arrivals follow from.
    """
    n, rng, load = summary.requests, stream(0, "rebuilt requests"), summary.load
    both = {"prompts": summary.prompts, "outputs": output_lengths(summary)}
    lengths = [rng.permutation(whole_lengths(summary, name, of, n)) for name, of in both.items()]
    arrival_s, sent = None, f"sent as a closed loop of {load.max_concurrency} requests in flight"
    rate = arrival_rate(summary)
    if rate is not None:
        arrival_s = arrivals(n, rate, load.burstiness)
        sent = _sent(summary, rate)
    words = [_in_words(what, of, of is not getattr(summary, what)) for what, of in both.items()]
    assumed = "; ".join([*words, sent, *summary.assumed])
    name = Path(fspath(summary.path)).name
    line = f"{name}: a summary of {summary.title} without its requests. {n:,} are rebuilt: {assumed}."
    return Rebuilt(lengths[0], lengths[1], arrival_s, load.max_concurrency, line)


def output_lengths(summary: BenchmarkSummary) -> Statistics:
    """The statistics of the outputs, with the deviation that the latencies imply if the file has only their mean."""
    of, found = summary.outputs, summary.latencies
    if of.mean is None or of.std is not None or of.percentiles or not {"ttft", "tpot", "e2el"} <= found.keys():
        return of
    first, last, gap_s = found["ttft"].std, found["e2el"].std, found["tpot"].mean
    if first is None or last is None or not gap_s or last <= first:
        return of
    return replace(of, std=sqrt(last * last - first * first) / gap_s)


def arrival_rate(summary: BenchmarkSummary) -> float | None:
    """Requests/s at which requests arrive, inf for all at once; None if only answers release them.

    Without a rate and a limit it is the rate at which requests were answered.

    Raises:
        TraceError: The file says nothing about it.
    """
    load = summary.load
    if load.max_concurrency is not None and load.request_rate in (None, inf):
        return None
    if load.request_rate is not None:
        return load.request_rate
    answered = summary.throughputs.get(REQUESTS)
    if not answered and load.duration_s:
        answered = summary.requests / load.duration_s
    if not answered:
        remedy = (
            "is missing, and so are the concurrency and the duration; give --request-rate by a trace of the requests"
        )
        raise TraceError(summary.path, None, "request_rate", None, remedy)
    return answered


def arrivals(n: int, rate: float, burstiness: float) -> np.ndarray:
    """Seconds at which ``n`` requests arrive, float64 [n], from 0 on, at ``rate`` requests/s on average."""
    if rate == inf or n == 1:
        return np.zeros(n)
    gaps = np.ones(n) if burstiness >= EVEN else unit_gaps(n, burstiness, stream(0, "arrivals"))
    passed = np.cumsum(gaps)
    passed -= passed[0]
    return passed * ((n - 1) / rate / passed[-1])


def whole_lengths(summary: BenchmarkSummary, name: str, of: Statistics, n: int) -> np.ndarray:
    """``n`` lengths with these statistics, int64 [n], ascending.

    Raises:
        TraceError: The file has no lengths, or percentiles that do not ascend.
    """
    values, mean = list(of.percentiles.values()), of.mean
    if any(low > high for low, high in zip(values, values[1:])):
        remedy = "are percentiles that do not ascend; fetch the file again"
        raise TraceError(summary.path, None, f"lengths of {name}", shown(values), remedy)
    if not of or mean == 0:
        remedy = "are missing, and so is their total; run the client so that it counts tokens"
        raise TraceError(summary.path, None, f"lengths of {name}", mean, remedy)
    ranks = (np.arange(n) + 0.5) / n
    if _has_percentiles(of):
        lengths = _by_percentiles(of, ranks)
    elif mean is not None and of.std:
        lengths = _by_deviation(mean, of.std, ranks)
    else:
        lengths = np.full(n, values[0] if mean is None else mean)
    return _rounded(lengths, None if mean is None else round(mean * n))


def has_spread(of: Statistics) -> bool:
    """Whether lengths differ, by the file's percentiles or its deviation."""
    return _has_percentiles(of) or bool(of.std)


def _has_percentiles(of: Statistics) -> bool:
    """Whether the percentiles reach from the shortest lengths to the longest; the middle alone says little of either."""
    return bool(of.percentiles) and min(of.percentiles) <= _LOW and max(of.percentiles) >= _HIGH


def _by_percentiles(of: Statistics, ranks: np.ndarray) -> np.ndarray:
    """The lengths at ``ranks``, float64 [n]: below the first percentile and above the last they are equal."""
    places = [(rank / 100, value) for rank, value in of.percentiles.items()]
    places = [*([(0.0, places[0][1])] if places[0][0] else []), *places]
    places += [(1.0, places[-1][1])] if places[-1][0] < 1 else []
    levels, values = np.array(places).T
    low, widths = values[:-1], np.diff(values)
    share = 0.5
    if of.mean is not None and (spread := float(np.diff(levels) @ widths)):
        share = (of.mean - float(np.diff(levels) @ low)) / spread
    return inverse(levels.tolist(), values.tolist(), (low + widths * np.clip(share, _LEAST, _MOST)).tolist(), ranks)


def _is_uniform(mean: float, std: float) -> bool:
    """Whether lengths with this mean and deviation may be uniform, as those of vLLM's data set ``random`` are."""
    return sqrt(3) * std <= mean


def _by_deviation(mean: float, std: float, ranks: np.ndarray) -> np.ndarray:
    """The lengths at ``ranks``, float64 [n]: uniform where that is possible, else lognormal."""
    if _is_uniform(mean, std):
        return mean + sqrt(3) * std * (2 * ranks - 1)
    variance = log1p((std / mean) ** 2)
    normal = NormalDist(log(mean) - variance / 2, sqrt(variance))
    return np.exp([normal.inv_cdf(rank) for rank in ranks.tolist()])


def _rounded(lengths: np.ndarray, total: int | None) -> np.ndarray:
    """Whole lengths of at least 1 with this total, where it allows that."""
    total = round(float(lengths.sum())) if total is None else total
    scaled = lengths * (total / lengths.sum())
    whole = np.maximum(np.floor(scaled), 1).astype(np.int64)
    missing = total - int(whole.sum())
    if missing > 0:
        # The largest remainders are rounded up.
        largest = np.argsort(whole - scaled, kind="stable")[:missing]
        whole[largest] += 1
    return np.sort(whole)


def _sent(summary: BenchmarkSummary, rate: float) -> str:
    load = summary.load
    limit = "" if load.max_concurrency is None else f", at most {load.max_concurrency:,} in flight"
    if rate == inf:
        return f"all sent at once{limit}"
    gaps = {1.0: "Poisson", EVEN: "even gaps"}.get(load.burstiness, f"burstiness {load.burstiness:g}")
    if load.request_rate is None:
        return f"arrivals drawn at the {rate:.4g} requests/s that were answered ({gaps}), as the file has no rate and no concurrency"
    return f"arrivals drawn at {rate:.4g} requests/s ({gaps}){limit}"


def _in_words(what: str, of: Statistics, implied: bool) -> str:
    values = [round(value) for value in of.percentiles.values()] or [0]
    low, high = min(values), max(values)
    if _has_percentiles(of) and low < high:
        mean = "" if of.mean is None else f", {of.mean:,.4g} on average"
        between = "uniform" if of.percentiles.keys() == {0.0, 100.0} else f"by {len(of.percentiles)} percentiles"
        return f"{what} of {low:,} to {high:,} tokens{mean}, {between}"
    value = of.mean if of.mean is not None else next(iter(of.percentiles.values()))
    if of.mean is not None and of.std:
        shape = "uniform" if _is_uniform(of.mean, of.std) else "lognormal"
        by = "TTFT, TPOT and E2EL imply" if implied else "the file has"
        return f"{what} of {value:,.4g} tokens on average ({shape} with a deviation of {of.std:,.3g}, which {by})"
    only = "" if _has_percentiles(of) else f", as the file has only their {'median' if of.mean is None else 'mean'}"
    return f"{what} all of {value:,.6g} tokens{only}"
