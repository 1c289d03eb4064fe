"""Ranks that divide the tokens of a sequence: which may, and what the pool holds then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fragmeter.sim.spec import Deployment, gpu, model
from fragmeter.sim.spec.context_parallel import broken_rule, require_context_parallel
from fragmeter.sim.spec.startup.capacity import capacity, longest_model_len, stage_memories
from fragmeter.sim.spec.startup.launch import Launch
from fragmeter.sim.types.errors import SettingError


def launched(name: str, ranks: int, tensor_parallel: int = 8, **others) -> Launch:
    plain = Launch(
        model=model(name),
        gpu=gpu("h200"),
        max_model_len=32_768,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        tensor_parallel=tensor_parallel,
        **others,
    )
    return replace(plain, deployment=Deployment(cuda_graphs=True, decode_context_parallel=ranks))


@pytest.mark.parametrize(
    ("name", "tensor_parallel", "allowed"),
    [
        # Latent vectors are held by every rank.
        ("deepseek-v3", 8, {1, 2, 4, 8}),
        ("kimi-k2", 16, {1, 2, 4, 8, 16}),
        # 4 KV heads, 16 query heads of each.
        ("qwen3-235b-a22b", 4, {1}),
        ("qwen3-235b-a22b", 8, {1, 2}),
        ("qwen3-235b-a22b", 16, {1, 2, 4}),
        # 2 KV heads with 7 query heads each: two ranks hold each KV head, and cannot divide 7 heads.
        ("qwen2.5-0.5b", 4, {1}),
        ("llama-3.1-70b", 8, {1}),
        ("llama-3.1-70b", 16, {1, 2}),
        # As many KV heads as query heads.
        ("opt-13b", 8, {1}),
    ],
)
def test_ranks_that_hold_the_same_heads_may_divide(name, tensor_parallel, allowed):
    found = {ranks for ranks in range(1, 33) if broken_rule(model(name), tensor_parallel, ranks) is None}
    assert found == allowed


@pytest.mark.parametrize(
    ("name", "tensor_parallel", "ranks", "remedy"),
    [
        ("deepseek-v3", 8, 3, "must divide tensor_parallel_size = 8"),
        ("deepseek-v3", 8, 16, "must divide tensor_parallel_size = 8"),
        ("llama-3.1-70b", 8, 2, "needs more ranks than the 8 KV heads of llama-3.1-70b; raise tensor_parallel_size"),
        ("qwen3-235b-a22b", 8, 4, "must be at most 2: 8 ranks hold the 4 KV heads of qwen3-235b-a22b so many times"),
        ("qwen2.5-0.5b", 4, 2, "must divide the 7 query heads of a KV head of qwen2.5-0.5b"),
        ("gpt-oss-120b", 16, 2, "vLLM divides no layers with windows, which gpt-oss-120b has"),
        ("deepseek-v4-flash", 8, 2, "vLLM divides no layers with windows, which deepseek-ai/DeepSeek-V4-Flash has"),
        ("qwen3-next-80b-a3b", 4, 2, "is simulated for layers that all keep every token"),
        ("deepseek-v3.2", 8, 2, "is not simulated with the indexer of deepseek-v3.2"),
    ],
)
def test_others_are_refused_with_a_remedy(name, tensor_parallel, ranks, remedy):
    require_context_parallel(model(name), tensor_parallel, 1)
    with pytest.raises(SettingError) as error:
        require_context_parallel(model(name), tensor_parallel, ranks)
    assert str(error.value).startswith(f"decode_context_parallel_size = {ranks}: {remedy}")


@pytest.mark.parametrize(
    ("name", "tensor_parallel", "ranks"),
    [("deepseek-v3", 8, 2), ("deepseek-v3", 8, 8), ("kimi-k2.5", 16, 4), ("qwen3-235b-a22b", 8, 2)],
)
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_as_many_blocks_hold_as_many_times_the_tokens(name, tensor_parallel, ranks, block_size):
    """A block has as many bytes on a rank: the memory of a rank, and nothing else, decides their number."""
    plain = launched(name, 1, tensor_parallel, block_size=block_size)
    divided = launched(name, ranks, tensor_parallel, block_size=block_size)
    assert stage_memories(divided) == stage_memories(plain)
    assert divided.block_tokens == ranks * plain.block_tokens == ranks * divided.rank_block_tokens
    before, after = capacity(plain), capacity(divided)
    assert after.num_blocks == before.num_blocks
    # 32,768 tokens are whole blocks of every size.
    assert divided.sequence_blocks(32_768) * ranks == plain.sequence_blocks(32_768)
    assert after.max_concurrency == pytest.approx(ranks * before.max_concurrency)
    assert after.num_tokens == after.num_blocks * divided.block_tokens == ranks * before.num_blocks * plain.block_tokens


def test_the_longest_sequence_that_fits_grows_with_the_ranks():
    """Of a pool of 5 GiB without the null block: 61 layers of 1,152 bytes a token on a rank."""
    tokens = ((5 << 30) // (16 * 61 * 1152) - 1) * 16
    for ranks in (1, 2, 8):
        shape = replace(model("deepseek-v3"), max_model_len=1 << 20)
        launch = replace(launched("deepseek-v3", ranks), model=shape, max_model_len=1 << 20)
        assert longest_model_len(replace(launch, kv_cache_memory_bytes=5 << 30)) == ranks * tokens


def test_a_started_block_is_counted_whole():
    launch = launched("deepseek-v3", 8)
    assert [launch.sequence_blocks(tokens) for tokens in (1, 128, 129, 256, 257)] == [1, 1, 2, 2, 3]


def test_a_deployment_names_them_where_they_are_given():
    assert "decode_context_parallel" not in Deployment().describe() and Deployment().is_default
    divided = Deployment(decode_context_parallel=2)
    assert divided.describe()["decode_context_parallel"] == 2 and not divided.is_default
