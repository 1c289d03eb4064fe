"""Block contents numbered with what precedes them, and how many blocks of a prompt are looked up."""

from __future__ import annotations

import pytest

from fragmeter.sim.memory.prefix import HashChain, lookup_blocks


@pytest.mark.parametrize(
    ("prompt_tokens", "block_size", "blocks"),
    [(1, 16, 0), (15, 16, 0), (16, 16, 0), (17, 16, 1), (32, 16, 1), (33, 16, 2), (5, 1, 4), (1, 1, 0)],
)
def test_a_hit_covers_full_blocks_and_never_the_last_token(prompt_tokens, block_size, blocks):
    assert lookup_blocks(prompt_tokens, block_size) == blocks


def test_a_number_of_the_chain_is_a_whole_prefix():
    chain = HashChain()
    assert chain.extend("abc") == [1, 2, 3]
    assert chain.extend("abd") == [1, 2, 4]
    assert chain.extend("bab") == [5, 6, 7], "the same contents behind others are other blocks"
    assert chain.extend("cd", prefix=2) == [3, 8]
    assert chain.extend("") == []
    assert chain.parents == [0, 0, 1, 2, 2, 0, 5, 6, 3]
