"""Compact distribution of one quantity: quantiles, and the mean of each stratum between two of them.

The inverse distribution function interpolates between quantiles with an exponent per stratum, which preserves its mean:

    v = (u - U[k]) / (U[k+1] - U[k]);  x = q[k] + (q[k+1] - q[k]) * v**g
    g = 1/r - 1,  r = clamp((mean[k] - q[k]) / (q[k+1] - q[k]), 0.001, 0.999)   (the mean of v**g is r)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def inverse(levels: Sequence[float], quantiles: Sequence[float], means: Sequence[float], u: np.ndarray) -> np.ndarray:
    """The values (float64 [n]) at ranks ``u`` (float64 [n] in [0, 1)).

    Args:
        levels: Levels of the quantiles, ascending from 0 to 1.
        quantiles: Value at each level.
        means: Mean of each stratum; one fewer than levels.
    """
    edges, low, width = np.array(levels), np.array(quantiles[:-1], dtype=np.float64), np.diff(quantiles)
    # A stratum with a single value has width 0; its exponent has no effect.
    share = (np.array(means) - low) / np.where(width > 0, width, 1)
    exponents = 1 / np.clip(share, 0.001, 0.999) - 1
    k = np.searchsorted(edges, u, side="right") - 1
    within = (u - edges[k]) / (edges[k + 1] - edges[k])
    return low[k] + width[k] * within ** exponents[k]


def summary(values: np.ndarray, levels: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Quantiles of ``values`` at ``levels``, each an occurring value, and the mean of each stratum (float64)."""
    ordered = np.sort(values)
    ranks = np.rint(np.array(levels) * (len(ordered) - 1)).astype(np.int64)
    before = np.concatenate([[0], np.cumsum(ordered, dtype=np.float64)])
    # A stratum contains the values from one level up to the next, and at least the value at its own level.
    starts = np.rint(np.array(levels) * len(ordered)).astype(np.int64)
    first = np.minimum(starts[:-1], len(ordered) - 1)
    end = np.maximum(starts[1:], first + 1)
    means = (before[end] - before[first]) / (end - first)
    quantiles = ordered[ranks].astype(np.float64)
    return quantiles, np.clip(means, quantiles[:-1], quantiles[1:])


def ranks_of(values: np.ndarray) -> np.ndarray:
    """Ranks from 0 on, int64; equal values are ranked in their original order."""
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


def stratified(bands: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Ranks in [0, 1), one in each n-th, ordered by band (int64 [n]) and random within a band."""
    order = np.lexsort((rng.random(len(bands)), bands))
    ranks = np.empty(len(bands))
    ranks[order] = (np.arange(len(bands)) + rng.random(len(bands))) / len(bands)
    return ranks
