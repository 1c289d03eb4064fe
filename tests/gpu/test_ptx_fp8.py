"""Kernels over caches of fp8 as NVRTC compiles them, in the machine of tests/helpers/ptx: sm_120 converts in single instructions,
sm_80 by bits. Errors in their inline assembly are planted."""

from __future__ import annotations

import re

import numpy as np
import pytest

import gpu_cases

pytest.importorskip("cupy", reason="CuPy is not installed (extra: kernels)")

from fragmeter.gpu.check import fp8, grid
from fragmeter.gpu.check.cases import Host
from fragmeter.gpu.check.fp8 import fp8_case
from fragmeter.gpu.ops import arrays, cache, contiguous, paged_attention, prefill, source
from fragmeter.gpu.ops.source import Kernel
from fragmeter.sim.types.errors import KernelFault
from ptx.kernels import PtxKernels

ARCHITECTURES = "sm_80", "sm_120"
#: Each architecture and each dtype, with the conversions that errors are planted in.
PAIRS = list(zip(ARCHITECTURES, reversed(source.FP8_QUERIES), strict=True))


def check_decode(monkeypatch, kernels: PtxKernels, dtype: str, heads: tuple[int, int], head_dim: int = 64) -> None:
    """A tile and a part of one, nothing, and one token."""
    monkeypatch.setattr(paged_attention, "kernels_for", lambda array: kernels)
    given = fp8_case(dtype, heads, head_dim, 16, [70, 0, 1])
    out = np.full_like(given.given.query, np.nan)
    paged_attention.paged_attention_cuda_forward(out, **given.arguments())
    assert gpu_cases.error(out, given.expected()) <= gpu_cases.TOLERANCE[dtype]
    assert not kernels.divided


def check_prefill(kernels: PtxKernels, dtype: str, heads=(4, 1), head_dim: int = 64, partition_tokens=None) -> None:
    """A chunk that begins and ends within blocks and tiles, and no new token."""
    new, starts = [21, 0], np.array([0, 21, 21], np.int32)
    given = fp8_case(dtype, heads, head_dim, 16, [85, 7], query_lens=new)
    named = given.arguments() | dict(query_start_loc=starts, out=np.full_like(given.given.query, np.nan))
    views = {name: arrays.view(name, one) if isinstance(one, np.ndarray) else one for name, one in named.items()}
    scales = views.pop("k_scale"), views.pop("v_scale")
    prefill.Call(**views, max_query_len=21, scales=scales).prepared(kernels, partition_tokens).launch()
    assert gpu_cases.error(named["out"], given.expected(new)) <= gpu_cases.TOLERANCE[dtype]
    assert not kernels.divided


def check_writes(monkeypatch, kernels: PtxKernels, dtype: str) -> None:
    """Ties, subnormals and what is too large; one token is padding."""
    monkeypatch.setattr(cache, "kernels_for", lambda array: kernels)
    rng = np.random.default_rng(0)
    between = (fp8.NUMBERS[:126] + fp8.NUMBERS[1:127]) / 2
    key, value = rng.choice([*between, *-between, 500, -1000], (2, 3, 2, 80)).astype(gpu_cases.DTYPES[dtype])
    caches = rng.integers(0, 256, (2, 4, 5, 2, 80), np.uint8)
    scales, slots, wanted = np.array([[1, 1.3], [0.25, 0.7]], np.float32), np.array([11, -1, 4]), caches.copy()
    for new, scale, written in zip((key, value), scales, wanted, strict=True):
        written.reshape(20, 2, 80)[slots[[0, 2]]] = fp8.encoded(new.astype(np.float32) / scale[:, None])[[0, 2]]
    cache.reshape_and_cache(key, value, *caches, slots, k_scale=scales[0], v_scale=scales[1])
    assert (caches == wanted).all()


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "dtype"), PAIRS)
def test_decode_attention(architecture, dtype, monkeypatch):
    """The slow test has all pairs."""
    for heads in ((8, 1), (1, 1)):
        check_decode(monkeypatch, PtxKernels(architecture), dtype, heads)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "dtype"), PAIRS)
