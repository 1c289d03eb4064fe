// A warp's share of decode attention without tensor cores: fp32, and groups of one or two heads.
//
// kLanes lanes share a token's row, 16 bytes each. A warp processes its tokens in tiles, and cp.async fetches
// kStages tiles ahead. Numbers of fp8 are converted as they are read. Each lane fetches the bytes that it reads itself, so it waits only for its own copies, and no
// barrier blocks a warp. Each row of lanes keeps an online softmax of its own (running maximum and sum); they are
// merged at the end.
//
//   tile of kTile tokens:   step 0   | token 0: lane 0 .. kLanes-1 | token 1: ... |  ...  kRows tokens at a time
//                           step 1   | token kRows ...
//
// A ring has 32 KiB per block: two stages of 16, or more of less. On an H200 two were faster than three in 21 of 24
// shapes, by up to 6 %; one was up to 7 % faster still in half of them, and up to 22 % slower with a single sequence.
#pragma once

#include "decode.cuh"
#include "fp8.cuh"

__device__ constexpr int lanes_for(int loads) { return loads > 16 ? 32 : loads > 8 ? 16 : loads > 4 ? 8 : 4; }

// State of a query head in one row of lanes or one warp: this lane's part.
template <int kScalars> struct Online {
    float maximum = kNoScore, sum = 0;
    float values[kScalars] = {};

    __device__ __forceinline__ void rescale(float new_maximum) {
        const float factor = ptx::exp2(maximum - new_maximum);
        maximum = new_maximum;
        sum *= factor;
#pragma unroll
        for (int place = 0; place < kScalars; ++place) values[place] *= factor;
    }

    // Merges with the lane that is `distance` lanes away, which has the same position in its row of lanes.
    __device__ __forceinline__ void merge_across(int distance) {
        rescale(fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, distance)));
        sum += __shfl_xor_sync(kFullWarp, sum, distance);
#pragma unroll
        for (int place = 0; place < kScalars; ++place)
            values[place] += __shfl_xor_sync(kFullWarp, values[place], distance);
    }
};

template <class Scalar, int kHeadDim, int kGroup, class Slots, class Cache> struct FmaDecoder {
    static constexpr int kEach = kPerLoad<Cache>;
    static constexpr int kRowLoads = kHeadDim / kEach;
    static constexpr int kLanes = lanes_for(kRowLoads);
    static constexpr int kLoads = ceil_div(kRowLoads, kLanes);
    static constexpr int kScalars = kLoads * kEach;
    static constexpr int kRows = 32 / kLanes;
    static constexpr int kSteps = kRows > 4 ? 16 / kRows : 4 / kLoads;  // a tile has 16 tokens at most
    static constexpr int kTile = kRows * kSteps;
    static constexpr int kStages = 8 / (kSteps * kLoads);

    struct Ring {  // per warp
        uint4 keys[kStages][kSteps][kLoads][32];
        uint4 values[kStages][kSteps][kLoads][32];
    };

    using Rows = typename Tokens<Cache, Slots>::Rows;

    static __device__ __forceinline__ unsigned own_thread() { return this_thread(); }

    const Tokens<Cache, Slots> tokens;
    Ring &ring;
    const unsigned thread = own_thread();
    const int warp = thread / 32, row = thread % 32 / kLanes, lane = thread % kLanes;
    float query[kGroup][kScalars];
    Online<kScalars> online[kGroup];

    __device__ __forceinline__ FmaDecoder(const Tokens<Cache, Slots> &tokens, Ring &ring)
        : tokens(tokens), ring(ring) {}

    // Index in the row of this lane's scalar `place`.
    __device__ __forceinline__ int dimension(int place) const {
        return (place / kEach * kLanes + lane) * kEach + place % kEach;
    }

    // Loads `heads` rows of queries, scaled so that scores are exponents of two.
    __device__ __forceinline__ void load_queries(const Scalar *queries, int heads, float scale) {
#pragma unroll
        for (int head = 0; head < kGroup; ++head)
#pragma unroll
            for (int place = 0; place < kScalars; ++place) {
                const bool there = head < heads && dimension(place) < kHeadDim;
                query[head][place] = there ? to_float(queries[head * kHeadDim + dimension(place)]) * scale : 0;
            }
    }

    __device__ __forceinline__ int first_token(int tile) const {
        return tokens.start + (tile * kWarps + warp) * kTile;
    }

    __device__ __forceinline__ Rows find_rows(int tile) const {
        return tokens.template rows<kHeadDim, kTile>(first_token(tile));
    }

    // Lanes past the head's end and tokens past the sequence's end get zeros.
    __device__ __forceinline__ void fetch(int tile, const Rows &rows) {
        if constexpr (Slots::kConsecutive) {
            // A lane's tokens are kRows rows apart: an address follows from the one before by one sum.
            const int span = tokens.kv_heads * kHeadDim;
            const long long first = rows.first + row * span;
            const Cache *keys = tokens.keys + first, *values = tokens.values + first;
#pragma unroll
            for (int step = 0; step < kSteps; ++step, keys += kRows * span, values += kRows * span)
                fetch_token(tile, step, keys, values, step * kRows < rows.left - row);
        } else {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const Row token = tokens.template row_of<kHeadDim>(rows, step * kRows + row);
                fetch_token(tile, step, tokens.keys + token.first, tokens.values + token.first, token.valid);
            }
        }
        ptx::cp_async_commit();
    }

    __device__ __forceinline__ void fetch_token(int tile, int step, const Cache *keys, const Cache *values,
                                                bool there) {
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
            const int part = dimension(load * kEach);
            const bool valid = there && part < kHeadDim;
            const int within = part < kHeadDim ? part : 0, stage = tile % kStages, own = threadIdx.x % 32;
            ptx::cp_async16(&ring.keys[stage][step][load][own], keys + within, valid);
            ptx::cp_async16(&ring.values[stage][step][load][own], values + within, valid);
        }
    }

    __device__ __forceinline__ void compute(int tile) {
        float scores[kSteps][kGroup] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) score(tile, step, scores[step]);
