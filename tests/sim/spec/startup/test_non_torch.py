"""What is consumed beside the weights since 0.27, beside boots on five cards and the sizes of vLLM's own tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fragmeter.sim.spec import Deployment, gpu, model
from fragmeter.sim.spec.encoders import Encoder
from fragmeter.sim.spec.families import read_config
from fragmeter.sim.spec.gpu import GpuSpec
from fragmeter.sim.spec.releases import release
from fragmeter.sim.spec.speculative import parse_speculative
from fragmeter.sim.spec.startup.capacity import stage_memories
from fragmeter.sim.spec.startup.cuda_graphs import estimated_bytes
from fragmeter.sim.spec.startup.launch import Launch
from fragmeter.sim.spec.startup.launched_graphs import captures_of, cuda_graph_bytes, shape_of
from fragmeter.sim.spec.startup.non_torch import SIZES, non_torch_bytes

GIB = 2**30


def shape(kind: str, layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int):
    config = {
        "model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "intermediate_size": mlp, "vocab_size": vocab, "max_position_embeddings": 32_768, "head_dim": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    return read_config(config, kind)


SHAPES = {
    "qwen3-0.6b": shape("qwen3", 28, 1024, 16, 8, 3072, 151_936),
    "qwen3-1.7b": shape("qwen3", 28, 2048, 16, 8, 6144, 151_936),
    "qwen3-8b": shape("qwen3", 36, 4096, 32, 8, 12_288, 151_936),
    "qwen3-14b": shape("qwen3", 40, 5120, 40, 8, 17_408, 151_936),
    "qwen3-32b": shape("qwen3", 64, 5120, 64, 8, 25_600, 151_936),
    "llama-3.1-8b": shape("llama", 32, 4096, 32, 8, 14_336, 128_256),
    "mistral-7b-v0.3": shape("llama", 32, 4096, 32, 8, 14_336, 32_768),
}
A6000 = "rtx-3090"


def launch(
    name: str,
    card: str | GpuSpec,
    minor: int = 29,
    ranks: int = 1,
    quantization: str | None = None,
    stages: int = 1,
    graphs: bool = True,
    **more,
) -> Launch:
    found = gpu(card) if isinstance(card, str) else card
    is_large = found.memory_bytes > 70 * GIB and found.architecture != "a100"
    return Launch(
        model=SHAPES[name], gpu=found, max_model_len=640, max_num_seqs=1024 if is_large else 256,
        max_num_batched_tokens=8192 if is_large else 2048, tensor_parallel=ranks, release=release((0, minor)),
        deployment=Deployment(stages, "bf16", quantization, graphs), **more,
    )  # fmt: skip


def consumed(found: Launch):
    return non_torch_bytes(found, range(found.model.num_layers), last=True)


#: GiB consumed beside the weights, and estimated for CUDA graphs, in boots of 0.29 and 0.30 with an empty compile cache (mondegreens/apron,
#: kv-budget-residuals.md and verification reports), of 0.31 (startups.json), and of Qwen3 14B AWQ under 0.28 (the same).
BOOTS = [
    ("qwen3-1.7b", "rtx-4090", 1, None, 0.88, 0.35),
    ("qwen3-1.7b", "l4", 1, None, 0.84, 0.34),
    ("qwen3-0.6b", "rtx-4090", 1, None, 0.61, 0.32),
    ("qwen3-32b", "a100-80gb", 1, None, 0.27, 0.77),
    ("qwen3-14b", A6000, 1, None, 0.25, 0.50),
    ("qwen3-8b", "rtx-4090", 1, None, 0.26, 0.43),
    ("llama-3.1-8b", "rtx-4090", 1, None, 0.24, 0.43),
    ("llama-3.1-8b", "a100-80gb", 1, None, 0.26, 0.43),
    ("mistral-7b-v0.3", "rtx-4090", 1, None, 0.14, 0.43),
    ("mistral-7b-v0.3", "l4", 1, None, 0.11, 0.43),
    ("qwen3-8b", "rtx-4090", 1, "gptq", 0.29, 0.46),
    ("qwen3-8b", "a100-80gb", 2, None, 0.20, 0.45),
    ("qwen3-8b", "h100-80gb", 1, "awq", 0.95, None),
    ("qwen3-32b", "h100-80gb", 1, None, 2.28, None),
    ("qwen3-14b", "rtx-5090", 1, "awq", 1.82, None),
]


@pytest.mark.parametrize(
    ("name", "card", "ranks", "quantization", "beside", "graphs"), BOOTS, ids=lambda value: str(value)
)
def test_boots_with_an_empty_compile_cache(name, card, ranks, quantization, beside, graphs):
    found = launch(name, card, ranks=ranks, quantization=quantization)
    assert consumed(found).likely / GIB == pytest.approx(beside, abs=0.1)
    if graphs is not None:
        assert cuda_graph_bytes(found, range(found.model.num_layers)).likely / GIB == pytest.approx(graphs, abs=0.06)


def test_counts_of_the_second_runner_grow_with_sequences_and_vocabulary():
    """``output_bin_counts`` of 32 bits, and two masks of a bit, as vLLM 0.27 to 0.33 allocate them."""
    few, many = (consumed(launch("qwen3-32b", "a100-80gb", ranks=2, graphs=graphs)) for graphs in (True, False))
    assert few == many
    more = consumed(replace(launch("qwen3-32b", "a100-80gb", ranks=2), max_num_seqs=1024))
    assert more.likely - few.likely == 768 * (4 * 151_936 + 2 * 4 * 4748)
    # Until 0.26 vLLM does not count what torch allocated beside the weights before the profile.
    before = [consumed(replace(launch("qwen3-32b", "a100-80gb", 26, 2), max_num_seqs=seqs)) for seqs in (256, 1024)]
    assert before[0] == before[1]
    # Only the last stage samples.
    first, last = (
        non_torch_bytes(launch("qwen3-32b", "a100-80gb", stages=2), range(32), last) for last in (False, True)
    )
    assert last.likely - first.likely == 256 * (4 * 151_936 + 2 * 4 * 4748)


def test_drafts_and_encoders_keep_buffers():
    plain = launch("qwen3-32b", "a100-80gb", ranks=2)
    drafts = replace(plain, speculative=parse_speculative('{"method": "mtp", "num_speculative_tokens": 3}', False))
    hidden = 2 * 2048 * 5120
    assert consumed(drafts).likely - consumed(plain).likely == hidden + 256 * 3 * 4 * 4748
    seeing = replace(plain, model=replace(plain.model, encoder=Encoder(0, 0)))
    assert consumed(seeing).likely - consumed(plain).likely == hidden


def test_a_compile_cache_or_no_graphs_save_the_held_embedding():
    embedding = 2 * 151_936 * 2048
    cold = consumed(launch("qwen3-1.7b", "rtx-4090"))
    assert cold.low + embedding <= cold.likely <= cold.high
    assert cold.likely - consumed(launch("qwen3-1.7b", "rtx-4090", graphs=False)).likely == embedding
    # Where it is not likely it is in the interval.
    free = consumed(launch("qwen3-8b", "rtx-4090"))
    assert free.high - free.likely > 2 * 151_936 * 4096


def test_drafters_are_captured_too():
    """The first runner captures a drafter's pieces alone, the second one also a first and a further pass with each whole step."""
    plain, drafts = launch("qwen3-32b", "a100-80gb", ranks=2), '{"method": "mtp", "num_speculative_tokens": 3}'
    shapes = [
        shape_of(
            replace(launch("qwen3-32b", "a100-80gb", minor, 2), speculative=parse_speculative(drafts, False)), range(64)
        )
        for minor in (21, 29)
    ]
    assert [(each.drafter_layers, each.drafter_passes) for each in shapes] == [(1, 0), (1, 2)]
    found = captures_of(plain)
    alone, beside = (
        estimated_bytes(found, each, 2048).likely for each in (replace(shapes[1], drafter_layers=0), shapes[1])
    )
    pieces, whole = 0.41 * 0.25 * len(found.piecewise), 0.41 * 0.5 * len(found.full)
    assert (beside - alone) / 2**20 == pytest.approx(pieces + 2 * whole, rel=0.01)


