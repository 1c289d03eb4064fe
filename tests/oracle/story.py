"""For the tests: costs easily worked out by hand, runs and a log of one line a step, random cases."""

from __future__ import annotations

import random

from . import simulate
from .model import Limits, Outcome, Pool, Request, Step


class Cost:
    """100 ticks, 10 more a decode and 1 more a prompt token; keeps what it was asked.

    Gives up on a run that does not end: those of these stories take some thousand steps at the most.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int, int]] = []

    def __call__(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        if len(self.calls) > 50_000:
            raise AssertionError(f"{len(self.calls)} steps, and no end")
        self.calls.append((decodes, decode_context, prefill_tokens, prefill_pairs))
        return 100 + 10 * decodes + prefill_tokens


def swap_out_ticks(blocks: int) -> int:
    return 7 * blocks


def swap_in_ticks(blocks: int) -> int:
    return 3 * blocks


def line(step: Step) -> str:
    """One step as one line; parts and buckets that are empty are left out."""
    parts = [f"{step.start_ticks}+{step.ticks}"]
    for name, ids in (("run", step.running), ("preempt", step.preempted), ("out", step.swapped_out)):
        parts += [" ".join([name, *map(str, ids)])] if ids else []
    for name, ids in (("in", step.swapped_in), ("decode", step.decodes), ("pause", step.paused)):
        parts += [" ".join([name, *map(str, ids)])] if ids else []
    parts += [" ".join(["prefill", *(f"{i}:{tokens}" for i, tokens in step.prefilled)])] if step.prefilled else []
    return " | ".join([*parts, " ".join(f"{name} {slots}" for name, slots in step.buckets.items() if slots)])


def log(outcome: Outcome) -> list[str]:
    return [line(step) for step in outcome.steps]


def serve(policy: str, requests: list[Request], pool: Pool, limits: Limits) -> tuple[Outcome, list[tuple[int, ...]]]:
    """What happened, and what each step that ran was charged for."""
    cost = Cost()
    return simulate(policy, requests, pool, limits, cost, swap_out_ticks, swap_in_ticks), cost.calls


def finishes(outcome: Outcome) -> list[int | None]:
    return [request["finish_ticks"] for request in outcome.requests]


def first_difference(outcome: Outcome, policy: str, requests: list[Request], pool: Pool, limits: Limits) -> int:
    """The first step in which ``policy`` would have decided otherwise, whatever it holds."""

    def decisions(steps: list) -> list[tuple]:
        return [(s.start_ticks, s.ticks, s.running, s.prefilled, s.preempted, s.swapped_out) for s in steps]

    other, _ = serve(policy, requests, pool, limits)
    same = [mine == theirs for mine, theirs in zip(decisions(outcome.steps), decisions(other.steps))]
    return same.index(False)


def random_case(seed: int) -> tuple[list[Request], Pool, Limits]:
    """A small workload that strains a small pool, for any policy."""
    draw = random.Random(seed)
    requests, now, model = [], 0, draw.choice([48, 64, 90])
    for _ in range(draw.randint(1, 40)):
        now += draw.choice([0, 0, 0, 50, 400, 5000])
        prompt = draw.randint(1, 40)
        output = draw.randint(1, min(24, model - prompt))
        requests.append(Request(now, prompt, output, draw.choice([None, output, output + 7])))
    pool = Pool(draw.randint(2, 60), draw.choice([1, 2, 4, 8]), draw.randint(0, 20))
    limits = Limits(
        max_model_len=model,
        max_num_batched_tokens=draw.choice([10, 60, 2560]),
        max_num_seqs=draw.choice([2, 5, 64]),
        watermark_fraction=draw.choice([0.0, 0.01, 0.1]),
        preemption_mode=draw.choice(["recompute", "swap"]),
        ft_max_tokens=draw.choice([50, 2040]),
    )
    return requests, pool, limits
