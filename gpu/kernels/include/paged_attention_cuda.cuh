// Decode attention over a paged KV cache, for torch extensions in C++: fragmeter.gpu.paged_attention without Python.
//
// Include it in one .cu file of the extension. It needs C++17 and sm_80 or newer.
//
//     #define FRAGMETER_HEAD_DIMS 64, 128  // compile these only; without, all of them, which takes minutes
//     #include "paged_attention_cuda.cuh"
//     PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("forward", &paged_attention_cuda_forward); }
#pragma once

#include <torch/types.h>

#include <cmath>
#include <sstream>
#include <utility>

#include "tensor_checks.h"
#include "torch_launch.cuh"

#ifndef FRAGMETER_HEAD_DIMS
#define FRAGMETER_HEAD_DIMS 64, 80, 96, 112, 120, 128, 160, 192, 256
#endif

namespace fragmeter {

#include "../paged_attention.cu"

using HeadDims = std::integer_sequence<int, FRAGMETER_HEAD_DIMS>;

// A checked call.
struct PagedAttention {
    torch::Tensor out, query, key_cache, value_cache, block_tables, context_lens;
    int64_t block_size, max_context_len;

    int64_t batch() const { return query.size(0); }
    int64_t heads() const { return query.size(1); }
    int64_t head_dim() const { return query.size(2); }
    int64_t kv_heads() const { return key_cache.size(2); }
    int64_t group() const { return heads() / kv_heads(); }

    // As fragmeter.gpu.paged_attention.checked, with the same messages.
    void check() const {
        TORCH_CHECK_VALUE(1 <= block_size && block_size <= 4096, "block_size = ", block_size,
                          ": must be from 1 to 4096");
        expect_shape("query", query, {kAny, kAny, kAny});
        expect_dtype("query", query, {torch::kHalf, torch::kBFloat16, torch::kFloat});
        expect_shape("out", out, query.sizes().vec());
        expect_shape("key_cache", key_cache, {kAny, block_size, kAny, head_dim()});
        expect_shape("value_cache", value_cache, key_cache.sizes().vec());
        for (const auto &[field, tensor] : {named("out", out), named("key_cache", key_cache),
                                            named("value_cache", value_cache)})
            expect_dtype(field, tensor, {query.scalar_type()});
        for (const auto &[field, tensor] : {named("query", query), named("out", out), named("key_cache", key_cache),
                                            named("value_cache", value_cache)})
            TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0, field,
                              " = 'misaligned memory': must begin at a multiple of 16 bytes");
        TORCH_CHECK_VALUE(kv_heads() > 0 && heads() % kv_heads() == 0, "num_heads = ", heads(),
                          ": must be a multiple of the cache's ", kv_heads(), " KV heads");
        TORCH_CHECK_VALUE(max_context_len >= 0, "max_context_len = ", max_context_len, ": must not be negative");
        expect_shape("block_tables", block_tables, {batch(), kAny});
        expect_dtype("block_tables", block_tables, {torch::kInt});
        const int64_t room = block_tables.size(1) * block_size;
        TORCH_CHECK_VALUE(max_context_len <= room, "max_context_len = ", max_context_len, ": block_tables hold ",
                          room, " tokens a sequence");
        expect_shape("context_lens", context_lens, {batch()});
        expect_dtype("context_lens", context_lens, {torch::kInt});
        for (const auto &[field, tensor] :
             {named("query", query), named("out", out), named("key_cache", key_cache),
              named("value_cache", value_cache), named("block_tables", block_tables),
              named("context_lens", context_lens)})
            expect_place(field, tensor, "query", query, kDevice);
    }

    static std::pair<const char *, torch::Tensor> named(const char *field, const torch::Tensor &tensor) {
        return {field, tensor};
    }
};

