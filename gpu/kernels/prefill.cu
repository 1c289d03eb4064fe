// Prefill attention over a paged KV cache: causal attention of each sequence's new tokens over all of its tokens.
//
// A block of threads takes kRows rows of one KV head: row r is new token r / group, for the group's head r % group,
// so the heads that share a key read it once. It processes the keys in tiles, with an online softmax (FlashAttention-2,
// Dao 2023; here in base 2). Keys and values have one buffer each: one is loaded while the other is used.
//
//   keys ready | fetch values | score the tile      | values ready | fetch next keys | weigh, add the values
//              |   ... values in flight ...         |              |     ... keys in flight ...
//
// Caches of fp8: rows of bytes arrive in the memory of the rows of 16-bit scalars that they become. A thread converts the loads
// that it has copied itself, before the barrier after which others read them, so this needs no barrier and no memory more.
//
// For few new tokens over a long context the context is split into partitions, which a second kernel merges.
#include "attention.cuh"
#include "fp8.cuh"
#include "products.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

template <class Scalar, int kHeadDim> struct Tile {
    static constexpr int kWidth = padded(kHeadDim);
    static constexpr int kLoads = kWidth / kPerLoad<Scalar>, kHeadLoads = kHeadDim / kPerLoad<Scalar>;
    static constexpr int kSpan = kLoads + 1;
    static constexpr int kStrips = sizeof(Scalar) == 2 && kHeadDim <= 128 ? 2 : 1;
    static constexpr int kWarpRows = 16 * kStrips;
    static constexpr int kRows = kWarps * kWarpRows;
    static constexpr int kKeys = kLoads <= 12 ? 64 : kLoads <= 32 ? 32 : 16;
    using Row = uint4[kSpan];

    struct Storage {
        Row queries[kRows], keys[kKeys], values[kKeys];
        long long rows[2][kKeys];  // offsets of the tile's tokens in the caches, in scalars; kNoRow past the end
        int visible[kRows];            // number of tokens that a row attends to
    };
};

// The rows of a block: their queries, and the tokens that they attend to.
struct Queries {
    long long first_token;  // of the sequence, in `query` and `out`
    int tokens, context, kv_heads, kv_head, group, first_row;

    __device__ __forceinline__ bool holds(int row) const { return first_row + row < tokens * group; }

    // Number of tokens that a row attends to: the sequence ends with the last new token.
    __device__ __forceinline__ int visible(int row) const {
        return context - tokens + (first_row + row) / group + 1;
    }

    // Offset of a row in `query` and `out`.
    template <int kHeadDim> __device__ __forceinline__ long long offset(int row) const {
        const int token = (first_row + row) / group, head = kv_head * group + (first_row + row) % group;
        return ((first_token + token) * kv_heads * group + head) * kHeadDim;
    }
};

