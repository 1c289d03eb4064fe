// Decode attention over a paged cache of latent vectors (MLA; DeepSeek-V2, arXiv 2405.04434): one query token per sequence. A token
// has one vector of 576 scalars, which is the key of all heads: 512 of the latent and 64 of the rotary part. The first 512 are
// the value of all heads, too.
//
// A block of threads serves kHeads query heads over one partition of one sequence. cp.async fetches tiles of 32 vectors into
// shared memory, kAhead tiles ahead. A tile is read from memory once and used twice:
//
//   scores  [heads, 32 tokens] = queries [heads, 576] * tile'
//   outputs [heads, 512]      += weights [heads, 32 tokens] * tile's first 512 columns
//
// The outputs are in registers: 64 to 128 of a thread, so all warps of a block work on the same tile. For the scores a warp takes a
// fourth of the dimensions, so that its part of the queries remains in registers, too. Some warps then add up the four parts
// and make weights of them (online softmax in base 2), which all warps read. For the outputs a warp takes its columns of all heads.
//
//   tile ready | fetch a later tile | score | parts ready | weigh | weights ready | rescale, add | ...
//
// With 64 heads the tensor cores limit the kernel where a model has 128, so they do not wait for the weights: the outputs are a
// tile behind, and half of the warps add the last tile's values while the other half weighs. That takes a stage more.
//
//   tile ready | fetch a later tile | score | parts ready | weigh      | rescale, add the last tile's | ...
//              |                    |       |             | or the other way round in half of the warps
//
// 64 heads take the vectors from memory twice for a model of 128 heads, 16 heads eight times; all but the first are reads of the
// L2 cache if blocks of the same tokens run at once.
#include "attention.cuh"
#include "products.cuh"

constexpr int kLatentDim = 512, kKeyDim = kLatentDim + 64;

template <class Scalar, int kHeads, int kStages> struct LatentBlock {
    // Tiles by which the outputs are behind the scores.
    static constexpr int kLag = kHeads == 64 ? 1 : 0;
    static constexpr int kAhead = kStages - 1 - kLag;  // tiles in flight
    static_assert(sizeof(Scalar) == 2 && kAhead >= 1);
    static constexpr int kWarps = kHeads == 16 ? 4 : 8, kThreads = 32 * kWarps;
    static constexpr int kTile = 32;
    static constexpr int kLoads = kKeyDim / kPerLoad<Scalar>, kSpan = kLoads + 1;
    static constexpr int kParts = 4, kPartDims = kKeyDim / kParts;
    static constexpr int kStrips = kHeads / 16 / (kWarps / kParts);  // of 16 heads, which a warp scores
    static constexpr int kPartLoads = kPartDims / kPerLoad<Scalar>;
    static constexpr int kDims = kLatentDim / kWarps;                // of the outputs of a warp
    static constexpr int kDimLoads = kDims / kPerLoad<Scalar>;
    // Distances between rows, without bank conflicts: of 16-byte loads by eight lanes, one a row, and of pairs of floats by 16
    // lanes, four a row.
    static constexpr int kScoreSpan = kTile + 8, kWeightSpan = kTile / 8 + 1;
    static_assert(kSpan % 2 == 1 && kWeightSpan % 2 == 1 && kScoreSpan % 32 == 8);
    using Row = uint4[kSpan];

    struct Storage {
        Row tiles[kStages][kTile];
        float scores[kParts][kHeads][kScoreSpan];
        uint4 weights[1 + kLag][kHeads][kWeightSpan];
        float factors[1 + kLag][kHeads];  // by which a tile's maximum rescales the sums before it
        float2 states[kHeads];  // maximum and sum
    };
};

// The vectors of a sequence's tokens [start, end).
template <class Scalar> struct LatentTokens {
    const Scalar *cache;
    const int *blocks;  // the sequence's row of the block tables
    int block_size, start, end;
    int blocks_a_tile, tokens_left;  // from a tile to the next one: whole blocks, and tokens beside them
};

