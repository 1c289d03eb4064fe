"""The table of what runs read, held against runs: what it says is read changes some, and what it says is not, none."""

from __future__ import annotations

import gzip
from dataclasses import fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fragmeter.experiments.runs.inputs import Inputs, Requests
from fragmeter.experiments.runs.unread import Unread
from fragmeter.sim import settings, simulate
from fragmeter.sim.cluster import Cluster, cluster, cluster_summary, simulate_cluster
from fragmeter.sim.config.unread import (
    is_required,
    only_read,
    refuse_unread_in_cluster,
    why_unread,
    why_unread_in_cluster,
)
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.policy.options import option_names
from fragmeter.sim.policy.registry import options_by_policy
from fragmeter.sim.types.errors import SettingError, UserError
from fragmeter.sim.workload.content import PromptContent
from fragmeter.traces import Reading, read_with_content, write
from fragmeter.traces.readers.readers import fields_read
from other_values import NAMES as SETTINGS
from other_values import exempt, other_values
from paths import SAMPLES
from unread_loads import ROWS, SCENES, SHOWN_IN, UNREAD_IN, Scene, load, outcome

EXEMPT = exempt()
#: Values unlike the defaults, of which each that a policy takes is tried.
VALUES = {name: other_values(name) for name in SETTINGS if name not in EXEMPT}


#: Options that only some policies read, and ``max_num_batched_tokens``.
SOMETIMES = ("max_num_batched_tokens", *options_by_policy(POLICIES))
#: Values that ask for nothing, of all options.
NOTHING = {name: value for kind in POLICIES.values() for name, value in kind.options_type.no_effect.items()}


def test_what_is_exempt_is_a_setting_and_says_why():
    assert EXEMPT.keys() <= set(SETTINGS) and all(EXEMPT.values())
    assert NOTHING.keys() <= set(options_by_policy(POLICIES))


@pytest.fixture
def unrefused(monkeypatch):
    """Runs are not refused for what they do not read: what they do with it is asked."""
    monkeypatch.setattr("fragmeter.sim.engine.run.refuse_unread", lambda *arguments: None)


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


def hold(policy: str, field: str, everywhere: bool) -> None:
    """Where it is said not to be read it changes nothing; where it is said to be read, something in some scene.

    Args:
        everywhere: Whether to try all scenes in which it is said not to be read, and to compare all tables; else the
            first one, the one that shows the setting best, and those in which it is known not to be read.
    """
    cases = [
        (place, value, why(policy, scene, field, value))
        for place, scene in enumerate(SCENES)
        for value in VALUES[field]
        if scene.settings(policy).value(field) != value
    ]
    read = [(place, value) for place, value, reason in cases if reason is None]
    assert any(changes(policy, place, field, value, everywhere) for place, value in read) == bool(read), (
        f"{field} under {policy} is said to be read, and no scene shows it"
    )
    for place, value, reason in cases:
        name = SCENES[place].name
        known = bool(read) and field in UNREAD_IN.get(name, ())
        assert reason is not None or not known or by_itself(policy, field), f"{field} under {policy}: {name}"
        shows = name in (SCENES[0].name, SHOWN_IN.get(field))
        if reason is not None and (everywhere or known or shows):
            changed = changes(policy, place, field, value, everywhere)
            assert not changed, f"{field} under {policy} is said not to be read ({reason}): {name}"


def by_itself(policy: str, field: str) -> bool:
    """Whether a policy refuses what the table need not."""
    return is_required(field) and field not in option_names(POLICIES[policy].options_type)


@pytest.mark.slow
@pytest.mark.usefixtures("unrefused")
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_not_read_changes_nothing_and_what_is_read_does(policy):
    for field in VALUES:
        hold(policy, field, everywhere=False)


@pytest.mark.slow
@pytest.mark.usefixtures("unrefused")
@pytest.mark.parametrize("policy", POLICIES)
def test_so_it_is_in_every_scene_and_in_every_table(policy):
    for field in VALUES:
        hold(policy, field, everywhere=True)