def test_pipeline_stages_of_one_rank_share_no_buffers():
    """Llama 3.1 8B on two H100 under 0.19: 0.07 GiB in two stages; two ranks share buffers of NVLS."""
    stages, ranks = (launch("llama-3.1-8b", "h100-80gb", 19, **more) for more in ({"stages": 2}, {"ranks": 2}))
    shared, alone = non_torch_bytes(ranks, range(32), last=True), non_torch_bytes(stages, range(16), last=False)
    assert alone.low < 0.07 * GIB < alone.likely < GIB < shared.likely


def test_a_compile_cache_is_one_cause_of_two_parts():
    """Qwen3 32B AWQ under 0.28 on an RTX 5090 at 0.70 had 0.45 and 3.00 GiB in two boots, by the copy of the embedding alone."""
    card = replace(gpu("rtx-5090"), memory_bytes=int(31.36 * GIB))
    found = launch("qwen3-32b", card, 28, quantization="awq", gpu_memory_utilization=0.70)
    # Of weights that log 18.16 GiB.
    cold, warm, either = (stage_memories(replace(found, is_compiled=each))[0].kv_cache for each in (False, True, None))
    assert (warm.likely - cold.likely) / GIB == pytest.approx(3.00 - 0.45, abs=0.1)
    assert (either.low, either.likely) == (cold.low, cold.likely) and either.high == warm.high
    assert either.high > cold.high + GIB
    # A log that has the activations, and none of the KV cache, decides it.
    log = stage_memories(replace(found, corrections=(("activations", 0), ("non_torch", 0))))[0]
    assert log.kv_cache.likely == either.likely and log.kv_cache.high - log.kv_cache.low < 1.5 * GIB


def test_every_size_names_its_logs():
    entries = [each for _, sizes in SIZES for each in sizes.values()]
    assert all(each.logs and each.low <= each.likely <= each.high for each in entries)


def test_more_than_two_ranks_on_pcie_and_engines_that_exchange_tokens_take_more():
    """Four L4s under 0.29: 0.6 GiB more for four ranks than a pair has, and 1.5 for engines with experts."""
    pair, four = (consumed(launch("qwen3-8b", "l4", ranks=ranks)) for ranks in (2, 4))
    assert (four.likely - pair.likely) / GIB == pytest.approx(0.65, abs=0.01)
    assert consumed(launch("qwen3-8b", "l4", 26, ranks=2)) == consumed(launch("qwen3-8b", "l4", 26, ranks=4))
    experts = replace(model("qwen3-30b-a3b"), encoder=None)
    ranks, engines = (
        replace(
            launch("qwen3-8b", "l4", ranks=2 // engines),
            model=experts,
            deployment=Deployment(1, "bf16", None, True, data_parallel=engines, expert_parallel=True),
            is_compiled=True,
        )
        for engines in (1, 2)
    )
    assert (consumed(engines).likely - consumed(ranks).likely) / GIB == pytest.approx(1.5, abs=0.01)


def test_unified_memory_has_the_engine_itself():
    spark, card = (non_torch_bytes(launch("qwen3-8b", name, 20), range(36), last=True) for name in ("gb10", "rtx-5090"))
    assert 1 < (spark.likely - card.likely) / GIB < 3
    assert (spark.high - spark.low) / GIB == pytest.approx(7.1, abs=0.3)
