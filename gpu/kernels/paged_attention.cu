// Decode attention over a KV cache: one query token a sequence, its keys and values found by a block table, or one
// after the other.
//
// A block of threads serves up to kGroup query heads of one KV head, over one partition of one sequence, so a key
// is read once for all of them. kLanes threads share a token's row, 16 bytes each; the block goes through its
// partition in tiles, and cp.async fetches the next tile while this one is computed. Each row of threads keeps an
// online softmax of its own (running maximum and sum, in base 2); they are merged at the end, and partitions by a
// second kernel.
//
//   tile of kTile tokens:   step 0   | token 0: lane 0 .. kLanes-1 | token 1: ... |  ...  kRows tokens at a time
//                           step 1   | token kRows ...
#include "attention.cuh"
#include "scalar.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kStages = 2;

__device__ constexpr int lanes_for(int loads) { return loads > 16 ? 32 : loads > 8 ? 16 : 8; }

template <class Scalar, int kHeadDim> struct Shape {
    static constexpr int kRowLoads = kHeadDim / kPerLoad<Scalar>;
    static constexpr int kLanes = lanes_for(kRowLoads);
    static constexpr int kLoads = ceil_div(kRowLoads, kLanes);
    static constexpr int kScalars = kLoads * kPerLoad<Scalar>;
    static constexpr int kRows = kThreads / kLanes;
    static constexpr int kSteps = 4 / kLoads;
    static constexpr int kTile = kRows * kSteps;
};

// What one row of threads, one warp or one block knows of a query head: this lane's part of it.
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

    // With the same lane of the row of threads that lies `distance` lanes away.
    __device__ __forceinline__ void merge_across(int distance) {
        rescale(fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, distance)));
        sum += __shfl_xor_sync(kFullWarp, sum, distance);
#pragma unroll
        for (int place = 0; place < kScalars; ++place)
            values[place] += __shfl_xor_sync(kFullWarp, values[place], distance);
    }
};

template <class Scalar, int kHeadDim, int kGroup> struct Storage {
    using Of = Shape<Scalar, kHeadDim>;
    struct Ring {
        uint4 keys[kStages][Of::kSteps][Of::kLoads][kThreads];
        uint4 values[kStages][Of::kSteps][Of::kLoads][kThreads];
        long long rows[2][Of::kTile];  // where the tile's tokens lie in the caches, in scalars; kNoRow past the end
    };
    struct Warps {
        float2 states[kWarps][kGroup];  // maximum and sum
        float values[kWarps][kGroup][kHeadDim];
    };
    union {
        Ring ring;
        Warps warps;
    };
};

