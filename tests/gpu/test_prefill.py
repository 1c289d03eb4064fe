"""Prefill attention over a paged cache: the kernel's own source, built for the CPU, against float64."""

from __future__ import annotations

import itertools
import shutil

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.ops import arrays, prefill, source
from fragmeter.gpu.ops.cpu_kernels import CpuKernels
from fragmeter.sim.types.errors import KernelFault, SettingError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

#: New tokens and all tokens of a sequence: none of none; none of some; one of one; one over a prefix; a prompt of a
#: tile and more; a chunk that begins and ends within blocks and tiles.
LENGTHS = [(0, 0), (0, 20), (1, 1), (1, 70), (67, 67), (37, 150)]


def case(dtype: str, heads: tuple[int, int], head_dim: int, block_size: int, lengths=LENGTHS, **how) -> dict:
    """The arguments of ``forward``."""
    new, contexts = (list(column) for column in zip(*lengths, strict=True))
    given = vars(gpu_cases.case(dtype, heads, head_dim, block_size, contexts, query_lens=new, **how))
    return given | dict(query_start_loc=np.cumsum([0, *new]).astype(np.int32), max_query_len=max(new))


def expected(given: dict) -> np.ndarray:
    decoding = {name: value for name, value in given.items() if name in gpu_cases.Case.__dataclass_fields__}
    return gpu_cases.expected(gpu_cases.Case(**decoding), np.diff(given["query_start_loc"]))


def run(given: dict, seed: int = 0, partition_tokens: int | None = None) -> np.ndarray:
    """The kernel over it, threads in the order of ``seed``."""
    named = given | {"out": np.full_like(given["query"], np.nan)}
    views = {name: arrays.view(name, one) if isinstance(one, np.ndarray) else one for name, one in named.items()}
    call = prefill.Call(**views)
    call.check()
    call.prepared(CpuKernels(seed), partition_tokens).launch()
    return named["out"]


def check(given: dict, seed: int = 0, partition_tokens: int | None = None) -> None:
    dtype = given["query"].dtype.name
    assert gpu_cases.error(run(given, seed, partition_tokens), expected(given)) <= gpu_cases.TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "block_size"),
    [
        ("float32", (4, 2), 64, 16),
        ("float32", (3, 1), 80, 1),
        ("float16", (8, 2), 64, 32),
        ("float16", (4, 2), 128, 16),
        ("float16", (4, 1), 256, 8),
        ("float16", (4, 2), 120, 16),
        ("float32", (3, 1), 120, 5),
        ("bfloat16", (4, 1), 160, 8),
        ("float16", (3, 1), 192, 7),
        ("bfloat16", (5, 5), 96, 64),
        ("bfloat16", (14, 2), 112, 7),
    ],
)
def test_it_agrees_with_float64(dtype, heads, head_dim, block_size):
    check(case(dtype, heads, head_dim, block_size))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "head_dim"), list(itertools.product(gpu_cases.DTYPES, source.HEAD_DIMS)))
def test_the_whole_grid(dtype, head_dim):
    for heads, block_size in itertools.product([(32, 8), (8, 8), (16, 1), (14, 2)], [1, 8, 16, 32, 64, 4096]):
        check(case(dtype, heads, head_dim, block_size, seed=block_size), seed=block_size)
    check(case(dtype, (8, 2), head_dim, 16, [(300, 2048), (513, 513)]))


@pytest.mark.slow
def test_the_order_of_threads_changes_nothing():
    given = case("float16", (8, 2), 64, 16)
    first, *others = (run(given, seed).tobytes() for seed in range(4))
    assert others == [first] * 3


def test_one_new_token_is_a_decode():
    """The same tokens through the other kernel, up to rounding."""
    given = case("float32", (4, 2), 64, 16, [(1, 130), (1, 1), (1, 64)])
    decoding = gpu_cases.Case(**{name: given[name] for name in gpu_cases.Case.__dataclass_fields__})
    assert gpu_cases.error(run(given), gpu_cases.run(decoding).astype(np.float64)) < 1e-6


