"""The compiled core beside the engine in Python: the same bits in every column and in every file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from core_loads import POLICIES, Load, changed_core, columns, needs_core, sources_in, spied
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.sim.config.settings import settings
from fragmeter.sim.cost import PaperCost
from fragmeter.sim.engine import core
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.engine.run import simulate, simulate_window
from fragmeter.sim.memory.paged.cached import CachedMemory
from fragmeter.sim.metrics.result import write
from fragmeter.sim.policy.vllm_v1 import VllmV1
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.errors import PluginError
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.users import Users
from fragmeter.sim.workload.workload import Workload
from paths import ROOT
from same_runs import plain, same
from strategies import LineCost

FOLDER = ROOT / "sim" / "engine"


def files(run: Run, folder: Path) -> dict[str, bytes]:
    """Every file of the result folder; step times that stand for none of the settings' describe themselves."""
    write(run, folder, {})
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def compare(load: Load) -> None:
    """The core, Python, and Python step by step: the same bits."""
    compiled, python = load.run(), load.run(core=False)
    assert columns(compiled) == columns(python)
    window = load.window_of(python)
    inside, outside = load.run(window=window), load.run(window=window, core=False)
    assert columns(inside) == columns(outside)
    assert plain(inside.window) == plain(outside.window)
    same(inside, load.run(window=window, leap=False))
    compare_looks(load, *load.looks_of(python))


def compare_looks(load: Load, looks: list[int], last: int) -> None:
    """What a watch sees at each look, and the run that the last look ends; stepping ends it with a step, not with a leap."""
    compiled, python, steps = (load.watched(looks, last, **which) for which in ({}, {"core": False}, {"leap": False}))
    assert compiled[1] == python[1]
    assert columns(compiled[0]) == columns(python[0])
    for table in ("residencies", "evictions", "chunks", "clock"):
        assert [seen[table] for seen in python[1][: len(looks)]] == [seen[table] for seen in steps[1][: len(looks)]]
    assert steps[0].log.end_ticks <= python[0].log.end_ticks


@needs_core
@hypothesis_settings(max_examples=60)
@given(seed=st.integers(0, 1 << 40), policy=st.sampled_from(POLICIES))
def test_core_python_and_stepping_are_the_same_bits(seed, policy):
    compare(Load(seed, policy))


@needs_core
def test_a_run_that_a_look_ends_before_finished_sequences_are_released():
    """Asynchronous scheduling: they took no block less than in their last step. The history of the pool counted one less."""
    compare_looks(Load(8, "vllm-v1"), [50756], 0)


@needs_core
def test_an_author_that_leaves_a_chain_publishes_no_more_of_it():
    """A waiting request looks for blocks of a chain after the place at which a running one went on to another."""
    compare(Load(10134, "vllm-v1", most=80))


@needs_core
@pytest.mark.slow
@hypothesis_settings(max_examples=4000)
@given(seed=st.integers(0, 1 << 40), policy=st.sampled_from(POLICIES))
def test_core_python_and_stepping_are_the_same_bits_at_length(seed, policy):
    compare(Load(seed, policy, most=80))


@pytest.mark.slow
@needs_core
def test_runs_that_end_early_have_taken_the_same_blocks_from_the_cache():
    """Wherever a watch ends them, the step after that may be decided, and has not run."""
    for seed in range(30, 65):
        load = Load(seed, "vllm-v1", most=12)
        looks, last = load.looks_of(load.run())
        for end in range(last % 7, len(looks), 7):
            compiled, python = (load.watched(looks, end, core=core)[0] for core in (True, False))
            assert columns(compiled) == columns(python)


