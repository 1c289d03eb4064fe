// CUDA C++ on a CPU: included before a .cu file, it lets a host compiler build the source that NVRTC builds.
//
// A thread is a fibre, and the thread that calls launch() runs one block after the other to completion. Fibres
// switch only at barriers and warp exchanges. The order of blocks and fibres is drawn from the launch's seed. A missing
// barrier causes NaNs or wrong results. A barrier that some threads do not reach causes a deadlock, which is reported.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "block.h"
#include "matrix.h"
#include "memory.h"
#include "types.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local

using std::min;

inline void __syncthreads() {
    shim::block->barrier();
    shim::carry_out_some();
}

namespace shim {

// The values of all threads of a warp. The whole warp takes part: the kernels use no other mask.
inline const Words *exchange(unsigned mask, const Words &given) {
    if (mask != 0xffffffffu) block->fail("a warp exchange with mask %08x: only full warps are simulated", mask);
    return block->exchange(given);
}

template <class Value> Value shuffle(unsigned mask, Value value, unsigned source_lane) {
    Words given;
    std::memcpy(&given, &value, sizeof value);
    const Words *words = exchange(mask, given);
    if (source_lane >= block->warp_threads()) block->fail("a shuffle reads lane %u, which is not there", source_lane);
    std::memcpy(&value, &words[source_lane], sizeof value);
    return value;
}

}  // namespace shim

inline void __syncwarp(unsigned mask = 0xffffffffu) { shim::exchange(mask, {}); }
template <class Value> Value __shfl_sync(unsigned mask, Value value, int source_lane) {
    return shim::shuffle(mask, value, source_lane % shim::kWarp);
}
template <class Value> Value __shfl_xor_sync(unsigned mask, Value value, int lane_mask) {
    return shim::shuffle(mask, value, shim::lane() ^ lane_mask);
}

// Blocks run one after the other, so every write is visible to the next one, with a fence or without.
inline void __threadfence() {}
inline unsigned atomicInc(unsigned *counter, unsigned highest) {
    const unsigned before = *counter;
    *counter = before >= highest ? 0 : before + 1;
    return before;
}

namespace shim {

// The structure that ctypes passes; cpu_kernels.py has the same one.
struct Launch {
    dim3 grid, block;
    uint64_t seed;
    unsigned shared_bytes;
    unsigned range_count;
    const Range *ranges;
    void **arguments;  // address of each argument, as for cuLaunchKernel
    char *message;
    uint64_t message_bytes;
};

template <class... Parameters> struct Call {
    static thread_local void (*kernel)(Parameters...);
    static thread_local void **arguments;

    static void enter() {
        apply(std::index_sequence_for<Parameters...>{});
        shim::block->end();
    }
    template <size_t... Places> static void apply(std::index_sequence<Places...>) {
        kernel(*static_cast<Parameters *>(arguments[Places])...);
    }
};
template <class... Parameters> thread_local void (*Call<Parameters...>::kernel)(Parameters...);
template <class... Parameters> thread_local void **Call<Parameters...>::arguments;

// Runs the whole grid; returns 0, or 1 with a message.
template <class... Parameters> int launch(void (*kernel)(Parameters...), const Launch &launch) {
    Fault fault{launch.message, launch.message_bytes};
    Block threads(launch.block, fault, launch.seed);
    Memory arrays{launch.ranges, launch.range_count, std::vector<uint4>((launch.shared_bytes + 15) / 16)};
    block = &threads, memory = &arrays;
    Call<Parameters...>::kernel = kernel, Call<Parameters...>::arguments = launch.arguments;
    gridDim = launch.grid, blockDim = launch.block;
    std::vector<unsigned> order(gridDim.x * gridDim.y * gridDim.z);
    for (unsigned rank = 0; rank < order.size(); ++rank) order[rank] = rank;
    Dice dice{launch.seed | 1};
    for (auto rest = static_cast<unsigned>(order.size()); rest > 1; --rest)
        std::swap(order[dice.below(rest)], order[rest - 1]);
    for (auto rank = order.begin(); rank != order.end() && !fault.raised; ++rank) {
        blockIdx = {*rank % gridDim.x, *rank / gridDim.x % gridDim.y, *rank / (gridDim.x * gridDim.y)};
        arrays.poison();
        threads.run(&Call<Parameters...>::enter);
    }
    return fault.raised;
}

}  // namespace shim

// One exported function per kernel instance.
#define FRAGMETER_EXPORT(name, ...) \
    extern "C" int name(const shim::Launch *launch) { return shim::launch(&__VA_ARGS__, *launch); }
