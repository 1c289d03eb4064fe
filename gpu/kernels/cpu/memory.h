// Memory of a CUDA block: shared memory that initially contains NaNs, and global memory in known ranges.
#pragma once

#include <cstring>

#include "block.h"

namespace shim {

// An array that a launch may touch.
struct Range {
    uintptr_t begin;
    uint64_t bytes;
};

struct Memory {
    const Range *ranges;
    unsigned count;
    // Every byte is 0xff, a NaN in each type, when a block begins.
    std::vector<uint4> dynamic;

    bool holds(const void *address, size_t bytes) const {
        const auto first = reinterpret_cast<uintptr_t>(address);
        for (const Range *range = ranges; range < ranges + count; ++range)
            if (first >= range->begin && first - range->begin + bytes <= range->bytes) return true;
        return false;
    }

    void poison() {
        if (!dynamic.empty()) std::memset(dynamic.data(), 0xff, dynamic.size() * sizeof(uint4));
    }
};

inline thread_local Memory *memory = nullptr;

inline void refuse_access(const char *why) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_print_stack_trace();  // names the kernel's line
#endif
    block->fail("block (%u, %u, %u), thread %u: a 16-byte access %s", blockIdx.x, blockIdx.y, blockIdx.z,
                block->running().rank, why);
}

// A 16-byte access to global memory: a GPU traps on misalignment, and reads undefined values outside all arrays.
inline void check_access(const void *address) {
    if (reinterpret_cast<uintptr_t>(address) % sizeof(uint4))
        refuse_access("at an address that is no multiple of 16");
    if (!memory->holds(address, sizeof(uint4))) refuse_access("outside every array of the launch");
}

// Fails if the launch gives less than `bytes`: a GPU would return the memory behind.
inline uint4 *dynamic_shared_memory(size_t bytes) {
    const size_t given = memory->dynamic.size() * sizeof(uint4);
    if (given < bytes) block->fail("%zu bytes of dynamic shared memory, and the kernel needs %zu", given, bytes);
    return memory->dynamic.data();
}

inline void carry_out(const PendingCopy &copy) {
    if (copy.from)
        std::memcpy(copy.to, copy.from, sizeof(uint4));
    else
        std::memset(copy.to, 0, sizeof(uint4));
}

// The hardware copies at any time between the issue and the wait. This code copies at either end, at random: a late
// copy reveals a read without a wait, and an early copy reveals a buffer that is filled too early.
inline void issue_copy(const PendingCopy &copy) {
    if (copy.from) check_access(copy.from);
    if (block->dice.below(2))
        carry_out(copy);
    else
        block->running().copies.push_back(copy);
}

// Copies in flight may arrive at any barrier.
inline void carry_out_some() {
    std::vector<PendingCopy> &copies = block->running().copies;
    size_t kept = 0;
    for (const PendingCopy &copy : copies)
        if (block->dice.below(2))
            carry_out(copy);
        else
            copies[kept++] = copy;
    copies.resize(kept);
}

// Waits until at most `groups` of the committed groups are in flight.
inline void wait_for_copies(unsigned groups) {
    Thread &thread = block->running();
    size_t kept = 0;
    for (const PendingCopy &copy : thread.copies)
        if (copy.group + groups < thread.copy_group)
            carry_out(copy);
        else
            thread.copies[kept++] = copy;
    thread.copies.resize(kept);
}

}  // namespace shim
