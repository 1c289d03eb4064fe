"""The graphs that the installed vLLM captures for drawn settings: its own configuration, resolution, dispatcher and graph manager."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm.config import CompilationConfig, CUDAGraphMode, SchedulerConfig, VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from fragmeter.sim.real_vllm.core import BarePlatform, model_config
from fragmeter.sim.spec.startup.cuda_graphs import Support

from .captures import Drawn

_SUPPORT = {
    Support.SINGLE_TOKENS: AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    Support.DECODES: AttentionCGSupport.UNIFORM_BATCH,
    Support.ALL: AttentionCGSupport.ALWAYS,
}


def theirs(case: Drawn) -> list[Any]:
    """Mode and sizes as ``captures.ours`` has them; an empty list where vLLM refuses them."""
    batch = case.batch
    try:
        config = _config(case)
        mode = config.compilation_config.resolve_cudagraph_mode_and_sizes(
            _SUPPORT[batch.support],
            "a backend",
            uniform_decode_query_len=batch.query_tokens,
            use_v2_model_runner=batch.second_runner,
        )
    except (ValueError, AssertionError):
        return []
    found = _second(config, mode, case) if batch.second_runner else _first(config, mode, case)
    return [
        mode.name,
        *(
            sorted({each.num_tokens for each in found.get(kind, ())})
            for kind in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
        ),
    ]


def _config(case: Drawn) -> VllmConfig:
    settings, batch = case
    given: dict[str, Any] = {}
    if settings.mode is not None:
        given["cudagraph_mode"] = settings.mode.lower()
    if settings.compiled is not None:
        given["mode"] = 3 if settings.compiled else 0
    if settings.sizes is not None:
        given["cudagraph_capture_sizes"] = list(settings.sizes)
    if settings.largest is not None:
        given["max_cudagraph_capture_size"] = settings.largest
    served = model_config(8192)
    with (
        mock.patch.object(BarePlatform, "device_type", "cuda"),
        mock.patch.object(BarePlatform, "support_static_graph_mode", classmethod(lambda cls: True)),
        mock.patch.object(
            BarePlatform, "is_device_capability_family", classmethod(lambda cls, *_, **__: batch.data_center_blackwell)
        ),
        mock.patch.object(VllmConfig, "num_speculative_tokens", batch.query_tokens - 1),
        mock.patch.object(served, "enforce_eager", settings.enforce_eager),
    ):
        return VllmConfig(
            model_config=served,
            scheduler_config=SchedulerConfig(
                max_model_len=8192,
                is_encoder_decoder=False,
                max_num_seqs=batch.max_num_seqs,
                max_num_batched_tokens=batch.max_num_batched_tokens,
            ),
            compilation_config=CompilationConfig(**given),
            performance_mode="interactivity" if settings.interactive else "balanced",
            **({} if settings.level is None else {"optimization_level": settings.level}),
        )


def _first(config: VllmConfig, mode: CUDAGraphMode, case: Drawn) -> dict[CUDAGraphMode, Any]:
    with mock.patch.object(VllmConfig, "num_speculative_tokens", case.batch.query_tokens - 1):
        dispatcher = CudagraphDispatcher(config)
        dispatcher.initialize_cudagraph_keys(mode, case.batch.query_tokens)
    return dict(dispatcher.get_capture_descs())


def _second(config: VllmConfig, mode: CUDAGraphMode, case: Drawn) -> dict[CUDAGraphMode, Any]:
    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    with (
        mock.patch("vllm.v1.worker.gpu.cudagraph_utils.get_pp_group", lambda: rank),
        mock.patch(
            "vllm.v1.worker.gpu.cudagraph_utils.current_platform", SimpleNamespace(get_global_graph_pool=lambda: None)
        ),
    ):
        return CudaGraphManager(config, None, mode, case.batch.query_tokens)._capture_descs
