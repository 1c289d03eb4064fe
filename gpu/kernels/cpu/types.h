// CUDA's vector and 16-bit types, with the conversions that the kernels use. Rounding is to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct __half {
    uint16_t bits;
};
struct __nv_bfloat16 {
    uint16_t bits;
};

namespace shim {
template <class To, class From> To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline bool is_nan(float value) { return value != value; }
}  // namespace shim

inline uint32_t __float_as_uint(float value) { return shim::bit_cast<uint32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return shim::bit_cast<float>(bits); }

// Nibble i of the selector chooses byte i of the result: 0 to 3 are those of `low`, 4 to 7 those of `high`.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t both = low | uint64_t{high} << 32;
    unsigned result = 0;
    for (unsigned byte = 0; byte < 4; ++byte)
        result |= (both >> 8 * (selector >> 4 * byte & 7) & 0xff) << 8 * byte;
    return result;
}

inline float __half2float(__half value) {
    const uint32_t sign = (value.bits & 0x8000u) << 16, magnitude = (value.bits & 0x7fffu) << 13;
    if (magnitude >= 0x0f800000u) return shim::bit_cast<float>(sign | 0x70000000u | magnitude);  // infinity and NaN
    // The exponent's bias is 112 less; the product is exact, subnormals too.
    return shim::bit_cast<float>(sign | shim::bit_cast<uint32_t>(shim::bit_cast<float>(magnitude) * 0x1p112f));
}

inline __half __float2half_rn(float value) {
    const auto bits = shim::bit_cast<uint32_t>(value);
    const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    auto with_sign = [sign](uint32_t half) { return __half{static_cast<uint16_t>(sign | half)}; };
    if (magnitude > 0x7f800000u) return with_sign(0x7fffu);   // NaN
    if (magnitude >= 0x477ff000u) return with_sign(0x7c00u);  // from halfway past the largest, 65504: infinity
    if (magnitude < 0x38800000u)  // subnormal: adding 0.5 leaves the half's bits lowest, rounded
        return with_sign(shim::bit_cast<uint32_t>(shim::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u);
    return with_sign((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

inline float __bfloat162float(__nv_bfloat16 value) {
    return shim::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    if (shim::is_nan(value)) return {0x7fff};
    const auto bits = shim::bit_cast<uint32_t>(value);
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
