"""Our block pool beside vLLM's own ``BlockPool``: random requests take, cache, hit and free blocks in both."""

from __future__ import annotations

import numpy as np
import pytest
from vllm.v1.core.block_pool import BlockPool as RealPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from fragmeter.sim.memory.prefix import BlockPool, FreeKVCacheBlockQueue, LeastRecentlyUsed

from . import server

SIZE = 4


def real_hash(name: int) -> bytes:
    return name.to_bytes(8, "big")


class Both:
    """The same calls of both pools. vLLM's null block has id 0, so that its ids are ours and one more."""

    def __init__(self, num_blocks: int, order: type[FreeKVCacheBlockQueue]) -> None:
        self.real, self.ours = RealPool(num_blocks + 1, True, SIZE), BlockPool(num_blocks, order)

    def take(self, count: int) -> list[int]:
        blocks = self.ours.get_new_blocks(count)
        assert [block.block_id - 1 for block in self.real.get_new_blocks(count)] == blocks
        return blocks

    def find(self, names: list[int]) -> list[int]:
        found = []
        for name in names:
            block = self.real.get_cached_block(real_hash(name), [0])
            if block is None:
                break
            found.append(block[0].block_id - 1)
        assert self.ours.get_cached_blocks(names) == found
        return found

    def touch(self, blocks: list[int]) -> None:
        self.ours.touch(blocks)
        self.real.touch([self.real.blocks[block + 1] for block in blocks])

    def cache(self, blocks: list[int], names: list[int]) -> None:
        self.ours.cache_full_blocks(blocks, names)
        for place, (block, name) in enumerate(zip(blocks, names, strict=True), 1):
            key = make_block_hash_with_group_id(real_hash(name), 0)
            self.real._insert_block_hash(key, self.real.blocks[block + 1], num_tokens=place * SIZE)

    def free(self, table: list[int]) -> None:
        self.ours.free_blocks(table)
        self.real.free_blocks(self.real.blocks[block + 1] for block in reversed(table))

    def compare(self, tables: list[list[int]]) -> None:
        queue = [block.block_id - 1 for block in self.real.free_block_queue.get_all_free_blocks()]
        assert list(self.ours.free_ids) == queue
        assert self.ours.reference_counts == [block.ref_cnt for block in self.real.blocks[1:]]
        assert sorted({*range(self.ours.num_blocks)} - {*queue}) == sorted(
            {block for table in tables for block in table}
        )
        hashed = [block.block_id - 1 for block in self.real.blocks[1:] if block.block_hash is not None]
        assert self.ours.hashed_ids().tolist() == hashed
        assert self.ours.num_cached == len({*hashed} & {*queue})


def play(seed: int, order: type[FreeKVCacheBlockQueue]) -> int:
    """Random requests. Returns how many blocks they hit."""
    rng, both, hits = np.random.default_rng(seed), Both(24, order), 0
    tables: list[list[int]] = []
    for _ in range(120):
        if tables and rng.random() < 0.45:
            both.free(tables.pop(int(rng.integers(len(tables)))))
        else:
            text, length = int(rng.integers(1, 4)), int(rng.integers(1, 8))
            names = [text * 100 + min(place, 90) for place in range(length)]
            found = both.find(names[: length - 1])
            rest = length - len(found)
            if rest > both.ours.num_free - sum(not both.ours.ref_cnt[block] for block in found):
                continue
            both.touch(found)
            table = found + both.take(rest)
            full = int(rng.integers(len(found), length + 1))
            both.cache(table[len(found) : full], names[len(found) : full])
            hits += len(found)
            tables.append(table)
        both.compare(tables)
    return hits


@pytest.mark.parametrize("seed", range(40))
def test_every_block_is_that_of_vllms_pool(seed: int):
    assert play(seed, FreeKVCacheBlockQueue) > 0


@pytest.mark.parametrize("seed", range(10))
def test_and_with_the_queue_of_older_releases(seed: int):
    with server.older_free_queue():
        assert play(seed, LeastRecentlyUsed) > 0


def test_the_order_of_another_release_is_noticed():
    with pytest.raises(AssertionError):
        for seed in range(5):
            play(seed, LeastRecentlyUsed)
