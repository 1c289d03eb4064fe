"""Lists of values have one syntax: with commas, with spaces, or the flag repeated."""

import pytest

from fragmeter.experiments.capacity.candidates import values_of
from fragmeter.experiments.cli.app import app
from fragmeter.sim.metrics.objectives import objectives


def _arguments(*tokens):
    return app.parse_args([*tokens])[1].arguments


@pytest.mark.parametrize(
    "given", [["--gpu", "h200", "b200"], ["--gpu", "h200,b200"], ["--gpu", "h200", "--gpu", "b200"]]
)
def test_cards_are_listed_with_commas_spaces_or_a_repeated_flag(given):
    assert values_of("gpu", _arguments("plan", *given, "--model", "llama-3.1-8b")["gpu"]) == ["h200", "b200"]


@pytest.mark.parametrize(
    "given",
    [
        ["--tensor-parallel-size", "1", "2", "--block-size", "16"],
        ["--tensor-parallel-size", "1,2", "--block-size", "16"],
        ["--tensor-parallel-size", "1", "--block-size", "16", "--tensor-parallel-size", "2"],
    ],
)
def test_flags_of_candidates_are_listed_in_the_same_way(given):
    assert _arguments("plan", *given)["choices"].axes() == {"tensor_parallel_size": ["1", "2"], "block_size": ["16"]}


@pytest.mark.parametrize(
    "given",
    [
        ["--goodput", "ttft:500", "tpot:50"],
        ["--goodput", "ttft:500,tpot:50"],
        ["--goodput", "ttft:500", "--goodput", "tpot:50"],
    ],
)
def test_objectives_are_listed_in_the_same_way(given):
    of_plan, of_report = _arguments("plan", *given)["aims"].goodput, _arguments("report", "run", *given)["goodput"]
    assert objectives(of_plan) == objectives(of_report) == objectives(["ttft:500", "tpot:50"])


def test_axes_of_a_sweep_follow_one_flag_or_several():
    once = _arguments("sweep", "--grid", "seed=0,1", "block_size=16,32", "--out", "points")["grid"]
    assert once == _arguments("sweep", "--grid", "seed=0,1", "--grid", "block_size=16,32", "--out", "points")["grid"]
