"""Workloads over pipeline stages; knows nothing of vLLM."""

from __future__ import annotations

import random
from dataclasses import replace

from fragmeter.sim.engine.replica import build
from fragmeter.sim.memory.accounting.kv_groups import SLIDING, most_prompt_blocks

from . import ours
from .workloads import Case


def staged(case: Case, stages: int, asynchronous: bool) -> Case:
    """The case over so many stages, each with its layers; windows keep what the batches in flight compute, so the pool is the least
    with which vLLM starts, or a little larger."""
    case = replace(case, parallel={"pipeline_parallel_size": stages})
    layout, longest = build(ours.settings_of(case, asynchronous)).layout, case.max_model_len
    if layout is None:
        return case
    if layout.config is not None:
        in_flight = replace(layout.config.settings, max_concurrent_batches=stages + asynchronous)
        least = replace(layout.config, settings=in_flight).sequence_blocks(longest)
    else:
        in_flight = (stages + asynchronous) * case.max_num_batched_tokens
        of_window = most_prompt_blocks(layout.window_tokens, in_flight, longest, case.block_size)
        windows = sum(group.span.kind == SLIDING for group in layout.groups)
        least = windows * of_window + (len(layout.groups) - windows) * -(-longest // case.block_size)
    return replace(case, num_blocks=least + 1 + random.Random(case.name).choice([0, 0, 1, 5, 20, 100]))
