// Copy-on-write: copies whole blocks, of all layers in one launch.
#include "ptx.cuh"

// grid: pairs, layers. `pairs` are (source, destination) block ids; no destination is a source of the same launch.
// A block is `block_loads` pieces of 16 bytes; key_caches and value_caches have one address per layer.
extern "C" __global__ void copy_blocks(uint4 *const *key_caches, uint4 *const *value_caches, const long long *pairs,
                                       long long block_loads) {
    const long long from = pairs[2 * blockIdx.x] * block_loads, to = pairs[2 * blockIdx.x + 1] * block_loads;
    uint4 *keys = key_caches[blockIdx.y], *values = value_caches[blockIdx.y];
    for (long long load = threadIdx.x; load < block_loads; load += blockDim.x) {
        ptx::store16(keys + to + load, ptx::load16(keys + from + load));
        ptx::store16(values + to + load, ptx::load16(values + from + load));
    }
}
