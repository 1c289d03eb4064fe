"""SGLang's defaults by card, of the installed wheel: those of ``cards`` and those that are recorded."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from unittest import mock

import pytest

from fragmeter.sim.policy.server import Server
from fragmeter.sim.policy.sglang import SGLang
from fragmeter.sim.policy.sglang_options import SGLangOptions
from fragmeter.sim.spec import Deployment, gpu, model
from fragmeter.sim.spec.startup import sglang
from fragmeter.sim.spec.startup.launch import Launch
from fragmeter.sim.spec.startup.sglang import max_running_requests, page_size
from fragmeter.sim.spec.startup.sglang_states import state_bytes, state_rules, turns_overlap_off

from . import cards, flags, resolution
from .record import recorded_defaults, recorded_models


def test_defaults_of_sixteen_cards_are_those_of_the_real_server_args():
    real = resolution.defaults()
    assert len(cards.CARDS) == 16
    assert cards.ours() == real == recorded_defaults()


def test_defaults_of_models_are_those_of_the_whole_resolution():
    """Of each preset on a card of each generation: what SGLang makes of a line that names the model only."""
    real = resolution.of_models()
    assert len(real) == 5 * len(cards.MODELS)
    assert cards.ours_of_models() == recorded_models() == real


@pytest.mark.parametrize("said", cards.STATE_LINES)
@pytest.mark.parametrize("name", cards.STATE_MODELS)
def test_pages_of_models_with_states_are_those_of_the_whole_resolution(name: str, said: str):
    line, ours = cards.STATE_LINES[said]
    found = page_size(gpu("b200"), model(name), **ours)
    if name == "nemotron-3-nano-30b-a3b" and said == "no copies":
        # Refused, here by its pages.
        with pytest.raises(AssertionError, match="no_buffer do not support trtllm_mha"):
            resolution.of_model(name, "b200", **line)
        assert found == 64
    else:
        assert found == resolution.of_model(name, "b200", **line)[0]


@pytest.mark.parametrize("backends, names", [cards.BACKENDS, cards.LATENT_BACKENDS])
def test_pages_of_attention_backends_are_those_of_the_whole_resolution(backends: list[str], names: list[str]):
    for name, card, backend in itertools.product(names, ("h100-80gb", "b200"), backends):
        if card == "h100-80gb" and backend in ("trtllm_mla", "cutedsl_mla"):
            with pytest.raises(ValueError, match="only supported on Blackwell"):
                resolution.of_model(name, card, attention_backend=backend)
            continue
        real = resolution.of_model(name, card, attention_backend=backend)[0]
        assert page_size(gpu(card), model(name), backend) == real, (name, card, backend)


@pytest.mark.parametrize("card", cards.GENERATIONS)
@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5", "deepseek-v3"])
def test_formats_of_sparse_attention_are_those_of_the_whole_resolution(name: str, card: str):
    real = resolution.resolved(name, card).kv_cache_dtype
    assert {"auto": False, "bfloat16": False, "fp8_e4m3": True}[real] == SGLang.kv_dtype(
        model(name), gpu(card), "auto"
    ).startswith("fp8")


@pytest.mark.parametrize("given", [1, 16, 32, 64])
@pytest.mark.parametrize("name", cards.PAGED)
def test_pages_of_lines_are_those_of_the_whole_resolution(name: str, given: int):
    """SGLang replaces those that the kernels do not have."""
    for card in ("h100-80gb", "b200"):
        real = resolution.of_model(name, card, page_size=given, chunked_prefill_size=8192)[0]
        assert page_size(gpu(card), model(name), given=given) == real, card


def test_requests_that_run_at_most_are_those_of_the_real_configurator():
    assert [max_running_requests(*pool) for pool in cards.POOLS] == resolution.running_requests()


def test_flags_of_lines_are_those_of_the_real_parser():
    assert json.loads(flags.FILE.read_text("utf-8")) == flags.flags()


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("ratio", [0.8, 0.5, 1.0])
@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b", "llama-4-scout", "mimo-v2-flash"])
def test_pools_of_windows_are_those_of_the_real_configurator(name: str, ratio: float, page: int):
    """Given the bytes that weights leave."""
    shape = model(name)
    with mock.patch.object(sglang, "used_at_start", lambda launch: SimpleNamespace(likely=0)):
        for available in (40 << 30, (40 << 30) + 123_457_789):
            with mock.patch.object(
                sglang, "loaded_bytes", lambda launch, left=available: [SimpleNamespace(likely=-left)]
            ):
                launch = Launch(
                    model=shape, gpu=gpu("h100-80gb"), max_model_len=8192, max_num_seqs=0, max_num_batched_tokens=8192
                )
                slots = sglang.num_slots(launch, 1e-12, ratio) // page * page
            windows = SGLang.window_pool(
                SimpleNamespace(model=shape, deployment=Deployment(), tensor_parallel=1),
                SGLangOptions(swa_full_tokens_ratio=ratio),
                slots // page,
                page,
            )
            assert (slots, windows.blocks * page) == resolution.window_pool(shape, available, ratio, page)


def test_the_models_whose_windows_have_a_pool_are_those_of_the_real_server():
    """By architecture here, by ``model_type`` in ours."""
    kept = {
        "GptOssForCausalLM": "gpt-oss-20b",
        "Llama4ForConditionalGeneration": "llama-4-scout",
        "Gemma4ForConditionalGeneration": "gemma-4-31b",
        "MiMoV2FlashForCausalLM": "mimo-v2-flash",
        "Gemma3ForConditionalGeneration": "gemma-3-27b",
        "Gemma2ForCausalLM": "gemma-2-2b",
        "MistralForCausalLM": "mistral-7b-v0.1",
        "Step3p7ForConditionalGeneration": "step-3.7-flash",
    }
    for architecture, name in kept.items():
        assert (sglang.window_of(model(name)) is not None) == bool(resolution.is_hybrid_swa_model([architecture])), name


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", resolution.WITH_STATES)
def test_bytes_of_states_are_those_of_the_real_configurations(name: str, ranks: int):
    assert state_bytes(model(name), ranks, 1, None) == resolution.bytes_of_state(name, ranks)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ({}, {}),
        ({"mamba_full_memory_ratio": 0.5}, {"mamba_full_memory_ratio": 0.5}),
        ({"max_mamba_cache_size": 77}, {"max_mamba_cache_size": 77}),
        ({"disable_overlap_schedule": True}, {"disable_overlap_schedule": True}),
        ({"max_running_requests": 9}, {}),
        ({"disable_radix_cache": True}, {}),
        ({"disable_radix_cache": True, "max_running_requests": 9}, {}),
    ],
)
@pytest.mark.parametrize("left", [16 << 30, (40 << 30) + 123_457_789])
def test_pools_of_states_are_those_of_the_real_configurator(left: int, line: dict, options: dict):
    """Given the bytes that weights leave."""
    shape, fraction = model("qwen3-next-80b-a3b"), 1e-12
    each, requests = state_bytes(shape, 1, 1, None), line.get("max_running_requests")
    copied = {"mamba_radix_cache_strategy": "extra_buffer" if "disable_overlap_schedule" not in line else "no_buffer"}
    states, rest, most = resolution.state_pool(each, left, **{"mamba_full_memory_ratio": 0.9} | copied | line)
    server = Server(
        model=shape,
        gpu=gpu("h100-80gb"),
        deployment=Deployment(),
        max_model_len=8192,
        max_num_seqs=requests,
        caches_prefixes="disable_radix_cache" not in line,
    )
    chosen = SGLangOptions(mem_fraction_static=fraction, **options)
    with (
        mock.patch.object(sglang, "_used_at_start", lambda launch: 0),
        mock.patch.object(sglang, "loaded_bytes", lambda launch: [SimpleNamespace(likely=-left)]),
    ):
        found = SGLang.state_pool(server, chosen, 1)
        slots, _ = SGLang.pool_size(server, chosen, None, 1)
    assert found.slots == states
    assert min(found.most_requests, requests or 4096) == most
    slot = sum(shape.group_slot_bytes(each) for each in shape.kv_groups() if each.span.kind == "full")
    assert slots == rest // slot


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("most", [None, 100_032])
@pytest.mark.parametrize("name", ["gpt-oss-20b", "llama-4-scout", "mimo-v2-flash"])
def test_buffers_of_windows_and_slots_are_those_of_the_real_pool(name: str, most: int | None, page: int):
    """Given the bytes that weights leave, or ``--max-total-tokens``."""
    shape, left = model(name), (40 << 30) + 123_457_789
    server = Server(model=shape, gpu=gpu("h100-80gb"), deployment=Deployment(), max_model_len=8192)
    chosen = SGLangOptions(mem_fraction_static=1e-12, enable_unified_memory=True)
    with (
        mock.patch.object(sglang, "_used_at_start", lambda launch: 0),
        mock.patch.object(sglang, "loaded_bytes", lambda launch: [SimpleNamespace(likely=-left)]),
    ):
        computed, _ = SGLang.pool_size(server, chosen, None, page)
        pages = computed if most is None else most // page
        buffer = SGLang.window_pool(server, chosen, pages, page).buffer
    ours = [
        buffer.page_bytes,
        buffer.unit_bytes,
        buffer.most_pages,
        min(buffer.most_units, buffer.ids),
        buffer.most_tokens,
    ]
    assert ours == resolution.window_buffer(shape, left, 0.8, page, most)


@pytest.mark.parametrize("page", [1, 64])
@pytest.mark.parametrize("most", [None, 100_032])
@pytest.mark.parametrize("name", resolution.WITH_STATES)
def test_buffers_of_states_and_slots_are_those_of_the_real_pool(name: str, most: int | None, page: int):
    """Given the bytes that weights leave, or ``--max-total-tokens``."""
    left, shape = (16 << 30) + 123_457_789, model(name)
    server = Server(model=shape, gpu=gpu("h100-80gb"), deployment=Deployment(), max_model_len=8192)
    chosen = SGLangOptions(mem_fraction_static=1e-12, enable_unified_memory=True)
    with (
        mock.patch.object(sglang, "_used_at_start", lambda launch: 0),
        mock.patch.object(sglang, "loaded_bytes", lambda launch: [SimpleNamespace(likely=-left)]),
    ):
        computed, _ = SGLang.pool_size(server, chosen, None, page)
        pages = computed if most is None else most // page
        pool = SGLang.state_pool(server, chosen, page, pages)
    buffer, each = pool.buffer, state_bytes(shape, 1, 1, None)
    budget = left - (pool.slots + 1) * each
    ours = [buffer.slot_bytes, buffer.unit_bytes, buffer.most_pages, buffer.most_units, buffer.ids, buffer.unit_slots]
    assert ours == resolution.unified_buffer(name, computed * page, pool.slots, budget, page, most)
    assert buffer.most_tokens == pages * page


_ARCHITECTURES = {
    "Lfm2ForCausalLM": "LiquidAI/LFM2-1.2B",
    "Qwen3NextForCausalLM": "qwen3-next-80b-a3b",
    "Qwen3_5ForConditionalGeneration": "qwen3.5-27b",
    "Qwen3_5MoeForConditionalGeneration": "qwen3.5-35b-a3b",
    "NemotronHForCausalLM": "nemotron-3-nano-30b-a3b",
    "GraniteMoeHybridForCausalLM": "granite-4.0-h-small",
    "KimiLinearForCausalLM": "kimi-linear-48b-a3b",
}


@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_the_overlap_schedule_is_off_where_the_real_resolution_turns_it_off(architecture: str):
    """It does where states cannot be copied, and the line leaves the strategy to it."""
    shape = model(_ARCHITECTURES[architecture])
    assert turns_overlap_off(shape, "auto") is not resolution.overlaps(architecture)
    assert not turns_overlap_off(shape, "no_buffer")


@pytest.mark.parametrize("architecture", [name for name in _ARCHITECTURES if name != "Lfm2ForCausalLM"])
def test_strategies_are_those_of_the_real_resolution(architecture: str):
    shape = model(_ARCHITECTURES[architecture])
    for page, overlaps in ((1, True), (1, False), (64, True), (64, False)):
        for strategy in ("auto", "extra_buffer", *["no_buffer"][: page == 1 and not overlaps]):
            real = resolution.state_rules(architecture, shape.mixer.chunk_tokens, page, strategy, overlaps)
            assert state_rules(shape, page, strategy, keeps=True, overlaps=overlaps) == real
