// A warp's share of decode attention by tensor cores: fp16 and bf16, three query heads of a KV head or more.
//
// Keys and values are the large matrices, so they use the 16 rows of an mma, and the heads its 8 columns. A group of
// 8 heads then wastes nothing, and 16 heads are two products with the same keys:
//
//   scores  [16 tokens, 8 heads]  = keys    [16 tokens, head_dim] * queries [head_dim, 8 heads]
//   outputs [head_dim, 8 heads]  += values' [head_dim, 16 tokens] * weights [16 tokens, 8 heads]
//
// Both products have a head in the same column, so its maximum and sum apply to the outputs without a move. Only the
// weights change from row to column order, by movmatrix. With g = lane / 4 and t = lane % 4 a lane holds heads 2t and
// 2t + 1 of tokens (or dimensions) g and g + 8.
//
// A warp processes its tokens in tiles of 16, and no barrier of the block blocks it. cp.async fetches keys and values in turn: while
// the keys of a tile are multiplied, its values are in flight, and then the keys of the next tile.
//
// At 2.0, 3.3 and 4.8 TB/s (A100, H100, H200), over 108 and 132 multiprocessors and with a latency of 0.8 to 1 us, a multiprocessor needs
// at least 15, 20 and 36 KiB in flight. At head_dim 128 a block has 16 to 32 KiB in flight, and two to four blocks run at a time. More
// tiles in flight were slower on an H200 in nearly all shapes, by up to 17 %: there is room for fewer blocks (docs/gpu.md).
#pragma once

#include "decode.cuh"
#include "fp8.cuh"
#include "matrix.cuh"

