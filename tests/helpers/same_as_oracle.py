"""A run beside the oracle's."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from engine_runs import buckets_at_rows, evictions_of, residencies_of, serve, steps_of, times_of
from fragmeter.sim.memory import BUCKETS
from fragmeter.sim.metrics.gaps import Gaps
from fragmeter.sim.metrics.work import work
from fragmeter.sim.runs.run import Run
from oracle import Outcome, simulate
from strategies import Case, LineCost

FRESH, RECOMPUTED, SWAPPED_IN = 0, 1, 2


class RecordingCost:
    """A step cost that keeps what it was asked."""

    def __init__(self, cost: LineCost) -> None:
        self.cost = cost
        self.calls: list[tuple[int, int, int, int]] = []

    def __call__(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return self.cost.step_ticks(*arguments)


def expected(policy: str, case: Case) -> tuple[Outcome, list[tuple[int, ...]]]:
    """What the oracle says, and what each of its steps that ran was charged for."""
    recording = RecordingCost(case.cost)
    cost = case.cost
    outcome = simulate(
        policy, case.requests, case.pool, case.limits, recording, cost.swap_out_ticks, cost.swap_in_ticks
    )
    return outcome, recording.calls


def same(policy: str, case: Case) -> Outcome:
    """Hold the engine to the oracle, stepping, and leaping to what stepping does."""
    outcome, calls = expected(policy, case)
    stepped, leapt = serve(policy, case, leap=False), serve(policy, case, leap=True, ids=True)
    same_steps(stepped, outcome, calls)
    same_decisions(stepped, outcome, case)
    same_requests(stepped, outcome)
    same_sums(stepped, outcome)
    same_gaps(stepped, outcome)
    same_work(stepped, outcome, case, calls)
    same_fragmentation(stepped, outcome)
    assert buckets_at_rows(stepped) == [step.buckets for step in outcome.steps]
    assert results(leapt) == results(stepped)
    same_row_starts(leapt, outcome)
    return outcome


def results(run: Run) -> tuple:
    """Whatever is held to the oracle, but for the ledger where a leap begins: alike to the bit, stepping or leaping."""
    gaps, done, window = Gaps.of(run.log), work(run.log), run.accounts.window()
    return (
        steps_of(run), residencies_of(run), evictions_of(run), run.log.residency_end.tolist(), times_of(run), run.refused.tolist(),
        (window.start_ticks, window.end_ticks, window.num_steps, window.batch_steps),
        (window.slot_steps, window.slot_ticks), (done.tokens, done.ticks), run.accounts.external_fragmentation(),
        gaps.number and (gaps.number, gaps.mean_ms(), gaps.std_ms(), gaps.percentile_ms(50), gaps.percentile_ms(99)),
    )  # fmt: skip


def same_steps(run, outcome: Outcome, calls: list[tuple[int, ...]]) -> None:
    steps = steps_of(run)
    assert [(s.start_ticks, s.ticks, s.steps) for s in steps] == [
        (s.start_ticks, s.ticks, min(1, len(s.running))) for s in outcome.steps
    ]
    ran = [step for step in steps if step.steps]
    assert [(s.decodes, s.prefill_tokens) for s in ran] == [(decodes, prefill) for decodes, _, prefill, _ in calls]
    tokens = Counter(tick for request in outcome.requests for tick in request["token_ticks"])
    assert [s.growing for s in ran] == [tokens[s.start_ticks + s.ticks] for s in ran]
    assert [s.batch_size for s in steps] == [len(step.running) for step in outcome.steps]


def same_decisions(run, outcome: Outcome, case: Case) -> None:
    """The sequences that came and went, when, why and with how many tokens, in the same order."""
    residencies, evictions, decode_step = [], [], 0
    for step in outcome.steps:
        generated = {i: sum(t <= step.start_ticks for t in r["token_ticks"]) for i, r in enumerate(outcome.requests)}
        for i in step.swapped_in:
            residencies.append(
                (decode_step, i, case.requests[i].prompt_tokens + generated[i], generated[i], SWAPPED_IN)
            )
        for i, _ in step.prefilled:
            tokens = case.requests[i].prompt_tokens + generated[i]
            residencies.append((decode_step, i, tokens, generated[i], RECOMPUTED if generated[i] else FRESH))
        recomputed = [i for i in step.preempted if i not in step.swapped_out]
        evictions += [(decode_step, i, 0) for i in recomputed] + [(decode_step, i, 1) for i in step.swapped_out]
        decode_step += bool(step.running)
    assert residencies_of(run) == residencies
    assert evictions_of(run) == evictions


def same_requests(run, outcome: Outcome) -> None:
    """Refusals, and the times of all others; a token comes out at the end of every step of a residency."""
    assert run.refused.tolist() == [request["refused"] is not None for request in outcome.requests]
    times = times_of(run)
    assert {i: (*t[:3], t[3] + t[4]) for i, t in times.items()} == {
        i: tuple(r[name] for name in ("first_scheduled_ticks", "first_token_ticks", "finish_ticks", "preemptions"))
        for i, r in enumerate(outcome.requests)
        if r["refused"] is None
    }
    ends = [step.start_ticks + step.ticks for step in steps_of(run) if step.steps]
    tokens = {i: [] for i in range(len(outcome.requests))}
    for (start, index, *_), end in zip(residencies_of(run), run.log.residency_end.tolist()):
        tokens[index] += ends[start:end]
    assert [*tokens.values()] == [request["token_ticks"] for request in outcome.requests]


def same_sums(run, outcome: Outcome) -> None:
    """The ledger's integrals: over the steps that ran, and over all time with idle time free."""
    window, steps = run.accounts.window(), outcome.steps
    ran = [step for step in steps if step.running]
    assert window.num_steps == len(ran)
    assert window.batch_steps == sum(len(request["token_ticks"]) for request in outcome.requests)
    assert window.slot_steps == {name: sum(step.buckets[name] for step in ran) for name in BUCKETS}
    end = max((step.start_ticks + step.ticks for step in steps), default=window.end_ticks)
    assert (window.start_ticks, window.end_ticks) == (0, end)
    assert window.slot_ticks == clipped(outcome, run.log.capacity_slots, 0, end)


