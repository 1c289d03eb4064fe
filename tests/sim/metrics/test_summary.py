"""Serving metrics and the time ledger against lists of every token, which the simulator never makes."""

from __future__ import annotations

import json
import weakref

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine_runs import serve
from expanded import expand
from fragmeter.experiments.paper.sharing import closed_form_pct
from fragmeter.sim import settings, simulate, summary
from fragmeter.sim.metrics import result
from fragmeter.sim.metrics.gaps import Gaps
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.types.sequence import RECOMPUTED
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.workload import Workload
from strategies import long_cases

POLICIES = ("static", "fastertransformer", "orca", "orca-pow2", "vllm-sosp23")

#: A batch finishes when its longest output does.
TOGETHER = ("static", "fastertransformer")


def token_ticks(run) -> dict[int, list[int]]:
    """When each token of each request came out, one by one."""
    run_log, tokens = run.log, {}
    for index, start, end in zip(
        run_log.residencies["index"], run_log.residencies["start_step"], run_log.residency_end, strict=True
    ):
        tokens.setdefault(int(index), []).extend(run_log.end_of(np.arange(start + 1, end + 1)).tolist())
    return tokens


@hypothesis_settings(max_examples=60)
@given(long_cases(), st.sampled_from(POLICIES), st.booleans())
def test_metrics_equal_those_of_the_list_of_all_tokens(case, policy, leap):
    run = serve(policy, case, leap=leap)
    said, tokens = summary(run), token_ticks(run)
    for index, out in tokens.items():
        assert len(out) == run.workload.output_tokens[index]
    times = request_times(run)
    arrival = run.workload.arrival_ticks
    gaps = np.array([gap for out in tokens.values() for gap in np.diff(out)], dtype=np.float64)
    ttft = np.array([tokens[index][0] - arrival[index] for index in times.index], dtype=np.float64)
    finish = times.finish_ticks.astype(np.float64)
    assert policy in TOGETHER or finish.tolist() == [tokens[index][-1] for index in times.index]
    e2el = finish - arrival[times.index]
    longer = [place for place, index in enumerate(times.index) if len(tokens[index]) > 1]
    tpot = np.array(
        [
            (finish[place] - tokens[index][0]) / (len(tokens[index]) - 1)
            for place, index in ((place, times.index[place]) for place in longer)
        ]
    )
    for name, values in (("itl", gaps), ("ttft", ttft), ("tpot", tpot), ("e2el", e2el)):
        values = (values if len(values) else np.zeros(1)) / 1e9
        assert said[f"mean_{name}_ms"] == pytest.approx(values.mean(), rel=1e-9, abs=1e-15)
        assert said[f"std_{name}_ms"] == pytest.approx(values.std(), rel=1e-6, abs=1e-12)
        assert said[f"median_{name}_ms"] == pytest.approx(np.percentile(values, 50), rel=1e-9, abs=1e-15)
        for rank in (90, 95, 99):
            assert said[f"p{rank}_{name}_ms"] == pytest.approx(np.percentile(values, rank), rel=1e-9, abs=1e-15)


@hypothesis_settings(max_examples=60)
@given(long_cases(), st.sampled_from(POLICIES))
def test_the_time_ledger_accounts_for_every_tick_and_token(case, policy):
    run, stepped = serve(policy, case), serve(policy, case, leap=False)
    work = summary(run)["work"]
    assert work == summary(stepped)["work"]
    assert sum(work["seconds"].values()) == pytest.approx(run.log.end_ticks / 1e12)
    assert min(work["seconds"].values()) >= 0
    run_log = run.log
    again = run_log.residencies["kind"] == RECOMPUTED
    # Every token of a served request needs its slot computed once, but for the last one.
    needed = (run.workload.prompt_tokens + run.workload.output_tokens - 1)[~run.refused].sum()
    assert work["tokens"]["useful"] == needed
    assert work["tokens"]["recomputed"] == (run_log.residencies["tokens"][again] - 1).sum()
    assert work["tokens"]["padding"] == padding_by_hand(run)


def padding_by_hand(run) -> int:
    """Tokens that static batches compute as padding: each member's share of its batch, less its own."""
    if not run.log.together:
        return 0
    run_log, prompts = run.log, run.workload.prompt_tokens[run.log.residencies["index"]]
    padding = 0
    for start in np.unique(run_log.residencies["start_step"]):
        batch = run_log.residencies["start_step"] == start
        steps = run_log.residency_end[batch] - start
        computed = len(steps) * (prompts[batch].max() + steps.max() - 1)
        padding += computed - (prompts[batch] + steps - 1).sum()
    return int(padding)


def small_run(**fields):
    work = Workload("four", [0, 0, 10**12, 10**12], [10, 700, 30, 5], [4, 40, 1, 8])
    return simulate(settings(num_gpu_blocks_override=20, max_model_len=2048, **fields), work)


