// The matrix instructions of a warp, register by register as the PTX ISA lays their fragments out.
//
// In a fragment lane l holds columns 2 * (l % 4) and the next one, of row l / 4, in the halves of a register.
#pragma once

#include "memory.h"

namespace shim {

inline unsigned lane() { return block->running().rank % kWarp; }
inline uint32_t half_of(uint32_t word, unsigned place) { return word >> 16 * (place % 2) & 0xffffu; }
inline uint32_t halves(uint32_t low, uint32_t high) { return low | high << 16; }

// These instructions are .aligned: all 32 lanes take part.
inline const Words *exchange_aligned(const Words &given) {
    if (block->warp_threads() != kWarp) block->fail("a matrix instruction in a warp of less than 32 threads");
    return block->exchange(given);
}

// A lane's input to ldmatrix: a row's contents when the lane arrived, and the row's address. The instruction does not
// order memory, so a reader gets either of the two at random. This detects a missing __syncwarp after another lane
// writes the row, or before it overwrites the row.
inline uint32_t word_of(const Words &row, unsigned place) {
    if (block->dice.below(2)) return row.at[place];
    const char *words;
    std::memcpy(&words, &row.at[4], sizeof words);
    uint32_t word;
    std::memcpy(&word, words + place * sizeof word, sizeof word);
    return word;
}

inline void load_matrices(uint32_t (&matrices)[4], const void *row, bool transposed) {
    static_assert(sizeof row == 8);
    if (reinterpret_cast<uintptr_t>(row) % 16) refuse_access("of ldmatrix at an address that is no multiple of 16");
    Words given;
    std::memcpy(&given.at[0], row, 16);
    std::memcpy(&given.at[4], &row, sizeof row);
    const Words *rows = exchange_aligned(given);
    const unsigned major = lane() / 4, minor = lane() % 4;
    for (unsigned matrix = 0; matrix < 4; ++matrix, rows += 8)
        matrices[matrix] = transposed ? halves(half_of(word_of(rows[2 * minor], major / 2), major),
                                               half_of(word_of(rows[2 * minor + 1], major / 2), major))
                                      : word_of(rows[major], minor);
}

inline uint32_t transpose_matrix(uint32_t matrix) {
    const Words *words = exchange_aligned({{matrix}});
    const unsigned major = lane() / 4, first = 8 * (lane() % 4) + major / 2;
    return halves(half_of(words[first].at[0], major), half_of(words[first + 4].at[0], major));
}

// The products are exact in fp32; the order of the sum is the hardware's own, and here that of k.
template <class Decode>
void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Decode decode) {
    const Words *words = exchange_aligned({{a[0], a[1], a[2], a[3], b0, b1}});
    const unsigned row = lane() / 4, column = 2 * (lane() % 4);
    for (unsigned k = 0; k < 16; ++k) {
        const unsigned minor = k % 8 / 2, right = k / 8;
        float left[2], above[2];
        for (unsigned lower = 0; lower < 2; ++lower)
            left[lower] = decode(half_of(words[4 * row + minor].at[lower + 2 * right], k));
        for (unsigned next = 0; next < 2; ++next)
            above[next] = decode(half_of(words[4 * (column + next) + minor].at[4 + right], k));
        for (unsigned place = 0; place < 4; ++place) sums[place] += left[place / 2] * above[place % 2];
    }
}

}  // namespace shim
