"""Groups of gptq that ranks split: the choice of kernels, by vLLM's own code without Humming's kernels, which it has had since 0.23."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.platforms.interface import DeviceCapability, PlatformEnum
from vllm.scalar_type import scalar_types

from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.spec.startup.shards import broken_shard

_CARDS = {"rtx-2080-ti": 75, "a100-80gb": 80, "l40s": 89, "h100-80gb": 90, "b200": 100, "rtx-5090": 120}
_LAST_WITHOUT_HUMMING = 22


@pytest.mark.parametrize("card", [*_CARDS])
@pytest.mark.parametrize(("dtype", "act_type"), [("half", torch.float16), ("bfloat16", torch.bfloat16)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_layer_without_kernels_is_refused(card, dtype, act_type, ranks, monkeypatch):
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "HummingLinearKernel")
    capability = _CARDS[card]
    platform = SimpleNamespace(
        _enum=PlatformEnum.CUDA,
        is_cuda=lambda: True,
        is_cuda_alike=lambda: True,
        is_rocm=lambda: False,
        is_device_capability=lambda given: given == capability,
        get_device_capability=lambda: DeviceCapability(*divmod(capability, 10)),
    )
    for module in (linear, *(sys.modules[kind.__module__] for kind in linear._POSSIBLE_KERNELS[PlatformEnum.CUDA])):
        monkeypatch.setattr(module, "current_platform", platform, raising=False)
    monkeypatch.setattr(linear, "_resolve_backend_kernels", lambda kernels, *args, **more: kernels)
    for model, width, hidden in (("qwen2.5-14b", 13_824, 5120), ("qwen2.5-72b", 29_568, 8192)):
        line = f"vllm serve {model} -q gptq_marlin -tp {ranks} --dtype {dtype} --max-model-len 1024"
        launch = started(parse_serve(line, (0, _LAST_WITHOUT_HUMMING)), card).launch
        config = MPLinearLayerConfig(
            (width, hidden), (width // ranks, hidden), scalar_types.uint4b8, act_type, group_size=128, zero_points=False
        )
        message = broken_shard(launch)
        try:
            linear.choose_mp_linear_kernel(config)
        except ValueError as error:
            first = "Failed to find a kernel that can implement the WNA16 linear layer."
            assert str(error).startswith(first) and (message or "").startswith(first)
        else:
            assert message is None
