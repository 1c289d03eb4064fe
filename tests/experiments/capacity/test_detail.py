"""Results of a recommendation at its rate and at shares of it, and what limits a higher rate."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

import numpy as np
import pytest

from engine_runs import settings_of
from fragmeter.experiments.capacity.detail import detail, limit, waiting_shares
from fragmeter.experiments.capacity.fleet import serve
from fragmeter.experiments.capacity.load import Load
from fragmeter.experiments.capacity.max_rate import MaxRate
from fragmeter.experiments.capacity.text import cache_text
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.near_saturation import with_steps
from fragmeter.experiments.runs.slo_check import Goal, SloCheck, check_slo
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.reports.data.cache_worth import worth_sentence
from fragmeter.sim import simulate
from fragmeter.sim.cluster import Cluster
from fragmeter.sim.config.settings import settings
from fragmeter.sim.metrics.objectives import Objectives
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.spec.startup.capacity import stage_memories
from fragmeter.sim.workload.workload import Workload
from oracle import Limits, Pool
from ramp_cost import RampCost

CHOSEN = settings(policy="vllm-v1", model="llama-3.1-8b", gpu="a100-80gb")
LOAD = Load(Inputs(settings=CHOSEN, requests=Requests(num_prompts=100, dataset="alpaca")))
GOAL = Goal(Objectives(ttft=500, tpot=50))


class TestDetail:
    @pytest.mark.slow
    def test_latencies_are_reported_at_quarters_of_the_rate(self):
        found = detail(CHOSEN, LOAD, GOAL, 3, Cluster(), 20.0, 40.0)
        assert [point.request_rate for point in found.curve] == [5.0, 10.0, 15.0, 20.0]
        work = LOAD.draw(3).at(20.0)
        alone = summary(simulate(CHOSEN, work))
        assert found.metrics["median_tpot_ms"] == alone["median_tpot_ms"]
        assert found.curve[-1].p90_ttft_ms == alone["p90_ttft_ms"]
        assert found.curve[-1].tokens_per_s_per_user == pytest.approx(1000 / alone["median_tpot_ms"])
        slow = summary(simulate(CHOSEN, LOAD.draw(3).at(5.0)))
        assert found.curve[0].p90_ttft_ms == slow["p90_ttft_ms"]
        assert found.attained == check_slo(CHOSEN, work, GOAL).attained
        buckets = found.buckets_pct
        used = sum(share for name, share in buckets.items() if name not in ("free", "cached"))
        assert found.kv_cache_pct == pytest.approx(used) and 0 < used < 100

    def test_rates_of_a_fleet_are_those_of_a_replica(self):
        found = detail(CHOSEN, LOAD, GOAL, 0, Cluster(num_replicas=2), 20.0, 40.0)
        assert [point.request_rate for point in found.curve] == [2.5, 5.0, 7.5, 10.0]

    def test_all_requests_at_once_have_no_shares_of_a_rate(self):
        assert detail(CHOSEN, LOAD, GOAL, 0, Cluster(), inf, 40.0).curve == ()

    @pytest.mark.slow
    def test_a_divided_fleet_is_limited_by_the_part_that_misses(self):
        """No prefill takes less than a microsecond, and no decode."""
        divided = Cluster(prefill_replicas=1, decode_replicas=1)
        for limits, cause in (({"ttft": 0.001}, "prefill"), ({"tpot": 0.001}, "decode")):
            found = detail(CHOSEN, LOAD, Goal(Objectives(**limits)), 0, divided, 5.0, 40.0).limit
            (name,) = limits
            assert (found.objective, found.cause, found.missed) == (name, cause, {name: 1.0})


class TestWaiting:
    """Forty requests at once, each of 32 prompt tokens and 20 of output; steps of 100 ticks."""

    def run(self, blocks: int, num_seqs: int):
        forty = np.ones(40, dtype=np.int64)
        work = Workload("crowd", 0 * forty, 32 * forty, 20 * forty)
        chosen = settings_of(
            "vllm-v1", Pool(blocks, 16), Limits(64, max_num_seqs=num_seqs, max_num_batched_tokens=2048)
        )
        return simulate(chosen, work, RampCost(base_ticks=100))

    def test_for_a_place_in_the_batch(self):
        """Ten batches of four: while the last one runs none waits."""
        assert waiting_shares(self.run(400, 4)) == pytest.approx({"max_num_seqs": 0.9, "memory": 0, "steps": 0})

    def test_for_blocks(self):
        """A request has two blocks at first and four at its end. In sixteen blocks and the null block no place is missing, and a
        prompt and a block to come for it are never free at once while others wait."""
        found = waiting_shares(self.run(17, 40))
        assert found["max_num_seqs"] == found["steps"] == 0 and 0.7 < found["memory"] < 1

    def test_most_of_the_wait_decides(self):
        found = limit(self.run(400, 4), Goal(Objectives(ttft=1e-9)))
        assert (found.cause, found.objective, found.missed) == ("max_num_seqs", "ttft", {"ttft": 1.0})
        assert found.preemptions == 0


def test_the_spread_of_seeds_is_none_where_one_takes_no_rate():
    met = SloCheck(True, 8, 8, {})
    assert MaxRate(met, None, (0.0, 3.0), 0.0).spread == MaxRate(met, None, (inf, inf), inf).spread == 0.0


def test_the_memory_of_cached_blocks_in_vain_has_a_price():
    """Of an H100 whose KV cache is the share of its memory that the start says; 60 % of its slots are in vain."""
    pct = {"hit_later": 10.0, "too_late": 20.0, "never": 40.0, "undecided": 5.0}
    found = {"pool_pct": pct}
    server = started(parse_serve("vllm serve llama-3.1-8b"), "h100-80gb", None)
    answer = SimpleNamespace(at_rate=SimpleNamespace(cache_worth=found), candidate=SimpleNamespace(started=server))
    (stage,) = stage_memories(server.launch)
    price = 10 * stage.kv_cache_bytes / stage.total_bytes * 0.6
    (text,) = cache_text(answer, SimpleNamespace(per_hour=10.0), "USD")
    assert (
        text
        == f"Prefix cache: {worth_sentence(found)} The memory of those without a hit is {price:,.2f} USD an hour of the bill."
    )
    pct["undecided"] = 90.0
    (text,) = cache_text(answer, SimpleNamespace(per_hour=10.0), "USD")
    assert "too early" in text and "USD" not in text
    assert (
        cache_text(SimpleNamespace(at_rate=SimpleNamespace(cache_worth=None)), SimpleNamespace(per_hour=1.0), "USD")
        == []
    )


def test_a_plan_has_the_range_of_its_fleet():
    """The ends are the fleet's runs with other step times; in half of the load latency is no range."""
    chosen = settings(cost="paper")
    load, fleet = Load(Inputs(settings=chosen, requests=Requests(num_prompts=300))), Cluster(num_replicas=2)
    goal = Goal(Objectives(ttft=60_000))
    found = {rate: detail(chosen, load, goal, 0, fleet, rate, rate) for rate in (2.0, 3.8)}
    assert (found[2.0].load, found[2.0].near_saturation) == ("light", None)
    near, work = found[3.8].near_saturation, load.draw(0, 2).at(3.8)
    for end, factor in (("shorter", 0.95), ("longer", 1.05)):
        times = serve(with_steps(chosen, factor), work, fleet).times
        assert getattr(near, end)["mean_ttft_ms"] == times.ttft_ms.mean()
    assert near.longer["mean_ttft_ms"] > 1.5 * near.shorter["mean_ttft_ms"] and found[3.8].load == "busy"
