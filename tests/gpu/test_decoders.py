"""The two decoders of the decode kernel: bugs planted in each and seen, and how tensor cores read shared memory."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.ops import arrays, source
from fragmeter.gpu.ops.cpu_kernels import CpuKernels
from fragmeter.gpu.ops.source import KERNELS, Kernel, inlined
from fragmeter.sim.types.errors import KernelFault

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

#: A block's tiles are of 64 tokens, a warp's of 16: a little more than one, two of them, less than one, none, seven.
CONTEXTS = [70, 130, 43, 0, 400]


def check(heads: tuple[int, int], dtype: str = "float16", head_dim: int = 64, block_size: int = 16) -> None:
    for seed in range(3):
        given = gpu_cases.case(dtype, heads, head_dim, block_size, CONTEXTS, seed)
        out = gpu_cases.run(given, blocks=1, seed=seed)
        assert gpu_cases.error(out, gpu_cases.expected(given)) <= gpu_cases.TOLERANCE[dtype]


FMA_AHEAD = "            ahead = find_rows(tile + kStages + 1);\n"
MMA_AHEAD = "            ahead = find_rows(tile + 2);\n"
#: In what both have in common: what is wrong; the line; what it becomes.
COMMON_BUGS = {
    "the rings are overwritten while they are read": ("__syncthreads();  // the rings' memory is reused\n", ""),
    "warps are merged before all have come": ("(storage.results);\n        __syncthreads();", "(storage.results);"),
    "every tile has the first block": ("row<kHeadDim>(first_token) : 0", "row<kHeadDim>(start) : 0"),
    "a head reads another KV head": ("kv_head, start, end}", "(kv_head + 1) % kv_heads, start, end}"),
    "all queries are of the first KV head": ("* kv_heads + number % kv_heads) * group", "* kv_heads) * group"),
    "block ids are taken for slots": ("* block_size + token % block_size", "+ token % block_size"),
}
#: In the look-up of every token, where blocks are not of a multiple of 16 tokens.
SCATTERED_BUGS = {
    "one token too many is read": ("if (token >= end)", "if (token > end)"),
    "a tile's tokens are those of its first block": ("first_token + (int)threadIdx.x % kTile)", "first_token)"),
    "what lies past the end is not zeroed": ("0, offset != kNoRow}", "0, true}"),
    "lanes take each other's rows": ("rows, step * kRows + row)", "rows, row * kSteps + step)"),
    "block ids are taken for slots": COMMON_BUGS["block ids are taken for slots"],
}
FMA_BUGS = {
    "copies are read before they arrive": ("cp_async_wait<kStages - 1>();\n", "cp_async_wait<kStages>();\n"),
    "copies arrive after the rings have gone": (
        f"fetch(tile + kStages, ahead);\n{FMA_AHEAD}        }}\n        ptx::cp_async_wait<0>();\n",
        f"fetch(tile + kStages, ahead);\n{FMA_AHEAD}        }}\n",
    ),
    "a tile is fetched into another one's place": ("fetch(tile + kStages, ahead)", "fetch(tile + 1, ahead)"),
    "rows are looked up for another tile": (
        f"fetch(tile + kStages, ahead);\n{FMA_AHEAD}",
        "fetch(tile + kStages, ahead);\n            ahead = find_rows(tile + kStages);\n",
    ),
    "tokens past the end are read": ("step * kRows < rows.left - row", "true"),
    "a token lies a head behind the one before": (
        "span = tokens.kv_heads * kHeadDim;\n            const long long first = rows.first + row",
        "span = kHeadDim;\n            const long long first = rows.first + row",
    ),
    "lanes take each other's rows": ("rows.first + row * span", "rows.first + row * kSteps * span"),
    "one token too many is weighed": ("row < tokens.end;", "row <= tokens.end;"),
    "the last token is left out": ("row < tokens.end;", "row < tokens.end - 1;"),
    "half a row's score is missing": ("distance = kLanes / 2", "distance = kLanes / 4"),
    "old sums are not rescaled": ("        sum *= factor;\n", ""),
}
MMA_BUGS = {
    "copies are read before they arrive": (
        "cp_async_wait<1>();\n        __syncwarp",
        "cp_async_wait<2>();\n        __syncwarp",
    ),
    "other lanes' copies are not waited for": ("1>();\n        __syncwarp();\n", "1>();\n"),
    "copies arrive after the rings have gone": (
        f"fetch(ring.values, tokens.values, ahead);\n{MMA_AHEAD}        }}\n        ptx::cp_async_wait<0>();\n",
        f"fetch(ring.values, tokens.values, ahead);\n{MMA_AHEAD}        }}\n",
    ),
    "rows are looked up for another tile": (
        f"fetch(ring.values, tokens.values, ahead);\n{MMA_AHEAD}",
        "fetch(ring.values, tokens.values, ahead);\n            ahead = find_rows(tile + 1);\n",
    ),
    "what lies past the end is not zeroed": ("step * kRows < left && there);", "there);"),
    "a token lies a head behind the one before": (
        "span = tokens.kv_heads * kHeadDim, part",
        "span = kHeadDim, part",
    ),
    "a lane's tokens are in each other's rows": ("from += kRows * span", "from += span"),
    "one token too many is weighed": ("second = left > 8", "second = left >= 8"),
    "the last token is left out": ("first = left > 0", "first = left > 1"),
    "rows are swizzled on one side only": ("piece.loads[place_of(step)], from", "piece.loads[step * 32 + lane], from"),
    "every step is swizzled like the first": (" ^ step * kRows % 8)", ")"),
    "fragments of keys are in another order": (
        "swizzled(lane % 16, 2 * slice + lane / 16)",
        "swizzled(lane / 16 * 8 + lane % 8, 2 * slice + lane / 8 % 2)",
    ),
    "fragments of values are in another order": (
        "swizzled(lane / 16 * 8 + lane % 8, 2 * slice + lane / 8 % 2)",
        "swizzled(lane % 16, 2 * slice + lane / 16)",
    ),
    "values are not transposed": ("ptx::ldmatrix_trans(value", "ptx::ldmatrix(value"),
    "weights are not transposed": ("ptx::movmatrix_trans(\n", "(\n"),
    "weights are of another type": ("ptx::pack<Scalar>(weights", "ptx::pack<__nv_bfloat16>(weights"),
    "scores are not scaled": ("second * scale", "second"),
    "the maximum is of half the lanes": (
        "distance = 4; distance < 32; distance *= 2)\n                    new_maximum",
        "distance = 4; distance < 16; distance *= 2)\n                    new_maximum",
    ),
    "old sums are not rescaled": ("sum[column][side] * factor", "sum[column][side]"),
    "old outputs are not rescaled": ("                    outputs[column][slice][side] *= factor;\n", ""),
    "the sum is of half the lanes": (
        "distance = 4; distance < 32; distance *= 2)\n                    sum",
        "distance = 4; distance < 16; distance *= 2)\n                    sum",
    ),
    "heads' results change places": ("2 * (lane % 4) + side;", "(lane % 4) + 4 * side;"),
}


@pytest.mark.parametrize(
    ("heads", "block_size", "bug"),
    [((4, 2), 16, bug) for bug in (COMMON_BUGS | FMA_BUGS).items()]
    + [((16, 2), 16, bug) for bug in MMA_BUGS.items()]
    + [((4, 2), 8, bug) for bug in SCATTERED_BUGS.items()],
)
def test_a_planted_bug_is_caught(heads, block_size, bug, monkeypatch):
    gpu_cases.plant_attention(monkeypatch, *bug[1])
    with pytest.raises((AssertionError, KernelFault)):
        check(heads, block_size=block_size)


#: In rows of 120, which shared memory holds as 128.
PADDING_BUGS = {
    "places past the head's end keep what was there": (
        "|| part < kHeadDim;\n        const Cache",
        "|| part < kHeadDim;\n        if (!there) return;\n        const Cache",
    ),
    "outputs past the head's end are another head's": ("if (16 * slice + kSecond < kHeadDim) ", ""),
    "a row of shared memory is as short as one of the cache": (
        "ceil_div(kSlices, 2) * 2 : 2 * kSlices;",
        "ceil_div(kSlices, 2) * 2 : kHeadDim / 8;",
    ),
}


@pytest.mark.parametrize(("dtype", "heads"), [("float16", (16, 2)), ("bfloat16", (16, 1)), ("float32", (4, 2))])
def test_a_row_of_120_is_padded(dtype, heads):
    check(heads, dtype, 120)


@pytest.mark.parametrize("bug", PADDING_BUGS)
def test_a_planted_bug_in_the_padding_is_caught(bug, monkeypatch):
    gpu_cases.plant_attention(monkeypatch, *PADDING_BUGS[bug])
    with pytest.raises((AssertionError, KernelFault)):
        check((16, 2), head_dim=120)


@pytest.mark.parametrize(("dtype", "heads"), [("float16", (16, 2)), ("float16", (4, 2)), ("float32", (4, 2))])
def test_one_look_up_a_tile_finds_the_tokens_that_one_a_token_finds(dtype, heads):
    """The same cache as blocks of 48 tokens, and as three times as many of 16 or six times as many of 8: bit for bit the same."""
    given = gpu_cases.case(dtype, heads, 64, 48, CONTEXTS)
    wanted = gpu_cases.run(given)
    assert gpu_cases.error(wanted, gpu_cases.expected(given)) <= gpu_cases.TOLERANCE[dtype]
    for block_size in (16, 8):
        assert (block_size % source.TILE_TOKENS > 0) == (block_size == 8)
        parts = 48 // block_size
        tables = (given.block_tables[..., None] * parts + np.arange(parts, dtype=np.int32)).reshape(len(CONTEXTS), -1)
        caches = {
            name: getattr(given, name).reshape(-1, block_size, heads[1], 64) for name in ("key_cache", "value_cache")
        }
        cut = replace(given, block_tables=tables.astype(np.int32), block_size=block_size, **caches)
        assert gpu_cases.run(cut).tobytes() == wanted.tobytes()


SWIZZLED = r"""
template <int kHeadDim> __device__ int *places_of(int *out) {
    using Decoder = MmaDecoder<__half, kHeadDim, 8, PagedSlots>;
    for (int load = 0; load < Decoder::kRowLoads; ++load)
        out[threadIdx.x * Decoder::kRowLoads + load] = Decoder::swizzled(threadIdx.x, load);
    return out + 16 * Decoder::kRowLoads;
}
template <int... kHeadDims> __global__ void places(int *out) { ((out = places_of<kHeadDims>(out)), ...); }
"""


def test_tensor_cores_read_shared_memory_without_bank_conflicts():
    """ldmatrix reads 16 bytes of eight rows at once: they must lie in the eight different groups of four banks."""
    rows = [source.width(head_dim) // 8 for head_dim in source.HEAD_DIMS]  # in loads of 16 bytes
    out = np.full(16 * sum(rows), -1, np.int32)
    expression = f"places<{', '.join(map(str, source.HEAD_DIMS))}>"
    kernel = Kernel(inlined(KERNELS / "mma_decoder.cuh") + SWIZZLED, expression)
    CpuKernels().prepared(kernel, (1, 1, 1), (16, 1, 1), (arrays.view("out", out),))()
    for places in np.split(out, 16 * np.cumsum(rows)[:-1]):
        assert sorted(places) == list(range(places.size))
        for eight in places.reshape(2, 8, -1):
            assert all(len(set(column)) == 8 for column in eight.T % 8)


@pytest.mark.parametrize(("group", "dtype"), [(3, "float16"), (4, "bfloat16"), (10, "bfloat16"), (20, "float16")])
def test_any_group_of_three_heads_or_more_goes_to_tensor_cores(group, dtype):
    """A group fills 8 or 16 columns, in part or whole; of 20, four go to a block of their own."""
    assert source.group_tile(dtype, group) in (8, 16)
    check((2 * group, 2), dtype)


def test_the_launch_gives_the_shared_memory_that_the_kernel_needs(monkeypatch):
    needed = source.decode_shared_bytes
    monkeypatch.setattr(source, "decode_shared_bytes", lambda *call, **how: needed(*call, **how) - 16)
    for heads in ((2, 2), (16, 2)):
        with pytest.raises(KernelFault, match="bytes of dynamic shared memory, and the kernel needs"):
            check(heads)


def test_scores_far_apart_leave_one_token_all_the_weight():
    given = gpu_cases.case("float16", (8, 2), 64, 16, [40])
    given.query[:] *= 200
    assert gpu_cases.error(gpu_cases.run(given), gpu_cases.expected(given)) <= 1e-3