template <class Scalar, int kHeadDim, class Cache> struct Prefiller {
    using Of = Tile<Scalar, kHeadDim>;
    using Times = Products<Scalar, Of::kWidth, Of::kStrips, Of::kKeys, Of::kSpan>;
    static constexpr bool kFp8 = sizeof(Cache) == 1;

    const Queries queries;
    const Tokens<Cache, PagedSlots> tokens;
    typename Of::Storage &storage;
    const float scale;
    // The warp's first row in the block, and this lane's first row in a strip; its second one is eight rows further.
    const int warp_row = threadIdx.x / 32 * Of::kWarpRows, lane_row = threadIdx.x % 32 / 4;
    float maximum[Of::kStrips][2], sum[Of::kStrips][2] = {};
    Sums<Of::kStrips, Of::kWidth> values = {};

    __device__ __forceinline__ Prefiller(const Queries &queries, const Tokens<Cache, PagedSlots> &tokens,
                                         typename Of::Storage &storage, float scale)
        : queries(queries), tokens(tokens), storage(storage), scale(scale) {
#pragma unroll
        for (int strip = 0; strip < Of::kStrips; ++strip)
#pragma unroll
            for (int half = 0; half < 2; ++half) maximum[strip][half] = kNoScore;
    }

    // Rows past the sequence's last are zeros, and so are loads past the head's end.
    __device__ __forceinline__ void fetch_queries(const Scalar *query) {
        if (threadIdx.x < Of::kRows) storage.visible[threadIdx.x] = queries.visible(threadIdx.x);
        for (int place = threadIdx.x; place < Of::kRows * Of::kLoads; place += kThreads) {
            const int row = place / Of::kLoads, load = place % Of::kLoads;
            const bool valid = queries.holds(row) && load < Of::kHeadLoads;
            const long long offset = valid ? queries.offset<kHeadDim>(row) + load * kPerLoad<Scalar> : 0;
            ptx::cp_async16(&storage.queries[row][load], query + offset, valid);
        }
    }

    // One block table lookup per token, by one thread; all threads read the result after a barrier.
    __device__ __forceinline__ void find_rows(int first_key) {
        if (threadIdx.x < Of::kKeys)
            storage.rows[first_key / Of::kKeys % 2][threadIdx.x] =
                tokens.template row<kHeadDim>(first_key + (int)threadIdx.x);
    }

    // Fetches a tile of keys or values; zeros past the end.
    __device__ __forceinline__ void fetch(typename Of::Row *to, const Cache *cache, int first_key) {
        if constexpr (kFp8) return fetch_fp8(to, cache, first_key);
#pragma unroll 2  // sums and scores leave few registers
        for (int place = threadIdx.x; place < Of::kKeys * Of::kLoads; place += kThreads) {
            const int row = place / Of::kLoads, load = place % Of::kLoads;
            const long long first = storage.rows[first_key / Of::kKeys % 2][row];
            const bool valid = first != kNoRow && load < Of::kHeadLoads;
            const long long offset = valid ? first + load * kPerLoad<Scalar> : 0;
            ptx::cp_async16(&to[row][load], cache + offset, valid);
        }
        ptx::cp_async_commit();
    }

    // Four threads share a row of fp8: each copies every fourth 16 bytes, which become two loads. Eight lanes have two rows, and as
    // kSpan is odd, their accesses to shared memory are in different banks.
    static constexpr int kPieces = kHeadDim / 16, kSharing = 4, kRowsAtOnce = kThreads / kSharing;

    // Calls `work` for each row of this thread, with the row and its first piece.
    template <class Work> static __device__ __forceinline__ void for_own_rows(Work work) {
#pragma unroll
        for (int rows = 0; rows < Of::kKeys; rows += kRowsAtOnce)
            work(rows + (int)threadIdx.x / kSharing, (int)threadIdx.x % kSharing);
    }

    __device__ __forceinline__ void fetch_fp8(typename Of::Row *to, const Cache *cache, int first_key) {
        for_own_rows([&](int row, int own) {
            const long long first = storage.rows[first_key / Of::kKeys % 2][row];
            const bool valid = first != kNoRow;
            const Cache *from = cache + ((valid ? first : 0) + 16 * own);
#pragma unroll
            for (int piece = 0; piece < kPieces; piece += kSharing)
                if (piece + own < kPieces) ptx::cp_async16(&to[row][2 * (piece + own)], from + 16 * piece, valid);
        });
        ptx::cp_async_commit();
    }

    // Waits for this thread's copies of a tile, and converts them.
    __device__ __forceinline__ void receive(typename Of::Row *tile) {
        ptx::cp_async_wait<0>();
        if constexpr (kFp8)
            for_own_rows([&](int row, int own) {
#pragma unroll
                for (int piece = 0; piece < kPieces; piece += kSharing) {
                    if (piece + own >= kPieces) continue;
                    uint4 *loads = &tile[row][2 * (piece + own)];
                    const uint4 bytes = loads[0];
                    widen<Scalar>(bytes, loads[0], loads[1]);
                }
            });
    }

    // Converts scores to weights, and rescales the previous sums to the new maximum.
    __device__ __forceinline__ void weigh(Sums<Of::kStrips, Of::kKeys> &scores) {
#pragma unroll
        for (int strip = 0; strip < Of::kStrips; ++strip)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float highest = kMasked;
#pragma unroll
                for (int place = 0; place < Of::kKeys / 4; ++place)
                    highest = fmaxf(highest, scores[strip][place / 2][2 * half + place % 2]);
#pragma unroll
                for (int distance = 1; distance < 4; distance *= 2)
                    highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, distance));
                rescale(strip, half, fmaxf(maximum[strip][half], highest * scale));
