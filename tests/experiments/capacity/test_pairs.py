"""``pairs``: prefill and decode apart, each on a card and with ranks of its own."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.capacity.candidates import CHECKPOINT, Candidate, candidates
from fragmeter.experiments.capacity.contender import Contender, Question
from fragmeter.experiments.capacity.pairs import Offer, Side, connects, offers, paired
from fragmeter.experiments.capacity.prices import Prices
from fragmeter.experiments.capacity.split import divided, prefilling
from fragmeter.experiments.capacity.tasks import Task
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.runs.grid import NONE
from fragmeter.experiments.runs.slo_check import Goal, check_times
from fragmeter.experiments.vllm_serve.line import ServeLine
from fragmeter.sim import settings
from fragmeter.sim.cluster import Cluster, Pair, cluster_times, simulate_cluster
from fragmeter.sim.metrics.objectives import objectives
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces.arrivals.pacing import at_rate, unit_gaps
from fragmeter.traces.arrivals.streams import stream
from trials import ended

MODEL = "qwen3-32b"


@cache
def side(card: str, ranks: str = "2", checkpoint: str = NONE, model: str = MODEL) -> Candidate:
    axes = {"tensor_parallel_size": [ranks], CHECKPOINT: [checkpoint]}
    line = ServeLine(model, {"max-model-len": "auto"}, version=None)
    (found,) = candidates(line, [card], axes, model, unlisted=["gpu", *axes])
    return found


def test_a_kv_cache_moves_between_servers_of_one_checkpoint_and_one_attention_backend():
    """The factors of ``compute_nixl_compatibility_hash``, and the ranks of ``_validate_remote_agent_handshake`` (vLLM 0.33)."""
    h100, h200 = side("h100-80gb"), side("h200")
    assert connects(h100, h200) and connects(h100, side("h100-80gb", "8"))
    # FlashAttention 3 keeps blocks in another layout than FlashInfer.
    assert not connects(h100, side("b200")) and connects(side("b200"), side("b300", "1"))
    assert not connects(h100, side("h200", "2", "Qwen/Qwen3-32B-FP8"))
    # Eight KV heads: eight ranks that prefill hold each once, and may send to fewer.
    assert connects(side("h100-80gb", "8"), h100)
    few = [side("h100-80gb", ranks, model="qwen3-30b-a3b") for ranks in ("8", "2")]
    assert few[0].started.launch.model.num_kv_heads == 4
    assert not connects(*few) and connects(*reversed(few))


@given(st.integers(2, 200), st.floats(0.01, 0.99))
def test_a_fleet_is_divided_so_that_its_shorter_side_is_longest(replicas, share):
    def shorter(prefill: int) -> float:
        return min(prefill / share, (replicas - prefill) / (1 - share))

    found = prefilling(replicas, share)
    assert 1 <= found < replicas
    assert shorter(found) == pytest.approx(max(map(shorter, range(1, replicas))))
    assert divided(replicas, "round-robin", "auto", share).prefill_replicas == found


RATE = st.sampled_from([0.0, 0.4, 1.0, 2.5, 7.0])


@given(st.lists(st.tuples(RATE, RATE), min_size=3, max_size=3), st.floats(0.5, 30))
def test_offers_are_all_pairs_by_the_cost_of_both_sides(rates, wanted):
    members = [side("h100-80gb"), side("h200", "4"), side("b200")]
    prices = Prices("here", "USD", {"h100-80gb": 2.0, "h200": 3.0, "b200": 5.0}, {})
    found = offers([Side(each, *rate) for each, rate in zip(members, rates, strict=True)], prices, wanted)
    expected = {}
    for one, (prefill, _) in zip(members, rates, strict=True):
        for other, (_, decode) in zip(members, rates, strict=True):
            if prefill and decode and connects(one, other):
                sizes = [next(n for n in range(1, 99) if n * rate >= wanted * (1 - 1e-9)) for rate in (prefill, decode)]
                hours = [each.num_gpus * prices.of(each.started.launch.gpu.name) for each in (one, other)]
                expected[paired(one, other).name] = sum(size * hour for size, hour in zip(sizes, hours, strict=True))
    assert {each.candidate.name: each.cost for each in found} == pytest.approx(expected)
    assert [each.cost for each in found] == sorted(each.cost for each in found)
    for each in found:
        assert each.hoped <= each.cost


@given(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_cheaper_divisions_are_all_that_both_sides_may_serve_with(division, least):
    offer = Offer(side("h100-80gb"), 0.5, (2.0, 3.0), division, least)
    found = offer.cheaper(division)
    cost = 2 * division[0] + 3 * division[1]
    expected = {(p, d) for p in range(least[0], 50) for d in range(least[1], 50) if 2 * p + 3 * d < cost}
    # No side needs more than all replicas of the fleet that serves.
    assert {*found} == {each for each in expected if max(each) <= sum(division)}
    assert [offer.cost_of(each) for each in found] == sorted(map(offer.cost_of, found), reverse=True)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 4))
def test_of_the_divisions_that_serve_a_draw_a_cheaper_one_is_taken(prefill, decode, more):
    """Of a made-up fleet that needs so many of each side: what is found serves, costs no more, and is what the search starts from
    only where nothing between serves."""
    candidate = paired(side("h100-80gb"), side("h100-80gb", "4"))
    member = Contender(candidate, Question(None, GOAL, [0], 10.0), None)
    begun = prefill + more, decode + more
    offer = Offer(candidate, begun[0] / sum(begun), (2.0, 4.0), begun, (1, 1))
    runs: list[tuple[int, int]] = []

    def serves(asked: Task[bool]) -> bool:
        cluster = asked.more[0]
        runs.append((cluster.prefill_replicas, cluster.decode_replicas))
        return runs[-1][0] >= prefill and runs[-1][1] >= decode

    size, _ = ended(member.pair_size(offer), serves)
    found = member.divided_sizes(size)
    assert sum(found) == size == member.drawn and found[0] >= prefill and found[1] >= decode
    assert offer.cost_of(found) <= offer.cost_of(begun)
    assert found in runs


def test_the_two_sides_have_one_kv_cache():
    chosen = settings(policy="vllm-v1", model=MODEL, gpu="h100-80gb", tensor_parallel_size=2)
    work = Workload("one", *(np.array([each]) for each in (0, 100, 10)))
    for changed, field in (({"model": "qwen3-14b"}, "model"), ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype")):
        other = settings(**{"policy": "vllm-v1", "model": MODEL, "gpu": "h200", "tensor_parallel_size": 4} | changed)
        with pytest.raises(SettingError, match=field):
            simulate_cluster(chosen, work, Pair(prefill_replicas=1, decode_replicas=1, decode=other))


def test_each_side_takes_the_steps_of_its_own_card():
    """One request alone: its first token comes as on the card that prefills, the others as on the card that decodes."""
    slow, fast = (
        settings(policy="vllm-v1", model=MODEL, gpu="h100-80gb", tensor_parallel_size=ranks) for ranks in (2, 8)
    )
    work, sides = (
        Workload("one", *(np.array([each]) for each in (0, 3000, 50))),
        {"prefill_replicas": 1, "decode_replicas": 1},
    )
    alike = {
        name: cluster_times(simulate_cluster(chosen, work, Cluster(**sides)))
        for name, chosen in (("slow", slow), ("fast", fast))
    }
    mixed = cluster_times(simulate_cluster(slow, work, Pair(**sides, decode=fast)))
    assert mixed.ttft_ms.tolist() == alike["slow"].ttft_ms.tolist() != alike["fast"].ttft_ms.tolist()
    assert mixed.tpot_ms.tolist() == pytest.approx(alike["fast"].tpot_ms.tolist())


LONGER = 1.04
GOAL = Goal(objectives(["ttft:1000", "tpot:25"]))


def attained(chosen: Any, fleet: Cluster) -> float:
    """The share of the requests of another draw that meet the goal."""
    count, gaps = 400, unit_gaps(400, 1.0, stream(77, "arrivals"))
    work = Workload("drawn", at_rate(7.0, gaps), np.full(count, 6000), np.full(count, 400))
    return check_times(work, cluster_times(simulate_cluster(chosen, work, fleet)), GOAL).attained


@pytest.mark.slow
def test_the_plan_buys_a_pair_where_it_is_cheaper_and_says_where_it_is_not(tmp_path, capsys):
    """Long prompts beside tight TPOT: two ranks prefill and four decode for less than any fleet of equal replicas."""
    prices = tmp_path / "prices.json"
    prices.write_text('{"per_gpu_hour": {"h100-80gb": 3.0}}')
    asked = [
        "plan",
        "--model",
        MODEL,
        "--prices",
        str(prices),
        "--kv-cache-dtype",
        "auto",
        "--num-prompts",
        "400",
        "--seeds",
        "1",
    ]
    load = ["--request-rate", "7", "--input-len", "6000", "--output-len", "400", "--goodput", "ttft:1000", "tpot:25"]
    assert status([*asked, *load, "--json", str(tmp_path / "plan.json")]) == DONE
    found = json.loads((tmp_path / "plan.json").read_text())
    best, bill = found["recommended"], found["candidates"][0]["bill"]
    assert best["decode"] != NONE and len(found["serve"]) == 2
    assert all(line.startswith("vllm serve qwen3-32b --tensor-parallel-size") for line in found["serve"])
    assert ['"kv_producer"' in found["serve"][0], '"kv_consumer"' in found["serve"][1]] == [True, True]
    # Another draw, with steps that take as long as one in four servers' at least: the pair serves it, and equal replicas on as many GPUs do not.
    ranks, other = int(best["tensor_parallel_size"]), int(best["decode"].split()[-1])
    prefill, replicas = found["candidates"][0]["prefill_replicas"], bill["replicas"]
    assert bill["gpus"] == prefill * ranks + (replicas - prefill) * other
    of_side = [
        settings(policy="vllm-v1", model=MODEL, gpu="h100-80gb", tensor_parallel_size=each, step_scale=LONGER)
        for each in (ranks, other)
    ]
    pair = Pair(prefill_replicas=prefill, decode_replicas=replicas - prefill, decode=of_side[1])
    assert attained(of_side[0], pair) >= GOAL.attainment
    for each in (2, 4, 8):
        alike = settings(policy="vllm-v1", model=MODEL, gpu="h100-80gb", tensor_parallel_size=each, step_scale=LONGER)
        assert attained(alike, Cluster(num_replicas=max(1, bill["gpus"] // each))) < GOAL.attainment
    capsys.readouterr()
    load[1], load[3], load[-1] = "1", "500", "tpot:50"
    assert status([*asked, *load]) == DONE
    said = capsys.readouterr().out
    assert "Prefill and decode apart are not cheaper by a few step times: the nearest pair is" in said
