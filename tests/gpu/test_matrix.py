"""Matrix instructions on a CPU: each lane's registers, as the PTX ISA's tables for mma.m16n8k16 and ldmatrix say."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import gpu_cases
from fragmeter.gpu.ops import arrays
from fragmeter.gpu.ops.cpu_kernels import CpuKernels
from fragmeter.gpu.ops.source import KERNELS, SCALARS, Kernel, inlined
from fragmeter.sim.types.errors import KernelFault

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

KERNEL_TEXT = (
    inlined(KERNELS / "ptx.cuh")
    + inlined(KERNELS / "matrix.cuh")
    + r"""
template <bool kTrans, bool kBarrier = true> __global__ void loads(const uint4 *rows, unsigned *out, int shift) {
    uint4 *held = ptx::dynamic_shared_memory<uint4>();
    held[threadIdx.x ^ 5] = rows[threadIdx.x ^ 5];
    if (kBarrier) __syncwarp();
    unsigned matrices[4];
    const char *row = reinterpret_cast<const char *>(&held[threadIdx.x]) + shift;
    if (kTrans) ptx::ldmatrix_trans(matrices, row); else ptx::ldmatrix(matrices, row);
    for (int matrix = 0; matrix < 4; ++matrix) out[32 * matrix + threadIdx.x] = matrices[matrix];
}
__global__ void transposes(const unsigned *in, unsigned *out) {
    out[threadIdx.x] = ptx::movmatrix_trans(in[threadIdx.x]);
}
template <class Scalar> __global__ void packs(const float *in, unsigned *out) {
    out[threadIdx.x] = ptx::pack<Scalar>(in[2 * threadIdx.x], in[2 * threadIdx.x + 1]);
}
template <class Scalar> __global__ void multiplies(const unsigned *a, const unsigned *b, float *sums) {
    unsigned left[4];
    float own[4];
    for (int place = 0; place < 4; ++place) left[place] = a[4 * threadIdx.x + place];
    for (int place = 0; place < 4; ++place) own[place] = sums[4 * threadIdx.x + place];
    ptx::mma_m16n8k16<Scalar>(own, left, b[2 * threadIdx.x], b[2 * threadIdx.x + 1]);
    for (int place = 0; place < 4; ++place) sums[4 * threadIdx.x + place] = own[place];
}
"""
)

THREAD = np.arange(32)
GROUP, IN_GROUP = THREAD[:, None] // 4, THREAD[:, None] % 4  # groupID, threadID_in_group


def run(expression: str, *arguments, threads=32, seed=0) -> None:
    given = [arrays.view("array", one) if isinstance(one, np.ndarray) else one for one in arguments]
    kernel = Kernel(KERNEL_TEXT, expression)
    CpuKernels(seed).prepared(kernel, (1, 1, 1), (threads, 1, 1), given, shared_bytes=33 * 16)()


def fragment(matrix: np.ndarray) -> np.ndarray:
    """What the 32 lanes hold of an 8 x 8 matrix of 16-bit values."""
    return np.ascontiguousarray(matrix).view(np.uint32).reshape(32)


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_gives_each_lane_two_neighbours_of_a_row(trans):
    matrices = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    wanted = [fragment(matrix.T if trans else matrix) for matrix in matrices]
    assert wanted[0][5] == (1 * 8 + 2 | (1 * 8 + 3) << 16 if not trans else 2 * 8 + 1 | (3 * 8 + 1) << 16)
    for seed in range(5):
        out = np.zeros((4, 32), np.uint32)
        run(f"loads<{str(trans).lower()}>", matrices, out, np.int32(0), seed=seed)
        assert (out == wanted).all()


def test_ldmatrix_needs_a_barrier_after_the_writes_of_other_lanes():
    matrices = np.arange(1, 257, dtype=np.uint16).reshape(4, 8, 8)
    for seed in range(5):
        out = np.zeros((4, 32), np.uint32)
        run("loads<false, false>", matrices, out, np.int32(0), seed=seed)
        assert (out != [fragment(matrix) for matrix in matrices]).any()


def test_movmatrix_transposes_a_fragment():
    matrix, out = np.arange(64, dtype=np.uint16).reshape(8, 8), np.zeros(32, np.uint32)
    run("transposes", fragment(matrix), out)
    assert (out == fragment(matrix.T)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pack_rounds_and_puts_the_first_low(dtype):
    given, out = np.random.default_rng(0).standard_normal(64).astype(np.float32), np.zeros(32, np.uint32)
    run(f"packs<{SCALARS[dtype]}>", given, out)
    assert out.tobytes() == given.astype(gpu_cases.DTYPES[dtype]).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mma_is_a_product_of_16_by_16_and_16_by_8(dtype):
    rng = np.random.default_rng(0)
    scalar = gpu_cases.DTYPES[dtype]
    a, b = (rng.standard_normal(shape).astype(scalar) for shape in ((16, 16), (16, 8)))
    sums = rng.standard_normal((16, 8)).astype(np.float32)
    place = np.arange(8)  # a0 ... a7
    of_a = (GROUP + 8 * (place // 2 % 2), 2 * IN_GROUP + place % 2 + 8 * (place // 4))
    place = np.arange(4)  # b0 ... b3, c0 ... c3
    of_b = (2 * IN_GROUP + place % 2 + 8 * (place // 2), GROUP + 0 * place)
    of_c = (GROUP + 8 * (place // 2), 2 * IN_GROUP + place % 2)
    out = sums[of_c]
    run(f"multiplies<{SCALARS[dtype]}>", a[of_a].view(np.uint32), b[of_b].view(np.uint32), out)
    wanted = sums + a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(out, wanted[of_c], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("threads", "shift", "message"),
    [
        (16, 0, "a matrix instruction in a warp of less than 32 threads"),
        (32, 8, "thread .* of ldmatrix at an address that is no multiple of 16"),
    ],
)
def test_what_a_gpu_refuses_is_a_fault(threads, shift, message):
    rows, out = np.zeros((32, 8), np.uint16), np.zeros((4, 32), np.uint32)
    with pytest.raises(KernelFault, match=message):
        run("loads<false>", rows, out, np.int32(shift), threads=threads)