#pragma unroll
                for (int place = 0; place < Of::kKeys / 4; ++place) {
                    float &score = scores[strip][place / 2][2 * half + place % 2];
                    score = ptx::exp2(score * scale - maximum[strip][half]);
                    sum[strip][half] += score;
                }
            }
    }

    __device__ __forceinline__ void mask(Sums<Of::kStrips, Of::kKeys> &scores, int first_key) const {
        const int column = first_key + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int strip = 0; strip < Of::kStrips; ++strip)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int visible = storage.visible[warp_row + 16 * strip + 8 * half + lane_row];
#pragma unroll
                for (int place = 0; place < Of::kKeys / 4; ++place)
                    if (column + place / 2 * 8 + place % 2 >= visible)
                        scores[strip][place / 2][2 * half + place % 2] = kMasked;
            }
    }

    __device__ __forceinline__ void rescale(int strip, int half, float new_maximum) {
        const float factor = ptx::exp2(maximum[strip][half] - new_maximum);
        maximum[strip][half] = new_maximum;
        sum[strip][half] *= factor;
#pragma unroll
        for (int place = 0; place < Of::kWidth / 4; ++place)
            values[strip][place / 2][2 * half + place % 2] *= factor;
    }

    __device__ __forceinline__ void run() {
        find_rows(tokens.start);
        __syncthreads();
        // A warp has no more work after the last token of its last row, but continues to fetch for the other warps.
        const int seen = queries.holds(warp_row) ? storage.visible[warp_row + Of::kWarpRows - 1] : 0;
        fetch(storage.keys, tokens.keys, tokens.start);
        for (int first_key = tokens.start; first_key < tokens.end; first_key += Of::kKeys) {
            receive(storage.keys);
            __syncthreads();  // the keys have arrived, and no warp reads the last values any more
            fetch(storage.values, tokens.values, first_key);
            find_rows(first_key + Of::kKeys);
            Sums<Of::kStrips, Of::kKeys> scores = {};
            if (first_key < seen) Times::score(scores, storage.queries + warp_row, storage.keys);
            receive(storage.values);
            __syncthreads();  // the values have arrived, and no warp reads these keys any more
            fetch(storage.keys, tokens.keys, first_key + Of::kKeys);  // zeros past the last tile
            if (first_key >= seen) continue;
            if (first_key + Of::kKeys > storage.visible[warp_row]) mask(scores, first_key);
            weigh(scores);
            Times::add(values, scores, storage.values);
        }
        ptx::cp_async_wait<0>();
    }

    // Adds up the sums of a row's lanes.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int strip = 0; strip < Of::kStrips; ++strip)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int distance = 1; distance < 4; distance *= 2)
                    sum[strip][half] += __shfl_xor_sync(kFullWarp, sum[strip][half], distance);
    }

    // Copies the warp's rows to the shared memory of its queries, and from there to global memory 16 bytes at a time.
    __device__ __forceinline__ void write(Scalar *out, float value_scale) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int strip = 0; strip < Of::kStrips; ++strip)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float factor = sum[strip][half] == 0 ? 0 : value_scale / sum[strip][half];
                uint4 *row = storage.queries[warp_row + 16 * strip + 8 * half + lane_row];
                Scalar *scalars = reinterpret_cast<Scalar *>(row) + 2 * (lane % 4);
#pragma unroll
                for (int place = 0; place < Of::kWidth / 4; ++place)
                    scalars[place / 2 * 8 + place % 2] =
                        FromFloat<Scalar>::of(values[strip][place / 2][2 * half + place % 2] * factor);
            }
        __syncwarp();
        for (int place = lane; place < Of::kWarpRows * Of::kHeadLoads; place += 32) {
            const int row = warp_row + place / Of::kHeadLoads, load = place % Of::kHeadLoads;
            if (!queries.holds(row)) return;
            uint4 *to = reinterpret_cast<uint4 *>(out + queries.offset<kHeadDim>(row)) + load;
            ptx::store16(to, storage.queries[row][load]);
        }
    }

    // Writes the partial results of the warp's rows in this partition, for merge_prefill.
    __device__ __forceinline__ void write_partials(float2 *states, float *values_of, int partition, int partitions,
                                                   float value_scale) {
        const int column = 2 * (threadIdx.x % 4);
#pragma unroll
        for (int strip = 0; strip < Of::kStrips; ++strip)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = warp_row + 16 * strip + 8 * half + lane_row;
                if (!queries.holds(row)) return;
                const long long place = queries.offset<1>(row) * partitions + partition;
                if (column == 0) states[place] = make_float2(maximum[strip][half], sum[strip][half]);
#pragma unroll
                for (int eight = 0; eight < kHeadDim / 8; ++eight)
                    reinterpret_cast<float2 *>(values_of + place * kHeadDim + column)[4 * eight] =
                        make_float2(values[strip][eight][2 * half] * value_scale,
                                    values[strip][eight][2 * half + 1] * value_scale);
            }
    }
};

