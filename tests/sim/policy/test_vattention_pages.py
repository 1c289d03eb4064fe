"""vAttention's regions and page groups."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from engine_runs import buckets_at_rows
from fragmeter.experiments.story.one_second_step import OneSecondStep
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.replica import build
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.memory.paged.deferred import Regions
from fragmeter.sim.policy import server
from fragmeter.sim.policy.vattention import page_group
from fragmeter.sim.spec import gpu, model, paper_num_blocks
from fragmeter.sim.types.errors import SettingError, SimulationFault
from fragmeter.sim.types.sequence import Sequence
from fragmeter.sim.workload.workload import Workload

MIB = 1 << 20


class TestRegions:
    def test_the_tightest_that_holds_it_else_the_largest_of_equals_the_oldest(self):
        regions, one = Regions(), Sequence(0, 1, 1, 1)
        for pages in ([1, 2, 3, 4], [5], [6, 7], [8, 9]):
            regions.leave(one, pages)
        assert regions.enter(one, 2) == [6, 7] and regions.enter(one, 3) == [1, 2, 3]
        assert (regions.spare, regions.cached) == ({one: [4]}, 4)
        assert regions.enter(Sequence(1, 1, 1, 1), 3) == [8, 9]

    def test_unmaps_the_region_left_first_from_its_end_and_then_what_is_spare(self):
        regions, one, two = Regions(), Sequence(0, 1, 1, 1), Sequence(1, 1, 1, 1)
        for pages in ([1, 2, 3], [4, 5, 6]):
            regions.leave(one, pages)
        regions.enter(two, 2)
        regions.leave(one, [7, 8])
        assert regions.unmap(4) == [6, 5, 4, 8]
        assert (regions.deferred, regions.spare, regions.cached) == ([[7]], {two: [3]}, 2)
        assert regions.unmap(2) == [7, 3] and not regions.spare and not regions.deferred
        with pytest.raises(SimulationFault, match="1 pages are to be unmapped and 0 are cached"):
            regions.unmap(1)


# 2 MiB of K in a layer: 8 or 4 heads of 256 bytes a token; 40 or 20 heads: 204.8 and 409.6 tokens.
GROUPS = [
    ("llama-3.1-8b", 1, 1024, 2 * 32 * 2 * MIB),
    ("llama-3.1-8b", 2, 2048, 2 * 32 * 2 * MIB * 2),
    ("opt-13b", 1, 204, 2 * 40 * 2 * MIB),
    ("opt-13b", 2, 409, 2 * 40 * 2 * MIB * 2),
]


class TestPageGroups:
    @pytest.mark.parametrize(("name", "ranks", "tokens", "worst_bytes"), GROUPS)
    def test_the_worst_waste_of_a_request(self, name, ranks, tokens, worst_bytes):
        """A lone token: 2 * layers * page * TP bytes, less its own."""
        group, token_bytes = page_group(model(name), 2048, ranks), model(name).slot_bytes(tensor_parallel=ranks) * ranks
        assert group == (tokens, worst_bytes // ranks)
        for prompt in (1, 2, tokens, tokens + 1):
            run = simulate(
                settings(policy="vattention", model=name, tensor_parallel_size=ranks),
                Workload("one", np.array([0]), np.array([prompt]), np.array([1]), np.array([1])),
                OneSecondStep(),
            )
            buckets = buckets_at_rows(run)[0]
            held = sum(buckets.values()) - buckets["free"] - buckets["cached"]
            assert (buckets["live"], held - prompt) == (prompt, -prompt % tokens)
            wasted = held // tokens * group.rank_bytes * ranks - prompt * token_bytes
            # What no whole token fits into, at the end of every page.
            lost = (worst_bytes - tokens * token_bytes) * (held // tokens - 1)
            assert 0 <= wasted <= worst_bytes - token_bytes + lost
            assert (wasted == worst_bytes - token_bytes + lost) == (prompt % tokens == 1)
        assert lost == 0 or name == "opt-13b"

    @pytest.mark.parametrize(("page_size", "tokens"), [(2048, 204), (256, 25), (128, 12), (64, 6)])
    def test_the_pool_is_counted_in_their_bytes(self, page_size, tokens):
        """OPT-13B on an A100-40GB: 983 blocks of 16 tokens of 800 KiB, and what is left; groups of 80 pages."""
        slots = paper_num_blocks(model("opt-13b"), gpu("a100-40gb"), 1, 1)
        assert slots // 16 == 983
        built = build(settings(policy="vattention", page_size=page_size))
        assert (built.num_blocks, built.block_size) == (slots * 800 // (80 * page_size), tokens)

    def test_a_block_size_that_is_given_counts(self):
        built = build(settings(policy="vattention", block_size=16))
        assert (built.num_blocks, built.block_size) == (983, 16)

    def test_latent_vectors_have_one_page_a_layer(self):
        group = page_group(model("deepseek-v3"), 64)
        assert group == (65_536 // (576 * 2), 61 * 65_536)

    def test_mistakes_are_named(self):
        with pytest.raises(SettingError, match=r"page_size = 100: one of 64, 128, 256, 2048 \(KiB\)"):
            settings(policy="vattention", page_size=100)
        wide = replace(model("opt-13b"), head_dim=1024)
        with pytest.raises(SettingError, match="page_size = 64: holds less than a token of opt-13b; take larger pages"):
            page_group(wide, 64)
        with mock.patch.object(server, "paper_num_blocks", lambda *_: 204):
            with pytest.raises(SettingError, match="page_size = 2048: .* room for 204 tokens .*; take smaller pages"):
                build(settings(policy="vattention"))
