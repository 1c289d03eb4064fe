"""CUDA on a CPU: what the shim does with small kernels, right and wrong ones."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from fragmeter.gpu.ops import arrays, cpu_kernels
from fragmeter.gpu.ops.cpu_kernels import CpuKernels
from fragmeter.gpu.ops.source import KERNELS, Kernel, inlined
from fragmeter.sim.types.errors import KernelFault, UserError

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

KERNEL_TEXT = (
    inlined(KERNELS / "ptx.cuh")
    + r"""
__global__ void places(unsigned *out) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}
__global__ void halves(const __half *in, float *out, const float *back, unsigned short *bits) {
    const unsigned place = blockIdx.x * blockDim.x + threadIdx.x;
    out[place] = __half2float(in[place]);
    bits[place] = __float2half_rn(back[place]).bits;
}
__global__ void bfloats(const __nv_bfloat16 *in, float *out, const float *back, unsigned short *bits) {
    const unsigned place = blockIdx.x * blockDim.x + threadIdx.x;
    out[place] = __bfloat162float(in[place]);
    bits[place] = __float2bfloat16_rn(back[place]).bits;
}
template <bool kBarrier> __global__ void reversed(unsigned *out) {
    __shared__ unsigned fixed[64];
    unsigned *dynamic = ptx::dynamic_shared_memory<unsigned>();
    fixed[threadIdx.x] = threadIdx.x + blockIdx.x;
    dynamic[threadIdx.x] = 2 * threadIdx.x;
    if (kBarrier) __syncthreads();
    out[blockIdx.x * 64 + threadIdx.x] = fixed[63 - threadIdx.x] + dynamic[63 - threadIdx.x];
}
__global__ void shuffles(int *out) {
    const int lane = threadIdx.x % 32;
    int sum = threadIdx.x;
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    __syncwarp();
    const long long wide = __shfl_sync(0xffffffffu, (long long)sum << 32, lane);
    sum = (int)(wide >> 32);
    out[threadIdx.x] = sum + 10000 * __shfl_sync(0xffffffffu, lane, (lane + 1) % 32);
}
__global__ void half_a_barrier(int *out) {
    if (threadIdx.x >= 10) __syncthreads();
    out[threadIdx.x] = 1;
}
__global__ void half_a_warp(int *out) {
    if (threadIdx.x % 2) out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1, 2);
    __syncthreads();
}
__global__ void narrow_mask(int *out) { out[threadIdx.x] = __shfl_sync(0xffffu, 1, 0); }
__global__ void absent_lane(int *out) { out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 20); }
__global__ void moves(const unsigned char *in, uint4 *out, int shift) {
    out[threadIdx.x] = ptx::load16(reinterpret_cast<const uint4 *>(in + shift) + threadIdx.x);
}
template <int kKept> __global__ void ring(const uint4 *in, uint4 *out) {
    uint4 *held = ptx::dynamic_shared_memory<uint4>();
    for (int group = 0; group < 3; ++group) {
        ptx::cp_async16(&held[group * 32 + threadIdx.x], &in[group * 32 + threadIdx.x], group != 1);
        ptx::cp_async_commit();
    }
    ptx::cp_async_wait<kKept>();
    for (int group = 0; group < 2; ++group) out[group * 32 + threadIdx.x] = held[group * 32 + threadIdx.x];
}
__global__ void untouched(float *out) {
    float *items = ptx::dynamic_shared_memory<float>();
    out[threadIdx.x] = items[threadIdx.x];
    items[threadIdx.x] = 1;
}
"""
)


def run(expression: str, *arguments, grid=(1, 1, 1), block=(32, 1, 1), seed=0, shared_bytes=0) -> None:
    given = [arrays.view("array", one) if isinstance(one, np.ndarray) else one for one in arguments]
    CpuKernels(seed).prepared(Kernel(KERNEL_TEXT, expression), grid, block, given, shared_bytes=shared_bytes)()


@needs_compiler
def test_every_thread_knows_its_place():
    out = np.zeros((24, 24), np.uint32)
    run("places", out, grid=(2, 3, 4), block=(4, 3, 2))
    assert (out == np.arange(24)[:, None] * 1000 + np.arange(24)).all()


def floats() -> np.ndarray:
    """65,536: halfway between 16-bit neighbours, beside that, subnormals, overflow, and any bits."""
    rng = np.random.default_rng(0)
    halves = np.arange(0, 65536, 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        between = (halves[:-1] + halves[1:]) / 2
        near = np.concatenate([np.nextafter(between, np.float32(side)) for side in (-np.inf, np.inf)])
        edges = np.float32([0.0, -0.0, 65519.996, 65520, 6e-8, 2.9802322e-08, 3e-8, 1e38, np.inf, -np.inf, np.nan])
    known = np.concatenate([halves, between, near, edges])
    return np.concatenate([known, rng.integers(0, 2**32, 65536 - len(known), np.uint32).view(np.float32)])


@needs_compiler
@pytest.mark.parametrize(("kernel", "dtype"), [("halves", "float16"), ("bfloats", "bfloat16")])
def test_16_bit_types_convert_as_numpy_does(kernel, dtype):
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    every, given = np.arange(65536).astype(np.uint16), floats()
    out, bits = np.zeros(65536, np.float32), np.zeros(65536, np.uint16)
    run(kernel, every, out, given, bits, grid=(64, 1, 1), block=(1024, 1, 1))
    np.testing.assert_array_equal(out, every.view(dtype).astype(np.float32))
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = given.astype(dtype)
    np.testing.assert_array_equal(bits.view(dtype).astype(np.float32), wanted.astype(np.float32))


@needs_compiler
def test_shared_memory_and_barriers():
    wanted = [(63 - place) * 3 + block for block in range(3) for place in range(64)]
    for seed in range(5):
        out = np.zeros(192, np.uint32)
        run("reversed<true>", out, grid=(3, 1, 1), block=(64, 1, 1), seed=seed, shared_bytes=256)
        assert out.tolist() == wanted
        run("reversed<false>", out, grid=(3, 1, 1), block=(64, 1, 1), seed=seed, shared_bytes=256)
        assert out.tolist() != wanted


@needs_compiler
def test_shuffles_move_values_within_a_warp():
    out = np.zeros(64, np.int32)
    run("shuffles", out, block=(64, 1, 1))
    sums = np.repeat([sum(range(32)), sum(range(32, 64))], 32)
    assert out.tolist() == (sums + 10000 * np.tile((np.arange(32) + 1) % 32, 2)).tolist()


@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("half_a_barrier", "deadlock: of 32 threads 22 wait at __syncthreads, 0 at a warp's exchange, 10 have ended"),
        ("half_a_warp", "deadlock: of 32 threads 16 wait at __syncthreads, 16 at a warp's exchange, 0 have ended"),
        ("narrow_mask", "a warp exchange with mask 0000ffff: only full warps are simulated"),
    ],
)
def test_threads_that_miss_each_other_are_reported(kernel, message):
    with pytest.raises(KernelFault) as caught:
        run(kernel, np.zeros(32, np.int32))
    assert str(caught.value) == f"{kernel}: {message}"


@needs_compiler
def test_a_lane_that_is_not_there_has_no_value():
    with pytest.raises(KernelFault, match="lane 20, which is not there"):
        run("absent_lane", np.zeros(8, np.int32), block=(8, 1, 1))


@needs_compiler
def test_wide_loads_are_checked():
    given, out = np.arange(1024).astype(np.uint8), np.zeros((32, 16), np.uint8)
    run("moves", given, out, np.int32(512))
    assert (out.reshape(-1) == given[512:]).all()
    with pytest.raises(KernelFault, match="thread .* no multiple of 16"):
        run("moves", given, out, np.int32(4))
    with pytest.raises(KernelFault, match=r"block \(0, 0, 0\), thread 31: .* outside every array"):
        run("moves", given, out, np.int32(528))


@needs_compiler
def test_copies_arrive_when_they_are_waited_for():
    given = np.arange(1, 3 * 32 * 4 + 1).astype(np.uint32).reshape(3, 32, 4)
    wanted = np.stack([given[0], np.zeros_like(given[0])])
    early = 0
    for seed in range(5):
        out = np.zeros((2, 32, 4), np.uint32)
        run("ring<1>", given, out, seed=seed, shared_bytes=1536)
        assert (out == wanted).all()
        run("ring<2>", given, out, seed=seed, shared_bytes=1536)
        early += (out != wanted).any()
    assert early == 5  # 32 dice a run


@needs_compiler
def test_shared_memory_holds_nans_at_first_in_every_block():
    out = np.zeros(32, np.float32)
    run("untouched", out, grid=(3, 1, 1), shared_bytes=128)
    assert np.isnan(out).all()


@needs_compiler
def test_too_little_dynamic_shared_memory_is_a_fault():
    with pytest.raises(KernelFault, match="ring<1>: 0 bytes of dynamic shared memory, and the kernel needs 16"):
        run("ring<1>", np.zeros((3, 32, 4), np.uint32), np.zeros((2, 32, 4), np.uint32))


@needs_compiler
def test_a_grid_of_nothing_runs_nothing():
    run("places", np.zeros(1, np.uint32), grid=(0, 1, 1))


@needs_compiler
def test_a_source_that_does_not_compile_names_its_line():
    broken = Kernel('#line 7 "broken.cu"\n__global__ void broken() { wrong(); }\n', "broken")
    with pytest.raises(KernelFault, match="^broken: broken.cu:7:.*wrong"):
        cpu_kernels.built(broken)


def test_without_a_compiler_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"^running kernels on the CPU needs a C\+\+ compiler: install g\+\+"):
        cpu_kernels.built(Kernel(KERNEL_TEXT, "places"))


def test_where_nothing_can_be_kept_one_line_says_so(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="kernels cannot be made .*: set XDG_CACHE_HOME$"):
        cpu_kernels.built(Kernel(KERNEL_TEXT, "places"))


@pytest.mark.slow
@needs_compiler
def test_a_kernel_is_built_once_and_the_shim_read_once(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_kernels.built(Kernel(KERNEL_TEXT, "places"))
    (header,) = tmp_path.rglob("shim.h")
    header.write_text("#error read again")
    library = cpu_kernels.built(Kernel(KERNEL_TEXT, "reversed<true>"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cpu_kernels.built(Kernel(KERNEL_TEXT, "reversed<true>")) == library
    assert len([*(tmp_path / "fragmeter" / "kernels").glob("*.so")]) == 2


def test_headers_are_written_into_the_text_once():
    text = inlined(KERNELS / "paged_attention.cu")
    assert '#include "' not in text
    assert "#pragma once" not in text
    assert text.count("float kNoScore") == 1
