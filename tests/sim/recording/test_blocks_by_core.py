"""Block maps of runs on the compiled core beside those of the engine in Python: the same in every array."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from core_loads import POLICIES, Load, changed_core, columns, needs_core, spied
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine import core
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.recording.blocks import NO_SEQUENCE, BlockMap, BlockRecording, record
from fragmeter.sim.types.errors import SettingError


def recorded(load: Load, by_core: bool, most_columns: int) -> tuple[dict[str, list[object]], dict[str, object]] | str:
    """All columns of a run and all arrays of its block map, or why it has none."""
    try:
        run, blocks = record(settings(**load.chosen, core=by_core), load.work, load.cost, most_columns=most_columns)
    except SettingError as error:
        return str(error)
    return columns(run), arrays(blocks)


def arrays(blocks: BlockMap) -> dict[str, object]:
    values = {field.name: getattr(blocks, field.name) for field in fields(blocks)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def differs(load: Load, most_columns: int) -> bool:
    try:
        return recorded(load, True, most_columns) != recorded(load, False, most_columns)
    except Exception:
        return True


@needs_core
@hypothesis_settings(max_examples=60)
@given(seed=st.integers(0, 1 << 40), policy=st.sampled_from(POLICIES), most_columns=st.sampled_from([2000, 60, 7]))
def test_maps_by_the_core_are_those_of_python(seed, policy, most_columns):
    load = Load(seed, policy)
    assert recorded(load, True, most_columns) == recorded(load, False, most_columns)


@needs_core
@pytest.mark.parametrize("policy", POLICIES)
def test_the_core_serves_them_with_shared_and_cached_blocks(policy):
    shared = kept = 0
    with spied() as started:
        for seed in range(25):
            load = Load(seed, policy)
            try:
                _, blocks = record(settings(**load.chosen), load.work, load.cost)
            except SettingError:
                continue
            shared += bool((blocks.references > 1).any())
            kept += bool(((blocks.references == 0) & (blocks.bucket == blocks.bucket.max())).any())
            assert (blocks.sequence[blocks.references > 0] != NO_SEQUENCE).all()
    assert len(started) > 15
    assert kept > 15
    assert shared > 3 or policy != "vllm-v1"


@needs_core
def test_other_observers_beside_it_are_served_in_python():
    load = Load(5)
    with spied() as started:
        chosen = settings(**load.chosen, ids=True)
        simulate(chosen, load.work, load.cost, observers=[BlockRecording(chosen, load.work), Observer()])
        simulate(chosen, load.work, load.cost)
    assert not started


#: Differences to plant, by part of the core: text of the source, and what stands for it.
PLANTED = {
    "looks at the start of a step": ("looks", "grow_until(r, decode_step);", "grow_until(r, r->decode_step);"),
    "the last sequence of a block": ("looks", "if (!seen->references++)", "seen->references++;"),
    "the shortest of its tables": ("looks", "(int32_t)most(seen->computed,", "(int32_t)least(seen->computed,"),
    "no prefill": ("looks", "if (r->prefilling != NONE)\n", "if (false)\n"),
    "runs over blocks with contents": ("looks", "|| (touched && c->pool.blocks[block].hash != NO_HASH)", ""),
    "the first bucket": ("looks", "seen->computed == largest ?", "seen->computed ?"),
    "no rest": ("batch", "r->pauses && end >= until ? REST : NO_LEAP", "NO_LEAP"),
    "no step in vain": ("v1", "!(r->pauses && until - r->now <= r->step.ticks)", "true"),
    "ids of the last that left": ("pool", "p->front[--p->num_front]", "p->front[0], --p->num_front"),
    "prompts before decodes": ("sosp23", "    grow_until(r, r->decode_step + 1);\n", ""),
    "hashes without a cache": ("cache", "    if (!c->keeps)\n        return;\n", ""),
}


@needs_core
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_caught(name, tmp_path, monkeypatch):
    part, before, after = PLANTED[name]
    changed = changed_core(tmp_path, part, before, after)
    monkeypatch.setattr(core, "compiled", lambda: (changed, "changed"))
    loads = (Load(seed, POLICIES[seed % 2]) for seed in range(150))
    assert any(differs(load, 2000) for load in loads)
