"""``chance``: the same as all fifteen cases of every draw, in a third of the runs; and the smallest size with the wanted chance."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fragmeter
from bench_files import benchmark
from fragmeter.experiments.capacity.answer import Answer
from fragmeter.experiments.capacity.candidates import candidates
from fragmeter.experiments.capacity.chance import MEMORY_WEIGHTS, SCALE_WEIGHTS, Chance, ChanceSearch, Uncertainty
from fragmeter.experiments.capacity.measurement import after_a_benchmark, next_measurement, with_measured_steps
from fragmeter.experiments.capacity.text import depends_text
from fragmeter.experiments.capacity.trials import Memory
from fragmeter.experiments.capacity.uncertainty import uncertainty
from fragmeter.experiments.vllm_serve.line import ServeLine
from fragmeter.sim.metrics.result import requests_table
from fragmeter.sim.types.errors import SettingError
from trials import NAMED, Trial, ended

SCALES = (0.8, 0.9, 1.0, 1.1, 1.25)
MEMORIES = (Memory(800, 4096), Memory(1000, 4096), Memory(1100, 4096))
ABOUT = Uncertainty(SCALES, MEMORIES, "made up")
WANTED = 10.0


class MadeUp:
    """Replicas that take ``of_one`` requests/s over the scale, more or less by the draw and the memory."""

    def __init__(self, of_one: float, seed: int, of_memory: float, longest: float = 9.0) -> None:
        random = Random(seed)
        self.of_one, self.longest = of_one, longest
        self.draws = [exp(random.gauss(0, 0.08)) for _ in range(8)]
        self.memories = dict(zip(MEMORIES, (1 - of_memory, 1.0, 1 + of_memory), strict=True))
        self.asked: list[Trial] = []

    def meets(self, replicas: int, seed: int, scale: float, memory: Memory) -> bool:
        if scale > self.longest:
            return False
        rate = self.of_one * self.draws[seed] * self.memories[memory] / scale
        return not replicas or replicas * rate >= WANTED

    def chance(self, replicas: int) -> float:
        """Every case of every draw."""
        met = sum(
            scale_weight * memory_weight
            for seed in range(8)
            for scale, scale_weight in zip(SCALES, SCALE_WEIGHTS, strict=True)
            for memory, memory_weight in zip(MEMORIES, MEMORY_WEIGHTS, strict=True)
            if self.meets(replicas, seed, scale, memory)
        )
        return met / (8 * sum(SCALE_WEIGHTS) * sum(MEMORY_WEIGHTS))

    def found(self, first: int, confidence: float) -> tuple[int | None, tuple[Chance, ...]]:
        found, rounds = ended(ChanceSearch(NAMED, ABOUT, range(8), confidence, first, 1).steps(), self.result)
        self.asked += [trial for trials in rounds for trial in trials]
        return found

    def result(self, trial: Trial) -> bool:
        return self.meets(trial.replicas, trial.seed, *trial.case[:2])


@pytest.mark.slow
@given(
    of_one=st.floats(0.1, 12), seed=st.integers(0, 99), of_memory=st.sampled_from([0.0, 0.02, 0.3]),
    first=st.integers(1, 60), confidence=st.sampled_from([0.5, 0.9, 0.97]),
)  # fmt: skip
def test_it_is_that_of_all_cases_and_the_size_is_the_smallest(of_one, seed, of_memory, first, confidence):
    service = MadeUp(of_one, seed, of_memory)
    size, chances = service.found(first, confidence)
    assert [each.replicas for each in chances] == sorted({each.replicas for each in chances})
    for each in chances:
        assert each.chance == pytest.approx(service.chance(each.replicas))
        assert sum(each.by_draw) / 8 == pytest.approx(each.chance)
        for values, weights in ((each.by_scale, SCALE_WEIGHTS), (each.by_memory, MEMORY_WEIGHTS)):
            weighed = sum(value * weight for value, weight in zip(values, weights, strict=True))
            assert weighed / sum(weights) == pytest.approx(each.chance)
    enough = [each for each in range(1, 4 * first + 1) if service.chance(each) >= confidence - 1e-9]
    assert size == (enough[0] if enough else None)
    last = first if size is None else size
    assert last == 1 or last - 1 in {each.replicas for each in chances}


def test_a_draw_takes_five_runs_where_the_memory_changes_nothing():
    service = MadeUp(1.0, 0, 0.0)
    service.found(10, 0.01)
    of_size = [each for each in service.asked if each.replicas == 10]
    assert len(of_size) == len(set(of_size)) <= 8 * 5


def test_no_size_is_tried_that_cannot_help():
    """Requests served alone miss the goal with steps a tenth longer: with 40 % of the weight."""
    service = MadeUp(1.0, 0, 0.0, longest=1.05)
    size, chances = service.found(40, 0.9)
    assert size is None and [each.replicas for each in chances] == [39, 40]
    assert chances[-1].chance == pytest.approx(0.6)


def test_what_it_depends_on_most():
    _, (*_, chance) = MadeUp(1.0, 0, 0.0).found(10, 0.01)
    text = depends_text(chance, ABOUT)
    assert text.startswith("That depends most on step times: with 0.80 times the predicted ones it is enough with ")
    every = Chance(3, 1.0, (1.0,) * 5, (1.0,) * 3, (1.0,) * 8)
    assert depends_text(every, ABOUT).startswith("It meets the goal in every case")


class TestMeasurement:
    def answer(self, *chances: Chance) -> Answer:
        [candidate] = candidates(ServeLine("llama-3.1-8b", {}), ["l40s"], {})
        fleet = SimpleNamespace(chance=chances[-1], chances=chances, replicas=chances[-1].replicas)
        return Answer(candidate, wanted=10.0, fleet=fleet, detail={})

    def test_a_benchmark_tells_the_sizes_apart_that_step_times_decide(self):
        four = Chance(4, 0.5, (1.0, 1.0, 0.8, 0.0, 0.0), (0.5,) * 3, (0.5,) * 8)
        five = Chance(5, 0.9, (1.0, 1.0, 1.0, 0.9, 0.5), (0.9,) * 3, (0.9,) * 8)
        about = Uncertainty((0.6, 0.8, 1.0, 1.2, 1.6), MEMORIES, "made up")
        [text] = next_measurement(self.answer(four, five), about, 0.9)
        assert text.startswith(
            "Ten minutes of vllm bench serve on one replica (1 x l40s) at 2 requests/s with these lengths"
        )
        assert text.endswith("up to 0.80 times the predicted time 4 GPUs are enough, with longer ones it takes more.")
        # As well known as a benchmark says; and nothing to tell apart.
        narrow = Uncertainty((0.96, 0.98, 1.0, 1.02, 1.04), MEMORIES, "made up")
        assert next_measurement(self.answer(four, five), narrow, 0.9)[0].startswith("No benchmark would narrow this")
        assert next_measurement(self.answer(Chance(4, 1.0, (1.0,) * 5, (1.0,) * 3, (1.0,) * 8)), about, 0.9) == []

    def test_where_the_kv_cache_decides_it_is_the_startup_log(self):
        four = Chance(4, 0.5, (0.5,) * 5, (0.0, 0.6, 1.0), (0.5,) * 8)
        five = Chance(5, 0.95, (0.95,) * 5, (0.9, 1.0, 1.0), (0.95,) * 8)
        [text] = next_measurement(self.answer(four, five), ABOUT, 0.9)
        assert "--startup-log" in text and text.endswith("4 GPUs are enough, with the smallest 5.")

    def test_a_benchmark_sets_the_step_times(self, tmp_path):
        """Of a server that is simulated with steps 1.2 times as long."""
        [candidate] = candidates(ServeLine("llama-3.1-8b", {}), ["h100-80gb"], {})
        slow = replace(candidate.settings, step_scale=1.2)
        run = fragmeter.simulate(
            policy="vllm-v1", model=slow.model, gpu=slow.gpu, step_scale=1.2, input_len=300, output_len=40,
            num_prompts=100, request_rate=4,
        )  # fmt: skip
        bench = benchmark(tmp_path / "bench.json", requests_table(run.run))
        [found] = with_measured_steps([candidate], bench)
        assert found.settings.step_scale == pytest.approx(1.2, rel=0.03)
        about = uncertainty(found)
        low, high = after_a_benchmark()
        assert (about.scales[0], about.scales[-1]) == pytest.approx((low, high)) and 1.1 < high < 1.15
        with pytest.raises(SettingError, match="measured"):
            with_measured_steps([candidate, candidate], bench)


def test_the_scales_are_those_of_the_servers_like_it():
    measured, unknown, given_ = candidates(ServeLine("llama-3.1-8b", {}), ["h100-80gb", "gb200"], {}) + candidates(
        ServeLine("opt-13b", {}), ["a100-40gb"], {}, cost="paper"
    )
    like, none = uncertainty(measured), uncertainty(unknown)
    assert like.scales == tuple(sorted(like.scales)) and like.basis == "the interval of servers like this"
    assert none.basis.startswith("no measured server is like this")
    # Less is known without a server: the ends lie further apart.
    assert none.scales[-1] / none.scales[0] > like.scales[-1] / like.scales[0] > 1
    assert uncertainty(given_).scales == (1.0,)
    low, likely, high = like.memories
    assert low < likely < high and likely.num_blocks == measured.settings.num_gpu_blocks_override


@pytest.mark.slow
@given(
    of_one=st.floats(0.1, 3),
    seed=st.integers(0, 99),
    size=st.integers(1, 30),
    confidence=st.sampled_from([0.5, 0.9, 0.97]),
)
def test_one_run_of_each_draw_closes_no_size_that_has_the_chance(of_one, seed, size, confidence):
    service = MadeUp(of_one, seed, 0.1)
    too_few, rounds = ended(ChanceSearch(NAMED, ABOUT, range(8), confidence, size, 1).too_few(), service.result)
    seeds = [trial.seed for trials in rounds for trial in trials]
    assert seeds == [*range(8)] or (seeds == [*range(4)] and too_few)
    if service.chance(size) >= confidence:
        assert not too_few
    if not any(service.meets(size, each, SCALES[0], MEMORIES[2]) for each in range(8)):
        assert too_few


def test_no_fleet_is_tried_that_no_cluster_has():
    # Requests alone meet the goal, which leaves larger fleets to be tried.
    search = ChanceSearch(NAMED, ABOUT, range(1), 0.9, 700, 1).steps()
    (size, _), rounds = ended(search, lambda trial: trial.replicas == 0)
    assert size is None and 700 < max(trial.replicas for trials in rounds for trial in trials) == 1024
