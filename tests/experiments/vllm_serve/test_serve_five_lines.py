"""Five pasted ``vllm serve`` lines, answered by hand: two start, three do not. All figures are bytes of each GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.vllm_serve.checks import refusal
from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.remedies import remedies
from fragmeter.experiments.vllm_serve.start import Started, started
from fragmeter.sim.spec.startup.capacity import capacity, users

GIB = 2**30
H100 = 85_028_896_768
#: max_num_batched_tokens and max_num_seqs of a server on an H100 without either flag.
TOKENS, SEQS = 8192, 1024
#: PyTorch's workspace of cuBLAS on Hopper.
CUBLAS = 32 << 20


def answer(line: str, gpu: str = "h100-80gb"):
    found = started(parse_serve(line), gpu)
    return found, refusal(found.launch)


def left_beside(found: Started, share: float, weights: int, activations: int) -> int:
    """What tensors leave of an H100 beside what logs alone say: memory outside of torch, CUDA graphs, ends of torch's segments."""
    stage = capacity(found.launch).stage
    assert stage.activations.likely == activations
    assert 0 <= stage.weights.likely - weights <= 0.003 * weights
    assert GIB // 2 < stage.cuda_graphs.high and stage.cuda_graphs.low < 2 * GIB
    return int(share * H100) - stage.weights.likely - activations - stage.non_torch.likely - stage.cuda_graphs.likely


def test_llama_8b_at_16k_starts():
    found, refused = answer(
        """
        export HF_TOKEN=secret; VLLM_LOGGING_LEVEL=INFO vllm serve meta-llama/Llama-3.1-8B-Instruct \\
            --host 0.0.0.0 --port 8000 --max-model-len 16K --enable-auto-tool-choice --tool-call-parser llama3_json
        """
    )
    assert refused is None
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    layer = attention + 3 * 4096 * 14336 + 2 * 4096
    weights = 2 * (32 * layer + 2 * 128_256 * 4096 + 4096)
    assert weights == 16_060_522_496  # 14.96 GiB; vLLM logs 14.99 with the rotary table
    rotary = 131_072 * 128 * 2
    # The sampler peaks higher than the MLP.
    activations = sampler(4096)
    assert activations > CUBLAS + 2 * TOKENS * (4 * 4096 + 3 * 14336)
    left = left_beside(found, 0.92, weights + rotary, activations)
    # A token is 32 layers * 8 heads * 128 * 2 (K, V) * 2 bytes = 131,072 bytes, a block of 16 is 2 MiB.
    blocks = left // (16 * 131_072)
    pool = capacity(found.launch)
    assert (pool.stage.kv_cache_bytes, pool.num_blocks, pool.num_tokens) == (left, blocks, blocks * 16)
    # 16,384 tokens are 1,024 blocks: 26.8 sequences. 2,000 tokens are 125; the null block holds nothing.
    assert pool.max_concurrency == pytest.approx(blocks / 1024, rel=1e-9) and 26.5 < blocks / 1024 < 27.1
    assert users(found.launch, blocks, 2000) == (blocks - 1) // 125


@pytest.mark.slow
def test_llama_70b_is_too_heavy_for_one_card():
    found, refused = answer("vllm serve meta-llama/Llama-3.3-70B-Instruct")
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672 + 2 * 8192
    weights = 2 * (80 * layer + 2 * 128_256 * 8192 + 8192) + 131_072 * 128 * 2
    assert f"{weights / GIB:.2f}" == "131.45"
    assert refused.kind == "weights"
    taken = capacity(found.launch).stage.weights.likely
    assert (
        f"CUDA out of memory; the weights take {taken / GIB:.2f} GiB of each GPU and 78.68 GiB are free" in refused.text
    )
    assert 0 <= taken - weights <= 0.003 * weights
    # On two GPUs 65.74 of 72.85 GiB are weights: what is left is short of the 20 GiB of one sequence of 131,072
    # tokens (163,840 bytes each). On three, heads cannot be divided. On four it is 72.85 - 32.89 - 1.90 - 1.8 - 0.9.
    best = [*remedies(found.launch)]
    assert [(remedy.flag, remedy.value) for remedy in best] == [("--tensor-parallel-size", "4")]
    on_four = replace(found, launch=best[0].launch)
    left = left_beside(on_four, 0.92, ranked_70b(4), sampler(8192))
    assert capacity(best[0].launch).num_blocks == left // (16 * 81_920)


