"""Flags that nothing would read are refused before anything runs, and those that one of several runs reads are not."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from fragmeter.experiments.cli.app import DONE, MISTAKE, status

SOME = ["--request-rate", "3", "--num-prompts", "20"]
LLAMA = ["--model", "llama-3.1-8b", "--gpu", "h200"]


def refused(capsys, *tokens: object) -> str:
    """The one line of a command that is refused."""
    capsys.readouterr()
    assert status([*map(str, tokens)]) == MISTAKE
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--policy", "vllm-v1", "--swap-space", "4"],
            "swap_space = 4.0: vllm-v1 does not read it; use --policy vllm-sosp23 or",
        ),
        (["--swap-space", "4"], "swap_space = 4.0: nothing is swapped; use --preemption-mode swap, or leave it out"),
        (["--policy", "vllm-v1", "--preemption-mode", "swap"], "preemption_mode = 'swap': vllm-v1 does not read it;"),
        (
            ["--waiting-served-ratio", "0"],
            "waiting_served_ratio = 0.0: vllm-sosp23 does not read it; use --policy tgi, or",
        ),
        (["--beam-survival", "0.5"], "beam_survival = 0.5: applies only to beams; use --use-beam-search"),
        (["--use-beam-search"], "use_beam_search = True: every request asks for one sequence; use --n"),
        (["--num-replicas", "2", "--cache-threshold", "0.9"], "cache_threshold = 0.9: round-robin does not read it;"),
        (["--router", "kv-aware"], "router = 'kv-aware': all requests arrive at one replica; use --num-replicas"),
        (
            ["--policy", "static", "--max-num-batched-tokens", "300"],
            "max_num_batched_tokens = 300: static schedules whole",
        ),
        (["--disable-hybrid-kv-cache-manager"], "opt-13b has no window shorter than 2048 tokens"),
        (
            ["--policy", "vllm-v1", "--arena", "best-fit"],
            "arena = 'best-fit': vllm-v1 does not read it; use --policy orca-max,",
        ),
        (["--tokenizer", "t.json"], "tokenizer = 't.json': applies only to a trace; use --trace"),
        (["--timed-trace-chunk-hash-size", "16"], "timed_trace_chunk_hash_size = 16: applies only to a trace"),
        (["--timed-trace-sec-multiplier", "1"], "timed_trace_sec_multiplier = 1.0: applies only to a trace"),
        (["--max-inflated-bytes", "9"], "max_inflated_bytes = 9: applies only to a trace"),
        (["--skip-bad"], "skip_bad = True: applies only to a trace"),
        (["--max-tokens", "true"], "max_tokens = 'true': vllm-sosp23 reserves nothing by it; use static,"),
    ],
)
def test_simulate_refuses(flags, message, capsys):
    assert message in refused(capsys, "simulate", *SOME, *flags)


def test_gaps_have_no_shape_where_all_come_at_once(capsys):
    error = refused(capsys, "simulate", "--request-rate", "inf", "--num-prompts", "9", "--burstiness", "0.5")
    assert "burstiness = 0.5: at an infinite rate all requests arrive at once" in error


class TestSweep:
    def test_refuses_an_axis_that_no_point_reads(self, tmp_path, capsys):
        axis = ["--policy", "vllm-v1", "--grid", "output_estimate=0.1,1"]
        error = refused(capsys, "sweep", *SOME, *axis, "--out", tmp_path / "out")
        assert "output_estimate = 0.1: vllm-v1 does not read it; use --policy lightllm" in error
        assert not list((tmp_path / "out").rglob("*.json"))

    def test_refuses_a_flag_that_no_point_reads(self, tmp_path, capsys):
        error = refused(capsys, "sweep", *SOME, "--grid", "seed=0,1", "--skip-bad", "--out", tmp_path / "out")
        assert "skip_bad = True: applies only to a trace" in error

    @pytest.mark.slow
    def test_takes_what_one_point_reads_and_the_others_serve_as_if_it_was_left_out(self, tmp_path):
        axes = ["--grid", "policy=vllm-v1,lightllm", "--grid", "output_estimate=0.2,1"]
        assert status(["sweep", *SOME, *axes, "--out", str(tmp_path)]) == DONE
        rows = pq.read_table(tmp_path / "sweep.parquet").to_pylist()
        latency = {(row["policy"], row["output_estimate"]): row["mean_e2el_ms"] for row in rows}
        assert latency["vllm-v1", 0.2] == latency["vllm-v1", 1]
        assert latency["lightllm", 0.2] != latency["lightllm", 1]


class TestCompare:
    def test_refuses_what_no_side_reads(self, capsys):
        error = refused(capsys, "compare", *SOME, "--set", "output_estimate=0.1", "--set", "output_estimate=1")
        assert "output_estimate = 0.1: vllm-sosp23 does not read it" in error
        error = refused(capsys, "compare", "--waste", "--num-prompts", "50", "--policy", "orca", "--watermark", "0.2")
        assert "watermark = 0.2: orca does not read it" in error

    def test_takes_what_one_side_reads(self):
        sides = ["--set", "policy=orca", "--set", "policy=vllm-v0", "--watermark", "0.2", "--seeds", "2"]
        assert status(["compare", *SOME, *sides]) == DONE

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--policy", "orca"], "policy = 'orca'"),
            (["--request-rate", "2"], "request_rate = 2.0"),
            (["--seeds", "3"], "seeds = 3"),
            (["--confidence", "0.9"], "confidence = 0.9"),
        ],
    )
    def test_results_are_compared_as_they_are(self, flags, message, tmp_path, capsys):
        assert f"{message}: result folders are compared as they are" in refused(capsys, "compare", "a", "b", *flags)

    def test_waste_has_no_confidence(self, capsys):
        error = refused(capsys, "compare", "--waste", "--num-prompts", "50", "--confidence", "0.9")
        assert "confidence = 0.9: --waste gives no intervals" in error


class TestPlan:
    GOAL = ["--goodput", "ttft:500", "--num-prompts", "100", "--seeds", "1"]

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--policy", "static", "--max-num-batched-tokens", "2048,4096"], "max_num_batched_tokens = 2048: static"),
            (["--skip-bad"], "skip_bad = True: applies only to a trace"),
            (["--policy", "vllm-v0", "--max-tokens", "true"], "max_tokens = 'true': vllm-v0 reserves nothing by it"),
            (["--think-time", "1"], "think_time = 1.0: makes a closed loop"),
            (["--mean-tokens", "100"], "mean_tokens = 100: applies to one server"),
        ],
    )
    def test_refuses_what_no_candidate_reads(self, flags, message, capsys):
        assert message in refused(capsys, "plan", *LLAMA, *self.GOAL, *flags)

    @pytest.mark.slow
    def test_takes_any_flag_of_a_pasted_line_and_tells_what_simulates_it(self, capsys):
        """A model without windows, and a release that does not swap."""
        line = "vllm serve llama-3.1-8b --disable-hybrid-kv-cache-manager --swap-space 4 --max-num-seqs 8"
        both = ["--policy", "vllm-v1,static"]
        assert status(["plan", "--serve", line, "--gpu", "h200", *self.GOAL, *both]) == DONE
        capsys.readouterr()
        assert status(["plan", "--serve", line, "--gpu", "h200"]) == DONE
        (line,) = (text for text in capsys.readouterr().out.splitlines() if text.startswith("As a simulation"))
        assert status([*line.partition("fragmeter ")[2].split(), *SOME]) == DONE
