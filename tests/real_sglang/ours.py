"""Our engine with policy ``sglang`` over a case, written down step by step through the public observer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from fragmeter.sim import Settings, settings, simulate
from fragmeter.sim.engine.observer import Observed, Observer
from fragmeter.sim.memory import SlotRadixMemory
from fragmeter.sim.memory.accounting.ledger import LEAP, Leap, Meter
from fragmeter.sim.memory.prefix.tiers import Offloaded
from fragmeter.sim.policy.server import WindowPool
from fragmeter.sim.policy.sglang import SGLang
from fragmeter.sim.policy.sglang_options import SGLangOptions
from fragmeter.sim.spec.startup.sglang_states import StatePool
from fragmeter.sim.spec.startup.sglang_unified import SharedBuffer
from fragmeter.sim.types.errors import Overdrawn, SettingError
from fragmeter.sim.types.sequence import Sequence, StepPlan
from fragmeter.sim.types.state import State
from real_vllm.ours import ConstantCost

from .steps import Served, Step
from .workloads import LAYERS, SLOT_BYTES, Case

_STEPS = LEAP.index("steps")


class TickLink(NamedTuple):
    """Between device and host: a tick a byte."""

    def ticks(self, size_bytes: int, writes: bool) -> int:
        return size_bytes


def linked_at(case: Case) -> AbstractContextManager[Any]:
    """The host pool of our options over a link with the case's ticks."""
    offloaded = SGLangOptions.offloaded

    def linked(options: SGLangOptions, *args: Any) -> Offloaded | None:
        host = offloaded(options, *args)
        if host is None:
            return None
        assert host.layers == LAYERS
        return replace(host, link=TickLink(), chunk_bytes=case.page_ticks, component_bytes=case.component_ticks)

    return mock.patch.object(SGLangOptions, "offloaded", linked)


class StepLog(Observer):
    """Writes every step of a run down."""

    every_step = True

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.finished: list[tuple[int, int]] = []
        self._known: set[Sequence] = set()
        self._done: set[int] = set()
        self._end = 0
        # Free and evictable slots of the coming step, before the results of the one before it are processed; and sequences that have
        # finished without the decision's knowing it.
        self._levels: dict[str, int] | None = None
        self._vain: tuple[Sequence, ...] = ()
        # Decodes of a step that has not taken its slots.
        self.unbegun: int | None = None

    def run_started(self, engine: Observed, refused: np.ndarray) -> None:
        if refused.any():
            raise ValueError(f"the pool cannot hold request {int(refused.argmax())}")
        self._engine, memory = engine, engine.memory
        process = memory.process_results

        def note_and_process(moment: int | None = None) -> None:
            if self._levels is None:
                self._levels = self._slots()
            process(moment)

        memory.process_results = note_and_process
        if isinstance(memory, SlotRadixMemory):
            return
        begin = memory._begin_row

        def begin_and_note(state: State, steps: int) -> Meter:
            self._levels = None
            row = begin(state, steps)
            self.unbegun = None
            self.steps[-1] = self.steps[-1]._replace(**(self._levels or self._slots()))
            return row

        # Without ids ``settle`` does nothing.
        memory._begin_row = begin_and_note

    def _slots(self) -> dict[str, int]:
        memory = self._engine.memory
        pages = {"free": memory.available, "evictable": memory.tree.evictable_tokens}
        if memory.windows is not None:
            pages |= {"beside_free": memory.window_free, "beside_evictable": memory.tree.component_evictable}
        if memory.transfers is not None:
            pages["host_free"] = memory.tree.host_free
            if memory.windows is not None:
                pages["beside_host_free"] = memory.tree.components_free
        found = {name: number * memory.block_size for name, number in pages.items()}
        if memory.states is not None:
            found |= {"beside_free": memory.state_free, "beside_evictable": memory.tree.component_evictable}
            if memory.transfers is not None:
                found["beside_host_free"] = memory.tree.components_free
        return found

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        self._vain = ()

    def requests_finished(self, now: int, finished: Iterable[Sequence], overrunning: Iterable[Sequence]) -> None:
        self._vain = tuple(overrunning)

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        state, memory = self._engine.state, self._engine.memory
        prefills, holding = plan.prefill_only, [*memory.holdings]
        self._levels = None
        self.unbegun = 0 if prefills else min(1, leap[_STEPS])
        memory.settle(state, self.unbegun)
        levels = self._levels or self._slots()
        self._note_finished()
        computed = [(each, 1) for each in holding if each in state.running or each in self._vain]
        if prefills:
            new = {each: each.start_tokens - each.computed_tokens for each in plan.admitted}
            computed = sorted([*new.items(), *plan.chunks], key=lambda pair: pair[0].index)
        self._known, self._end, self._vain = {each for each, _ in computed}, now + ticks, ()
        self.steps.append(
            Step(
                now,
                prefills,
                tuple((each.index, tokens) for each, tokens in computed),
                tuple(sorted(each.index for each in plan.preempted)),
                **levels,
            )
        )

    def idle_started(self, now: int, ticks: int) -> None:
        self._note_finished()

    def _note_finished(self) -> None:
        """Those of the last step that neither run nor wait now are done."""
        state = self._engine.state
        done = self._known.difference(state.running, state.prefilling, state.waiting)
        # A token that is computed in vain finishes no more.
        self.finished += [(self._end, each.index) for each in done if each.index not in self._done]
        self._done |= {each.index for each in done}
        self._known = set()

    def served(self) -> Served:
        """Everything up to now."""
        self._note_finished()
        memory = self._engine.memory
        if not isinstance(memory, SlotRadixMemory) and self.unbegun is not None:
            # The last step computes in vain, and is no part of our run.
            memory._begin_row(self._engine.state, self.unbegun)
        return Served(self.steps, sorted(self.finished))


