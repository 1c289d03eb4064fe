"""Tensors of vLLM's profiled step, beside the installed vLLM's own code."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fragmeter.sim.spec import Deployment, gpu, model
from fragmeter.sim.spec.releases import release
from fragmeter.sim.spec.startup.activations import phases
from fragmeter.sim.spec.startup.launch import Launch

torch = pytest.importorskip("torch", reason="no vLLM")
pytest.importorskip("vllm", reason="no vLLM")

from real_vllm.live_bytes import LiveBytes

TOKENS, SEQS = 8192, 1024


def launch(
    name: str, minor: int = 19, ranks: int = 1, seqs: int = SEQS, max_model_len: int = 8192, tokens: int = TOKENS
) -> Launch:
    return Launch(
        model=model(name),
        gpu=gpu("h100-80gb"),
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        tensor_parallel=ranks,
        deployment=Deployment(kv_dtype="bf16", cuda_graphs=True),
        release=release((0, minor)),
    )


def test_the_first_runner_s_sampler_holds_14_bytes_a_logit(monkeypatch):
    """What ``_dummy_sampler_run`` calls: a copy in fp32 beside the model's logits, probabilities and noise. Top-k works in place."""
    from vllm.v1.sample import sampler as module
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.ops import topk_topp_sampler

    sampler = module.Sampler()
    sampler.topk_topp_sampler.forward = sampler.topk_topp_sampler.forward_native
    monkeypatch.setattr(topk_topp_sampler, "apply_top_k_top_p", lambda logits, k, p: logits)
    monkeypatch.setattr(module.Sampler, "greedy_sample", staticmethod(lambda logits: logits.argmax(dim=-1).view(-1)))
    rows, vocabulary = 64, 4096

    def same(value: float) -> torch.Tensor:
        return torch.full((rows,), value)

    metadata = SamplingMetadata(
        temperature=same(0.5),
        all_greedy=False,
        all_random=False,
        top_p=same(0.9),
        top_k=same(vocabulary - 1),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=same(0.1),
        presence_penalties=same(0.1),
        repetition_penalties=same(0.1),
        output_token_ids=[[] for _ in range(rows)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        spec_token_ids=[[] for _ in range(rows)],
    )
    with LiveBytes() as live:
        logits = torch.randn(rows, vocabulary, dtype=torch.bfloat16)
        sampler(logits=logits, sampling_metadata=metadata)
    # The rows of small tensors (temperatures, samples) are less than a hundredth.
    assert live.peak == pytest.approx(14 * rows * vocabulary, rel=0.01)
    by_14, by_38 = (phases(launch("llama-3.1-8b", minor), range(32), last=True).sampler for minor in (17, 16))
    assert by_38 - by_14 == (38 - 14) * SEQS * 128_256 - 4 * 132 * 128_256


@pytest.mark.parametrize(
    ("kernels", "name"),
    [("triton_moe", "TritonExperts"), ("marlin_moe", "MarlinExperts"), ("cutlass_moe", "CutlassExpertsFp8")],
)
@pytest.mark.parametrize("experts", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
def test_the_workspace_of_experts_is_that_of_vllm(kernels, name, experts):
    """``workspace_shapes`` of the kernels that hold their tensors in the workspace of all layers."""
    from importlib import import_module
    from math import prod

    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    made = getattr(import_module(f"vllm.model_executor.layers.fused_moe.experts.{kernels}"), name)
    spec = model(experts)
    ours = phases(launch(experts), range(spec.num_layers), last=True).workspace
    width, hidden, used = spec.experts.intermediate_size, spec.hidden_size, spec.experts.used
    # Marlin's N is the width, that of the others gate and up.
    gates = width if name == "MarlinExperts" else 2 * width
    stub = SimpleNamespace(adjust_N_for_activation=made.adjust_N_for_activation)
    shapes = made.workspace_shapes(
        stub, TOKENS, gates, hidden, used, spec.experts.count, spec.experts.count, None, MoEActivation.SILU
    )
    assert 2 * (max(prod(shapes[0]), prod(shapes[2])) + prod(shapes[1])) == ours


@pytest.mark.parametrize(("max_model_len", "seqs"), [(640, 1024), (8192, 256), (163_840, 8), (1024, 16), (640, 8)])
def test_the_rows_of_a_profiled_context_are_those_of_vllm(max_model_len, seqs):
    from vllm.model_executor.layers.attention import mla_attention

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=seqs),
        cache_config=SimpleNamespace(block_size=16),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    rows = mla_attention.MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(config)
    found = launch("deepseek-v3", ranks=8, seqs=seqs, max_model_len=max_model_len)
    beside = TOKENS * 15 * 7168 // 2 + 2 * TOKENS * found.model.attention(8).gemm_elements
    mlp = TOKENS * 15 * 7168 // 2 + 2 * TOKENS * 3 * 18_432 // 8
    context = 2 * rows * 16 * 256
    assert phases(found, range(61), last=False).forward == max(beside + context, mlp)


def test_the_encoder_is_profiled_with_as_many_items_as_its_budget_holds():
    from vllm.multimodal.encoder_budget import compute_mm_encoder_budget

    for tokens in (2048, 8192, 16_384, 32_768):
        limits = SimpleNamespace(
            max_num_encoder_input_tokens=tokens, encoder_cache_size=tokens, disable_chunked_mm_input=False
        )
        budget, cache = compute_mm_encoder_budget(limits, {"image": 16_384, "video": 12_288})
        found = phases(launch("qwen3.6-27b", 33, seqs=256, tokens=tokens), range(64), last=True)
        assert found.outputs == 2 * 5120 * (min(budget, cache) // 16_384 * 16_384)
