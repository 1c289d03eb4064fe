// The scalar types of a cache, and their conversion to and from fp32.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class Scalar> struct FromFloat;
template <> struct FromFloat<float> {
    __device__ static float of(float value) { return value; }
};
template <> struct FromFloat<__half> {
    __device__ static __half of(float value) { return __float2half_rn(value); }
};
template <> struct FromFloat<__nv_bfloat16> {
    __device__ static __nv_bfloat16 of(float value) { return __float2bfloat16_rn(value); }
};

// The scalars of a 16-byte load.
template <class Scalar> constexpr int kPerLoad = 16 / (int)sizeof(Scalar);

template <class Scalar>
__device__ __forceinline__ void unpack(const uint4 &bytes, float (&values)[kPerLoad<Scalar>]) {
    const Scalar *scalars = reinterpret_cast<const Scalar *>(&bytes);
#pragma unroll
    for (int place = 0; place < kPerLoad<Scalar>; ++place) values[place] = to_float(scalars[place]);
}
