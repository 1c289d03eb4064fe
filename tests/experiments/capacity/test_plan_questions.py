"""``fragmeter plan --ask``: held to scans, to closed forms, and to simulated groups."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as trials
from hypothesis import strategies as st

from fragmeter.experiments.capacity import (
    max_num_seqs as plan_max_num_seqs,
)
from fragmeter.experiments.capacity import (
    preemption as plan_preemption,
)
from fragmeter.experiments.capacity import (
    samples as plan_samples,
)
from fragmeter.experiments.capacity.questions import ANSWERS, _slower_text
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.runs.pool_use import pool_use
from fragmeter.sim import Settings, Workload, settings, simulate

CHOSEN = settings(
    policy="vllm-v1", model="opt-13b", gpu="a100-40gb", block_size=2, max_num_batched_tokens=32, max_model_len=64,
    async_scheduling=False, enable_prefix_caching=False, enforce_eager=True, cost="paper",
)  # fmt: skip
AHEAD = replace(CHOSEN, options=())
LINE = "vllm serve opt-13b --enforce-eager --num-gpu-blocks-override 100 --max-model-len 1024"


def quiet(values, *_):
    return values


def drawn(seed: int) -> tuple[Workload, int]:
    """A small load that comes together or over 0.3 s, and a pool that most of it overfills."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(5, 14))
    arrivals = np.sort(rng.integers(0, 3 * 10**11, count)) if rng.random() < 0.7 else np.zeros(count)
    lengths = rng.integers(1, 12, count), rng.integers(1, 14, count)
    return Workload("drawn", arrivals, *lengths), int(rng.integers(16, 34))


def preemptions_by_max_num_seqs(seed: int, chosen: Settings = CHOSEN) -> list[int]:
    """Preemptions with max_num_seqs 1, 2, ..., each from a whole run."""
    work, blocks = drawn(seed)
    chosen = replace(chosen, num_gpu_blocks_override=blocks)
    runs = (simulate(replace(chosen, max_num_seqs=num_seqs), work) for num_seqs in range(1, len(work) + 1))
    return [len(run.log.evictions["index"]) for run in runs]


def largest(chosen: Settings, work: Workload) -> plan_max_num_seqs.MaxNumSeqs:
    """The answer where the pool is the same with every value."""
    most = min(int(work.num_sequences.sum()), chosen.max_num_batched_tokens)
    return plan_max_num_seqs.largest_max_num_seqs(lambda value: replace(chosen, max_num_seqs=value), most, work, quiet)


def question_of(seed: int, chosen: Settings = CHOSEN) -> plan_max_num_seqs.MaxNumSeqs:
    work, blocks = drawn(seed)
    return largest(replace(chosen, num_gpu_blocks_override=blocks), work)


