"""Decode context parallelism of the installed vLLM beside ours, step by step, and its rules of which ranks may divide a sequence.

``tests/sim/engine/test_context_parallel.py`` compares ours with blocks as many times larger.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm.config import KVTransferConfig, ModelConfig, ParallelConfig, VllmConfig

from fragmeter.sim.real_vllm import core
from fragmeter.sim.spec import Deployment, gpu, model
from fragmeter.sim.spec.context_parallel import broken_rule
from fragmeter.sim.spec.startup.capacity import capacity
from fragmeter.sim.spec.startup.launch import Launch
from tools.live.step_log import Difference, Served, first_difference

from . import arrived, offloading, ours, server, speculation
from .drafts import drafting
from .layers import is_packed
from .offloading import Copies
from .shapes import Layer, compressed_layers
from .test_probe import PROBE, recorded
from .workloads import KINDS, OPTIONS, Case, number_of_workloads

#: Workloads of a kind.
_SEEDS = number_of_workloads(15)
#: Kinds with layers that keep every token.
_PLAIN = ("mixed", "bursts", "tight", "prefixes", "turns", "chunks")
_RANKS = (2, 4)


def _cases(kind: str, ranks: int, option: str | None = None, seeds: int = 15) -> Iterator[Case]:
    """Workloads in blocks of as many tokens as ``ranks`` can divide."""
    for seed in range(seeds):
        case = KINDS[kind](seed)
        whole = case.block_size if case.block_size % ranks == 0 else case.block_size * ranks
        case = replace(case, block_size=whole)
        yield case if option is None else OPTIONS[option](case)


def _divided(case: Case, ranks: int, interleaved: int = 1) -> tuple[Case, dict[str, Any]]:
    """The same pool in vLLM's terms: tokens of a block on a rank, and how many tokens in a row are on one rank."""
    parallel = {
        "tensor_parallel_size": ranks,
        "decode_context_parallel_size": ranks,
        "cp_kv_cache_interleave_size": interleaved,
    }
    return replace(case, block_size=case.block_size // ranks), parallel


def _real(case: Case, ranks: int, asynchronous: bool = False, interleaved: int = 1) -> Served:
    divided, parallel = _divided(case, ranks, interleaved)
    return server.serve(divided, asynchronous, parallel=parallel)


def _ours(case: Case, ranks: int, asynchronous: bool = False) -> Served:
    """Ours with the same settings, on a model with latent vectors; its blocks are not computed from its memory."""
    return ours.serve(_ours_of(case, ranks), asynchronous)


def _ours_of(case: Case, ranks: int) -> Case:
    divided, _ = _divided(case, ranks)
    server = {"model": "deepseek-v3", "gpu": "h200", "tensor_parallel_size": 8, "decode_context_parallel_size": ranks}
    return replace(divided, options={**case.options, **server})


def _real_of(case: Case, ranks: int) -> Case:
    divided, parallel = _divided(case, ranks)
    return replace(divided, parallel=parallel)


def _differing(cases: Iterator[Case], ranks: int, asynchronous: bool = False) -> tuple[int, dict[str, Difference]]:
    """Steps of vLLM, and the workloads that differ."""
    steps, differing = 0, {}
    for case in cases:
        real = _real(case, ranks, asynchronous)
        steps += len(real.steps)
        if difference := first_difference(real, _ours(case, ranks, asynchronous)):
            differing[case.name] = difference
    return steps, differing


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", _PLAIN)
@pytest.mark.parametrize("ranks", _RANKS)
def test_every_step_is_that_of_the_real_scheduler(ranks, kind, asynchronous, record_property):
    steps, differing = _differing(_cases(kind, ranks, seeds=_SEEDS), ranks, asynchronous)
    mode = "async" if asynchronous else "sync"
    record_property(f"compared/{ranks} ranks {mode}", [_SEEDS, steps, len(differing)])
    assert not differing, "\n".join(f"{name}: {difference}"[:400] for name, difference in differing.items())


@pytest.mark.parametrize("option", OPTIONS)
def test_so_they_do_under_the_options_of_the_scheduler(option, record_property):
    steps, differing = _differing(_cases("tight", 2, option, _SEEDS), 2)
    record_property(f"compared/2 ranks {option}", [_SEEDS, steps, len(differing)])
    assert not differing


_modes = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@_modes
@pytest.mark.parametrize("kind", ["prefixes", "turns"])
def test_so_they_do_beside_a_host_tier(kind: str, asynchronous: bool, record_property):
    """A block of each of the ranks is one on the host."""
    steps = loaded = 0
    differing = {}
    for seed, case in enumerate(_cases(kind, 2, seeds=_SEEDS)):
        draw = random.Random(seed)
        copies = Copies(draw.choice([3, 20, 200]), draw.choice([1, 30, 90]), draw.choice([0, 1, 30]))
        case = replace(case, prefix_caching=True)
        real, recorder = offloading.serve(_real_of(case, 2), copies, asynchronous)
        steps, loaded = steps + len(real.steps), loaded + recorder.loaded
        found = offloading.serve_ours(_ours_of(case, 2), copies, asynchronous)
        if difference := first_difference(offloading.comparable(real), offloading.comparable(found)):
            differing[case.name] = difference
    record_property(
        f"compared/2 ranks offloading {'async' if asynchronous else 'sync'}", [_SEEDS, steps, len(differing)]
    )
    assert not differing
    assert loaded


@_modes
@pytest.mark.parametrize("kind", ["mixed", "tight", "prefixes"])
@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_so_they_do_beside_drafts(method: str, kind: str, asynchronous: bool, record_property):
    steps, differing = 0, {}
    for seed, plain in enumerate(_cases(kind, 2, seeds=_SEEDS)):
        case = drafting(plain, method, 1 + seed % 3, [0.6**place for place in range(1, 2 + seed % 3)])
        real, _ = speculation.serve(_real_of(case, 2), asynchronous)
        steps += len(real.steps)
        if difference := first_difference(real, ours.serve(_ours_of(case, 2), asynchronous)):
            differing[case.name] = difference
    record_property(f"compared/2 ranks {method} {'async' if asynchronous else 'sync'}", [_SEEDS, steps, len(differing)])
    assert not differing


@pytest.mark.parametrize("kind", ["mixed", "bursts"])
def test_so_they_do_where_prompts_are_computed_elsewhere(kind: str, record_property):
    steps, differing = 0, {}
    for case in _cases(kind, 2, seeds=_SEEDS):
        case = replace(case, prefix_caching=False)
        real = arrived.comparable(arrived.serve(_real_of(case, 2)))
        steps += len(real.steps)
        if difference := first_difference(real, arrived.comparable(arrived.serve_ours(_ours_of(case, 2)))):
            differing[case.name] = difference
    record_property("compared/2 ranks decodes", [_SEEDS, steps, len(differing)])
    assert not differing


def test_all_ranks_divide_what_is_sent():
    """As ours refuse (``tests/sim/cluster/test_cluster_disaggregated.py``)."""
    divided, _ = _divided(next(_cases("mixed", 2)), 2)
    connected = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    parallel = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}
    with mock.patch.object(core, "VllmConfig", partial(VllmConfig, kv_transfer_config=connected)):
        with pytest.raises(
            (AssertionError, ValueError), match="must be 1 or equal to the NIXL transfer parallel size=4"
        ):
            server.serve(divided, parallel=parallel)
        with pytest.raises((AssertionError, ValueError), match="only supported for MLA models"):
            server.serve(divided, parallel=parallel | {"tensor_parallel_size": 2})


