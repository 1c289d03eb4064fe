"""Requests of measured runs, from the figures that are published of them.

No published figure has the lengths of single requests, so they are drawn, from the same seed in every simulation. A draw has
the published distribution, in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...sim import Workload
from ...sim.types import ticks
from ...sim.workload.content import PromptContent
from ...sim.workload.users import Users


def shared_prefix(
    name: str,
    requests: int,
    request_rate: float,
    system_prompts: int,
    users: int,
    system_prompt_tokens: int,
    output_tokens: int,
    prompt_tokens: Mapping[str, float],
) -> Workload:
    """Requests at a constant rate; their prompts are ``system_prompts * users`` fixed ones in turn.

    Args:
        prompt_tokens: Minimum, median, 90th percentile and maximum over the prompts.
    """
    prompts = system_prompts * users
    ranks = {"min": 0.0, "median": 0.5, "p90": 0.9, "max": 1.0}
    # Lengths have nothing to do with the system prompt.
    lengths = _at_ranks(
        [prompt_tokens[rank] for rank in ranks], list(ranks.values()), prompts, np.random.default_rng(0)
    )
    which = np.arange(requests) % prompts
    pieces = np.stack([which % system_prompts, system_prompts + which], axis=1)
    tokens = np.stack([np.full(requests, system_prompt_tokens), lengths[which] - system_prompt_tokens], axis=1)
    content = PromptContent(np.arange(requests + 1) * 2, pieces.ravel(), tokens.ravel())
    arrivals = np.rint(np.arange(requests) * (ticks.PER_SECOND / request_rate)).astype(np.int64)
    return Workload(name, arrivals, lengths[which], np.full(requests, output_tokens), content=content)


def closed_loop(
    name: str, requests: int, max_concurrency: int, prompt_tokens: Sequence[int], output_tokens: Sequence[int]
) -> Workload:
    """Requests of ``max_concurrency`` users, each with one request at a time; lengths are uniform.

    Args:
        prompt_tokens, output_tokens: Shortest and longest.
    """
    prompts, outputs = (
        np.random.default_rng(stream).integers(shortest, longest, requests, endpoint=True)
        for stream, (shortest, longest) in zip(_streams(2), (prompt_tokens, output_tokens), strict=True)
    )
    users = Users(max_concurrency, np.zeros(requests, dtype=np.int64))
    return Workload(name, np.zeros(requests, dtype=np.int64), prompts, outputs, users=users)


def poisson(
    name: str, requests: int, request_rate: float, prompt_tokens: Sequence[float], output_tokens: Sequence[float]
) -> Workload:
    """Requests with independent arrivals and lengths.

    Args:
        prompt_tokens, output_tokens: Quantiles at evenly spaced ranks, from the minimum to the maximum.
    """
    prompts, outputs, gaps = map(np.random.default_rng, _streams(3))
    asked, answered = (
        _at_ranks(quantiles, np.linspace(0, 1, len(quantiles)), requests, generator)
        for quantiles, generator in ((prompt_tokens, prompts), (output_tokens, outputs))
    )
    drawn = gaps.exponential(ticks.PER_SECOND / request_rate, requests)
    return Workload(name, np.rint(np.cumsum(drawn) - drawn[0]).astype(np.int64), asked, answered)


#: The loads by the key that has their figures in ``facts/servers.json``.
LOADS: Mapping[str, Callable[..., Workload]] = {
    "shared_prefix": shared_prefix,
    "closed_loop": closed_loop,
    "poisson": poisson,
}


def _at_ranks(
    quantiles: Sequence[float], ranks: Sequence[float] | np.ndarray, number: int, generator: np.random.Generator
) -> np.ndarray:
    """Lengths at evenly spaced ranks between the quantiles, int64 [number], in random order."""
    lengths = np.interp((np.arange(number) + 0.5) / number, ranks, quantiles)
    return generator.permutation(np.rint(lengths).astype(np.int64))


def _streams(number: int) -> list[np.random.SeedSequence]:
    return np.random.SeedSequence(0).spawn(number)