def test_a_request_that_the_pool_cannot_hold_is_refused_and_named():
    run = small_run()
    said, table = summary(run), result.requests_table(run)
    assert (said["completed"], said["refused"], said["total_output_tokens"]) == (3, 1, 13)
    assert table["refused"].tolist() == [False, True, False, False]
    assert table["smallest_pool_blocks"].tolist() == [1, 47, 2, 1]
    assert table["finish_ticks"].isna().tolist() == [False, True, False, False]


def test_one_token_outputs_have_no_time_per_output_token():
    times = request_times(small_run())
    assert len(times.tpot_ms) == 2
    assert len(times.ttft_ms) == 3


def test_the_summary_has_the_keys_of_vllm_bench_serve():
    said = summary(small_run())
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99")} <= set(said)
    assert {
        "duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "output_throughput", "total_token_throughput",
    } <= set(said)  # fmt: skip


def test_requests_per_second_while_requests_arrive_leave_out_the_drain():
    """One request a second, each served in less: ten of eleven are done by the last arrival, and the last one's drain counts not."""
    arrivals, ones = np.arange(11) * PER_SECOND, np.full(11, 1)
    said = summary(simulate(settings(policy="vllm-sosp23"), Workload("even", arrivals, 20 * ones, 5 * ones)))
    assert 10 < said["duration"] < 11
    assert said["request_throughput_while_arriving"] == 1.0
    assert said["request_throughput"] == pytest.approx(11 / said["duration"])
    long = summary(simulate(settings(policy="vllm-sosp23"), Workload("long", arrivals, 20 * ones, 500 * ones)))
    assert long["request_throughput_while_arriving"] == 0.0 < long["request_throughput"]
    at_once = summary(simulate(settings(policy="vllm-sosp23"), Workload("at once", 0 * ones, 20 * ones, 5 * ones)))
    assert at_once["request_throughput_while_arriving"] is None


def test_a_result_directory_is_whole_and_the_same_bytes_twice(tmp_path):
    for name in ("a", "b"):
        result.write(small_run(), tmp_path / name, {"seed": 0})
    names = ["gaps", "memory", "preemptions", "requests", "residencies", "steps"]
    names = sorted([*(f"{table}.parquet" for table in names), "run.json", "summary.json"])
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    said = json.loads((tmp_path / "a" / "run.json").read_text())
    assert said["settings"]["num_gpu_blocks_override"] == 20
    assert said["workload"]["sha256"] == small_run().workload.sha256()
    memory = pd.read_parquet(tmp_path / "a" / "memory.parquet")
    assert (memory.drop(columns=["start_ticks", "start_s", "largest_free_run"]).sum(axis=1) == 20 * 16).all()


def test_a_result_can_be_rerun_from_its_settings(tmp_path):
    run = small_run(policy="vllm-v0", preemption_mode="swap", window=(0.0, 1.0))
    written = json.loads((result.write(run, tmp_path / "r", {}) / "run.json").read_text())
    assert summary(simulate(settings(**written["settings"]), run.workload)) == summary(run)


