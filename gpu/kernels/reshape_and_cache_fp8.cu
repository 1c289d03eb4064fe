// Writes new keys and values, divided by their KV head's scale, as fp8 into the slots that the block tables give them.
#include "fp8.cuh"
#include "ptx.cuh"

// 16 scalars, divided by `scale`.
template <class Scalar> __device__ __forceinline__ uint4 quantized(const Scalar *from, float scale) {
    unsigned words[4];
#pragma unroll
    for (int load = 0; load < 16 / kPerLoad<Scalar>; ++load) {
        float values[kPerLoad<Scalar>];
        unpack<Scalar>(ptx::load16(reinterpret_cast<const uint4 *>(from) + load), values);
#pragma unroll
        for (int word = 0; word < kPerLoad<Scalar> / 4; ++word) {
            float four[4];
#pragma unroll
            for (int place = 0; place < 4; ++place) four[place] = values[4 * word + place] / scale;
            words[load * kPerLoad<Scalar> / 4 + word] = fp8_of(four);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// grid: tokens. key_scales and value_scales have one scale per KV head; slot_mapping is as for reshape_and_cache.
template <class Scalar>
__global__ void reshape_and_cache_fp8(const Scalar *key, const Scalar *value, uint4 *key_cache, uint4 *value_cache,
                                      const long long *slot_mapping, const float *key_scales,
                                      const float *value_scales, int kv_heads, int head_dim) {
    const long long token = blockIdx.x, slot = slot_mapping[token];
    if (slot < 0) return;
    const int head_loads = head_dim / 16, row_loads = kv_heads * head_loads;
    for (int load = threadIdx.x; load < row_loads; load += blockDim.x) {
        const int head = load / head_loads;
        const long long from = (token * row_loads + load) * 16, to = slot * row_loads + load;
        ptx::store16(key_cache + to, quantized(key + from, key_scales[head]));
        ptx::store16(value_cache + to, quantized(value + from, value_scales[head]));
    }
}
