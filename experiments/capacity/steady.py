"""About the highest rate of a replica, from a few step times and no run: to order candidates, and no bound.

    running     b sequences decode at a time, in the mean; by Little's law b = rate * outputs * step
    step        the mean of steps with and without a prompt: a prompt of mean length begins in b / outputs of the steps, in as many chunks
                as the tokens of a step make of it
    TPOT        the step with b + z sqrt(b) sequences: their number varies as that of a Poisson process, and z is the quantile of the
                normal distribution at the attainment
    TTFT        the steps of its own prompt, half a step, and the wait for prompts before it: of the queue M/D/1 with these steps as its
                service, whose tail is taken for exponential
    E2E         TTFT, and TPOT for as many tokens as the output at the attainment has

The rate is that of the largest b which meets the objectives, and for which the KV cache and ``max_num_seqs`` have room.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf, log, sqrt
from statistics import NormalDist

import numpy as np

from ...sim import Settings, Workload
from ...sim.engine.replica import build
from ...sim.types.ticks import PER_SECOND
from ..runs.slo_check import Goal, compiled_cost
from .load import Load

#: Most of an attainment: that of all requests has no quantile.
_MOST_ATTAINED = 0.999
#: Mean number that decodes where even one sequence at all times is too many, and alone is not.
_SELDOM = 0.3
_MS = 1000
#: To what part the load of a replica that only prefills is found.
_BUSY_STEP = 1e-3


def rough_rate(settings: Settings, load: Load, goal: Goal, seed: int, scale: float) -> float:
    """About the highest rate of one replica with steps ``scale`` times as long, requests/s; 0 if a request alone misses the objectives."""
    return Steady(scaled(settings, scale), load.draw(seed).at(1.0), goal).rate()


def rough_sides(settings: Settings, load: Load, goal: Goal, seed: int, scale: float) -> tuple[float, float]:
    """As ``rough_rate``, of a replica that only prefills, and of one that only decodes."""
    return Steady(scaled(settings, scale), load.draw(seed).at(1.0), goal).sides()


def scaled(settings: Settings, scale: float) -> Settings:
    """The settings with step times that are ``scale`` times as long."""
    own = getattr(compiled_cost(settings), "scale", 1.0)
    return settings if scale == 1 else replace(settings, step_scale=own * scale)


class Steady:
    """A replica under a load that lasts.

    Args:
        work: Requests of the load, at any rate.
    """

    def __init__(self, settings: Settings, work: Workload, goal: Goal) -> None:
        replica, self._limits = build(settings), goal.objectives.limits
        self._cost, limits = compiled_cost(settings), replica.policy.limits
        prompts, outputs = work.prompt_tokens.astype(float), work.output_tokens.astype(float)
        self._outputs = float(outputs.mean())
        # A sequence is seen in proportion to its output.
        self._context = float(np.average(prompts + outputs / 2, weights=outputs))
        self._chunks = max(1, ceil(float(prompts.mean()) / (limits.max_num_batched_tokens or inf)))
        self._chunk, self._pairs = prompts.mean() / self._chunks, (prompts**2 / 2).mean() / self._chunks
        attained = min(goal.attainment, _MOST_ATTAINED)
        self._z, self._tail = NormalDist().inv_cdf(attained), 1 - attained
        self._long_output = float(np.quantile(outputs, attained))
        blocks = settings.num_gpu_blocks_override
        slots = inf if blocks is None else blocks * replica.block_size / self._context
        self._most = max(1, int(min(limits.max_num_seqs, slots, len(work))))

    def rate(self) -> float:
        """Requests/s; 0 if a request alone misses the objectives."""
        if not self._meets(0.0):
            return 0.0
        low, high = 0, self._most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._meets(middle) else (low, middle)
        running = low or _SELDOM
        return running / (self._outputs * self._step_s(running))

    def sides(self) -> tuple[float, float]:
        """Requests/s of a replica that only prefills, and of one that only decodes; 0 if it misses the objectives."""
        return self._of_prefills(), self._of_decodes()

    def _of_prefills(self) -> float:
        prompt_s, limit_s = (
            self._chunks * self._of(0, 1),
            min(self._limits.get("ttft", inf), self._limits.get("e2el", inf)) / _MS,
        )
        low, high = 0.0, 1.0
        while high - low > _BUSY_STEP:
            busy = (low + high) / 2
            meets = prompt_s + self._wait_s(busy, prompt_s) <= limit_s
            low, high = (busy, high) if meets else (low, busy)
        return low / prompt_s

    def _of_decodes(self) -> float:
        limit_s = min(self._limits.get("tpot", inf), self._limits.get("e2el", inf) / max(1.0, self._long_output)) / _MS
        low, high = 0, self._most + 1
        while high - low > 1:
            middle = (low + high) // 2
            meets = self._of(middle + self._z * sqrt(middle), 0) <= limit_s
            low, high = (middle, high) if meets else (low, middle)
        return low / (self._outputs * self._of(low, 0)) if low else 0.0

    def _wait_s(self, busy: float, prompt_s: float) -> float:
        """Wait of a prompt for those before it, at the attainment."""
        mean_s = busy * prompt_s / (2 * (1 - busy))
        return max(0.0, mean_s / busy * log(busy / self._tail))

    def _meets(self, running: float) -> bool:
        """Whether so many sequences that decode leave the objectives met; 0 for a request alone."""
        prompt_s = self._chunks * self._of(running, 1)
        tpot = self._step_s(running + self._z * sqrt(running)) if running else self._of(1, 0)
        wait_s = 0.0
        if running:
            busy = running / (self._outputs * self._step_s(running)) * prompt_s
            if busy >= 1:
                return False
            wait_s = self._wait_s(busy, prompt_s) + tpot / 2
        ttft = prompt_s + wait_s
        found = {"ttft": ttft, "tpot": tpot, "e2el": ttft + tpot * self._long_output}
        return all(found[name] * _MS <= limit for name, limit in self._limits.items())

    def _step_s(self, running: float) -> float:
        """Mean duration of a step."""
        prompts = running / self._outputs * self._chunks
        if prompts >= 1:
            return self._of(running, prompts)
        return (1 - prompts) * self._of(running, 0) + prompts * self._of(running, 1)

    def _of(self, running: float, prompts: float) -> float:
        """Duration of a step with decodes and chunks of prompts, seconds."""
        decodes = round(running)
        tokens, pairs = round(prompts * self._chunk), round(prompts * self._pairs)
        return self._cost.step_ticks(decodes, round(decodes * self._context), tokens, pairs) / PER_SECOND
