"""Caches of fp8: the kernels' own source, built for the CPU, against float64; and bugs planted in scales and conversions."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.check import fp8, grid
from fragmeter.gpu.check.cases import Host, expected
from fragmeter.gpu.check.fp8 import Fp8Case, fp8_case
from fragmeter.gpu.ops import arrays, cache, paged_attention, source
from fragmeter.gpu.ops.cpu_kernels import CpuKernels
from fragmeter.sim.types.errors import KernelFault, SettingError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

#: Tiles in whole and in part, one token, none.
CONTEXTS = [70, 130, 0, 1, 43]
#: One head a KV head, two, a part of 8 columns, all of 16.
HEADS = [(3, 3), (4, 2), (10, 2), (32, 2)]


def run(given: Fp8Case, blocks: int | None = None) -> np.ndarray:
    named = given.arguments() | {"out": np.full_like(given.given.query, np.nan)}
    scales = [arrays.view(name, named.pop(name)) for name in ("k_scale", "v_scale")]
    sizes = {name: named.pop(name) for name in ("block_size", "max_context_len")}
    views = {name: arrays.view(name, array) for name, array in named.items()}
    call = paged_attention.checked(**views, **sizes, scales=scales)
    call.prepared(CpuKernels(), blocks).launch()
    return named["out"]


def check(given: Fp8Case, **how) -> None:
    """With the tolerance of a 16-bit cache: the numbers of the codes are exact in 16 bits."""
    tolerance = gpu_cases.TOLERANCE[given.given.query.dtype.name]
    assert gpu_cases.error(run(given, **how), given.expected()) <= tolerance


def test_the_codes_are_those_of_ml_dtypes():
    numpy_type = pytest.importorskip("ml_dtypes").float8_e4m3fn
    numbers = np.arange(256, dtype=np.uint8).view(numpy_type).astype(float)
    assert np.array_equal(fp8.NUMBERS, numbers, equal_nan=True)
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    drawn = np.random.default_rng(0).normal(0, 40, 10_000).astype(np.float32)
    for values in (halves[np.abs(halves) < 464], drawn):
        assert np.array_equal(fp8.encoded(values), values.astype(numpy_type).view(np.uint8))
    assert fp8.encoded([464, 1e9, np.inf, -np.inf]).tolist() == [0x7E, 0x7E, 0x7E, 0xFE]
    assert fp8.encoded(np.nan) == fp8.NAN_CODE


CONTIGUOUS = [
    grid.Point("contiguous_attention_fp8", dtype, heads, 64, 16, grid.RAGGED)
    for dtype in source.FP8_QUERIES
    for heads in HEADS
]
#: A head_dim that is no power of two: lane by lane, and on tensor cores.
RAGGED_ROWS = [
    grid.Point("contiguous_attention_fp8", dtype, heads, 80, 16, grid.RAGGED)
    for dtype, heads in (("bfloat16", (4, 2)), ("float16", (10, 2)))
]


@pytest.mark.parametrize(
    "point", CONTIGUOUS + RAGGED_ROWS, ids=lambda point: f"{point.dtype}-{point.heads}-{point.head_dim}"
)
def test_contiguous_caches_agree_with_float64(point):
    outcome = grid.tried(point, Host())
    assert outcome.passes, outcome


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("scales.of_keys(kv_head)", "scales.of_keys(0)"),
        ("scales.of_values(work.column.number % kv_heads)", "scales.of_values(0)"),
    ],
    ids=["keys", "values"],
)
def test_the_scales_of_a_contiguous_cache_are_those_of_its_heads(right, wrong, monkeypatch):
    gpu_cases.plant_attention(monkeypatch, right, wrong)
    outcome = grid.tried(CONTIGUOUS[1], Host())
    # A fault would be that of the planting.
    assert outcome.fault is None and not outcome.passes


def slow_but(values, often):
    """Parameters of a test that is slow, but for those that run often."""
    values = values if isinstance(values, tuple) else (values,)
    often = [each if isinstance(each, tuple) else (each,) for each in often]
    return pytest.param(*values, marks=() if values in often else pytest.mark.slow)


@pytest.mark.parametrize("dtype", source.FP8_QUERIES)
@pytest.mark.parametrize("heads", HEADS)
def test_decoding_agrees_with_float64(dtype, heads):
    for head_dim, block_size in ((64, 16), (128, 7)):
        check(fp8_case(dtype, heads, head_dim, block_size, CONTEXTS))
    check(fp8_case(dtype, heads, 64, 16, [300, *CONTEXTS]), blocks=5)


@pytest.mark.parametrize("head_dim", [slow_but(head_dim, (120, 256)) for head_dim in source.FP8_HEAD_DIMS])
def test_every_head_dim_agrees_with_float64(head_dim):
    check(fp8_case("float16", (8, 1), head_dim, 32, CONTEXTS))
    check(fp8_case("bfloat16", (2, 2), head_dim, 8, CONTEXTS))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "head_dim"), list(itertools.product(source.FP8_QUERIES, source.FP8_HEAD_DIMS)))
def test_the_whole_grid_agrees_with_float64(dtype, head_dim):
    for heads, block_size in itertools.product([*HEADS, (32, 8), (16, 1)], [1, 8, 16, 64]):
        check(fp8_case(dtype, heads, head_dim, block_size, CONTEXTS, seed=block_size))


@pytest.mark.parametrize("dtype", source.FP8_QUERIES)
@pytest.mark.parametrize("heads", [(1, 1), (8, 1)])
def test_every_code_is_read_as_its_number(dtype, heads):
    """As values exactly: sequences of one token give its value. As keys in the scores of one sequence with a token per code."""
    codes = np.flatnonzero(~np.isnan(fp8.NUMBERS)).astype(np.uint8)
    held = np.repeat(codes[:, None, None, None], 64, axis=3)
    scale, numpy_type = np.ones(1, np.float32), gpu_cases.DTYPES[dtype]
    query = np.random.default_rng(0).standard_normal((len(codes), heads[0], 64)).astype(numpy_type)
    ids, lengths = np.arange(len(codes), dtype=np.int32), np.ones(len(codes), np.int32)
    given = Fp8Case(gpu_cases.Case(query, held, held, ids[:, None], lengths, 1, 1), scale, scale)
    assert np.array_equal(run(given).astype(float)[:, 0, 0], fp8.NUMBERS[codes])
    values = fp8.encoded(np.random.default_rng(1).standard_normal(held.shape))
    query = (query[:1] / 256).astype(numpy_type)
    one = gpu_cases.Case(query, held, values, ids[None], np.array([len(codes)], np.int32), 1, len(codes))
    check(Fp8Case(one, scale, scale))


def test_attention_over_fp8_is_near_that_over_the_numbers_before_rounding():
    """Rounding to three bits of mantissa is off by 1/16 at most, and much less in a sum of many values."""
    full = gpu_cases.case("float32", (8, 2), 64, 16, [300, 200])
    scales = [np.full(2, np.nanmax(np.abs(one)) / 448, np.float32) for one in (full.key_cache, full.value_cache)]
    codes = [fp8.encoded(one / scale[0]) for one, scale in zip((full.key_cache, full.value_cache), scales, strict=True)]
    caches = dict(zip(("key_cache", "value_cache"), codes, strict=True))
    given = Fp8Case(replace(full, query=full.query.astype(np.float16), **caches), *scales)
    assert 0.002 < gpu_cases.error(run(given), expected(full)) < 0.06


#: In decoding: what is wrong, the text of the source, what it becomes.
SCALE_BUGS = {
    "the scale of keys is left out": ("keys[head] * kCacheFactor", "kCacheFactor"),
    "the scale of values is left out": ("values[head] * kCacheFactor", "kCacheFactor"),
    "keys have the scale of the next head": ("scales.of_keys(kv_head)", "scales.of_keys((kv_head + 1) % kv_heads)"),
    "values have the scale of the next head": (
        "scales.of_values(work.column.number % kv_heads)",
        "scales.of_values((work.column.number + 1) % kv_heads)",
    ),
    "every head has the first scale": ("scales.of_keys(kv_head)", "scales.of_keys(0)"),
    "keys have the scale of values": ("keys[head] * kCacheFactor", "values[head] * kCacheFactor"),
    "the scale of keys applies to values, too": (
        "values[head] * kCacheFactor",
        "values[head] * keys[head] * kCacheFactor",
    ),
    "partial results are not scaled": (
        "            value *= value_scale;\n",
        "            value *= whole ? value_scale : 1;\n",
    ),
}
CONVERSION_BUGS = {
    "the other exponent's factor is left out": ("kFactor = 256;", "kFactor = 1;"),
    "signs are lost": ("even = (four << 8 & 0x80008000u) | (four << 7", "even = (four << 7"),
    "even and odd bytes change places": (
        "convert(words[word], pairs[0], pairs[1])",
        "convert(words[word], pairs[1], pairs[0])",
    ),
}
MMA_BUGS = {
    "subnormals lose a bit": ("(four << 7 & 0x3f803f80u)", "(four << 7 & 0x3f003f00u)"),
    "queries keep their order": ("load_queries_for_fp8(query[column]", "load_queries_for_fp8(query[0 * column]"),
    "dimensions of queries change places": (
        "first & 0xffffu) | second << 16",
        "first & 0xffffu) | (second & 0xffff0000u)",
    ),
    "fragments of keys change places": ("key[eight], key[2 + eight]", "key[2 + eight], key[eight]"),
    "both halves of a load are the first": ("bytes[slice % 2 * 2 + eight]", "bytes[eight]"),
    "fragments of values change places": (
        "value[2 * eight], value[2 * eight + 1]",
        "value[2 * eight + 1], value[2 * eight]",
    ),
    "values are those of the other tokens": ("bytes[slice % 2 + 2 * eight]", "bytes[slice % 2 * 2 + eight]"),
    "outputs are in the order of 16 bits": ("(kFp8 ? lane / 4 * 2 : lane / 4)", "lane / 4"),
    "the second output is eight further": ("kSecond = kFp8 ? 1 : 8;", "kSecond = 8;"),
}
FMA_BUGS = {"a tile has more tokens than a look-up": ("kRows > 4 ? 16 / kRows : 4 / kLoads", "4 / kLoads")}


#: Each bug is a build of its own.
BUILT_OFTEN = (
    "the scale of keys is left out",
    "values have the scale of the next head",
    "signs are lost",
    "fragments of keys change places",
    "scales are left out",
    "ties go up",
)


@pytest.mark.parametrize(
    ("heads", "name"),
    [
        *(slow_but(((8, 2), name), [((8, 2), each) for each in BUILT_OFTEN]) for name in SCALE_BUGS | MMA_BUGS),
        *(slow_but(((2, 2), name), [((2, 2), each) for each in BUILT_OFTEN]) for name in CONVERSION_BUGS | FMA_BUGS),
    ],
)
def test_a_planted_bug_is_caught(heads, name, monkeypatch):
    bug = (SCALE_BUGS | MMA_BUGS | CONVERSION_BUGS | FMA_BUGS)[name]
    gpu_cases.plant_attention(monkeypatch, *bug)
    # Lane by lane blocks of 16 have tokens of several blocks in a longer tile.
    heads = (20, 2) if "query[0 * column]" in bug[1] else heads
    with pytest.raises((AssertionError, KernelFault)):
        check(fp8_case("float16", heads, 64, 16, [300, *CONTEXTS]), blocks=5)
        check(fp8_case("float16", heads, 64, 16, CONTEXTS))


def check_writes(dtype: str, **how) -> None:
    """All codes' numbers and their surroundings, what is too large, NaN; one token is padding."""
    rng, numpy_type = np.random.default_rng(0), gpu_cases.DTYPES[dtype]
    tokens, kv_heads, head_dim = 7, 3, 80
    k_scale, v_scale = np.array([[0.3, 1, 2.5], [0.02, 1.7, 40]], np.float32)
    # Ties between two codes, subnormal numbers among them.
    ties = np.concatenate([fp8.NUMBERS[:126] + fp8.NUMBERS[1:127], -2 * fp8.NUMBERS[:126]]) / 2
    key, value = (rng.choice(ties, (tokens, kv_heads, head_dim)) for _ in "kv")
    key[:, ::2] = rng.normal(0, 100, key[:, ::2].shape)
    value[0, 0, :5], value[1, 2, :3] = [np.inf, -np.inf, np.nan, 460, -470], [1e-4, -1e-4, 0]
    key, value = (one.astype(numpy_type) for one in (key, value))
    caches = rng.integers(0, 256, (2, 6, 5, kv_heads, head_dim), np.uint8)
    slots, wanted = np.array([29, -1, 0, 13, 14, 2, 7]), caches.copy()
    for new, scale, written in zip((key, value), (k_scale, v_scale), wanted, strict=True):
        codes = fp8.encoded(new.astype(np.float32) / scale[:, None])
        written.reshape(30, kv_heads, head_dim)[slots[slots >= 0]] = codes[slots >= 0]
    cache.reshape_and_cache(key, value, *caches, slots, k_scale=k_scale, v_scale=v_scale, check_ids=True, **how)
    signs = np.where(np.isnan(fp8.NUMBERS[wanted]), 0x80, 0)  # of a NaN it is free
    assert ((caches | signs) == (wanted | signs)).all()


