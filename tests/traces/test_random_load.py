"""Requests of given lengths: their distributions by closed forms, and the same bytes as of an equal file under every command."""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fragmeter as fm
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.content import PromptContent
from fragmeter.traces import Pacing, users, write
from fragmeter.traces.synthesis.random_load import RandomLoad

#: As ``get_sampling_params`` of vLLM 0.33 draws them from numpy's generator of seed 7, for 5 requests with 100 and 20 tokens and ratio
#: 0.5; tests/real_vllm/test_lengths.py compares with the installed one.
BY_VLLM = [[145, 113, 119, 140, 108], [26, 27, 14, 11, 16]]
MANY = 200_000


class TestLengths:
    def test_without_a_ratio_all_are_equal(self):
        drawn = RandomLoad(300, 40).draw(7, 0, 2048)
        assert (drawn.prompt_tokens.tolist(), drawn.output_tokens.tolist()) == ([300] * 7, [40] * 7)
        assert drawn.content is None and drawn.arrival_ticks is None

    def test_they_are_those_of_vllm_bench_serve(self):
        drawn = RandomLoad(100, 20, (0.5, 0.5)).draw(5, 7, 2048)
        assert [drawn.prompt_tokens.tolist(), drawn.output_tokens.tolist()] == BY_VLLM

    def test_a_range_includes_both_ends_and_has_the_mean(self):
        drawn = RandomLoad(100, 10, (0.25, 0.95)).draw(MANY, 0, 2048)
        assert (drawn.prompt_tokens.min(), drawn.prompt_tokens.max()) == (75, 125)
        # floor(0.5) is 0, and an output has a token.
        assert (drawn.output_tokens.min(), drawn.output_tokens.max()) == (1, 20)
        assert drawn.prompt_tokens.mean() == pytest.approx(100, rel=1e-3)

    @pytest.mark.parametrize("cvs", [(0.3, 0.3), (1.0, 0.5), (2.0, 0.0)])
    def test_a_lognormal_has_its_mean_and_variation(self, cvs):
        drawn = RandomLoad(3000, 400, cvs=cvs).draw(MANY, 1, 10**9)
        for lengths, mean, cv in ((drawn.prompt_tokens, 3000, cvs[0]), (drawn.output_tokens, 400, cvs[1])):
            assert lengths.mean() == pytest.approx(mean, rel=0.02)
            assert lengths.std() / lengths.mean() == pytest.approx(cv, rel=0.05)
        assert not cvs[1] or abs(np.corrcoef(drawn.prompt_tokens, drawn.output_tokens)[0, 1]) < 0.01
        # Half of a lognormal is below its median, mean / sqrt(1 + cv^2).
        median = 3000 / sqrt(1 + cvs[0] ** 2)
        assert np.mean(drawn.prompt_tokens < median) == pytest.approx(0.5, abs=0.01)

    def test_a_lognormal_is_drawn_again_beyond_the_model(self):
        drawn = RandomLoad(1000, 100, cvs=(2.0, 2.0), prefix_len=500).draw(5000, 0, 4096)
        assert (drawn.prompt_tokens + drawn.output_tokens).max() <= 4096 and drawn.prompt_tokens.min() >= 501

    def test_means_that_the_model_does_not_allow_are_named_as_drawn(self):
        load = RandomLoad(3000, 400, cvs=(1.0, 0.0))
        short, long = load.draw(5000, 0, 4096), load.draw(5000, 0, 10**6)
        assert short.prompt_tokens.mean() < 2000 and long.name == load.name
        assert f"{short.prompt_tokens.mean():,.0f} and 400 on average" in short.name

    def test_a_prefix_comes_on_top_and_is_common(self):
        drawn = RandomLoad(100, 10, prefix_len=64).draw(3, 0, 2048)
        assert drawn.prompt_tokens.tolist() == [164] * 3
        assert (drawn.content.ids.tolist(), drawn.content.tokens.tolist()) == ([0] * 3, [64] * 3)

    @pytest.mark.parametrize(
        ("load", "words"),
        [
            (RandomLoad(2000, 100), "up to 2,100 tokens .*, and the model takes 2,048"),
            (RandomLoad(1500, 100, (0.5, 0.0)), "up to 2,350 tokens"),
            (RandomLoad(1000, 100, prefix_len=1000), "up to 2,100 tokens"),
            (RandomLoad(1, 1, (0.5, 0.0)), "lets a prompt have no token"),
            (RandomLoad(100_000, 100, cvs=(0.1, 0.1)), "fewer than 1 request in 1,000"),
        ],
    )
    def test_what_cannot_be_is_refused(self, load, words):
        with pytest.raises(SettingError, match=words) as error:
            load.draw(10, 0, 2048)
        assert error.value.field == "input_len"

    @pytest.mark.parametrize("cvs", [None, (0.1, 0.1)])
    def test_the_longest_part_is_to_be_lowered(self, cvs):
        for load, field in (
            (RandomLoad(9, 5000, cvs=cvs), "output_len"),
            (RandomLoad(9, 9, cvs=cvs, prefix_len=5000), "random_prefix_len"),
        ):
            with pytest.raises(SettingError) as error:
                load.draw(10, 0, 2048)
            assert (error.value.field, error.value.value) == (field, 5000)