template <class Scalar, int kHeadDim, int kGroup, class Slots, class Cache = Scalar> struct MmaDecoder {
    static constexpr int kTile = 16;
    static constexpr int kSlices = padded(kHeadDim) / 16;
    static constexpr int kColumns = kGroup / 8;
    static constexpr bool kFp8 = sizeof(Cache) == 1;
    static constexpr int kRowLoads = kFp8 ? ceil_div(kSlices, 2) * 2 : 2 * kSlices;

    struct Piece {  // keys or values of a tile
        uint4 loads[kTile * kRowLoads];
    };
    // Copies that a lane issues at once; more would use registers that 16 heads of 256 dimensions need, and on sm_90a 16 of 80 and of 112
    // to 128. The conversion of fp8 takes more.
    static constexpr bool kTight = kHeadDim == 256 && kGroup == 16;
    static constexpr bool kWide = kGroup == 16 && kHeadDim >= 112 && kHeadDim <= 128;
    static constexpr bool kCapped = (kHeadDim == 80 && (kFp8 || kGroup == 16)) || (kFp8 && kWide);
    static constexpr bool kHalf = kFp8 || !Slots::kConsecutive || kWide;
    static constexpr int kTightFetches = kFp8 ? 1 : Slots::kConsecutive ? 4 : 2;
    static constexpr int kFetches = kTight ? kTightFetches : kCapped ? 2 : kHalf ? 4 : 8;
    struct Ring {  // per warp
        Piece keys, values;
    };

    using Rows = typename Tokens<Cache, Slots>::Rows;

    // Larger heads leave no registers: places in shared memory are computed again wherever they are needed. Slots of 64 bits take some
    // of those that 16 heads of 120 and 128 leave on sm_90a.
    static constexpr bool kRecomputed =
        kHeadDim > 128 || (kHeadDim >= 120 && kGroup == 16 && sizeof(typename Slots::Id) == 8);
    static __device__ __forceinline__ unsigned own_thread() { return kRecomputed ? threadIdx.x : this_thread(); }

    const Tokens<Cache, Slots> tokens;
    Ring &ring;
    const unsigned thread = own_thread();
    const int warp = thread / 32, lane = thread % 32;
    float scale;
    unsigned query[kColumns][kSlices][2];
    float maximum[kColumns][2], sum[kColumns][2] = {};  // the sum covers this lane's tokens
    float outputs[kColumns][kSlices][4] = {};

    __device__ __forceinline__ MmaDecoder(const Tokens<Cache, Slots> &tokens, Ring &ring)
        : tokens(tokens), ring(ring) {
#pragma unroll
        for (int column = 0; column < kColumns; ++column) maximum[column][0] = maximum[column][1] = kNoScore;
    }

    // Offset of 16 bytes of a row. ldmatrix reads eight rows at once, and their bytes are in eight different groups
    // of four banks: 8 / kSpan rows begin in different groups, and the xor separates the rows after them.
    static __device__ __forceinline__ int swizzled(int row, int load) {
        constexpr int kSpan = kRowLoads % 8 == 0 ? 8 : kRowLoads % 4 == 0 ? 4 : 2;
        return row * kRowLoads + (load ^ row * kSpan / 8 % kSpan);
    }

    __device__ __forceinline__ void load_queries(const Scalar *queries, int heads, float scale) {
        this->scale = scale;
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            const int head = 8 * column + lane / 4;
            if constexpr (kFp8) {
                load_queries_for_fp8(query[column], queries + head * kHeadDim + 4 * (lane % 4), head < heads);
                continue;
            }
#pragma unroll
            for (int pair = 0; pair < 2 * kSlices; ++pair) {
                const Scalar *scalars = queries + head * kHeadDim + 8 * pair + 2 * (lane % 4);
                const bool there = head < heads && 8 * pair < kHeadDim;
                query[column][pair / 2][pair % 2] = there ? *reinterpret_cast<const unsigned *>(scalars) : 0;
            }
        }
    }

    // The dimensions of a slice in the order in which fragments of keys have them after their conversion: a lane's register of 16
    // keys' bytes has dimensions 4t to 4t + 3, of which 4t and 4t + 2 come first.
    static __device__ __forceinline__ void load_queries_for_fp8(unsigned (&query)[kSlices][2], const Scalar *scalars,
                                                                bool there) {
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
            const unsigned *pairs = reinterpret_cast<const unsigned *>(scalars + 16 * slice);
            const unsigned first = there ? pairs[0] : 0, second = there ? pairs[1] : 0;
            query[slice][0] = (first & 0xffffu) | second << 16;
            query[slice][1] = first >> 16 | (second & 0xffff0000u);
        }
    }

    __device__ __forceinline__ int first_token(int tile) const {
        return tokens.start + (tile * kWarps + warp) * kTile;
    }

    __device__ __forceinline__ Rows find_rows(int tile) const {
        return tokens.template rows<kHeadDim, kTile>(first_token(tile));
    }

    // What a lane copies in a step of a tile: 16 bytes of a token, and their place. Where 32 lanes copy whole rows, steps differ by
    // constants: kRows tokens, and in their places an xor, since lane / kRowLoads has only bits below kRows, a power of two.
    static constexpr bool kWholeRows = 32 % kRowLoads == 0;
    static constexpr int kRows = 32 / kRowLoads;
    // Whether an address follows from the one before: for consecutive tokens, but where slots of 64 bits leave no registers for it.
    static constexpr bool kFollowing =
        Slots::kConsecutive && kWholeRows && !(kFp8 && kTight && sizeof(typename Slots::Id) == 8);

    __device__ __forceinline__ int token_of(int step) const {
        return kWholeRows ? step * kRows + lane / kRowLoads : (step * 32 + lane) / kRowLoads;
    }
    __device__ __forceinline__ int load_of(int step) const {
        return (kWholeRows ? lane : step * 32 + lane) % kRowLoads;
    }
    __device__ __forceinline__ int place_of(int step) const {
        if (!kWholeRows) return swizzled(token_of(step), load_of(step));
        return step * 32 + (swizzled(lane / kRowLoads, lane % kRowLoads) ^ step * kRows % 8);
    }

    // Tokens past the sequence's end and places past the head's end get zeros: a weight of zero does not cancel a NaN or infinity
    // in stale memory.
    __device__ __forceinline__ void fetch(Piece &piece, const Cache *cache, const Rows &rows) {
        if constexpr (kFollowing) return fetch_consecutive(piece, cache, rows);
#pragma unroll kFetches
        for (int step = 0; step < kTile * kRowLoads / 32; ++step) {
            const Row row = tokens.template row_of<kHeadDim>(rows, token_of(step));
            const int part = load_of(step) * kPerLoad<Cache>;
            const bool there = kRowLoads * kPerLoad<Cache> == kHeadDim || part < kHeadDim;
            ptx::cp_async16(&piece.loads[place_of(step)], cache + row.first + (there ? row.within + part : 0),
                            row.valid && there);
        }
        ptx::cp_async_commit();
    }

    // The same where a lane's tokens are kRows rows apart: an address follows from the one before by one sum.
    __device__ __forceinline__ void fetch_consecutive(Piece &piece, const Cache *cache, const Rows &rows) {
        const int span = tokens.kv_heads * kHeadDim, part = load_of(0) * kPerLoad<Cache>, left = rows.left - token_of(0);
        const bool there = kRowLoads * kPerLoad<Cache> == kHeadDim || part < kHeadDim;
        const Cache *from = cache + rows.first + (token_of(0) * span + (there ? part : 0));
#pragma unroll kFetches
        for (int step = 0; step < kTile * kRowLoads / 32; ++step, from += kRows * span)
            ptx::cp_async16(&piece.loads[place_of(step)], from, step * kRows < left && there);
        ptx::cp_async_commit();
    }

    // Waits until the oldest piece has arrived for all lanes.
    __device__ __forceinline__ void wait() {
        ptx::cp_async_wait<1>();
        __syncwarp();
    }

    // Fragments of 32 dimensions in bytes have the rows of those of 16 dimensions in 16 bits, and twice as many columns.
    __device__ __forceinline__ void score(const Piece &keys, float (&scores)[kColumns][4]) const {
        if constexpr (kFp8) return score_fp8(keys, scores);
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
            unsigned key[4];
            ptx::ldmatrix(key, &keys.loads[swizzled(lane % 16, 2 * slice + lane / 16)]);
#pragma unroll
            for (int column = 0; column < kColumns; ++column)
                ptx::mma_m16n8k16<Scalar>(scores[column], key, query[column][slice][0], query[column][slice][1]);
        }
    }

    __device__ __forceinline__ void score_fp8(const Piece &keys, float (&scores)[kColumns][4]) const {
        unsigned bytes[4];
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
            unsigned key[4];
            if (slice % 2 == 0) ptx::ldmatrix(bytes, &keys.loads[swizzled(lane % 16, slice + lane / 16)]);
#pragma unroll
            for (int eight = 0; eight < 2; ++eight)  // tokens
                FromFp8<Scalar>::convert(bytes[slice % 2 * 2 + eight], key[eight], key[2 + eight]);
#pragma unroll
            for (int column = 0; column < kColumns; ++column)
                ptx::mma_m16n8k16<Scalar>(scores[column], key, query[column][slice][0], query[column][slice][1]);
        }
    }

    // Converts scores to weights, and rescales the previous sums to the new maximum.
    __device__ __forceinline__ void weigh(int tile, float (&scores)[kColumns][4]) {
        const int left = tokens.end - first_token(tile) - lane / 4;
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                float &first = scores[column][side], &second = scores[column][2 + side];
                first = left > 0 ? first * scale : kMasked;
                second = left > 8 ? second * scale : kMasked;
            }
        // Shuffles come after all choices: the compiler would put those between two choices into both branches, where parts of a warp
        // wait for each other.
        __syncwarp();
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                float &first = scores[column][side], &second = scores[column][2 + side];
                float new_maximum = fmaxf(maximum[column][side], fmaxf(first, second));
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2)
                    new_maximum = fmaxf(new_maximum, __shfl_xor_sync(kFullWarp, new_maximum, distance));
                const float factor = ptx::exp2(maximum[column][side] - new_maximum);
                maximum[column][side] = new_maximum;
                first = ptx::exp2(first - new_maximum);
                second = ptx::exp2(second - new_maximum);
                sum[column][side] = sum[column][side] * factor + first + second;
