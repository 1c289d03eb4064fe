"""Division of experts among GPUs, beside the installed vLLM's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fragmeter.sim.spec import Deployment

config = pytest.importorskip("vllm.model_executor.layers.fused_moe.config", reason="no vLLM")
layer = pytest.importorskip("vllm.model_executor.layers.fused_moe.expert_map_manager", reason="no vLLM")

EXPERTS = 250


@pytest.mark.parametrize("whole", [False, True], ids=["slices", "whole"])
@pytest.mark.parametrize("engines", [1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_division_is_that_of_vllm(monkeypatch, engines, ranks, whole):
    group = SimpleNamespace(rank_in_group=0)
    for name in ("get_dp_group", "get_pcp_group", "get_tensor_model_parallel_rank"):
        answer = 0 if name.endswith("rank") else group
        monkeypatch.setattr(config, name, lambda answer=answer: answer)
    parallel = SimpleNamespace(
        enable_expert_parallel=whole, all2all_backend="allgather_reducescatter", enable_eplb=False
    )
    theirs = config.FusedMoEParallelConfig.make(ranks, 1, engines, 1, parallel)
    ours = Deployment(data_parallel=engines, expert_parallel=whole).expert_ranks(ranks)
    if engines * ranks == 1:
        # vLLM ignores the flag; so do lines that are pasted.
        ours = Deployment().expert_ranks()
    assert (ours.holders, ours.slices, ours.engines) == (theirs.ep_size, theirs.tp_size, theirs.dp_size)
    held = layer.determine_expert_map(theirs.ep_size, 0, EXPERTS)[0]
    assert held == -(-EXPERTS // ours.holders)