class TestUsers:
    def test_users_at_a_rate_are_a_rate(self):
        assert Pacing(users=2000, requests_per_user_hour=9).rate == 5
        assert Pacing(users=2000, requests_per_user_hour=9).concurrency is None
        assert Pacing(users=2000, requests_per_user_hour=9, max_concurrency=64).concurrency == 64

    def test_users_with_think_time_are_a_closed_loop(self):
        assert (Pacing(users=30, think_time=2).rate, Pacing(users=30, think_time=2).concurrency) == (None, 30)

    @pytest.mark.parametrize(
        ("given", "field"),
        [
            ({"users": 5}, "users"),
            ({"requests_per_user_hour": 5.0}, "requests_per_user_hour"),
            ({"users": 5, "requests_per_user_hour": 5.0, "request_rate": 1.0}, "requests_per_user_hour"),
            ({"users": 5, "requests_per_user_hour": 5.0, "think_time": 1.0}, "requests_per_user_hour"),
            ({"users": 5, "think_time": 1.0, "max_concurrency": 5}, "users"),
        ],
    )
    def test_half_of_a_load_or_two_are_refused(self, given, field):
        with pytest.raises(SettingError) as error:
            Pacing(**given)
        assert error.value.field == field


@pytest.mark.parametrize("sessions", [None, np.repeat([0, 1], 100)])
def test_think_times_beyond_all_time_are_refused(sessions):
    trace = RandomLoad(10, 10).draw(200, 0, 2048)
    if sessions is not None:
        trace = replace(trace, content=PromptContent.of_sessions(sessions))
    made = users(Pacing(max_concurrency=2, think_time=1e4), trace)
    assert made is not None and made.think_ticks.sum() < 2**63 - 1
    with pytest.raises(SettingError, match="lower it") as error:
        users(Pacing(max_concurrency=2, think_time=1e6), trace)
    assert error.value.field == "think_time"


#: Each load in words, the same requests as a file, and the same arrivals.
WORDS = {
    "a rate": (["--users", 1800, "--requests-per-user-hour", 10], ["--request-rate", 5]),
    "a closed loop": (["--users", 6, "--think-time", 0.5], ["--max-concurrency", 6, "--think-time", 0.5]),
}
LENGTHS = ["--input-len", 200, "--output-len", 30, "--random-range-ratio", '{"input": 0.5, "output": 0.2}']
PREFIX = ["--random-prefix-len", 96]
SERVED = ["--policy", "vllm-v1", "--model", "opt-13b", "--seed", 3]


def equal_file(folder: Path) -> Path:
    write(RandomLoad(200, 30, (0.5, 0.2), prefix_len=96).draw(80, 3, 2048), folder / "equal.jsonl")
    return folder / "equal.jsonl"


def done(*tokens: object) -> None:
    assert status([str(token) for token in tokens]) == DONE


@pytest.mark.slow
@pytest.mark.parametrize("arrivals", WORDS)
def test_an_equal_file_gives_the_same_bytes(arrivals, tmp_path):
    words, flags = WORDS[arrivals]
    done("simulate", *SERVED, *LENGTHS, *PREFIX, "--num-prompts", 80, *words, "--out", tmp_path / "words")
    done("simulate", *SERVED, "--trace", equal_file(tmp_path), *flags, "--out", tmp_path / "file")
    names = sorted(path.name for path in (tmp_path / "words").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "file").iterdir())
    for name in set(names) - {"run.json"}:
        assert (tmp_path / "words" / name).read_bytes() == (tmp_path / "file" / name).read_bytes(), name
    origin = json.loads((tmp_path / "words" / "run.json").read_text())
    assert "random" in json.dumps(origin)


