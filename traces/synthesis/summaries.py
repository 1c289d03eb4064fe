"""Length pairs drawn from published summaries, which need no download.

A summary contains 33 quantiles of prompts and of outputs, the mean within each of the 32 strata between
them, and a 16 x 16 grid that counts rows by prompt rank and output rank. A draw selects a cell with probability
proportional to its count, draws a uniform rank within each side of the cell, and maps each rank to tokens
(``traces.synthesis.marginal``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib.resources import files
from typing import TypedDict

import numpy as np

from ...sim.types.errors import SettingError
from ..arrivals.streams import stream
from ..types.pairs import LengthPairs
from .marginal import inverse

_FEWEST_PER_BLOCK = 1024
_DRAWS_BEFORE_GIVING_UP = 1_000_000


class MarginalSummary(TypedDict):
    """Prompts or outputs: 33 quantiles, and the mean within each of the strata between them."""

    mean: float
    quantiles: list[float]
    stratum_means: list[float]


class Summary(TypedDict):
    """One embedded set of ``n`` pairs."""

    description: str
    source: str
    licence: str
    n: int
    prompt_tokens: MarginalSummary
    output_tokens: MarginalSummary
    rank_grid16: list[list[int]]


class Summaries(TypedDict):
    """The embedded sets by name, and the levels of their quantiles."""

    quantile_levels: list[float]
    sets: dict[str, Summary]


@functools.cache
def length_summaries() -> Summaries:
    """The embedded summaries."""
    return json.loads((files(__package__) / "data" / "length_summaries.json").read_text("utf-8"))


def sample(set_name: str, n: int, rng: np.random.Generator, max_total_tokens: int | None = None) -> LengthPairs:
    """``n`` pairs drawn from the embedded set ``set_name``.

    With ``max_total_tokens``, pairs with more prompt + output tokens are rejected and drawn again. The embedded
    sets are uncapped, because rejection from a capped set would apply the cap twice.

    Raises:
        SettingError: The set is unknown, a number is negative, or almost no pair is below the cap.
    """
    summary = _summary(set_name)
    if n < 0:
        raise SettingError("n", n, "must be 0 or more")
    if max_total_tokens is None:
        return LengthPairs(set_name, *_draw(summary, n, rng))
    return LengthPairs(set_name, *drawn_within(lambda count: _draw(summary, count, rng), n, max_total_tokens, set_name))


def drawn_within(draw: Callable[[int], np.ndarray], n: int, max_total_tokens: int, name: str) -> np.ndarray:
    """``n`` pairs of lengths of at most ``max_total_tokens`` in all, int64 [2, n]; longer ones are drawn again.

    Args:
        draw: Draws so many pairs, int64 [2, count].
        name: What is drawn, for the error.

    Raises:
        SettingError: Almost no pair is below the cap.
    """
    accepted = np.empty((2, 0), dtype=np.int64)
    drawn = 0
    while accepted.shape[1] < n:
        block = max(n - accepted.shape[1], _FEWEST_PER_BLOCK)
        pairs = draw(block)
        accepted = np.concatenate((accepted, pairs[:, pairs.sum(axis=0) <= max_total_tokens]), axis=1)
        drawn += block
        if drawn >= _DRAWS_BEFORE_GIVING_UP and accepted.shape[1] < drawn // 1000:
            remedy = f"fewer than 1 in 1,000 of {name} fit; raise it"
            raise SettingError("max_total_tokens", max_total_tokens, remedy)
    return accepted[:, :n]


def synthetic_pairs(set_name: str, n: int, seed: int, max_model_len: int) -> LengthPairs:
    """``n`` pairs of ``set_name`` with prompt + output at most ``max_model_len``, from the seed's own random stream.

    Raises:
        SettingError: As ``sample``.
    """
    try:
        return sample(set_name, n, stream(seed, f"lengths {set_name}"), max_model_len)
    except SettingError as error:
        field = "max_model_len" if error.field == "max_total_tokens" else error.field
        raise SettingError(field, error.value, error.remedy) from None


def _summary(set_name: str) -> Summary:
    sets = length_summaries()["sets"]
    if set_name not in sets:
        raise SettingError("set", set_name, f"choose one of {', '.join(sets)}")
    return sets[set_name]


def _draw(summary: Summary, n: int, rng: np.random.Generator) -> np.ndarray:
    """Drawn lengths, int64 [2, n]: prompts in row 0, outputs in row 1."""
    grid = np.array(summary["rank_grid16"])
    upper_counts = np.cumsum(grid)
    cells = np.searchsorted(upper_counts, rng.integers(upper_counts[-1], size=n), side="right")
    ranks = (np.array(np.divmod(cells, len(grid))) + rng.random((2, n))) / len(grid)
    marginals = summary["prompt_tokens"], summary["output_tokens"]
    return np.array([_tokens(marginal, u) for marginal, u in zip(marginals, ranks)])


def _tokens(marginal: MarginalSummary, u: np.ndarray) -> np.ndarray:
    """The lengths at ranks ``u`` (float64 [n] in [0, 1))."""
    levels = length_summaries()["quantile_levels"]
    return np.rint(inverse(levels, marginal["quantiles"], marginal["stratum_means"], u)).astype(np.int64)
