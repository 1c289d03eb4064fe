"""The workload on which vLLM measured its watermark (pull request 44594), at an eighth of its lengths and of its pool, served by
the real scheduler and by ours.

Nothing arrives by a clock there: a user sends the next request when the last one is answered. Our closed loop says when
requests are sent, and both schedulers then get them at these times.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from fragmeter.sim import Workload, simulate
from fragmeter.sim.workload.users import Users
from tools.live.step_log import first_difference

from . import ours, server
from .workloads import LENGTH, Case

_REQUESTS, _USERS = 450, 128


def _case() -> Case:
    draw = random.Random(0)
    lengths = np.array([(draw.randint(100, 150), draw.randint(500, 750)) for _ in range(_REQUESTS)]).T
    users = Users(_USERS, np.zeros(_REQUESTS, dtype=np.int64))
    work = Workload("watermark", np.zeros(_REQUESTS), *lengths, max_tokens=lengths[1], users=users)
    return Case("watermark/0", work, (LENGTH,) * _REQUESTS, 2340, 16, 1024, 256, 1024, prefix_caching=False)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("watermark", [0.0, 0.02, 0.05, 0.1, 0.15])
def test_the_watermark_holds_back_the_same_requests(watermark: float, asynchronous: bool, record_property):
    case = replace(_case(), options={"watermark": watermark})
    closed = simulate(ours.settings_of(case, asynchronous), case.workload, ours.ConstantCost(case.step_ticks)).workload
    case = replace(case, workload=replace(closed, users=None))
    real = server.serve(case, asynchronous)
    assert first_difference(real, ours.serve(case, asynchronous)) is None
    preempted = sum(len(step.preempted) for step in real.steps)
    record_property(f"compared/watermark {watermark:g} {'async' if asynchronous else 'sync'}", [1, len(real.steps), 0])
    assert preempted > 100, "the workload is to preempt under every watermark"
