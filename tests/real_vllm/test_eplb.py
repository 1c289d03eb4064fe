"""Maps, load and buffer of balanced experts beside those that the installed vLLM allocates (``EplbState.add_model``)."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from vllm.distributed.eplb import eplb_state

from fragmeter.experiments.vllm_serve.line import parse_serve
from fragmeter.experiments.vllm_serve.start import started
from fragmeter.sim.spec.startup.eplb import kept_bytes


def real(layers: int, experts: int, redundant: int, ranks: int, window: int, weight: torch.Tensor) -> dict[str, int]:
    """Bytes of each tensor that vLLM keeps; ``weight`` has the experts of a rank."""
    copies = experts + redundant
    model = SimpleNamespace(
        num_moe_layers=layers,
        num_logical_experts=experts,
        num_routed_experts=experts,
        num_redundant_experts=redundant,
        num_physical_experts=copies,
        num_local_physical_experts=copies // ranks,
        num_expert_groups=1,
        expert_weights=[[weight]] * layers,
        set_eplb_state=lambda *state: None,
    )
    config = SimpleNamespace(
        window_size=window, step_interval=3000, policy="default", communicator="torch_gloo", use_async=True
    )
    state = object.__new__(eplb_state.EplbState)
    state.parallel_config = SimpleNamespace(
        eplb_config=config, num_ubatches=1, enable_elastic_ep=False, elastic_ep_max_dp_size=0
    )
    state.device, state.device_index, state.model_states, state.is_async = torch.device("cpu"), 0, {}, True
    state._propagate_shared_tensors = lambda *tensors: None
    with (
        mock.patch.object(eplb_state, "create_eplb_communicator"),
        mock.patch.object(eplb_state, "get_eplb_group"),
        mock.patch.object(eplb_state, "get_ep_group"),
    ):
        state.add_model(model, SimpleNamespace(model="m", compute_hash=lambda: "m"))
    found = {}
    for name, value in vars(state.model_states["m"]).items():
        tensors = value if isinstance(value, list) else [value]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)}
        found[name] = sum(storage.nbytes() for storage in storages.values())
    return found


@pytest.mark.parametrize(("redundant", "window"), [(0, 1000), (32, 1000), (16, 7)])
def test_maps_and_load_have_the_bytes_of_vllm(redundant, window):
    config = f'{{"num_redundant_experts": {redundant}, "window_size": {window}}}'
    line = f"vllm serve qwen3-30b-a3b -tp 8 --enable-expert-parallel --enable-eplb --eplb-config '{config}'"
    launch = started(parse_serve(line), "h100-80gb").launch
    held = (128 + redundant) // 8
    theirs = real(48, 128, redundant, 8, window, torch.empty(held, 3 * 2048 * 768, dtype=torch.bfloat16, device="cpu"))
    names = "physical_to_logical_map logical_to_physical_map logical_replica_count expert_load_pass expert_load_window expert_buffer"
    assert kept_bytes(launch, launch.model, range(48)) == sum(theirs[name] for name in names.split())
