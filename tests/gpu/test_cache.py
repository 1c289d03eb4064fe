"""Cache writes and block copies, byte for byte."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.ops import cpu_kernels, source
from fragmeter.gpu.ops.cache import copy_blocks, reshape_and_cache, swap_blocks
from fragmeter.sim.types.errors import KernelFault, SettingError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bits, NaNs among them."""
    wanted = np.dtype(gpu_cases.DTYPES[dtype])
    return rng.integers(0, 256, (*shape, wanted.itemsize), np.uint8).view(wanted)[..., 0]


def tokens_and_caches(dtype: str, tokens: int = 7, kv_heads: int = 3, head_dim: int = 80, block_size: int = 5):
    rng = np.random.default_rng(0)
    new = [drawn(rng, (tokens, kv_heads, head_dim), dtype) for _ in "kv"]
    return *new, *(drawn(rng, (6, block_size, kv_heads, head_dim), dtype) for _ in "kv")


@pytest.mark.parametrize("dtype", gpu_cases.DTYPES)
def test_tokens_go_to_their_slots_and_nothing_else_changes(dtype):
    key, value, key_cache, value_cache = tokens_and_caches(dtype)
    slots = np.array([29, -1, 0, 13, 14, -1, 7])
    wanted = [cache.copy() for cache in (key_cache, value_cache)]
    for new, cache in zip((key, value), wanted, strict=True):
        for token, slot in enumerate(slots):
            if slot >= 0:
                cache[slot // 5, slot % 5] = new[token]
    reshape_and_cache(key, value, key_cache, value_cache, slots, check_ids=True)
    # Compared one by one: pytest would take minutes to show how long lists of bytes differ.
    found = key_cache, value_cache
    assert all(cache.tobytes() == expected.tobytes() for cache, expected in zip(found, wanted, strict=True))


def test_a_row_may_be_wider_than_a_block_of_threads():
    key, value, key_cache, value_cache = tokens_and_caches("float32", 2, 40, 128)
    reshape_and_cache(key, value, key_cache, value_cache, np.array([3, 11]))
    assert key_cache[0, 3].tobytes() == key[0].tobytes()
    assert value_cache[2, 1].tobytes() == value[1].tobytes()


@pytest.mark.parametrize("dtype", gpu_cases.DTYPES)
def test_blocks_are_copied_in_all_layers(dtype):
    rng = np.random.default_rng(1)
    caches = [drawn(rng, (6, 5, 3, 80), dtype) for _ in range(6)]
    wanted = [cache.copy() for cache in caches]
    for cache in wanted:
        cache[[1, 2, 5]] = cache[[0, 0, 4]]
    copy_blocks(caches[:3], caches[3:], np.array([[0, 1], [0, 2], [4, 5]]), check_ids=True)
    assert all(cache.tobytes() == expected.tobytes() for cache, expected in zip(caches, wanted, strict=True))


def test_no_pairs_copy_nothing():
    *_, key_cache, value_cache = tokens_and_caches("float16")
    before = key_cache.tobytes()
    copy_blocks([key_cache], [value_cache], np.zeros((0, 2), np.int64))
    assert key_cache.tobytes() == before


@pytest.mark.parametrize("dtype", gpu_cases.DTYPES)
def test_blocks_are_swapped_and_neighbours_go_together(dtype, monkeypatch):
    rng = np.random.default_rng(2)
    device, host = drawn(rng, (9, 5, 3, 80), dtype), drawn(rng, (6, 5, 3, 80), dtype)
    pairs = np.array([[5, 2], [0, 4], [4, 1], [3, 0], [6, 5], [1, 3]])
    wanted = host.copy()
    for block, place in pairs:
        wanted[place] = device[block]
    copied, copy = [], cpu_kernels.CpuKernels.copy

    def watched(kernels, source, destination, spans):
        copied.extend(spans)
        copy(kernels, source, destination, spans)

    monkeypatch.setattr(cpu_kernels.CpuKernels, "copy", watched)
    swap_blocks(device, host, pairs)
    assert host.tobytes() == wanted.tobytes()
    size = device[0].nbytes
    # Blocks 3, 4 and 5 follow on in both caches; 0 and 1, and 5 and 6, only on the device.
    assert [tuple(place // size for place in span) for span in copied] == [(0, 4, 1), (1, 3, 1), (3, 0, 3), (6, 5, 1)]


def test_swapping_there_and_back_restores_a_block():
    rng = np.random.default_rng(3)
    device, host = drawn(rng, (4, 2, 1, 64), "float16"), np.zeros((2, 2, 1, 64), np.float16)
    before = device.copy()
    swap_blocks(device, host, np.array([[3, 0], [1, 1]]))
    device[:] = 0
    swap_blocks(host, device, np.array([[0, 3], [1, 1]]))
    assert device[[1, 3]].tobytes() == before[[1, 3]].tobytes()
    assert not device[[0, 2]].any()
    swap_blocks(device, host, np.zeros((0, 2), np.int64))


SWAP_MISTAKES = {
    "block_mapping[1, 0] = 4": dict(block_mapping=np.array([[0, 1], [4, 0]])),
    "block_mapping[0, 1] = 2": dict(block_mapping=np.array([[0, 2], [1, 0]])),
    "block_mapping[0, 0] = -1": dict(block_mapping=np.array([[-1, 2]])),
    "block_mapping = 1": dict(block_mapping=np.array([[0, 1], [2, 1]])),
    "block_mapping.dtype = 'int32'": dict(block_mapping=np.zeros((1, 2), np.int32)),
    "block_mapping = 'list'": dict(block_mapping=[(0, 1)]),
    "destination_cache.dtype = 'float32'": dict(destination_cache=np.zeros((2, 2, 1, 64), np.float32)),
    "destination_cache.shape = (2, 4, 1, 64)": dict(destination_cache=np.zeros((2, 4, 1, 64), np.float16)),
}


@pytest.mark.parametrize("message", SWAP_MISTAKES)
def test_a_swapping_mistake_is_one_clear_line(message):
    right = dict(
        source_cache=np.zeros((4, 2, 1, 64), np.float16),
        destination_cache=np.zeros((2, 2, 1, 64), np.float16),
        block_mapping=np.array([[0, 1]]),
    )
    with pytest.raises(SettingError) as caught:
        swap_blocks(**right | SWAP_MISTAKES[message])
    assert str(caught.value).startswith(f"{message}: ")


def test_within_one_cache_no_source_is_a_destination():
    cache = np.zeros((4, 2, 1, 64), np.float16)
    with pytest.raises(SettingError, match="block_mapping = 1: a destination is named once, and is not a source"):
        swap_blocks(cache, cache, np.array([[0, 1], [1, 2]]))


#: What is wrong; in which kernel; its line; what it becomes.
BUGS = {
    "padding is written": ("reshape_and_cache", "    if (slot < 0) return;\n", ""),
    "values go to the keys": ("reshape_and_cache", "store16(value_cache", "store16(key_cache"),
    "the end of a row is left out": ("reshape_and_cache", "load < row_loads", "load < row_loads - 1"),
    "the destination is its own source": ("copy_blocks", "pairs[2 * blockIdx.x] *", "pairs[2 * blockIdx.x + 1] *"),
    "only the first layer is copied": ("copy_blocks", "value_caches[blockIdx.y]", "value_caches[0]"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug, monkeypatch):
    name, right, wrong = BUGS[bug]
    kernel = gpu_cases.planted(source.plain(name), right, wrong)
    monkeypatch.setattr(source, "plain", lambda _: kernel)
    story = {
        "reshape_and_cache": test_tokens_go_to_their_slots_and_nothing_else_changes,
        "copy_blocks": test_blocks_are_copied_in_all_layers,
    }[name]
    with pytest.raises((AssertionError, KernelFault)):
        story("float16")


def test_a_wild_slot_is_a_fault():
    arrays = tokens_and_caches("float16")
    with pytest.raises(KernelFault, match="reshape_and_cache: .* outside every array"):
        reshape_and_cache(*arrays, np.full(7, 10**6))


def mistaken(key=None, slots=None, pairs=None, layers=1) -> None:
    right_key, value, key_cache, value_cache = tokens_and_caches("float16")
    if pairs is not None:
        copy_blocks([key_cache], [value_cache] * layers, pairs, check_ids=True)
    else:
        slots = np.zeros(7, np.int64) if slots is None else slots
        reshape_and_cache(right_key if key is None else key, value, key_cache, value_cache, slots, check_ids=True)


MISTAKES = {
    "slot_mapping.dtype = 'int32'": dict(slots=np.zeros(7, np.int32)),
    "slot_mapping[6] = 30": dict(slots=np.array([0, 1, 2, 3, 4, 5, 30])),
    "slot_mapping[0] = -2": dict(slots=np.array([-2, 1, 2, 3, 4, 5, 30])),
    "value.shape = (7, 3, 80)": dict(key=np.zeros((7, 3, 64), np.float16)),
    "key.dtype = 'int8'": dict(key=np.zeros((7, 3, 80), np.int8)),
    "block_mapping[1, 1] = 6": dict(pairs=np.array([[0, 1], [2, 6]])),
    "block_mapping = 1": dict(pairs=np.array([[0, 1], [1, 2]])),
    "block_mapping = 3": dict(pairs=np.array([[0, 3], [1, 3]])),
    "block_mapping.shape = (3, 1)": dict(pairs=np.zeros((3, 1), np.int64)),
    "key_caches = 1": dict(pairs=np.array([[0, 1]]), layers=2),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_clear_line(message):
    with pytest.raises(SettingError) as caught:
        mistaken(**MISTAKES[message])
    assert str(caught.value).startswith(f"{message}: ")


def test_rows_must_be_whole_loads():
    key, value = (np.zeros((1, 1, 4), np.float16) for _ in "kv")
    with pytest.raises(SettingError, match="bytes of a head_dim = 8: must be a multiple of 16"):
        reshape_and_cache(key, value, *(np.zeros((2, 4, 1, 4), np.float16) for _ in "kv"), np.zeros(1, np.int64))