@pytest.mark.parametrize("dtype", gpu_cases.DTYPES)
def test_writes_are_the_nearest_codes(dtype):
    check_writes(dtype)


WRITE_BUGS = {
    "scales multiply": ("values[4 * word + place] / scale", "values[4 * word + place] * scale"),
    "scales are left out": ("values[4 * word + place] / scale", "values[4 * word + place]"),
    "keys have the scales of values": ("key_scales[head]));", "value_scales[head]));"),
    "values have the scale of the next head": ("value_scales[head]));", "value_scales[(head + 1) % kv_heads]));"),
    "ties go up": ("+ (magnitude >> 20 & 1)", "+ 1"),
    "large numbers are not cut": ("magnitude >= 0x43e00000", "magnitude >= 0x7f800000"),
    "subnormals are cut off": ("__uint_as_float(magnitude) + 16384.0f", "__uint_as_float(magnitude) * 0 + 16384.0f"),
    "NaN is a number": ("return sign | 0x7f;", "return sign | 0x7e;"),
    "padding is written": ("    if (slot < 0) return;\n", ""),
}


@pytest.mark.parametrize("bug", [slow_but(bug, BUILT_OFTEN) for bug in WRITE_BUGS])
def test_a_planted_bug_in_writes_is_caught(bug, monkeypatch):
    kernel = gpu_cases.planted(source.reshape_and_cache_fp8("float32"), *WRITE_BUGS[bug])
    monkeypatch.setattr(source, "reshape_and_cache_fp8", lambda _: kernel)
    with pytest.raises((AssertionError, KernelFault)):
        check_writes("float32")


