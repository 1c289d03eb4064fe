"""Engines that share experts: all steps begin and end together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cluster_runs import ROUTERS, same_cluster
from engine_runs import settings_of, workload_of
from fragmeter.sim import settings, simulate
from fragmeter.sim.cluster import ClusterRun, cluster, simulate_cluster
from fragmeter.sim.cost.base import among
from fragmeter.sim.cost.speculative import SpeculativeCost
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.runs.run import Run
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool, Request
from same_runs import same
from strategies import Case, LineCost, crowded_cases, long_cases
from token_times import token_ticks

#: Policies that pause decodes for prefills, chunk them, and serve static batches.
KINDS = ("vllm-sosp23", "vllm-v1", "static")
cases = st.one_of(crowded_cases(), long_cases())


def serve(
    policy: str,
    case: Case,
    engines: int = 2,
    deployments: int = 1,
    router: str = "round-robin",
    window: tuple[int, int] | None = None,
    apart: bool = False,
    **switches,
) -> ClusterRun:
    """Run a case on deployments of so many engines each; prefill and decode ``apart`` on as many engines each."""
    chosen = settings_of(policy, case.pool, case.limits, window, **switches)
    chosen = replace(chosen, model="mixtral-8x7b", gpu="h200", data_parallel_size=engines)
    work = workload_of(case.requests, case.limits.max_model_len, case.content)
    if apart:
        # A token takes 26 ticks.
        apart_cluster = cluster(prefill_replicas=engines, decode_replicas=engines, kv_transfer_bandwidth=5e6)
        return simulate_cluster(chosen, work, apart_cluster, case.cost)
    return simulate_cluster(chosen, work, cluster(num_replicas=engines * deployments, router=router), case.cost)


def test_a_prefill_lengthens_the_decodes_of_the_other_engine():
    """A step takes 101 ticks, 13 for each decode and 7 for each prompt token. Requests 0, 2 and 4 are of engine 0.

    171    both prompts of 10 tokens: 101 + 70
    285    both decode: 101 + 13
    1099   request 2, which came at 200, is prefilled beside request 0 (101 + 13 + 700); engine 1 decodes as long
    1226   engine 0 decodes two: 101 + 26; request 1 ends
    1353   and requests 0 and 2 end
    1524   request 3, which came to engine 1 at 1300, waits for the step of engine 0
    1638   it ends
    5171   request 4 comes at 5000 to engines without work, and starts at once
    """
    requests = [Request(0, 10, 5), Request(0, 10, 4), Request(200, 100, 3), Request(1300, 10, 2), Request(5000, 10, 1)]
    run = serve("vllm-v1", Case(requests, Pool(100, 4), Limits(128), LineCost()))
    assert {row: times.tolist() for row, times in token_ticks(run).items()} == {
        0: [171, 285, 1099, 1226, 1353],
        1: [171, 285, 1099, 1226],
        2: [1099, 1226, 1353],
        3: [1524, 1638],
        4: [5171],
    }


@dataclass(frozen=True)
class CompanyCost(LineCost):
    """1,000 ticks more for each token that all engines compute together."""

    more: int = 0

    def among(self, tokens: Sequence[int]) -> CompanyCost:
        return replace(self, more=1000 * sum(tokens))

    def step_ticks(self, *work: int) -> int:
        return self.more + super().step_ticks(*work)

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        base, slope, until = super().decode_line(decodes, context)
        return self.more + base, slope, until


def test_an_engine_without_work_computes_a_token():
    """Three engines; 10 tokens and two dummies, then 1 and two; with request 1, which came at 13,000, 6 and a dummy."""
    requests = [Request(0, 10, 4), Request(13_000, 5, 1)]
    run = serve("vllm-v1", Case(requests, Pool(100, 4), Limits(128), CompanyCost()), engines=3)
    first = 12_000 + 101 + 70
    second = first + 3_000 + 114
    # Its prompt of 5 tokens takes 101 + 35, longer than the decode.
    third = second + 7_000 + 136
    assert {row: times.tolist() for row, times in token_ticks(run).items()} == {
        0: [first, second, third, third + 3_000 + 114],
        1: [third],
    }


def staged(requests: list[Request], stages: int, **switches: bool) -> dict[int, list[int]]:
    """When the tokens of requests come, of two engines with so many stages each."""
    case = Case(requests, Pool(100, 4), Limits(128), LineCost())
    run = serve("vllm-v1", case, pipeline_parallel_size=stages, **switches)
    return {row: times.tolist() for row, times in token_ticks(run).items()}


def test_an_engine_that_waits_for_its_batch_computes_a_token_after_it():
    """Two stages, each half of a batch: 171 ticks for the prompt, 114 for a decode or a dummy batch. The other engine has no work.

    0      the prompt; its token comes at 171, and until then nothing can be scheduled
    171    a dummy batch leaves the first stage at 228
    228    the first decode, until 342; then another dummy batch

    Where steps are scheduled ahead, the dummy batch does not wait for the token, but the engine waits for both.
    """
    assert staged([Request(0, 10, 3)], 2) == {0: [171, 228 + 114, 399 + 114]}
    assert staged([Request(0, 10, 3)], 2, async_scheduling=True) == {0: [171, 171 + 114, 285 + 114]}
    # The second engine has a longer output, and waits as long for the first prompt, of 100 tokens: 801 ticks.
    both = staged([Request(0, 100, 2), Request(0, 10, 3)], 2)
    assert both == {0: [801, 801 + 57 + 114], 1: [801, 972, 972 + 57 + 114]}


def test_an_engine_that_waits_holds_up_the_other_and_one_without_work_does_not():
    """Requests 0 and 2, which comes at 50, are of engine 0, request 1 of engine 1.

    0      requests 0 and 1, prompts of 10 tokens, until 171
    171    request 2, beside the dummy batch of engine 1, which waited for request 1 and has no work from now on; until 342
    342    request 0, known since 171, leaves the last stage at 399 behind request 2; from now on each batch is a stage behind the last
    """
    requests = [Request(0, 10, 3), Request(0, 10, 1), Request(50, 10, 3)]
    assert staged(requests, 2) == {0: [171, 399, 513], 1: [171], 2: [342, 456, 570]}


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@hypothesis_settings(max_examples=40)
@given(case=cases, engines=st.integers(2, 3), stages=st.integers(2, 4))
def test_tokens_of_batches_in_flight_come_in_order(ahead, case, engines, stages):
    long = replace(case, cost=LineCost())
    run = serve("vllm-v1", long, engines, pipeline_parallel_size=stages, async_scheduling=ahead)
    for times in token_ticks(run).values():
        assert all(earlier < later for earlier, later in zip(times, times[1:]))


def test_blocks_that_are_sent_come_free_within_a_step_of_the_other_engine():
    """Engine 0 prefills requests 0, 2 and 4, engine 1 the others, 20 tokens each: 241 ticks, and a pool has room for one.

    241        the KV of request 0 goes out, and its blocks are taken until 766; engine 1 goes on with request 3
    482        with request 5, and at 723 with 7, of one token more, up to 971
    971        request 2 starts on engine 0
    """
    lengths = [(20, 2), (20, 1), (20, 1), (20, 1), (1, 1), (20, 1), (1, 1), (21, 1)]
    case = Case([Request(0, *each) for each in lengths], Pool(7, 4), Limits(24), LineCost())
    run = serve("vllm-v1", case, apart=True)
    assert 760 < int(run.transfers["end_ticks"][0]) < 770
    firsts = {
        int(row): int(first)
        for rows, part in zip(run.rows[:2], run.runs[:2])
        for row, first in zip(rows, first_tokens(part))
    }
    assert [firsts[row] for row in (0, 1, 3, 5, 7)] == [241, 241, 482, 723, 971]
    assert firsts[2] == 971 + 101 + 7 * 21


def first_tokens(run: Run) -> list[int]:
    """Of each request."""
    return request_times(run).first_token_ticks.tolist()


def test_a_measurement_begins_and_ends_within_leaps():
    """Steps in company are longer than those that each engine expects."""
    case = Case([Request(0, 10, 60) for _ in range(6)], Pool(200, 4), Limits(512), CompanyCost())
    for start in range(90_000, 100_000, 2_000):
        leapt, stepped = (serve("vllm-v1", case, window=(start, start + 60_000), leap=leap) for leap in (True, False))
        same_cluster(leapt, stepped)


@pytest.mark.slow
@pytest.mark.parametrize("policy", KINDS)
@hypothesis_settings(max_examples=8)
@given(
    case=cases,
    engines=st.integers(2, 3),
    deployments=st.integers(1, 2),
    router=st.sampled_from(ROUTERS[:3]),
    window=st.sampled_from([None, (500, 9_000)]),
)
def test_leap_and_step_are_the_same_bits(policy, case, engines, deployments, router, window):
    leapt, stepped = (serve(policy, case, engines, deployments, router, window, leap=leap) for leap in (True, False))
    same_cluster(leapt, stepped)


@pytest.mark.slow
@hypothesis_settings(max_examples=12)
@given(case=cases, engines=st.integers(2, 3), router=st.sampled_from(ROUTERS[:3]))
def test_leap_and_step_are_the_same_bits_where_steps_are_scheduled_ahead(case, engines, router):
    leapt, stepped = (
        serve("vllm-v1", case, engines, router=router, leap=leap, async_scheduling=True) for leap in (True, False)
    )
    same_cluster(leapt, stepped)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@hypothesis_settings(max_examples=8)
@given(case=cases, engines=st.integers(2, 3))
def test_leap_and_step_are_the_same_bits_with_disaggregated_prefill(ahead, case, engines):
    leapt, stepped = (
        serve("vllm-v1", case, engines, apart=True, leap=leap, async_scheduling=ahead) for leap in (True, False)
    )
    same_cluster(leapt, stepped)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@hypothesis_settings(max_examples=150)
@given(case=cases, engines=st.integers(2, 4), router=st.sampled_from(ROUTERS[:3]))
def test_leap_and_step_are_the_same_bits_at_length(ahead, case, engines, router):
    leapt, stepped = (
        serve("vllm-v1", case, engines, router=router, leap=leap, async_scheduling=ahead) for leap in (True, False)
    )
    same_cluster(leapt, stepped)


@pytest.mark.slow
@pytest.mark.parametrize("policy", KINDS)
@hypothesis_settings(max_examples=8)
@given(case=cases, engines=st.integers(2, 3))
def test_steps_coincide_and_are_as_long_as_the_longest(policy, case, engines):
    run = serve(policy, replace(case, cost=LineCost()), engines, leap=False)
    coincide(run.runs)
    served = [row for row in range(len(case.requests)) if not run.refused[row]]
    assert sorted(row for rows in run.rows for row in rows.tolist()) == served


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@hypothesis_settings(max_examples=8)
@given(case=cases, engines=st.integers(2, 3))
def test_engines_that_prefill_and_those_that_decode_are_in_lock_step_apart(ahead, case, engines):
    cost = replace(case, cost=LineCost())
    run = serve("vllm-v1", cost, engines, apart=True, leap=False, async_scheduling=ahead)
    coincide(run.runs[:engines], ahead)
    coincide(run.runs[engines:], ahead)


def coincide(runs: Sequence[Run], ahead: bool = False) -> None:
    """No two engines have steps that overlap in part. The length of a step is the largest that any engine needs for its own
    work, so that no step is shorter than alone.

    Args:
        ahead: Whether steps may be longer: rows do not count the tokens that are computed in vain.
    """
    alone: dict[tuple[int, int], list[int]] = {}
    names = ("start_ticks", "first_ticks", "decodes", "prefill_tokens", "swap_ticks")
    for run in runs:
        for start, ticks, decodes, prefill, swap in zip(*(run.log.rows[name].tolist() for name in names)):
            own = LineCost().step_ticks(decodes, 0, prefill, 0) if decodes or prefill else 0
            if own or swap:
                alone.setdefault((start, start + ticks), []).append(own + swap)
    spans = sorted(alone)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
    for (start, end), needed in alone.items():
        assert end - start == max(needed) or (ahead and end - start > max(needed))


@pytest.mark.parametrize("cost", ["fitted", "roofline"])
def test_equal_engines_with_equal_loads_are_one_engine_alone(cost):
    """An engine alone is reckoned with others that compute as many tokens, so that these are its own bits."""
    chosen, columns = sharing(cost=cost), drawn(40)
    alone = simulate(chosen, Workload("load", *columns))
    twice = Workload("load", *(np.repeat(column, 2) for column in columns))
    run = simulate_cluster(chosen, twice, cluster(num_replicas=2))
    for part in run.runs:
        same(replace(part, settings=alone.settings, workload=alone.workload), alone)


#: Options with state of their own in each engine: drafts, without and with a drafter, a host, and a host beside drafts.
_DRAFTS = {"num_speculative_tokens": 3, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.2}
_NGRAM = {"speculative_config": json.dumps(_DRAFTS | {"method": "ngram"})}
_HOST = {"kv_offloading_size": 2, "num_gpu_blocks_override": 400, "max_model_len": 4096}
OWN = {
    "drafts": _NGRAM,
    "drafter": {"speculative_config": json.dumps(_DRAFTS | {"method": "draft_model", "model": "qwen3-0.6b"})},
    "host": _HOST,
    "host, drafts": _HOST | _NGRAM,
}
own = pytest.mark.parametrize("options", OWN.values(), ids=OWN)


def turns(number: int, times: int = 1) -> Workload:
    """Requests of eight sessions, ``times`` of each with a session of its own, whose blocks the pool of ``_HOST`` evicts between turns."""
    arrivals, prompts, outputs = (np.repeat(column, times) for column in drawn(number))
    sessions = np.tile(np.arange(times), number) * 8 + np.repeat(np.arange(number) % 8, times)
    return Workload("turns", arrivals, prompts, outputs, content=PromptContent.of_sessions(sessions))


@pytest.mark.parametrize("ahead", [False, True])
def test_leap_and_step_are_the_same_bits_where_prompts_have_their_turn(ahead):
    chosen = sharing(prefill_schedule_interval=5, async_scheduling=ahead, max_num_seqs=6)
    work = Workload("load", *drawn(60))
    leapt, stepped = (
        simulate_cluster(replace(chosen, leap=leap), work, cluster(num_replicas=2)) for leap in (True, False)
    )
    for run, counterpart in zip(leapt.runs, stepped.runs, strict=True):
        assert outcome(run) == outcome(counterpart)
    alone = simulate_cluster(replace(chosen, options=()), work, cluster(num_replicas=2))
    assert any(outcome(run) != outcome(other) for run, other in zip(leapt.runs, alone.runs, strict=True))


@own
def test_equal_engines_with_drafts_or_a_host_are_one_engine_alone(options):
    # An engine of several that decides ahead and runs out of work passes a step with a dummy batch.
    chosen = sharing(enable_prefix_caching=True, async_scheduling=False, **options)
    alone, run = simulate(chosen, turns(40)), simulate_cluster(chosen, turns(40, 2), cluster(num_replicas=2))
    for part in run.runs:
        assert outcome(replace(part, settings=alone.settings, workload=alone.workload)) == outcome(alone)
    if "kv_offloading_size" in options:
        assert summary(alone)["kv_offloading"]["hit_tokens"] > 0


@dataclass(frozen=True)
class SlowCost(CompanyCost):
    """Steps of 0.3 ms for each token of all engines, and as much for a block that is loaded: several steps for a prompt."""

    def among(self, tokens: Sequence[int]) -> SlowCost:
        return replace(self, more=300_000_000 * sum(tokens))

    def swap_in_ticks(self, blocks: int) -> int:
        return 300_000_000 * blocks

    def copy_ticks(self, slots: int) -> int:
        return 0


@pytest.mark.slow
@own
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("cost", [None, SlowCost()], ids=["fitted", "slow"])
def test_leap_and_step_are_the_same_bits_with_drafts_or_a_host(cost, ahead, options):
    """Loads end within leaps whose steps the other engine lengthens."""
    chosen, two = sharing(enable_prefix_caching=True, async_scheduling=ahead, **options), cluster(num_replicas=2)
    leapt, stepped = (simulate_cluster(replace(chosen, leap=leap), turns(60), two, cost) for leap in (True, False))
    for run, counterpart in zip(leapt.runs, stepped.runs, strict=True):
        assert outcome(run) == outcome(counterpart)
    spans = sorted({span for run in stepped.runs for span in _steps(run)})
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))
    assert sorted(row for rows in leapt.rows for row in rows.tolist()) == [*range(60)]


@pytest.mark.slow
@own
def test_leap_and_step_are_the_same_bits_with_drafts_or_a_host_and_disaggregated_prefill(options):
    chosen, apart = sharing(enable_prefix_caching=True, **options), cluster(prefill_replicas=2, decode_replicas=2)
    leapt, stepped = (simulate_cluster(replace(chosen, leap=leap), turns(60), apart) for leap in (True, False))
    for run, counterpart in zip(leapt.runs, stepped.runs, strict=True):
        assert outcome(run) == outcome(counterpart)


@dataclass(frozen=True)
class SavingCost(LineCost):
    """A step with decodes and prompts is shorter by what its decodes find in a cache."""

    def saved_ticks(self, decodes: int, context: int, repeated: int) -> int:
        return 11 * decodes + (repeated > 0)


def test_a_step_is_shorter_by_what_its_decodes_save():
    arrivals = np.arange(30) * 700
    prompts = PromptContent.of_sessions(np.zeros(30, dtype=np.int64))
    chosen, run = sharing(enable_prefix_caching=True), {}
    for cost in (LineCost(), SavingCost()):
        alone = Workload("alone", arrivals, np.full(30, 40), np.full(30, 25), content=prompts)
        both = replace(
            alone,
            **{
                name: np.repeat(getattr(alone, name), 2) for name in ("arrival_ticks", "prompt_tokens", "output_tokens")
            },
            content=PromptContent.of_sessions(np.tile([0, 1], 30)),
        )
        run[cost] = simulate(chosen, alone, cost)
        for part in simulate_cluster(chosen, both, cluster(num_replicas=2), cost).runs:
            same(replace(part, settings=run[cost].settings, workload=run[cost].workload), run[cost])
    plain, saving = run.values()
    assert saving.log.end_ticks < plain.log.end_ticks


def test_a_step_with_drafts_takes_the_time_of_all_engines_tokens():
    work, cost = (4, 100, 0, 0), SlowCost()
    assert among(SpeculativeCost(cost, None, 3), [4, 9]).step_ticks(*work) == cost.among([4, 9]).step_ticks(*work)
    assert cost.among([4, 9]).step_ticks(*work) > cost.step_ticks(*work)


def _steps(run: Run) -> list[tuple[int, int]]:
    """Start and end of each step that computes, of a run without leaps."""
    rows = run.log.rows
    busy = (rows["decodes"] > 0) | (rows["prefill_tokens"] > 0)
    starts = rows["start_ticks"][busy]
    return [*zip(starts.tolist(), (starts + rows["first_ticks"][busy]).tolist())]


def outcome(run: Run) -> dict[str, object]:
    """When each request held blocks and had its tokens, the copies to and from the host, and the summary."""
    tier = run.replica.memory.transfers
    tables = {"residencies": run.log.residencies, "copies": {} if tier is None else tier.transfers.columns()}
    columns = {(table, name): column.tolist() for table, found in tables.items() for name, column in found.items()}
    times = request_times(run)
    both = [times.first_token_ticks.tolist(), times.finish_ticks.tolist()]
    return columns | {"times": both, "ends": run.log.end_ticks, "summary": summary(run), "window": run.window}


@pytest.mark.parametrize("cost", ["fitted", "roofline"])
def test_leap_and_step_are_the_same_bits_with_the_cost_of_a_model(cost):
    """The tokens of all engines change the time of a step, and so does each engine's context."""
    work = Workload("load", *drawn(40))
    same_cluster(
        *(simulate_cluster(sharing(cost=cost, leap=leap), work, cluster(num_replicas=2)) for leap in (True, False))
    )


