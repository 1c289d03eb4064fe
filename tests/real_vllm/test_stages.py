"""Pools of launches in pipeline stages, with blocks of the user's and with hardly enough memory, beside the installed vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
from vllm import envs
from vllm.distributed.utils import get_pp_indices

from fragmeter.sim.spec import Deployment, gpu, model
from fragmeter.sim.spec.kv_cache import CacheSettings
from fragmeter.sim.spec.kv_layers import cache_layers
from fragmeter.sim.spec.startup.capacity import capacity, length_check, longest_model_len, stage_memories
from fragmeter.sim.spec.startup.launch import Launch
from fragmeter.sim.types.errors import SettingError

from . import server
from .server import start
from .test_kv_formation import Case, setup_of, spec_of

LAYOUTS = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]


def launched(name: str, partition: tuple[int, ...]) -> Launch:
    return Launch(
        model=model(name),
        gpu=gpu("h200"),
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        deployment=Deployment(pipeline_parallel=len(partition), cuda_graphs=True),
        layer_partition=partition,
        export_tokens=0,
    )


def real(launch: Launch, memory: list[int]) -> int | tuple[int | None]:
    """Blocks of the pool; or in a tuple the longest sequence that the refusal names."""
    layers, stages = cache_layers(launch.model), launch.stages
    settings = CacheSettings(
        max_model_len=launch.max_model_len,
        max_num_batched_tokens=launch.max_num_batched_tokens,
        enable_prefix_caching=launch.enable_prefix_caching,
        max_concurrent_batches=launch.concurrent_batches,
        num_gpu_blocks_override=launch.num_gpu_blocks_override,
    )
    placed = []
    setup = replace(setup_of(Case(layers, settings, memory[0])), asynchronous=True)

    def specs(recorder: server.Recorder) -> list[dict[str, object]]:
        found = [spec_of(layer, recorder.vllm_config) for layer in setup.layers]
        return [{str(layer): found[layer] for layer in stage} for stage in stages]

    patched = {
        "get_kv_cache_specs": specs,
        "determine_available_memory": lambda self: memory,
        "get_supported_kv_cache_layouts": lambda self: [LAYOUTS] * len(stages),
        "initialize_from_config": lambda self, configs: placed.extend(configs),
    }
    with mock.patch.multiple(server.Recorder, **patched), mock.patch.object(server, "spec_of", spec_of):
        try:
            start(setup)
        except ValueError as error:
            found = re.search(r"estimated maximum model length is (\d+)", str(error))
            return (int(found[1]) if found else None,)
    assert len(placed) == len(stages)
    return min(config.num_blocks for config in placed)


def launches() -> Iterator[Launch]:
    for name, partitions in (
        ("llama-3.1-8b", ((16, 16), (20, 12), (5, 27), (32,))),
        ("qwen3.6-27b", ((32, 32), (40, 24))),
    ):
        for partition in partitions:
            launch = launched(name, partition)
            needed = launch.sequence_blocks(8192)
            largest = max(memory.block_bytes for memory in stage_memories(launch))
            yield launch
            for blocks in (needed - 1, needed, needed + 1, needed // 2):
                yield replace(launch, kv_cache_memory_bytes=blocks * largest)
                yield replace(launch, num_gpu_blocks_override=blocks)


def test_pools_of_stages_and_of_the_user_are_vllms(record_property):
    compared, differing = 0, []
    for launch in launches():
        memory = [stage.kv_cache_bytes for stage in stage_memories(launch)]
        mine = capacity(launch).num_blocks if length_check(launch).passes else (longest_model_len(launch) or None,)
        theirs = real(launch, memory)
        compared += 1
        if mine != theirs:
            given = launch.layer_partition, launch.kv_cache_memory_bytes, launch.num_gpu_blocks_override
            differing.append(f"{launch.model.name} {given}: vLLM {theirs}, ours {mine}")
    record_property("compared/stages with partitions", [compared, 0, len(differing)])
    assert compared >= 50 and not differing, "\n".join(differing)


@pytest.mark.parametrize("layers", [32, 61, 46])
def test_layers_are_divided_as_by_vllm(layers, monkeypatch):
    shape = replace(model("llama-3.1-8b"), num_layers=layers)
    for number in range(1, 9):
        launch = replace(launched("llama-3.1-8b", (32,)), model=shape, layer_partition=None)
        launch = replace(launch, deployment=Deployment(pipeline_parallel=number))
        theirs = [range(*get_pp_indices(layers, rank, number)) for rank in range(number)]
        assert launch.stages == theirs


@pytest.mark.parametrize("partition", [(20, 12), (20, 13), (10, 10, 12)])
def test_a_partition_is_refused_where_vllm_does(partition):
    launch = replace(launched("llama-3.1-8b", (16, 16)), layer_partition=partition)
    with mock.patch.object(envs, "VLLM_PP_LAYER_PARTITION", ",".join(map(str, partition)), create=True):
        try:
            theirs = [range(*get_pp_indices(32, rank, 2)) for rank in range(2)]
        except ValueError:
            with pytest.raises(SettingError):
                assert launch.stages
        else:
            assert launch.stages == theirs
