"""Requests with several sequences or with parents, served by the engine and by the oracle, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import NamedTuple

import hypothesis
import numpy as np
from hypothesis import strategies as st

from engine_runs import evictions_of, residencies_of, settings_of, times_of
from fragmeter.sim.config.settings import Settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.host_pool import host_held_at_rows
from fragmeter.sim.runs.run import Run
from fragmeter.sim.workload.dialogue import NO_PARENT, Dialogue
from fragmeter.sim.workload.groups import Ancestry
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool
from oracle.families import Costs, Draws, FamilyOutcome, FamilyRequest, FamilyStep, FamilySystem, serve
from oracle.families_orca import GroupedOrca, GroupedOrcaMax
from oracle.families_paged import GroupedSosp23, GroupedV0
from oracle.trees_orca import TreeOrca, TreeOrcaMax, TreeOrcaOracle
from oracle.trees_paged import TreeSosp23, TreeV0
from strategies import KneeCost, LineCost

PAGED: dict[str, type[GroupedSosp23]] = {"vllm-sosp23": GroupedSosp23, "vllm-v0": GroupedV0}
CONTIGUOUS: dict[str, type[GroupedOrca]] = {"orca": GroupedOrca, "orca-max": GroupedOrcaMax}
TREES: dict[str, Callable[[Pool, Limits, list[FamilyRequest]], FamilySystem]] = {
    "vllm-sosp23": TreeSosp23,
    "vllm-v0": TreeV0,
    "orca": TreeOrca,
    "orca-max": TreeOrcaMax,
    "orca-oracle": TreeOrcaOracle,
}
LENGTH = 96


@dataclass(frozen=True)
class CopyCost(KneeCost):
    """As ``KneeCost``; a copy has a price of its own."""

    def copy_ticks(self, slots: int) -> int:
        return 5 * slots


@dataclass(frozen=True)
class FamilyCase:
    """What is to be simulated; ``survival`` None: samples, not beams."""

    policy: str
    requests: list[FamilyRequest]
    pool: Pool
    limits: Limits
    prefix_tokens: int = 0
    survival: float | None = None
    seed: int = 0
    cost: LineCost = CopyCost()

    def draws(self) -> Callable[[int], Draws] | None:
        """The fates of beams, as the engine has them."""
        return None if self.survival is None else self._draws

    def _draws(self, index: int) -> Iterator[list[tuple[int, int]]]:
        ancestry = Ancestry(self.survival, self.seed, index)
        while True:
            yield ancestry.replaced(self.requests[index].n)


class RowSlots(NamedTuple):
    """A step: when, how long, and what the ledger says; the columns of the oracle's steps."""

    start_ticks: int
    ticks: int
    decode_step: int | None
    batch_size: int
    prefill_tokens: int
    move_ticks: int
    live: int
    held: int
    saved: int
    cached: int
    host_held: int


def is_tree(requests: list[FamilyRequest]) -> bool:
    """Whether some request goes on from another one."""
    return any(request.parent is not None for request in requests)


def workload_of(requests: list[FamilyRequest]) -> Workload:
    """The requests as columns."""
    columns = {
        name: np.array([getattr(request, name) for request in requests])
        for name in ("arrival_ticks", "prompt_tokens", "output_tokens")
    }
    if any(request.max_tokens is not None for request in requests):
        declared = [
            LENGTH - request.prompt_tokens if request.max_tokens is None else request.max_tokens for request in requests
        ]
        columns["max_tokens"] = np.array(declared)
    if is_tree(requests):
        parents = [NO_PARENT if request.parent is None else request.parent for request in requests]
        others = ([getattr(request, name) for request in requests] for name in ("parent_tokens", "rolls_back"))
        return Workload("case", **columns, dialogue=Dialogue(np.array(parents), *map(np.array, others)))
    return Workload("case", **columns, n=np.array([request.n for request in requests]))


def settings_for(case: FamilyCase, leap: bool = True) -> Settings:
    """The engine's settings."""
    beams = {} if case.survival is None else {"use_beam_search": True, "beam_survival": case.survival}
    switches = {"shared_prefix_tokens": case.prefix_tokens, "seed": case.seed, "leap": leap, **beams}
    return settings_of(case.policy, case.pool, case.limits, work=workload_of(case.requests), **switches)


def run_of(case: FamilyCase, leap: bool) -> Run:
    """The engine's run."""
    return simulate(settings_for(case, leap), workload_of(case.requests), case.cost)


def system_of(case: FamilyCase) -> FamilySystem:
    """The oracle's policy."""
    if is_tree(case.requests):
        return TREES[case.policy](case.pool, case.limits, case.requests)
    if case.policy in PAGED:
        return PAGED[case.policy](case.pool, case.limits, case.prefix_tokens, case.draws())
    return CONTIGUOUS[case.policy](case.pool, case.limits, case.draws())


