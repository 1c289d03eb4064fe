"""``fragmeter simulate``: flags are the settings', results are what the run says."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from calibrations import document
from cli_runs import command, data, run_here
from fragmeter.experiments.cli.app import DONE, NO_READER, status
from fragmeter.experiments.cli.replica_flags import SettingsFlags
from fragmeter.experiments.runs import serving
from fragmeter.experiments.runs.inputs import DATASETS
from fragmeter.sim.config.settings import Settings, settings
from fragmeter.sim.policy.registry import policies
from other_values import NAMES, flags_of, other_values

TRACE = "arrival_s,prompt_tokens,output_tokens,max_tokens\n0,7,5,10\n0.5,9,3,10\n2,30,4,10\n"


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "three.csv"
    path.write_text(TRACE)
    return path


def simulated(*tokens: object, out: Path) -> tuple[dict, dict, pd.DataFrame]:
    """summary.json, run.json and the requests of one run."""
    assert status(["simulate", *map(str, tokens), "--out", str(out)]) == DONE
    summary, run_file = (json.loads((out / name).read_text("utf-8")) for name in ("summary.json", "run.json"))
    return summary, run_file, pd.read_parquet(out / "requests.parquet")


@pytest.mark.parametrize(("pool", "map_text"), [(982, "982 blocks"), (3_000, "2,048 of 3,000 blocks, evenly spaced")])
def test_a_block_map_says_how_much_of_the_run_it_has(pool, map_text, trace, tmp_path, capsys):
    flags = ["--num-gpu-blocks-override", pool, "--record-blocks"]
    simulated("--trace", trace, *flags, out=tmp_path / "out")
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Block map of 12 moments and {map_text}: {tmp_path / 'out' / 'blocks.npz'}" in printed


def test_a_trace_is_served_with_its_own_arrivals_and_max_tokens(trace, tmp_path):
    summary, rerun, requests = simulated("--trace", trace, out=tmp_path / "out")
    assert summary["completed"] == 3 and summary["total_output_tokens"] == 12
    assert requests["arrival_ticks"].tolist() == [0, 500_000_000_000, 2_000_000_000_000]
    assert requests["prompt_tokens"].tolist() == [7, 9, 30]
    assert rerun["settings"] == Settings().as_dict()
    assert rerun["workload"]["trace"] == "three.csv" and "dataset" not in rerun["workload"]


EXPERTS = ["--model", "gpt-oss-120b", "--gpu", "h200"]
#: What a setting asks for beside its own flag.
WITH = {
    "data_parallel_size": EXPERTS,
    "enable_expert_parallel": [*EXPERTS, "--tensor-parallel-size", "2"],
    "disable_hybrid_kv_cache_manager": EXPERTS,
    "moe_backend": ["--model", "mixtral-8x7b", "--gpu", "h200"],
    "kv_offloading_size": ["--enable-prefix-caching"],
    "kv_offloading_backend": ["--enable-prefix-caching", "--kv-offloading-size", "4"],
    "swa_full_tokens_ratio": EXPERTS,
    "disable_hybrid_swa_memory": EXPERTS,
    "prefix_cache_retention_interval": EXPERTS,
    "decode_context_parallel_size": ["--model", "deepseek-v3", "--gpu", "h200", "--tensor-parallel-size", "8"],
    "api_server_count": ["--api-server", "measured"],
    "long_prefill_token_threshold_adaptive": ["--long-prefill-token-threshold", "8"],
    **dict.fromkeys(("hicache_ratio", "hicache_size", "hicache_write_policy"), ["--enable-hierarchical-cache"]),
    "use_beam_search": ["--n", "2"],
    "beam_survival": ["--n", "2", "--use-beam-search"],
    "swap_space": ["--preemption-mode", "swap"],
}
STATES = ["--model", "nemotron-3-nano-30b-a3b", "--gpu", "h100-80gb"]
OF_STATES = (
    "enable_unified_memory",
    "mamba_track_interval",
    "mamba_full_memory_ratio",
    "max_mamba_cache_size",
    "mamba_ssm_dtype",
)
WITH |= dict.fromkeys(OF_STATES, STATES)
WITH["mamba_radix_cache_strategy"] = [*STATES, "--disable-overlap-schedule"]
#: Those that ask for priorities of requests, and for another that orders by them.
BY_PRIORITY = (
    "enable_priority_scheduling", "schedule_low_priority_values_first", "disable_priority_preemption",
    "priority_scheduling_preemption_threshold", "retraction_policy",
)  # fmt: skip
WITH |= {name: ["--enable-priority-scheduling"] for name in BY_PRIORITY[1:]}
#: Values for these three requests, and for the default card.
HERE = {
    "policy": "orca", "model": "llama-13b", "gpu": "a100-80gb", "quantization": "awq", "seed": 3, "shared_prefix_tokens": 6,
    "gpu_memory_utilization": 0.8,
    # Priorities need a trace that has them.
    "scheduling_policy": "fcfs",
}  # fmt: skip
#: Of these other tests give a value: sim/policy/test_registry.py, experiments/measured/test_save_server.py,
#: sim/engine/test_core.py, and sim/engine/test_leap_check.py.
ELSEWHERE = ("allocator", "server", "core", "check_leaps")


@pytest.mark.parametrize("field", [name for name in NAMES if name not in ELSEWHERE])
def test_every_setting_has_a_flag(field, trace, tmp_path):
    value = HERE[field] if field in HERE else other_values(field)[0]
    if field in BY_PRIORITY:
        trace.write_text(
            "".join(f"{row},{more}\n" for row, more in zip(TRACE.split(), ("priority", 0, 1, 2), strict=True))
        )
    _, rerun, _ = simulated("--trace", trace, *flags_of(field, value), *WITH.get(field, []), out=tmp_path / "out")
    assert rerun["settings"][field] == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize("name", policies())
def test_without_options_a_policy_has_its_own_defaults_as_in_python(name):
    """The default of an option differs between policies: the watermark of vllm-v1 is 0, of others 0.01."""
    assert SettingsFlags(policy=name).settings() == settings(policy=name)
    assert SettingsFlags(policy=name).settings().options == ()


@pytest.mark.slow
def test_rejected_requests_are_counted_apart_from_refused_ones(trace, tmp_path, capsys):
    flags = ["--trace", trace, "--policy", "vllm-v1", "--request-rate", "inf"]
    summary, _, requests = simulated(*flags, "--max-num-queued-reqs", 2, out=tmp_path / "out")
    assert (summary["completed"], summary["refused"], summary["rejected"]) == (2, 0, 1)
    assert requests["rejected"].tolist() == requests["finish_ticks"].isna().tolist() == [False, False, True]
    assert "rejected 1 by the API server's limits" in " ".join(capsys.readouterr().out.split())
    assert status(["report", str(tmp_path / "out"), "--out", str(tmp_path / "page.html")]) == DONE
    assert '<th scope="col" class="number">Rejected (queue limits)</th>' in (tmp_path / "page.html").read_text("utf-8")
    requests.assign(rejected=False).to_parquet(tmp_path / "out" / "requests.parquet")
    assert status(["report", str(tmp_path / "out"), "--out", str(tmp_path / "page.html")]) != DONE
    assert "summary.json: belongs to another run than requests.parquet" in " ".join(capsys.readouterr().err.split())
    summary, _, requests = simulated(*flags, out=tmp_path / "plain")
    assert "rejected" not in summary and "rejected" not in requests


@pytest.mark.slow
def test_stepping_gives_the_same_bytes_as_leaping(trace, tmp_path):
    _, _, leapt = simulated("--trace", trace, out=tmp_path / "leapt")
    _, _, stepped = simulated("--trace", trace, "--no-leap", out=tmp_path / "stepped")
    pd.testing.assert_frame_equal(leapt, stepped)
    summaries = [(tmp_path / name / "summary.json").read_bytes() for name in ("leapt", "stepped")]
    assert summaries[0] == summaries[1]


@pytest.mark.slow
def test_a_run_holds_the_hash_and_the_source_of_its_calibration(trace, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document()))
    _, measured, _ = simulated("--trace", trace, "--cost", path, out=tmp_path / "measured")
    _, fitted, _ = simulated("--trace", trace, "--cost", "fitted", out=tmp_path / "fitted")
    assert measured["cost"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (measured["cost"]["name"], measured["cost"]["source"]) == ("calibrated", "made up")
    assert (fitted["cost"]["name"], fitted["cost"]["calibration"]) == ("fitted", "a100-40gb.json")
    assert "aiconfigurator" in fitted["cost"]["source"]


class TestTheRequests:
    def test_are_the_first_of_a_trace(self, trace, tmp_path):
        _, _, requests = simulated("--trace", trace, "--num-prompts", 2, out=tmp_path / "out")
        assert requests["prompt_tokens"].tolist() == [7, 9]

    def test_come_at_the_rate_that_is_asked_for(self, trace, tmp_path):
        _, rerun, requests = simulated("--trace", trace, "--request-rate", "inf", out=tmp_path / "out")
        assert requests["arrival_ticks"].tolist() == [0, 0, 0]
        assert rerun["workload"]["request_rate"] == "inf"

    @pytest.mark.slow
    @pytest.mark.parametrize("name", DATASETS)
    def test_are_drawn_from_a_dataset_by_seed(self, name, tmp_path):
        def drawn(seed: int) -> list[int]:
            flags = ["--dataset", name, "--num-prompts", 30, "--request-rate", 5, "--seed", seed]
            _, rerun, requests = simulated(*flags, out=tmp_path / "out")
            assert rerun["workload"]["dataset"] == name
            return requests["output_tokens"].tolist()

        assert drawn(1) == drawn(1) != drawn(2)

    @pytest.mark.slow
    def test_declare_the_max_tokens_of_the_flag(self, trace, tmp_path):
        """Orca reserves by max_tokens: of 128 slots the three ask for 12 + 12 + 34, or for 37 + 39 + 60."""
        flags = ["--trace", trace, "--policy", "orca", "--request-rate", "inf", "--block-size", 8]
        pool = ["--num-gpu-blocks-override", 16, "--max-model-len", 64]
        waits = {}
        for rule in ("true", "30"):
            _, _, requests = simulated(*flags, *pool, "--max-tokens", rule, out=tmp_path / rule)
            waits[rule] = (requests["first_scheduled_ticks"] > 0).tolist()
        assert waits == {"true": [False, False, False], "30": [False, False, True]}


@pytest.mark.slow
def test_the_same_command_gives_the_same_bytes(trace, tmp_path):
    for name in ("one", "two"):
        simulated("--trace", trace, out=tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_results_do_not_hang_on_the_folder_in_which_the_trace_lies(trace, tmp_path):
    elsewhere = tmp_path / "elsewhere" / trace.name
    elsewhere.parent.mkdir()
    elsewhere.write_text(TRACE)
    simulated("--trace", trace, out=tmp_path / "one")
    simulated("--trace", elsewhere, out=tmp_path / "two")
    assert (tmp_path / "one" / "run.json").read_bytes() == (tmp_path / "two" / "run.json").read_bytes()


@pytest.mark.slow
def test_the_data_is_the_summary_that_is_printed(trace, tmp_path):
    summary = data("simulate", "--trace", trace)
    printed = run_here("simulate", "--trace", trace, "--out", tmp_path / "out", "--json", tmp_path / "summary.json")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert json.loads((tmp_path / "summary.json").read_text("utf-8")) == summary
    # What the step times rest on is of the package that runs, and no result.
    assert summary.pop("evidence")["basis"] == "kernel tables of a100-80gb, scaled"
    assert summary.pop("load") in " ".join(printed.stdout.split())
    assert json.loads((tmp_path / "out" / "summary.json").read_text("utf-8")) == summary
    assert f"{summary['mean_ttft_ms']:,.1f}" in printed.stdout
    assert f"Results: {tmp_path / 'out'}\n" in printed.stdout


def test_a_block_of_one_slot_is_in_the_singular(trace, capsys):
    assert status(["simulate", "--policy", "sglang", "--trace", str(trace)]) == DONE
    assert "blocks of 1 slot\n" in capsys.readouterr().out


def test_what_is_assumed_about_engines_that_share_experts_is_stated(trace, capsys):
    shared = ["--model", "qwen3-30b-a3b", "--gpu", "h200", "--policy", "vllm-v1", "--data-parallel-size", "2"]
    assert status(["simulate", "--trace", str(trace), *shared]) == DONE
    assert "The 2 engines that share experts run in lock step" in " ".join(capsys.readouterr().out.split())


class TestRequestsThatThePoolNeverHolds:
    @staticmethod
    def printed_lines(capsys: pytest.CaptureFixture, *tokens: object) -> list[str]:
        assert status(["simulate", *map(str, tokens), "--num-gpu-blocks-override", "2"]) == DONE
        lines = capsys.readouterr().out.splitlines()
        first = next(place for place, line in enumerate(lines) if line.startswith("Refused"))
        return lines[first:]

    def test_are_named_by_their_line_of_the_trace(self, tmp_path, capsys):
        """30 + 4 tokens are 3 blocks of 16."""
        trace = tmp_path / "blank_line.csv"
        trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,7,5\n\n2,30,4\n")
        assert self.printed_lines(capsys, "--trace", trace) == [
            "Refused: 1 requests that the pool of 2 blocks cannot hold.",
            "  line 4 of the trace: needs a pool of 3 blocks",
        ]

    def test_are_not_all_named_where_they_are_many(self, tmp_path, capsys):
        trace = tmp_path / "many.csv"
        trace.write_text("prompt_tokens,output_tokens\n" + "30,4\n" * 9)
        assert self.printed_lines(capsys, "--trace", trace, "--request-rate", "inf") == [
            "Refused: 9 requests that the pool of 2 blocks cannot hold.",
            *(f"  line {line} of the trace: needs a pool of 3 blocks" for line in range(2, 7)),
            "  and 4 more; requests.parquet of --out has them all",
        ]

    def test_are_numbered_where_there_is_no_trace(self, tmp_path, capsys):
        drawn = ["--request-rate", "inf", "--num-prompts", 40]
        lines = self.printed_lines(capsys, *drawn, "--json", tmp_path / "summary.json")
        named = json.loads((tmp_path / "summary.json").read_text("utf-8"))["refused_requests"][:5]
        assert lines[1:6] == [
            f"  request {refused['request']}: needs a pool of {refused['smallest_pool_blocks']} blocks"
            for refused in named
        ]


def test_a_folder_that_holds_something_else_is_left_alone(trace, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    assert status(["simulate", "--trace", str(trace), "--out", str(tmp_path / "mine")]) == 2
    error = capsys.readouterr().err
    assert "mine': holds notes.txt, which is not a file of a simulation result; choose another folder" in error
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_fault(trace):
    program = subprocess.Popen(
        command("simulate", "--trace", trace), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    program.stdout.close()
    assert program.stderr.read() == ""
    assert program.wait(timeout=60) == NO_READER
    program.stderr.close()


def test_the_command_computes_its_summary_once(trace, tmp_path, monkeypatch):
    calls = []

    def counted(run, **given):
        calls.append(run)
        return real(run, **given)

    real = serving.summary
    monkeypatch.setattr(serving, "summary", counted)
    monkeypatch.setattr("fragmeter.sim.metrics.result.summary", counted)
    simulated("--trace", trace, out=tmp_path / "out")
    assert len(calls) == 1
