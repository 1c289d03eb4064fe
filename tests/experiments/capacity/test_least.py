"""The fewest replicas for a rate, by the data sheet: no run is faster, and no plan buys fewer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.capacity import tasks
from fragmeter.experiments.capacity.candidates import Candidate, candidates
from fragmeter.experiments.capacity.least import fewest, ideal_replica
from fragmeter.experiments.capacity.max_rate import go_ahead
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.vllm_serve.line import ServeLine
from fragmeter.sim import Workload, simulate
from fragmeter.sim.config.unread import only_read
from fragmeter.sim.cost.ideal import _attended
from fragmeter.sim.spec import Span, model
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.content import PromptContent

DRAFTS = (
    '{"method":"ngram","num_speculative_tokens":3,"rejection_sample_method":"synthetic",'
    '"synthetic_acceptance_rates":[1.0,1.0,1.0]}'
)
SERVERS = [
    ("opt-13b", "a100-40gb", {}),
    ("opt-13b", "a100-40gb", {"policy": ["orca-max"]}),
    ("opt-13b", "a100-40gb", {"policy": ["static"]}),
    ("llama-3.1-8b", "h100-80gb", {"speculative_config": [DRAFTS]}),
    ("llama-3.1-8b", "h200", {"quantization": ["fp8"], "kv_cache_dtype": ["fp8"]}),
    ("llama-3.1-8b", "rtx-4090", {"max_model_len": ["4096"]}),
    ("llama-3.1-8b", "mi300x", {}),
    ("llama-3.1-70b", "h100-80gb", {"pipeline_parallel_size": ["4"]}),
    ("gpt-oss-20b", "h100-80gb", {}),
    ("gemma-3-27b", "h100-80gb", {"max_model_len": ["32768"]}),
    ("deepseek-v3", "h200", {"tensor_parallel_size": ["8"]}),
]


def candidate_of(name: str, gpu: str, axes: dict[str, list[str]] | None = None) -> Candidate:
    (found,) = candidates(ServeLine(name, {}), [gpu], axes or {})
    assert found.settings is not None
    return found


@pytest.mark.parametrize("prompt, output", [(1200, 4), (20, 400)], ids=["prompts", "outputs"])
@pytest.mark.parametrize("name, gpu, axes", SERVERS, ids=[" ".join(map(str, each)) for each in SERVERS])
def test_no_run_takes_less_than_the_data_sheet_says(name, gpu, axes, prompt, output):
    """All requests at once; and the bound is not far below, for a replica that is filled."""
    candidate, rng = candidate_of(name, gpu, axes), np.random.default_rng(0)
    lengths = rng.integers(prompt // 2, prompt, 150), rng.integers(output // 2, output, 150)
    work = Workload("all at once", np.zeros(150, dtype=np.int64), *lengths)
    run = simulate(only_read(candidate.settings, work), work)
    least_s = max(each.sum() for each in ideal_replica(candidate).seconds(work))
    took_s = run.log.end_ticks / PER_SECOND
    assert least_s < took_s < 60 * least_s


def test_weights_and_tokens_by_hand():
    """Llama 3.1 8B on an H100: 8.03 G parameters less the embedding, twice as many flops a token at 989 T/s; a prompt of 1,000
    tokens and one output token take 15.2 ms, and so 66 of them a second need a replica and 67 need two."""
    candidate = candidate_of("llama-3.1-8b", "h100-80gb")
    work = Workload("prompts", [0], [1000], [1])
    reading, computing = ideal_replica(candidate).seconds(work)
    embedding = 128_256 * 4096
    used = model("llama-3.1-8b").num_params - 2 * embedding - (2 * 32 + 1) * 4096
    assert reading[0] == 0 and computing[0] == pytest.approx(2 * used * 1000 / 989.4e12, rel=1e-3)
    rates = [1 / computing[0] * factor for factor in (0.999, 1.001, 9.999)]
    assert [fewest(candidate, work, rate, 1.0) for rate in rates] == [1, 2, 10]
    # Outputs of 101 tokens: 256 sequences or more share the weights, none the keys and values.
    longer = Workload("outputs", [0], [1000], [101])
    slot_bytes, weights = 131_072, 2 * used + 2 * embedding
    kv = slot_bytes * sum(range(1001, 1101))
    share = 100 * weights / ideal_replica(candidate).max_num_seqs
    assert ideal_replica(candidate).seconds(longer)[0][0] == pytest.approx((kv + share) / 3.35e12, rel=1e-2)


def test_the_share_that_must_be_served_is_the_cheapest_one():
    """Nine of ten requests are short; the long one may miss."""
    candidate = candidate_of("llama-3.1-8b", "h100-80gb")
    work = Workload("one long", [0] * 10, [100] * 9 + [9000], [1] * 10)
    every, most = (fewest(candidate, work, 10_000.0, share) for share in (1.0, 0.9))
    assert every / most == pytest.approx(11, rel=0.1)


def test_prompts_that_may_be_cached_count_for_nothing():
    candidate = candidate_of("llama-3.1-8b", "h100-80gb")
    alone = Workload("alone", [0, 0], [500, 500], [2, 2])
    shared = Workload("shared", [0, 0], [500, 500], [2, 2], content=PromptContent.of_sessions(np.array([0, 0])))
    costs = [max(each.sum() for each in ideal_replica(candidate).seconds(work)) for work in (alone, shared)]
    assert costs[0] > 20 * costs[1] > 0


@given(prompt=st.integers(1, 60), decodes=st.integers(0, 60), window=st.integers(1, 80))
def test_contexts_of_decodes_are_counted_one_by_one(prompt, decodes, window):
    contexts = range(prompt + 1, prompt + decodes + 1)
    lengths = np.array([float(prompt)]), np.array([float(decodes)])
    assert _attended(Span(), *lengths)[0] == sum(contexts)
    assert _attended(Span("sliding", window), *lengths)[0] == sum(min(each, window) for each in contexts)


PLAN = ["plan", "--model", "opt-13b", "--goodput", "ttft:1000", "--num-prompts", "100", "--seeds", "1", "--jobs", "1"]


@pytest.mark.parametrize("rate", ["1e9", "1e300"])
def test_a_rate_beyond_every_fleet_is_answered_by_the_bound_without_a_run(rate, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tasks, "carry_out", lambda *_: pytest.fail("a run was begun"))
    out = tmp_path / "out"
    assert status([*PLAN, "--gpu", "a100-40gb,h100-80gb", "--request-rate", rate, "--out", str(out)]) == DONE
    document = json.loads((out / "plan.json").read_text())
    least = {each["candidate"]["gpu"]: each["least_replicas"] for each in document["candidates"]}
    # A request of ShareGPT takes between 1 ms and 1 s of a GPU.
    assert all(1e-3 < count / float(rate) < 1 for count in least.values())
    assert least["a100-40gb"] > 2 * least["h100-80gb"]
    assert document["recommended"] is None and document["recommendation"].startswith("Buy at least ")
    assert f"{least['h100-80gb']:,}" in document["recommendation"] or rate == "1e300"
    assert "x h100-80gb" in document["recommendation"] and "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_burst_that_a_few_replicas_serve_buys_no_fewer_than_the_bound(capsys):
    """A hundred requests at once are over soon: two replicas meet the goal, and a load of this rate needs tens."""
    assert status([*PLAN, "--gpu", "h100-80gb", "--request-rate", "1000", "--json", "-"]) == DONE
    (candidate,) = json.loads(capsys.readouterr().out)["candidates"]
    assert candidate["bill"]["replicas"] >= candidate["least_replicas"] > 20
    assert min(each["replicas"] for each in candidate["fleet"]["tried"]) >= candidate["least_replicas"]


@pytest.mark.slow
def test_a_rate_beyond_every_fleet_by_what_one_replica_serves_is_not_searched_for(capsys, monkeypatch):
    """Between the bound and what full replicas serve: no fleet is simulated."""
    run, works = tasks.carry_out, []

    def noted(name, asked, *more):
        works.append(asked.work)
        return run(name, asked, *more)

    monkeypatch.setattr(tasks, "carry_out", noted)
    tokens = [
        "plan",
        "--model",
        "opt-13b",
        "--goodput",
        "ttft:60000",
        "--num-prompts",
        "600",
        "--seeds",
        "1",
        "--jobs",
        "1",
    ]
    assert status([*tokens, "--gpu", "a100-40gb", "--request-rate", "8000", "--json", "-"]) == DONE
    (candidate,) = json.loads(capsys.readouterr().out)["candidates"]
    assert set(works) == {go_ahead}
    assert candidate["least_replicas"] > 1024 and "bill" not in candidate
