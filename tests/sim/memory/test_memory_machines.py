"""Random operations on every allocator, with all invariants walked after each: a hundred sequences here, twenty
thousand in `make test-all`."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from fragmeter.sim import memory
from fragmeter.sim.memory import prefix
from fragmeter.sim.memory.contiguous import arena
from machines import MACHINES

ALLOCATORS = {"Arena", "Pool", "Memory", "Tree"}
each_machine = pytest.mark.parametrize("machine", dict.fromkeys(MACHINES.values()))


def test_every_allocator_has_a_machine():
    public = {*memory.__all__, *prefix.__all__, *vars(arena)} - {"Arena", "Memory"}
    named = {name for name in public if any(name.endswith(kind) for kind in ALLOCATORS)}
    assert named == {label.partition(",")[0] for label in MACHINES}


@each_machine
def test_a_hundred_sequences_of_operations(machine):
    run_state_machine_as_test(machine, settings=hypothesis.settings.get_profile("machines"))


@pytest.mark.slow
@each_machine
def test_20_000_sequences_of_operations(machine):
    run_state_machine_as_test(machine, settings=hypothesis.settings.get_profile("machines-in-full"))
