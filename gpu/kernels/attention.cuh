// What the attention kernels share: scores that are no scores, and where a sequence's tokens lie.
#pragma once

#include "ptx.cuh"

constexpr unsigned kFullWarp = 0xffffffffu;
// Below every score, and no infinity, so that the difference of two of them is a number; beside it a masked score
// has no weight, before it is scaled as after.
constexpr float kNoScore = -1e30f;
constexpr float kMasked = -3e38f;

__device__ constexpr int ceil_div(int whole, int part) { return (whole + part - 1) / part; }

// The slots of a sequence's tokens: `ids` are its row of what the caller gave.
struct PagedSlots {
    using Id = int;  // a block
    const Id *ids;
    int block_size;

    __device__ __forceinline__ long long of(int token) const {
        return (long long)ids[token / block_size] * block_size + token % block_size;
    }
};
struct ContiguousSlots {
    using Id = long long;  // the first token's slot
    const Id *ids;
    int block_size;  // is 1

    __device__ __forceinline__ long long of(int token) const { return *ids + token; }
};

constexpr long long kNoRow = -1;

// The tokens [start, end) of a sequence, as one KV head sees them.
template <class Scalar, class Slots> struct Tokens {
    const Scalar *keys, *values;
    Slots slots;
    int kv_heads, kv_head, start, end;

    // Where a token lies in the caches, in scalars; kNoRow past the end.
    template <int kHeadDim> __device__ __forceinline__ long long row(int token) const {
        if (token >= end) return kNoRow;
        return (slots.of(token) * kv_heads + kv_head) * kHeadDim;
    }
};
