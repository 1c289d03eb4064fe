// fp8 (e4m3: a sign, four bits of exponent with a bias of 7, three of mantissa; no infinity) and its conversions.
//
// sm_89 and later convert in single instructions. Others place the bits of a number in those of a 16-bit one, whose exponent has
// another bias: the result is the number divided by a power of two, subnormals too, and the caller multiplies once what it has
// added up. Codes of NaN then read as 480.
#pragma once

#include "scalar.cuh"

struct Fp8 {
    unsigned char bits;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define FRAGMETER_CONVERTS_FP8 1
#endif

namespace ptx {

#ifdef FRAGMETER_CONVERTS_FP8
// Two adjacent numbers as fp16.
__device__ __forceinline__ unsigned fp8_to_halves(unsigned short two) {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
    return halves;
}

// Rounded to nearest, ties to even; 448 for all that is larger.
__device__ __forceinline__ unsigned short fp8_from_floats(float low, float high) {
    unsigned short two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
    return two;
}
#endif

// Two bf16 by 2^120, without rounding.
__device__ __forceinline__ unsigned times_2_120(unsigned two) {
#ifdef __CUDACC__
    unsigned product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(two), "r"(0x7b807b80u), "r"(0x80008000u));
    return product;
#else
    const auto times = [](unsigned bits) {
        const float factor = to_float(__nv_bfloat16{0x7b80});
        return FromFloat<__nv_bfloat16>::of(to_float(__nv_bfloat16{static_cast<uint16_t>(bits)}) * factor).bits;
    };
    return shim::halves(times(two), times(two >> 16));
#endif
}

}  // namespace ptx

// Four numbers as 16-bit scalars, times 1 / kFactor. convert: those of bytes 0 and 2 in `even`, those of bytes 1 and 3 in `odd`.
// convert_in_order: those of bytes 0 and 1 in `low`, those of bytes 2 and 3 in `high`.
template <class Scalar> struct FromFp8;
template <> struct FromFp8<__half> {
#ifdef FRAGMETER_CONVERTS_FP8
    static constexpr float kFactor = 1;

    static __device__ __forceinline__ void convert(unsigned four, unsigned &even, unsigned &odd) {
        const unsigned sorted = __byte_perm(four, 0, 0x3120);
        even = ptx::fp8_to_halves((unsigned short)sorted);
        odd = ptx::fp8_to_halves((unsigned short)(sorted >> 16));
    }
    static __device__ __forceinline__ void convert_in_order(unsigned four, unsigned &low, unsigned &high) {
        low = ptx::fp8_to_halves((unsigned short)four);
        high = ptx::fp8_to_halves((unsigned short)(four >> 16));
    }
#else
    static constexpr float kFactor = 256;

    static __device__ __forceinline__ void convert(unsigned four, unsigned &even, unsigned &odd) {
        even = (four << 8 & 0x80008000u) | (four << 7 & 0x3f803f80u);
        odd = (four & 0x80008000u) | (four >> 1 & 0x3f803f80u);
    }
    static __device__ __forceinline__ void convert_in_order(unsigned four, unsigned &low, unsigned &high) {
        convert(__byte_perm(four, 0, 0x3120), low, high);
    }
#endif
};
template <> struct FromFp8<__nv_bfloat16> {
    static constexpr float kFactor = 1;

    static __device__ __forceinline__ void convert(unsigned four, unsigned &even, unsigned &odd) {
        even = ptx::times_2_120((four << 8 & 0x80008000u) | (four << 4 & 0x07f007f0u));
        odd = ptx::times_2_120((four & 0x80008000u) | (four >> 4 & 0x07f007f0u));
    }
    static __device__ __forceinline__ void convert_in_order(unsigned four, unsigned &low, unsigned &high) {
        convert(__byte_perm(four, 0, 0x3120), low, high);
    }
};

// The factor of a cache's scalars after their conversion for queries of type Scalar.
template <class Scalar, class Cache> constexpr float kCacheFactor = 1;
template <class Scalar> constexpr float kCacheFactor<Scalar, Fp8> = FromFp8<Scalar>::kFactor;

// The scales of keys and values of a KV head, with the factor of their conversion; those of a cache of 16 or 32 bits are 1.
struct NoScales {
    __device__ __forceinline__ float of_keys(int) const { return 1; }
    __device__ __forceinline__ float of_values(int) const { return 1; }
};
template <class Scalar> struct Fp8Scales {
    const float *keys, *values;
    __device__ __forceinline__ float of_keys(int head) const { return keys[head] * kCacheFactor<Scalar, Fp8>; }
    __device__ __forceinline__ float of_values(int head) const { return values[head] * kCacheFactor<Scalar, Fp8>; }
};

template <class Scalar, class Cache> struct ScalesFor : NoScales {};
template <class Scalar> struct ScalesFor<Scalar, Fp8> : Fp8Scales<Scalar> {};

// The scalars of 16 bytes of a cache, each times 1 / kCacheFactor.
template <class Scalar, class Cache>
__device__ __forceinline__ void unpack_cache(const uint4 &bytes, float (&values)[kPerLoad<Cache>]) {
    if constexpr (sizeof(Cache) > 1) {
        unpack<Cache>(bytes, values);
    } else {
        const unsigned *words = reinterpret_cast<const unsigned *>(&bytes);
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            unsigned pairs[2];
            FromFp8<Scalar>::convert(words[word], pairs[0], pairs[1]);
#pragma unroll
            for (int place = 0; place < 4; ++place)
                values[4 * word + place] = to_float(reinterpret_cast<const Scalar *>(&pairs[place % 2])[place / 2]);
        }
    }
}

// The 16 numbers of a load as two loads of 16-bit scalars in the same order, each times 1 / kFactor.
template <class Scalar>
__device__ __forceinline__ void widen(const uint4 &bytes, uint4 &first, uint4 &second) {
    FromFp8<Scalar>::convert_in_order(bytes.x, first.x, first.y);
    FromFp8<Scalar>::convert_in_order(bytes.y, first.z, first.w);
    FromFp8<Scalar>::convert_in_order(bytes.z, second.x, second.y);
    FromFp8<Scalar>::convert_in_order(bytes.w, second.z, second.w);
}

// A number as fp8, rounded to nearest, ties to even; 448 for all that is larger. NaN remains.
__device__ __forceinline__ unsigned fp8_of(float value) {
    const unsigned bits = __float_as_uint(value), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7f;
    if (magnitude >= 0x43e00000) return sign | 0x7e;
    // Subnormal: a sum with 2^14 has its last bit at 2^-9, and is rounded there.
    if (magnitude < 0x3c800000)
        return sign | (__float_as_uint(__uint_as_float(magnitude) + 16384.0f) - __float_as_uint(16384.0f));
    return sign | ((magnitude - 0x3c000000 + 0x7ffff + (magnitude >> 20 & 1)) >> 20);
}

// Four numbers as fp8, the first one in the lowest byte.
__device__ __forceinline__ unsigned fp8_of(const float (&values)[4]) {
#ifdef FRAGMETER_CONVERTS_FP8
    return ptx::fp8_from_floats(values[0], values[1]) | ptx::fp8_from_floats(values[2], values[3]) << 16;
#else
    return fp8_of(values[0]) | fp8_of(values[1]) << 8 | fp8_of(values[2]) << 16 | fp8_of(values[3]) << 24;
#endif
}