@pytest.mark.slow
def test_every_command_takes_the_words(tmp_path, capsys):
    """Simulate, compare, sweep, plan and diagnose, and Python."""
    words, counted = [*LENGTHS, *PREFIX], ["--num-prompts", 100]
    users = ["--users", 1800, "--requests-per-user-hour", 10]
    sides = ["--set", "policy=orca-max", "--set", "policy=vllm-v1", "--seeds", 2]
    grid = ["--grid", "input_len=100,200", *SERVED, "--out", tmp_path / "sweep"]
    for command in (["simulate", *SERVED], ["compare", *sides], ["sweep", *grid]):
        done(*command, *words, *users, *counted, "--json", tmp_path / "data.json")
        said = json.loads((tmp_path / "data.json").read_text())["load"]
        assert said.endswith(", 100 requests; 5 requests/s (Poisson): 1,800 users, 10 an hour each")
        assert said in " ".join(capsys.readouterr().out.split())
    swept = pd.read_parquet(tmp_path / "sweep" / "sweep.parquet")
    # Half of 100 and of 200 either way, after 96 common tokens.
    assert (swept["total_input_tokens"] / 100).tolist() == pytest.approx([196, 296], rel=0.05)
    capsys.readouterr()
    goal = ["--goodput", "ttft:500", "--seeds", 1]
    done("plan", "--model", "opt-13b", "--gpu", "a100-40gb", *goal, *words, *users, *counted)
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "prompts of 96 common tokens, then 100 to 300 tokens (uniform), outputs of 24 to 36 tokens (uniform)" in shown
    )
    line = ["--serve", "vllm serve facebook/opt-13b", "--gpu", "a100-40gb"]
    done("diagnose", *line, *words, *users, "--seeds", 1, "--num-prompts", 100)
    shown = " ".join(capsys.readouterr().out.split())
    assert "prompts of 96 common tokens" in shown and "it finds 32% of the prompt tokens" in shown
    done("diagnose", *line, *LENGTHS, *users, "--seeds", 1, "--num-prompts", 100)
    assert "The given prompts have nothing in common" in " ".join(capsys.readouterr().out.split())
    run = fm.simulate(
        policy="vllm-v1", input_len=200, random_cv=0.5, users=1800, requests_per_user_hour=10, num_prompts=50
    )
    assert run.summary["completed"] == 50 and run.requests["prompt_tokens"].nunique() > 30


def test_a_prefix_is_found_by_prefix_caching():
    shared = dict(policy="vllm-v1", model="opt-13b", input_len=100, output_len=20, request_rate=2, num_prompts=50)
    cached = fm.simulate(**shared, random_prefix_len=160).summary
    # Each but the first finds ten blocks of 16 tokens of the 260.
    assert cached["prefix_cache.hit_tokens"] == 49 * 160


@pytest.mark.parametrize(
    "flags",
    [
        ["--input-len", "10", "--dataset", "alpaca"],
        ["--random-cv", "1", "--random-range-ratio", "0.5"],
        ["--random-range-ratio", "1"],
        ["--random-range-ratio", "nan"],
        ["--random-range-ratio", '{"input": 0.5}'],
        ["--random-range-ratio", '{"input": 0.5, "output": 0.5, "both": 1}'],
        ["--random-cv", "true"],
        ["--random-cv", "[1]"],
    ],
)
def test_what_contradicts_itself_is_refused(flags, capsys):
    assert status(["simulate", *flags]) == MISTAKE
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_think_times_of_no_users_are_refused_by_a_diagnosis_as_well(capsys):
    line = ["--serve", "vllm serve facebook/opt-13b", "--gpu", "a100-40gb"]
    assert status(["diagnose", *line, "--input-len", "100", "--request-rate", "1", "--think-time", "3"]) == MISTAKE
    assert capsys.readouterr().err.startswith("fragmeter: think_time = 3.0: applies only to users")


@pytest.mark.parametrize(
    ("command", "flags", "field"),
    [
        ("simulate", ["--users", "200", "--requests-per-user-hour", "0.00001"], "requests_per_user_hour = 1e-05"),
        ("diagnose", ["--users", "200", "--requests-per-user-hour", "0.00001"], "requests_per_user_hour = 1e-05"),
        ("diagnose", ["--users", "200", "--think-time", "3", "--request-rate", "3"], "users = 200"),
        ("simulate", ["--users", "200", "--think-time", "3", "--trace", "PARENTS"], "users = 200"),
        ("simulate", ["--max-concurrency", "200", "--trace", "PARENTS"], "max_concurrency = 200"),
    ],
)
def test_an_error_names_the_flag_that_was_given(command, flags, field, tmp_path, capsys):
    (tmp_path / "turns.csv").write_text(
        "prompt_tokens,output_tokens,arrival_s,parent,truncate_to\n10,5,0,,\n20,5,1,0,10\n"
    )
    flags = [str(tmp_path / "turns.csv") if flag == "PARENTS" else flag for flag in flags]
    lengths = [] if "--trace" in flags else ["--input-len", "100", "--output-len", "20", "--num-prompts", "100"]
    line = ["--serve", "vllm serve facebook/opt-13b", "--gpu", "a100-40gb"] if command == "diagnose" else []
    assert status([command, *line, *lengths, *flags]) == MISTAKE
    assert capsys.readouterr().err.startswith(f"fragmeter: {field}: ")
