"""The number of sequences that fit, by the plan's arithmetic, beside the most that run at once in a saturated simulation."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim import Workload, simulate
from fragmeter.sim.config.settings import Settings
from fragmeter.sim.cost import default_cost
from fragmeter.sim.metrics.requests import preemptions
from fragmeter.sim.spec import gpu, gpu_names, model, model_names
from fragmeter.sim.spec.releases import LATEST
from fragmeter.sim.spec.startup.capacity import users

FLAGS = ("", "--no-enable-prefix-caching", "--block-size 64", "--no-async-scheduling", "--kv-cache-dtype fp8")
#: One of each compute capability, by which kernels are chosen; the pool of a test is not the card's.
CARDS = list({gpu(name).compute_capability: name for name in gpu_names()}.values())
#: Blocks of several sizes side by side, of which a run takes seconds.
SEVERAL_SIZES = {"gemma-4-26b-a4b", "gemma-4-31b", "mimo-v2-flash"}
#: Hybrids with the most groups, of which a run takes seconds; they are among the slow cases.
LARGEST = {"nemotron-3-ultra", "kimi-k3", "glm-5.3-flash"}
PRESETS = [name for name in model_names() if name not in SEVERAL_SIZES]
#: The flags and cards of a preset change with its place in the list.
PAIRS = [(name, CARDS[place * 7 % len(CARDS)], FLAGS[place % len(FLAGS)]) for place, name in enumerate(PRESETS)]
HYBRIDS = [pair for pair in PAIRS if pair[0] not in LARGEST and (model(pair[0]).mixer or model(pair[0]).window_heads)]
PLAIN = [pair for pair in PAIRS if pair[0] not in LARGEST and pair not in HYBRIDS]
SAMPLE = HYBRIDS[:24] + PLAIN[::4]
RATES = '{"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": %s}'


def pool(line: str, card: str, tokens: int, number: int, spare: float = 0.5) -> tuple[Settings, int]:
    """Settings with a pool for so many sequences and a share of another one, and the number that the plan says."""
    answer = started(parse_serve(line), card)
    launch = answer.launch
    kept = launch.decode_blocks(tokens) - launch.boundary_blocks(tokens)
    blocks = max(1 + number * kept + int(spare * kept), launch.sequence_blocks(launch.max_model_len) + 2)
    launch = replace(launch, num_gpu_blocks_override=blocks)
    cost = default_cost(launch.model, launch.gpu, launch.deployment.quantization)
    return replace(replace(answer, launch=launch).settings(), cost=cost), users(launch, blocks, tokens)


def load(number: int, tokens: int) -> Workload:
    zeros, prompt = np.zeros(number, dtype=np.int64), tokens // 2
    outputs = zeros + tokens - prompt
    return Workload("equal", zeros, zeros + prompt, outputs, outputs)


def run_at_once(settings: Settings, number: int, tokens: int) -> bool:
    """Whether so many run at once and none of them is preempted from then on."""
    run = simulate(settings, load(number, tokens))
    together = np.flatnonzero(run.log.rows["batch_size"] >= number)
    if not len(together):
        return False
    return not (preemptions(run).ticks > run.log.rows["start_ticks"][together[0]]).any()


def line_of(name: str, flags: str, budget: int, tokens: int) -> str:
    length = min(model(name).max_model_len, tokens + 64)
    return f"vllm serve {name} --max-num-seqs 512 --max-num-batched-tokens {budget} --max-model-len {length} {flags}"


def check(name: str, card: str, flags: str) -> None:
    """As many as the plan says run at once, and one more does not, where all prompts are computed in one step.

    Prompts that also keep a state at an end of a block may wait for each other; then ends of blocks are passed in different steps.
    """
    if model(name).indexer:
        # Its kernels need blocks of their own size.
        flags = flags.replace("--block-size 64", "")
    random = Random(f"{name} {card} {flags}")
    number = random.randint(1, 6)
    tokens = random.randint(40, min(model(name).max_model_len, 4000))
    settings, fitting = pool(line_of(name, flags, 16_384, tokens), card, tokens, number, random.random())
    assert fitting >= 1
    assert run_at_once(settings, fitting, tokens)
    assert not run_at_once(settings, fitting + 1 + exports_states(name, card), tokens)


def exports_states(name: str, card: str) -> bool:
    mixer = model(name).mixer
    return mixer is not None and mixer.export_tokens(gpu(card).major, LATEST.since[1]) > 0


@pytest.mark.parametrize(("name", "card", "flags"), SAMPLE)
def test_as_many_run_at_once_as_the_plan_says_and_no_more(name, card, flags):
    check(name, card, flags)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_so_for_every_preset_on_every_kind_of_card(name):
    # Kernels of an indexer have blocks of their own.
    flags = [each for each in FLAGS if not (model(name).indexer and "--block-size" in each)]
    for place, card in enumerate(CARDS):
        check(name, card, flags[place % len(flags)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3.5-35b-a3b", "nemotron-h-8b", "granite-4.0-h-small", "gemma-3-27b", "llama-3.1-8b"]
)
def test_of_prompts_in_many_steps_hardly_more_run(name):
    # Sequences that began a step apart pass ends of blocks, and end, in different steps.
    settings, fitting = pool(line_of(name, "", 2048, 3000), "h100-80gb", 3000, 30)
    assert fitting >= 20
    assert run_at_once(settings, fitting, 3000)
    assert not run_at_once(settings, fitting + 3, 3000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens", "number", "at_once"),
    [("gemma-3-1b", 8000, 4, 4), ("gemma-3-27b", 16_000, 4, 4), ("mistral-7b-v0.1", 16_000, 2, 2)],
)
def test_few_long_prompts_in_windows_wait_for_the_blocks_of_a_prompt(name, tokens, number, at_once):
    # The pool holds one more sequence that decodes; its prompt, of which a window keeps all tokens in flight, finds too few blocks.
    settings, fitting = pool(line_of(name, "", 32_768, tokens), "h200", tokens, number)
    assert fitting == at_once
    assert run_at_once(settings, fitting, tokens)
    assert not run_at_once(settings, fitting + 1, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("rates", ["[0.0, 0.0, 0.0]", "[1.0, 1.0, 1.0]"])
def test_with_drafts(rates):
    flags = f"--speculative-config '{RATES % rates}'"
    settings, fitting = pool(line_of("qwen3-8b", flags, 16_384, 1500), "h100-80gb", 1500, 5, 0.9)
    assert run_at_once(settings, fitting, 1500)
    assert not run_at_once(settings, fitting + 1, 1500)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("deepseek-v3", "--tensor-parallel-size 4 --decode-context-parallel-size 4"),
        ("llama-3.1-8b", "--tensor-parallel-size 16 --decode-context-parallel-size 2"),
        ("qwen3.5-35b-a3b", "--pipeline-parallel-size 2"),
        ("gemma-3-27b", "--disable-hybrid-kv-cache-manager"),
    ],
)
def test_with_ranks_stages_and_one_group(name, flags):
    check(name, "h200", flags)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SEVERAL_SIZES))
def test_with_blocks_of_several_sizes(name):
    check(name, "h200", "")
