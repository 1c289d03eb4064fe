"""The kernels as NVRTC compiles them, run by the machine of tests/helpers/ptx against float64: their inline assembly included.

The CPU build replaces each function with inline assembly by a twin. Here the statements themselves run, and errors in them, which
neither the CPU build nor the assembler can notice, are planted.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

import gpu_cases

pytest.importorskip("cupy", reason="CuPy is not installed (extra: kernels)")

from fragmeter.gpu.check.latent import latent_case
from fragmeter.gpu.ops import arrays, cache, latent_attention, paged_attention, prefill, source
from fragmeter.gpu.ops.source import Kernel
from fragmeter.sim.types.errors import KernelFault
from ptx.kernels import PtxKernels, compiled, machine_of
from tools.kernels import compile_gate

#: NVRTC 13.0 has one compiler for architectures before sm_100 and another one for the rest.
ARCHITECTURES = "sm_80", "sm_120"
SIXTEEN_BITS = "float16", "bfloat16"
#: Each architecture and each dtype; the slow tests of more shapes have all pairs.
each_once = pytest.mark.parametrize(("architecture", "dtype"), list(zip(ARCHITECTURES, SIXTEEN_BITS, strict=True)))


def decode(kernels: PtxKernels, given: gpu_cases.Case, blocks: int | None = None) -> np.ndarray:
    named = vars(given) | {"out": np.full_like(given.query, np.nan)}
    sizes = {name: named.pop(name) for name in ("block_size", "max_context_len")}
    views = {name: arrays.view(name, array) for name, array in named.items()}
    paged_attention.checked(**views, **sizes).prepared(kernels, blocks).launch()
    return named["out"]


def check_decode(
    kernels: PtxKernels,
    dtype: str,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    contexts=(70, 0, 1),
    blocks=1,
) -> None:
    """A tile and a part of one, nothing, and one token, by one block."""
    given = gpu_cases.case(dtype, heads, head_dim, block_size, contexts)
    out = decode(kernels, given, blocks)
    assert gpu_cases.error(out, gpu_cases.expected(given)) <= gpu_cases.TOLERANCE[dtype]


def check_prefill(
    kernels: PtxKernels, dtype: str, heads: tuple[int, int], head_dim: int, partition_tokens=None
) -> None:
    """A chunk that begins and ends within blocks and tiles, and no new token."""
    new, contexts = [21, 0], [85, 7]
    given = gpu_cases.case(dtype, heads, head_dim, 16, contexts, query_lens=new)
    named = vars(given) | dict(query_start_loc=np.array([0, 21, 21], np.int32), out=np.full_like(given.query, np.nan))
    views = {name: arrays.view(name, one) if isinstance(one, np.ndarray) else one for name, one in named.items()}
    prefill.Call(**views, max_query_len=21).prepared(kernels, partition_tokens).launch()
    assert gpu_cases.error(named["out"], gpu_cases.expected(given, new)) <= gpu_cases.TOLERANCE[dtype]


def check_latent(
    kernels: PtxKernels, dtype: str, heads: int, block_size: int, partition_tokens=None, longer: float = 1
) -> None:
    """Two tiles and a part of one, nothing, and one token; with ``longer`` queries some heads of a warp are rescaled and others not."""
    given = latent_case(dtype, heads, block_size, [70, 0, 1])
    given.given.query[:] *= longer
    named = given.arguments()
    named["out"] = np.full((3, heads, source.LATENT_DIM), np.nan, named["query"].dtype)
    views = {name: arrays.view(name, one) if isinstance(one, np.ndarray) else one for name, one in named.items()}
    latent_attention.Call(**views).prepared(kernels, partition_tokens).launch()
    assert gpu_cases.error(named["out"], given.expected()) <= gpu_cases.TOLERANCE[dtype]
    assert not kernels.divided


@each_once
def test_decode_attention_on_tensor_cores_and_its_merge(architecture, dtype):
    """One block, and three that share the longest sequence."""
    kernels = PtxKernels(architecture)
    check_decode(kernels, dtype, (8, 1), 64, 16)
    check_decode(kernels, dtype, (8, 1), 64, 16, (600, 0, 1), blocks=3)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decode_attention_of_one_head(architecture):
    check_decode(PtxKernels(architecture), "float16", (1, 1), 64, 5)


@each_once
def test_prefill_attention_and_its_merge(architecture, dtype):
    check_prefill(PtxKernels(architecture), dtype, (4, 1), 64)
    check_prefill(PtxKernels(architecture), dtype, (4, 1), 64, partition_tokens=64)


@pytest.mark.slow
@each_once
def test_latent_attention_and_its_merge(architecture, dtype):
    check_latent(PtxKernels(architecture), dtype, 12, 16, longer=8)
    check_latent(PtxKernels(architecture), dtype, 12, 16, partition_tokens=32)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_latent_attention_of_more_heads(heads, dtype, architecture, apart):
    for block_size, longer in ((64, 1), (7, 1), (7, 8)):
        check_latent(PtxKernels(architecture, apart), dtype, heads, block_size, longer=longer)
    check_latent(PtxKernels(architecture, apart), dtype, heads, 32, partition_tokens=32)


@pytest.mark.slow
def test_a_head_of_120_is_padded():
    check_decode(PtxKernels("sm_80"), "float16", (8, 1), 120, 16)
    check_prefill(PtxKernels("sm_80"), "float16", (4, 1), 120)


@pytest.mark.slow
def test_decode_attention_with_one_warp_after_another():
    """Each until it waits for the others: no warp may depend on the progress of another one without a barrier."""
    check_decode(PtxKernels("sm_80", apart=True), "float16", (8, 1), 64, 16)


@pytest.mark.slow
def test_the_last_of_several_blocks_merges_alike_in_any_order():
    """Nine pieces of one sequence, which are merged in two levels, beside whole sequences and pieces of another."""
    given = gpu_cases.case("float16", (2, 1), 64, 16, [2300, 40, 300])
    first, last = (decode(PtxKernels("sm_80", last_first=order), given, blocks=10) for order in (False, True))
    assert gpu_cases.error(first, gpu_cases.expected(given)) <= gpu_cases.TOLERANCE["float16"]
    assert first.tobytes() == last.tobytes()


#: Around the counter of a sequence's pieces: what is wrong, the text of the source, what it becomes.
SHARING_ERRORS = {
    "a block counts its piece before others can see it": ("__threadfence();\n            merging.last", "merging.last"),
    "the last block reads pieces before it can see them": (
        "members - 1;\n            __threadfence();",
        "members - 1;",
    ),
    "threads read pieces before the count": (
        "__threadfence();\n        }\n        __syncthreads();",
        "__threadfence();\n        }",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("error", SHARING_ERRORS)
def test_a_planted_error_in_the_order_of_writes_is_caught(error, monkeypatch):
    """On the CPU build every write is visible at once."""
    kernels = PtxKernels("sm_80")
    plant(monkeypatch, *SHARING_ERRORS[error])
    with pytest.raises((AssertionError, KernelFault)):
        check_decode(kernels, "float16", (2, 1), 64, 16, (400,), blocks=2)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "heads"), [("float16", (8, 1)), ("float16", (2, 1)), ("float32", (2, 1))])
def test_a_warp_reaches_its_shuffles_undivided(dtype, heads):
    """A choice before or between shuffles makes the compiler put them into both branches, where parts of a warp wait for each other."""
    kernels = PtxKernels("sm_80")
    check_decode(kernels, dtype, heads, 64, 16)
    assert not kernels.divided


#: Of MmaDecoder::weigh.
SHUFFLE = "new_maximum = fmaxf(new_maximum, __shfl_xor_sync(kFullWarp, new_maximum, distance));"


@pytest.mark.slow
def test_a_shuffle_in_both_branches_of_a_choice_divides_a_warp(monkeypatch):
    """As the compiler put shuffles between two choices, before all of them came after the choices."""
    kernels = PtxKernels("sm_80")
    divided = f"{{ if (left > 0) {SHUFFLE} else {{ {SHUFFLE} new_maximum += 0 * first; }} }}"
    plant(monkeypatch, f"distance *= 2)\n                    {SHUFFLE}", f"distance *= 2)\n{divided}")
    check_decode(kernels, "float16", (8, 1), 64, 16)
    assert kernels.divided == {"shfl.sync.bfly.b32"}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", gpu_cases.DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((16, 1), 128), ((2, 2), 80), ((20, 2), 64), ((8, 1), 120), ((4, 1), 160), ((2, 1), 192), ((8, 1), 256)],
)
def test_more_shapes(heads, head_dim, dtype, architecture):
    for apart in (False, True):
        kernels = PtxKernels(architecture, apart)
        for block_size in (16, 7):
            check_decode(kernels, dtype, heads, head_dim, block_size)
        check_decode(kernels, dtype, heads, head_dim, 16, (1, 600), blocks=3)
        check_prefill(kernels, dtype, heads, head_dim)
        check_prefill(kernels, dtype, heads, head_dim, partition_tokens=64)


def check_cache(kernels: PtxKernels, monkeypatch) -> None:
    """Writes of tokens, of which one is padding, and copies of blocks."""
    monkeypatch.setattr(cache, "kernels_for", lambda array: kernels)
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 3, 2, 80)).astype(np.float16)
    caches = rng.standard_normal((2, 4, 5, 2, 80)).astype(np.float16)
    slots, wanted = np.array([11, -1, 4]), caches.copy()
    for number, of_token in enumerate((key, value)):
        wanted[number].reshape(20, 2, 80)[slots[[0, 2]]] = of_token[[0, 2]]
    cache.reshape_and_cache(key, value, *caches, slots)
    assert caches.tobytes() == wanted.tobytes()
    wanted[:, [3, 1]] = wanted[:, [0, 2]]
    cache.copy_blocks([caches[0]], [caches[1]], np.array([[0, 3], [2, 1]]))
    assert caches.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cache_writes_and_copies(architecture, monkeypatch):
    check_cache(PtxKernels(architecture), monkeypatch)


#: By function: what is wrong, the text of the source, what it becomes.
ERRORS = {
    "exp2": {"the logarithm": ("ex2.approx.ftz.f32", "lg2.approx.ftz.f32")},
    "cp_async16": {
        "invalid tokens are read": ("[%0], [%1], 16, %2;", "[%0], [%1], 16;"),
        "half of the bytes": ("(valid ? 16 : 0)", "(valid ? 8 : 0)"),
        "a generic address": ("(unsigned)__cvta_generic_to_shared(to)", "(unsigned)(unsigned long long)to"),
    },
    "cp_async_commit": {"no commit": ('"cp.async.commit_group;"', '""')},
    "cp_async_wait": {
        "no wait": ('"cp.async.wait_group %0;"', '""'),
        "a group less": ('::"n"(kGroups)', '::"n"(kGroups + 1)'),
    },
    "load16": {
        "words change places": ("v4.u32 {%0, %1, %2, %3}, [%4];", "v4.u32 {%0, %2, %1, %3}, [%4];"),
        "the next bytes": ("v4.u32 {%0, %1, %2, %3}, [%4];", "v4.u32 {%0, %1, %2, %3}, [%4+16];"),
    },
    "ldmatrix": {
        "matrices change places": (
            "m8n8.x4.shared.b16 {%0, %1, %2, %3}",
            "m8n8.x4.shared.b16 {%0, %2, %1, %3}",
        ),
        "transposed": ("m8n8.x4.shared.b16", "m8n8.x4.trans.shared.b16"),
    },
    "ldmatrix_trans": {
        "matrices change places": ("trans.shared.b16 {%0, %1, %2, %3}", "trans.shared.b16 {%2, %1, %0, %3}"),
        "not transposed": ("m8n8.x4.trans.shared.b16", "m8n8.x4.shared.b16"),
    },
    "movmatrix_trans": {"not transposed": ("movmatrix.sync.aligned.m8n8.trans.b16", "mov.b32")},
    "pack": {"the first is high": ('"x2.f32 %0, %1, %2;"', '"x2.f32 %0, %2, %1;"')},
    "mma_m16n8k16": {
        "parts of a change places": ("{%4, %5, %6, %7}", "{%4, %6, %5, %7}"),
        "parts of b change places": ("{%8, %9}", "{%9, %8}"),
        "sums of other rows": ("{%8, %9}, {%0, %1, %2, %3}", "{%8, %9}, {%2, %3, %0, %1}"),
        "results in other columns": (".f32 {%0, %1, %2, %3}, {%4", ".f32 {%1, %0, %3, %2}, {%4"),
        "the other type": ('SCALAR(__half, "f16")', 'SCALAR(__half, "bf16")'),
    },
}
PLANTED = [(function, error) for function, errors in ERRORS.items() for error in errors]


def plant(monkeypatch, right: str, wrong: str) -> None:
    """In every kernel that has the text."""
    whole = source._kernel_text

    def kernel_text(name: str) -> str:
        text = whole(name)
        return gpu_cases.planted(Kernel(text, name), right, wrong).text if right in text else text

    monkeypatch.setattr(source, "_kernel_text", kernel_text)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "error"), PLANTED)
def test_a_planted_error_in_inline_assembly_is_caught(function, error, monkeypatch):
    kernels = PtxKernels("sm_80")
    plant(monkeypatch, *ERRORS[function][error])
    with pytest.raises((AssertionError, KernelFault)):
        if function == "load16":
            check_cache(kernels, monkeypatch)
        else:
            check_decode(kernels, "float16", (8, 1), 64, 16)


def test_every_function_with_inline_assembly_has_a_planted_error():
    text = "".join((source.KERNELS / name).read_text() for name in ("ptx.cuh", "matrix.cuh"))
    functions = re.findall(
        r"(\w+)(?:<\w+>)?\([^()]*(?:\([^()]*\)[^()]*)*\)\s*\{[^{}]*\basm\b", text.replace("\\\n", "\n")
    )
    assert set(functions) == set(ERRORS)
    assert not any("asm" in file.read_text() for file in source.KERNELS.glob("*.cu"))


@pytest.mark.parametrize(("function", "error"), PLANTED)
def test_the_cpu_build_does_not_see_the_planted_error(function, error, monkeypatch):
    def without_cuda(name: str) -> str:
        text = source._kernel_text(name)
        return re.sub(r"#ifdef __CUDACC__\n.*?(#else|#endif)", r"\1", text, flags=re.DOTALL)

    names = "paged_attention", "prefill", "reshape_and_cache", "copy_blocks"
    before = [without_cuda(name) for name in names]
    plant(monkeypatch, *ERRORS[function][error])
    assert [without_cuda(name) for name in names] == before


@pytest.mark.slow
@pytest.mark.parametrize(("function", "error"), PLANTED)
def test_the_assembler_accepts_the_planted_error(function, error, monkeypatch):
    plant(monkeypatch, *ERRORS[function][error])
    kernel = source.plain("copy_blocks") if function == "load16" else source.decode_attention("float16", 64, 8)
    (found,) = compile_gate.compiled([kernel], "sm_80")
    assert found.registers


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_machine_knows_every_instruction_of_every_instance(architecture):
    for kernel in compile_gate.every_kernel(compile_gate.SHARED_BYTES[architecture]):
        assert machine_of(compiled(kernel, architecture)).code.steps