@pytest.mark.slow
@pytest.mark.usefixtures("unrefused")
@pytest.mark.parametrize("policy", POLICIES)
def test_an_entry_that_is_wrong_either_way_is_found(policy, monkeypatch):
    """Each setting is said to be read where it is not, and not to be where it is."""
    for flipped in SOMETIMES:
        if by_itself(policy, flipped) or flipped in EXEMPT:
            continue
        said = {why_unread(flipped, scene.settings(policy), scene.work) for scene in SCENES}
        wrong = "made up" if None in said else None
        with monkeypatch.context() as patched, pytest.raises(AssertionError, match=f"{flipped} under {policy}"):
            patched.setitem(globals(), "why_unread", lambda *arguments, wrong=wrong: wrong)
            hold(policy, flipped, everywhere=False)


def test_what_is_not_read_is_refused_by_the_library_and_dropped_on_demand():
    work, chosen = load(), settings(policy="vllm-v1", swap_space=4.0, watermark=0, max_num_seqs=7)
    with pytest.raises(
        SettingError,
        match=r"^swap_space = 4.0: vllm-v1 does not read it; use --policy vllm-sosp23 or vllm-v0, or leave it out$",
    ):
        simulate(chosen, work)
    assert only_read(chosen, work) == settings(policy="vllm-v1", watermark=0, max_num_seqs=7)
    assert "swap_space" not in simulate(only_read(chosen, work), work).settings.as_dict()


@pytest.mark.parametrize("policy", POLICIES)
def test_defaults_and_what_asks_for_nothing_are_never_refused(policy):
    simulate(settings(policy=policy, **NOTHING), load())


@pytest.mark.parametrize("policy", POLICIES)
def test_max_tokens_are_read_by_policies_that_reserve(policy):
    """``--max-tokens`` belongs to the requests: the same load, with and without."""
    scenes = [scene for scene in SCENES if scene.name in ("sessions", "grown")]
    changed = any(
        outcome(scene.settings(policy), scene.work, False)
        != outcome(scene.settings(policy), replace(scene.work, max_tokens=None), False)
        for scene in scenes
    )
    assert changed == (POLICIES[policy].reads_max_tokens)
    seen = Unread()
    seen.see(Inputs(settings=settings(policy=policy), requests=Requests(max_tokens="true")), load())
    assert ("max_tokens" in seen.read) == changed


#: Of each field of ``Cluster`` a value unlike the default, and what else there must be.
CLUSTERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "num_replicas": (2, {}),
    "router": ("kv-aware", {"num_replicas": 2}),
    "cache_threshold": (0.9, {"num_replicas": 3, "router": "prefix-affine"}),
    "balance_abs_threshold": (0, {"num_replicas": 3, "router": "prefix-affine"}),
    "balance_rel_threshold": (9.0, {"num_replicas": 3, "router": "prefix-affine", "balance_abs_threshold": 1}),
    "prefill_replicas": (2, {"prefill_replicas": 1, "decode_replicas": 2}),
    "decode_replicas": (2, {"prefill_replicas": 2, "decode_replicas": 1}),
    "decode_router": ("round-robin", {"prefill_replicas": 1, "decode_replicas": 2}),
    "kv_transfer_bandwidth": (0.1, {"prefill_replicas": 1, "decode_replicas": 2}),
    "kv_transfer_latency": (30.0, {"prefill_replicas": 1, "decode_replicas": 2}),
}
#: One replica, routers without thresholds, and one that decodes.
OTHERS = (
    {},
    {"router": "prefix-affine"},
    {"num_replicas": 2, "router": "least-outstanding-tokens"},
    {"prefill_replicas": 1, "decode_replicas": 1},
    {"prefill_replicas": 2, "decode_replicas": 1, "router": "prefix-affine", "balance_abs_threshold": 1},
)