template <class Scalar, int kHeads, int kStages> struct LatentDecoder {
    using Of = LatentBlock<Scalar, kHeads, kStages>;
    static constexpr int kTile = Of::kTile, kLag = Of::kLag, kSteps = Of::kPartDims / 16;
    // Eight threads copy 128 bytes of a row at once, so all threads copy kRows rows.
    static constexpr int kRows = Of::kThreads / 8, kTurns = kTile / kRows;

    // Loops that are unrolled, but not with the outputs of 64 heads, which leave too few registers: over 16 tokens of values, and over
    // parts of scores.
    static constexpr int kAdded = kHeads == 64 ? 1 : kTile / 16, kSummed = kHeads == 64 ? 1 : Of::kParts;

    const LatentTokens<Scalar> tokens;
    typename Of::Storage &storage;
    const float scale;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = warp % Of::kParts, first_strip = warp / Of::kParts * Of::kStrips;
    unsigned query[kSteps][Of::kStrips][4];
    // The tokens of the next tile that this thread copies: their places in the table and in the block, and the block's id.
    int place[kTurns], offset[kTurns], id[kTurns];
    // Of a head, in the warps that weigh; the sum covers this lane's tokens.
    float maximum = kNoScore, sum = 0;
    Sums<kHeads / 16, Of::kDims> outputs = {};

    __device__ __forceinline__ LatentDecoder(const LatentTokens<Scalar> &tokens, typename Of::Storage &storage,
                                             float scale)
        : tokens(tokens), storage(storage), scale(scale) {}

    // The fragments of this warp's heads and dimensions; zeros for heads past the last.
    __device__ __forceinline__ void load_queries(const Scalar *queries, int heads) {
#pragma unroll
        for (int strip = 0; strip < Of::kStrips; ++strip)
#pragma unroll
            for (int place = 0; place < 4; ++place) {
                const int head = 16 * (first_strip + strip) + place % 2 * 8 + lane / 4;
                const Scalar *scalars =
                    queries + head * kKeyDim + part * Of::kPartDims + place / 2 * 8 + 2 * (lane % 4);
#pragma unroll
                for (int step = 0; step < kSteps; ++step)
                    query[step][strip][place] =
                        head < heads ? *reinterpret_cast<const unsigned *>(scalars + 16 * step) : 0;
            }
    }

    __device__ __forceinline__ int first_token(int tile) const { return tokens.start + tile * kTile; }

    __device__ __forceinline__ void find_first_blocks() {
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            const int token = tokens.start + turn * kRows + threadIdx.x / 8;
            place[turn] = token / tokens.block_size;
            offset[turn] = token % tokens.block_size;
        }
        look_up(0);
    }

    __device__ __forceinline__ void find_next_blocks(int tile) {
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            place[turn] += tokens.blocks_a_tile;
            offset[turn] += tokens.tokens_left;
            if (offset[turn] >= tokens.block_size) {
                offset[turn] -= tokens.block_size;
                ++place[turn];
            }
        }
        look_up(tile);
    }

    static constexpr int kNoBlock = -1;
    __device__ __forceinline__ void look_up(int tile) {
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            const int token = first_token(tile) + turn * kRows + threadIdx.x / 8;
            id[turn] = kNoBlock;
            if (token < tokens.end) id[turn] = tokens.blocks[place[turn]];
        }
    }

    // Fetches the tile that was looked up last. Tokens past the end get zeros: a weight of zero does not cancel a NaN in stale
    // memory.
    __device__ __forceinline__ void fetch(int tile) {
        typename Of::Row *rows = storage.tiles[tile % kStages] + threadIdx.x / 8;
        const int load = threadIdx.x % 8;
        if (first_token(tile) < tokens.end)
#pragma unroll
            for (int turn = 0; turn < kTurns; ++turn) {
                const bool valid = id[turn] != kNoBlock;
                const long long slot = valid ? (long long)id[turn] * tokens.block_size + offset[turn] : 0;
                const Scalar *from = tokens.cache + slot * kKeyDim + load * kPerLoad<Scalar>;
#pragma unroll
                for (int eight = 0; eight < Of::kLoads; eight += 8)
                    ptx::cp_async16(&rows[turn * kRows][eight + load], from + eight * kPerLoad<Scalar>, valid);
            }
        ptx::cp_async_commit();
    }

    // This warp's part of the scores of its heads. Four products at a time do not depend on each other.
    __device__ __forceinline__ void score(int tile) {
        const typename Of::Row *rows = storage.tiles[tile % kStages];
        constexpr int kTokens = kTile / Of::kStrips;
#pragma unroll 1
        for (int first = 0; first < kTile; first += kTokens) {
            Sums<Of::kStrips, kTokens> scores = {};
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int eight = 0; eight < kTokens / 8; eight += 2) {
                    unsigned keys[4];
                    const int load = part * Of::kPartLoads + 2 * step + lane / 8 % 2;
                    ptx::ldmatrix(keys, &rows[first + 8 * eight + lane / 16 * 8 + lane % 8][load]);
                    multiply_columns<Scalar>(scores, eight, query[step], keys);
                }
            const int head = 16 * first_strip + lane / 4, column = first + 2 * (lane % 4);
#pragma unroll
            for (int strip = 0; strip < Of::kStrips; ++strip)
#pragma unroll
                for (int eight = 0; eight < kTokens / 8; ++eight)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float *two = &storage.scores[part][head + 16 * strip + 8 * half][column + 8 * eight];
                        const float *sums = &scores[strip][eight][2 * half];
                        *reinterpret_cast<float2 *>(two) = make_float2(sums[0], sums[1]);
                    }
        }
    }

    // A maximum remains as it is until a score exceeds it by more than this, in base 2. Weights of up to 256 have the relative
    // precision of smaller ones, and tiles of lower scores rescale nothing.
    static constexpr float kSlack = 8;

    // Four lanes weigh the tokens of a head, and a warp those of eight heads.
    static constexpr int kWeighing = kHeads / 8;
    __device__ __forceinline__ int weighed_head() const { return 8 * warp + lane / 4; }

    // Adds up the parts of the scores, and converts them to weights.
    __device__ __forceinline__ void weigh(int tile) {
        const int head = weighed_head(), column = 2 * (lane % 4), left = tokens.end - first_token(tile) - column;
        float scores[kTile / 8][2] = {};
#pragma unroll kSummed
        for (int of = 0; of < Of::kParts; ++of)
#pragma unroll
            for (int eight = 0; eight < kTile / 8; ++eight) {
                const float *two = &storage.scores[of][head][8 * eight + column];
                const float2 added = *reinterpret_cast<const float2 *>(two);
                scores[eight][0] += added.x;
                scores[eight][1] += added.y;
            }
#pragma unroll
        for (int eight = 0; eight < kTile / 8; ++eight)
#pragma unroll
            for (int side = 0; side < 2; ++side)
                scores[eight][side] = 8 * eight + side < left ? scores[eight][side] * scale : kMasked;
        __syncwarp();  // shuffles come after all choices, as in MmaDecoder
        float highest = kMasked;
#pragma unroll
        for (int eight = 0; eight < kTile / 8; ++eight)
            highest = fmaxf(highest, fmaxf(scores[eight][0], scores[eight][1]));
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2)
            highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, distance));
        const float new_maximum = highest > maximum + kSlack ? highest : maximum;
        const float factor = ptx::exp2(maximum - new_maximum);
        maximum = new_maximum;
        sum *= factor;
        unsigned *weights = reinterpret_cast<unsigned *>(storage.weights[tile % (1 + kLag)][head]) + lane % 4;