template <class Scalar, int kHeadDim, int kGroup, class Slots> struct Decoder {
    using Of = Shape<Scalar, kHeadDim>;
    using Ring = typename Storage<Scalar, kHeadDim, kGroup>::Ring;

    const Tokens<Scalar, Slots> tokens;
    Ring &ring;
    const int row = threadIdx.x / Of::kLanes, lane = threadIdx.x % Of::kLanes;
    float query[kGroup][Of::kScalars];
    Online<Of::kScalars> online[kGroup];

    __device__ __forceinline__ Decoder(const Tokens<Scalar, Slots> &tokens, Ring &ring)
        : tokens(tokens), ring(ring) {}

    // Which scalar of the row is this lane's `place`.
    __device__ __forceinline__ int dimension(int place) const {
        constexpr int kEach = kPerLoad<Scalar>;
        return (place / kEach * Of::kLanes + lane) * kEach + place % kEach;
    }

    // `heads` rows of queries, times what makes scores powers of two.
    __device__ __forceinline__ void load_queries(const Scalar *queries, int heads, float scale) {
#pragma unroll
        for (int head = 0; head < kGroup; ++head)
#pragma unroll
            for (int place = 0; place < Of::kScalars; ++place) {
                const bool there = head < heads && dimension(place) < kHeadDim;
                query[head][place] = there ? to_float(queries[head * kHeadDim + dimension(place)]) * scale : 0;
            }
    }

    // One look at the block table a token, by one thread; everybody reads it after a barrier.
    __device__ __forceinline__ void find_rows(int tile) {
        if (threadIdx.x < Of::kTile)
            ring.rows[tile % 2][threadIdx.x] =
                tokens.template row<kHeadDim>(tokens.start + tile * Of::kTile + (int)threadIdx.x);
    }

    // Each lane fetches what it will read itself, so waiting for its own copies is enough. Lanes past the head's end
    // and tokens past the sequence's end are zeros.
    __device__ __forceinline__ void fetch(int tile) {
#pragma unroll
        for (int step = 0; step < Of::kSteps; ++step) {
            const long long first = ring.rows[tile % 2][step * Of::kRows + row];
#pragma unroll
            for (int load = 0; load < Of::kLoads; ++load) {
                const int part = dimension(load * kPerLoad<Scalar>);
                const bool valid = first != kNoRow && part < kHeadDim;
                const long long offset = valid ? first + part : 0;
                ptx::cp_async16(&ring.keys[tile % kStages][step][load][threadIdx.x], tokens.keys + offset, valid);
                ptx::cp_async16(&ring.values[tile % kStages][step][load][threadIdx.x], tokens.values + offset, valid);
            }
        }
        ptx::cp_async_commit();
    }

    __device__ __forceinline__ void compute(int tile) {
        float scores[Of::kSteps][kGroup] = {};
#pragma unroll
        for (int step = 0; step < Of::kSteps; ++step) score(tile, step, scores[step]);
#pragma unroll
        for (int head = 0; head < kGroup; ++head) {
            float maximum = online[head].maximum;
#pragma unroll
            for (int step = 0; step < Of::kSteps; ++step) maximum = fmaxf(maximum, scores[step][head]);
            online[head].rescale(maximum);
#pragma unroll
            for (int step = 0; step < Of::kSteps; ++step) {
                scores[step][head] = ptx::exp2(scores[step][head] - maximum);
                online[head].sum += scores[step][head];
            }
        }
#pragma unroll
        for (int step = 0; step < Of::kSteps; ++step) add_values(tile, step, scores[step]);
    }

    // A token's score for each head, in every lane of its row.
    __device__ __forceinline__ void score(int tile, int step, float (&scores)[kGroup]) const {
#pragma unroll
        for (int load = 0; load < Of::kLoads; ++load) {
            float key[kPerLoad<Scalar>];
            unpack<Scalar>(ring.keys[tile % kStages][step][load][threadIdx.x], key);
#pragma unroll
            for (int head = 0; head < kGroup; ++head)
#pragma unroll
                for (int place = 0; place < kPerLoad<Scalar>; ++place)
                    scores[head] += query[head][load * kPerLoad<Scalar> + place] * key[place];
        }
        const bool there = tokens.start + tile * Of::kTile + step * Of::kRows + row < tokens.end;
#pragma unroll
        for (int head = 0; head < kGroup; ++head) {
#pragma unroll
            for (int distance = Of::kLanes / 2; distance > 0; distance /= 2)
                scores[head] += __shfl_xor_sync(kFullWarp, scores[head], distance);
            if (!there) scores[head] = kMasked;
        }
    }

    __device__ __forceinline__ void add_values(int tile, int step, const float (&weights)[kGroup]) {
#pragma unroll
        for (int load = 0; load < Of::kLoads; ++load) {
            float value[kPerLoad<Scalar>];
            unpack<Scalar>(ring.values[tile % kStages][step][load][threadIdx.x], value);
#pragma unroll
            for (int head = 0; head < kGroup; ++head)
#pragma unroll
                for (int place = 0; place < kPerLoad<Scalar>; ++place)
                    online[head].values[load * kPerLoad<Scalar> + place] += weights[head] * value[place];
        }
    }

    __device__ __forceinline__ void run() {
        const int tiles = ceil_div(tokens.end - tokens.start, Of::kTile);
        find_rows(0);
        __syncthreads();
        fetch(0);
        for (int tile = 0; tile < tiles; ++tile) {
            find_rows(tile + 1);  // past the last tile there are no rows, and nothing is read
            __syncthreads();
            fetch(tile + 1);
            ptx::cp_async_wait<1>();
            compute(tile);
        }
        ptx::cp_async_wait<0>();
    }

    // The rows of a warp into one, then each warp's share to shared memory.
    __device__ __forceinline__ void merge_rows(typename Storage<Scalar, kHeadDim, kGroup>::Warps &warps) {
        const int warp = threadIdx.x / 32;
#pragma unroll
        for (int head = 0; head < kGroup; ++head) {
#pragma unroll
            for (int distance = Of::kLanes; distance < 32; distance *= 2) online[head].merge_across(distance);
            if (threadIdx.x % 32 >= Of::kLanes) continue;
            if (lane == 0) warps.states[warp][head] = make_float2(online[head].maximum, online[head].sum);
#pragma unroll
            for (int place = 0; place < Of::kScalars; ++place)
                if (dimension(place) < kHeadDim)
                    warps.values[warp][head][dimension(place)] = online[head].values[place];
        }
    }
};