// grid: KV heads x tiles of kRows rows (KV heads fastest, tiles with most tokens first), sequences, partitions. The
// tokens of `query` from query_start_loc[s] to query_start_loc[s + 1] are the last ones of sequence s. With one
// partition `out` is written; with several, `partial_states` [tokens, heads, partitions] (maximum and sum, base 2)
// and `partial_values` [..., head_dim], for merge_prefill.
//
// Over caches of fp8 `scales_of_heads` are two arrays with a scale per KV head: a key is its number times the first one, and a value
// times the second one. One scale multiplies all scores of a KV head, and the other one all of its outputs.
template <class Scalar, int kHeadDim, class Cache = Scalar, class... ScalesOfHeads>
__global__ void __launch_bounds__(kThreads)
    prefill_attention(Scalar *out, float2 *partial_states, float *partial_values, const Scalar *query,
                      const Cache *key_cache, const Cache *value_cache, const int *block_tables,
                      const int *query_start_loc, const int *context_lens, int kv_heads, int group, int block_size,
                      int max_blocks_per_seq, int partition_tokens, float scale, ScalesOfHeads... scales_of_heads) {
    using Of = Tile<Scalar, kHeadDim>;
    const ScalesFor<Scalar, Cache> scales{scales_of_heads...};
    const int sequence = blockIdx.y, first_token = query_start_loc[sequence], partition = blockIdx.z;
    const int kv_head = blockIdx.x % kv_heads, tile = (gridDim.x - 1 - blockIdx.x) / kv_heads;
    const Queries queries{first_token, query_start_loc[sequence + 1] - first_token, context_lens[sequence],
                          kv_heads,    kv_head,                                     group,
                          tile * Of::kRows};
    if (!queries.holds(0)) return;

    const PagedSlots slots{block_tables + (long long)sequence * max_blocks_per_seq, block_size};
    const int start = partition * partition_tokens;
    const int end = min(min(queries.context, queries.visible(Of::kRows - 1)), start + partition_tokens);
    if (partition > 0 && start >= end) return;
    auto &storage = *ptx::dynamic_shared_memory<typename Of::Storage>();
    const Tokens<Cache, PagedSlots> tokens{key_cache, value_cache, slots, kv_heads, kv_head, start, end};
    Prefiller<Scalar, kHeadDim, Cache> prefiller(queries, tokens, storage, scale * scales.of_keys(kv_head));
    prefiller.fetch_queries(query);
    prefiller.run();
    prefiller.finish();
    const float value_scale = scales.of_values(kv_head);
    if (gridDim.z == 1)
        prefiller.write(out, value_scale);
    else
        prefiller.write_partials(partial_states, partial_values, partition, gridDim.z, value_scale);
}

// grid: maximum new tokens of a sequence, heads, sequences; one thread per dimension, in whole warps.
template <class Scalar, int kHeadDim>
__global__ void __launch_bounds__(ceil_div(kHeadDim, 32) * 32)
    merge_prefill(Scalar *out, const float2 *partial_states, const float *partial_values, const int *query_start_loc,
                  const int *context_lens, int partitions, int partition_tokens) {
    const int token = query_start_loc[blockIdx.z] + blockIdx.x, left = query_start_loc[blockIdx.z + 1] - token;
    if (left <= 0) return;
    const int used = ceil_div(context_lens[blockIdx.z] - left + 1, partition_tokens);
    const long long head = (long long)token * gridDim.y + blockIdx.y;
    const float value = merged<kHeadDim>(partial_states, partial_values, head, partitions, used);
    if (threadIdx.x < kHeadDim) out[head * kHeadDim + threadIdx.x] = FromFloat<Scalar>::of(value);
}
