"""The sliders of ``fragmeter explore``: which states there are, in which order, and what each of them runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fragmeter.experiments.explore.axes import MOST_RUNS, POOL, grid
from fragmeter.experiments.explore.lines import command, python
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.reports.explore.explorer import start_state
from fragmeter.sim.config.settings import settings
from fragmeter.sim.types.errors import SettingError
from fragmeter.traces import Pacing

SMALL = Inputs(requests=Requests(num_prompts=20, input_len=40, output_len=30), pacing=Pacing(request_rate=2.0))
FIXED = {"block_size": ["16"], "max_tokens": ["64"], POOL: ["4096"]}


def numbers(found) -> dict[str, tuple[str, ...]]:
    return {axis.name: axis.values for axis in found.axes}


def test_crossed_axes_have_all_combinations_and_the_others_one_at_a_time():
    crossed = {"policy": ["static", "orca"], "request_rate": ["2", "1"], "max_tokens": ["64", "128"]}
    found = grid(SMALL, crossed, {"block_size": ["16", "8", "32"], POOL: ["4096", "2048"]})
    assert numbers(found) == {
        "request_rate": ("1", "2"), "max_tokens": ("64", "128"), "block_size": ("8", "16", "32"), POOL: ("2048", "4096"),
    }  # fmt: skip
    states = [tuple(state.values()) for state in found.states()]
    beside = [("16", "4096"), ("8", "4096"), ("32", "4096"), ("16", "2048")]
    assert states == [(rate, most, *other) for rate in ("1", "2") for most in ("64", "128") for other in beside]
    assert found.num_states == len(states) == 16
    assert states[start_state(found.axes)] == ("2", "64", "16", "4096")


def test_a_state_keeps_the_tokens_of_the_pool_whatever_the_block_size():
    found = grid(
        SMALL, {"policy": ["orca"], "max_tokens": ["64"]}, {"block_size": ["16", "64"], POOL: ["4096", "2048"]}
    )
    pools = {
        (state["block_size"], state[POOL]): found.position("orca", state).inputs.settings.num_gpu_blocks_override
        for state in found.states()
    }
    assert pools == {("16", "4096"): 256, ("64", "4096"): 64, ("16", "2048"): 128}


def test_what_a_policy_does_not_read_is_left_out_of_its_run():
    found = grid(SMALL, {"policy": ["orca", "orca-pow2", "vllm-sosp23"], **FIXED}, {"max_num_batched_tokens": ["2560"]})
    (state,) = found.states()
    given = {name: found.position(name, state).inputs.requests.max_tokens for name in found.policies}
    assert given == {"orca": "64", "orca-pow2": None, "vllm-sosp23": None}


def test_defaults_follow_from_the_gpu_the_load_and_the_last_policy():
    found = grid(Inputs(), {}, {})
    assert numbers(found) == {
        "request_rate": ("1", "2", "5", "10"), "output_len": ("64", "128", "256"), "max_tokens": ("512", "1024", "2048"),
        "input_len": ("64", "128", "512"), "block_size": ("16", "64", "256"), POOL: ("7680", "15360", "30720"),
    }  # fmt: skip
    assert found.policies == ("static", "orca", "orca-pow2", "vllm-sosp23")
    # The pool of the GPU, whole blocks of each size: 15,728 tokens in blocks of 16.
    assert [axis.values[axis.start] for axis in found.axes] == ["5", "128", "512", "128", "16", "15360"]


def test_another_model_and_gpu_have_other_rates_and_pools():
    chosen = settings(model="llama-3.1-8b", gpu="h100-80gb")
    found = grid(Inputs(settings=chosen, requests=Requests(num_prompts=50)), {"policy": ["vllm-v1"]}, {})
    assert float(numbers(found)["request_rate"][-1]) > 10
    assert int(numbers(found)[POOL][-1]) > 100_000


def test_what_a_flag_sets_is_no_slider():
    base = Inputs(
        settings=settings(block_size=32, num_gpu_blocks_override=100), requests=SMALL.requests, pacing=SMALL.pacing
    )
    assert numbers(grid(base, {"policy": ["vllm-sosp23"]}, {})) == {}
    assert [*numbers(grid(base, {"policy": ["orca"]}, {}))] == ["max_tokens"]
    longest = replace(base, requests=replace(SMALL.requests, max_tokens="64"))
    assert numbers(grid(longest, {"policy": ["orca"]}, {})) == {}


def test_the_lines_have_every_flag_of_the_run():
    found = grid(SMALL, {"policy": ["orca"], **FIXED}, {})
    (state,) = found.states()
    inputs = found.position("orca", state).inputs
    assert command(inputs) == (
        "fragmeter simulate --policy orca --model opt-13b --gpu a100-40gb --block-size 16 --num-gpu-blocks-override 256"
        " --input-len 40 --output-len 30 --num-prompts 20 --max-tokens 64 --request-rate 2"
    )
    assert python(inputs).startswith("fm.simulate(policy='orca', model='opt-13b', gpu='a100-40gb', block_size=16,")


@pytest.mark.parametrize(
    ("crossed", "varied", "named"),
    [
        ({"block_size": ["16"]}, {"block_size": ["16"]}, "vary = 'block_size'"),
        ({}, {"policy": ["orca"]}, "vary = 'policy'"),
        ({"policy": ["orca", "orca"]}, {}, "grid = 'policy=orca,orca'"),
        ({"policy": ["orca", "static", "tgi", "vllm-v1", "sglang"]}, {}, "name 1 to 4"),
        ({"seed": [str(seed) for seed in range(MOST_RUNS)]}, {}, "more runs than 2,000"),
    ],
)
def test_mistakes(crossed, varied, named):
    with pytest.raises(SettingError) as raised:
        grid(SMALL, crossed, varied)
    assert named in str(raised.value)
