"""Cost of waste: held to what is known exactly, as another policy, block size or reservation."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.parallel import Workers
from fragmeter.experiments.sweep.waste_cost_table import ALL, WASTE, Side, saturated, waste_cost, waste_costs
from fragmeter.reports.figures import figures
from fragmeter.sim import settings, simulate
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.types.errors import UserError
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.users import Users
from fragmeter.sim.workload.workload import Workload
from fragmeter.traces import synthetic_pairs, workload

PAIRS = synthetic_pairs("vllm_sosp23_sharegpt_opt", 600, seed=0, max_model_len=2048)


def load(max_tokens: str | None = None) -> Workload:
    return workload(PAIRS, request_rate=float("inf"), max_tokens=max_tokens)


def gone(chosen: dict, bucket: str) -> float:
    """Requests/s without a bucket."""
    _, costs = waste_cost(settings(**chosen), load())
    return next(cost.request_throughput for cost in costs if cost.bucket == bucket)


def truth(max_tokens: str | None = None, **chosen) -> float:
    return saturated(settings(**chosen), load(max_tokens)).request_throughput


class TestAgainstTheTruth:
    """How far a pool that is right in the mean is off from a server that has no such waste."""

    @pytest.mark.slow
    def test_over_estimates_gone_is_to_know_the_outputs(self):
        # The rest that no request fits into grows with the pool; with true outputs it is small.
        assert gone({"policy": "orca"}, "over_estimate") == pytest.approx(truth("true", policy="orca"), rel=0.12)

    @pytest.mark.slow
    def test_round_up_gone_is_an_arena_that_rounds_to_blocks(self):
        other = truth(policy="orca-oracle", arena="best-fit")
        assert gone({"policy": "orca-oracle"}, "round_up") == pytest.approx(other, rel=0.06)

    @pytest.mark.slow
    @pytest.mark.parametrize(("block_size", "num_blocks"), [(16, 984), (128, 123)])
    def test_all_gone_under_paging_is_blocks_of_one_token(self, block_size, num_blocks):
        chosen = {"policy": "vllm-sosp23", "block_size": block_size, "num_gpu_blocks_override": num_blocks}
        other = truth(policy="vllm-sosp23", block_size=1, num_gpu_blocks_override=123 * 128)
        assert gone(chosen, ALL) == pytest.approx(other, rel=0.02)

    @pytest.mark.slow
    def test_all_gone_under_orca_is_paging(self):
        other = truth(policy="vllm-sosp23", block_size=1, num_gpu_blocks_override=983 * 16)
        assert gone({"policy": "orca"}, ALL) == pytest.approx(other, rel=0.08)


def alike(n: int, prompt: int, output: int, max_tokens: int) -> Workload:
    columns = (np.full(n, value) for value in (0, prompt, output, max_tokens))
    return Workload("alike", *columns)


def test_half_of_every_reservation_gone_is_a_pool_of_twice_the_size():
    # Of 200 slots that each asks for, half are for an output that never comes; ten are served at a time.
    chosen = settings(policy="orca", num_gpu_blocks_override=125, block_size=16)
    base, costs = waste_cost(chosen, alike(40, 20, 80, 180))
    found = {cost.bucket: cost for cost in costs}
    assert (base.num_blocks, base.shares["over_estimate"], base.shares["free"]) == (125, 0.5, 0)
    assert (found["over_estimate"].num_blocks, found["over_estimate"].charged) == (250, 1)
    twice = saturated(settings(policy="orca", num_gpu_blocks_override=250, block_size=16), alike(40, 20, 80, 180))
    assert found["over_estimate"].request_throughput == twice.request_throughput


def test_what_counts_is_done_while_some_wait():
    """Four tens, one after the other: no request waits once the last ten have begun."""
    chosen, work = settings(policy="orca", num_gpu_blocks_override=125, block_size=16), alike(40, 20, 80, 180)
    third_ends = np.sort(request_times(simulate(chosen, work)).finish_ticks)[29] / PER_SECOND
    base = saturated(chosen, work)
    assert base.request_throughput == pytest.approx(30 / third_ends)
    assert base.output_throughput == pytest.approx(30 * 80 / third_ends)


def test_what_is_not_there_costs_nothing_and_is_not_listed():
    base, costs = waste_cost(settings(policy="vllm-sosp23"), load())
    assert [cost.bucket for cost in costs] == [*(bucket for bucket in WASTE if base.shares[bucket]), ALL]
    assert not {"over_estimate", "round_up", "finished_hold", "stranded"} & {cost.bucket for cost in costs}
    block_tail = next(cost for cost in costs if cost.bucket == "block_tail")
    # Less than half a block of the pool.
    assert (block_tail.num_blocks, block_tail.request_throughput) == (base.num_blocks, base.request_throughput)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["static", "orca", "orca-max", "tgi", "vllm-v1"])
def test_pools_stand(policy):
    base, costs = waste_cost(settings(policy=policy, cost="roofline" if policy == "vllm-v1" else "paper"), load())
    for cost in costs:
        assert cost.num_blocks >= base.num_blocks
        # A chunk of orca-max is an eighth of the pool; a static server without waste has all requests in two batches.
        assert cost.charged == pytest.approx(1, abs={"orca-max": 0.07, "static": 0.04}.get(policy, 0.02))
        assert cost.request_throughput >= base.request_throughput * 0.99


@pytest.mark.slow
def test_between_two_pools_where_none_fits():
    """The pool of orca-max holds seven chunks of 128 blocks, and 87 more; of those eight would fill 1,024."""
    base, costs = waste_cost(settings(policy="orca-max"), load())
    stranded = next(cost for cost in costs if cost.bucket == "stranded")
    eight = saturated(settings(policy="orca-max", num_gpu_blocks_override=1024), load()).request_throughput
    between = base.request_throughput + (983 - 896) / 128 * (eight - base.request_throughput)
    assert stranded.request_throughput == pytest.approx(between, rel=0.001)


def test_too_few_requests_and_too_long_ones():
    with pytest.raises(UserError, match="holds all 5 requests at once, so that no waste costs anything"):
        waste_cost(settings(policy="orca"), alike(5, 10, 10, 10))
    with pytest.raises(UserError, match="request 0 needs a pool of 2 blocks, and there are 1; leave it out"):
        waste_cost(settings(policy="orca", num_gpu_blocks_override=1), alike(5, 10, 10, 10))
    # They wait for the budget of the first step only.
    with pytest.raises(UserError, match="none of 5 requests is finished while others wait"):
        waste_cost(settings(policy="vllm-sosp23", max_num_batched_tokens=2100), alike(5, 1000, 50, 50))


@pytest.mark.slow
def test_the_program(tmp_path, capsys):
    arguments = ["compare", "--waste", "--set", "policy=orca", "--set", "policy=orca-max", "--num-prompts", "80"]
    arguments += ["--jobs", "1", "--seeds", "2", "--price", "2", "--out", str(tmp_path / "page.html")]
    arguments += ["--json", str(tmp_path / "waste.json")]
    assert status(arguments) == DONE
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "waste.json").read_text())
    rows = {(row["side"], row["without"]): row for row in data["rows"]}
    base, row = rows["policy=orca-max", "none"], rows["policy=orca-max", "over_estimate"]
    assert f"{base['request_throughput']:.3f}" in printed
    assert f"x {row['gain']:.2f}" in printed
    assert row["least_gain"] <= row["gain"] <= row["most_gain"]
    # Dollars of an hour over tokens of an hour.
    assert row["cost_per_million_output_tokens"] == pytest.approx(2 / (row["output_throughput"] * 3600) * 1e6)
    assert "Cost of each kind of waste" in (tmp_path / "page.html").read_text()
    arguments[arguments.index("--jobs") + 1] = "2"
    assert status([*arguments[:-1], str(tmp_path / "again.json")]) == DONE
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "waste.json").read_bytes()


@pytest.mark.slow
def test_each_seed_draws_its_own_and_all_gpus_are_paid():
    pool = settings(policy="orca", num_gpu_blocks_override=400, tensor_parallel_size=2, pipeline_parallel_size=2)
    side = Side("two by two", Inputs(settings=pool, requests=Requests(num_prompts=40)))
    rows = {seeds: waste_costs([side], seeds, Workers(jobs=1), price=2)[0] for seeds in (1, 2)}
    second = replace(side, inputs=replace(side.inputs, settings=replace(pool, seed=1)))
    other = waste_costs([second], 1, Workers(jobs=1))[0]["request_throughput"]
    first = rows[1]["request_throughput"]
    assert other != first
    assert rows[2]["request_throughput"] == pytest.approx((first + other) / 2)
    assert rows[1]["cost_per_million_output_tokens"] == pytest.approx(
        2 * 4 / (rows[1]["output_throughput"] * 3600) * 1e6
    )


def test_users_that_would_wait_are_there_at_once_too():
    work, chosen = alike(40, 20, 80, 180), settings(policy="orca", num_gpu_blocks_override=125, block_size=16)
    waiting = replace(work, users=Users(3, np.full(40, 10**12)))
    assert waste_cost(chosen, waiting)[0].request_throughput == waste_cost(chosen, work)[0].request_throughput


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--waste", "out/vllm"], "compare --waste runs settings again; give them with --set"),
        (["--waste", "--request-rate", "2"], "compare --waste lets all requests arrive at once; leave out"),
        (["--waste", "--set", "request_rate=2"], "compare --waste lets all requests arrive at once; leave out"),
        (["--waste", "--price", "0"], "price = 0.0: must be positive"),
        (["--waste", "--seeds", "0"], "seeds = 0: must be at least 1"),
        (["--waste", "--set", "policy=orca", "--set", "policy=orca"], "is compared with itself"),
        (["--price", "2", "--set", "policy=orca", "--set", "policy=static"], "--price goes with --waste"),
    ],
)
def test_refused_values(flags, message, capsys):
    assert status(["compare", *flags]) == MISTAKE
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_picture_has_a_bar_for_each_row():
    gains = {("a", "none"): 1, ("a", "reserved"): 1.5, ("a", "all"): 2, ("b", "none"): 1, ("b", "all"): 3}
    rows = [
        {"side": side, "without": bucket, "gain": gain, "request_throughput": 1.0, "share_pct": 9.0}
        for (side, bucket), gain in gains.items()
    ]
    figure = figures.waste_cost(rows)
    assert {bar.name: list(bar.x) for bar in figure.data} == {"reserved": [0.5], "all": [1.0, 2.0]}
    assert list(figure.layout.yaxis.ticktext) == ["a", "b"]
    assert len(figure.layout.meta["numbers"]["rows"]) == 5
