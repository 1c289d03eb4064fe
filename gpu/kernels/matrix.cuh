// The matrix instructions of a warp: all 32 lanes call them together, and each holds its share of every matrix.
//
// A fragment is an 8 x 8 matrix of 16-bit scalars in one register a lane: with g = lane / 4 and t = lane % 4 a lane
// holds [g][2t] in the low half and [g][2t + 1] in the high one (PTX ISA, "Matrix Fragments for mma.m16n8k16").
#pragma once

#include "scalar.cuh"

namespace ptx {

// Loads four fragments from shared memory; lane l provides the address of row l % 8 of matrix l / 8, 16 bytes.
__device__ __forceinline__ void ldmatrix(unsigned (&matrices)[4], const void *row) {
#ifdef __CUDACC__
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
#else
    shim::load_matrices(matrices, row, false);
#endif
}

// Loads the transposed matrices: a lane holds [2t][g] and [2t + 1][g] of the matrix in memory.
__device__ __forceinline__ void ldmatrix_trans(unsigned (&matrices)[4], const void *row) {
#ifdef __CUDACC__
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
#else
    shim::load_matrices(matrices, row, true);
#endif
}

// Transposes a fragment, from register to register.
__device__ __forceinline__ unsigned movmatrix_trans(unsigned matrix) {
#ifdef __CUDACC__
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
    return transposed;
#else
    return shim::transpose_matrix(matrix);
#endif
}

// Two adjacent elements of a fragment, rounded to nearest.
template <class Scalar> __device__ __forceinline__ unsigned pack(float low, float high);

// sums += a * b, in fp32: 16 x 16 by 16 x 8. A lane's registers:
//   a     16 x 16  fragments: rows 0-7, rows 8-15, both for columns 0-7, then both for columns 8-15
//   b     16 x 8   fragments of the transposed, as ldmatrix loads n rows of k: b0 is k 0-7, b1 is k 8-15
//   sums  16 x 8   [g][2t], [g][2t + 1], [g + 8][2t], [g + 8][2t + 1]
template <class Scalar>
__device__ __forceinline__ void mma_m16n8k16(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

#ifdef __CUDACC__
#define FRAGMETER_MATRIX_SCALAR(Scalar, name)                                                                        \
    template <> __device__ __forceinline__ unsigned pack<Scalar>(float low, float high) {                           \
        unsigned packed;                                                                                             \
        asm("cvt.rn." name "x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));                              \
        return packed;                                                                                               \
    }                                                                                                                \
    template <>                                                                                                      \
    __device__ __forceinline__ void mma_m16n8k16<Scalar>(float (&sums)[4], const unsigned (&a)[4], unsigned b0,     \
                                                         unsigned b1) {                                              \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                          \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                          \
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                \
    }
FRAGMETER_MATRIX_SCALAR(__half, "f16")
FRAGMETER_MATRIX_SCALAR(__nv_bfloat16, "bf16")
#undef FRAGMETER_MATRIX_SCALAR
#else
template <class Scalar> unsigned pack(float low, float high) {
    return shim::halves(FromFloat<Scalar>::of(low).bits, FromFloat<Scalar>::of(high).bits);
}
template <class Scalar>
void mma_m16n8k16(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    shim::multiply(sums, a, b0, b1, [](uint32_t bits) { return to_float(Scalar{static_cast<uint16_t>(bits)}); });
}
#endif

}  // namespace ptx
