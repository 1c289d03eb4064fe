"""The table of what runs read, held against runs: what it says is read changes some, and what it says is not, none."""

from __future__ import annotations

from collections import Counter
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
#: Scenes that are tried by default for each reason not to read a setting.
FEW_SCENES = 2


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


def why(policy: str, scene: Scene, field: str, value: Any) -> str | None:
    """What the table says; a value that is refused by itself is read."""
    try:
        return why_unread(field, replace(scene.settings(policy), **{field: value}), scene.work)
    except SettingError:
        return None


def hold(policy: str, field: str, most: int, tables: bool) -> None:
    """Where it is said not to be read it changes nothing; where it is said to be read, something in some scene.

    Args:
        most: Scenes that are tried for each reason not to read it.
    """
    cases = [
        (place, value, why(policy, scene, field, value))
        for place, scene in enumerate(SCENES)
        for value in VALUES[field]
        if getattr(scene.settings(policy), field) != value
    ]
    read = [(place, value) for place, value, reason in cases if reason is None]
    assert any(changes(policy, place, field, value, tables) for place, value in read) == bool(read), (
        f"{field} under {policy} is said to be read, and no scene shows it"
    )
    tried: Counter[str | None] = Counter()
    for place, value, reason in cases:
        tried[reason] += 1
        if reason is not None and tried[reason] <= most:
            changed = changes(policy, place, field, value, tables)
            assert not changed, f"{field} under {policy} is said not to be read ({reason}): {SCENES[place].name}"


@pytest.mark.usefixtures("unrefused")
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_not_read_changes_nothing_and_what_is_read_does(policy):
    for field in VALUES:
        hold(policy, field, FEW_SCENES, tables=False)


@pytest.mark.slow
@pytest.mark.usefixtures("unrefused")
@pytest.mark.parametrize("policy", POLICIES)
def test_so_it_is_in_every_scene_and_in_every_table(policy):
    for field in VALUES:
        hold(policy, field, len(SCENES), tables=True)
