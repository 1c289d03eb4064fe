// Writes new keys and values into the slots that the block tables give them.
#include "ptx.cuh"

// grid: tokens. A token's row is `row_loads` pieces of 16 bytes, over all KV heads; slot_mapping is
// block * block_size + offset, or -1 for padding, which is skipped.
extern "C" __global__ void reshape_and_cache(const uint4 *key, const uint4 *value, uint4 *key_cache,
                                             uint4 *value_cache, const long long *slot_mapping, int row_loads) {
    const long long token = blockIdx.x, slot = slot_mapping[token];
    if (slot < 0) return;
    for (int load = threadIdx.x; load < row_loads; load += blockDim.x) {
        ptx::store16(key_cache + slot * row_loads + load, ptx::load16(key + token * row_loads + load));
        ptx::store16(value_cache + slot * row_loads + load, ptx::load16(value + token * row_loads + load));
    }
}
