"""The worth of cached slots and its bounds, beside a recomputation from what each block of the pool went through."""

from __future__ import annotations

import json
from collections import defaultdict
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from core_loads import Load, needs_core
from engine_runs import LONG_MODEL
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.accounting.worths import WORTHS
from fragmeter.sim.memory.prefix.block_pool import BlockPool
from fragmeter.sim.metrics import cache_bounds as bounds_module
from fragmeter.sim.metrics import summary as summary_module
from fragmeter.sim.metrics.belady import Spans, most_kept
from fragmeter.sim.metrics.cache_bounds import CacheBounds, cache_bounds, cache_summary
from fragmeter.sim.metrics.cache_worth import cache_worth
from fragmeter.sim.metrics.time_to_live import shortest, time_to_live
from fragmeter.sim.runs.moments import ticks_of
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.errors import SimulationFault
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload
from strategies import LineCost


class Step(LineCost):
    """Every step takes 100 ticks."""

    def step_ticks(self, decodes, decode_context, prefill_tokens, prefill_pairs):
        return 100

    def decode_line(self, decodes, context):
        return 100, 0, None


def served(sessions: list[int], prompts: list[int], blocks: int) -> Run:
    """A turn every 1,000 ticks, of a session, with one output token, in a pool of so many blocks of 4 tokens and the null block."""
    turns = len(sessions)
    work = Workload(
        "story",
        np.arange(turns) * 1000,
        np.array(prompts),
        np.ones(turns, dtype=np.int64),
        content=PromptContent.of_sessions(np.array(sessions)),
    )
    chosen = settings(
        policy="vllm-v1",
        model=LONG_MODEL,
        max_model_len=32,
        block_size=4,
        num_gpu_blocks_override=blocks + 1,
        max_num_seqs=4,
        async_scheduling=False,
        outside_ms=0,
    )
    return simulate(chosen, work, Step())


def test_three_sessions_show_every_worth():
    """The story of docs/cache-worth.md: six blocks of 4 tokens, prompts of 8 and 12, one output token each.

    A comes back in time, B too late, since C and the order of eviction took its blocks; what B evicts of A no one asks for, and C is
    still cached at the end. MIN would have kept B for A.
    """
    run = served([0, 1, 0, 2, 1], [8, 8, 12, 12, 12], blocks=6)
    worth, bounds = cache_worth(run), cache_bounds(run)
    assert worth is not None
    assert worth.slot_ticks() == {
        "hit_later": 2 * 4 * (2000 - 100),
        "too_late": 2 * 4 * (3000 - 1100),
        "never": 3 * 4 * (4000 - 2100),
        "undecided": 3 * 4 * (4100 - 3100),
    }
    assert bounds == CacheBounds(asked=6, hits=2, fixed_schedule=4, infinite=4, closing_blocks=7)
    # A's two blocks are hit after 1,900 ticks, just kept by a time to live of 1,900: A's last three were cached no longer.
    assert time_to_live(worth, 1900) == (1900, 0, 0)
    # Of ten stays all but C's three lasted 1,900 ticks.
    assert time_to_live(worth, 1000) == (1000, 7 * 4 * 900, 2)


def test_no_order_keeps_more_than_the_free_blocks_hold():
    """While C holds three of four blocks, one of the four that A and B ask for again can be kept. First turns ask for a block each."""
    run = served([0, 1, 2, 0, 1], [8, 8, 12, 12, 12], blocks=4)
    assert cache_bounds(run) == CacheBounds(asked=6, hits=0, fixed_schedule=1, infinite=4, closing_blocks=8)


@dataclass
class Diary:
    """What a pool was told, in order: (block, what, moment) with hashes; and the prompts that were looked up, as hashes."""

    lines: list[tuple[Any, ...]] = field(default_factory=list)

    def of_pool(self) -> Any:
        """A pool that writes the diary."""
        lines = self.lines

        class Told(BlockPool):
            def get_new_blocks(self, count, moments=None):
                before = dict(enumerate(self.block_hash))
                taken = super().get_new_blocks(count, moments)
                lines.extend(
                    ("gone", block, before.get(block), at) for block, at in zip(taken, moments or [], strict=True)
                )
                return taken

            def touch(self, blocks, moment=0):
                lines.extend(
                    ("hit", block, self.block_hash[block], moment) for block in blocks if not self.ref_cnt[block]
                )
                super().touch(blocks, moment)

            def free_blocks(self, table, moment=0):
                super().free_blocks(table, moment)
                lines.extend(
                    ("kept", block, self.block_hash[block], moment) for block in table if not self.ref_cnt[block]
                )

        return Told