// grid: KV heads x tiles of kGroup query heads (KV heads fastest, so that neighbours read neighbouring memory),
// partitions, sequences. With one partition `out` is written; with several, `partial_states` [sequences, heads,
// partitions] (maximum and sum, base 2) and `partial_values` [..., head_dim], for merge_partitions. `ids` are
// `ids_per_sequence` a sequence, for Slots.
template <class Scalar, int kHeadDim, int kGroup, class Slots>
__global__ void __launch_bounds__(kThreads)
    decode_attention(Scalar *out, float2 *partial_states, float *partial_values, const Scalar *query,
                     const Scalar *key_cache, const Scalar *value_cache, const typename Slots::Id *ids,
                     const int *context_lens, int kv_heads, int group, int block_size, int ids_per_sequence,
                     int partition_tokens, float scale) {
    const int kv_head = blockIdx.x % kv_heads, first_head = blockIdx.x / kv_heads * kGroup;
    const int partition = blockIdx.y, partitions = gridDim.y, sequence = blockIdx.z;
    const int start = partition * partition_tokens;
    const int end = min(context_lens[sequence], start + partition_tokens);
    if (partition > 0 && start >= end) return;

    auto &storage = ptx::shared_memory<Storage<Scalar, kHeadDim, kGroup>>();
    const Slots slots{ids + (long long)sequence * ids_per_sequence, block_size};
    Decoder<Scalar, kHeadDim, kGroup, Slots> decoder({key_cache, value_cache, slots, kv_heads, kv_head, start, end},
                                                     storage.ring);
    const long long head = ((long long)sequence * kv_heads + kv_head) * group + first_head;
    const int heads = min(kGroup, group - first_head);
    decoder.load_queries(query + head * kHeadDim, heads, scale);
    decoder.run();
    __syncthreads();  // the ring's memory changes hands
    decoder.merge_rows(storage.warps);
    __syncthreads();

    for (int place = threadIdx.x; place < heads * kHeadDim; place += kThreads) {
        const int which = place / kHeadDim, dimension = place % kHeadDim;
        float maximum = kNoScore, sum = 0, value = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) maximum = fmaxf(maximum, storage.warps.states[warp][which].x);
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            const float factor = ptx::exp2(storage.warps.states[warp][which].x - maximum);
            sum += storage.warps.states[warp][which].y * factor;
            value += storage.warps.values[warp][which][dimension] * factor;
        }
        if (partitions == 1) {
            out[head * kHeadDim + place] = FromFloat<Scalar>::of(sum == 0 ? 0 : value / sum);
            continue;
        }
        const long long partial = (head + which) * partitions + partition;
        partial_values[partial * kHeadDim + dimension] = value;
        if (dimension == 0) partial_states[partial] = make_float2(maximum, sum);
    }
}

// grid: heads, sequences; a thread a dimension. What decode_attention left of each partition into `out`.
template <class Scalar, int kHeadDim>
__global__ void __launch_bounds__(kHeadDim)
    merge_partitions(Scalar *out, const float2 *partial_states, const float *partial_values, const int *context_lens,
                     int partitions, int partition_tokens) {
    const long long head = (long long)blockIdx.y * gridDim.x + blockIdx.x;
    const int used = min(partitions, ceil_div(context_lens[blockIdx.y], partition_tokens));
    float maximum = kNoScore, sum = 0, value = 0;
    for (int partition = 0; partition < used; ++partition)
        maximum = fmaxf(maximum, partial_states[head * partitions + partition].x);
    for (int partition = 0; partition < used; ++partition) {
        const float2 state = partial_states[head * partitions + partition];
        const float factor = ptx::exp2(state.x - maximum);
        sum += state.y * factor;
        value += partial_values[(head * partitions + partition) * kHeadDim + threadIdx.x] * factor;
    }
    out[head * kHeadDim + threadIdx.x] = FromFloat<Scalar>::of(sum == 0 ? 0 : value / sum);
}
