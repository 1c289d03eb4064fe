"""What the installed vLLM says before it captures CUDA graphs, for lines of models with and without states.

Its own parser reads the flags, its own configuration makes the mode of the graphs of them, its own engine core forms the pool, and
its own ``resolve_cudagraph_mode_and_sizes`` decides, as the workers of a GPU ask it. Only the platform says that it has graphs.
"""

from __future__ import annotations

from functools import cache
from unittest import mock

from vllm.config import CompilationConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheConfig

from fragmeter.sim.real_vllm.core import BarePlatform, model_config
from fragmeter.sim.spec import CacheSettings, cache_layers
from fragmeter.sim.spec.startup.capacity import capacity
from fragmeter.sim.spec.startup.launch import Launch

from . import server
from .server import start
from .starts import Start
from .test_kv_formation import Case, setup_of, spec_of


def answer(asked: Start) -> str | None:
    """vLLM's refusal; None if it goes on to capture its graphs."""
    config, graphs = pool(asked.launch()), _graphs(asked.flags)
    try:
        graphs.resolve_cudagraph_mode_and_sizes(
            AttentionCGSupport.UNIFORM_BATCH,
            "a backend",
            use_v2_model_runner=True,
            kv_cache_config=config,
            max_num_reqs=asked.max_num_seqs,
        )
    except ValueError as error:
        return str(error)
    return None


@cache
def pool(launch: Launch) -> KVCacheConfig:
    """The pool that vLLM forms in the memory that is left for it."""
    model, deployment = launch.model, launch.deployment
    exports = model.mixer.export_tokens(launch.gpu.major, launch.release.since[1]) if model.mixer else 0
    settings = CacheSettings(
        max_model_len=launch.max_model_len,
        max_num_batched_tokens=launch.max_num_batched_tokens,
        block_size=launch.block_size,
        enable_prefix_caching=launch.enable_prefix_caching,
    )
    layers = cache_layers(model, deployment.kv_dtype, launch.tensor_parallel, export_tokens=exports)
    placed: list[KVCacheConfig] = []
    workers = mock.patch.object(server.Recorder, "initialize_from_config", lambda self, configs: placed.extend(configs))
    with workers, mock.patch.object(server, "spec_of", spec_of):
        start(setup_of(Case(layers, settings, capacity(launch).stage.kv_cache_bytes)))
    return placed[0]


def _graphs(flags: str) -> CompilationConfig:
    """The configuration of the graphs by flags of a line."""
    with (
        mock.patch.object(BarePlatform, "device_type", "cuda"),
        mock.patch.object(BarePlatform, "support_static_graph_mode", classmethod(lambda cls: True)),
    ):
        served = model_config(8192)
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        read = EngineArgs.from_cli_args(parser.parse_args(["--model", served.model, *flags.split()]))
        with mock.patch.object(served, "enforce_eager", read.enforce_eager):
            made = VllmConfig(
                model_config=served,
                compilation_config=read.compilation_config,
                optimization_level=read.optimization_level,
            )
    return made.compilation_config