#pragma unroll
        for (int eight = 0; eight < kTile / 8; ++eight) {
            const float first = ptx::exp2(scores[eight][0] - maximum), second = ptx::exp2(scores[eight][1] - maximum);
            sum += first + second;
            weights[4 * eight] = ptx::pack<Scalar>(first, second);
        }
        storage.factors[tile % (1 + kLag)][head] = factor;  // of four lanes the same
    }

    // By the factors of the heads; a factor of 1 says that a head's maximum is as before.
    __device__ __forceinline__ void rescale(const float *factors) {
        bool changed = false;
#pragma unroll
        for (int eight = 0; eight < kHeads / 8; ++eight) changed |= factors[8 * eight + lane / 4] != 1;
        if (changed)
#pragma unroll
            for (int eight = 0; eight < kHeads / 8; ++eight) {
                const float factor = factors[8 * eight + lane / 4];
#pragma unroll
                for (int place = 0; place < Of::kDims / 4; ++place)
                    outputs[eight / 2][place / 2][eight % 2 * 2 + place % 2] *= factor;
            }
        __syncwarp();
    }

    // Rescales the outputs, and adds the values of this warp's columns.
    __device__ __forceinline__ void add_values(int tile) {
        const typename Of::Row *rows = storage.tiles[tile % kStages];
        const auto &weights_of = storage.weights[tile % (1 + kLag)];
        rescale(storage.factors[tile % (1 + kLag)]);
        const int load = warp * Of::kDimLoads + lane / 16;
#pragma unroll kAdded
        for (int step = 0; step < kTile / 16; ++step) {
            unsigned weights[kHeads / 16][4];
#pragma unroll
            for (int strip = 0; strip < kHeads / 16; ++strip)
                ptx::ldmatrix(weights[strip], &weights_of[16 * strip + lane % 16][2 * step + lane / 16]);
#pragma unroll
            for (int eight = 0; eight < Of::kDims / 8; eight += 2) {
                unsigned values[4];
                ptx::ldmatrix_trans(values, &rows[16 * step + lane % 16][load + eight]);
                multiply_columns<Scalar>(outputs, eight, weights, values);
            }
        }
    }

    __device__ __forceinline__ void run() {
        find_first_blocks();
#pragma unroll
        for (int tile = 0; tile < Of::kAhead; ++tile) {
            fetch(tile);
            find_next_blocks(tile + 1);
        }
        for (int tile = 0; first_token(tile - kLag) < tokens.end; ++tile) {
            const bool has_tile = first_token(tile) < tokens.end;
            ptx::cp_async_wait<Of::kAhead - 1>();
            // The tile has arrived, and its predecessor's weights are there; no warp reads the tile any more that is overwritten.
            __syncthreads();
            fetch(tile + Of::kAhead);
            find_next_blocks(tile + Of::kAhead + 1);  // a tile before they are needed: a block table lookup takes long
            if (has_tile) score(tile);
            __syncthreads();  // all parts of the scores are there
            if constexpr (kLag) {
#pragma unroll 1
                for (int turn = 0; turn < 2; ++turn)
                    if ((warp < Of::kWarps / 2) == turn) {
                        if (has_tile) weigh(tile);
                    } else if (tile > 0) {
                        add_values(tile - 1);
                    }
            } else {
                if (warp < kWeighing) weigh(tile);
                __syncthreads();  // the weights are there
                add_values(tile);
            }
        }
        ptx::cp_async_wait<0>();
    }

    // Adds up the sums of a head's lanes, for all warps.
    __device__ __forceinline__ void finish() {
        if (warp < kWeighing) {
#pragma unroll
            for (int distance = 1; distance < 4; distance *= 2) sum += __shfl_xor_sync(kFullWarp, sum, distance);
            storage.states[weighed_head()] = make_float2(maximum, sum);
        }
        __syncthreads();
    }

    // Calls `write` for each two adjacent outputs of a head: the head, the first one's dimension, both, the head's state.
    template <class Write> __device__ __forceinline__ void each(int heads, const Write &write) const {
#pragma unroll
        for (int strip = 0; strip < kHeads / 16; ++strip)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int head = 16 * strip + 8 * half + lane / 4;
                if (head >= heads) continue;
                const float2 state = storage.states[head];
#pragma unroll
                for (int eight = 0; eight < Of::kDims / 8; ++eight) {
                    const float(&sums)[4] = outputs[strip][eight];
                    const int dimension = warp * Of::kDims + 8 * eight + 2 * (lane % 4);
                    write(head, dimension, make_float2(sums[2 * half], sums[2 * half + 1]), state);
                }
            }
    }
};

