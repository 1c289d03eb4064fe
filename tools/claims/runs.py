"""The runs that claims share, each done once in a trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fragmeter.experiments.paper.paper import FIG2, MAX_MODEL_LEN, Source
from fragmeter.experiments.paper.settings import paper_settings
from fragmeter.experiments.story.one_second_step import OneSecondStep
from fragmeter.sim import Run, Workload, simulate
from fragmeter.sim.engine.replica import FITTED_STEP_SCALE
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.metrics.views import SLOTS_VIEW
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.traces import sample, stream

_KEPT = 64
_SEARCH_STEP, _SEARCH_WITHIN = 1.15, 1.03


@dataclass(frozen=True)
class Trial:
    """One draw of what is drawn, and one length of a step.

    Attributes:
        seed: Of lengths and arrivals.
        stretch: Factor on the step time that is fitted to the paper's OPT-13B; other step times are not stretched.
    """

    seed: int = 0
    stretch: float = 1.0

    @property
    def step_scale(self) -> float:
        """Scale of the paper's step time."""
        return FITTED_STEP_SCALE * self.stretch

    def shares(self, policy: str, **more: Any) -> dict[str, float]:
        """Percent of the pool that each bucket takes under Fig 2's load, mean over iterations, and ``waste``: what
        is not live."""
        return dict(_shares(self, policy, _frozen(more)))

    def burst(self, lengths: str, requests: int, policy: str, n: int = 1, copies: int = 1, **more: Any) -> float:
        """Output tokens/s of requests that all arrive at once, until the last has finished.

        Args:
            n: Sequences of each request.
            copies: How often each request is sent.
        """
        return _burst(self, lengths, requests, policy, n, copies, _frozen(more))


def _frozen(more: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(more.items()))


@lru_cache(_KEPT)
def _fig2(seed: int) -> Workload:
    return Source((seed,)).workload(FIG2, seed)


@lru_cache(_KEPT)
def _shares(trial: Trial, policy: str, more: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, float], ...]:
    chosen = paper_settings(policy=policy, step_scale=trial.step_scale, window=FIG2.window_s, **dict(more))
    window = simulate(chosen, _fig2(trial.seed)).window
    found = {bucket: 100 * window.share_of_steps(bucket) for bucket in SLOTS_VIEW.categories}
    return *found.items(), ("waste", 100 - found["live"])


def at_once(lengths: str, requests: int, seed: int, n: int = 1, copies: int = 1) -> Workload:
    """Requests of an embedded set, all there from the start; see ``Trial.burst``."""
    pairs = sample(lengths, requests, stream(seed, f"claims {lengths}"), MAX_MODEL_LEN)
    prompts, outputs = (np.repeat(column, copies) for column in (pairs.prompt_tokens, pairs.output_tokens))
    samples = None if n == 1 else np.full(requests, n)
    return Workload(lengths, np.zeros(len(prompts), dtype=np.int64), prompts, outputs, n=samples)


@lru_cache(_KEPT)
def _burst(
    trial: Trial, lengths: str, requests: int, policy: str, n: int, copies: int, more: tuple[tuple[str, Any], ...]
) -> float:
    work = at_once(lengths, requests, trial.seed, n, copies)
    run = simulate(paper_settings(policy=policy, step_scale=trial.step_scale, seed=trial.seed, **dict(more)), work)
    served = ~run.refused
    return n * int(work.output_tokens[served].sum()) * PER_SECOND / run.log.end_ticks


def story(policy: str, requests: Workload, **more: Any) -> Run:
    """A handful of requests, step by step, a second a step."""
    return simulate(paper_settings(policy=policy, leap=False, **more), requests, OneSecondStep())


def few(
    prompts: list[int],
    outputs: list[int],
    max_tokens: list[int] | None = None,
    arrivals_s: list[float] | None = None,
    n: list[int] | None = None,
) -> Workload:
    """A workload written out."""
    arrivals = np.rint(np.array(arrivals_s or [0] * len(prompts)) * PER_SECOND).astype(np.int64)
    declared = None if max_tokens is None else np.array(max_tokens)
    return Workload(
        "few", arrivals, np.array(prompts), np.array(outputs), declared, n=None if n is None else np.array(n)
    )


def median_latency_s(run: Run) -> float:
    """Median end-to-end latency."""
    return float(np.median(request_times(run).e2el_ms)) / 1e3


def highest_rate(keeps_up: Callable[[float], bool], guess: float) -> float:
    """Requests/s up to which something keeps up, within 3 %, by bisection from a guess."""
    low = high = guess
    while not keeps_up(low):
        low /= _SEARCH_STEP
    while keeps_up(high):
        high *= _SEARCH_STEP
    while high / low > _SEARCH_WITHIN:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps_up(middle) else (low, middle)
    return (low * high) ** 0.5
