// Decode attention over a KV cache: one query token per sequence. A block table gives the slots of its keys and values,
// or they are in consecutive slots.
//
// A block of threads serves up to kGroup query heads of one KV head, over one partition of one sequence, so a key is
// read once for all of them. Its warps take tiles of the partition in turn, each with an online softmax of its own
// (running maximum and sum, in base 2). The block merges the warps' results, and a second kernel merges the partitions.
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
    };
};

// On sm_120 the assembler's own choice of registers spills, and so does the choice for three blocks of 8 heads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define DECODE_BOUNDS __launch_bounds__(kThreads, kHeadDim == 256 || kGroup >= 8 ? 2 : 3)
#else
#define DECODE_BOUNDS __launch_bounds__(kThreads)
#endif

// A block of either kernel below. `value_scale` multiplies the outputs.
template <class Scalar, int kHeadDim, int kGroup, class Slots, class Cache>
__device__ __forceinline__ void attend(Scalar *out, float2 *partial_states, float *partial_values,
                                       const Scalar *query, const Cache *key_cache, const Cache *value_cache,
                                       const typename Slots::Id *ids, const int *context_lens, int kv_heads, int group,
                                       int block_size, int ids_per_sequence, int partition_tokens, float scale,
                                       float value_scale) {
    const int kv_head = blockIdx.x % kv_heads, first_head = blockIdx.x / kv_heads * kGroup;
    const int partition = blockIdx.y, partitions = gridDim.y, sequence = blockIdx.z;
    const int start = partition * partition_tokens;
    const int end = min(context_lens[sequence], start + partition_tokens);
    if (partition > 0 && start >= end) return;

    auto &storage = *ptx::dynamic_shared_memory<Storage<Scalar, kHeadDim, kGroup, Slots, Cache>>();
    const Slots slots{ids + (long long)sequence * ids_per_sequence, block_size};
    Decoder<Scalar, kHeadDim, kGroup, Slots, Cache> decoder(
        {key_cache, value_cache, slots, kv_heads, kv_head, start, end}, storage.rings[threadIdx.x / 32]);
    const long long head = ((long long)sequence * kv_heads + kv_head) * group + first_head;
    const int heads = min(kGroup, group - first_head);
    decoder.load_queries(query + head * kHeadDim, heads, scale);
    decoder.run();
    __syncthreads();  // the rings' memory is reused
    decoder.write(storage.results);
    __syncthreads();

    for (int place = threadIdx.x; place < heads * kHeadDim; place += kThreads) {
        const int which = place / kHeadDim, dimension = place % kHeadDim;
        float maximum = kNoScore, sum = 0, value = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) maximum = fmaxf(maximum, storage.results.states[warp][which].x);
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            const float factor = ptx::exp2(storage.results.states[warp][which].x - maximum);
            sum += storage.results.states[warp][which].y * factor;
            value += storage.results.values[warp][which][dimension] * factor;
        }
        value *= value_scale;
        if (partitions == 1) {
            out[head * kHeadDim + place] = FromFloat<Scalar>::of(sum == 0 ? 0 : value / sum);
            continue;
        }
        const long long partial = (head + which) * partitions + partition;
        partial_values[partial * kHeadDim + dimension] = value;
        if (dimension == 0) partial_states[partial] = make_float2(maximum, sum);
    }
}

// grid: KV heads x tiles of kGroup query heads (KV heads fastest, so that neighbours read neighbouring memory),
// partitions, sequences. With one partition `out` is written; with several, `partial_states` [sequences, heads,
// partitions] (maximum and sum, base 2) and `partial_values` [..., head_dim], for merge_partitions. `ids` has
// `ids_per_sequence` ids per sequence, for Slots.
template <class Scalar, int kHeadDim, int kGroup, class Slots>
__global__ void DECODE_BOUNDS
    decode_attention(Scalar *out, float2 *partial_states, float *partial_values, const Scalar *query,
                     const Scalar *key_cache, const Scalar *value_cache, const typename Slots::Id *ids,
                     const int *context_lens, int kv_heads, int group, int block_size, int ids_per_sequence,
                     int partition_tokens, float scale) {
    attend<Scalar, kHeadDim, kGroup, Slots>(out, partial_states, partial_values, query, key_cache, value_cache, ids,
                                            context_lens, kv_heads, group, block_size, ids_per_sequence,
                                            partition_tokens, scale, 1);
}

// The same over caches of fp8: a key is its number times its KV head's of `key_scales`, and a value likewise. One scale of a KV
// head multiplies all of its scores, and the other one all of its outputs.
template <class Scalar, int kHeadDim, int kGroup, class Slots>
__global__ void DECODE_BOUNDS
    decode_attention_fp8(Scalar *out, float2 *partial_states, float *partial_values, const Scalar *query,
                         const Fp8 *key_cache, const Fp8 *value_cache, const typename Slots::Id *ids,
                         const int *context_lens, int kv_heads, int group, int block_size, int ids_per_sequence,
                         int partition_tokens, float scale, const float *key_scales, const float *value_scales) {
    const int head = blockIdx.x % kv_heads;
    attend<Scalar, kHeadDim, kGroup, Slots>(out, partial_states, partial_values, query, key_cache, value_cache, ids,
                                            context_lens, kv_heads, group, block_size, ids_per_sequence,
                                            partition_tokens, scale * key_scales[head] * kCacheFactor<Scalar, Fp8>,
                                            value_scales[head] * kCacheFactor<Scalar, Fp8>);
}

// grid: heads, sequences; one thread per dimension, in whole warps. Merges the partitions of decode_attention into
// `out`.
template <class Scalar, int kHeadDim>
__global__ void __launch_bounds__(ceil_div(kHeadDim, 32) * 32)
    merge_partitions(Scalar *out, const float2 *partial_states, const float *partial_values, const int *context_lens,
                     int partitions, int partition_tokens) {
    const long long head = (long long)blockIdx.y * gridDim.x + blockIdx.x;
    const int used = min(partitions, ceil_div(context_lens[blockIdx.y], partition_tokens));
    const float value = merged<kHeadDim>(partial_states, partial_values, head, partitions, used);
    if (threadIdx.x < kHeadDim) out[head * kHeadDim + threadIdx.x] = FromFloat<Scalar>::of(value);
}
