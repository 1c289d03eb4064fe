// Single instructions as functions, each with a C++ twin for the CPU. cp.async needs sm_80.
#pragma once

namespace ptx {

// 2^x, within 2 units in the last place; subnormal results are zero.
__device__ __forceinline__ float exp2(float exponent) {
#ifdef __CUDACC__
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
#else
    return std::exp2(exponent);
#endif
}

// Copies 16 bytes from global to shared memory, or writes zeros if `valid` is false (`from` is not read then).
__device__ __forceinline__ void cp_async16(uint4 *to, const void *from, bool valid) {
#ifdef __CUDACC__
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
                 : "memory");
#else
    shim::issue_copy({to, valid ? from : nullptr, shim::block->running().copy_group});
#endif
}

// Closes the group of this thread's copies.
__device__ __forceinline__ void cp_async_commit() {
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    ++shim::block->running().copy_group;
#endif
}

// Waits until all but the `kGroups` last groups of this thread have arrived.
template <int kGroups> __device__ __forceinline__ void cp_async_wait() {
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#else
    shim::wait_for_copies(kGroups);
#endif
}

// Loads 16 bytes that the kernel reads once: they need not remain in the L1 cache.
__device__ __forceinline__ uint4 load16(const uint4 *from) {
#ifdef __CUDACC__
    uint4 bytes;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bytes.x), "=r"(bytes.y), "=r"(bytes.z), "=r"(bytes.w)
                 : "l"(__cvta_generic_to_global(from)));
    return bytes;
#else
    shim::check_access(from);
    return *from;
#endif
}

__device__ __forceinline__ void store16(uint4 *to, uint4 bytes) {
#ifndef __CUDACC__
    shim::check_access(to);
#endif
    *to = bytes;
}

// The block's dynamic shared memory; the launch gives its size.
template <class Item> __device__ __forceinline__ Item *dynamic_shared_memory() {
#ifdef __CUDACC__
    extern __shared__ uint4 items[];
#else
    uint4 *items = shim::dynamic_shared_memory(sizeof(Item));
#endif
    return reinterpret_cast<Item *>(items);
}

}  // namespace ptx
