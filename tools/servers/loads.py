"""Requests of measured runs, from the figures that are published of them.

No published figure has the lengths of single requests, so they are drawn, from the same seed in every simulation. A draw has
the published distribution, in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fragmeter.sim import Workload
from fragmeter.sim.types import ticks
from fragmeter.sim.types.bounds import Count
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.users import Users
from fragmeter.traces.synthesis.summaries import sample

Requests = Annotated[int, Field(ge=1, le=10**6)]
#: Requests/s.
Rate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Length = Annotated[float, Field(ge=1, le=2**31, allow_inf_nan=False)]
Rank = Literal["min", "median", "p90", "max"]
#: Shortest and longest, and quantiles at evenly spaced ranks, in tokens.
Ends = Annotated[Sequence[Count], Field(min_length=2, max_length=2)]
Quantiles = Annotated[Sequence[Length], Field(min_length=2)]


def shared_prefix(
    name: str,
    requests: Requests,
    request_rate: Rate,
    system_prompts: Count,
    users: Count,
    system_prompt_tokens: Count,
    output_tokens: Count,
    prompt_tokens: Mapping[Rank, Length],
) -> Workload:
    """Requests at a constant rate; their prompts are ``system_prompts * users`` fixed ones in turn.

    Args:
        prompt_tokens: Minimum, median, 90th percentile and maximum over the prompts.
    """
    prompts = system_prompts * users
    ranks: Mapping[Rank, float] = {"min": 0.0, "median": 0.5, "p90": 0.9, "max": 1.0}
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
    name: str, requests: Requests, max_concurrency: Count, prompt_tokens: Ends, output_tokens: Ends
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
    name: str, requests: Requests, request_rate: Rate, prompt_tokens: Quantiles, output_tokens: Quantiles
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


def random(
    name: str, requests: Requests, prompt_tokens: Count, output_tokens: Count, request_rate: Rate | None = None
) -> Workload:
    """Requests of one length, with independent arrivals; without a rate all at once."""
    (gaps,) = map(np.random.default_rng, _streams(1))
    arrivals = np.zeros(requests, dtype=np.int64)
    if request_rate is not None:
        drawn = gaps.exponential(ticks.PER_SECOND / request_rate, requests)
        arrivals = np.rint(np.cumsum(drawn) - drawn[0]).astype(np.int64)
    return Workload(name, arrivals, np.full(requests, prompt_tokens), np.full(requests, output_tokens))


def sharegpt(
    name: str,
    requests: Requests,
    total_input_tokens: Count,
    total_output_tokens: Count,
    request_rate: Rate | None = None,
) -> Workload:
    """Requests of ShareGPT at a constant rate; without a rate all at once.

    The pairs are those of the embedded summary within the limits of ``vllm bench serve`` (prompts and outputs from 4 tokens, prompts
    to 1,024, both to 2,048), scaled to the totals.
    """
    (generator,) = map(np.random.default_rng, _streams(1))
    pairs = sample("vllm_sosp23_sharegpt_opt", 4 * requests, generator, 2048)
    fits = (pairs.prompt_tokens >= 4) & (pairs.output_tokens >= 4) & (pairs.prompt_tokens <= 1024)
    prompts, outputs = (
        np.maximum(1, np.rint(lengths[fits][:requests] * (total / lengths[fits][:requests].sum()))).astype(np.int64)
        for lengths, total in ((pairs.prompt_tokens, total_input_tokens), (pairs.output_tokens, total_output_tokens))
    )
    gap = 0.0 if request_rate is None else ticks.PER_SECOND / request_rate
    return Workload(name, np.rint(np.arange(requests) * gap).astype(np.int64), prompts, outputs)


#: The loads by the key that has their figures in ``facts/servers.json``.
LOADS: Mapping[str, Callable[..., Workload]] = {
    "shared_prefix": shared_prefix,
    "closed_loop": closed_loop,
    "poisson": poisson,
    "random": random,
    "sharegpt": sharegpt,
}


def _at_ranks(
    quantiles: Sequence[float], ranks: Sequence[float] | np.ndarray, number: int, generator: np.random.Generator
) -> np.ndarray:
    """Lengths at evenly spaced ranks between the quantiles, int64 [number], in random order."""
    lengths = np.interp((np.arange(number) + 0.5) / number, ranks, quantiles)
    return generator.permutation(np.rint(lengths).astype(np.int64))


def _streams(number: int) -> list[np.random.SeedSequence]:
    return np.random.SeedSequence(0).spawn(number)