class TestMaxNumSeqs:
    @pytest.mark.slow
    @pytest.mark.parametrize("chosen", [CHOSEN, AHEAD], ids=["sync", "async"])
    @trials(max_examples=40)
    @given(seed=st.integers(0, 10_000))
    def test_it_is_what_a_scan_of_all_values_finds(self, chosen, seed):
        counts = preemptions_by_max_num_seqs(seed, chosen)
        found = question_of(seed, chosen)
        none = [num_seqs for num_seqs, count in enumerate(counts, 1) if not count]
        assert found.largest == max(none, default=None)
        assert found.unlimited == (not counts[-1])
        assert not any(counts[: found.in_any_order])

    def test_a_larger_value_does_not_always_preempt_more(self):
        """Why the search does not bisect: max_num_seqs 4 preempts, 5 does not, 6 does again."""
        assert preemptions_by_max_num_seqs(368) == [0, 0, 0, 1, 0, 5, 6, 6, 6, 6, 6, 6, 6]
        assert question_of(368).largest == 5

    def test_by_hand(self):
        """Requests of 4 + 5 tokens hold 8 in the end, four blocks of two; nine blocks without the null block hold two
        of them. Three start with two blocks each and outgrow the pool in the step that takes the tenth."""
        work = Workload("three", np.zeros(3), np.full(3, 4), np.full(3, 5))
        chosen = replace(CHOSEN, num_gpu_blocks_override=10)
        found = largest(chosen, work)
        # With the largest value, with three and with two.
        assert found == plan_max_num_seqs.MaxNumSeqs(most=3, peak=3, largest=2, in_any_order=2, runs=3)
        # Twelve blocks are eleven without the null block: one too few for three.
        twelve = replace(chosen, num_gpu_blocks_override=12)
        assert largest(twelve, work).in_any_order == 2
        assert largest(replace(chosen, num_gpu_blocks_override=13), work) == (
            plan_max_num_seqs.MaxNumSeqs(most=3, peak=3, largest=3, in_any_order=3, runs=1)
        )

    @pytest.mark.parametrize("chosen", [CHOSEN, AHEAD], ids=["sync", "async"])
    def test_of_requests_that_are_all_refused_none_is_preempted(self, chosen):
        """Of 45 tokens each, in nine blocks of two."""
        work = Workload("long", np.zeros(3), np.full(3, 40), np.full(3, 5))
        found = largest(replace(chosen, num_gpu_blocks_override=10), work)
        assert found == plan_max_num_seqs.MaxNumSeqs(most=3, peak=1, largest=3, in_any_order=0, runs=1)

    @pytest.mark.slow
    @trials(max_examples=40)
    @given(seed=st.integers(0, 10_000), taken=st.integers(1, 3))
    def test_each_value_is_judged_with_the_pool_that_it_leaves(self, seed, taken):
        work, blocks = drawn(seed)

        def settings_of(value):
            return replace(CHOSEN, max_num_seqs=value, num_gpu_blocks_override=blocks + 14 * taken - taken * value)

        counts = [len(simulate(settings_of(value), work).log.evictions["index"]) for value in range(1, len(work) + 1)]
        found = plan_max_num_seqs.largest_max_num_seqs(settings_of, len(work), work, quiet)
        none = [value for value, count in enumerate(counts, 1) if not count]
        # Above the most that ever run at once a value takes memory for nothing.
        assert found.largest == max((value for value in none if value <= found.peak or found.unlimited), default=None)
        assert found.unlimited == (not counts[-1])
        assert not any(counts[: found.in_any_order])

    def test_each_sample_counts(self):
        work = Workload("one", np.zeros(1), np.full(1, 4), np.full(1, 5), n=np.array([3]))
        found = largest(replace(CHOSEN, num_gpu_blocks_override=10), work)
        assert (found.most, found.in_any_order) == (3, 2)

    def test_a_run_ends_with_its_first_preemption(self):
        work, blocks = drawn(368)
        chosen = replace(CHOSEN, num_gpu_blocks_override=blocks)
        for num_seqs, count in enumerate(preemptions_by_max_num_seqs(368), 1):
            assert plan_max_num_seqs.preempts(replace(chosen, max_num_seqs=num_seqs), work) == bool(count)

    @pytest.mark.parametrize("mode", plan_preemption.MODES)
    def test_a_swap_is_a_preemption(self, mode):
        work = Workload("two", np.zeros(2), np.full(2, 4), np.full(2, 9))
        chosen = replace(AHEAD, policy="vllm-v0", preemption_mode=mode, num_gpu_blocks_override=9)
        assert plan_max_num_seqs.preempts(chosen, work)
        assert not plan_max_num_seqs.preempts(replace(chosen, num_gpu_blocks_override=20), work)


class Linear:
    """A step that prefills takes 5 ms and 1 us a pair; a block takes 1 ms out and 2 ms in."""

    def step_ticks(self, decodes, decode_context, prefill_tokens, prefill_pairs):
        return 5_000_000_000 + 1_000_000 * prefill_pairs

    def swap_out_ticks(self, blocks):
        return blocks * 1_000_000_000

    def swap_in_ticks(self, blocks):
        return blocks * 2_000_000_000


