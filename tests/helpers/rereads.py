"""Slots that decodes read again: a cost for which they take less time, and a recount from the block tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fragmeter.sim.engine.engine import Engine
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.memory import DialogueMemory, SharingMemory
from fragmeter.sim.memory.accounting.kv_groups import FULL
from fragmeter.sim.types.sequence import Sequence
from ramp_cost import RampCost
from strategies import KneeCost


class Rereads:
    """A repeated read takes three tenths of the time of a first one."""

    def effective_context(self, context: int, repeated: int) -> int:
        return context - 7 * repeated // 10

    def copy_ticks(self, slots: int) -> int:
        return slots


@dataclass(frozen=True)
class RampRereads(Rereads, RampCost):
    """``RampCost`` with such reads."""


@dataclass(frozen=True)
class KneeRereads(Rereads, KneeCost):
    """``KneeCost`` with such reads."""


class Recount(Observer):
    """Counts the repeated slots of every priced step from the block tables, and compares.

    Attributes:
        found: The count of every call.
    """

    def __init__(self) -> None:
        self.found: list[int] = []

    def run_started(self, engine: Engine, refused: np.ndarray) -> None:
        memory, counted = engine.memory, engine.memory.repeated_slots

        def repeated_slots(admitted: Iterable[Sequence] = ()) -> int:
            found, expected = counted(admitted), recounted(engine, admitted)
            assert found == expected, (
                f"step {engine.state.decode_step}: {found} repeated slots, the tables have {expected}"
            )
            self.found.append(found)
            return found

        memory.repeated_slots = repeated_slots


def recounted(engine: Engine, admitted: Iterable[Sequence]) -> int:
    """Entries beyond the first of each block in the tables of sequences that decode in the coming step, in slots."""
    memory, state = engine.memory, engine.state
    tables = memory.tables
    if isinstance(memory, SharingMemory | DialogueMemory) and tables is not None:
        # With the copies of that step.
        tables.grow_until(state.decode_step + 1)
    named: Counter = Counter()
    for sequence in state.running:
        if sequence in admitted:
            continue
        if tables is not None:
            named.update(tables.tables[sequence])
        elif FULL in memory.groups.kinds:
            table = memory.group_tables.tables[sequence][memory.groups.kinds.index(FULL)]
            named.update(block for block in table if block is not None)
    return (named.total() - len(named)) * memory.block_size
