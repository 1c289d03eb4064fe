// Shared by the attention kernels: the score of masked tokens, and the slots of a sequence's tokens.
#pragma once

#include "ptx.cuh"

constexpr unsigned kFullWarp = 0xffffffffu;
// Below every score, but finite, so that the difference of two such values is a number. A masked score has no weight
// relative to it, both before and after scaling.
constexpr float kNoScore = -1e30f;
constexpr float kMasked = -3e38f;

__device__ constexpr int ceil_div(int whole, int part) { return (whole + part - 1) / part; }

// The number of this thread, anew at each call. What follows from it is else computed once before an outer loop, and takes registers
// in all of it.
__device__ __forceinline__ unsigned this_thread() {
    unsigned thread = threadIdx.x;
#ifdef __CUDACC__
    asm volatile("" : "+r"(thread));
#endif
    return thread;
}

// Scalars of a row in shared memory and registers: whole 16 columns of an mma. Those past the head's end are zeros.
__device__ constexpr int padded(int head_dim) { return ceil_div(head_dim, 16) * 16; }

// The slots of a sequence's tokens: `ids` is the sequence's row of the caller's ids. kConsecutive: 16 tokens from a multiple
// of 16 on have consecutive slots, so one look-up serves a tile.
struct PagedSlots {
    using Id = int;  // a block
    static constexpr bool kConsecutive = false;
    const Id *ids;
    int block_size;

    __device__ __forceinline__ long long of(int token) const {
        return (long long)ids[token / block_size] * block_size + token % block_size;
    }
};
// The same for blocks whose size is a multiple of 16.
struct PagedTiles : PagedSlots {
    static constexpr bool kConsecutive = true;
};
struct ContiguousSlots {
    using Id = long long;  // the first token's slot
    static constexpr bool kConsecutive = true;
    const Id *ids;
    int block_size;  // is 1

    __device__ __forceinline__ long long of(int token) const { return *ids + token; }
};

constexpr long long kNoRow = -1;

// The rows of a tile's tokens in the caches, which a warp looks up before it fetches them.
template <bool kConsecutive> struct TileRows {  // lane l holds the offset of token l
    long long own;
};
template <> struct TileRows<true> {  // the offset of the first token, and how many tokens there are up to the end
    long long first;
    int left;
};

// A token's row in the caches: `within` scalars behind `first`, which is alike for a warp if one look-up served the tile. A sum of
// 32 bits and one of 64 take half the instructions of two of 64. `valid` says that the token is before the end.
struct Row {
    long long first;
    int within;
    bool valid;
};

// The tokens [start, end) of a sequence, as one KV head sees them.
template <class Scalar, class Slots> struct Tokens {
    using Rows = TileRows<Slots::kConsecutive>;

    const Scalar *keys, *values;
    Slots slots;
    int kv_heads, kv_head, start, end;

    // Offset of a token in the caches, in scalars; kNoRow past the end.
    template <int kHeadDim> __device__ __forceinline__ long long row(int token) const {
        if (token >= end) return kNoRow;
        return (slots.of(token) * kv_heads + kv_head) * kHeadDim;
    }

    // The rows of kTile tokens, kTile a divisor of 16.
    template <int kHeadDim, int kTile> __device__ __forceinline__ Rows rows(int first_token) const {
        if constexpr (Slots::kConsecutive)
            return {first_token < end ? row<kHeadDim>(first_token) : 0, end - first_token};
        else
            return {row<kHeadDim>(first_token + (int)threadIdx.x % kTile)};
    }

    // The row of a token of a tile. All lanes of a warp call this.
    template <int kHeadDim> __device__ __forceinline__ Row row_of(const Rows &rows, int token) const {
        if constexpr (Slots::kConsecutive) {
            return {rows.first, token * (kv_heads * kHeadDim), token < rows.left};
        } else {
            const long long offset = __shfl_sync(kFullWarp, rows.own, token);
            return {offset == kNoRow ? 0 : offset, 0, offset != kNoRow};
        }
    }
};

// Merges one dimension per thread of the partial results of a head: `states` [heads, partitions] (maximum, sum; base 2)
// and `values` [..., head_dim], weighted and not divided. Only the first `used` partitions have results. All threads of
// whole warps call this. A batch of partitions is loaded before it is added: one long sequence has a hundred of
// them, and few blocks of threads.
constexpr int kBatch = 16;
template <int kHeadDim>
__device__ __forceinline__ float merged(const float2 *states, const float *values, long long head, int partitions,
                                        int used) {
    states += head * partitions;
    values += head * partitions * kHeadDim + min((int)threadIdx.x, kHeadDim - 1);
    const int lane = threadIdx.x % 32;
    float maximum = kNoScore, sum = 0, value = 0;
    for (int partition = lane; partition < used; partition += 32) maximum = fmaxf(maximum, states[partition].x);
    for (int distance = 16; distance > 0; distance /= 2)
        maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, distance));
    for (int first = 0; first < used; first += kBatch) {
        float batch[kBatch];
#pragma unroll
        for (int place = 0; place < kBatch; ++place)
            batch[place] = first + place < used ? values[(first + place) * kHeadDim] : 0;
        const bool there = lane < kBatch && first + lane < used;
        const float2 state = there ? states[first + lane] : make_float2(kMasked, 0);
        const float weight = ptx::exp2(state.x - maximum);
        sum += state.y * weight;
#pragma unroll
        for (int place = 0; place < kBatch; ++place)
            value += batch[place] * __shfl_sync(kFullWarp, weight, place);
    }
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kFullWarp, sum, distance);
    return sum == 0 ? 0 : value / sum;
}