def test_a_prefill_of_one_engine_is_no_prefill_of_the_other():
    """A prompt of 4,000 tokens beside one decode takes longer than alone, and less than two of them at once."""
    work = Workload("load", np.array([0, 0]), np.array([1, 4000]), np.array([2, 1]))
    together = Workload("load", np.array([0, 0]), np.array([4000, 4000]), np.array([1, 1]))
    ends = [simulate_cluster(sharing(), load, cluster(num_replicas=2)).end_ticks for load in (work, together)]
    alone = simulate(sharing(), Workload("load", np.array([0]), np.array([1]), np.array([2]))).log.end_ticks
    assert alone < ends[0] < ends[1]


def sharing(**switches):
    """Two engines of Qwen3 30B A3B."""
    parallel = {"data_parallel_size": 2, "enable_expert_parallel": True}
    return settings(policy="vllm-v1", model="qwen3-30b-a3b", gpu="h100-80gb", **parallel, **switches)


def drawn(number: int) -> tuple[np.ndarray, ...]:
    """Arrivals, prompts and outputs of a load that queues now and then."""
    generator = np.random.default_rng(0)
    arrivals = np.cumsum(generator.integers(0, 5 * 10**10, number))
    return arrivals, generator.integers(1, 1500, number), generator.integers(1, 60, number)
