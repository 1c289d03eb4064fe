"""Lengths of requests in words beside those that ``vllm bench serve`` of the installed vLLM draws."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.benchmarks.datasets.utils import get_sampling_params

from fragmeter.traces.synthesis.random_load import RandomLoad

#: A tokenizer that adds no special tokens.
TOKENIZER = SimpleNamespace(num_special_tokens_to_add=lambda: 0, vocab_size=50_000)


@pytest.mark.parametrize("ratios", [(0.0, 0.0), (0.5, 0.5), (0.3, 0.9), (0.999, 0.0)])
@pytest.mark.parametrize(("input_len", "output_len"), [(1024, 128), (1, 1), (333, 7)])
def test_lengths_are_those_of_vllm(ratios, input_len, output_len):
    for seed in range(20):
        given = {"input": ratios[0], "output": ratios[1]}
        prompts, outputs, _ = get_sampling_params(
            np.random.default_rng(seed), 50, given, input_len, output_len, TOKENIZER
        )
        ours = RandomLoad(input_len, output_len, ratios, prefix_len=1).draw(50, seed, 10**6)
        assert (ours.prompt_tokens - 1).tolist() == prompts.tolist()
        assert ours.output_tokens.tolist() == outputs.tolist()