def test_what_is_written_is_what_attention_reads():
    """A prompt through reshape_and_cache and then a decode, with the scales of each layer in one prepared call."""
    rng, tokens = np.random.default_rng(0), 37
    key, value = rng.standard_normal((2, tokens, 2, 64)).astype(np.float16)
    query, slots = rng.standard_normal((1, 8, 64)).astype(np.float16), np.arange(tokens)
    table, length = np.array([[0, 1, 2]], np.int32), np.array([tokens], np.int32)
    scales = np.array([[[0.01, 0.02], [0.03, 0.01]], [[0.015, 0.01], [0.01, 0.05]]], np.float32)
    caches = np.full((2, 2, 3, 16, 2, 64), fp8.NAN_CODE, np.uint8)
    write = cache.prepare_reshape_and_cache(key, value, *caches[0], slots, k_scale=scales[0, 0], v_scale=scales[0, 1])
    out = np.empty_like(query)
    arguments = (table, length, 16, 48)
    decode = paged_attention.prepare(out, query, *caches[0], *arguments, k_scale=scales[0, 0], v_scale=scales[0, 1])
    for layer in (1, 0):
        write(key, value, *caches[layer], *scales[layer])
        decode(out, query, *caches[layer], *scales[layer])
        given = gpu_cases.Case(query, *caches[layer], *arguments)
        assert gpu_cases.error(out, Fp8Case(given, *scales[layer]).expected()) <= 1e-3


