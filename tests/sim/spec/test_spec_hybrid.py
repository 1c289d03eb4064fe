"""How layers of real models are put into groups, and what that makes of pools and of sequences: figures by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.replica import build
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.spec import Deployment, Span, gpu, hybrid_layout, model, page_bytes, paper_num_blocks
from fragmeter.sim.spec.shape import ModelSpec
from fragmeter.sim.workload.workload import Workload
from paths import ROOT


@pytest.mark.parametrize(
    ("name", "full", "sliding", "window"),
    [
        ("gpt-oss-120b", [18], [18], 128),
        # 52 sliding layers in groups of at most 10.
        ("gemma-3-27b", [10], [9, 9, 9, 9, 8, 8], 1024),
        ("mistral-7b-v0.1", [], [32], 4096),
    ],
)
def test_groups_of_real_models(name, full, sliding, window):
    layout = hybrid_layout(model(name), model(name).max_model_len)
    # In the order of the first layers: these three begin with a window.
    assert [group.num_layers for group in layout.groups] == sliding + full
    assert (layout.num_sliding, layout.window_tokens) == (len(sliding), window)
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(model(name).num_layers))
    assert {group.span for group in layout.groups[: len(sliding)]} == {Span("sliding", window)}


@pytest.mark.parametrize("name", ["opt-13b", "llama-3.1-8b", "llama-4-scout", "deepseek-v3", "mixtral-8x7b"])
def test_no_groups_without_a_window(name):
    """Chunks are kept whole, as vLLM does by default."""
    assert hybrid_layout(model(name), model(name).max_model_len) is None


def test_a_window_that_no_sequence_leaves_makes_no_groups():
    assert hybrid_layout(model("mistral-7b-v0.1"), 4096) is None
    assert hybrid_layout(model("mistral-7b-v0.1"), 4097) is not None


def mixed(full: int, sliding: int) -> ModelSpec:
    """So many layers of either kind, the full ones first."""
    spans = (Span(),) * full + (Span("sliding", 8),) * sliding
    return ModelSpec("mixed", full + sliding, 64, 4, 4, 16, 100, 100, 4096, True, spans=spans)


@pytest.mark.parametrize(
    ("full", "sliding", "groups"),
    [
        (2, 4, [2, 2, 2]),
        (4, 2, [2, 2, 2]),
        # 5 is less than 1.5 times 4, and 6 is not.
        (4, 5, [4, 5]),
        (4, 6, [4, 3, 3]),
        (2, 7, [2, 2, 2, 2, 1]),
    ],
)
def test_the_rarer_kind_decides_unless_the_other_is_hardly_commoner(full, sliding, groups):
    layout = hybrid_layout(mixed(full, sliding), 100)
    assert [group.num_layers for group in layout.groups] == groups


def test_layers_of_a_kind_are_dealt_out_by_turns():
    assert [group.layers for group in hybrid_layout(mixed(2, 4), 100).groups] == [(0, 1), (2, 4), (3, 5)]


def test_pools_in_pages():
    """A page of gpt-oss spans 18 of 36 layers, so a pool has twice as many; one of Gemma 3 spans 10 of 62."""
    for name, layers, page in (("gpt-oss-120b", 36, 18), ("gemma-3-27b", 62, 10), ("mistral-7b-v0.1", 32, 32)):
        spec, card = model(name), gpu("h200")
        layout = hybrid_layout(spec, spec.max_model_len)
        blocks, pages = (paper_num_blocks(spec, card, 4, 16, Deployment(), hybrid) for hybrid in (None, layout))
        assert blocks * layers <= pages * page + page - 1 < (blocks + 1) * layers + page - 1
        assert page_bytes(spec, layout, 4, 16) == 16 * page * spec.slot_bytes("fp16", 4) // layers
    assert paper_num_blocks(model("opt-13b"), gpu("a100-40gb"), 1) == 983


def test_a_stage_has_its_share_of_every_group():
    """Gemma 3 in two stages of 31 layers: of the ten full layers five lie in either, and of a sliding group at most
    five, as vLLM's groups take layers by turns."""
    spec = model("gemma-3-27b")
    layout = hybrid_layout(spec, spec.max_model_len)
    assert [layout.largest(stage).num_layers for stage in (range(31), range(31, 62))] == [5, 5]
    assert page_bytes(spec, layout, 1, 16, Deployment(pipeline_parallel=2)) == 16 * 5 * 8192


def test_bytes_of_a_sequence_of_eight_thousand_tokens():
    """By hand, with 8,192 tokens computed, in blocks of 16, under vllm-v1; docs/policies.md has these figures.

    gpt-oss-120b: 2 * 8 heads * 64 * 2 bytes = 2,048 a token and layer. A page is 16 * 18 * 2,048 = 589,824 bytes. The
    full group holds 512 pages. The window of the last token starts at 8,191 - 127 = 8,064 = 504 blocks: 8 pages.
    gemma-3-27b: 8,192 bytes a token and layer, 16 * 10 * 8,192 = 1,310,720 a page. 512 pages, and in each of six groups
    512 - (8,191 - 1,023) / 16 = 64.
    """
    for name, pages, page, whole in (
        ("gpt-oss-120b", 512 + 8, 589_824, 512 * 16 * 36 * 2_048),
        ("gemma-3-27b", 512 + 6 * 64, 1_310_720, 512 * 16 * 62 * 8_192),
    ):
        run = simulate(
            settings(
                model=name,
                policy="vllm-v1",
                gpu="h200",
                leap=False,
                async_scheduling=False,
                enable_prefix_caching=False,
            ),
            Workload("lone", [0], [8_100], [93]),
        )
        free = run.accounts.at_rows()["free"] // 16
        # One page is the null block.
        held = run.replica.num_blocks - 1 - int(free[-1])
        assert held == pages
        assert run.replica.page_bytes == page
        without = 8_192 * model(name).slot_bytes()
        assert without == whole
        assert f"{held * page / 1e6:,.0f} MB in place of {without / 1e6:,.0f} MB" in policies_page()


def policies_page() -> str:
    return " ".join((ROOT / "docs" / "policies.md").read_text().split())


def test_what_every_policy_does_with_a_window():
    """Those that know groups have pages; the others, and all where the manager is off, keep every token."""
    pools = {
        (policy, off): build(
            settings(model="gpt-oss-120b", gpu="h200", policy=policy, disable_hybrid_kv_cache_manager=off)
        )
        for policy in ("vllm-v1", "vllm-v0", "vllm-sosp23", "sarathi", "tgi", "vattention", "orca")
        for off in (False, True)
    }
    with_groups = {key for key, replica in pools.items() if replica.layout}
    assert with_groups == {("vllm-v1", False), ("vllm-v0", False), ("vllm-sosp23", False)}
    assert pools["vllm-v1", False].num_blocks // 2 == pools["vllm-v1", True].num_blocks
    assert pools["vllm-v0", False].num_blocks // 2 == pools["orca", True].num_blocks


def test_the_swap_space_has_blocks_of_one_group():
    for policy in ("vllm-v0", "vllm-sosp23"):
        chosen = settings(model="gpt-oss-120b", gpu="h200", policy=policy, preemption_mode="swap")
        whole = build(replace(chosen, disable_hybrid_kv_cache_manager=True)).host_blocks
        assert build(chosen).host_blocks // 2 == whole > 0
        assert build(replace(chosen, preemption_mode="recompute")).host_blocks == 0
