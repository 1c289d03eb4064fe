"""Block maps of runs on the compiled core beside those of the engine in Python: the same in every array."""

from __future__ import annotations

from dataclasses import fields
from unittest import mock

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
from fragmeter.sim.recording.blocks import MOST_LOOKED_AT, NO_SEQUENCE, BlockMap, BlockRecording, record, recording
from fragmeter.sim.types.errors import SettingError

#: Maximum numbers of columns, and of blocks that all looks read.
BOUNDS = [(2000, MOST_LOOKED_AT), (60, MOST_LOOKED_AT), (7, MOST_LOOKED_AT), (200, 3_000)]


def recorded(
    load: Load, by_core: bool, bounds: tuple[int, int]
) -> tuple[dict[str, list[object]], dict[str, object]] | str:
    """All columns of a run and all arrays of its block map, or why it has none."""
    columns_at_most, most_read = bounds
    chosen = settings(**load.chosen, core=by_core)
    try:
        with mock.patch.object(recording, "MOST_LOOKED_AT", most_read):
            run, blocks = record(chosen, load.work, load.cost, most_columns=columns_at_most)
    except SettingError as error:
        return str(error)
    return columns(run), arrays(blocks)


def arrays(blocks: BlockMap) -> dict[str, object]:
    values = {field.name: getattr(blocks, field.name) for field in fields(blocks)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def differs(load: Load, bounds: tuple[int, int]) -> bool:
    try:
        return recorded(load, True, bounds) != recorded(load, False, bounds)
    except Exception:
        return True


@needs_core
@hypothesis_settings(max_examples=60)
@given(seed=st.integers(0, 1 << 40), policy=st.sampled_from(POLICIES), bounds=st.sampled_from(BOUNDS))
def test_maps_by_the_core_are_those_of_python(seed, policy, bounds):
    load = Load(seed, policy)
    assert recorded(load, True, bounds) == recorded(load, False, bounds)


@pytest.mark.slow
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


@pytest.mark.slow
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
    "the shortest of its tables": (
        "looks",
        "seen->computed = (int32_t)most(seen->computed,",
        "seen->computed = (int32_t)least(seen->computed,",
    ),
    "no prefill": ("looks", "if (r->prefilling != NONE)\n", "if (false)\n"),
    "runs over blocks with contents": ("looks", "if (bucket == codes->free) {", "if (seen == &nothing) {"),
    "the first bucket": ("looks", "seen->computed == largest ?", "seen->computed ?"),
    "no rest": ("batch", "if (!look_at_rest(r, end))", "if (false)"),
    "no step in vain": ("v1", "bool seen = r->looks == NULL ||", "bool seen = true ||"),
    "the other columns": (
        "looks",
        "int64_t at = 0; at < l->num_columns; at += 2",
        "int64_t at = 1; at < l->num_columns; at += 2",
    ),
    "no look moves": ("looks", "            move_look(l, look, looks++);", "            looks++;"),
    "the new look is lost": ("looks", "    if (is_new)\n", "    if (false)\n"),
    "no coarser grid": ("looks", "    l->most = most_after(l, l->limits.of_sequence * held + census.in_use);\n", ""),
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
    assert any(differs(load, bounds) for load in loads for bounds in (BOUNDS[0], BOUNDS[-1]))