@pytest.mark.slow
@needs_core
@pytest.mark.parametrize("policy", POLICIES)
def test_the_loads_preempt_refuse_idle_and_leap(policy):
    """The property would say little if they did not."""
    runs = [Load(seed, policy).run() for seed in range(120)]
    assert sum(len(run.log.evictions["index"]) > 0 for run in runs) > 20
    assert sum(bool(run.refused.any()) for run in runs) > 10
    assert max(run.log.rows["steps"].max(initial=0) for run in runs) > 50
    # Recomputed more than once.
    assert any(np.bincount(run.log.evictions["index"]).max(initial=0) > 1 for run in runs)
    if policy == "vllm-v1":
        cached = [run.replica.cache_log for run in runs if run.replica.cache_log]
        assert sum(bool(cache.look_up_columns()["hit_tokens"].any()) for cache in cached) > 10
        shared = [run.replica.cache_log for run in runs if run.replica.cache_log and run.workload.content]
        assert sum(bool(cache.look_up_columns()["hit_tokens"].any()) for cache in shared) > 30
        assert sum(len(run.log.evictions["index"]) > 0 for run in runs if not run.replica.cache_log) > 10
        # A prefill over several steps was preempted, and found its own blocks.
        assert sum((run.log.evictions["start_step"] < 0).any() for run in runs) > 0
        assert sum(len(run.log.chunks["index"]) > 0 for run in runs) > 30


@needs_core
@pytest.mark.parametrize("seed", range(12))
def test_every_result_file_has_the_same_bytes(seed, tmp_path):
    load = Load(seed, POLICIES[seed % 2])
    load.cost = PaperCost()
    assert files(load.run(), tmp_path / "core") == files(load.run(core=False), tmp_path / "python")


@needs_core
def test_the_command_writes_the_same_bytes_with_and_without_the_core(tmp_path):
    """Preemptions under the default settings, and under the paper's cost with a window."""
    for place, flags in enumerate(
        (
            ["--request-rate", "3"],
            ["--policy", "vllm-v1", "--request-rate", "4"],
            ["--policy", "vllm-v1", "--request-rate", "4", "--no-enable-prefix-caching"],
            ["--cost", "paper", "--request-rate", "4", "--window", "5", "60"],
        )
    ):
        one, other = tmp_path / f"core{place}", tmp_path / f"python{place}"
        command = ["simulate", "--num-prompts", "300", *flags]
        assert status([*command, "--out", str(one)]) == DONE
        assert status([*command, "--no-core", "--out", str(other)]) == DONE
        assert {path.name: path.read_bytes() for path in one.iterdir()} == {
            path.name: path.read_bytes() for path in other.iterdir()
        }
        assert json.loads((one / "summary.json").read_text())["preemptions"]["recompute"] > 0


@pytest.mark.slow
@needs_core
@pytest.mark.parametrize("leaps", [1, 7])
def test_a_full_buffer_changes_nothing(leaps, monkeypatch):
    """The core gives control back after so many leaps, or earlier where a step admits or preempts many."""
    for seed in range(30):
        load = Load(seed, POLICIES[seed % 2])
        whole = columns(load.run())
        with monkeypatch.context() as patched:
            patched.setattr(core, "_LEAPS", leaps)
            assert columns(load.run()) == whole


@pytest.mark.slow
@needs_core
def test_a_run_to_the_end_of_its_window_has_the_same_window():
    for seed in range(40):
        load = Load(seed, POLICIES[seed % 2])
        window = load.window_of(load.run())
        runs = [
            simulate_window(settings(**load.chosen, window=window, core=which), load.work, load.cost)
            for which in (True, False)
        ]
        assert plain(runs[0].window) == plain(runs[1].window)


@needs_core
def test_progress_counts_every_request_once():
    load, counts = Load(3), []
    simulate(settings(**load.chosen), load.work, load.cost, progress=counts.append)
    assert counts == sorted(counts) and counts[-1] == len(load.work)


class Watcher(Observer):
    every_step = False


