"""Groups with pages of several sizes, by hand, and the KV cache of GLM-5.3-Flash that is made of them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fragmeter.sim.spec import CacheSettings, KvCacheConfig, cache_layers, form_kv_cache, model, packed_groups
from fragmeter.sim.spec.hybrid import formed_layout, require_block_sizes
from fragmeter.sim.types.errors import SimulationFault

GLM = "glm-5.3-flash"
SETTINGS = CacheSettings(max_model_len=131_072, max_num_batched_tokens=8192, block_size=128)


def _packed(pattern: str, **pages: int) -> list[str]:
    """The letters of each group: S a state, R a ring, L a latent vector and K a key, which form one kind."""
    kinds = [{"L": "latent", "K": "latent"}.get(letter, letter) for letter in pattern]
    sizes = [pages[letter] for letter in pattern]
    groups = packed_groups.packed_groups(kinds, sizes, [letter in "SR" for letter in pattern])
    assert sorted(layer for group in groups for layer in group) == list(range(len(pattern)))
    return ["".join(pattern[layer] for layer in group) for group in groups]


def test_a_group_has_as_many_states_as_there_are_latent_vectors():
    assert _packed("SSLKSLKS", S=10, L=10, K=1) == ["SS", "SS", "LKLK"]


def test_keys_have_room_for_a_state_more():
    """3 pages of 10 fit beside each other in 2 * (10 + 5) bytes, and not in 2 * (10 + 4)."""
    assert _packed("SSLKSLK", S=10, L=10, K=5) == ["SSS", "LKLK"]
    assert _packed("SSLKSLK", S=10, L=10, K=4) == ["SS", "S", "LKLK"]


def test_rings_are_one_group_however_many_they_are():
    assert _packed("SLKRSLKR", S=10, L=10, K=1, R=1) == ["SS", "LKLK", "RR"]


def test_layers_take_turns():
    kinds, pages = [0, 0, 1, 1, 0, 1, 1, 0], [8, 8, 8, 1, 8, 8, 1, 8]
    groups = packed_groups.packed_groups(kinds, pages, [kind == 0 for kind in kinds])
    assert groups == [(0, 4), (1, 7), (2, 3, 5, 6)]


@pytest.mark.parametrize(
    ("states", "sizes"),
    [
        # One state of another size: its partners would be in no group.
        ([10, 10, 10, 10, 12], "4 of 10 bytes, 1 of 12 bytes"),
        # As many of each size, but two pairs for four groups.
        ([30, 1, 30, 1], "2 of 30 bytes, 2 of 1 bytes"),
    ],
)
def test_states_of_several_sizes_are_not_divided(states, sizes):
    kinds, pages = [0] * len(states) + [1, 1], [*states, 10, 5]
    with pytest.raises(SimulationFault, match=f"groups of layers of the kind 0, .*: {sizes}"):
        packed_groups.packed_groups(kinds, pages, [kind == 0 for kind in kinds])


@pytest.mark.parametrize(
    ("states", "groups"),
    [
        ([10, 10, 10, 10, 12], [(0, 2), (1, 3), (4,), (5, 6)]),
        ([30, 1, 30, 1], [(0,), (2,), (1,), (3,), (4, 5)]),
        ([4, 4, 6], [(0, 1), (2,), (3, 4)]),
    ],
)
def test_states_of_several_sizes_are_several_kinds(states, groups):
    """The groups are those that vLLM 0.33 returned for these pages, with 1,024 bytes for 1."""
    pages = [*states, *([10, 5] if 1 in states else [10, 10])]
    kinds = [*states, "L", "L"]
    assert packed_groups.packed_groups(kinds, pages, [kind != "L" for kind in kinds]) == groups


def _formed(ranks: int, dtype: str = "bf16", export_tokens: int = 0) -> KvCacheConfig:
    return form_kv_cache(cache_layers(model(GLM), dtype, ranks, "bf16", export_tokens), SETTINGS)


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 4352), (2, 2176), (4, 1152), (8, 640)])
def test_blocks_of_glm_hold_a_state(ranks, tokens):
    """Three inputs of 3 * 8,192 channels in 16 bits and 64 matrices of 128 * 128 in 32 bits, in vectors of 1,024 bytes."""
    state = (3 * 3 * 8192 * 2 + 64 * 128 * 128 * 4) // ranks
    assert tokens == -(-state // (128 * 1024)) * 128
    formed = _formed(ranks)
    assert formed.block_size == tokens == formed.hash_block_size
    assert {spec.unpadded_page_size_bytes for group in formed.groups[:4] for spec in group.specs} == {state}


def test_groups_of_glm():
    formed = _formed(4)
    kinds = [(group.kind, len(group.layers), group.block_size) for group in formed.groups]
    states = [("state", number, 1152) for number in (9, 9, 8, 8)]
    assert kinds == [*states, ("mla", 22, 1152), ("ring", 11, 4)]
    # 11 latent vectors and 11 keys of 132 bytes for 4 tokens, in rows of 1,024 bytes and kernel blocks of 128 tokens.
    assert formed.groups[4].page_size_bytes == 1152 * 11 * (1024 + 33)
    assert formed.alignment_bytes == 33 * 1024
    assert formed.bytes_per_block % formed.alignment_bytes == 0
    assert 0 <= formed.bytes_per_block - formed.groups[4].page_size_bytes < formed.alignment_bytes
    # Key and gate of 128 elements of 4 tokens, in 16 bits.
    assert formed.groups[5].page_size_bytes == 11 * 4 * 2 * 128 * 2


def test_a_sequence_of_glm_has_one_ring_and_two_states_a_group_or_three():
    assert _formed(4).sequence_blocks(131_072) == 114 + 4 * 2 + 1
    assert _formed(4, export_tokens=16).sequence_blocks(131_072) == 114 + 4 * 3 + 1
    assert _formed(4).sequence_blocks(1) == 1 + 4 * 2 + 1


def test_the_layout_names_the_layers_of_the_model():
    layout = formed_layout(model(GLM), SETTINGS, "bf16", 4)
    require_block_sizes(model(GLM), layout, several=False)
    sparse = tuple(layer for layer in range(45) if layer % 4 == 3)
    assert layout.names == ("state.0", "state.1", "state.2", "state.3", "full_attention", "ring")
    assert layout.groups[4].layers == layout.groups[5].layers == sparse
    states = sorted(layer for group in layout.groups[:4] for layer in group.layers)
    assert states == [layer for layer in range(45) if layer not in sparse]
    # Whole pages of latent vectors and keys but for the alignment, and next to nothing of a ring.
    assert layout.page_padding(4) < 0.002 < 0.99 < layout.page_padding(5)
    assert all(before <= after for before, after in pairwise(layout.page_padding(place) for place in range(4)))