#pragma unroll
                for (int slice = 0; slice < kSlices; ++slice) {
                    outputs[column][slice][side] *= factor;
                    outputs[column][slice][2 + side] *= factor;
                }
            }
    }

    __device__ __forceinline__ void add_values(const Piece &values, const float (&weights)[kColumns][4]) {
        unsigned weight[kColumns][2];
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                weight[column][half] = ptx::movmatrix_trans(
                    ptx::pack<Scalar>(weights[column][2 * half], weights[column][2 * half + 1]));
        if constexpr (kFp8) return add_values_fp8(values, weight);
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
            unsigned value[4];
            ptx::ldmatrix_trans(value,
                                &values.loads[swizzled(lane / 16 * 8 + lane % 8, 2 * slice + lane / 8 % 2)]);
#pragma unroll
            for (int column = 0; column < kColumns; ++column)
                ptx::mma_m16n8k16<Scalar>(outputs[column][slice], value, weight[column][0], weight[column][1]);
        }
    }

    // A lane's register of transposed bytes has dimensions 2g and 2g + 1 of tokens 2t and 2t + 1. So row g of the product is
    // dimension 2g, and row g + 8 is 2g + 1.
    __device__ __forceinline__ void add_values_fp8(const Piece &values, const unsigned (&weight)[kColumns][2]) {
        unsigned bytes[4];
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
            unsigned value[4];
            if (slice % 2 == 0)
                ptx::ldmatrix_trans(bytes, &values.loads[swizzled(lane / 16 * 8 + lane % 8, slice + lane / 8 % 2)]);
#pragma unroll
            for (int eight = 0; eight < 2; ++eight)  // tokens
                FromFp8<Scalar>::convert(bytes[slice % 2 + 2 * eight], value[2 * eight], value[2 * eight + 1]);
#pragma unroll
            for (int column = 0; column < kColumns; ++column)
                ptx::mma_m16n8k16<Scalar>(outputs[column][slice], value, weight[column][0], weight[column][1]);
        }
    }

    // The dimensions of a lane's outputs of a slice.
    __device__ __forceinline__ int first_dimension(int slice) const {
        return 16 * slice + (kFp8 ? lane / 4 * 2 : lane / 4);
    }
    static constexpr int kSecond = kFp8 ? 1 : 8;  // the second one after the first

    __device__ __forceinline__ void run() {
        const Rows first = find_rows(0);
        Rows ahead = find_rows(1);  // a tile before they are needed: a block table lookup takes long
        fetch(ring.keys, tokens.keys, first);
        fetch(ring.values, tokens.values, first);
        for (int tile = 0; first_token(tile) < tokens.end; ++tile) {
            float scores[kColumns][4] = {};
            wait();
            score(ring.keys, scores);
            __syncwarp();  // no lane reads them any more
            fetch(ring.keys, tokens.keys, ahead);
            weigh(tile, scores);
            wait();
            add_values(ring.values, scores);
            __syncwarp();
            fetch(ring.values, tokens.values, ahead);
            ahead = find_rows(tile + 2);
        }
        ptx::cp_async_wait<0>();
    }

    __device__ __forceinline__ void write(WarpResults<kHeadDim, kGroup> &results) {
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
#pragma unroll
            for (int side = 0; side < 2; ++side)
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2)
                    sum[column][side] += __shfl_xor_sync(kFullWarp, sum[column][side], distance);
#pragma unroll
        for (int column = 0; column < kColumns; ++column)
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                const int head = 8 * column + 2 * (lane % 4) + side;
                if (lane < 4) results.states[warp][head] = make_float2(maximum[column][side], sum[column][side]);
#pragma unroll
                for (int slice = 0; slice < kSlices; ++slice) {
                    float *dimension = &results.values[warp][head][first_dimension(slice)];
                    dimension[0] = outputs[column][slice][side];
                    if (16 * slice + kSecond < kHeadDim) dimension[kSecond] = outputs[column][slice][2 + side];
                }
            }
    }
};
