"""Prefill attention over caches of fp8: the kernel's own source, built for the CPU, against float64; and planted bugs."""

from __future__ import annotations

import itertools
import shutil
from typing import Any

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.check import fp8
from fragmeter.gpu.check.fp8 import Fp8Case, fp8_case
from fragmeter.gpu.ops import arrays, paged_attention, prefill, source
from fragmeter.gpu.ops.cpu_kernels import CpuKernels
from fragmeter.sim.types.errors import KernelFault, SettingError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

#: New tokens and all tokens of a sequence: none of some; one of one; one over a prefix; a prompt of a tile and more; a chunk that
#: begins and ends within blocks and tiles.
LENGTHS = [(0, 20), (1, 1), (1, 70), (67, 67), (37, 150)]


class Case:
    """A case and the new tokens of its sequences."""

    def __init__(self, dtype: str, heads: tuple[int, int], head_dim: int, block_size: int, lengths=LENGTHS, seed=0):
        self.new, contexts = (list(column) for column in zip(*lengths, strict=True))
        self.given = fp8_case(dtype, heads, head_dim, block_size, contexts, seed, query_lens=self.new)

    def arguments(self) -> dict[str, Any]:
        """Those of ``forward``."""
        starts = np.cumsum([0, *self.new]).astype(np.int32)
        return self.given.arguments() | dict(query_start_loc=starts, max_query_len=max(self.new))


def run(case: Case, seed: int = 0, partition_tokens: int | None = None) -> np.ndarray:
    """The kernel over it, threads in the order of ``seed``."""
    named = case.arguments() | {"out": np.full_like(case.given.given.query, np.nan)}
    views = {name: arrays.view(name, one) if isinstance(one, np.ndarray) else one for name, one in named.items()}
    scales = tuple(views.pop(name) for name in ("k_scale", "v_scale"))
    call = prefill.Call(**views, scales=scales)
    call.check()
    call.prepared(CpuKernels(seed), partition_tokens).launch()
    return named["out"]


def check(case: Case, seed: int = 0, partition_tokens: int | None = None) -> None:
    """With the tolerance of a 16-bit cache: the numbers of the codes are exact in 16 bits."""
    tolerance = gpu_cases.TOLERANCE[case.given.given.query.dtype.name]
    assert gpu_cases.error(run(case, seed, partition_tokens), case.given.expected(case.new)) <= tolerance


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "block_size"),
    [
        ("float16", (8, 2), 64, 32),
        ("bfloat16", (8, 2), 64, 16),
        ("float16", (4, 2), 80, 16),
        ("bfloat16", (14, 2), 112, 7),
        ("float16", (4, 2), 128, 16),
        ("float16", (4, 1), 256, 8),
    ],
)
def test_it_agrees_with_float64(dtype, heads, head_dim, block_size):
    check(Case(dtype, heads, head_dim, block_size))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "head_dim"), list(itertools.product(source.FP8_QUERIES, source.FP8_HEAD_DIMS)))
def test_the_whole_grid(dtype, head_dim):
    for heads, block_size in itertools.product([(32, 8), (8, 8), (16, 1), (14, 2)], [1, 8, 16, 64]):
        check(Case(dtype, heads, head_dim, block_size, seed=block_size), seed=block_size)
    check(Case(dtype, (8, 2), head_dim, 16, [(300, 2048), (513, 513)]))
    check(Case(dtype, (8, 2), head_dim, 16, [*LENGTHS, (40, 300)]), partition_tokens=64)


@pytest.mark.slow
def test_the_order_of_threads_changes_nothing():
    first, *others = (run(Case("float16", (8, 2), 64, 16), seed).tobytes() for seed in range(4))
    assert others == [first] * 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", source.FP8_QUERIES)
def test_partitions_are_merged(dtype):
    check(Case(dtype, (8, 2), 64, 16, [*LENGTHS, (40, 300), (2, 65)]), partition_tokens=64)


def test_one_new_token_is_a_decode():
    """The same tokens through the other kernel, up to rounding."""
    case = Case("float16", (4, 2), 64, 16, [(1, 130), (1, 1), (1, 64)])
    decoded = paged_attention.forward(**case.given.arguments())
    assert gpu_cases.error(run(case), decoded.astype(np.float64)) < 1e-3