class TestPreemption:
    def test_one_preemption_in_closed_form(self):
        """100 tokens in blocks of 16: 7 blocks there and back; 5,050 pairs."""
        found = plan_preemption.one_preemption(Linear(), 16, 100)
        assert (found.swap_ms, found.recompute_ms, found.cheaper) == (21.0, 10.05, "recompute")

    def test_the_break_evens_are_where_the_closed_forms_cross(self, monkeypatch):
        """3 B against 5 + L (L + 1) / 2000 with L = 16 B: one block is swapped (3 < 5.136), two are recomputed
        (6 > 5.528), and so on up to 22 (66 > 67.1 does not hold)."""
        replica = type("Built", (), {"cost": Linear(), "block_size": 16, "max_model_len": 600})
        monkeypatch.setattr(plan_preemption, "build", lambda _: replica)
        assert plan_preemption.break_evens(CHOSEN) == [(16, "swap"), (32, "recompute"), (352, "swap")]

    def test_where_both_cost_the_same_nothing_is_moved(self):
        assert plan_preemption.Preemption(16, 1.0, 1.0).cheaper == "recompute"

    @pytest.mark.parametrize("model", [{}, {"model": "gpt-oss-120b", "gpu": "h200", "max_model_len": 320}], ids=str)
    def test_runs_of_both_releases_both_ways_and_of_v1(self, model):
        """Also for a model with window layers, which only V1 uses."""
        work = Workload("tight", np.zeros(8), np.full(8, 150 if model else 30), np.full(8, 150 if model else 30))
        chosen = settings(policy="vllm-v1", num_gpu_blocks_override=100 if model else 20, max_num_seqs=8, **model)
        rows = plan_preemption.simulated(chosen, work)
        ways = [(row["policy"], row["preemption_mode"]) for row in rows]
        assert ways == [
            ("vllm-v0", "recompute"), ("vllm-v0", "swap"), ("vllm-sosp23", "recompute"), ("vllm-sosp23", "swap"),
            ("vllm-v1", "recompute"),
        ]  # fmt: skip
        for row in rows:
            way, other = ("swapped", "recomputed") if row["preemption_mode"] == "swap" else ("recomputed", "swapped")
            assert row[way] > 0 and row[other] == 0
            assert (row["swapping_s"] > 0) == (way == "swapped") == (row["recomputed_tokens"] == 0)


class TestSamples:
    @pytest.mark.slow
    @trials(max_examples=60)
    @given(
        st.sampled_from(["vllm-v0", "vllm-sosp23", "vllm-v1"]),
        st.integers(1, 60),
        st.integers(1, 40),
        st.integers(1, 6),
        st.sampled_from([1, 2, 4, 16]),
    )
    @example("vllm-v0", 20, 1, 4, 16)
    @example("vllm-v1", 32, 1, 4, 16)
    def test_blocks_are_those_of_a_simulated_group(self, policy, prompt, output, n, size):
        work = Workload("group", np.zeros(1), np.array([prompt]), np.array([output]), n=np.array([n]))
        caching = True if policy == "vllm-v1" else None
        chosen = settings(policy=policy, block_size=size, num_gpu_blocks_override=2000, enable_prefix_caching=caching)
        run = simulate(chosen, work)
        held = pool_use(run).max_usage * run.log.capacity_slots / size
        way = plan_samples.SEPARATE if policy == "vllm-v1" else plan_samples.FORKING
        said = plan_samples.blocks_of_samples(work.prompt_tokens, work.output_tokens, n, size, way)
        assert held == pytest.approx(said[0], abs=1e-9)

    def test_by_hand(self):
        """20 + 13 tokens hold 32, two blocks of 16: one full block of the prompt is shared by four, and four have
        another one each. A prompt of 32 shares its second block only where samples fork."""
        one = plan_samples.memory_of_samples(np.array([20]), np.array([13]), 4, 16)
        assert (one.one, one.forking, one.separate, one.unshared) == (2, 5, 5, 8)
        two = plan_samples.memory_of_samples(np.array([32]), np.array([13]), 4, 16)
        assert (two.one, two.forking, two.separate, two.unshared) == (3, 6, 9, 12)

    def test_runs_with_one_sample_and_with_n(self):
        work = Workload("load", np.arange(6) * 10**12, np.full(6, 64), np.full(6, 20), n=np.full(6, 2))
        rows = plan_samples.simulated(settings(policy="vllm-v1", num_gpu_blocks_override=200), work, 3)
        assert [(row["policy"], row["n"]) for row in rows] == [("vllm-v1", 1), ("vllm-v1", 3), ("vllm-v0", 3)]
        alone, separate, forking = rows
        # Two of three samples find 48 of 64 tokens.
        assert separate["prefix_cache_hit_rate"] == pytest.approx(2 / 3 * 48 / 64)
        assert alone["max_kv_cache_usage"] < forking["max_kv_cache_usage"] < separate["max_kv_cache_usage"]


