"""``steady``: the rate of a replica in closed form is near that of the simulation, and orders what it orders."""

from __future__ import annotations

import pytest

from fragmeter.experiments.capacity.load import Load
from fragmeter.experiments.capacity.max_rate import go_ahead
from fragmeter.experiments.capacity.steady import Steady
from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.slo_check import Goal
from fragmeter.sim import Settings, settings
from fragmeter.sim.metrics.objectives import objectives
from fragmeter.traces import Pacing


def load(chosen: Settings, prompts: int, outputs: int, requests: int = 1500) -> Load:
    lengths = Requests(input_len=prompts, output_len=outputs, num_prompts=requests)
    return Load(Inputs(settings=chosen, requests=lengths, pacing=Pacing(request_rate=1)))


def steady(chosen: Settings, of: Load, *goodput: str, attainment: float = 0.9) -> float:
    return Steady(chosen, of.draw(0).at(1.0), Goal(objectives(list(goodput)), attainment)).rate()


CASES = [
    ("llama-3.1-8b", "h100-80gb", 1, (1000, 200), ("ttft:500", "tpot:20")),
    ("llama-3.1-8b", "a100-80gb", 1, (300, 300), ("tpot:30",)),
    ("llama-3.1-70b", "h200", 4, (3000, 300), ("ttft:2000", "tpot:40")),
    ("qwen3-30b-a3b", "h100-80gb", 2, (800, 150), ("ttft:1000", "tpot:25")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpu", "ranks", "lengths", "goodput"), CASES)
def test_it_is_near_the_highest_rate_of_a_simulation(model, gpu, ranks, lengths, goodput):
    blocks = 30_000
    chosen = settings(
        policy="vllm-v1",
        model=model,
        gpu=gpu,
        tensor_parallel_size=ranks,
        cost="fitted",
        num_gpu_blocks_override=blocks,
    )
    of = load(chosen, *lengths)
    simulated = go_ahead(chosen, of, Goal(objectives(list(goodput)), 0.9), 0).found.rate
    assert steady(chosen, of, *goodput) == pytest.approx(simulated, rel=0.3)


def test_longer_steps_and_stricter_objectives_lower_it_down_to_none():
    chosen = settings(
        policy="vllm-v1", model="llama-3.1-8b", gpu="h100-80gb", cost="fitted", num_gpu_blocks_override=9000
    )
    of = load(chosen, 500, 100, 200)
    rates = [steady(chosen, of, f"tpot:{limit}") for limit in (40, 20, 12, 9)]
    assert rates == sorted(rates, reverse=True) and rates[0] > 2 * rates[-1]
    assert steady(chosen, of, "tpot:20", attainment=0.99) < rates[1]
    longer = settings(**chosen.as_dict() | {"step_scale": 1.5})
    assert steady(longer, of, "tpot:20") < rates[1]
    assert steady(chosen, of, "tpot:2") == 0 and steady(chosen, of, "ttft:1") == 0


def test_the_kv_cache_limits_it():
    def of_blocks(blocks: int) -> float:
        chosen = settings(
            policy="vllm-v1", model="llama-3.1-8b", gpu="h100-80gb", cost="fitted", num_gpu_blocks_override=blocks
        )
        return steady(chosen, load(chosen, 2000, 200, 200), "tpot:60")

    # 140 blocks of 16 tokens hold one sequence.
    assert of_blocks(280) < of_blocks(1400) < of_blocks(14_000)
