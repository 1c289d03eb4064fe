// The split of decode attention; without torch, so that tests compile fast.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fragmeter {

// Tokens of a partition, for `columns` (sequences x blocks of heads) and a device with `places` resident blocks.
// fragmeter.gpu.paged_attention.partition_size has the same rule and explains it.
inline int64_t partition_size(int64_t max_context_len, int64_t columns, int64_t places) {
    const auto parts = [](int64_t whole, int64_t part) { return (whole + part - 1) / part; };
    const auto duration = [&](int64_t tokens) {
        return parts(columns * parts(max_context_len, tokens), places) * (tokens + 64);
    };
    int64_t best = 0;
    for (int64_t waves = 1; waves <= 8; ++waves) {
        const int64_t partitions = std::max<int64_t>(1, waves * places / std::max<int64_t>(1, columns));
        const int64_t size = std::clamp<int64_t>(parts(max_context_len, partitions * 64) * 64, 256, 2048);
        const bool shorter = best == 0 || duration(size) < duration(best);
        if (shorter || (duration(size) == duration(best) && size > best)) best = size;
    }
    return best;
}

}  // namespace fragmeter
