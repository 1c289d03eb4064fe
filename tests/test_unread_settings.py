"""The table of what runs read, held against runs: what it says is read changes some, and what it says is not, none."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest

from fragmeter.sim import Settings, settings, simulate
from fragmeter.sim.errors import SettingError
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.unread import ALWAYS, EXEMPT, NOTHING, SOMETIMES, is_given, only_read, why_unread

from unread_loads import SCENES, Scene, load, outcome

#: Values unlike the defaults, of which each that a policy takes is tried.
VALUES: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (2,),
    "pipeline_parallel_size": (2,),
    "quantization": ("fp8",),
    "kv_cache_dtype": ("fp8",),
    "enforce_eager": (False,),
    "block_size": (8,),
    "page_size": (128,),
    "num_gpu_blocks_override": (150,),
    "enable_prefix_caching": (False, True),
    "max_model_len": (130,),
    "max_num_seqs": (2,),
    "max_num_batched_tokens": (260,),
    "watermark": (0.5,),
    "arena": ("first-fit",),
    "preemption_mode": ("swap",),
    "waiting_served_ratio": (4.0,),
    "max_waiting_tokens": (1,),
    "output_estimate": (0.2,),
    "schedule_policy": ("fcfs",),
    "use_beam_search": (True,),
    "beam_survival": (0.3,),
    "shared_prefix_tokens": (16,),
    "swap_space": (0.03,),
    "cost": ("fitted",),
    "step_scale": (2.0,),
    "disable_hybrid_kv_cache_manager": (True,),
    "window": ((0.1, 0.5),),
}
#: Changes no result of any policy, in spite of being read; and why that is no fault of the table.
CANNOT_SHOW: dict[tuple[str, str], str] = {}
FAST = 3


def test_every_setting_has_its_place():
    places = [*ALWAYS, *EXEMPT, *SOMETIMES]
    assert sorted(places) == sorted(field.name for field in fields(Settings))
    assert sorted(VALUES) == sorted({*ALWAYS, *SOMETIMES})
    assert all(EXEMPT.values())
    assert NOTHING.keys() <= SOMETIMES.keys()


@pytest.fixture(autouse=True)
def unrefused(request, monkeypatch):
    """Runs are not to be refused for what they do not read: what they do with it is asked."""
    if "unrefused" in request.fixturenames:
        monkeypatch.setattr("fragmeter.sim.run.refuse_unread", lambda *asked: None)


@cache
def plain(policy: str, place: int, tables: bool) -> str:
    return outcome(SCENES[place].settings(policy), SCENES[place].work, tables)


def changes(policy: str, place: int, field: str, value: Any, tables: bool) -> bool:
    """Whether a value makes another run of a scene."""
    scene = SCENES[place]
    try:
        chosen = replace(scene.settings(policy), **{field: value})
    except SettingError:
        # Refused as it is: the value is read.
        return True
    return outcome(chosen, scene.work, tables) != plain(policy, place, tables)


def is_read(policy: str, scene: Scene, field: str, value: Any) -> bool:
    """What the table says."""
    return why_unread(field, replace(scene.settings(policy), **{field: value}), scene.work) is None


def hold(policy: str, field: str, scenes: int, tables: bool) -> None:
    """What is said not to be read changes none of the first scenes; what is said to be read, one of all."""
    shown = wanted = False
    for place, scene in enumerate(SCENES):
        for value in VALUES[field]:
            if getattr(scene.settings(policy), field) == value:
                continue
            try:
                read = is_read(policy, scene, field, value)
            except SettingError:
                read = True
            if read:
                wanted = True
                shown = shown or changes(policy, place, field, value, tables)
            elif place < scenes:
                assert not changes(policy, place, field, value, tables), f"{field} under {policy}: {scene.name}"
    assert shown == wanted, f"{field} under {policy}: no scene shows that it is read"


@pytest.mark.usefixtures("unrefused")
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_not_read_changes_nothing_and_what_is_read_does(policy):
    for field in VALUES:
        hold(policy, field, FAST, tables=False)


@pytest.mark.slow
@pytest.mark.usefixtures("unrefused")
@pytest.mark.parametrize("policy", POLICIES)
def test_so_it_is_in_every_scene_and_in_every_table(policy):
    for field in VALUES:
        hold(policy, field, len(SCENES), tables=True)