def outcome_of(case: FamilyCase) -> FamilyOutcome:
    """The oracle's run."""
    cost = case.cost
    costs = Costs(cost.step_ticks, cost.swap_out_ticks, cost.swap_in_ticks, cost.copy_ticks)
    return serve(system_of(case), case.requests, costs)


def rows_of(run: Run) -> list[RowSlots]:
    """The rows of a run that took every step by itself."""
    rows, ran = run.log.rows, run.log.rows["steps"] > 0
    decode_step = [decode_step if runs else None for decode_step, runs in zip(run.log.row_step.tolist(), ran.tolist())]
    names = ("batch_size", "prefill_tokens", "swap_ticks", "live", "held", "saved")
    columns = (column.tolist() for column in (*(rows[name] for name in names), run.accounts.at_rows()["cached"]))
    ticks = (rows[name].tolist() for name in ("start_ticks", "ticks"))
    # A step that takes no time has no say in what the host holds.
    held = np.where(rows["ticks"] > 0, host_held_at_rows(run), 0).tolist()
    return [RowSlots(*row) for row in zip(*ticks, decode_step, *columns, held)]


def row_of(step: FamilyStep) -> RowSlots:
    """A step of the oracle, as the engine's."""
    row = RowSlots(*astuple(step))
    return row if step.ticks else row._replace(host_held=0)


def same(case: FamilyCase) -> FamilyOutcome:
    """Hold the engine, stepping and leaping, to the oracle."""
    outcome = outcome_of(case)
    stepped = run_of(case, leap=False)
    for mine, theirs in zip(outcome.steps, rows_of(stepped)):
        assert row_of(mine) == theirs
    assert len(outcome.steps) == len(stepped.log.rows["steps"])
    for run in (stepped, run_of(case, leap=True)):
        assert sorted(residencies_of(run)) == outcome.residencies
        assert sorted(evictions_of(run)) == outcome.evictions
        assert times_of(run) == outcome.times
    return outcome


@st.composite
def group_cases(draw: st.DrawFn, policy: str) -> FamilyCase:
    """Up to five sequences a request, over a pool that they strain."""
    size, paged = draw(st.sampled_from([1, 2, 3, 4, 8])), policy in PAGED
    now, requests, most = 0, [], draw(st.sampled_from([8, 14, 30]))
    for _ in range(draw(st.integers(1, 9))):
        now += draw(st.sampled_from([0, 0, 0, 1, 100, 121, 700, 5000]))
        n = draw(st.sampled_from([1, 1, 2, 2, 3, 4, 5]))
        requests.append(FamilyRequest(now, draw(st.integers(3, most)), draw(st.integers(1, most)), n))
    slots = draw(st.sampled_from([32, 48, 64, 80, 120, 300] if paged else [192, 288, 500, 1200]))
    pool = Pool(slots // size, size, draw(st.sampled_from([0, 3, 8, 20, 500])))
    prefix = draw(st.sampled_from([0, 0, 1, 2])) if paged else 0
    survival = draw(st.sampled_from([None, None, 0.0, 0.3, 0.9]))
    return FamilyCase(policy, requests, pool, draw(limits()), prefix, survival, draw(st.integers(0, 3)))


@st.composite
def tree_cases(draw: st.DrawFn, policy: str) -> FamilyCase:
    """Up to twelve requests, most of which go on from others, over a pool in which not all can be kept."""
    now, requests, most = 0, [], draw(st.sampled_from([6, 14]))
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    for index in range(draw(st.integers(2, 12))):
        now += draw(st.sampled_from([0, 0, 0, 1, 100, 300, 700, 3000, 10000]))
        output = draw(st.integers(1, most))
        declared = draw(st.sampled_from([None, None, output, output + 5])) if policy == "orca" else None
        stored = [request.prompt_tokens + request.output_tokens - 1 for request in requests]
        parents = [parent for parent in range(index) if 1 <= stored[parent] <= 70]
        if not parents or draw(st.integers(0, 3)) == 0:
            requests.append(FamilyRequest(now, draw(st.integers(1, most)), output, max_tokens=declared))
            continue
        parent = draw(st.sampled_from(parents))
        tokens = draw(st.integers(1, stored[parent]))
        prompt = tokens + draw(st.integers(1, 6))
        requests.append(FamilyRequest(now, prompt, output, 1, parent, tokens, draw(st.booleans()), declared))
    slots = draw(st.sampled_from([24, 32, 48, 64, 120] if policy in PAGED else [96, 128, 192, 288, 400]))
    hypothesis.assume(is_tree(requests))
    return FamilyCase(policy, requests, Pool(slots // size, size, draw(st.sampled_from([0, 20]))), draw(limits()))


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    """Small ``max_num_seqs`` and small budgets, or plenty."""
    return Limits(
        LENGTH,
        max_num_batched_tokens=draw(st.sampled_from([5, 12, 45, 2560])),
        max_num_seqs=draw(st.sampled_from([1, 3, 6, 8, 40])),
        watermark_fraction=draw(st.sampled_from([0.0, 0.05, 0.2])),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
    )
