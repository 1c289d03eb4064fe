"""Decode attention: the kernels' own source, built for the CPU, against float64; every shape is in test_gpu_grid."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.ops import arrays, paged_attention
from fragmeter.sim.types.errors import KernelFault, SettingError
from paths import ROOT

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

#: Ragged: none, one token, a full block of any size, ends within one.
CONTEXTS = [64, 70, 0, 1, 33]


def check(given: gpu_cases.Case, **how) -> None:
    dtype = given.query.dtype.name
    assert gpu_cases.error(gpu_cases.run(given, **how), gpu_cases.expected(given)) <= gpu_cases.TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", gpu_cases.DTYPES)
def test_blocks_share_sequences_and_have_several(dtype):
    """Ends at, before and after the edge of a granule; an empty sequence."""
    for blocks in (1, 3, 9):
        check(gpu_cases.case(dtype, (8, 2), 64, 16, [300, 192, 1, 0, 65]), blocks=blocks)


def test_blocks_may_be_larger_than_any_context():
    check(gpu_cases.case("float16", (8, 2), 64, 4096, [100, 3]))


def test_a_group_of_heads_may_end_within_a_block():
    """Ten heads a KV head: eight in one block, two in another."""
    check(gpu_cases.case("float32", (20, 2), 64, 16, CONTEXTS))
    check(gpu_cases.case("float32", (20, 2), 64, 16, [300, *CONTEXTS]), blocks=7)


def test_the_number_of_blocks_changes_rounding_only():
    given = gpu_cases.case("float32", (8, 2), 64, 16, [300, 17])
    one, five = (gpu_cases.run(given, blocks=blocks) for blocks in (1, 5))
    assert 0 < gpu_cases.error(one, five) < 1e-6


def test_the_order_of_threads_changes_nothing():
    given = gpu_cases.case("float16", (8, 2), 64, 16, CONTEXTS)
    first, *others = (gpu_cases.run(given, seed=seed).tobytes() for seed in range(4))
    assert others == [first] * 3


def test_large_scores_do_not_overflow():
    """Scores of about 1,000 apart: one token has all the weight."""
    given = gpu_cases.case("float32", (4, 2), 64, 16, [40])
    given.query[:] *= 200
    check(given)


def far_case() -> gpu_cases.Case:
    """32,769 blocks of 64 tokens and 8 KV heads of 128: the last one begins past 2**31 scalars."""
    return gpu_cases.case("float16", (16, 8), 128, 64, [130], num_blocks=32769)


def test_offsets_take_64_bits():
    check(far_case())


def test_a_planted_32_bit_offset_is_caught(monkeypatch):
    right = "return (slots.of(token) * kv_heads + kv_head) * kHeadDim;"
    gpu_cases.plant_attention(monkeypatch, right, right.replace("return ", "return (int)(").replace("Dim;", "Dim);"))
    with pytest.raises(KernelFault, match="outside every array"):
        check(far_case())


def test_a_wild_block_id_is_a_fault():
    given = gpu_cases.case("float16", (8, 2), 64, 16, [40, 20])
    given.block_tables[1, 1] = 10**6
    with pytest.raises(KernelFault, match=r"<__half, 64, 8, PagedTiles>: block \(\d, 0, 0\), .* outside every array"):
        gpu_cases.run(given)


def arguments(**changes) -> dict:
    return vars(gpu_cases.case("float16", (8, 2), 64, 16, [40, 20])) | changes


def test_forward_takes_arrays_and_gives_one_like_the_query():
    given = arguments()
    out = paged_attention.forward(**given, check_ids=True)
    assert out.dtype == np.float16
    assert gpu_cases.error(out, gpu_cases.expected(gpu_cases.Case(**given))) <= 1e-3
    filled = np.empty_like(out)
    assert paged_attention.paged_attention_cuda_forward(filled, **given) is None
    assert filled.tobytes() == out.tobytes()


def test_an_empty_batch_gives_an_empty_array():
    given = arguments()
    for name in ("query", "block_tables", "context_lens"):
        given[name] = given[name][:0]
    assert paged_attention.forward(**given).shape == (0, 8, 64)


MISTAKES = {
    "head_dim = 72": dict(query=np.zeros((2, 8, 72), np.float16)),
    "query.dtype = 'float64'": dict(query=np.zeros((2, 8, 64))),
    "query.shape = (2, 64)": dict(query=np.zeros((2, 64), np.float16)),
    "num_heads = 7": dict(query=np.zeros((2, 7, 64), np.float16)),
    "key_cache.dtype = 'float32'": dict(key_cache=np.zeros((5, 16, 2, 64), np.float32)),
    "key_cache.shape = (5, 8, 2, 64)": dict(key_cache=np.zeros((5, 8, 2, 64), np.float16)),
    "value_cache.shape = (1, 16, 2, 64)": dict(value_cache=np.zeros((1, 16, 2, 64), np.float16)),
    "block_tables.dtype = 'int64'": dict(block_tables=np.zeros((2, 4), np.int64)),
    "block_tables.shape = (3, 4)": dict(block_tables=np.zeros((3, 4), np.int32)),
    "context_lens.shape = (1,)": dict(context_lens=np.zeros(1, np.int32)),
    "block_size = 0": dict(block_size=0),
    "block_size = 5000": dict(block_size=5000),
    "max_context_len = 65": dict(max_context_len=65),
    "max_context_len = -1": dict(max_context_len=-1),
    "query = 'list'": dict(query=[1, 2]),
    "query = 'misaligned memory'": dict(query=np.zeros(2 * 8 * 64 + 4, np.float16)[4:].reshape(2, 8, 64)),
    "query = 'strides of (2, 8, 64)'": dict(query=np.zeros((2, 8, 128), np.float16)[..., ::2]),
    "block_tables[1, 0] = 7": dict(block_tables=np.array([[0, 1, 2, -9], [7, 3, -9, -9]], np.int32)),
    "block_tables[0, 2] = -1": dict(block_tables=np.array([[0, 1, -1, -9], [3, 4, -9, -9]], np.int32)),
    "context_lens[1] = 41": dict(context_lens=np.array([40, 41], np.int32)),
    "context_lens[0] = -1": dict(context_lens=np.array([-1, 41], np.int32)),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_clear_line(message):
    with pytest.raises(SettingError) as caught:
        paged_attention.forward(**arguments(**MISTAKES[message]), check_ids=True)
    assert str(caught.value).startswith(f"{message}: ")
    assert "\n" not in str(caught.value)


def test_memory_of_the_call_is_zeroed_on_the_stream_of_the_launch(monkeypatch):
    """That is torch's if one array is."""
    torch = pytest.importorskip("torch")
    made = []
    monkeypatch.setattr(paged_attention, "zeros", lambda *how: made.append(arrays.zeros(*how)) or made[-1])
    given = gpu_cases.case("float16", (8, 2), 64, 16, [40, 20])
    named = vars(given) | {"context_lens": torch.from_numpy(given.context_lens)}
    out = paged_attention.forward(**named)
    assert isinstance(out, np.ndarray) and isinstance(made[0].owner, torch.Tensor)
    assert gpu_cases.error(out, gpu_cases.expected(given)) <= 1e-3