def test_a_prompt_in_chunks_is_the_prompt():
    """Cached context of an earlier chunk is read as the tokens of the same one are."""
    whole = Case("float16", (4, 2), 64, 16, [(150, 150)])
    out, named = run(whole), whole.arguments()
    for begin, end in [(0, 47), (47, 48), (48, 150)]:
        starts, contexts = np.array([0, end - begin], np.int32), np.array([end], np.int32)
        chunk = dict(query=named["query"][begin:end], query_start_loc=starts, context_lens=contexts)
        assert gpu_cases.error(prefill.forward(**named | chunk), out[begin:end].astype(np.float64)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", source.FP8_QUERIES)
def test_every_code_is_read_as_its_number(dtype):
    """As values exactly: sequences of one token give its value. As keys in the scores of one sequence with a token per code."""
    codes = np.flatnonzero(~np.isnan(fp8.NUMBERS)).astype(np.uint8)
    rng, scale = np.random.default_rng(0), np.ones(1, np.float32)
    held = np.stack([rng.permutation(codes) for _ in range(64)], axis=1)[:, None, None]
    query = rng.standard_normal((len(codes), 1, 64)).astype(gpu_cases.DTYPES[dtype])
    ids, ones = np.arange(len(codes), dtype=np.int32), np.ones(len(codes), np.int32)
    starts = np.arange(len(codes) + 1, dtype=np.int32)
    out = prefill.forward(query, held, held, ids[:, None], starts, ones, 1, 1, 1, k_scale=scale, v_scale=scale)
    assert np.array_equal(out.astype(float), fp8.NUMBERS[held[:, 0]])
    values = fp8.encoded(rng.standard_normal(held.shape))
    query, length = (query[:2] / 256).astype(query.dtype), np.array([len(codes)], np.int32)
    given = gpu_cases.Case(query, held, values, ids[None], length, 1, len(codes))
    starts = np.array([0, 2], np.int32)
    out = prefill.forward(
        **vars(given), query_start_loc=starts, max_query_len=2, k_scale=scale, v_scale=scale, check_ids=True
    )
    assert gpu_cases.error(out, Fp8Case(given, scale, scale).expected([2])) <= gpu_cases.TOLERANCE[dtype]


def test_scales_are_those_of_the_layer():
    """One prepared call, with the scales of two layers."""
    case = Case("float16", (8, 2), 64, 16, [(20, 40)])
    named = case.arguments()
    call = prefill.prepare(np.empty_like(named["query"]), **named)
    tensors = [named[name] for name in ("query", "key_cache", "value_cache")]
    for k_scale, v_scale in (
        (named["k_scale"][::-1].copy(), 2 * named["v_scale"]),
        (named["k_scale"], named["v_scale"]),
    ):
        out = np.empty_like(named["query"])
        call(out, *tensors, k_scale, v_scale)
        assert gpu_cases.error(out, Fp8Case(case.given.given, k_scale, v_scale).expected(case.new)) <= 1e-3


@pytest.mark.slow
def test_torch_tensors_of_fp8_are_taken_as_they_are():
    torch = pytest.importorskip("torch")
    case = Case("float16", (8, 2), 64, 16)
    held = {name: torch.from_numpy(one) for name, one in case.arguments().items() if isinstance(one, np.ndarray)}
    for name in ("key_cache", "value_cache"):
        held[name] = held[name].view(torch.float8_e4m3fn)
    assert prefill.forward(**case.arguments() | held).numpy().tobytes() == run(case).tobytes()


#: What is wrong; the text of the kernel; what it becomes.
BUGS = {
    "the scale of keys is left out": ("scale * scales.of_keys(kv_head)", "scale * kCacheFactor<Scalar, Cache>"),
    "every head has the first scale": ("scales.of_keys(kv_head)", "scales.of_keys(0)"),
    "the scale of values is left out": ("scales.of_values(kv_head)", "kCacheFactor<Scalar, Cache>"),
    "values have the scale of the next head": (
        "scales.of_values(kv_head)",
        "scales.of_values((kv_head + 1) % kv_heads)",
    ),
    "keys have the scale of values": ("keys[head] * kCacheFactor", "values[head] * kCacheFactor"),
    "the other exponent's factor is left out": ("kFactor = 256;", "kFactor = 1;"),
    "numbers are in the order of the fragments of decoding": (
        "convert(__byte_perm(four, 0, 0x3120), low, high);\n    }\n#endif",
        "convert(four, low, high);\n    }\n#endif",
    ),
    "both loads are the first": ("bytes.z, second.x, second.y", "bytes.x, second.x, second.y"),
    "loads change places": ("widen<Scalar>(bytes, loads[0], loads[1])", "widen<Scalar>(bytes, loads[1], loads[0])"),
    "bytes are converted before they arrive": (
        "receive(typename Of::Row *tile) {\n        ptx::cp_async_wait<0>();",
        "receive(typename Of::Row *tile) {\n        ptx::cp_async_wait<1>();",
    ),
    "a thread converts another one's bytes": ("uint4 *loads = &tile[row][", "uint4 *loads = &tile[row ^ 8]["),
    "values are converted after the barrier": (
        "receive(storage.values);\n            __syncthreads();",
        "__syncthreads();\n            receive(storage.values);",
    ),
    "keys are converted after the barrier": (
        "receive(storage.keys);\n            __syncthreads();",
        "__syncthreads();\n            receive(storage.keys);",
    ),
    "the mask is aligned to the start": ("return context - tokens + (", "return ("),
}
#: In partial results.
SPLIT_BUGS = {
    "partial results are not scaled": (
        "prefiller.write_partials(partial_states, partial_values, partition, gridDim.z, value_scale)",
        "prefiller.write_partials(partial_states, partial_values, partition, gridDim.z, 1)",
    )
}
#: Each bug is a build of its own.
BUILT_OFTEN = (
    "the scale of keys is left out",
    "values have the scale of the next head",
    "numbers are in the order of the fragments of decoding",
    "a thread converts another one's bytes",
    "values are converted after the barrier",
    "partial results are not scaled",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BUILT_OFTEN else pytest.mark.slow) for name in BUGS | SPLIT_BUGS]
)
def test_a_planted_bug_is_caught(name, monkeypatch):
    whole, bug = source.prefill_attention, (BUGS | SPLIT_BUGS)[name]
    monkeypatch.setattr(source, "prefill_attention", lambda *of, **how: gpu_cases.planted(whole(*of, **how), *bug))
    with pytest.raises((AssertionError, KernelFault)):
        for seed in range(3):
            partition_tokens = 64 if name in SPLIT_BUGS else None
            check(Case("float16", (8, 2), 64, 16, [(67, 67), (37, 150)]), seed, partition_tokens)


def refused(*, dtype="float16", head_dim=64, **changes) -> None:
    named = Case("float16", (4, 2), head_dim, 16, [(5, 20)]).arguments()
    named["query"] = named["query"].astype(dtype)
    prefill.forward(**named | changes)


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
