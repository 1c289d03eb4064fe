"""The compile gate: kernels compiled for GPUs on a machine without one."""

from __future__ import annotations

import pytest

import gpu_cases

pytest.importorskip("cupy", reason="CuPy is not installed (extra: kernels)")

from fragmeter.gpu.check import cpp_face, parts
from fragmeter.gpu.ops import prefill, source
from fragmeter.sim.types.errors import KernelFault, MissingExtra
from tools.kernels import compile_gate

#: A thread of a block of 128 has all of its 255 registers up to here, and two such blocks fit a multiprocessor.
MOST_REGISTERS = 255


def check(found: compile_gate.Compiled) -> None:
    assert found.spill_bytes == 0, found
    assert 0 < found.registers <= MOST_REGISTERS, found
    assert found.shared_bytes <= 48 * 1024, found


#: The instance with the most registers, which takes as long as all of the others together.
TIGHTEST = source.prefill_attention("float32", 256)
#: The widest and the plainest instances, each dtype once.
SOME = [
    source.decode_attention("float16", 128, 8, "PagedTiles"),
    source.decode_attention("bfloat16", 80, 16, "PagedTiles"),
    source.decode_attention("float16", 256, 16, "PagedTiles"),
    source.decode_attention("float16", 120, 16, "PagedTiles"),
    source.decode_attention("bfloat16", 192, 16, "PagedTiles"),
    source.decode_attention("float32", 256, 1),
    source.decode_attention("float16", 128, 8, "ContiguousSlots"),
    source.prefill_attention("float16", 128),
    source.prefill_attention("bfloat16", 120),
    source.prefill_attention("float16", 160),
    source.merge_prefill("bfloat16", 112),
    source.decode_attention("float16", 128, 8, "PagedTiles", fp8=True),
    source.decode_attention("bfloat16", 128, 1, "PagedTiles", fp8=True),
    source.decode_attention("float16", 256, 16, "PagedTiles", fp8=True),
    source.decode_attention("bfloat16", 128, 16, "ContiguousSlots", fp8=True),
    source.prefill_attention("float16", 128, fp8=True),
    source.reshape_and_cache_fp8("bfloat16"),
    source.plain("reshape_and_cache"),
    source.plain("copy_blocks"),
]


#: The tightest on sm_80 alone, where it needs most registers.
BY_ARCHITECTURE = {"sm_80": [*SOME[::2], TIGHTEST], "sm_90a": SOME[1::2]}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", BY_ARCHITECTURE)
def test_some_instances_compile_without_spills(architecture):
    """Each on one of two architectures; the slow test has all of them on all."""
    kernels = BY_ARCHITECTURE[architecture]
    found = compile_gate.compiled(kernels, architecture)
    assert {one.expression for one in found} == {kernel.expression for kernel in kernels}
    for one in found:
        check(one)


def blocks_per_multiprocessor(dtype: str, head_dim: int, group: int, architecture: str) -> int:
    """Of the decode kernel, by registers (of 65,536, given out by eights) and shared memory (1 KiB more a block)."""
    shared_bytes = compile_gate.SHARED_BYTES[architecture]
    kernel = source.decode_attention(dtype, head_dim, group, "PagedTiles")
    (found,) = compile_gate.compiled([kernel], architecture)
    threads = 32 * source.DECODE_WARPS
    by_registers = 65536 // (-(-found.registers // 8) * 8 * threads)
    return min(by_registers, shared_bytes // (source.decode_shared_bytes(dtype, head_dim, group) + 1024))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "group", "architecture", "blocks"),
    [
        (64, 8, "sm_90a", 5),
        (128, 8, "sm_80", 3),
        (128, 8, "sm_86", 3),
        (128, 8, "sm_90a", 3),
        (128, 8, "sm_120", 3),
        (128, 16, "sm_80", 2),
        (128, 16, "sm_90a", 3),
        (256, 8, "sm_80", 2),
        (256, 8, "sm_90a", 3),
    ],
)
def test_a_multiprocessor_holds_several_blocks(head_dim, group, architecture, blocks):
    assert blocks_per_multiprocessor("bfloat16", head_dim, group, architecture) == blocks


def test_no_block_takes_more_shared_memory_than_the_smallest_device_gives():
    """99 KiB, of sm_86 and sm_89."""
    for dtype, tiles in source.GROUP_TILES.items():
        for head_dim in source.HEAD_DIMS:
            assert all(source.decode_shared_bytes(dtype, head_dim, tile) <= 99 * 1024 for tile in tiles)
            assert prefill.tile_of(dtype, head_dim).shared_bytes <= 99 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("architecture", compile_gate.ARCHITECTURES)
def test_every_instance_compiles_without_spills(architecture):
    found = compile_gate.compiled(compile_gate.every_kernel(compile_gate.SHARED_BYTES[architecture]), architecture)
    latent = len(source.latent_blocks(compile_gate.SHARED_BYTES[architecture])) + 1
    assert len(found) == 3 * 9 * (4 * 3 + 2) + 2 * 8 * (4 * 3 + 1) + 2 * latent + 3 + 2
    for one in found:
        check(one)


def test_the_gate_sees_spills():
    """Eight blocks a multiprocessor leave 64 registers a thread, and this one needs over 200."""
    wide = gpu_cases.planted(
        source.decode_attention("float16", 256, 16),
        "sizeof(Scalar) == 2 && kGroup <= 8 && kHeadDim < 256 ? 3 : 2;",
        "8;",
    )
    (found,) = compile_gate.compiled([wide], "sm_80")
    assert found.registers <= 64
    with pytest.raises(AssertionError):
        check(found)


def test_a_source_that_does_not_compile_names_its_line():
    broken = source.Kernel('#line 7 "broken.cu"\n__global__ void broken() { wrong(); }', "broken")
    with pytest.raises(KernelFault, match=r"^sm_80: broken.cu\(7\): error: .*wrong"):
        compile_gate.compiled([broken], "sm_80")


def test_without_the_headers_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(parts, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"^compiling kernels needs NVRTC: pip install -e '\.\[kernels\]'"):
        compile_gate.compiled(SOME, "sm_80")


REPORT = """ptxas info    : Compiling entry function 'f' for 'sm_80'
    0 bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 88 registers, used 1 barriers
"""


@pytest.mark.parametrize("spilled", [0, 16])
def test_the_c_face_must_not_spill_either(monkeypatch, capsys, spilled):
    monkeypatch.setattr(cpp_face, "registers", lambda architecture: REPORT.format(spilled=spilled))
    monkeypatch.setattr(cpp_face, "nvcc_release", lambda: "13.0")
    assert compile_gate._face_is_compiled() == (spilled == 0)
    assert capsys.readouterr().out == f"C++ face by nvcc 13.0, sm_80: 1 kernels, {spilled} bytes spilled\n"


def test_without_nvcc_the_gate_says_that_the_c_face_is_not_compiled(monkeypatch, capsys):
    def missing(architecture):
        raise MissingExtra("the C++ face needs nvcc")

    monkeypatch.setattr(cpp_face, "registers", missing)
    assert compile_gate._face_is_compiled()
    assert capsys.readouterr().out == "C++ face: not compiled; the C++ face needs nvcc\n"
