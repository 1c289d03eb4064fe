"""An observer that records all of a small run: every table, slot and queue in each step.

A *step* is the state while it computes: its plan is carried out, its blocks are taken, and its tokens are in their
slots. Within a step memory changes in this order, which the fields of ``Step`` follow:

    preempted, swapped_out   victims lose their blocks; a swap out copies them to the host
    swapped_in               sequences return to new blocks
    replaced                 a dead beam drops its table and names the blocks of a survivor
    forked, admitted         siblings name the blocks of their leader; prompts get blocks
    copies                   a block that several tables name is copied before it is written
    computed                 new tokens are written

The last step computes nothing: it has the pool after the run. A run of so many steps is recorded whole, slot by slot, so
the cost is steps * slots; ``blocks`` and ``plans`` record large runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...config.settings import Settings
from ...cost.base import StepCost
from ...engine.observer import Observed, Observer
from ...engine.run import simulate
from ...memory import BUCKETS, Memory
from ...memory.accounting.ledger import Leap
from ...runs.run import Run
from ...types.errors import SettingError
from ...types.sequence import CARRY_ON, Group, Lineage, Replaced, Sequence, StepPlan
from ...workload.workload import Workload
from ..blocks.occupancy import BOUNDED, CODES, Holder, holders, limits_of
from ..plans.layouts import Layout, layout_of
from ..plans.recording import decoding, prefilling


class Computed(NamedTuple):
    """Tokens of a sequence that a step computes, by position.

    Attributes:
        sequence: Its row of ``Workload.sequences``, as everywhere in a ``Step``.
        first, stop: From the position ``first`` to before ``stop``.
        decodes: Whether it is a decode; else it is a prompt, a part of one, or what a preemption lost.
    """

    sequence: int
    first: int
    stop: int
    decodes: bool


class Held(NamedTuple):
    """What a sequence holds on the device.

    Attributes:
        sequence: See ``Computed``.
        tokens: Tokens in its slots at the end of the step.
        has_ended: Whether it has its last token and waits for its batch to end.
        table: Physical block of each logical block; empty in contiguous memory.
        slots: Slot of each position, up to the end of what it holds.
    """

    sequence: int
    tokens: int
    has_ended: bool
    table: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step; see the module.

    Attributes:
        start_ticks, ticks: Start and duration.
        waiting, swapped: Sequences in the queues after the decision, in order.
        preempted, swapped_out, swapped_in, forked, admitted: Sequences of the plan. Those ``admitted`` end their prefill.
        replaced: (beam that dies, survivor that it continues as a copy of).
        swap_outs, swap_ins: (device block, host block); (host block, device block).
        copies: (source, target, slots): blocks, or first slots in contiguous memory.
        computed: Tokens that it computes, decodes first.
        held: What sequences hold, in order of their rows.
        host: Host blocks of each sequence that is swapped out.
        references: Tables (and pins) that name each block; empty in contiguous memory.
        buckets: Bucket of the ledger of each slot.
    """

    start_ticks: int
    ticks: int
    waiting: tuple[int, ...] = ()
    swapped: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    swapped_out: tuple[int, ...] = ()
    swapped_in: tuple[int, ...] = ()
    forked: tuple[int, ...] = ()
    admitted: tuple[int, ...] = ()
    replaced: tuple[tuple[int, int], ...] = ()
    swap_outs: tuple[tuple[int, int], ...] = ()
    swap_ins: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int, int], ...] = ()
    computed: tuple[Computed, ...] = ()
    held: tuple[Held, ...] = ()
    host: Mapping[int, tuple[int, ...]]
    references: tuple[int, ...] = ()
    buckets: tuple[str, ...]


def record(settings: Settings, workload: Workload, step_cost: StepCost | None = None) -> tuple[Run, list[Step]]:
    """Serve a workload as ``simulate`` does, step by step, and record all of it.

    The run is that of ``simulate``, bit by bit, with a row for each step.

    Args:
        step_cost: See ``simulate``.

    Raises:
        SettingError: The memory of the policy has no single table of blocks a sequence.
        UserError, SimulationFault: As ``simulate``.
    """
    recording = StepRecording()
    run = simulate(replace(settings, ids=True, leap=False), workload, step_cost, observers=(recording,))
    end_ticks = run.log.end_ticks
    # Tokens that asynchronous scheduling computes in vain after the last finish are no part of the run.
    steps = [step for step in recording.steps if step.start_ticks < end_ticks]
    return replace(run, settings=settings), [*steps, recording.last(end_ticks)]


