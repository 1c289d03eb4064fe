"""The operations of a step by hand, and against what a skeleton computes."""

from __future__ import annotations

import pytest

from fragmeter.gpu.calibrate import points
from fragmeter.sim.spec import ModelSpec, model

#: 3 layers of 96; 6 heads of 16 over 2 KV heads; an MLP of 160; 211 words.
SPEC = ModelSpec("small", 3, 96, 6, 2, 16, 160, 211, 64, gated_mlp=True)
HEADS = {"heads": 6, "kv_heads": 2, "head_dim": 16}


def test_a_mixed_step():
    """Decodes over 5 and 9 tokens, a prompt of 4, and the last 3 tokens of a prompt of 8.

    9 tokens. Pairs: 4 * 5 / 2 = 10 of the first prompt, 3 * 5 + 3 * 4 / 2 = 21 of the second.
    """
    assert points.operations_of_step(SPEC, [1, 4, 1, 3], [5, 4, 9, 8], block_size=8) == [
        (1, {"op": "embedding", "tokens": 9, "hidden_size": 96}),
        (3, {"op": "elementwise", "tokens": 9, "hidden_size": 96, "intermediate_size": 160}),
        (3, {"op": "kv_write", "tokens": 9, "kv_heads": 2, "head_dim": 16}),
        (3, {"op": "gemm", "m": 9, "n": 160, "k": 96}),
        (3, {"op": "gemm", "m": 9, "n": 96, "k": 96}),
        (3, {"op": "gemm", "m": 9, "n": 320, "k": 96}),
        (3, {"op": "gemm", "m": 9, "n": 96, "k": 160}),
        (3, {"op": "decode_attention", "batch": 2, "context_tokens": 14, **HEADS, "block_size": 8}),
        (3, {"op": "prefill_attention", "tokens": 7, "pairs": 31, "context_tokens": 12, **HEADS}),
        (1, {"op": "gemm", "m": 4, "n": 211, "k": 96}),
    ]


def test_a_step_of_one_kind_has_one_kind_of_attention():
    for lens, wanted in (([1, 1], {"decode_attention"}), ([2], {"prefill_attention"})):
        found = {part["op"] for _, part in points.operations_of_step(SPEC, lens, [4] * len(lens), 16)}
        assert found & {"decode_attention", "prefill_attention"} == wanted


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_what_a_step_runs_over_its_tokens_is_one_kind_and_size(tokens):
    """Attention differs by the KV that it reads, and whole steps too."""
    parts = [part for _, part in points.operations_of_step(SPEC, [1] * tokens, [9] * tokens, 16)]
    attention = ("decode_attention", 9 * tokens)
    assert {points.kind(part) for part in parts} == {("layer", tokens), attention}
    assert points.kind(points.contiguous_attention(SPEC, [9, 7])) == ("contiguous_attention", 16)
    assert points.kind(points.step([1] * tokens, 4096)) == ("step", 4096)
    assert points.kind(points.step([1, 30])) == ("prefill_step", 31)
    assert points.kind(points.move("swap_in", SPEC, blocks=5, block_size=16)) == ("swap_in", 5 * 16 * 384)


def test_moves_count_elements_of_16_bits():
    """A slot: K and V of 3 layers, 2 heads of 16, 2 bytes each: 384; a block: 6 pieces."""
    assert points.move("swap_in", SPEC, blocks=5, block_size=16) == {
        "op": "swap_in",
        "bytes": 5 * 16 * 384,
        "blocks": 30,
    }


@pytest.mark.parametrize("name", ["toy-llama", "toy-opt", "llama-3.1-8b"])
def test_gemms_are_the_models_matrices(name):
    """With the embedding, the norms, the biases and the positions they are all its parameters."""
    spec = model(name)
    matrices = spec.num_layers * sum(n * k for n, k in points.layer_gemms(spec))
    words = spec.vocab_size * spec.hidden_size
    norms = (2 * spec.num_layers + 1) * spec.norm_vectors * spec.hidden_size
    biases = spec.num_layers * sum(n for n, _ in points.layer_gemms(spec)) * spec.qkv_bias
    tables = words * (1 if spec.tied_embeddings else 2) + spec.learned_positions * spec.hidden_size
    assert matrices + norms + biases + tables == spec.num_params
    assert points.head_gemm(spec) == (spec.vocab_size, spec.hidden_size)