def test_contiguous_decode_attention(architecture, dtype, monkeypatch):
    """As :func:`check_decode`, with a scale of each of two KV heads."""
    kernels = PtxKernels(architecture)
    monkeypatch.setattr(contiguous, "kernels_for", lambda array: kernels)
    point = grid.Point("contiguous_attention_fp8", dtype, (16, 2), 64, 16, (70, 0, 1))
    assert grid.contiguously(point, Host()) <= point.tolerance
    assert not kernels.divided


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", source.FP8_QUERIES)
def test_prefill_attention(dtype, architecture):
    check_prefill(PtxKernels(architecture), dtype)
    check_prefill(PtxKernels(architecture), dtype, partition_tokens=64)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", source.FP8_QUERIES)
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 1), 128), ((4, 2), 80), ((20, 2), 192), ((2, 1), 256)])
def test_prefill_attention_of_more_shapes(heads, head_dim, dtype, architecture):
    check_prefill(PtxKernels(architecture, apart=True), dtype, heads, head_dim)


#: In prefill attention: architecture and dtype, what is wrong, the text of the source, what it becomes. Conversions of sm_80 are
#: bits, so a NaN past the end has no effect there.
PREFILL_ERRORS = {
    "a single number is converted twice": (
        "sm_120",
        "float16",
        '"=r"(halves) : "h"(two)',
        '"=r"(halves) : "h"((unsigned short)(two & 0xff))',
    ),
    "rows past the end are read": ("sm_120", "float16", "from + 16 * piece, valid);", "from + 16 * piece, true);"),
    "bytes are converted before they arrive": (
        "sm_80",
        "float16",
        "Row *tile) {\n        ptx::cp_async_wait<0>();",
        "Row *tile) {",
    ),
    "another thread's bytes are converted": ("sm_80", "bfloat16", "loads = &tile[row][", "loads = &tile[row ^ 8]["),
}


@pytest.mark.slow
@pytest.mark.parametrize("error", PREFILL_ERRORS)
def test_a_planted_error_in_prefill_attention_is_caught(error, monkeypatch):
    architecture, dtype, right, wrong = PREFILL_ERRORS[error]
    whole = source.prefill_attention
    monkeypatch.setattr(
        source, "prefill_attention", lambda *of, **how: gpu_cases.planted(whole(*of, **how), right, wrong)
    )
    with pytest.raises((AssertionError, KernelFault)):
        check_prefill(PtxKernels(architecture, apart=True), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", source.FP8_QUERIES)
@pytest.mark.parametrize(("heads", "head_dim"), [((16, 1), 128), ((2, 1), 128), ((8, 1), 80), ((20, 2), 192)])
def test_more_shapes(heads, head_dim, dtype, architecture, monkeypatch):
    check_decode(monkeypatch, PtxKernels(architecture), dtype, heads, head_dim)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_cache_writes(dtype, architecture, monkeypatch):
    check_writes(monkeypatch, PtxKernels(architecture), dtype)


#: By function: the architecture and dtype that call it; what is wrong, the text of the source, what it becomes.
ERRORS = {
    "fp8_to_halves": (
        *("sm_120", "float16"),
        {"no conversion": ('"cvt.rn.f16x2.e4m3x2 %0, %1;"', '"mov.b32 %0, {%1, %1};"')},
    ),
    "fp8_from_floats": (
        *("sm_120", "float16"),
        {
            "the first is high": (
                '"cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"',
                '"cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;"',
            )
        },
    ),
    "times_2_120": (
        *("sm_80", "bfloat16"),
        {
            "another power": ("0x7b807b80u", "0x7b007b00u"),
            "a summand": ("0x80008000u));\n    return product;", "0x3f803f80u));\n    return product;"),
            "the factor squared": ("bf16x2 %0, %1, %2, %3;", "bf16x2 %0, %2, %2, %3;"),
        },
    ),
}
PLANTED = [(function, error) for function, (_, _, errors) in ERRORS.items() for error in errors]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "error"), PLANTED)
def test_a_planted_error_in_inline_assembly_is_caught(function, error, monkeypatch):
    architecture, dtype, errors = ERRORS[function]
    kernels, whole = PtxKernels(architecture), source._kernel_text
    monkeypatch.setattr(
        source, "_kernel_text", lambda name: gpu_cases.planted(Kernel(whole(name), name), *errors[error]).text
    )
    with pytest.raises((AssertionError, KernelFault)):
        if function == "fp8_from_floats":
            check_writes(monkeypatch, kernels, dtype)
        else:
            check_decode(monkeypatch, kernels, dtype, (8, 1))


def test_every_function_with_inline_assembly_has_a_planted_error():
    text = (source.KERNELS / "fp8.cuh").read_text()
    assert set(re.findall(r"(\w+)\([^()]*\)\s*\{[^{}]*\basm\b", text)) == set(ERRORS)