def told(load: Load) -> tuple[Run, list[tuple[Any, ...]]]:
    """A run in Python, and its diary with a line ("asked", hashes) for each admission."""
    diary = Diary()
    with mock.patch("fragmeter.sim.memory.paged.cached.BlockPool", diary.of_pool()):
        from fragmeter.sim.memory.paged.cached import CachedMemory

        enter = CachedMemory.enter

        def entered(self, sequence, found, hashes, decode_step):
            wanted = (sequence.start_tokens - 1) // self.block_size
            # The blocks of the steps before are taken first.
            self.tables.grow_until(decode_step + 1)
            diary.lines.append(("asked", [] if hashes is None else [*hashes[:wanted]]))
            enter(self, sequence, found, hashes, decode_step)

        with mock.patch.object(CachedMemory, "enter", entered):
            run = load.run(core=False)
    return run, diary.lines


def by_walking(run: Run, lines: list[tuple[Any, ...]]) -> list[tuple[int, int, str]]:
    """Each stay in ticks, from, to and worth, by looking ahead from each line."""

    def ticks(moment: int) -> int:
        return int(ticks_of(run.log, np.array([moment]))[0])

    found = []
    for number, line in enumerate(lines):
        if line[0] != "kept" or line[2] is None:
            continue
        _, block, name, moment = line
        since = ticks(moment)
        for later, other in enumerate(lines[number + 1 :], number + 1):
            if other[0] in ("hit", "gone") and other[1] == block:
                again = name and any(each[0] == "asked" and name in each[1] for each in lines[later:])
                worth = "hit_later" if other[0] == "hit" else "too_late" if again else "never"
                found.append((since, ticks(other[3]), worth))
                break
        else:
            found.append((since, run.log.end_ticks, "undecided"))
    return found


@hypothesis_settings(max_examples=15)
@given(seed=st.integers(0, 1 << 40))
def test_every_cached_slot_has_the_worth_that_looking_ahead_gives(seed):
    run, lines = told(Load(seed, "vllm-v1", most=25))
    worth = cache_worth(run)
    if worth is None:
        return
    expected = dict.fromkeys(WORTHS, 0)
    for since, until, name in by_walking(run, lines):
        expected[name] += (until - since) * run.replica.block_size
    assert worth.slot_ticks() == expected