template <class Scalar, int kHeadDim, int kGroup, class Slots> void run(const PagedAttention &call) {
    constexpr int kSharedBytes = sizeof(Storage<Scalar, kHeadDim, kGroup, Slots>);
    const auto decode = &decode_attention<Scalar, kHeadDim, kGroup, Slots>;
    const auto scalars = [](const torch::Tensor &tensor) { return static_cast<Scalar *>(tensor.data_ptr()); };
    Launcher launcher({call.query, call.out, call.key_cache, call.value_cache, call.block_tables, call.context_lens});
    const int64_t blocks = launcher.places(decode, kThreads, kSharedBytes);
    if (call.batch() == 0) return;
    // Two pieces of sequences for each block, and a counter for each on each level of their merge.
    const auto options = call.query.options().dtype(torch::kFloat);
    const torch::Tensor states = launcher.empty({2 * blocks, kGroup, 2}, options);
    const torch::Tensor values = launcher.empty({2 * blocks, kGroup, kHeadDim}, options);
    int64_t levels = 1;
    for (int64_t pieces = kFanIn; pieces < blocks; pieces *= kFanIn) ++levels;
    const torch::Tensor counters = launcher.empty({levels, 2 * blocks}, options.dtype(torch::kInt)).zero_();

    launcher.run(decode, dim3{static_cast<unsigned>(blocks)}, kThreads, kSharedBytes, scalars(call.out),
                 static_cast<float2 *>(states.data_ptr()), static_cast<float *>(values.data_ptr()), scalars(call.query),
                 scalars(call.key_cache), scalars(call.value_cache), static_cast<unsigned *>(counters.data_ptr()),
                 static_cast<const int *>(call.block_tables.data_ptr()),
                 static_cast<const int *>(call.context_lens.data_ptr()), call.batch(), call.kv_heads(), call.group(),
                 call.block_size, call.block_tables.size(1), std::log2(std::exp(1.0)) / std::sqrt(double{kHeadDim}));
}

// As fragmeter.gpu.source.TILE_TOKENS.
template <class Scalar, int kHeadDim, int kGroup> void run_of_slots(const PagedAttention &call) {
    if (call.block_size % 16) return run<Scalar, kHeadDim, kGroup, PagedSlots>(call);
    return run<Scalar, kHeadDim, kGroup, PagedTiles>(call);
}

// The group's tile, as fragmeter.gpu.source.GROUP_TILES has them.
template <class Scalar, int kHeadDim> void run_of_group(const PagedAttention &call) {
    constexpr bool kMatrices = sizeof(Scalar) == 2;
    if (call.group() <= 1) return run_of_slots<Scalar, kHeadDim, 1>(call);
    if (call.group() <= 2) return run_of_slots<Scalar, kHeadDim, 2>(call);
    if (call.group() <= (kMatrices ? 8 : 4)) return run_of_slots<Scalar, kHeadDim, kMatrices ? 8 : 4>(call);
    return run_of_slots<Scalar, kHeadDim, kMatrices ? 16 : 8>(call);
}

template <class Scalar, int... kHeadDims>
void run_of_head_dim(const PagedAttention &call, std::integer_sequence<int, kHeadDims...>) {
    const bool found = ((call.head_dim() == kHeadDims && (run_of_group<Scalar, kHeadDims>(call), true)) || ...);
    std::ostringstream compiled;
    ((compiled << (compiled.tellp() ? ", " : "") << kHeadDims), ...);
    TORCH_CHECK_VALUE(found, "head_dim = ", call.head_dim(), ": must be one of ", compiled.str());
}

}  // namespace fragmeter

// Attention of one new token per sequence over its cached tokens, into `out`; softmax scale 1 / sqrt(head_dim).
//
//   out, query              [batch, num_heads, head_dim], float16, bfloat16 or float32
//   key_cache, value_cache  [num_blocks, block_size, num_kv_heads, head_dim]
//   block_tables            [batch, max_blocks_per_seq], int32; entries past a sequence's end are not read
//   context_lens            [batch], int32, in tokens; a sequence of length 0 gives zeros
//
// Runs on torch's current stream. Tensors that do not fit raise a c10::ValueError, where the Python function of the
// same name raises a SettingError; ids and lengths are not checked.
inline void paged_attention_cuda_forward(const torch::Tensor &out, const torch::Tensor &query,
                                         const torch::Tensor &key_cache, const torch::Tensor &value_cache,
                                         const torch::Tensor &block_tables, const torch::Tensor &context_lens,
                                         int64_t block_size, int64_t max_context_len) {
    const fragmeter::PagedAttention call{out,          query,      key_cache,      value_cache, block_tables,
                                         context_lens, block_size, max_context_len};
    call.check();
    switch (query.scalar_type()) {
        case torch::kHalf: return fragmeter::run_of_head_dim<__half>(call, fragmeter::HeadDims{});
        case torch::kBFloat16: return fragmeter::run_of_head_dim<__nv_bfloat16>(call, fragmeter::HeadDims{});
        default: return fragmeter::run_of_head_dim<float>(call, fragmeter::HeadDims{});
    }
}