@pytest.mark.slow
@pytest.mark.parametrize("field", CLUSTERS)
def test_a_cluster_reads_what_is_said_to_be_read_and_nothing_else(field, monkeypatch):
    monkeypatch.setattr("fragmeter.sim.cluster.run.refuse_unread_in_cluster", lambda *arguments: None)
    sessions = load(content=PromptContent.of_sessions(ROWS // 3 % 5), arrival_ticks=ROWS * 10**10)
    base = settings(policy="vllm-v1", num_gpu_blocks_override=100, max_model_len=600)
    value, more = CLUSTERS[field]
    shown: dict[str, bool] = {}
    for work, others in product((sessions, load()), (more, *OTHERS)):
        try:
            changed, plain = cluster(**others | {field: value}), cluster(**others)
        except SettingError:
            # Refused by itself.
            continue
        if changed == plain:
            continue
        # The summary names the router; that is no result.
        summaries = [
            cluster_summary(simulate_cluster(base, work, each)) | {"router": None} for each in (changed, plain)
        ]
        if why_unread_in_cluster(field, changed, work) is None:
            shown[str(others)] = shown.get(str(others), False) or summaries[0] != summaries[1]
        else:
            assert summaries[0] == summaries[1], others
            with pytest.raises(SettingError):
                refuse_unread_in_cluster(changed, work)
    assert shown and all(shown.values()), shown


def test_every_field_of_a_cluster_is_tried():
    assert sorted(CLUSTERS) == sorted(field.name for field in fields(Cluster))


NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.suffix in (".csv", ".json", ".jsonl"))
#: Of each field of ``Reading`` values of which one makes a difference where it is read.
READINGS: dict[str, tuple[Any, ...]] = {
    "skip_bad": (True,),
    "tokenizer": (Path("no-such-tokenizer.json"),),
    "time_unit": ("s", "ms", "us"),
    "timed_trace_chunk_hash_size": (16, 512),
    "timed_trace_sec_multiplier": (3.0,),
    "max_inflated_bytes": (1,),
}


def read_of(path: Path, longest: int | None, **reading: Any) -> str:
    """A trace as it is read, or why it cannot be; rows of more than ``longest`` tokens are bad ones."""
    try:
        trace = read_with_content(path, Reading(**reading), longest)
    except UserError as error:
        return str(error)
    content = () if trace.content is None else [getattr(trace.content, name) for name in trace.content.columns()]
    columns = [getattr(trace, name) for name in ("prompt_tokens", "output_tokens", "arrival_ticks", "delay_ticks")]
    return repr([None if column is None else np.asarray(column).tolist() for column in (*columns, *content)])


@pytest.mark.parametrize("name", [*NAMES, "ragpulse/0_trace.jsonl", *(f"{name}.gz" for name in NAMES), "own.parquet"])
def test_a_trace_reads_what_is_said_to_be_read_and_nothing_else(name, tmp_path):
    path = SAMPLES / name
    if name.endswith(".gz"):
        path = tmp_path / name
        path.write_bytes(gzip.compress((SAMPLES / name.removesuffix(".gz")).read_bytes()))
    elif name == "own.parquet":
        path = tmp_path / name
        write(read_with_content(SAMPLES / "mooncake.jsonl"), path)
    said = fields_read(path)
    for field, values in READINGS.items():
        longest = 400 if field == "skip_bad" else None
        changed = any(read_of(path, longest) != read_of(path, longest, **{field: value}) for value in values)
        # Not all samples have a longer row.
        assert changed == (field in said) or (field == "skip_bad" and not changed), field


def test_bad_rows_of_every_trace_can_be_skipped(tmp_path):
    path = tmp_path / "one.csv"
    path.write_text("prompt_tokens,output_tokens\n3,4\n900,4\n")
    assert read_of(path, 400) != read_of(path, 400, skip_bad=True) and "skip_bad" in fields_read(path)


def test_every_field_of_a_reading_is_tried():
    # Columns that the user names are read of every trace; tests/traces/test_named_columns.py has them.
    assert sorted([*READINGS, "columns"]) == sorted(field.name for field in fields(Reading))
