// E8M0, the scales of MXFP8 (OCP Microscaling Formats v1.0): a byte b means 2^(b - 127), 0xFF is NaN; there is no zero and no
// sign. Bitwise equal to reference.mx.
#pragma once

#include "fp8.cuh"

namespace dlp {

template <class F8>
constexpr float kFp8Largest = std::is_same_v<F8, E4m3> ? 448.0f : 57344.0f;
// emax of OCP MX: the exponent of the largest FP8 value.
template <class F8>
constexpr uint32_t kLargestExponent = std::is_same_v<F8, E4m3> ? 8 : 15;

// The scale of a block from the bits of its amax (fp32 >= 0).
//   ceil    the least power of two not below fl(amax * fl(1/max)): no element saturates; capped at 0xFE
//   floor   floor(log2(amax)) - emax, the rule of OCP MX v1.0; elements may saturate; Inf and NaN give 0xFF
template <class F8, bool kFloor>
__device__ uint32_t e8m0_from_amax(uint32_t bits) {
    if (kFloor) {
        const uint32_t exponent = bits >> 23;
        return exponent == 0xFF ? 0xFF : max(exponent, kLargestExponent<F8>) - kLargestExponent<F8>;
    }
    const uint32_t v = __float_as_uint(__fmul_rn(__uint_as_float(bits), 1.0f / kFp8Largest<F8>));
    const uint32_t exponent = v >> 23, exact = exponent ? 0 : 0x400000;  // denormals up to 2^-127 give byte 0
    return min(exponent + ((v & 0x7FFFFF) > exact), 0xFEu);
}

// 2^(127 - b); 0xFE gives a denormal, 0xFF NaN.
__device__ inline float e8m0_reciprocal(uint32_t byte) {
    if (byte == 0xFF) return __uint_as_float(0x7FC00000u);
    return __uint_as_float(byte == 0xFE ? 0x00400000u : (0xFE - byte) << 23);
}

// 2^(b - 127); 0 gives a denormal, 0xFF NaN.
__device__ inline float e8m0_value(uint32_t byte) {
    if (byte == 0xFF) return __uint_as_float(0x7FC00000u);
    return __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
}

}  // namespace dlp