@needs_core
@pytest.mark.parametrize(
    ("changed", "by_core"),
    [
        ({}, True),
        ({"window": (0.0, 1.0)}, True),
        ({"core": False}, False),
        ({"leap": False}, False),
        ({"ids": True}, False),
        ({"preemption_mode": "swap"}, False),
        ({"policy": "vllm-v0"}, False),
        ({"policy": "vllm-v1"}, True),
        ({"policy": "vllm-v1", "cost": "roofline", "max_num_batched_tokens": 512, "watermark": 0.1}, True),
        ({"policy": "vllm-v1", "async_scheduling": False}, False),
        ({"policy": "vllm-v1", "enable_prefix_caching": False}, True),
        ({"policy": "vllm-v1", "enable_prefix_caching": False, "async_scheduling": False}, False),
        ({"policy": "vllm-v1", "enable_prefix_caching": False, "long_prefill_token_threshold": 64}, False),
        ({"policy": "vllm-v1", "enable_prefix_caching": False, "ids": True}, False),
        ({"policy": "vllm-v1", "long_prefill_token_threshold": 64}, False),
        ({"policy": "vllm-v1", "max_num_active_seqs": 8}, False),
        ({"policy": "vllm-v1", "prefill_schedule_interval": 2}, False),
        ({"policy": "vllm-v1", "scheduler_reserve_full_isl": False}, False),
        ({"policy": "vllm-v1", "kv_offloading_size": 1.0}, False),
        (
            {
                "policy": "vllm-v1",
                "model": "kimi-k2",
                "gpu": "h200",
                "tensor_parallel_size": 16,
                "decode_context_parallel_size": 8,
            },
            True,
        ),
        ({"policy": "vllm-v1", "model": "gemma-3-12b", "gpu": "a100-80gb"}, False),
        ({"model": "gemma-3-12b", "gpu": "a100-80gb"}, False),
        ({"shared_prefix_tokens": 16}, False),
    ],
    ids=str,
)
def test_the_core_serves_only_what_it_has(changed, by_core):
    work = Workload("three", *np.array([[0, 1, 2], [20, 30, 40], [5, 6, 7]]))
    with spied() as started:
        simulate(settings(**changed), work)
    assert len(started) == by_core


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"core": False}, None),
        ({"policy": "tgi"}, "policy = tgi"),
        ({"policy": "vllm-v1", "max_num_active_seqs": 8, "seed": 3}, "max_num_active_seqs = 8"),
        ({"leap": False, "preemption_mode": "swap"}, "leap = False, preemption_mode = swap"),
        ({"model": "gemma-3-12b", "gpu": "a100-80gb"}, "model = gemma-3-12b"),
    ],
    ids=str,
)
def test_a_result_says_why_it_was_served_in_python(changed, why, tmp_path):
    """The same with and without a core, as the setting is the reason."""
    run = simulate(settings(**changed), Workload("three", *np.array([[0, 1, 2], [20, 30, 40], [5, 6, 7]])))
    write(run, tmp_path / "result", {})
    assert run.in_python == why
    assert json.loads((tmp_path / "result" / "run.json").read_text()).get("in_python") == why


@needs_core
def test_a_setting_that_the_core_does_not_know_is_served_in_python(monkeypatch):
    """As one that is added later would be, unless it is at its default."""
    work = Workload("one", np.array([0]), np.array([20]), np.array([5]))
    monkeypatch.setattr(core, "SETTINGS", core.SETTINGS - {"seed"})
    monkeypatch.setattr(core, "POLICIES", {VllmV1: ((CachedMemory,), frozenset({"watermark"}))})
    with spied() as started:
        simulate(settings(policy="vllm-v1", vllm_release="0.20"), work)
        simulate(settings(policy="vllm-v1", seed=3), work)
        simulate(settings(), work)
        assert not started
        simulate(settings(policy="vllm-v1", watermark=0.1), work)
    assert len(started) == 1


@needs_core
def test_users_groups_and_observers_are_served_in_python():
    lengths = np.array([0, 0, 0]), np.array([20, 30, 40]), np.array([5, 6, 7])
    with spied() as started:
        simulate(settings(), Workload("users", *lengths, users=Users(2, np.zeros(3, dtype=np.int64))))
        simulate(settings(), Workload("group", *lengths, n=np.array([1, 2, 1])))
        simulate(settings(), Workload("watched", *lengths), observers=[Watcher()])
        assert not started
        simulate(settings(), Workload("alone", *lengths))
        shared = PromptContent(np.array([0, 1, 2, 2]), np.array([7, 7]), np.array([16, 16]))
        simulate(settings(policy="vllm-v1"), Workload("prefixes", *lengths, content=shared))
        simulate(settings(policy="vllm-v1"), Workload("sequences", *lengths, n=np.array([1, 2, 1])))
    assert len(started) == 3


@needs_core
def test_a_fault_of_the_step_times_is_passed_on():
    class Broken(LineCost):
        def step_ticks(self, *_: int) -> int:
            raise ValueError("no such step")

    work = Workload("one", np.array([0]), np.array([20]), np.array([5]))
    with pytest.raises(PluginError, match="no such step") as raised:
        simulate(settings(), work, Broken())
    assert isinstance(raised.value.__cause__, ValueError)


