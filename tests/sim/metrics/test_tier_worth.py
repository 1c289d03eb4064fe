"""The worth of cached slots of KV groups, with drafts, and of a host tier, beside a walk over what each block went through."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
import pytest

from core_loads import shared_content, turns
from engine_runs import LONG_MODEL
from family_runs import CopyCost
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.accounting.cache_log import CacheLog
from fragmeter.sim.memory.accounting.kv_groups import PageGroups
from fragmeter.sim.memory.accounting.worths import HOST_WORTHS, WORTHS
from fragmeter.sim.memory.paged.group_cache import GroupCache
from fragmeter.sim.memory.prefix.block_pool import BlockPool
from fragmeter.sim.memory.prefix.host_cache import HostCache
from fragmeter.sim.memory.prefix.host_tier import HostTier
from fragmeter.sim.memory.prefix.tiers import Store
from fragmeter.sim.metrics.cache_bounds import cache_bounds
from fragmeter.sim.metrics.cache_worth import cache_worth
from fragmeter.sim.metrics.tier_worth import tier_slot_ticks
from fragmeter.sim.runs.moments import ticks_of
from fragmeter.sim.runs.run import Run
from fragmeter.sim.workload.workload import Workload

NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.5, 0.5],
}
#: A store behind the host that evicts, and a larger one that the host writes what it evicts to.
BEHIND = json.dumps(
    {
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [
                {"type": "example", "size_gib": 0.08, "read_gb_s": 1e7, "write_gb_s": 1e7},
                {
                    "type": "fs",
                    "size_gib": 0.2,
                    "write_policy": "write_back",
                    "latency_us": 0,
                    "read_gb_s": 1e7,
                    "write_gb_s": 1e7,
                },
            ],
        }
    }
)
#: Settings by what the memory is composed of, with the tokens of a pool that evicts; 0 of blocks of 1,040 tokens.
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "host": ({"model": LONG_MODEL, "block_size": 4, "kv_offloading_size": 0.08}, 160),
    "store": (
        {"model": LONG_MODEL, "block_size": 4, "kv_offloading_size": 0.05, "kv_transfer_config": BEHIND},
        80,
    ),
    "windows": ({"model": "gemma-3-27b", "gpu": "h200"}, 2400),
    "windows and host": ({"model": "gemma-3-27b", "gpu": "h200", "kv_offloading_size": 0.5}, 2400),
    "states": ({"model": "nemotron-h-8b", "gpu": "h200"}, 0),
    "drafts": (
        {"model": LONG_MODEL, "block_size": 4, "speculative_config": json.dumps(NGRAMS)},
        160,
    ),
    "drafts that drop a block": (
        {
            "model": LONG_MODEL,
            "block_size": 4,
            "speculative_config": json.dumps(NGRAMS | {"method": "eagle"}),
            "kv_offloading_size": 0.08,
        },
        160,
    ),
    "windows and drafts": (
        {"model": "gemma-3-27b", "gpu": "h200", "speculative_config": json.dumps(NGRAMS | {"method": "eagle"})},
        2600,
    ),
}
MOST_STORES = 2
each_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "host" else [pytest.mark.slow]) for kind in KINDS]
)


def work_of(seed: int, longest: int) -> Workload:
    """A few requests, most of which share a beginning with another one."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(8, 20))
    work = Workload(
        "load",
        np.cumsum(rng.integers(0, 40, count)),
        rng.integers(1, longest // 2, count),
        rng.integers(1, 12, count),
    )
    return Workload(
        "load", work.arrival_ticks, work.prompt_tokens, work.output_tokens, content=shared_content(rng, work)
    )


def served(kind: str, seed: int, **more: Any) -> Run:
    """A run of this kind in a pool that evicts."""
    chosen, tokens = KINDS[kind]
    longest = {LONG_MODEL: 48, "nemotron-h-8b": 8000}.get(chosen["model"], 900)
    blocks = {"num_gpu_blocks_override": tokens // chosen.get("block_size", 16) if tokens else 60}
    asks = {"policy": "vllm-v1", "max_model_len": min(2 * longest, 8192), "outside_ms": 0, "max_num_seqs": 4}
    return simulate(
        settings(**asks, **blocks, **chosen, **more),
        turns(seed) if kind == "store" else work_of(seed, longest),
        CopyCost(),
    )


class Diary:
    """Lines of what happened, in order; what is of the GPU, or of the host, happened at the next ``settled`` of it."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def patches(self) -> list[Any]:
        note = self.lines.append

        class Told(BlockPool):
            def get_new_blocks(self, count, moments=None):
                before = dict(enumerate(self.block_hash))
                taken = super().get_new_blocks(count, moments)
                for block in taken:
                    if before.get(block) is not None:
                        note(("gpu", "gone", block, before[block]))
                return taken

            def touch(self, blocks, moment=0):
                for block in blocks:
                    if not self.ref_cnt[block]:
                        note(("gpu", "hit", block, self.block_hash[block]))
                super().touch(blocks, moment)

            def cache_full_blocks(self, blocks, names):
                blocks = [*blocks]
                super().cache_full_blocks(blocks, names)
                for block, name in zip(blocks, names, strict=True):
                    note(("gpu", "named", block, name))

            def free_blocks(self, table, moment=0):
                super().free_blocks(table, moment)
                for block in table:
                    if not self.ref_cnt[block] and self.block_hash[block] is not None:
                        note(("gpu", "kept", block, self.block_hash[block]))

        settle, enter, record = CacheLog.settle, GroupCache.enter, HostTier._record
        load, store, evict = HostCache.start_load, HostCache.start_store, HostCache._evict
        place, write, begin, connect = Store.place, Store.write, Store.begin_read, HostTier.connect
        drop, lines = HostCache.drop, self.lines

        def settled(log, cached, moment):
            note(("gpu", "settled", moment, None))
            settle(log, cached, moment)

        def entered(cache, sequence, found):
            names = cache.names_of(sequence)
            most, size = sequence.start_tokens - 1, cache._size
            asked = names[: most // size * size // cache._hashed]
            note(("gpu", "asked", None, {cache._hash(name, place) for name in asked for place in range(cache._number)}))
            known = found.blocks
            beyond = names[known : sequence.start_tokens // size]
            note(
                ("host", "asked", None, {cache._hash(name, place) for name in beyond for place in range(cache._number)})
            )
            for place in range(MOST_STORES):
                note((f"store {place}", *lines[-1][1:]))
            note(("look-up", "of", most + 1, names))
            enter(cache, sequence, found)

        def recorded(tier, now, wait):
            note(("host", "settled", now, None))
            record(tier, now, wait)

        def loaded(cache, request, blocks):
            for name, _ in blocks:
                note(("host", "hit", name, name))
                note(("host", "kept", name, name))
            load(cache, request, blocks)

        def stored(cache, request, blocks):
            missing = store(cache, request, blocks)
            for name in missing or ():
                note(("host", "kept", name, name))
            return missing

        def evicted(cache, group, most, kept):
            before = {*cache._readers}
            found = evict(cache, group, most, kept)
            for name in sorted(before - {*cache._readers}):
                note(("host", "gone", name, name))
            return found

        def dropped(cache, names):
            for name in names:
                note(("host", "gone", name, name))
            drop(cache, names)

        stores: list[Store] = []

        def place_of(store):
            if store not in stores:
                stores.append(store)
            return f"store {stores.index(store)}"

        def connected(tier, clock, load, store):
            for link in tier.behind:
                place_of(link.store)
            connect(tier, clock, load, store)

        def placed(store, names, now):
            before = {*store._ready}
            found = place(store, names, now)
            for name in sorted(before - {*store._ready}):
                note((place_of(store), "gone", name, name))
            note((place_of(store), "settled", now, None))
            return found

        def written(store, names, now, until):
            for name in names:
                note((place_of(store), "kept", name, name))
            write(store, names, now, until)
            note((place_of(store), "settled", now, None))

        def read(store, names, now):
            for name in names:
                note((place_of(store), "hit", name, name))
                note((place_of(store), "kept", name, name))
            begin(store, names, now)
            note((place_of(store), "settled", now, None))

        changed = {
            Store: {"place": placed, "write": written, "begin_read": read},
            CacheLog: {"settle": settled},
            GroupCache: {"enter": entered},
            HostTier: {"_record": recorded, "connect": connected},
            HostCache: {"start_load": loaded, "start_store": stored, "_evict": evicted, "drop": dropped},
        }
        pool = mock.patch("fragmeter.sim.memory.paged.counts.BlockPool", Told)
        return [pool, *(mock.patch.multiple(owner, **names) for owner, names in changed.items())]


def told(kind: str, seed: int) -> tuple[Run, list[tuple[Any, ...]]]:
    diary = Diary()
    patches = diary.patches()
    for patch in patches:
        patch.start()
    try:
        return served(kind, seed), diary.lines
    finally:
        for patch in patches:
            patch.stop()


def by_walking(run: Run, lines: list[tuple[Any, ...]], tier: str) -> list[tuple[int, int, int, str]]:
    """Each stay: ticks from and to, hash and worth."""

    def ticks(place: int) -> int:
        moment = next((each[2] for each in lines[place:] if each[:2] == (tier, "settled")), None)
        assert moment is not None
        return moment if tier != "gpu" else int(ticks_of(run.log, np.array([moment]))[0])

    found = []
    for place, (of, what, block, name) in enumerate(lines):
        if (of, what) != (tier, "kept"):
            continue
        for later, (of_other, how, other, _) in enumerate(lines[place + 1 :], place + 1):
            if of_other == tier and how in ("hit", "gone") and other == block:
                again = any(each[:2] == (tier, "asked") and name in each[3] for each in lines[later:])
                worth = "hit_later" if how == "hit" else "too_late" if again else "never"
                found.append((ticks(place), ticks(later), name, worth))
                break
        else:
            found.append((ticks(place), run.log.end_ticks, name, "undecided"))
    return found


def on_gpu(run: Run, lines: list[tuple[Any, ...]]) -> dict[int, list[tuple[int, int]]]:
    """Spans in which blocks of the GPU have each hash, in ticks: one for each block, so that they may overlap."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for place, (of, what, block, name) in enumerate(lines):
        if (of, what) == ("gpu", "named"):
            gone = [at for at, line in enumerate(lines) if at > place and line[:3] == ("gpu", "gone", block)]
            since, until = (
                next((line[2] for line in lines[at:] if line[:2] == ("gpu", "settled")), None) if at else None
                for at in (place, gone[0] if gone else 0)
            )
            assert since is not None
            start = int(ticks_of(run.log, np.array([since]))[0])
            end = run.log.end_ticks if until is None else int(ticks_of(run.log, np.array([until]))[0])
            spans.setdefault(name, []).append((start, end))
    return spans


def covered(spans: list[tuple[int, int]], since: int, until: int) -> int:
    """Ticks of a span that others cover."""
    edges = sorted({since, until, *(min(max(edge, since), until) for span in spans for edge in span)})
    return sum(
        end - start
        for start, end in zip(edges, edges[1:])
        if any(first <= start and end <= last for first, last in spans)
    )


@each_kind
def test_every_cached_slot_has_the_worth_that_looking_ahead_gives(kind):
    seen = Counter()
    for seed in range(5):
        run, lines = told(kind, seed)
        worth = cache_worth(run)
        if worth is None:
            continue
        expected = dict.fromkeys(WORTHS, 0)
        for since, until, _, name in by_walking(run, lines, "gpu"):
            expected[name] += (until - since) * run.replica.block_size
        assert worth.slot_ticks() == expected
        seen.update(name for name, ticks in expected.items() if ticks)
    assert {*seen} >= {"too_late", "never", "undecided"}


@pytest.mark.parametrize(
    "kind", ["host", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("store", "windows and host"))]
)
def test_every_slot_of_a_tier_has_the_worth_that_looking_ahead_gives(kind):
    seen: dict[str, Counter[str]] = {}
    for seed in range(5 if kind != "store" else 8):
        run, lines = told(kind, seed)
        spans = on_gpu(run, lines)
        tiers = ["host", *(f"store {place}" for place in range(len(run.replica.memory.transfers.behind)))]
        for tier, found in zip(tiers, tier_slot_ticks(run), strict=True):
            expected, stays = dict.fromkeys(HOST_WORTHS, 0), by_walking(run, lines, tier)
            for since, until, name, worth in stays:
                duplicate = covered(spans.get(name, []), since, until)
                expected["duplicate"] += duplicate * run.replica.block_size
                expected[worth] += (until - since - duplicate) * run.replica.block_size
            assert found == expected
            seen.setdefault(tier, Counter()).update(name for name, ticks in expected.items() if ticks)
            for since, until, name, _ in stays:
                spans.setdefault(name, []).append((since, until))
    on_host, behind = {*seen.pop("host")}, {worth for worths in seen.values() for worth in worths}
    assert kind == "store" or on_host >= {*HOST_WORTHS} - ({"hit_later"} if kind != "host" else set())
    assert kind != "store" or behind == {*HOST_WORTHS}


@each_kind
def test_the_worths_add_up_on_the_gpu_in_every_row_and_on_the_host_over_time(kind):
    for seed in range(8):
        run = served(kind, seed)
        worth = cache_worth(run)
        if worth is None:
            continue
        assert all((column >= 0).all() for column in worth.at_rows.values())
        assert (sum(worth.at_rows.values()) == run.accounts.at_rows()["cached"]).all()
        assert sum(worth.slot_ticks().values()) == run.accounts.window().slot_ticks["cached"]
        tier = run.replica.memory.transfers
        if tier is not None:
            levels = tier.levels.columns()
            until = np.append(levels["ticks"][1:], run.log.end_ticks)
            blocks = int((levels["used_blocks"] * (until - levels["ticks"])).sum())
            assert sum(tier_slot_ticks(run)[0].values()) == blocks * run.replica.block_size
            for link, ticks in zip(tier.behind, tier_slot_ticks(run)[1:], strict=True):
                levels = link.store.levels.columns()
                until = np.append(levels["ticks"][1:], run.log.end_ticks)
                blocks = int((levels["used_blocks"] * (until - levels["ticks"])).sum())
                assert sum(ticks.values()) == blocks * run.replica.block_size


def longest(seen: set[int], names: list[int], tokens: int, groups: PageGroups, size: int) -> int:
    """The longest prefix, in blocks, that each group can continue from if it has all of ``seen``; by trying all lengths."""

    def has(place: int, start: int, stop: int) -> bool:
        return all(names[at] * groups.number + place in seen for at in range(max(0, start), stop))

    def goes_on(place: int, kind: str, blocks: int) -> bool:
        window = -(-(groups.window_tokens - 1) // size)
        needed = {"full": blocks, "sliding": window, "state": 1}[kind]
        return has(place, blocks - needed, blocks + groups.drops_block)

    # Which drafters drop a block of other groups is not tried here.
    assert not groups.drops_block or groups.kinds == ("full",)
    lengths = range((tokens - 1) // size - groups.drops_block, 0, -1)
    return next((each for each in lengths if all(goes_on(*at, each) for at in enumerate(groups.kinds))), 0)


@each_kind
def test_an_infinite_cache_of_groups_hits_what_all_named_blocks_give(kind):
    """Each look-up, beside the longest prefix of all blocks that were named before it; and the bounds of these."""
    beyond = missed = 0
    for seed in range(6):
        run, lines = told(kind, seed)
        kept, bounds, groups = run.replica.memory.contents_kept, cache_bounds(run), run.replica.memory.groups
        if kept is None or bounds is None:
            continue
        assert bounds.hits <= bounds.fixed_schedule <= bounds.infinite <= bounds.asked
        hit = run.replica.cache_log.look_up_columns()["hit_tokens"] // run.replica.block_size
        alone = groups.number == 1 and not groups.drops_block
        assert bounds.hits == hit.sum() and (bounds.closing_blocks is None) == (not alone)
        missed += bounds.infinite - bounds.hits
        if (found := kept.could_hit()) is None:
            continue
        seen: set[int] = set()
        most = []
        for of, what, block, name in lines:
            if (of, what) == ("gpu", "named"):
                seen.add(name)
            elif of == "look-up":
                most.append(longest(seen, name, block, groups, run.replica.block_size))
        assert found.blocks.tolist() == most
        assert (found.blocks >= hit).all() and bounds.infinite <= found.blocks.sum()
        beyond += int((found.blocks > hit).sum())
    assert missed and (beyond or groups.kinds == ("full",))
