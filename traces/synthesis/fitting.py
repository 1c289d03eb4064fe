"""Fits a load to a trace, and draws requests from a load (``traces.synthesis.load`` describes a load).

Gaps follow a Gaussian copula: rank = Phi(z) with z[i] = sqrt(s) * a[i] + sqrt(1 - s) * noise[i], where ``a`` is an
autoregression that decays to 1/e over ``gaps`` gaps. The correlation of two ranks is therefore about s * exp(-lag / gaps).

Draws are stratified: each n-th of [0, 1) contains one of the n ranks, in random order. A short draw therefore has the
load's means, too.
"""

from __future__ import annotations

import numpy as np

from ...sim.types import ticks
from ...sim.types.errors import SettingError
from ..arrivals.streams import stream
from ..parsing.times import LATEST_S, to_ticks
from ..types.trace import Trace, require_count
from .load import GRID, VERSION, Arrivals, Load, Marginal
from .marginal import ranks_of, stratified
from .reuse import draw_reuse, fit_reuse

#: Lags, in gaps, at which correlations are computed, and candidate decay times in gaps.
_LAGS, _FADES = 2 ** np.arange(9), 2.0 ** np.arange(13)
_FEWEST_GAPS = 1024


def fit(trace: Trace) -> Load:
    """The load fitted to a trace, with shared prefixes if the contents of its prompts were read."""
    bands = [ranks_of(lengths) * GRID // len(trace) for lengths in (trace.prompt_tokens, trace.output_tokens)]
    grid = np.bincount(bands[0] * GRID + bands[1], minlength=GRID * GRID).reshape(GRID, GRID)
    lengths = Marginal.of(trace.prompt_tokens), Marginal.of(trace.output_tokens)
    rank_grid, arrivals = tuple(map(tuple, grid.tolist())), _arrivals(trace)
    return Load(VERSION, trace.name, len(trace), *lengths, rank_grid, arrivals, fit_reuse(trace))


def _arrivals(trace: Trace) -> Arrivals | None:
    if trace.arrival_ticks is None or trace.arrival_ticks[0] == trace.arrival_ticks[-1]:
        return None
    instants, batches = np.unique(trace.arrival_ticks, return_counts=True)
    gaps_s = np.diff(instants) / ticks.PER_SECOND
    return Arrivals(Marginal.of(gaps_s), Marginal.of(batches), *_persistence(gaps_s))


def _persistence(gaps_s: np.ndarray) -> tuple[float, float]:
    """The s and the decay in gaps for which ``s * exp(-lag / gaps)`` is closest to the correlations of the ranks."""
    if len(gaps_s) < _FEWEST_GAPS:
        return 0.0, 1.0
    _, inverse_places, counts = np.unique(gaps_s, return_inverse=True, return_counts=True)
    # Equal gaps share one rank, the middle of their ranks.
    ranks = (np.cumsum(counts) - counts / 2)[inverse_places]
    ranks = (ranks - ranks.mean()) / max(ranks.std(), 1e-9)
    found = np.array([(ranks[:-lag] * ranks[lag:]).mean() for lag in _LAGS])
    shapes = np.exp(-_LAGS / _FADES[:, None])
    shares = np.clip((shapes @ found) / (shapes**2).sum(axis=1), 0, 0.95)
    best = int((((shares[:, None] * shapes) - found) ** 2).sum(axis=1).argmin())
    return round(float(shares[best]), 4), float(_FADES[best]) if shares[best] else 1.0


def draw(load: Load, n: int | None = None, seed: int = 0) -> Trace:
    """``n`` requests with the load's lengths, arrivals and shared prefixes; None draws as many as the trace had.

    Raises:
        SettingError: ``n`` or ``seed`` is invalid, or the arrivals span more than 97 days.
    """
    n = load.requests if n is None else n
    require_count(n)
    prompts, outputs = _drawn_lengths(load, n, stream(seed, f"load lengths {load.name}"))
    arrivals = None
    if load.arrivals is not None:
        arrivals = _drawn_arrivals(load.arrivals, n, stream(seed, f"load arrivals {load.name}"))
    content = None
    if load.reuse is not None:
        content = draw_reuse(load.reuse, prompts, outputs, stream(seed, f"load prefixes {load.name}"))
    return Trace(f"Synthetic {load.name}", prompts, outputs, arrivals, content=content)


def _drawn_lengths(load: Load, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    grid = np.array(load.rank_grid)
    # Cells are drawn in proportion to their counts, as closely as n allows, in random order.
    upper = np.cumsum(grid.ravel()) / grid.sum()
    cells = rng.permutation(np.searchsorted(upper, (np.arange(n) + rng.random()) / n, side="right"))
    cells = np.minimum(cells, grid.size - 1)
    return [
        np.maximum(1, marginal.whole(stratified(band, rng), rng))
        for marginal, band in zip((load.prompt_tokens, load.output_tokens), np.divmod(cells, GRID))
    ]


def _drawn_arrivals(arrivals: Arrivals, n: int, rng: np.random.Generator) -> np.ndarray:
    batches = np.maximum(1, arrivals.batch.whole(stratified(np.zeros(n, dtype=np.int64), rng), rng))
    instants = int(np.searchsorted(np.cumsum(batches), n)) + 1
    gaps_s = arrivals.gap_s.at(_lasting_ranks(arrivals, instants - 1, rng))
    times_s = np.repeat(np.concatenate([[0.0], np.cumsum(gaps_s)]), batches[:instants])[:n]
    if times_s[-1] >= LATEST_S:
        raise SettingError("num_prompts", n, f"spreads the load over more than {LATEST_S} s; ask for fewer")
    return to_ticks(times_s, ticks.PER_SECOND)


def _lasting_ranks(arrivals: Arrivals, n: int, rng: np.random.Generator) -> np.ndarray:
    """Stratified ranks in [0, 1) with the correlation of the gaps."""
    noise, share = rng.standard_normal(n), arrivals.persistence
    if share:
        noise = np.sqrt(1 - share) * noise + np.sqrt(share) * _autoregression(n, np.exp(-1 / arrivals.gaps), rng)
    return (ranks_of(noise) + rng.random(n)) / n


def _autoregression(n: int, factor: float, rng: np.random.Generator) -> np.ndarray:
    """Normal numbers of variance 1, each ``factor`` times the previous one plus noise."""
    shocks = np.sqrt(1 - factor**2) * rng.standard_normal(n)
    values, last = np.empty(n), rng.standard_normal()
    for place, shock in enumerate(shocks.tolist()):
        values[place] = last = factor * last + shock
    return values