// `blocks_a_tile` and `tokens_left` are 32 / block_size and 32 % block_size: the kernel divides once.
//
// grid: tiles of kHeads query heads (fastest, so that neighbours read the same vectors), partitions, sequences. With one partition
// `out` [sequences, heads, 512] is written; with several, `partial_states` [sequences, heads, partitions] (maximum and
// sum, base 2) and `partial_values` [..., 512], for merge_latent. `query` is [sequences, heads, 576].
template <class Scalar, int kHeads, int kStages>
__global__ void __launch_bounds__(LatentBlock<Scalar, kHeads, kStages>::kThreads)
    latent_attention(Scalar *out, float2 *partial_states, float *partial_values, const Scalar *query,
                     const Scalar *latent_cache, const int *block_tables, const int *context_lens, int num_heads,
                     int block_size, int blocks_a_tile, int tokens_left, int max_blocks_per_seq, int partition_tokens,
                     float scale) {
    const int partition = blockIdx.y, partitions = gridDim.y, sequence = blockIdx.z;
    const int start = partition * partition_tokens;
    const int end = min(context_lens[sequence], start + partition_tokens);
    if (partition > 0 && start >= end) return;

    using Decoder = LatentDecoder<Scalar, kHeads, kStages>;
    auto &storage = *ptx::dynamic_shared_memory<typename Decoder::Of::Storage>();
    const int *blocks = block_tables + (long long)sequence * max_blocks_per_seq;
    Decoder decoder({latent_cache, blocks, block_size, start, end, blocks_a_tile, tokens_left}, storage, scale);
    const int first_head = blockIdx.x * kHeads, heads = min(kHeads, num_heads - first_head);
    const long long head = (long long)sequence * num_heads + first_head;
    decoder.load_queries(query + head * kKeyDim, heads);
    decoder.run();
    decoder.finish();
    if (partitions == 1) {
        decoder.each(heads, [&](int which, int dimension, float2 two, float2 state) {
            const float factor = state.y == 0 ? 0 : 1 / state.y;
            unsigned *to = reinterpret_cast<unsigned *>(out + (head + which) * kLatentDim + dimension);
            *to = ptx::pack<Scalar>(two.x * factor, two.y * factor);
        });
        return;
    }
    decoder.each(heads, [&](int which, int dimension, float2 two, float2 state) {
        const long long partial = (head + which) * partitions + partition;
        *reinterpret_cast<float2 *>(partial_values + partial * kLatentDim + dimension) = two;
        if (dimension == 0) partial_states[partial] = state;
    });
}

// grid: heads, sequences; one thread per dimension. Merges the partitions of latent_attention into `out`.
template <class Scalar>
__global__ void __launch_bounds__(kLatentDim)
    merge_latent(Scalar *out, const float2 *partial_states, const float *partial_values, const int *context_lens,
                 int partitions, int partition_tokens) {
    const long long head = (long long)blockIdx.y * gridDim.x + blockIdx.x;
    const int used = min(partitions, ceil_div(context_lens[blockIdx.y], partition_tokens));
    const float value = merged<kLatentDim>(partial_states, partial_values, head, partitions, used);
    out[head * kLatentDim + threadIdx.x] = FromFloat<Scalar>::of(value);
}
