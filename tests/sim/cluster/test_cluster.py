"""Several replicas behind a router: leap and step, one replica and many, what routers see and what they do with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cluster_runs import ROUTERS, Views, all_times, same_cluster, serve_cluster, watched
from engine_runs import serve, settings_of, workload_of
from fragmeter.experiments.runs.inputs import Inputs
from fragmeter.experiments.runs.serving import prepare
from fragmeter.experiments.runs.sweeping import run_point
from fragmeter.sim import settings, simulate
from fragmeter.sim.cluster import ClusterRun, cluster, simulate_cluster
from fragmeter.sim.memory import BUCKETS
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool, Request
from same_runs import same
from shared_prefixes import shared_cases
from strategies import Case, LineCost, crowded_cases, long_cases, small_cases
from token_times import token_ticks

LOOKING = ROUTERS[1:]
STATIC = ("static", "fastertransformer")
cases = st.one_of(crowded_cases(), long_cases())


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=4)
@given(case=cases, replicas=st.integers(2, 3), router=st.sampled_from(LOOKING))
def test_leap_and_step_are_the_same_bits(policy, case, replicas, router):
    """Invariant 6 behind routers that look at replicas in the middle of their leaps, and cut these."""
    leap_and_step(policy, case, replicas, router)


@pytest.mark.slow
@hypothesis_settings(max_examples=12)
@given(case=cases, replicas=st.integers(2, 3), router=st.sampled_from(LOOKING))
def test_leap_and_step_are_the_same_bits_where_steps_are_scheduled_ahead(case, replicas, router):
    leap_and_step("vllm-v1", case, replicas, router, async_scheduling=True)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=600)
@given(case=cases, replicas=st.integers(2, 3), router=st.sampled_from(LOOKING))
def test_leap_and_step_are_the_same_bits_at_length(policy, case, replicas, router):
    """Invariant 6 behind routers."""
    leap_and_step(policy, case, replicas, router)


def leap_and_step(policy: str, case: Case, replicas: int, router: str, **switches: bool) -> None:
    """The same runs, and the same requests, tokens and slots that the router saw on every replica at every arrival."""
    served, views = [], []
    for leap in (True, False):
        noting = Views()
        with noting.noted():
            served.append(serve_cluster(policy, case, replicas, router, leap=leap, **switches))
        assert not noting.differences
        views.append(noting.seen)
    assert views[0] == views[1]
    same_cluster(*served)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["vllm-v1", "sglang"])
@hypothesis_settings(max_examples=12)
@given(case=shared_cases(), replicas=st.integers(1, 3), router=st.sampled_from(LOOKING))
def test_leap_and_step_are_the_same_bits_where_prefixes_are_cached(policy, case, replicas, router):
    """Invariant 6, with requests that begin alike."""
    noting = Views()
    with noting.noted():
        leapt, stepped = (serve_cluster(policy, case, replicas, router, leap=leap) for leap in (True, False))
    assert not noting.differences
    same_cluster(leapt, stepped)
    for run, other in zip(leapt.runs, stepped.runs, strict=True):
        assert look_ups(run) == look_ups(other)


@pytest.mark.parametrize("policy", ["vllm-v1", "sglang"])
def test_prefixes_can_be_cached_where_contents_are_unknown(policy):
    """Then no request finds what another left, on either replica."""
    requests = [Request(1000 * place, 20, 5) for place in range(6)]
    case = Case(requests, Pool(100, 4), Limits(40), LineCost())
    served = serve_cluster(policy, case, 2, ROUTERS[0], enable_prefix_caching=True)
    assert [look_ups(run)[2] for run in served.runs] == [[0, 0, 0]] * 2


def look_ups(run) -> list[list[int]]:
    return [column.tolist() for column in run.replica.memory.cache_log.look_up_columns().values()]


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=3)
@given(case=st.one_of(small_cases(), cases), router=st.sampled_from(ROUTERS), leap=st.booleans())
def test_a_cluster_of_one_is_a_replica_alone(policy, case, router, leap):
    """Whatever the router, and whether or not it looks: the bits of ``simulate``, but for requests that are refused."""
    alone, run = serve(policy, case, leap=leap), serve_cluster(policy, case, 1, router, looks=True, leap=leap)
    assert run.refused.tolist() == alone.refused.tolist()
    if alone.refused.any():
        assert all_times(run) == dict(all_times_alone(alone).items())
    else:
        same(run.runs[0], alone)


def all_times_alone(run) -> dict[int, tuple[int, ...]]:
    return all_times(
        ClusterRun(run.settings, cluster(), run.workload, (run,), (np.arange(len(run.workload)),), None, {})
    )


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=2)
@given(case=cases, replicas=st.integers(2, 4))
def test_what_is_known_beforehand_is_what_is_sent_one_by_one(policy, case, replicas):
    """Round robin, which looks at no replica, with engines that know what is to come and with ones that do not."""
    split, sent = (serve_cluster(policy, case, replicas, "round-robin", looks) for looks in (False, True))
    same_cluster(split, sent)
    served = np.flatnonzero(~split.refused)
    assert [rows.tolist() for rows in split.rows] == [served[place::replicas].tolist() for place in range(replicas)]


@pytest.mark.parametrize("router", ROUTERS)
def test_progress_rises_to_the_number_of_requests_and_changes_nothing(router):
    requests = [Request(1000 * place, 20, 5) for place in range(30)]
    work, chosen = workload_of(requests, 40), settings_of("vllm-v1", Pool(100, 4), Limits(40))
    counts: list[int] = []
    arguments = chosen, work, cluster(num_replicas=3, router=router), LineCost()
    same_cluster(simulate_cluster(*arguments, progress=counts.append), simulate_cluster(*arguments))
    assert len(counts) > 3 and counts == sorted(counts) and counts[-1] == 30


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - set(STATIC)))
@hypothesis_settings(max_examples=3)
@given(case=cases)
def test_a_router_sees_the_tokens_that_there_are(policy, case):
    """Prompts, and outputs by the last boundary."""
    check_views(policy, case, 2)


def test_a_router_sees_what_a_preempted_request_had_generated():
    """Two requests of which the pool holds one to the end, and others that come while the second waits again."""
    small = [Request(100 * place, 1, 1) for place in range(1, 25)]
    case = Case(
        [Request(0, 6, 12), Request(0, 6, 12), *small], Pool(6, 4), Limits(24, watermark_fraction=0.0), LineCost()
    )
    run = check_views("vllm-sosp23", case, 1)
    cut = run.runs[0].log.evictions["ticks"]
    assert len(cut) and any(cut[0] < request.arrival_ticks for request in small)


def check_views(policy: str, case: Case, replicas: int) -> ClusterRun:
    """What a router saw, against the times of tokens, which the ledger has afterwards."""
    noting = Views()
    with noting.noted():
        run = serve_cluster(policy, case, replicas, "least-outstanding-tokens")
    work, tokens, times = run.workload, token_ticks(run), all_times(run)
    for row, seen in noting.seen:
        now = work.arrival_ticks[row]
        for rows, (requests, outstanding, _) in zip(run.rows, seen, strict=True):
            there = [other for other in rows[rows < row].tolist() if times[other][2] >= now]
            assert requests == len(there)
            so_far = sum(int(np.searchsorted(tokens[other], now)) for other in there)
            assert outstanding == work.prompt_tokens[there].sum() + so_far
    return run


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=3)
@given(case=st.one_of(small_cases(), cases), replicas=st.integers(2, 3), router=st.sampled_from(ROUTERS))
def test_littles_law_holds_of_the_cluster(policy, case, replicas, router):
    """The time-integral of the number in the system, by the engines' queues from event to event, is the sum of the
    times that requests spend in it, by the ledgers: to the tick."""
    with watched() as clocks:
        run = serve_cluster(policy, case, replicas, router, looks=True, core=False)
    sojourns = sum(int((times.finish_ticks - times.arrival_ticks).sum()) for times in map(request_times, run.runs))
    assert clocks[0].request_ticks == sojourns


@pytest.mark.parametrize("policy", POLICIES)
@hypothesis_settings(max_examples=2)
@given(case=cases, replicas=st.integers(2, 4), router=st.sampled_from(ROUTERS))
def test_every_request_is_served_once_and_every_slot_is_in_a_bucket(policy, case, replicas, router):
    """Invariants 1, 4 and 5 over a cluster: all ledgers span all of it."""
    run = serve_cluster(policy, case, replicas, router)
    rows = np.concatenate(run.rows)
    assert sorted(rows.tolist()) == np.flatnonzero(~run.refused).tolist()
    assert sorted(all_times(run)) == sorted(rows.tolist())
    for part in run.runs:
        window = part.accounts.window()
        assert list(window.slot_ticks) == list(BUCKETS)
        assert sum(window.slot_ticks.values()) == part.replica.memory.capacity_slots * run.end_ticks
    assert run.end_ticks == max((times[2] for times in all_times(run).values()), default=0)


def log(run: ClusterRun) -> list[tuple[int, ...]]:
    """(request, replica, first scheduled, first token, finish)."""
    where = {int(row): number for number, rows in enumerate(run.rows) for row in rows}
    return [(row, where[row], *times[:3]) for row, times in sorted(all_times(run).items())]


def test_a_leap_is_cut_at_the_first_boundary_after_a_request_is_sent():
    """Steps of decodes take 114 alone and 127 as two; a prefill of p tokens 7p more. 0 prefills to 129 on replica 0; its
    leap would end at 129 + 39 * 114. 1 comes at 500 and sees 4 + 4 tokens there, so it goes to replica 1. 2 comes at
    813, which is a boundary of replica 0: it sees 4 + 6 tokens there, as before the boundary, and 12 + 2 on replica 1,
    and is there when that step is decided."""
    requests = [Request(0, 4, 40), Request(500, 12, 3), Request(813, 3, 3)]
    case = Case(requests, Pool(100, 1), Limits(50), LineCost())
    noting = Views()
    with noting.noted():
        run = serve_cluster("vllm-sosp23", case, 2, "least-outstanding-tokens")
    assert [[tokens for _, tokens, _ in seen] for _, seen in noting.seen] == [[0, 0], [4 + 4, 0], [4 + 6, 12 + 2]]
    assert log(run) == [
        (0, 0, 0, 129, 129 + 6 * 114 + 135 + 2 * 127 + 30 * 114),
        (1, 1, 500, 685, 913),
        (2, 0, 813, 948, 948 + 2 * 127),
    ]


class TestEnginesThatShareExperts:
    chosen = settings(policy="vllm-v1", model="mixtral-8x7b", gpu="h200", data_parallel_size=2, cost="roofline")

    @pytest.mark.parametrize(
        ("sizes", "field"),
        [
            ({"num_replicas": 3}, "num_replicas = 3"),
            ({"prefill_replicas": 1, "decode_replicas": 2}, "prefill_replicas = 1"),
            ({"prefill_replicas": 2, "decode_replicas": 3}, "decode_replicas = 3"),
        ],
    )
    def test_are_never_parted(self, sizes, field):
        with pytest.raises(SettingError, match=f"^{field}: must be a multiple of data_parallel_size 2"):
            simulate_cluster(self.chosen, FOUR, cluster(**sizes))

    def test_take_the_pool_and_the_steps_of_their_half_of_the_experts(self):
        """Two engines with requests of their own, and no more memory for the weights than two tensor-parallel GPUs have."""
        run = simulate_cluster(self.chosen, FOUR, cluster(num_replicas=2))
        assert [len(rows) for rows in run.rows] == [2, 2]
        alone = simulate_cluster(replace(self.chosen, data_parallel_size=1), FOUR, cluster(num_replicas=2))
        assert run.runs[0].replica.num_blocks > 2 * alone.runs[0].replica.num_blocks
        assert run.end_ticks < alone.end_ticks

    def test_a_model_without_experts_shares_nothing(self):
        with pytest.raises(
            SettingError, match="^data_parallel_size = 2: llama-3.1-8b has no experts; use --num-replicas"
        ):
            simulate_cluster(replace(self.chosen, model="llama-3.1-8b"), FOUR, cluster(num_replicas=2))
        with pytest.raises(SettingError, match="^enable_expert_parallel = True: one GPU holds all experts"):
            simulate(replace(self.chosen, data_parallel_size=1, enable_expert_parallel=True), FOUR)

    def test_without_a_number_of_replicas_there_are_all_of_them(self):
        assert prepare(Inputs(settings=self.chosen)).cluster.num_replicas == 2

    def test_a_sweep_of_single_replicas_refuses_them(self):
        assert "data_parallel_size = 2: a sweep simulates one replica" in run_point("", self.chosen, FOUR).error


FOUR = Workload("four", np.zeros(4), np.full(4, 100), np.full(4, 50))


def test_a_replica_knows_who_asks_for_all_of_its_tokens():
    columns, ignored = (np.arange(4), np.full(4, 40), np.full(4, 8)), np.array([0, 1, 1, 0])
    work = Workload("asking", *columns, max_tokens=np.full(4, 8), ignore_eos=ignored)
    found = simulate_cluster(settings(policy="sglang", num_gpu_blocks_override=300), work, cluster(num_replicas=2))
    for rows, run in zip(found.rows, found.runs, strict=True):
        assert run.workload.ignore_eos.tolist() == ignored[rows].tolist()