def test_a_prompt_in_chunks_is_the_prompt():
    """New tokens see the same whether their prefix is of the same call or of an earlier one."""
    whole = case("float32", (4, 2), 64, 16, [(150, 150)])
    out, query = run(whole), whole["query"]
    for begin, end in [(0, 47), (47, 48), (48, 150)]:
        starts, contexts = np.array([0, end - begin], np.int32), np.array([end], np.int32)
        chunk = whole | dict(query=query[begin:end], query_start_loc=starts, context_lens=contexts)
        assert gpu_cases.error(run(chunk), out[begin:end].astype(np.float64)) < 1e-6


@pytest.mark.slow
def test_a_context_of_256k():
    check(case("float16", (2, 1), 64, 32, [(5, 262_144), (3, 3)]))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "heads"), [("float32", (4, 2)), ("float16", (8, 2))])
def test_partitions_are_merged(dtype, heads):
    """Rows of one block that end before, at and after a partition's edge; sequences that most know nothing of."""
    check(case(dtype, heads, 64, 16, [*LENGTHS, (40, 300), (2, 65)]), partition_tokens=64)


@pytest.mark.slow
def test_few_new_tokens_over_a_long_context_are_split():
    """Two blocks on hundreds of places: partitions as short as they may be."""
    given = case("float16", (8, 2), 64, 16, [(5, 2000)])
    whole, split = run(given, partition_tokens=2048), run(given)
    assert split.tobytes() != whole.tobytes()
    assert split.tobytes() == run(given, partition_tokens=256).tobytes()
    assert gpu_cases.error(split, whole.astype(np.float64)) < 1e-3


def test_only_what_leaves_places_idle_is_split():
    assert prefill.partition_size(16384, 108, 216) == 16384
    assert prefill.partition_size(16384, 107, 216) < 16384
    assert prefill.partition_size(0, 1, 216) > 0


def test_large_scores_do_not_overflow():
    """Scores of about 1,000: what fp32 rounds off them weighs some 1e-4."""
    given = case("float32", (4, 2), 64, 16, [(20, 80)])
    given["query"][:] *= 200
    assert gpu_cases.error(run(given), expected(given)) <= 2e-4


def test_blocks_may_be_larger_than_any_context():
    check(case("float16", (8, 2), 64, 4096, [(60, 100), (3, 3)]))


def far_away(array: arrays.Array, scalars: int = 2**31) -> arrays.Array:
    """As if so many scalars came first, without their memory."""
    extra_bytes = scalars * np.dtype(array.dtype).itemsize
    return array._replace(pointer=array.pointer - extra_bytes, nbytes=array.nbytes + extra_bytes)


def run_far_away() -> tuple[np.ndarray, np.ndarray]:
    """What comes of queries, keys and values that begin past 2**31 scalars, and what should."""
    near = case("float16", (16, 8), 128, 64, [(5, 130)])
    tables, starts = near["block_tables"] + 2**15, near["query_start_loc"] + 2**20
    named = near | dict(out=np.zeros_like(near["query"]), block_tables=tables, query_start_loc=starts)
    views = {name: arrays.view(name, one) if isinstance(one, np.ndarray) else one for name, one in named.items()}
    for name in ("query", "out", "key_cache", "value_cache"):
        views[name] = far_away(views[name])
    prefill.Call(**views).prepared(CpuKernels()).launch()
    return named["out"], run(near)


def test_offsets_take_64_bits():
    out, wanted = run_far_away()
    assert out.tobytes() == wanted.tobytes()