@hypothesis_settings(max_examples=8)
@given(seed=st.integers(0, 1 << 40))
def test_a_time_to_live_frees_what_walking_frees(seed):
    run, lines = told(Load(seed, "vllm-v1", most=25))
    worth, bounds = cache_worth(run), cache_bounds(run)
    if worth is None or bounds is None:
        return
    stays = by_walking(run, lines)
    for ticks in (0, *(sorted(until - since for since, until, _ in stays)[:: 1 + len(stays) // 5])):
        over = [(until - since - ticks, name) for since, until, name in stays if until - since > ticks]
        freed = run.replica.block_size * sum(rest for rest, _ in over)
        assert time_to_live(worth, ticks) == (ticks, freed, [name for _, name in over].count("hit_later"))


@needs_core
@hypothesis_settings(max_examples=10)
@given(seed=st.integers(0, 1 << 40))
def test_the_shortest_time_to_live_loses_a_point_at_most(seed):
    load = Load(seed, "vllm-v1")
    worth, bounds = cache_worth(run := load.run()), cache_bounds(run)
    if worth is None or bounds is None:
        return
    found = shortest(worth, bounds.asked)
    assert 100 * found.lost_blocks <= bounds.asked and found.ticks % PER_SECOND == 0
    if found.ticks:
        assert 100 * time_to_live(worth, found.ticks - PER_SECOND).lost_blocks > bounds.asked
    assert shortest(cache_worth(load.run(core=False)), bounds.asked) == found


@hypothesis_settings(max_examples=40)
@given(seed=st.integers(0, 1 << 40))
def test_the_worths_add_up_to_the_cached_bucket_in_every_row_and_over_time(seed):
    run = Load(seed, "vllm-v1").run()
    worth = cache_worth(run)
    if worth is None:
        return
    rows = worth.at_rows
    assert all((column >= 0).all() for column in rows.values())
    assert (sum(rows.values()) == run.accounts.at_rows()["cached"]).all()
    assert sum(worth.slot_ticks().values()) == run.accounts.window().slot_ticks["cached"]


@needs_core
@hypothesis_settings(max_examples=40)
@given(seed=st.integers(0, 1 << 40))
def test_the_core_and_python_find_the_same_worth_and_the_same_bounds(seed):
    load = Load(seed, "vllm-v1")
    compiled, python = load.run(), load.run(core=False)
    one, other = cache_worth(compiled), cache_worth(python)
    assert (one is None) == (other is None)
    if one is None or other is None:
        return
    assert one.slot_ticks() == other.slot_ticks()
    assert all((column == other.at_rows[name]).all() for name, column in one.at_rows.items())
    assert cache_bounds(compiled) == cache_bounds(python)


@needs_core
@pytest.mark.parametrize("core", [True, False])
def test_a_run_without_the_log_has_everything_but_the_division(core):
    divided = 0
    for seed in range(40):
        load = Load(seed, "vllm-v1", most=20)
        chosen = settings(**load.chosen, core=core)
        whole, bare = (simulate(chosen, load.work, load.cost, logs_contents=logs) for logs in (True, False))
        divided += cache_worth(whole) is not None
        assert cache_worth(bare) is None and bare.replica.memory.contents_kept is None
        assert summary_module.summary(bare) == summary_module.summary(whole)
    assert divided > 5


@hypothesis_settings(max_examples=40)
@given(seed=st.integers(0, 1 << 40))
def test_no_run_hits_more_than_its_bounds(seed):
    run = Load(seed, "vllm-v1").run()
    found = cache_bounds(run)
    if found is None or run.replica.cache_log is None:
        return
    assert found.hits * run.replica.block_size == run.replica.cache_log.look_up_columns()["hit_tokens"].sum()
    assert found.hits <= found.fixed_schedule <= found.infinite <= found.asked
    assert (found.closing_blocks == run.replica.num_blocks) <= (found.fixed_schedule == found.infinite)


def test_segments_that_are_sorted_in_parts_have_the_same_bounds(monkeypatch):
    """A long run is sorted in parts, which would not fit at once."""
    for seed in range(40):
        run = Load(seed, "vllm-v1").run()
        whole = cache_bounds(run)
        monkeypatch.setattr(bounds_module, "_SORTED", 1 + seed % 7)
        assert cache_bounds(Load(seed, "vllm-v1").run()) == whole
        monkeypatch.undo()


def most_of(free: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> int:
    """The most spans that can be kept, by trying all choices."""
    most = 0
    for chosen in range(1 << len(spans)):
        kept = [span for place, span in enumerate(spans) if chosen >> place & 1]
        fits = all(sum(start <= event < end for start, end in kept) <= room for event, room in enumerate(free))
        most = max(most, len(kept) * fits)
    return most


def in_any_order(free: list[int], spans: list[tuple[int, int]], rng: np.random.Generator) -> int:
    """Spans that are kept when those that go are drawn at random."""
    kept: list[tuple[int, int]] = []
    hits = 0
    starting = defaultdict(list)
    for span in spans:
        starting[span[0]].append(span)
    for event, room in enumerate(free):
        hits += sum(end == event for _, end in kept)
        kept = [span for span in kept if span[1] > event] + starting[event]
        while len(kept) > room:
            kept.pop(int(rng.integers(len(kept))))
    return hits


def a_schedule(rng: np.random.Generator, most: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Free blocks at each event, and spans between two events, at most ``most``."""
    events = int(rng.integers(2, 12))
    free = rng.integers(0, 5, events).tolist()
    edges = [sorted(rng.choice(events, 2, replace=False).tolist()) for _ in range(rng.integers(0, most + 1))]
    return free, [(start, end) for start, end in edges]


def as_spans(spans: list[tuple[int, int]]) -> Spans:
    start, end = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    return Spans(start, end, np.ones_like(start))


def test_the_fixed_schedule_keeps_as_many_as_any_choice_of_a_small_one():
    rng = np.random.default_rng(1)
    for _ in range(300):
        free, spans = a_schedule(rng, 8)
        hits, missing = most_kept(np.array(free), as_spans(spans))
        kept = sum(hits.values())
        assert kept == most_of(tuple(free), tuple(spans))
        assert most_of(tuple(room + missing for room in free), tuple(spans)) == len(spans)
        assert not missing or kept <= most_of(tuple(room + missing - 1 for room in free), tuple(spans)) < len(spans)


@pytest.mark.slow
def test_no_order_hits_more_than_the_fixed_schedule_in_10_000_random_traces():
    rng = np.random.default_rng(2)
    for _ in range(10_000):
        free, spans = a_schedule(rng, 30)
        assert in_any_order(free, spans, rng) <= sum(most_kept(np.array(free), as_spans(spans)).hits.values())


def test_a_log_that_lacks_a_stay_does_not_add_up():
    """The checks would say little if any log passed them."""
    for seed in range(400):
        run = Load(seed, "vllm-v1").run()
        worth = cache_worth(run)
        if worth is None or any(run.replica.memory.unshared):
            continue
        in_use, names = worth.hits + worth.late, copy(worth.names)
        names.stays = names.stays | {"blocks": in_use}
        lacking = replace(worth, names=names)
        if any(worth.at_rows["never"]):
            with pytest.raises(SimulationFault, match="does not add up"):
                _ = lacking.at_rows
            return
    raise AssertionError("no load evicts shared contents in vain")


def shared_flags(folder: Path) -> list[str]:
    """Flags of a load of which every third request has the same beginning, written to a folder."""
    trace = folder / "trace.jsonl"
    lines = [
        {"timestamp": 100 * n, "input_length": 1024, "output_length": 8, "hash_ids": [n % 3, n]} for n in range(12)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--model", "llama-3.1-8b", "--gpu", "h200", "--trace", str(trace)]


#: Commands by whether what they write has the division.
DIVIDING = {
    ("simulate", "--policy", "vllm-v1"): False,
    ("simulate", "--policy", "vllm-v1", "--out", "out"): True,
    ("simulate", "--policy", "vllm-v1", "--json", "out"): True,
    ("sweep", "--policy", "vllm-v1", "--grid", "seed=0:1:1", "--jobs", "1", "--out", "out"): False,
    (
        "compare",
        "--policy",
        "vllm-v1",
        "--set",
        "block_size=16",
        "--set",
        "block_size=32",
        "--seeds",
        "2",
        "--jobs",
        "1",
    ): False,
    ("plan", "--goodput", "ttft:4000", "--seeds", "1", "--jobs", "1"): False,
}


@pytest.mark.parametrize("command", DIVIDING, ids=lambda command: "".join(command[:1] + command[3:4]))
def test_only_a_run_that_is_written_is_divided(command, tmp_path, monkeypatch):
    asked: list[Run] = []
    monkeypatch.setattr(summary_module, "cache_summary", lambda run: asked.append(run) or cache_summary(run))
    monkeypatch.chdir(tmp_path)
    assert status([*command, *shared_flags(tmp_path)]) == DONE
    assert bool(asked) == DIVIDING[command]


@pytest.mark.parametrize(
    "replicas",
    [
        ("--num-replicas", "2"),
        pytest.param(("--prefill-replicas", "1", "--decode-replicas", "1"), marks=pytest.mark.slow),
    ],
    ids=["same", "apart"],
)
def test_a_fleet_is_divided_as_a_whole(replicas, tmp_path):
    """Its page has the sentence and no picture."""
    flags, folder = ["--policy", "vllm-v1", *shared_flags(tmp_path), *replicas], str(tmp_path / "run")
    assert status(["simulate", *flags, "--out", folder]) == DONE
    duplicates = json.loads((tmp_path / "run" / "summary.json").read_text())["cache_worth"]["duplicates"]["pool_pct"]
    # The only replica that prefills has the only copies.
    assert (duplicates > 0) == ("--num-replicas" in replicas)
    assert status(["report", folder, "--out", str(tmp_path / "page.html")]) == DONE
    assert "Worth of the cached blocks" in (tmp_path / "page.html").read_text()