def test_an_upper_bound_of_the_lengths_changes_nothing():
    """A captured step has a higher one than an eager step."""
    given = gpu_cases.case("float16", (8, 2), 64, 16, [1100, 300, 1])
    padded = {"block_tables": np.pad(given.block_tables, ((0, 0), (0, 59))), "max_context_len": 2048}
    wide = gpu_cases.Case(**vars(given) | padded)
    assert gpu_cases.run(given).tobytes() == gpu_cases.run(wide).tobytes()


@pytest.mark.parametrize("dtype", gpu_cases.DTYPES)
def test_torch_tensors_on_the_cpu_take_the_same_way(dtype):
    torch = pytest.importorskip("torch")
    given = gpu_cases.case(dtype, (8, 2), 64, 16, [40, 20])
    tensors = dict(vars(given))
    for name in ("query", "key_cache", "value_cache"):
        tensors[name] = torch.from_numpy(tensors[name].astype(np.float32)).to(getattr(torch, dtype))
    for name in ("block_tables", "context_lens"):
        tensors[name] = torch.from_numpy(tensors[name])
    out = paged_attention.forward(**tensors, check_ids=True)
    assert out.dtype == tensors["query"].dtype
    assert out.float().numpy().tobytes() == gpu_cases.run(given).astype(np.float32).tobytes()


def test_the_module_of_its_own_name_has_these_functions_without_torch_and_cupy():
    face = importlib.import_module("paged_attention")
    assert face.forward is paged_attention.forward and all(hasattr(face, name) for name in face.__all__)
    code = "import sys, paged_attention; sys.exit(bool({'torch', 'cupy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