def test_latent_vectors_and_tokens_in_a_row_change_no_decision():
    """Of latent vectors every rank has a copy that can be divided; the tokens of a block may go to ranks in any order."""
    for case in (*_cases("prefixes", 4), *_cases("tight", 4)):
        plain = _real(case, 4)
        assert first_difference(_real(replace(case, layers=(Layer("mla"),)), 4), plain) is None
        assert first_difference(_real(case, 4, interleaved=case.block_size // 4), plain) is None


@pytest.mark.parametrize("kind", ["tight", "prefixes"])
def test_blocks_of_the_tokens_of_one_rank_are_noticed(kind):
    """As without context parallelism: the ``--block-size`` of the line is that of one rank."""
    differing = []
    for case in _cases(kind, 2):
        # Room for the longest request in smaller blocks, too.
        case = replace(case, num_blocks=2 * case.num_blocks)
        one, _ = _divided(case, 2)
        differing += [case.name] if first_difference(_real(case, 2), server.serve(one)) else []
    assert len(differing) > 5


def test_a_probe_does_not_record_such_a_server(tmp_path: Path):
    path, case = tmp_path / "probe.jsonl", next(_cases("mixed", 2))
    divided, parallel = _divided(case, 2)
    with recorded(path):
        server.serve(divided, options=PROBE, parallel=parallel)
        assert not path.exists()
        server.serve(divided, options=PROBE)
    assert path.exists()


def _block_sizes(layers: tuple[Layer, ...], ranks: int = 2, **others: Any) -> list[int]:
    """Tokens of a block of each KV group."""
    setup = server.Setup(
        layers=layers,
        block_size=256 if is_packed(layers) else 16,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        prefix_caching=True,
        asynchronous=False,
        num_blocks=200,
        parallel={"tensor_parallel_size": ranks, "decode_context_parallel_size": ranks},
        **others,
    )
    coordinator = server.start(setup).scheduler.kv_cache_manager.coordinator
    return [manager.block_size for manager in coordinator.single_type_managers]


@pytest.mark.parametrize("kind", ["sliding", "chunked"])
def test_layers_that_forget_tokens_are_refused_beside_others(kind):
    """Unless they keep every token, too."""
    layers = (Layer(), Layer(kind, 16))
    with pytest.raises(AssertionError, match="DCP"):
        _block_sizes(layers)
    assert _block_sizes(layers, disable_hybrid=True) == [32]


@pytest.mark.parametrize("layers", [(Layer("sliding", 16),), compressed_layers([0, 4, 128])])
def test_a_model_with_windows_in_each_layer_is_refused(layers: tuple[Layer, ...]):
    with pytest.raises(AssertionError, match="DCP not support sliding window"):
        _block_sizes(layers)


def test_states_are_not_divided():
    """A hybrid starts: the blocks of its attention are divided, those of its states are not. So no factor on all blocks gives
    its decisions."""
    state = Layer("state", state_shapes=((16, 3), (1, 8, 8)), state_dtypes=("float16", "float32"))
    assert _block_sizes((Layer(), state)) == [32, 16]
    assert _block_sizes((Layer(), state), ranks=4) == [64, 16]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("max_model_len", [4096, 5001])
@pytest.mark.parametrize("block_size", [16, 64])
def test_the_pool_has_the_tokens_that_vllm_logs(ranks: int, max_model_len: int, block_size: int):
    """Three layers of latent vectors in 16 bits, in 100 MB."""
    setup = server.Setup(
        layers=(Layer("mla", head_size=576, dtype="bfloat16"),) * 3,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        prefix_caching=True,
        asynchronous=False,
        available_bytes=100 << 20,
        parallel={"tensor_parallel_size": 4, "decode_context_parallel_size": ranks},
    )
    real = server.start(setup).vllm_config.cache_config
    shape = model("deepseek-v3")
    shape = replace(shape, num_layers=3, experts=None, intermediate_size=1024)
    launch = Launch(
        model=shape,
        gpu=gpu("h200"),
        max_model_len=max_model_len,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        tensor_parallel=4,
        block_size=block_size,
        kv_cache_memory_bytes=100 << 20,
        deployment=Deployment(decode_context_parallel=ranks),
    )
    found = capacity(launch)
    assert found.num_blocks == real.num_gpu_blocks
    assert found.max_concurrency == pytest.approx(real.kv_cache_max_concurrency)
    assert abs(found.num_tokens - real.kv_cache_size_tokens) <= 1


#: Query heads and KV heads; None keeps latent vectors.
_HEADS = [(8, 1), (8, 2), (14, 2), (16, 8), (8, 8), (16, None)]


def _config(heads: int, kv_heads: int | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64 * heads,
        "intermediate_size": 128,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "num_hidden_layers": 1,
        "vocab_size": 1000,
        "max_position_embeddings": 1024,
    }
    if kv_heads is not None:
        return config
    widths = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    return config | widths | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}


@pytest.mark.parametrize(("heads", "kv_heads"), _HEADS, ids=str)
def test_the_same_ranks_may_divide_as_in_vllm(heads: int, kv_heads: int | None, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(_config(heads, kv_heads)))
    config = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="float16", max_model_len=512)
    assert config.use_mla == (kv_heads is None)
    shape = model("deepseek-v3" if kv_heads is None else "llama-3.1-8b")
    shape = replace(shape, num_heads=heads, num_kv_heads=kv_heads or heads)
    refused = 0
    for tensor_parallel in (each for each in (1, 2, 4, 7, 8, 14, 16) if heads % each == 0):
        for ranks in range(1, 17):
            broken = broken_rule(shape, tensor_parallel, ranks)
            try:
                parallel = ParallelConfig(tensor_parallel_size=tensor_parallel, decode_context_parallel_size=ranks)
                config.verify_with_parallel_config(parallel)
            except ValueError as error:
                refused += 1
                assert broken is not None and broken.text in str(error)
            else:
                assert broken is None
    assert refused