class TestCommand:
    @staticmethod
    def plan(*tokens: object) -> int:
        return status(["plan", "--gpu", "a100-40gb", "--serve", LINE, *map(str, tokens)])

    @pytest.mark.slow
    def test_all_questions_of_a_load(self, tmp_path, capsys):
        flags = ("--dataset", "alpaca", "--num-prompts", 60, "--request-rate", 20, "--n", 3)
        assert self.plan("--ask", ",".join(ANSWERS), *flags, "--json", tmp_path / "all.json") == DONE
        printed = capsys.readouterr().out
        answers = json.loads((tmp_path / "all.json").read_text())["answers"]
        assert list(answers) == list(ANSWERS)
        largest = answers["max-num-seqs"]["largest"]
        assert f"max-num-seqs: {largest} is the largest value without preemption on this load" in " ".join(
            printed.split()
        )
        own, best = answers["max-num-seqs"]["runs_of"]
        assert (best["max_num_seqs"], best["preemptions"]) == (largest, 0) and own["preemptions"] > 0
        slower = best["mean_e2el_ms"] > own["mean_e2el_ms"]
        assert ("Do not set it for speed: without preemptions the mean E2EL" in " ".join(printed.split())) == slower
        assert len(answers["preemption-mode"]["runs"]) == 5
        assert answers["samples"]["n"] == 3 and len(answers["samples"]["runs"]) == 3

    @pytest.mark.parametrize(("after", "warns"), [(9_000.0, False), (9_490.0, False), (21_840.0, True)])
    def test_a_value_that_makes_requests_slower_is_no_advice(self, after, warns):
        text = _slower_text({"mean_e2el_ms": 9_490.0}, {"mean_e2el_ms": after})
        assert bool(text) == warns
        assert not warns or "is 21.8 s, in place of 9.49 s" in text

    def test_of_a_length_arithmetic_answers(self, tmp_path, capsys):
        assert self.plan("--ask", "max-num-seqs,samples,preemption-mode", "--mean-tokens", 321, "--json", "-") == DONE
        answers = json.loads(capsys.readouterr().out)["answers"]
        # 99 blocks without the null block; 320 tokens are stored, in 20 blocks.
        assert answers["max-num-seqs"] == {"at_once": 4}
        assert answers["samples"] == {"n": 4, "one": 20, "forking": 50, "separate": 53, "unshared": 80, "runs": []}
        assert [one["tokens"] for one in answers["preemption-mode"]["one_preemption"]] == [321, 1024]
        assert answers["preemption-mode"]["runs"] == []

    def test_no_sequence_is_preempted(self, capsys):
        flags = ("--dataset", "alpaca", "--num-prompts", 5, "--request-rate", 1)
        assert self.plan("--ask", "preemption-mode,max-num-seqs", *flags) == DONE
        printed = " ".join(capsys.readouterr().out.split())
        assert "No sequence is preempted on this load: both modes give the same result." in printed
        assert "max-num-seqs: no limit is needed. With 5, which does not limit the batch, no" in printed

    @pytest.mark.slow
    def test_a_line_that_does_not_start_is_asked_nothing(self, capsys):
        line, flags = "vllm serve opt-66b", ("--ask", "samples", "--mean-tokens", "9")
        assert status(["plan", "--gpu", "a100-40gb", "--serve", line, *flags]) == DONE
        assert "It does not start" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("flags", "complaint"),
        [
            (["--ask", "batch"], "ask = 'batch': one of max-num-seqs, preemption-mode, samples, or several"),
            (["--ask", "samples"], "ask = 'samples': needs a load; give --trace, or --dataset with --request-rate"),
            (["--request-rate", "4"], "ask = None: is missing: flags of a load are given without a question about it"),
            (["--ask", "samples", "--dataset", "alpaca"], "request_rate: "),
        ],
    )
    def test_mistakes(self, flags, complaint, capsys):
        assert self.plan(*flags) == MISTAKE
        error = capsys.readouterr().err
        assert complaint in error and error.count("\n") == 1

    def test_windows_are_refused(self, capsys):
        line = "vllm serve google/gemma-3-27b-it --max-model-len 8192"
        flags = ("--ask", "samples", "--mean-tokens", "300")
        assert status(["plan", "--gpu", "h200", "--serve", line, *flags]) == MISTAKE
        assert "is not available for layers with windows; add --disable-hybrid" in capsys.readouterr().err
