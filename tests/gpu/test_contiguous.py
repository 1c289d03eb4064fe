"""Decode attention over a contiguous cache: the paged kernel with another rule of a token's slot."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.ops import contiguous
from fragmeter.sim.types.errors import KernelFault, SettingError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

#: Ragged: an empty sequence, one token, ends within a tile and past one.
CONTEXTS = [64, 70, 0, 1, 133]


def case(dtype: str, heads: tuple[int, int], head_dim: int, contexts: list[int]) -> gpu_cases.Case:
    """Sequences in a row with room after each, as blocks of one token in order; all other slots are NaN."""
    given = gpu_cases.case(dtype, heads, head_dim, 1, contexts)
    slots = sum(contexts) + 5 * len(contexts)
    starts = np.cumsum([0, *contexts[:-1]]) + 5 * np.arange(len(contexts))
    scattered = given.key_cache, given.value_cache
    caches = [np.full((slots, *cache.shape[1:]), np.nan, cache.dtype) for cache in scattered]
    for laid, cache in zip(caches, scattered, strict=True):
        for start, table, context in zip(starts, given.block_tables, contexts, strict=True):
            laid[start : start + context] = cache[table[:context]]
    tables = (starts[:, None] + np.arange(max(contexts))).astype(np.int32)
    return replace(given, key_cache=caches[0], value_cache=caches[1], block_tables=tables)


def arguments(given: gpu_cases.Case) -> dict:
    return dict(
        query=given.query,
        key_cache=given.key_cache[:, 0],
        value_cache=given.value_cache[:, 0],
        slot_starts=given.block_tables[:, 0].astype(np.int64),
        context_lens=given.context_lens,
        max_context_len=given.max_context_len,
    )


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim"),
    [("float32", (4, 2), 64), ("float16", (8, 2), 128), ("bfloat16", (5, 5), 80), ("float16", (16, 1), 256)],
)
def test_it_agrees_with_float64(dtype, heads, head_dim):
    given = case(dtype, heads, head_dim, CONTEXTS)
    out = contiguous.forward(**arguments(given), check_ids=True)
    assert gpu_cases.error(out, gpu_cases.expected(given)) <= gpu_cases.TOLERANCE[dtype]


def test_long_contexts_are_split_as_paged_ones_are():
    """Bit for bit the paged kernel's result over the same tokens."""
    given = case("float16", (8, 2), 64, [1100, 300, 1])
    assert contiguous.forward(**arguments(given)).tobytes() == gpu_cases.run(given).tobytes()


def test_slots_take_64_bits():
    """2,097,280 slots of 8 KV heads of 128: the last ones begin past 2**31 scalars."""
    near = arguments(case("float16", (16, 8), 128, [130]))
    far = dict(near, slot_starts=near["slot_starts"] + 2**21)
    for name in ("key_cache", "value_cache"):
        far[name] = np.zeros((2**21 + len(near[name]), 8, 128), np.float16)  # takes memory only where it is written
        far[name][2**21 :] = near[name]
    assert contiguous.forward(**far).tobytes() == contiguous.forward(**near).tobytes()


@pytest.mark.parametrize("wrong", ["*ids + token + 1", "*ids", "ids[token] + token"])
def test_a_planted_bug_is_caught(wrong, monkeypatch):
    gpu_cases.plant_attention(monkeypatch, "return *ids + token;", f"return {wrong};")
    with pytest.raises((AssertionError, KernelFault)):
        test_it_agrees_with_float64("float16", (8, 2), 128)


MISTAKES = {
    "slot_starts.dtype = 'int32'": dict(slot_starts=np.zeros(2, np.int32)),
    "slot_starts.shape = (3,)": dict(slot_starts=np.zeros(3, np.int64)),
    "slot_starts[1] = 61": dict(slot_starts=np.array([0, 61])),
    "slot_starts[0] = -1": dict(slot_starts=np.array([-1, 0])),
    "context_lens[1] = 41": dict(context_lens=np.array([40, 41], np.int32)),
    "context_lens.shape = (1,)": dict(context_lens=np.zeros(1, np.int32)),
    "key_cache.shape = (2, 16, 2, 64)": dict(key_cache=np.zeros((2, 16, 2, 64), np.float16)),
    "max_context_len = -1": dict(max_context_len=-1),
    "num_heads = 7": dict(query=np.zeros((2, 7, 64), np.float16)),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_clear_line(message):
    given = arguments(case("float16", (8, 2), 64, [40, 20])) | MISTAKES[message]  # 70 slots
    with pytest.raises(SettingError) as caught:
        contiguous.forward(**given, check_ids=True)
    assert str(caught.value).startswith(f"{message}: ")
