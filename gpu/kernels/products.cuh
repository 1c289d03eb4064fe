// One warp's matrix products over rows in shared memory: queries by keys, weights by values.
//
// Sums are in registers in the layout of mma.m16n8k16: of 16 rows and 8 columns a lane holds rows g and g + 8 at
// columns 2t and 2t + 1, with g = lane / 4 and t = lane % 4.
// fp32 has no mma instruction: each lane computes the same sums with scalar instructions.
#pragma once

#include "matrix.cuh"
#include "scalar.cuh"

// kStrips strips of 16 rows, by kColumns columns.
template <int kStrips, int kColumns> using Sums = float[kStrips][kColumns / 8][4];

// sums += left * right, of 16 columns that begin at 8-column tile `eight`.
template <class Scalar, class Target, int kStrips>
__device__ __forceinline__ void multiply_columns(Target &sums, int eight, const unsigned (&left)[kStrips][4],
                                                 const unsigned (&right)[4]) {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
        for (int next = 0; next < 2; ++next)
            ptx::mma_m16n8k16<Scalar>(sums[strip][eight + next], left[strip], right[2 * next], right[2 * next + 1]);
}

// kSpan: distance between two rows of shared memory, in 16-byte loads. It is odd, so that the same column of eight rows
// is in different banks.
template <class Scalar, int kHeadDim, int kStrips, int kKeys, int kSpan> struct Products {
    using Row = uint4[kSpan];

    // scores += queries * keys^T
    static __device__ __forceinline__ void score(Sums<kStrips, kKeys> &scores, const Row *queries, const Row *keys) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step) {
            unsigned left[kStrips][4];
#pragma unroll
            for (int strip = 0; strip < kStrips; ++strip)
                ptx::ldmatrix(left[strip], &queries[16 * strip + lane % 16][2 * step + lane / 16]);
#pragma unroll
            for (int eight = 0; eight < kKeys / 8; eight += 2) {
                unsigned right[4];
                ptx::ldmatrix(right, &keys[8 * eight + lane / 16 * 8 + lane % 8][2 * step + lane / 8 % 2]);
                multiply_columns<Scalar>(scores, eight, left, right);
            }
        }
    }

    // sums += weights * values
    static __device__ __forceinline__ void add(Sums<kStrips, kHeadDim> &sums, const Sums<kStrips, kKeys> &weights,
                                               const Row *values) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
            unsigned left[kStrips][4];
#pragma unroll
            for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
                for (int place = 0; place < 4; ++place) {
                    const float *pair = &weights[strip][2 * step + place / 2][2 * (place % 2)];
                    left[strip][place] = ptx::pack<Scalar>(pair[0], pair[1]);
                }
#pragma unroll
            for (int eight = 0; eight < kHeadDim / 8; eight += 2) {
                unsigned right[4];
                ptx::ldmatrix_trans(right, &values[16 * step + lane % 16][eight + lane / 16]);
                multiply_columns<Scalar>(sums, eight, left, right);
            }
        }
    }
};

template <int kHeadDim, int kKeys, int kSpan> struct Products<float, kHeadDim, 1, kKeys, kSpan> {
    using Row = uint4[kSpan];

    static __device__ __forceinline__ void score(Sums<1, kKeys> &scores, const Row *queries, const Row *keys) {
        const int row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
        for (int load = 0; load < kHeadDim / 4; ++load) {
            float left[2][4];
            unpack<float>(queries[row][load], left[0]);
            unpack<float>(queries[row + 8][load], left[1]);
#pragma unroll
            for (int eight = 0; eight < kKeys / 8; ++eight)
#pragma unroll
                for (int place = 0; place < 4; ++place) {
                    float right[4];
                    unpack<float>(keys[8 * eight + column + place % 2][load], right);
#pragma unroll
                    for (int step = 0; step < 4; ++step)
                        scores[0][eight][place] += left[place / 2][step] * right[step];
                }
        }
    }

    static __device__ __forceinline__ void add(Sums<1, kHeadDim> &sums, const Sums<1, kKeys> &weights,
                                               const Row *values) {
        const int lane = threadIdx.x % 32, column = 2 * (lane % 4);
#pragma unroll
        for (int eight = 0; eight < kKeys / 8; ++eight)
#pragma unroll
            for (int key = 0; key < 8; ++key) {
                // Lane key / 2 of the same rows holds this key's weights.
                const float upper = __shfl_sync(kFullWarp, weights[0][eight][key % 2], lane / 4 * 4 + key / 2);
                const float lower = __shfl_sync(kFullWarp, weights[0][eight][2 + key % 2], lane / 4 * 4 + key / 2);
                const float *right = reinterpret_cast<const float *>(values[8 * eight + key]) + column;
#pragma unroll
                for (int part = 0; part < kHeadDim / 8; ++part)
#pragma unroll
                    for (int place = 0; place < 4; ++place)
                        sums[0][part][place] += (place < 2 ? upper : lower) * right[8 * part + place % 2];
            }
    }
};