def settings_of(case: Case, **others: object) -> Settings:
    """The settings that serve a case."""
    chosen = dict(
        policy="sglang",
        num_gpu_blocks_override=case.num_slots // case.page_size,
        block_size=case.page_size,
        max_num_seqs=case.max_num_seqs,
        max_num_batched_tokens=case.max_num_batched_tokens,
        enable_prefix_caching=case.prefix_caching,
        schedule_policy=case.schedule_policy,
        disable_overlap_schedule=not case.overlaps,
        outside_ms=0,
    )
    if case.enable_priority_scheduling:
        names = ["schedule_low_priority_values_first", "disable_priority_preemption", "retraction_policy"]
        if not case.disable_priority_preemption:
            names.append("priority_scheduling_preemption_threshold")
        chosen |= {name: getattr(case, name) for name in ("enable_priority_scheduling", *names)}
    if case.hicache_ratio:
        chosen["enable_hierarchical_cache"] = True
        chosen |= {name: getattr(case, name) for name in ("hicache_ratio", "hicache_write_policy")}
    return settings(**chosen | others)


@contextmanager
def pools_of(case: Case) -> Iterator[None]:
    """With the case's pools of windows and of states, whatever the model."""
    windows = WindowPool(case.window, case.window_slots // case.page_size, (1, 1)) if case.window else None
    if windows is not None and case.unified:
        windows = windows._replace(slot_bytes=(SLOT_BYTES, case.window_bytes), buffer=case.window_buffer)
    states = StatePool(case.states, case.state_rules, (1, 1)) if case.states else None
    if states is not None and case.unified:
        total = case.num_slots * SLOT_BYTES + case.states * case.state_bytes
        buffer = SharedBuffer.of(total, SLOT_BYTES, case.state_bytes, case.page_size, case.num_slots)
        states = states._replace(slot_bytes=(SLOT_BYTES, case.state_bytes), buffer=buffer)
    with mock.patch.multiple(SGLang, window_pool=lambda *args: windows, state_pool=lambda *args: states):
        yield


def serve(case: Case) -> Served:
    """What our engine does with a case; see ``server.serve``."""
    log = StepLog()
    try:
        with pools_of(case), linked_at(case):
            chosen = settings_of(case, ids=not (case.hicache_ratio or case.unified))
            simulate(chosen, case.workload, ConstantCost(case.step_ticks), observers=[log])
    except Overdrawn:
        if not case.unified:
            raise
        # The last step finds too few, or the next decision does.
        return Served(log.steps[: len(log.steps) - (log.unbegun is not None)], [], is_out_of_memory=True)
    except SettingError as error:
        if "wait for ever" not in str(error):
            raise
        return log.served()._replace(is_stuck=True)
    return log.served()
