"""Steps of a recorded run by the times of another calibration."""

from __future__ import annotations

import json

import numpy as np
import pytest

from calibrations import document
from fragmeter.experiments.measured.repriced import priced
from fragmeter.sim import Settings, Workload
from fragmeter.sim.cost import CalibratedCost, Calibration
from fragmeter.sim.spec import gpu, model
from fragmeter.sim.workload.content import PromptContent

SETTINGS = {
    "vllm-v1": {"policy": "vllm-v1", "options": (("async_scheduling", False),)},
    "vllm-sosp23": {"policy": "vllm-sosp23"},
}


def cost_of(share: float) -> CalibratedCost:
    text = json.dumps(document() | {"repeated_reads": share}).encode()
    return CalibratedCost(Calibration(text, "made-up.json"), model("llama-3.1-8b"), gpu("a100-80gb"))


def work_of(policy: str) -> Workload:
    """A burst, the steps of which do not depend on their times: eight requests with a prefix, or two with four samples."""
    if policy == "vllm-v1":
        content = PromptContent(np.arange(9), np.zeros(8, int), np.full(8, 300))
        outputs = np.arange(5, 13)
        return Workload("burst", np.zeros(8, int), np.arange(310, 318), outputs, content=content)
    return Workload("burst", np.zeros(2, int), np.array([310, 170]), np.array([9, 20]), n=np.array([4, 4]))


@pytest.mark.parametrize("policy", SETTINGS)
@pytest.mark.parametrize("recorded, later", [(1.0, 0.3), (0.3, 1.0), (0.3, 0.3), (0.8, 0.1)])
def test_repeated_reads_are_those_of_the_later_calibration(policy, recorded, later):
    chosen = Settings(model="llama-3.1-8b", block_size=16, num_gpu_blocks_override=2000, **SETTINGS[policy])
    found, wanted = (priced(chosen, work_of(policy), False, cost_of(share)) for share in (recorded, later))
    assert found.ticks(cost_of(later)).tolist() == wanted.ticks(cost_of(later)).tolist()
    assert np.diff(wanted.plan.start_ticks).tolist() == wanted.ticks(cost_of(later)).tolist()[:-1]
    assert (found.ticks(cost_of(0.3)) < found.ticks(cost_of(1.0))).any()