class StepRecording(Observer):
    """Records every step of a run, which must have block ids.

    Attributes:
        steps: Those that have started.
    """

    every_step = True

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._replaced: list[tuple[int, int]] = []

    def run_started(self, engine: Observed, refused: np.ndarray) -> None:
        """See ``Observer``: the memory notes from now on what it moves."""
        if engine.memory.groups.sliding:
            remedy = "a step has one block table a sequence, and KV groups have several"
            raise SettingError("policy", engine.policy.name, f"{remedy}; give disable_hybrid_kv_cache_manager")
        self._memory, self._state = engine.memory, engine.state
        self._layout = layout_of(engine.memory, engine.policy.name)
        self._layout.open()
        if engine.memory.pinned_slots:
            self._pinned = self._layout.pinned_slots()[:: engine.memory.block_size] // engine.memory.block_size
        else:
            self._pinned = np.zeros(0, dtype=np.int64)

    def plan_decided(self, now: int, plan: StepPlan) -> None:
        """See ``Observer``: the beams of an admitted group are watched from now on."""
        for sequence in plan.admitted:
            group = sequence.group
            if group is not None and group.ancestry is not None and not isinstance(group.ancestry, _WatchedAncestry):
                group.ancestry = _WatchedAncestry(group.ancestry, group, self._replaced)

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        """See ``Observer``: record the step as it will be when its tokens are computed."""
        decodes = [*decoding(self._state, plan)]
        rows = [
            Computed(row.sequence.index, row.held_tokens, row.context_tokens, place < len(decodes))
            for place, row in enumerate([*decodes, *prefilling(plan)])
        ]
        self.steps.append(self._look(now, ticks, plan, tuple(rows), int(bool(leap[1]))))
        self._layout.moves.clear()
        self._replaced.clear()

    def last(self, now: int) -> Step:
        """The pool after the run."""
        return self._look(now, 0, CARRY_ON, (), 0)

    def _look(self, now: int, ticks: int, plan: StepPlan, computed: tuple[Computed, ...], steps: int) -> Step:
        memory, state, layout = self._memory, self._state, self._layout
        layout.settle(state, steps)
        found = holders(memory, state, state.decode_step + steps)
        held = tuple(self._held(holder) for holder in found)
        moves = layout.moves
        return Step(
            start_ticks=now,
            ticks=ticks,
            waiting=_names(state.waiting),
            swapped=_names(state.swapped),
            preempted=_names(plan.preempted),
            swapped_out=_names(plan.swapped_out),
            swapped_in=_names(plan.swapped_in),
            forked=_names(plan.forked),
            admitted=_names(plan.admitted),
            replaced=tuple(self._replaced),
            swap_outs=tuple(moves.swap_outs),
            swap_ins=tuple(moves.swap_ins),
            copies=tuple(moves.copies),
            computed=computed,
            held=held,
            host=self._host_tables(),
            references=self._references(held),
            buckets=_buckets(memory, layout, found, held, self._pinned),
        )

    def _held(self, holder: Holder) -> Held:
        sequence, layout, size = holder.sequence, self._layout, self._memory.block_size
        # The last token of an output is never stored.
        tokens = min(holder.computed, sequence.target_tokens - 1)
        table = tuple(map(int, layout.table(sequence)))
        end = sequence.grant.slots if self._memory.placement is not None else len(table) * size
        slots = tuple(layout.slots(sequence, 0, end).tolist())
        return Held(sequence.index, tokens, holder.ended, table, slots)

    def _host_tables(self) -> dict[int, tuple[int, ...]]:
        tables = self._memory.tables
        return {} if tables is None else {each.index: tuple(table) for each, table in tables.host_tables.items()}

    def _references(self, held: Iterable[Held]) -> tuple[int, ...]:
        if self._memory.placement is not None:
            return ()
        named = [*self._pinned.tolist(), *(block for each in held for block in each.table)]
        return tuple(np.bincount(named, minlength=self._memory.num_blocks).tolist())


class _WatchedAncestry:
    """Notes the beams that die, which only the draws say."""

    def __init__(self, ancestry: Lineage, group: Group, replaced: list[tuple[int, int]]) -> None:
        self._ancestry, self._group, self._replaced = ancestry, group, replaced

    def replaced(self, beams: int) -> Replaced:
        """See ``Lineage``."""
        replaced, members = self._ancestry.replaced(beams), self._group.members
        self._replaced += [(members[dead].index, members[parent].index) for dead, parent in replaced]
        return replaced


def _names(sequences: Iterable[Sequence]) -> tuple[int, ...]:
    return tuple(sequence.index for sequence in sequences)


def _buckets(
    memory: Memory, layout: Layout, found: list[Holder], held: tuple[Held, ...], pinned: np.ndarray
) -> tuple[str, ...]:
    """The bucket of each slot: of several holders the earliest; see ``blocks.occupancy``."""
    size, free = memory.block_size, CODES["free"]
    codes = np.full(layout.num_slots, free)
    if memory.placement is None:
        cached = memory.cached_block_ids()
        codes[(cached[:, None] * size + np.arange(size)).ravel()] = CODES["cached"]
    else:
        for grant in memory.placement.kept_pieces():
            first = memory.placement.first_slot(grant)
            codes[first : first + grant.slots] = CODES["cached"]
        for first, blocks in memory.placement.stranded_pieces():
            codes[first * size : (first + blocks) * size] = CODES["stranded"]
    taken = np.full(layout.num_slots, len(BUCKETS))
    for limits, each in zip(limits_of(memory, found), held, strict=True):
        place = np.searchsorted(np.maximum.accumulate(limits), np.arange(len(each.slots)), side="right")
        slots = np.array(each.slots, dtype=np.int64)
        np.minimum.at(
            taken, slots, np.array([*BOUNDED, CODES["block_tail" if memory.placement is None else "round_up"]])[place]
        )
    taken[(pinned[:, None] * size + np.arange(size)).ravel()] = CODES["live"]
    codes = np.where(taken < len(BUCKETS), taken, codes)
    return tuple(BUCKETS[code] for code in codes.tolist())
