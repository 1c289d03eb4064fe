"""Random operations on every allocator, with all invariants walked after each: thirty sequences here, twenty
thousand in `make test-all`."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from fragmeter.sim import memory
from fragmeter.sim.memory import prefix
from fragmeter.sim.memory.contiguous import arena
from machines import MACHINES, POLICY_MACHINES

ALLOCATORS = {"Arena", "Pool", "Memory", "Tree"}
each_machine = pytest.mark.parametrize("machine", dict.fromkeys(MACHINES.values()))


def test_every_allocator_has_a_machine():
    public = {*memory.__all__, *prefix.__all__, *vars(arena)} - {"Arena", "Memory"}
    named = {name for name in public if any(name.endswith(kind) for kind in ALLOCATORS)}
    assert named == {label.partition(",")[0] for label in MACHINES}


def test_a_leap_does_not_count_on_blocks_that_another_table_still_names():
    """Two windows pass shared blocks in the first step of a leap: found by the machine in some 3,000 sequences."""
    machine = POLICY_MACHINES["vllm-v1: PagedMemory, windows, prefix cache"]()
    machine.build(host_blocks=0, pool=(40, 3, 7, 8), place=4)
    machine.arrive((2, 9, 0, 9, True))
    machine.arrive((3, 12, 0, 9, True))
    machine.leap(1)
    machine.arrive((1, 3, 0, 0, True))
    machine.leap(10)
    machine.arrive((8, 5, 2, 9, True))
    machine.leap(10)
    machine.leap(8)
    for request in ((2, 7, 0, 0, True), (6, 14, 1, 4, True)):
        machine.arrive(request)
    machine.leap(4)
    machine.leap(11)
    for request in ((1, 8, 0, 4, False), (2, 6, 0, 0, True), (2, 10, 1, 0, True), (1, 3, 0, 9, False)):
        machine.arrive(request)
    machine.leap(1)
    machine.leap(5)
    machine.leap(3)
    machine.teardown()


@each_machine
def test_thirty_sequences_of_operations(machine):
    run_state_machine_as_test(machine, settings=hypothesis.settings.get_profile("machines"))


@pytest.mark.slow
@each_machine
def test_20_000_sequences_of_operations(machine):
    run_state_machine_as_test(machine, settings=hypothesis.settings.get_profile("machines-in-full"))