@needs_core
def test_a_time_past_64_bits_is_an_error():
    class Ages(LineCost):
        def step_ticks(self, *_: int) -> int:
            return 86_400 * PER_SECOND

        def decode_line(self, *_: int) -> tuple[int, int, None]:
            return self.step_ticks(), 0, None

    work = Workload("three", np.array([0, 0, 0]), np.array([20, 20, 20]), np.array([50, 60, 70]))
    with pytest.raises(OverflowError, match="64 bits"):
        simulate(settings(max_num_seqs=1), work, Ages())


@pytest.fixture
def loaded_anew():
    """The core is looked for again, now and after the test."""
    core.compiled.cache_clear()
    yield
    core.compiled.cache_clear()


def test_without_the_core_python_serves_and_doctor_says_so(loaded_anew, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "fragmeter.sim.engine._core", None)
    monkeypatch.delattr("fragmeter.sim.engine._core", raising=False)
    assert core.compiled() == (None, "not built")
    run = Load(5).run()
    assert columns(run) == columns(Load(5).run(core=False))
    assert doctor_says(tmp_path)["works"] is False


@needs_core
def test_a_core_of_another_source_is_not_used(loaded_anew, monkeypatch, tmp_path):
    copied = sources_in(tmp_path)
    (copied / "_core_v1.c").write_text((copied / "_core_v1.c").read_text() + "/* changed */")
    monkeypatch.setattr(core, "_FOLDER", copied)
    assert core.compiled() == (None, "built from other sources, or other columns, than those of today")
    found = doctor_says(tmp_path)
    assert not found["works"] and "again" in found["remedy"]


@pytest.mark.slow
@needs_core
def test_doctor_says_that_the_core_is_used(tmp_path):
    found = doctor_says(tmp_path)
    assert found["works"] and found["found"].startswith("built from sources")


def doctor_says(folder: Path) -> dict[str, Any]:
    assert status(["doctor", "--json", str(folder / "doctor.json")]) == DONE
    [part] = [
        part for part in json.loads((folder / "doctor.json").read_text())["parts"] if part["name"] == "compiled core"
    ]
    return part