#pragma unroll
        for (int head = 0; head < kGroup; ++head) {
            float maximum = online[head].maximum;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) maximum = fmaxf(maximum, scores[step][head]);
            online[head].rescale(maximum);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                scores[step][head] = ptx::exp2(scores[step][head] - maximum);
                online[head].sum += scores[step][head];
            }
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) add_values(tile, step, scores[step]);
    }

    // A token's score for each head, in every lane of its row.
    __device__ __forceinline__ void score(int tile, int step, float (&scores)[kGroup]) const {
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
            float key[kEach];
            unpack_cache<Scalar, Cache>(ring.keys[tile % kStages][step][load][threadIdx.x % 32], key);
#pragma unroll
            for (int head = 0; head < kGroup; ++head)
#pragma unroll
                for (int place = 0; place < kEach; ++place)
                    scores[head] += query[head][load * kEach + place] * key[place];
        }
#pragma unroll
        for (int head = 0; head < kGroup; ++head)
#pragma unroll
            for (int distance = kLanes / 2; distance > 0; distance /= 2)
                scores[head] += __shfl_xor_sync(kFullWarp, scores[head], distance);
        // Choices come after all shuffles: the compiler would put those between two choices into both branches, where parts of a warp
        // wait for each other.
        const bool there = first_token(tile) + step * kRows + row < tokens.end;
#pragma unroll
        for (int head = 0; head < kGroup; ++head)
            if (!there) scores[head] = kMasked;
    }

    __device__ __forceinline__ void add_values(int tile, int step, const float (&weights)[kGroup]) {
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
            float value[kEach];
            unpack_cache<Scalar, Cache>(ring.values[tile % kStages][step][load][threadIdx.x % 32], value);
#pragma unroll
            for (int head = 0; head < kGroup; ++head)
#pragma unroll
                for (int place = 0; place < kEach; ++place)
                    online[head].values[load * kEach + place] += weights[head] * value[place];
        }
    }

    __device__ __forceinline__ void run() {
        Rows rows[kStages];
#pragma unroll
        for (int tile = 0; tile < kStages; ++tile) rows[tile] = find_rows(tile);
        Rows ahead = find_rows(kStages);  // a tile before they are needed: a block table lookup takes long
#pragma unroll
        for (int tile = 0; tile < kStages; ++tile) fetch(tile, rows[tile]);
        for (int tile = 0; first_token(tile) < tokens.end; ++tile) {
            ptx::cp_async_wait<kStages - 1>();
            compute(tile);
            fetch(tile + kStages, ahead);
            ahead = find_rows(tile + kStages + 1);
        }
        ptx::cp_async_wait<0>();
    }

    // Merges the rows of lanes and writes the result.
    __device__ __forceinline__ void write(WarpResults<kHeadDim, kGroup> &results) {
#pragma unroll
        for (int head = 0; head < kGroup; ++head)
#pragma unroll
            for (int distance = kLanes; distance < 32; distance *= 2) online[head].merge_across(distance);
        if (row > 0) return;
#pragma unroll
        for (int head = 0; head < kGroup; ++head) {
            if (lane == 0) results.states[warp][head] = make_float2(online[head].maximum, online[head].sum);
#pragma unroll
            for (int place = 0; place < kScalars; ++place)
                if (dimension(place) < kHeadDim)
                    results.values[warp][head][dimension(place)] = online[head].values[place];
        }
    }
};
