// Scale of an amax, and FP8 codes of eight values: q = enc(fl(x * scale)), scale_inv = fl(1 / scale).
//
// Scale arithmetic is IEEE binary32, rounded to nearest even, with denormals, because one wrong ulp in a scale changes codes at
// ties. The code uses _rn intrinsics, which nvcc never contracts or approximates. Bitwise equal to reference.fp8; the rule for
// scales is that of Transformer Engine's compute_scale_from_amax (common/recipe/recipe_common.cuh).
#pragma once

#include <cfloat>

#include <cuda_fp8.h>

#include "octet.cuh"

namespace dlp {

__device__ inline float scale_from_amax(float amax, const ScaleRule& rule) {
    if (amax < rule.epsilon) amax = rule.epsilon;             // false for NaN
    if (!(amax > 0.0f && amax <= FLT_MAX)) return 1.0f;       // 0, Inf and NaN
    float scale = __fdiv_rn(rule.largest, amax);
    if (scale > FLT_MAX) scale = rule.overflow;
    return rule.power_of_two ? __uint_as_float(__float_as_uint(scale) & 0x7F800000u) : scale;  // rounds down
}

// The scale of a job is computed in two steps, which hide the latency of the load: `scale_source` loads the amax or the scale
// before the other loads of the kernel, and `scale_of` returns the scale after these loads.
__device__ inline float scale_source(const TensorJob& job) { return job.scale ? *job.scale : *job.amax; }

__device__ inline float scale_of(const TensorJob& job, float source, const ScaleRule& rule) {
    return job.scale ? source : scale_from_amax(source, rule);
}

template <class F8>
constexpr __nv_fp8_interpretation_t kFormat = std::is_same_v<F8, E4m3> ? __NV_E4M3 : __NV_E5M2;

// Two values -> two codes, the first in the low byte: rounded to nearest even, saturating (also Inf), NaN -> 0x7F.
template <class F8>
__device__ uint32_t pack2(float a, float b) {
    return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kFormat<F8>);
}

// `unpack`: the value of a code. `unpack2`: the values of two codes, the first in the low byte.
template <class F8>
__device__ float unpack(uint8_t code) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, kFormat<F8>)));
}
template <class F8>
__device__ float2 unpack2(uint32_t codes) {
    return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(codes), kFormat<F8>)));
}

template <class F8>
__device__ uint32_t pack4(float a, float b, float c, float d) {
    return pack2<F8>(a, b) | pack2<F8>(c, d) << 16;
}

// A row of a patch (tile.cuh) times a scale -> eight codes.
template <class F8, class T>
__device__ uint2 encode_row(const Octet<T>& x, float scale) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = __fmul_rn(x[i], scale);
    return make_uint2(pack4<F8>(y[0], y[1], y[2], y[3]), pack4<F8>(y[4], y[5], y[6], y[7]));
}

// Column `j` of a patch times a scale -> eight codes.
template <class F8, class T>
__device__ uint2 encode_column(const Octet<T> (&x)[8], int j, float scale) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = __fmul_rn(x[i][j], scale);
    return make_uint2(pack4<F8>(y[0], y[1], y[2], y[3]), pack4<F8>(y[4], y[5], y[6], y[7]));
}

// Whether all rows of contiguous codes [rows, cols] start at multiples of 8 bytes.
__device__ inline bool codes_aligned(const uint8_t* codes, int64_t rows, int64_t cols) {
    return (rows <= 1 || cols % 8 == 0) && reinterpret_cast<uintptr_t>(codes) % 8 == 0;
}

// Stores the first min(valid, 8) of eight codes byte by byte; none if `valid` is negative.
__device__ inline void store_bytes(uint8_t* to, uint2 codes, int64_t valid) {
    const uint64_t bytes = uint64_t(codes.y) << 32 | codes.x;
#pragma unroll 1
    for (int i = 0; i < min(valid, int64_t(8)); ++i) to[i] = uint8_t(bytes >> 8 * i);
}

// Stores the first min(valid, 8) of eight codes. `aligned`: the address `to` is a multiple of 8.
__device__ inline void store_octet(uint8_t* to, uint2 codes, int64_t valid, bool aligned) {
    if (aligned && valid >= 8)
        *reinterpret_cast<uint2*>(to) = codes;
    else
        store_bytes(to, codes, valid);
}

}  // namespace dlp