#: What is wrong; the line of the kernel; what it becomes.
BUGS = {
    "a token sees the next one": ("place % 2 >= visible)", "place % 2 > visible)"),
    "a token does not see itself": ("(first_row + row) / group + 1;", "(first_row + row) / group;"),
    "the mask is aligned to the start": ("return context - tokens + (", "return ("),
    "all queries see what the first does": ("storage.visible[warp_row + 16 * strip", "storage.visible[0 * strip"),
    "a warp stops a tile early": ("if (first_key >= seen) continue", "if (first_key + Of::kKeys >= seen) continue"),
    "the last tile is not masked": ("first_key + Of::kKeys > storage", "first_key > storage"),
    "queries begin where the first sequence's do": ("first_token = query_start_loc[sequence]", "first_token = 0"),
    "the next sequence's queries are counted in": ("[sequence + 1] - first_token", "[gridDim.y] - first_token"),
    "keys are read before they arrive": (
        "receive(storage.keys);\n            __syncthreads();  // the keys",
        "ptx::cp_async_wait<1>();\n            __syncthreads();  // the keys",
    ),
    "values are read before they arrive": (
        "receive(storage.values);\n            __syncthreads();  // the values",
        "ptx::cp_async_wait<1>();\n            __syncthreads();  // the values",
    ),
    "values are overwritten while they are read": ("__syncthreads();  // the keys", "// the keys"),
    "keys are overwritten while they are read": ("__syncthreads();  // the values", "// the values"),
    "the first rows are read too early": (
        "find_rows(tokens.start);\n        __syncthreads();\n",
        "find_rows(tokens.start);\n",
    ),
    "one list of rows for two tiles": ("rows[first_key / Of::kKeys % 2][thr", "rows[0][thr"),
    "results leave before all lanes have written": ("        __syncwarp();\n", ""),
    "a head reads another KV head": (
        "slots, kv_heads, kv_head, start,",
        "slots, kv_heads, (kv_head + 1) % kv_heads, start,",
    ),
    "heads of a group change places": ("kv_head * group + (first_row + row) % group", "(first_row + row) % group"),
    "old sums are not rescaled": ("        sum[strip][half] *= factor;\n", ""),
    "old values are not rescaled": ("values[strip][place / 2][2 * half + place % 2] *= factor", "(void)factor"),
    "values are not transposed": ("ldmatrix_trans(right", "ldmatrix(right"),
}


def plant(monkeypatch, right: str, wrong: str) -> None:
    """In both kernels, wherever they are asked for."""
    for kernel in ("prefill_attention", "merge_prefill"):
        whole = getattr(source, kernel)

        def wrong_one(*of, whole=whole, **how):
            return gpu_cases.planted(whole(*of, **how), right, wrong)

        monkeypatch.setattr(source, kernel, wrong_one)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug, monkeypatch):
    plant(monkeypatch, *BUGS[bug])
    with pytest.raises((AssertionError, KernelFault)):
        for seed in range(3):
            check(case("float16", (8, 2), 64, 16, [(67, 67), (37, 150)]), seed)


#: In the split into partitions and their merge.
SPLIT_BUGS = {
    "a partition does not end": ("(Of::kRows - 1)), start + partition_tokens)", "(Of::kRows - 1)), 1 << 30)"),
    "a partition too many is merged": ("- left + 1, partition_tokens)", "+ 63, partition_tokens)"),
    "a partition too few is merged": ("- left + 1, partition_tokens)", "- left, partition_tokens)"),
    "lanes keep their own sums": ("    prefiller.finish();\n", ""),
    "partitions are summed at their own scale": ("ptx::exp2(state.x - maximum)", "1"),
}


@pytest.mark.parametrize("bug", SPLIT_BUGS)
def test_a_planted_bug_of_the_split_is_caught(bug, monkeypatch):
    plant(monkeypatch, *SPLIT_BUGS[bug])
    with pytest.raises((AssertionError, KernelFault)):
        check(case("float16", (8, 2), 64, 16, [(37, 150), (1, 64), (2, 65)]), partition_tokens=64)