def test_only_a_result_is_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SettingError, match="holds thesis.tex, which is not a file of a simulation result"):
        result.write(small_run(), tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    result.write(small_run(), tmp_path / "r", {})
    result.write(small_run(), tmp_path / "r", {"seed": 1})
    assert json.loads((tmp_path / "r" / "run.json").read_text())["workload"]["seed"] == 1


def test_nothing_half_written_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(result, "summary", lambda run, **given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        result.write(small_run(), tmp_path / "r", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_leaps_expand_to_the_steps(policy):
    work = Workload("some", np.arange(40) * 10**11, np.arange(40) % 7 * 30 + 1, np.arange(40) % 11 * 9 + 1)
    tables = [expand(result.steps_table(simulate(settings(policy=policy, leap=leap), work))) for leap in (True, False)]
    assert tables[0].equals(tables[1])


def test_watching_progress_changes_nothing():
    """A refused request that arrives long after the rest does not stretch the run."""
    work = Workload("late", [0, 100 * 10**12], [10, 900], [5, 100])
    reported = []
    watched, alone = (
        simulate(settings(num_gpu_blocks_override=4), work, progress=progress) for progress in (reported.append, None)
    )
    assert summary(watched) == summary(alone)
    assert summary(alone)["refused_requests"] == [{"request": 1, "smallest_pool_blocks": 63}]
    assert reported[-1] == 2


@pytest.mark.parametrize("leap", [True, False])
def test_external_fragmentation_of_two_free_pieces(leap):
    """Four chunks of one block; the second is still held when the first, third and fourth are free again."""
    work = Workload("holes", [0] * 4, [1] * 4, [1, 3, 1, 1])
    run = simulate(settings(policy="orca-oracle", num_gpu_blocks_override=4, block_size=4, leap=leap), work)
    # Step 1: nothing free. Steps 2 and 3: three blocks free, two of them together: 1 - 2/3.
    lengths = run.log.end_of(np.array([1, 2, 3])) - run.log.start_of(np.array([0, 1, 2]))
    index = summary(run)["external_fragmentation_index"]
    assert index["mean_over_iterations"] == pytest.approx(2 / 3 / 3)
    assert index["mean_over_time"] == pytest.approx((lengths[1] + lengths[2]) / 3 / lengths.sum())
    runs = result.memory_table(run)["largest_free_run"].tolist()
    assert (runs[0], runs[-1]) == (0, 8)


def test_the_swap_space_has_a_ledger_of_its_own():
    """Nine blocks of 4: the later of two requests goes out with the four blocks of its 16 tokens, and comes back."""
    work = Workload("two", np.array([0, 0]), np.array([8, 8]), np.array([17, 21]))
    run = simulate(settings(num_gpu_blocks_override=9, block_size=4, watermark=0, preemption_mode="swap"), work)
    assert run.log.host["held_blocks"].tolist() == [4, 0]
    out, back = run.log.host["ticks"].tolist()
    host_pool = summary(run)["host_pool"]
    assert host_pool["max_used_blocks"] == 4 and host_pool["num_cpu_blocks"] == run.replica.host_blocks
    assert host_pool["mean_used_blocks"] == pytest.approx(4 * (back - out) / run.log.end_ticks)
    rows = result.memory_table(run)
    away = (rows["start_ticks"] >= out) & (rows["start_ticks"] < back)
    assert (rows["host_held"] == np.where(away, 4 * 4, 0)).all() and away.any()
    recomputed = simulate(settings(num_gpu_blocks_override=9, block_size=4), work)
    assert summary(recomputed)["host_pool"] is None


@pytest.mark.parametrize("leap", [False, True])
def test_what_samples_save_is_the_shared_part_of_their_prompt(leap):
    """Three samples of a prompt of two whole blocks: two of the three tables name them again, as long as they run."""
    work = Workload("one", np.array([0]), np.array([32]), np.array([200]), n=np.array([3]))
    found = summary(simulate(settings(num_gpu_blocks_override=200, leap=leap), work))["sharing"]
    assert found["max_saved_blocks"] == 4
    # The samples fork after the step of the prompt, one of the 200.
    assert found["mean_saved_blocks"] == pytest.approx(4 * 199 / 200, rel=0.005)
    # While a table has 33 to 231 tokens; the step of the prompt is left out of the closed form.
    assert found["saved_pct"] == pytest.approx(closed_form_pct(np.array([32]), np.array([200]), 3), rel=0.02)
    alone = Workload("one", np.array([0]), np.array([32]), np.array([200]))
    assert summary(simulate(settings(num_gpu_blocks_override=200, leap=leap), alone))["sharing"] is None


@pytest.mark.parametrize("leap", [True, False])
def test_usage_by_blocks_and_by_tokens_of_prompts_that_just_begin_a_block(leap):
    """Ten prompts of 17 tokens in blocks of 16, two output tokens each: 20 of 100 blocks hold 17, then 18 tokens each."""
    work = Workload("short", np.zeros(10), np.full(10, 17), np.full(10, 2))
    given = settings(policy="vllm-v1", num_gpu_blocks_override=101, leap=leap, async_scheduling=False)
    found = summary(simulate(given, work))["waste"]["mean_over_iterations_pct"]["usage"]
    assert found["by_blocks"] == pytest.approx(20)
    assert found["by_tokens"] == pytest.approx(100 * 10 * (17 + 18) / 2 / 1600)


@pytest.mark.parametrize("policy", ["static", "orca-max", "vllm-sosp23", "vllm-v1", "sglang"])
@hypothesis_settings(max_examples=5)
@given(long_cases())
def test_usage_by_blocks_counts_what_no_new_request_can_use(policy, case):
    waste = summary(serve(policy, case))["waste"]["mean_over_time_pct"]
    idle = sum(waste["buckets"][bucket] for bucket in ("free", "cached", "stranded"))
    assert waste["usage"]["by_blocks"] == pytest.approx(sum(waste["buckets"].values()) - idle)
    assert waste["usage"]["by_tokens"] == waste["buckets"]["live"] <= waste["usage"]["by_blocks"] + 1e-9


def test_times_and_gaps_of_a_run_are_computed_once():
    run = small_run()
    assert request_times(run) is request_times(run)
    assert Gaps.of(run.log) is Gaps.of(run.log)
    # Another run has its own.
    assert request_times(run) is not request_times(small_run())


def test_a_summary_that_is_known_is_not_computed_again(tmp_path, monkeypatch):
    run = small_run()
    known = summary(run)
    result.write(run, tmp_path / "one", {})
    monkeypatch.setattr(result, "summary", None)
    result.write(run, tmp_path / "other", {}, content=known)
    assert (tmp_path / "one" / "summary.json").read_bytes() == (tmp_path / "other" / "summary.json").read_bytes()


def test_one_part_of_a_table_is_in_memory_at_a_time(tmp_path, monkeypatch):
    run, made = small_run(), []

    def table_of(run, name, part):
        assert all(table() is None for table in made)
        found = real(run, name, part)
        made.append(weakref.ref(found))
        return found

    real = result.table_of
    monkeypatch.setattr(result, "table_of", table_of)
    monkeypatch.setattr(result, "ROW_GROUP", 2)
    result.write(run, tmp_path / "run", {})
    assert len(made) > len(result.TABLES)
