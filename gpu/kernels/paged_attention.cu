// Decode attention over a KV cache: one query token per sequence. A block table gives the slots of its keys and values,
// or they are in consecutive slots.
//
// A block of threads serves up to kGroup query heads of one KV head at a time, over a sequence or a piece of one, so a key is read
// once for all of them. Its warps take tiles of it in turn, each with an online softmax of its own (running maximum and sum,
// in base 2). The block merges the warps' results, and continues with the next sequence of its share of the work.
#include "balance.cuh"
#include "fma_decoder.cuh"
#include "mma_decoder.cuh"

template <bool kFirst, class First, class Second> struct Either {
    using Type = First;
};
template <class First, class Second> struct Either<false, First, Second> {
    using Type = Second;
};

template <class Scalar, int kHeadDim, int kGroup, class Slots, class Cache>
using Decoder =
    typename Either<(sizeof(Scalar) == 2 && kGroup >= 8), MmaDecoder<Scalar, kHeadDim, kGroup, Slots, Cache>,
                    FmaDecoder<Scalar, kHeadDim, kGroup, Slots, Cache>>::Type;

template <class Scalar, int kHeadDim, int kGroup, class Slots, class Cache = Scalar> struct Storage {
    union {
        typename Decoder<Scalar, kHeadDim, kGroup, Slots, Cache>::Ring rings[kWarps];
        WarpResults<kHeadDim, kGroup> results;
        unsigned granules[kWarps];
        Merging<kGroup> merging;
    };
    Work work;
};

// Blocks of a multiprocessor that the assembler leaves registers for. Its own choice is often fewer registers, and spills. Shared memory
// holds so many blocks (see both decoders), and registers of larger groups and heads suffice for these.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 900
template <class Scalar, int kHeadDim, int kGroup>
constexpr int kBlocks = sizeof(Scalar) == 2 && kGroup <= 8 && kHeadDim < 256 ? 3 : 2;
#elif __CUDA_ARCH__ < 1200
template <class Scalar, int kHeadDim, int kGroup>
constexpr int kBlocks = sizeof(Scalar) == 4 || (kGroup == 16 && kHeadDim > 128) ? 2
                        : kGroup <= 2 || (kGroup == 8 && kHeadDim == 160)       ? 4
                                                                                : 3;
#else
template <class Scalar, int kHeadDim, int kGroup>
constexpr int kBlocks = kHeadDim == 256 || kGroup >= 8 ? 2 : 3;
#endif

// The same for caches of fp8: slots of 64 bits take registers from the conversion.
template <class Scalar, int kHeadDim, int kGroup, class Slots>
constexpr int kFp8Blocks = kBlocks<Scalar, kHeadDim, kGroup> == 4 && kGroup == 2 && sizeof(typename Slots::Id) == 8
                               ? 3
                               : kBlocks<Scalar, kHeadDim, kGroup>;

