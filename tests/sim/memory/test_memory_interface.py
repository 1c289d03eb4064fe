"""The interface of ``sim.memory.interface``: every memory has all of it, and other folders look at nothing else by name."""

from __future__ import annotations

import ast
import inspect
from typing import Generic, Protocol

import numpy as np
import pytest

from fragmeter.sim import memory as memories
from fragmeter.sim.memory import (
    BatchMemory,
    BuddyArena,
    ContiguousMemory,
    DeferredMemory,
    Memory,
    PagedMemory,
    PageGroups,
    RadixMemory,
    ReservedMemory,
    SharingMemory,
    SlotRadixMemory,
    Transaction,
)
from fragmeter.sim.memory.interface.memory import Accounts, Allocation, Inspection, Placement
from fragmeter.sim.types.errors import SimulationFault
from fragmeter.sim.types.sequence import Sequence
from fragmeter.sim.types.state import State
from paths import ROOT

PROTOCOLS = (Allocation, Accounts, Inspection, Transaction, Placement)
KINDS = [
    kind for name in memories.__all__ if name.endswith("Memory") and (kind := getattr(memories, name)) is not Memory
]
WINDOW = PageGroups.of(full=1, sliding=1, window_tokens=4, most_prompt_blocks=3)
FRESH = {
    "paged": lambda: PagedMemory(8, 4, host_blocks=3),
    "paged with ids": lambda: PagedMemory(8, 4, ids=True),
    "chunked": lambda: PagedMemory(8, 4, whole_prompts=True),
    "deferred": lambda: DeferredMemory(8, 4, ids=True),
    "sharing": lambda: SharingMemory(8, 4, 0, ids=True, prefix_blocks=2),
    "windows": lambda: PagedMemory(8, 4, groups=WINDOW),
    "counted": lambda: ContiguousMemory(8, 4),
    "static": lambda: BatchMemory(8, 4),
    "buddy": lambda: ContiguousMemory(8, 4, BuddyArena(8)),
    "reserved": lambda: ReservedMemory(8, 4, ids=True),
    "radix": lambda: RadixMemory(32),
    "radix with ids": lambda: SlotRadixMemory(32),
}
fresh = pytest.mark.parametrize("make", FRESH.values(), ids=FRESH)


def members(protocol: type) -> set[str]:
    """What a protocol asks for: methods, properties and annotated attributes."""
    kinds = [kind for kind in protocol.__mro__ if kind not in (Protocol, Generic, object)]
    own = {name for kind in kinds for name in vars(kind) if not name.startswith("_")}
    return own.union(*(kind.__annotations__ for kind in kinds))


@fresh
def test_every_memory_has_the_whole_interface(make):
    memory = make()
    assert {name for name in members(Memory) if not hasattr(memory, name)} == set()
    assert {name for name in members(Transaction) if not hasattr(memory.transaction(0), name)} == set()
    assert memory.transaction(0).memory is memory


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_methods_take_what_the_interface_says(kind):
    for name in members(Memory):
        method = getattr(Memory, name, None)
        if inspect.isfunction(method):
            wanted, found = inspect.signature(method).parameters, inspect.signature(getattr(kind, name)).parameters
            assert len(found) == len(wanted), name
            assert [p.default for p in found.values()] == [p.default for p in wanted.values()], name


@fresh
def test_the_optional_parts_have_their_own_interface(make):
    memory = make()
    if memory.placement is not None:
        assert {name for name in members(Placement) if not hasattr(memory.placement, name)} == set()
    # What lies in blocks has no addresses, and the other way round.
    assert memory.tables is None or memory.placement is None
    if memory.tables is not None:
        assert all(hasattr(pool, "shuffle") for pool in (memory.tables.pool, memory.tables.host_pool))


def test_every_member_is_documented():
    for protocol in PROTOCOLS:
        # The first look at a protocol's members writes to the protocol.
        named = members(protocol)
        own = {name: each for name, each in vars(protocol).items() if name in named}
        for name in own.keys() - protocol.__annotations__.keys():
            assert own[name].__doc__, f"{protocol.__name__}.{name}"