#: Differences to plant, by policy and part of the core: text of the source, and what stands for it.
PLANTED = {
    "vllm-sosp23": {
        "pressure at one free block": ("sosp23", "r->free - need < 1", "r->free - need < 0"),
        "victims until one more is free": ("sosp23", "r->free > *need - own", "r->free >= *need - own"),
        "no watermark": ("sosp23", "r->watermark_blocks : 0", "0 : 0"),
        "one place fewer": (
            "sosp23",
            "r->batch_size == r->max_num_seqs)",
            "r->batch_size == r->max_num_seqs - (r->max_num_seqs > 1))",
        ),
        "no budget": ("sosp23", "r->batch_size && prefill > budget", "r->batch_size && prefill > 2560"),
        "looks a leap later": ("sosp23", "r->now < until", "r->now <= until"),
        "leaps past a budget": ("sosp23", "step->valid_until_horizon && !any", "step->valid_until_horizon"),
        "leaps past a preemption": ("sosp23", "step->valid_until_horizon = !step->preempts", "step->valid_until_horizon = true"),
        "a step after an arrival": ("batch", "2 + whole_steps(ahead", "3 + whole_steps(ahead"),
        "no knots": ("batch", "line.until != WITHOUT_END", "false"),
        "no edges": ("batch", "if (r->num_edges)", "if (false)"),
        "a horizon of a block more": ("batch", "r->free - r->reserve", "r->free"),
        "tokens lost": ("batch", "head->lost_tokens = held_tokens(r, sequence)", "head->lost_tokens = 1"),
        "tokens generated": ("batch", "generated_tokens += r->decode_step -", "generated_tokens = r->decode_step -"),
        "blocks of a prompt": ("batch", "ceil_div(tokens - 1, r->block_size)", "ceil_div(tokens, r->block_size)"),
        "the context of a first step": ("batch", "step ? context + batch : context", "context"),
        "a knee": ("cost", "(beyond <= 0 || add_product(ticks, terms->steeper, beyond))", "true"),
        "a corner of a patch": ("cost", "if (along && up)", "if (false)"),
        "attention of two calls": ("cost", "attention = decode + prefill +", "attention = prefill +"),
        "a window of prompts": ("cost", "window ? least(pairs, window * tokens) : pairs", "pairs"),
        "no host": ("cost", "*ticks = most(c->numbers.least, (int64_t)attention)", "*ticks = (int64_t)attention"),
    },
    "vllm-v1": {
        "no step ahead": ("batch", "reach + (r->ahead && arrival > r->now)", "reach"),
        "the tail of a prefill": ("batch", "sequence->partial_blocks * r->block_size - target", "0"),
        "pressure at one free block": ("v1", "r->free < takes", "r->free <= takes"),
        "a victim is the last that runs": ("v1", "r->slots[slot].request > r->slots[last].request", "false"),
        "looks a leap later": ("v1", "r->now < until && !has_failed(r)", "r->now <= until && !has_failed(r)"),
        "knows of arrivals at once": ("v1", "deliver(r, r->seen)", "deliver(r, r->now)"),
        "no watermark": ("v1", "held ? r->watermark_blocks : 0", "0"),
        "places of finished sequences": ("v1", "held = r->batch_size + num_finished(r)", "held = r->batch_size"),
        "chunks of any length": ("v1", "now = least(tokens - known, grants->budget)", "now = tokens - known"),
        "leaps past a chunk": ("v1", "prefill_chunk(r, slot, tokens);\n        step->valid_until_horizon = false;", "prefill_chunk(r, slot, tokens);"),
        "nothing in vain": ("v1", "if (r->ends_early[sequence->request])", "if (false)"),
        "leaps past an end": ("v1", "if (*begins && num_waiting(r))", "if (false)"),
        "a block in vain": ("v1", "    if (r->cache != NULL)\n        grow_until(r, r->decode_step + 1);\n    for", "    for"),
        "the last token is known": ("v1", "tokens - (tokens > sequence->start_tokens)", "tokens"),
        "keeps blocks of a prefill without a cache": (
            "v1",
            "    r->free += r->slots[slot].partial_blocks;\n    if (r->cache != NULL)\n",
            "    if (r->cache != NULL)\n        r->free += r->slots[slot].partial_blocks;\n    if (r->cache != NULL)\n",
        ),
        "keeps blocks without a cache": (
            "v1",
            "    r->free += ceil_div(tokens, r->block_size);\n    if (r->cache != NULL)\n",
            "    if (r->cache != NULL)\n        r->free += ceil_div(tokens, r->block_size);\n    if (r->cache != NULL)\n",
        ),
        "finds nothing": ("v1", "return (start_tokens - 1)", "return 0 * (start_tokens - 1)"),
        "finds no last block": ("v1", "(start_tokens - 1) / r->block_size", "(start_tokens - 1) / r->block_size - 1"),
        "a shared slot is live twice": ("batch", "num_shared(&r->cache->pool) * r->block_size", "0"),
        "shared blocks come free": ("v1", "    r->free += num_shared(&c->pool) - shared;\n}", "}"),
        "shared blocks are taken again": ("v1", "r->cache == NULL ? 0 : found_in_tables(r->cache)", "0"),
        "leaps past a publication": ("batch", "steps = least(steps, most(1, r->steps_to_look))", "steps = steps"),
        "a publication a step later": ("v1", "- r->decode_step + 1);", "- r->decode_step + 2);"),
        "caches what is not full": ("cache", "least(table->cached + 1, table->count - 1)", "table->count"),
        "no touches": ("pool", "hit = hashed && p->blocks[id].touched != NONE;", "hit = false;"),
        "the initial pool has lives": ("pool", "        p->born[blocks[at]] = now;\n", "        begin_life(p, &p->last_life, blocks[at], now);\n"),
        "touched at birth": ("pool", "now - found->times[found->count - 1]);", "now - block->born);"),
        "lives of one block": ("pool", "last->more = same ? last->more + 1 : 0;", "last->more = 0;"),
        "each step of a leap takes as long": ("batch", "+ leap->growth * (more * (more - 1) / 2)", ""),
        "hit blocks stay in the queue": ("pool", "                p->ring[block->place] = NONE;\n", ""),
        "hashes of a chain that goes on": ("cache", "*end = c->stops[path->first + *link];", ";"),
        "touches of one block": ("pool", "found->taken++;", "found->taken = 1;"),
        "an eviction is no change": ("pool", "    log_change(p, moment, -evicted);\n", ""),
        "no square of a step": ("history", "taken * number * number", "taken * number"),
        "the row of a step that began": ("history", "row_of_step(column(c, ROW_STEP), rows, count - 1, row)", "row_of_step(column(c, ROW_STEP), rows, count, row)"),
        "steps of a row take as long": ("history", "column(c, ROW_SLOPE)[row] * (later", "0 * (later"),
        "a bucket further": ("history", "bound[at] < value[place]", "bound[at] <= value[place] + 1000000000"),
        "each value once": ("history", "(uint64_t)number[place];", "1;"),
    },
}  # fmt: skip