// A block of either kernel below.
template <class Scalar, int kHeadDim, int kGroup, class Slots, class Cache, class Scales>
__device__ __forceinline__ void attend(Scalar *out, const Partials<kHeadDim, kGroup> &partials, const Scalar *query,
                                       const Cache *key_cache, const Cache *value_cache, const typename Slots::Id *ids,
                                       const int *context_lens, int sequences, int kv_heads, int group, int block_size,
                                       int ids_per_sequence, float scale, const Scales &scales) {
    using Decoding = Decoder<Scalar, kHeadDim, kGroup, Slots, Cache>;
    static_assert(kGranule % (Decoding::kTile * kWarps) == 0, "a granule is whole tiles of all warps");
    auto &storage = *ptx::dynamic_shared_memory<Storage<Scalar, kHeadDim, kGroup, Slots, Cache>>();
    Work &work = storage.work;
    find_work(work, storage.granules, context_lens, sequences, kv_heads * ceil_div(group, kGroup));
    while (work.left > 0) {
        const int start = work.granule * kGranule;
        const int end = min(context_lens[work.column.sequence], start + (int)work.taken() * kGranule);
        const int kv_head = work.column.number % kv_heads;
        const Slots slots{ids + (long long)work.column.sequence * ids_per_sequence, block_size};
        Decoding decoder({key_cache, value_cache, slots, kv_heads, kv_head, start, end},
                         storage.rings[Decoding::own_thread() / 32]);
        decoder.load_queries(query + work.column.first_row(kv_heads, group, kGroup) * kHeadDim,
                             work.column.rows(kv_heads, group, kGroup), scale * scales.of_keys(kv_head));
        decoder.run();
        __syncthreads();  // the rings' memory is reused
        decoder.write(storage.results);
        __syncthreads();

        const bool whole = work.whole();
        const unsigned slot = 2 * blockIdx.x + (work.granule == 0);
        const long long head = work.column.first_row(kv_heads, group, kGroup);
        const int heads = work.column.rows(kv_heads, group, kGroup);
        const float value_scale = scales.of_values(work.column.number % kv_heads);
        for (int place = threadIdx.x; place < heads * kHeadDim; place += kThreads) {
            const int which = place / kHeadDim, dimension = place % kHeadDim;
            float maximum = kNoScore, sum = 0, value = 0;
#pragma unroll
            for (int warp = 0; warp < kWarps; ++warp)
                maximum = fmaxf(maximum, storage.results.states[warp][which].x);
#pragma unroll
            for (int warp = 0; warp < kWarps; ++warp) {
                const float factor = ptx::exp2(storage.results.states[warp][which].x - maximum);
                sum += storage.results.states[warp][which].y * factor;
                value += storage.results.values[warp][which][dimension] * factor;
            }
            value *= value_scale;
            if (whole) {
                out[head * kHeadDim + place] = FromFloat<Scalar>::of(sum == 0 ? 0 : value / sum);
                continue;
            }
            partials.value(slot)[place] = value;
            if (dimension == 0) partials.state(slot)[which] = make_float2(maximum, sum);
        }
        // At once: if a block handed its pieces in after all of its work, the launch would end later.
        if (!whole)
            merge_piece(out + work.column.first_row(kv_heads, group, kGroup) * kHeadDim, partials, work.pieces(),
                        work.column.rows(kv_heads, group, kGroup), storage.merging);
        __syncthreads();
        if (threadIdx.x == 0) work.next(context_lens, sequences);
        __syncthreads();
    }
}

// grid: any number of blocks, which share the work; as many as run at the same time. `partial_states`, `partial_values` and
// `counters` are those of Partials. `ids` has `ids_per_sequence` ids per sequence, for Slots.
template <class Scalar, int kHeadDim, int kGroup, class Slots>
__global__ void __launch_bounds__(kThreads, kBlocks<Scalar, kHeadDim, kGroup>)
    decode_attention(Scalar *out, float2 *partial_states, float *partial_values, const Scalar *query,
                     const Scalar *key_cache, const Scalar *value_cache, unsigned *counters,
                     const typename Slots::Id *ids, const int *context_lens, int sequences, int kv_heads, int group,
                     int block_size, int ids_per_sequence, float scale) {
    attend<Scalar, kHeadDim, kGroup, Slots>(out, {partial_states, partial_values, counters}, query, key_cache,
                                            value_cache, ids, context_lens, sequences, kv_heads, group, block_size,
                                            ids_per_sequence, scale, NoScales{});
}

// The same over caches of fp8: a key is its number times its KV head's of `key_scales`, and a value likewise. One scale of a KV
// head multiplies all of its scores, and the other one all of its outputs.
template <class Scalar, int kHeadDim, int kGroup, class Slots>
__global__ void __launch_bounds__(kThreads, kFp8Blocks<Scalar, kHeadDim, kGroup, Slots>)
    decode_attention_fp8(Scalar *out, float2 *partial_states, float *partial_values, const Scalar *query,
                         const Fp8 *key_cache, const Fp8 *value_cache, unsigned *counters,
                         const typename Slots::Id *ids, const int *context_lens, int sequences, int kv_heads,
                         int group, int block_size, int ids_per_sequence, float scale, const float *key_scales,
                         const float *value_scales) {
    attend<Scalar, kHeadDim, kGroup, Slots>(out, {partial_states, partial_values, counters}, query, key_cache,
                                            value_cache, ids, context_lens, sequences, kv_heads, group, block_size,
                                            ids_per_sequence, scale, Fp8Scales<Scalar>{key_scales, value_scales});
}