def test_every_attribute_is_documented():
    for protocol in (Accounts, Inspection):
        for name in protocol.__annotations__:
            assert f" {name}: " in protocol.__doc__, f"{protocol.__name__}.{name}"


def test_what_each_kind_says_of_itself():
    said = {
        name: (m.reserves, m.leaves_together, m.placement is not None) for name, make in FRESH.items() if (m := make())
    }
    assert {name for name, (reserves, _, _) in said.items() if reserves} == {"counted", "static", "buddy", "reserved"}
    assert {name for name, (_, together, _) in said.items() if together} == {"static"}
    assert {name for name, (_, _, placed) in said.items() if placed} == {"counted", "static", "buddy"}
    assert {name for name, make in FRESH.items() if make().groups.sliding} == {"windows"}
    assert {name: make().host_blocks for name, make in FRESH.items() if make().host_blocks} == {"paged": 3}
    assert {name: make().pinned_slots for name, make in FRESH.items() if make().pinned_slots} == {"sharing": 8}


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda: ContiguousMemory(8, 4), lambda memory, sequence: memory.evict((sequence,), (), 0)),
        (lambda: ContiguousMemory(8, 4), lambda memory, sequence: memory.swap_in(sequence, 0)),
        (lambda: ContiguousMemory(8, 4), lambda memory, sequence: memory.prefill(sequence, 0)),
        (lambda: ContiguousMemory(8, 4), lambda memory, sequence: memory.stall(sequence, 0)),
        (lambda: RadixMemory(32), lambda memory, sequence: memory.swapped_blocks((sequence,))),
        (lambda: ContiguousMemory(8, 4), lambda memory, sequence: State().fork(sequence, 0)),
    ],
)
def test_a_plan_that_a_memory_cannot_carry_out_is_a_fault(make, call):
    with pytest.raises(SimulationFault):
        call(make(), Sequence(0, 4, 2, 2))


def test_a_piece_that_is_only_counted_has_no_place():
    memory, sequence = ContiguousMemory(8, 4), Sequence(0, 4, 2, 2)
    memory.transaction(0).reserve(6)
    memory.admit(sequence, 0)
    with pytest.raises(SimulationFault, match="only counted"):
        memory.placement.first_slot(sequence.grant)
    buddy = ContiguousMemory(8, 4, BuddyArena(8))
    buddy.transaction(0).reserve(6)
    buddy.admit(sequence, 0)
    assert buddy.placement.first_slot(sequence.grant) == 0


def test_reclaimable_blocks_are_named_where_there_are_ids():
    memory, sequence = DeferredMemory(8, 4, ids=True), Sequence(0, 4, 2, 2)
    memory.admit(sequence, 0)
    State().start(sequence, 0)
    assert memory.cached_block_ids().tolist() == []
    held = list(memory.tables.tables[sequence])
    memory.release((sequence,), 1)
    assert memory.cached_block_ids().tolist() == held and len(held) == memory.cached_blocks == 1
    assert DeferredMemory(8, 4, ids=False).cached_block_ids().dtype == np.int64


def asks_by_name(tree: ast.AST) -> bool:
    """Whether some code asks a memory, or its tables, for an attribute that may not be there, or for its class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "isinstance"):
            name = ast.unparse(node.args[0]).rpartition(".")[2].strip("_")
            if name in ("memory", "tables", "pool"):
                return True
    return False


@pytest.mark.parametrize(
    "folder", ["sim/memory", "sim/policy", "sim/cluster", "sim/recording", "sim/metrics", "sim/output"]
)
def test_no_module_looks_behind_the_interface(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        assert not asks_by_name(ast.parse(path.read_text())), path


def test_the_search_sees_an_attribute_asked_for_by_name():
    assert asks_by_name(ast.parse("kept = getattr(self.memory, 'kept', {})"))
    assert asks_by_name(ast.parse("isinstance(memory, PagedMemory)"))
    assert not asks_by_name(ast.parse("getattr(work, name), memory.kept"))