#: In the lane by lane products of fp32.
SCALAR_BUGS = {
    "every lane takes its own weights": ("[key % 2], lane / 4 * 4 + key / 2)", "[key % 2], lane)"),
    "lower rows read the upper query": ("unpack<float>(queries[row + 8]", "unpack<float>(queries[row]"),
    "columns change places": ("+ column;\n", "+ (column ^ 2);\n"),
}


@pytest.mark.parametrize("bug", SCALAR_BUGS)
def test_a_planted_bug_of_fp32_is_caught(bug, monkeypatch):
    plant(monkeypatch, *SCALAR_BUGS[bug])
    with pytest.raises((AssertionError, KernelFault)):
        check(case("float32", (4, 2), 64, 16, [(37, 150)]))


@pytest.mark.parametrize(
    "offset",
    [
        "((first_token + token) * kv_heads * group + head) * kHeadDim",
        "(slots.of(token) * kv_heads + kv_head) * kHeadDim",
    ],
)
def test_a_planted_32_bit_offset_is_caught(offset, monkeypatch):
    plant(monkeypatch, f"return {offset};", f"return (int)({offset});")
    with pytest.raises(KernelFault, match="outside every array"):
        run_far_away()


def test_a_wild_block_id_is_a_fault():
    given = case("float16", (8, 2), 64, 16, [(20, 40), (20, 20)])
    given["block_tables"][1, 1] = 10**6
    with pytest.raises(KernelFault, match=r"<__half, 64>: block \(\d, 1, 0\), .* outside every array"):
        run(given)


@pytest.mark.slow
def test_forward_takes_arrays_and_gives_one_like_the_query():
    given = case("float16", (8, 2), 64, 16)
    out = prefill.forward(**given, check_ids=True)
    assert out.dtype == np.float16
    assert out.tobytes() == run(given).tobytes()
    assert prefill.prepare(np.empty_like(out), **given).launch() is None


def test_no_sequences_and_no_new_tokens_give_an_empty_array():
    given = case("float16", (8, 2), 64, 16, [(0, 20), (0, 0)])
    assert prefill.forward(**given, check_ids=True).shape == (0, 8, 64)
    none = {name: given[name][:0] for name in ("block_tables", "context_lens")}
    assert prefill.forward(**given | none | dict(query_start_loc=np.zeros(1, np.int32))).shape == (0, 8, 64)


MISTAKES = {
    "query_start_loc.shape = (2,)": dict(query_start_loc=np.array([0, 23], np.int32)),
    "query_start_loc.dtype = 'int64'": dict(query_start_loc=np.array([0, 20, 23])),
    "query_start_loc[0] = 1": dict(query_start_loc=np.array([1, 20, 23], np.int32)),
    "query_start_loc[2] = 24": dict(query_start_loc=np.array([0, 20, 24], np.int32)),
    "query_len[1] = -1": dict(query_start_loc=np.array([0, 24, 23], np.int32), max_query_len=24),
    "query_len[0] = 20": dict(max_query_len=19),
    "max_query_len = -1": dict(max_query_len=-1),
    "max_context_len = 65": dict(max_context_len=65),
    "context_lens[0] = 41": dict(context_lens=np.array([41, 20], np.int32)),
    "context_lens[1] = 2": dict(context_lens=np.array([40, 2], np.int32)),
    "block_tables.shape = (8,)": dict(block_tables=np.zeros(8, np.int32)),
    "block_tables[0, 2] = -1": dict(block_tables=np.array([[0, 1, -1, -9], [3, 4, -9, -9]], np.int32)),
    "block_size = 0": dict(block_size=0),
    "num_heads = 7": dict(query=np.zeros((23, 7, 64), np.float16)),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_clear_line(message):
    given = case("float16", (8, 2), 64, 16, [(20, 40), (3, 20)]) | MISTAKES[message]
    with pytest.raises(SettingError) as caught:
        prefill.forward(**given, check_ids=True)
    assert str(caught.value).startswith(f"{message}: ")