def same_gaps(run, outcome: Outcome) -> None:
    """Inter-token latency: the gaps between the oracle's tokens, pooled."""
    gaps = Gaps.of(run.log)
    pooled = [float(gap) for request in outcome.requests for gap in np.diff(request["token_ticks"])]
    assert gaps.number == len(pooled)
    if pooled:
        assert gaps.mean_ms() == pytest.approx(np.mean(pooled) / 1e9)
        assert gaps.std_ms() == pytest.approx(np.std(pooled) / 1e9, abs=1e-15)
        for percent in (0, 13, 50, 99, 100):
            assert gaps.percentile_ms(percent) == pytest.approx(np.percentile(pooled, percent) / 1e9)


def same_work(run, outcome: Outcome, case: Case, calls: list[tuple[int, ...]]) -> None:
    """The time ledger: of every request F - 1 tokens are useful, and all others were computed twice or for nothing."""
    done, steps = work(run.log), outcome.steps
    served = [request for result, request in zip(outcome.requests, case.requests) if result["refused"] is None]
    assert done.tokens["useful"] == sum(request.prompt_tokens + request.output_tokens - 1 for request in served)
    assert sum(done.tokens.values()) == sum(decodes + prefill for decodes, _, prefill, _ in calls)
    assert done.tokens["recomputed" if run.log.together else "padding"] == 0
    assert done.ticks["idle"] == run.log.end_ticks - sum(step.ticks for step in steps)
    computing = sum(case.cost.step_ticks(*arguments) for arguments in calls)
    assert done.ticks["swapping"] == sum(step.ticks for step in steps) - computing
    assert sum(done.ticks.values()) == run.log.end_ticks
    assert min(done.ticks.values()) >= 0 and min(done.tokens.values()) >= 0


def same_fragmentation(run, outcome: Outcome) -> None:
    """1 - longest free run / all that is free, over iterations and over time; idle time is not fragmented."""
    indices = []
    for step in outcome.steps:
        free = sum(blocks for _, blocks in step.free_chunks or ())
        indices.append(1 - step.largest_free_run_blocks / free if free else 0.0)
    over_time = sum(index * step.ticks for index, step in zip(indices, outcome.steps)) / max(1, run.log.end_ticks)
    over_steps = sum(indices) / max(1, len(outcome.steps))
    assert run.accounts.external_fragmentation() == pytest.approx((over_steps, over_time))


def clipped(outcome: Outcome, slots: int, start: int, end: int) -> dict[str, int]:
    """Each bucket integrated over a span of time; where no step is, all is free."""
    overlaps = [max(0, min(s.start_ticks + s.ticks, end) - max(s.start_ticks, start)) for s in outcome.steps]
    in_time = {name: sum(s.buckets[name] * d for s, d in zip(outcome.steps, overlaps)) for name in BUCKETS}
    in_time["free"] += slots * (end - start - sum(overlaps))
    return in_time


def same_row_starts(run, outcome: Outcome) -> None:
    """The ledger over time, where a leap begins."""
    by_start = {(step.start_ticks, bool(step.running)): step.buckets for step in outcome.steps}
    rows = run.log.rows
    keys = zip(rows["start_ticks"].tolist(), (rows["steps"] > 0).tolist())
    assert buckets_at_rows(run) == [by_start[key] for key in keys]