def ranked_70b(ranks: int) -> int:
    """Llama 70B on each of some ranks: matrices divided, norms and the rotary table on all."""
    matrices = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672) + 2 * 128_256 * 8192
    return 2 * (matrices // ranks + (2 * 80 + 1) * 8192) + 131_072 * 128 * 2


def sampler(hidden: int, vocab: int = 128_256) -> int:
    """What the step that vLLM profiles peaks at, where that is at its samples: logits, hidden states of all tokens and of the samples."""
    return CUBLAS + 14 * SEQS * vocab + 2 * (TOKENS + 2 * SEQS) * hidden


def test_three_ranks_cannot_share_32_heads():
    found, refused = answer("vllm serve --tensor_parallel_size=3 meta-llama/Meta-Llama-3.1-8B")
    assert refused.kind == "parallel"
    assert refused.text == "Total number of attention heads (32) must be divisible by tensor parallel size (3)."
    assert [(remedy.flag, remedy.value) for remedy in remedies(found.launch)] == [("--tensor-parallel-size", "1")]


@pytest.mark.slow
def test_a_context_of_32k_does_not_fit_beside_70b_on_two_cards():
    found, refused = answer("vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 2 --max-model-len 32768")
    left = left_beside(found, 0.92, ranked_70b(2), sampler(8192))
    # A token of one rank is 80 layers * 4 heads * 128 * 2 * 2 bytes; 32,768 of them are 5 GiB.
    assert 80 * 4 * 128 * 2 * 2 * 32_768 == 5 * GIB and 1.5 * GIB < left < 2.5 * GIB
    # Since 0.29 the check leaves out the null block.
    block = 16 * 163_840
    longest = (left // block - 1) * 16
    assert refused.kind == "KV cache"
    assert "max seq len (32768), (5.00 GiB KV cache is needed" in refused.text
    assert f"is larger than the available KV cache memory ({(left - block) / GIB:.2f} GiB)" in refused.text
    assert refused.text.endswith(f"maximum model length is {longest}.")
    # fp8 halves the cache to 2.5 GiB, which is still too much; 0.96 of the card leaves 3.17 GiB more, 0.95 2.38.
    assert [(remedy.flag, remedy.value) for remedy in remedies(found.launch)] == [
        ("--tensor-parallel-size", "4"),
        ("--max-model-len", f"{longest}"),
        ("--quantization", "fp8"),
        ("--gpu-memory-utilization", "0.96"),
    ]
    # With the least memory that is likely, the sequence is shorter, and no share is enough.
    sure = {remedy.flag: remedy.value for remedy in remedies(replace(found.launch, outlook="low"))}
    assert 0 < int(sure["--max-model-len"]) < longest and "--gpu-memory-utilization" not in sure
    for remedy in remedies(found.launch):
        assert refusal(remedy.launch) is None


def test_mixtral_in_a_container_starts():
    found, refused = answer(
        "docker run --gpus all -e HF_TOKEN=secret -p 8000:8000 --ipc=host vllm/vllm-openai:latest"
        " --model mistralai/Mixtral-8x7B-Instruct-v0.1 --tensor-parallel-size 2 --kv-cache-dtype fp8"
        " --gpu-memory-utilization 0.9"
    )
    assert refused is None
    # A rank: attention and eight experts of 3 matrices halved, the router (4096 * 8) and norms whole.
    attention, experts = 2 * 4096 * 4096 + 2 * 4096 * 1024, 8 * 3 * 4096 * 14_336
    matrices = 32 * ((attention + experts) // 2 + 4096 * 8) + 2 * 32_000 * 4096 // 2
    weights = 2 * (matrices + (2 * 32 + 1) * 4096) + 32_768 * 128 * 2
    # Two experts a token, 7,168 wide on a rank: 14,336 for gate and up and 7,168 for their product.
    workspace = 2 * TOKENS * 2 * (14_336 + 7_168)
    left = left_beside(found, 0.9, weights, workspace + sampler(4096, 32_000))
    # 32 layers * 4 heads * 128 * 2 * 1 byte = 32,768 bytes a token.
    pool = capacity(found.launch)
    assert (pool.num_blocks, pool.num_tokens) == (left // (16 * 32_768), left // (16 * 32_768) * 16)


def test_deepseek_v3_starts_on_eight_engines_that_share_its_experts():
    """The line of vLLM's own recipe. Alone, or divided among four, it is too heavy."""
    line = "vllm serve deepseek-ai/DeepSeek-V3 {} --enable-expert-parallel --max-model-len 65536"
    found, refused = answer(line.format("-dp 8"), "h200")
    assert refused is None and found.replicas == 8
    chosen = found.settings()
    assert (chosen.data_parallel_size, chosen.enable_expert_parallel, chosen.tensor_parallel_size) == (8, True, 1)
    # All engines' tokens are gathered before the experts: 8 experts each, 7,168 wide and 2,048 in between, in 16 bits.
    workspace = 2 * 8 * 8192 * 8 * (7168 + 2048)
    assert capacity(found.launch).stage.activations.likely > workspace
    for fewer in ("-dp 4", "", "-dp 4 --max-num-seqs 8"):
        assert answer(line.format(fewer), "h200")[1].kind == "weights"


def test_a_dense_model_is_as_many_replicas_and_ignores_expert_parallelism():
    found, refused = answer("vllm serve meta-llama/Llama-3.1-8B -dp 4 --enable-expert-parallel --max-model-len 8192")
    alone, _ = answer("vllm serve meta-llama/Llama-3.1-8B --max-model-len 8192")
    assert refused is None and (found.replicas, found.launch) == (4, alone.launch)


@pytest.mark.slow
def test_the_answers_as_data(capsys):
    def plan_of(*tokens: str):
        assert status(["plan", "--gpu", "h100-80gb", "--json", "-", *tokens]) == DONE
        return json.loads(capsys.readouterr().out)

    blocks = capacity(answer("vllm serve meta-llama/Llama-3.1-8B --max-model-len 16K")[0].launch).num_blocks
    starts = plan_of("--serve", "vllm serve meta-llama/Llama-3.1-8B --max-model-len 16K", "--mean-tokens", "2000")
    assert (starts["starts"], starts["num_gpu_blocks"], starts["refusal"]) == (True, blocks, None)
    assert starts["users"] == [{"tokens": 16_384, "users": 26}, {"tokens": 2000, "users": (blocks - 1) // 125}]
    assert starts["settings"]["num_gpu_blocks_override"] == blocks
    refused = plan_of("--serve", "vllm serve meta-llama/Llama-3.1-70B -tp 2 --max-model-len 32768")
    assert (refused["starts"], refused["refusal"]["kind"]) == (False, "KV cache")
    assert [remedy["num_gpus"] for remedy in refused["remedies"]] == [4, 2, 2]
