"""Our engine with policy ``llama-cpp`` over a case, written down step by step through the public observer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fragmeter.sim import settings, simulate
from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.memory.accounting.ledger import Leap
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.types.sequence import Sequence, StepPlan

from .served import Answer, Served
from .workloads import PADDING, STEP_TICKS, Case


@dataclass(frozen=True)
class ConstantCost:
    """Every step takes as long."""

    ticks: int = STEP_TICKS
    name: str = "constant"

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        return self.ticks

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        return self.ticks, 0, None

    def swap_out_ticks(self, blocks: int) -> int:
        return 0

    def swap_in_ticks(self, blocks: int) -> int:
        return 0

    def copy_ticks(self, slots: int) -> int:
        return 0

    def describe(self) -> dict[str, object]:
        return {}


class _StepLog(Observer):
    every_step = True

    def __init__(self) -> None:
        self.steps: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        self.slots: dict[int, int] = {}

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        self.engine = engine
        self.refused = refused

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        state, slots = self.engine.state, self.engine.memory.slots
        prompts = {each: each.start_tokens - each.computed_tokens for each in plan.admitted} | dict(plan.chunks)
        decodes = [each for each in state.running if each not in prompts]

        def slot_of(each: Sequence) -> int:
            return slots[each]

        batch = [(slots[each], 1) for each in sorted(decodes, key=slot_of)]
        batch += [(slots[each], prompts[each]) for each in sorted(prompts, key=slot_of)]
        self.slots |= {each.index: slots[each] for each in prompts}
        self.steps.append((now, tuple(batch)))


def serve(case: Case) -> Served:
    """What our engine does with a case; see ``server.serve``."""
    log = _StepLog()
    size = 1 if case.unified else PADDING
    chosen = settings(
        policy="llama-cpp",
        max_num_seqs=case.slots,
        num_gpu_blocks_override=case.cells // size,
        block_size=size,
        max_num_batched_tokens=case.max_num_batched_tokens,
        kv_unified=case.unified,
        enable_prefix_caching=case.caching,
        leap=False,
    )
    workload = case.workload
    try:
        run = simulate(chosen, workload, ConstantCost(), observers=[log])
    except SettingError as error:
        if error.field != "kv_unified":
            raise
        return Served(log.steps, [], log.engine.memory.evicted_blocks, True)
    found = np.zeros(len(workload), dtype=np.int64)
    if run.replica.memory.cache_log:
        look_ups = run.replica.memory.cache_log.look_up_columns()
        found[look_ups["index"]] = look_ups["hit_tokens"]
    answers = []
    for index, refused in enumerate(log.refused.tolist()):
        prompt, output = int(workload.prompt_tokens[index]), int(workload.output_tokens[index])
        hit = int(found[index])
        answers.append(
            Answer(error="refused")
            if refused
            else Answer(log.slots[index], hit, prompt - hit, output, prompt + output - 1)
        )
    return Served(log.steps, answers, log.engine.memory.evicted_blocks, False)