@needs_core
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "name"), [(policy, name) for policy, planted in PLANTED.items() for name in planted]
)
def test_a_planted_difference_is_caught(policy, name, tmp_path, monkeypatch):
    catch(policy, name, tmp_path, monkeypatch)


@pytest.mark.slow
@needs_core
@pytest.mark.parametrize(
    ("policy", "name"),
    [
        ("vllm-sosp23", "leaps past a budget"),
        ("vllm-sosp23", "looks a leap later"),
        ("vllm-v1", "no step ahead"),
        ("vllm-v1", "shared blocks come free"),
    ],
)
def test_one_of_these_differences_is_caught(policy, name, tmp_path, monkeypatch):
    """A few of those above, in every run of the tests."""
    catch(policy, name, tmp_path, monkeypatch)


@needs_core
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (core, "_row_end", lambda row: -1),
        (core, "_row_end", lambda row: int(row[0] + row[2])),
        (core, "bisect_right", lambda pauses, now: len(pauses) - 1),
        (core.CoreEngine, "stop", lambda engine: None),
    ],
    ids=["the row in progress is seen", "leaps are one step", "no pauses", "no end"],
)
def test_a_difference_between_looks_is_caught(policy, owner, name, other, monkeypatch):
    monkeypatch.setattr(owner, name, other)
    assert any(differs(Load(seed, policy)) for seed in range(30))


@pytest.mark.slow
@needs_core
@pytest.mark.parametrize("policy", POLICIES)
def test_a_core_without_a_planted_difference_is_no_different(policy, tmp_path, monkeypatch):
    """Otherwise a comparison that always failed would catch all of them. It serves, too: without the core nothing would differ."""
    _, (part, before, _) = next(iter(PLANTED[policy].items()))
    unchanged, asked = changed_core(tmp_path, part, before, before), []
    monkeypatch.setattr(core, "compiled", lambda: asked.append(policy) or (unchanged, "unchanged"))
    for seed in range(10):
        compare(Load(seed, policy))
        assert asked
        asked.clear()


def catch(policy, name, tmp_path, monkeypatch):
    """Plant a difference, and find it."""
    part, before, after = PLANTED[policy][name]
    changed = changed_core(tmp_path, part, before, after)
    monkeypatch.setattr(core, "compiled", lambda: (changed, "changed"))
    assert any(differs(Load(seed, policy)) for seed in range(150))


def differs(load: Load) -> bool:
    """Whether any of the comparisons fails."""
    try:
        compare(load)
    except Exception:
        return True
    return False


@needs_core
@pytest.mark.parametrize(
    ("array", "place", "value"), [(1, 0, 1), (1, 1, 1 << 40), (1, 1, -1), (2, 0, 1 << 40), (2, 0, -1)]
)
def test_paths_that_lie_outside_their_arrays_are_refused(array, place, value, monkeypatch):
    """Offsets of the requests that do not rise, and numbers of chains that there are not."""
    real = core._names
    load = next(
        load for seed in range(100) if (load := Load(seed, "vllm-v1")).work.content and load.run().replica.cache_log
    )

    def bent(*given):
        names = list(real(*given))
        names[array] = names[array].copy()
        names[array][place] = value
        return tuple(names)

    monkeypatch.setattr(core, "_names", bent)
    with pytest.raises(ValueError, match="a path of each request is needed"):
        load.run()