def test_torch_tensors_of_fp8_are_taken_as_they_are():
    torch = pytest.importorskip("torch")
    given = fp8_case("float16", (8, 2), 64, 16, CONTEXTS)
    named = given.arguments()
    held = {name: torch.from_numpy(array) for name, array in named.items() if isinstance(array, np.ndarray)}
    for name in ("key_cache", "value_cache"):
        held[name] = held[name].view(torch.float8_e4m3fn)
    found = paged_attention.forward(**named | held)
    assert found.numpy().tobytes() == run(given).tobytes()


def refused(*, dtype="float16", head_dim=64, **changes) -> None:
    named = fp8_case("float16", (4, 2), head_dim, 16, [20]).arguments()
    named["query"] = named["query"].astype(dtype)
    paged_attention.forward(**named | changes)


MISTAKES = {
    "v_scale = None: caches of fp8 have both scales": dict(v_scale=None),
    "k_scale.shape = (1,): must be (2)": dict(k_scale=np.ones(1, np.float32)),
    "v_scale.dtype = 'float64': must be float32": dict(v_scale=np.ones(2)),
    "query.dtype = 'float32': must be float16 or bfloat16": dict(dtype="float32"),
    "head_dim = 120: must be one of 64, 80, 96, 112, 128, 160, 192, 256": dict(head_dim=120),
    "key_cache.dtype = 'uint8': must be float16": dict(k_scale=None, v_scale=None),
    "key_cache.dtype = 'float16': must be float8_e4m3fn or uint8": dict(key_cache=np.zeros((4, 16, 2, 64), np.float16)),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_clear_line(message):
    with pytest.raises(SettingError) as caught:
        refused(**MISTAKES[message])
    assert str(caught.value).startswith(message)


def test_caches_of_fp8_need_scales():
    numpy_type = pytest.importorskip("ml_dtypes").float8_e4m3fn
    with pytest.raises(SettingError, match=r"^key_cache.dtype = 'float8_e4m3fn': needs k_scale and v_scale"):
        refused(key_cache=np.zeros((4, 16, 2, 64), numpy_type), k_scale=None, v_scale=None)


def test_rows_of_writes_are_whole_loads():
    key = np.zeros((1, 1, 120), np.float16)
    caches, scale = np.zeros((2, 1, 1, 1, 120), np.uint8), np.ones(1, np.float32)
    with pytest.raises(SettingError, match="head_dim = 120: must be a multiple of 16 for caches of fp8"):
        cache.reshape_and_cache(key, key, *caches, np.zeros(1, np.int64), k_scale=scale, v_scale=scale)
