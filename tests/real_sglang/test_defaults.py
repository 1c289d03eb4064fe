"""SGLang's defaults by card, of the installed wheel: those of ``cards`` and those that are recorded."""

from __future__ import annotations

import json
from types import SimpleNamespace
from unittest import mock

import pytest

from fragmeter.sim.policy.options import SGLangOptions
from fragmeter.sim.policy.sglang import SGLang
from fragmeter.sim.spec import Deployment, gpu, model
from fragmeter.sim.spec.startup import sglang
from fragmeter.sim.spec.startup.launch import Launch
from fragmeter.sim.spec.startup.sglang import max_running_requests

from . import cards, flags, resolution
from .record import recorded_defaults


def test_defaults_of_sixteen_cards_are_those_of_the_real_server_args():
    real = resolution.defaults()
    assert len(cards.CARDS) == 16
    assert cards.ours() == real == recorded_defaults()


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
