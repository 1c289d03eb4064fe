"""Compositions of memory that policies reach, found by serving under every combination of their options: each has a
machine, which serves it under random operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from typing import Any, Literal, get_args, get_origin, get_type_hints

import hypothesis
import numpy as np
import pytest
from hypothesis.stateful import run_state_machine_as_test

from family_runs import CopyCost
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.policy.registry import POLICIES
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.dialogue import NO_PARENT, Dialogue
from fragmeter.sim.workload.workload import Workload
from machines import MACHINES, POLICY_MACHINES
from machines.policies import composition
from other_values import other_values

#: Models by what their layers keep: all tokens, and windows, windows alone, and states.
MODELS = ("llama-3.1-8b", "gemma-3-27b", "mistral-7b-v0.1", "nemotron-h-8b")
#: Operations of each machine in `make test-all`.
OPERATIONS = 20_000
#: Options that need the clock of an engine: ``test_kv_offloading.py``, ``test_speculative_decoding.py`` and ``test_sglang_hicache.py`` serve
#: them.
IN_ENGINES = ("kv_offloading_size", "kv_transfer_config", "speculative_config", "enable_hierarchical_cache")
each_machine = pytest.mark.parametrize("label", POLICY_MACHINES)


def _workloads() -> dict[str, Workload]:
    """Four requests, of one sequence, of several, and of which each goes on from the one before."""
    prompts, outputs, times = np.array([40, 60, 80, 100]), np.full(4, 12), np.zeros(4)
    single = {"content": PromptContent.of_sessions(np.zeros(4, dtype=np.int64)), "priority": np.arange(4)}
    dialogue = Dialogue(np.array([NO_PARENT, 0, 1, 2]), np.array([0, 40, 60, 80]), np.zeros(4, dtype=bool))
    return {
        "single": Workload("single", times, prompts, outputs, **single),
        "samples": Workload("samples", times, prompts, outputs, n=np.full(4, 2)),
        "parents": Workload("parents", times, prompts, outputs, dialogue=dialogue),
    }


WORKLOADS = _workloads()


def _values(declared: type, name: str) -> tuple[Any, ...]:
    """The default of an option, and others."""
    hint, default = get_type_hints(declared)[name], getattr(declared, name)
    if get_origin(hint) is Literal:
        return get_args(hint)
    return (default,) if name in IN_ENGINES else (default, *other_values(name))


def _served(policy: str, model: str, load: str, **given: Any) -> str | None:
    """The composition that serves a load; None if the combination is refused. It does not depend on step times."""
    try:
        chosen = settings(
            policy=policy,
            model=model,
            gpu="h200",
            max_model_len=8192,
            num_gpu_blocks_override=None if policy == "sglang" else 4000,
            **given,
        )
        run = simulate(chosen, WORKLOADS[load], CopyCost())
    except SettingError:
        return None
    return composition(run.replica.policy, run.replica.memory)


def _shared(policy: str) -> Iterator[dict[str, Any]]:
    """Settings that all policies share and that change the memory."""
    for caching, ids in product((False, True) if POLICIES[policy].caches_prefixes else (None,), (False, True)):
        yield {"enable_prefix_caching": caching, "ids": ids}


def _reached(policy: str) -> set[str]:
    """Compositions under all combinations of the options that change one alone."""
    declared = POLICIES[policy].options_type
    values = {field.name: _values(declared, field.name) for field in fields(declared)}
    places = [*product(MODELS, WORKLOADS, _shared(policy))]
    known: dict[tuple[tuple[str, Any], ...], list[str | None]] = {}

    def served(options: dict[str, Any]) -> list[str | None]:
        """The compositions of all places; a default is served as no option is."""
        others = {name: value for name, value in options.items() if value != getattr(declared, name)}
        key = tuple(others.items())
        if key not in known:
            known[key] = [_served(policy, model, load, **shared, **others) for model, load, shared in places]
        return known[key]

    plain = served({})
    changing = []
    for name, others in values.items():
        alone = [served({name: value}) for value in others]
        if any(found not in (None, before) for each in alone for found, before in zip(each, plain, strict=True)):
            changing.append(name)
    found = set(plain)
    for chosen in product(*(values[name] for name in changing)):
        found |= {*served(dict(zip(changing, chosen, strict=True)))}
    return {label for label in found if label is not None}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_composition_that_a_policy_reaches_has_a_machine(policy):
    reached = _reached(policy)
    assert reached
    # Where sequences share blocks, or copy them, the machine of the memory covers its parts.
    grouped = {label for label in reached if label.split(": ")[1].split(", ")[0] in SHARED_MEMORIES}
    assert reached - grouped <= POLICY_MACHINES.keys()


SHARED_MEMORIES = {"SharingMemory", "DialogueMemory", "DialogueContiguousMemory"}


def test_memories_of_sequences_that_share_have_machines():
    assert SHARED_MEMORIES <= MACHINES.keys()


@each_machine
def test_random_operations(label):
    few = hypothesis.settings.get_profile("machines")
    run_state_machine_as_test(POLICY_MACHINES[label], settings=hypothesis.settings(few, max_examples=2))


@pytest.mark.slow
@each_machine
def test_20_000_operations(label):
    machine = POLICY_MACHINES[label]
    machine.operations = 0
    # Sequences end early where a draw leaves nothing to do.
    many = hypothesis.settings(hypothesis.settings.get_profile("machines"), max_examples=1200)
    run_state_machine_as_test(machine, settings=many)
    assert machine.operations >= OPERATIONS


def test_a_request_that_its_own_blocks_of_the_step_before_would_leave_no_room_is_refused():
    """Windows, and states at ends of blocks, with steps ahead: what a step releases is free a step later. Found among 20,000
    operations: a request alone in the pool was preempted and admitted without end."""
    machine = POLICY_MACHINES["vllm-v1: PagedMemory, windows, states, prefix cache, steps ahead, prompts in turn"]()
    machine.build(host_blocks=2, pool=(10, 1, 6, 8), place=5)
    machine.arrive(request=(3, 5, 2, 24, True))
    machine.arrive(request=(3, 3, 2, 24, True))
    assert [sequence.output_tokens for sequence in machine.state.waiting] == [3, 3]
    machine.leap(steps=5)
    machine.teardown()


def test_tables_grow_in_the_step_after_one_in_which_the_last_running_sequence_was_preempted():
    """Windows without caching, one sequence at a time. Found among 20,000 operations: the block ids of the next sequence
    lacked those of its first decode, as a step counted as grown in which none was left to decode."""
    machine = POLICY_MACHINES["vllm-v0: PagedMemory, windows"]()
    machine.build(host_blocks=0, pool=(10, 2, 7, 1), place=0)
    machine.arrive(request=(2, 9, 0, 0, True))
    machine.teardown()
