// E2M1: eight values to eight codes, to nearest or by chance; the two-level scales of NVFP4; the Hadamard transform.
//
// No conversion unit of sm_90a knows E2M1, so codes are made by arithmetic. The order of every product is part of the
// format.
#pragma once

#include "fp8.cuh"

namespace dlp {

constexpr int kSixteen = 16;  // elements that share a scale

// What scales and elements of a tensor are multiplied by.
struct TensorScale {
    float block;   // fl(S_enc / 6)
    float decode;  // fl(1 / S_enc)

    __device__ explicit TensorScale(float amax) {
        const bool usable = amax > 0.0f && amax <= FLT_MAX;  // not 0, Inf or NaN
        const float encode = usable ? fminf(__fdiv_rn(448.0f * 6.0f, amax), FLT_MAX) : 1.0f;
        block = __fmul_rn(encode, 1.0f / 6.0f);
        decode = __frcp_rn(encode);
    }
    // The E4M3 scale of a block.
    __device__ uint8_t scale(float block_amax) const {
        return __nv_cvt_float_to_fp8(fminf(__fmul_rn(block_amax, block), FLT_MAX), __NV_SATFINITE, __NV_E4M3);
    }
    // The multiplier into E2M1; FLT_MAX where the scale is 0.
    __device__ float multiplier(uint8_t scale) const {
        const float value = __half2float(__half(__nv_cvt_fp8_to_halfraw(scale, __NV_E4M3)));
        return fminf(__frcp_rn(__fmul_rn(value, decode)), FLT_MAX);
    }
};

// fl(a * b + c), cut off at 0 and 1; NaN gives 0.
__device__ inline float fma_sat(float a, float b, float c) {
    float d;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}

// |y| as a place on the grid 0, 0.5, 1, 1.5, 2, 3, 4, 6, in steps of it, is 4 a + 2 b + c: a runs from 0 to 1 as |y| does
// from 0 to 2, b from 2 to 4 and c from 4 to 6, all exactly. Each step is even where the next part begins, so the parts are
// rounded one after the other, by sums with 2^23, whose last place is 1. Additions where comparisons would do: these have
// a pipe of their own, twice as wide.
struct GridPlace {
    float a, b, c;

    __device__ explicit GridPlace(float y)
        : a(fma_sat(fabsf(y), 0.5f, 0.0f)), b(fma_sat(fabsf(y), 0.5f, -1.0f)), c(fma_sat(fabsf(y), 0.5f, -2.0f)) {}

    // 2^23 + the nearest place, ties to the even one.
    __device__ float nearest() const { return __fadd_rn(__fmaf_rn(b, 2.0f, __fmaf_rn(a, 4.0f, 0x1p23f)), c); }
    // 2^23 + 256 * the place, rounded down.
    __device__ float in_256ths() const {
        return __fmaf_rz(c, 256.0f, __fmaf_rz(b, 512.0f, __fmaf_rz(a, 1024.0f, 0x1p23f)));
    }
};

// Byte `kByte` of four words.
template <int kByte>
__device__ uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    constexpr unsigned kTwo = kByte | (kByte + 4) << 4;
    return __byte_perm(__byte_perm(a, b, kTwo), __byte_perm(c, d, kTwo), 0x5410);
}

// Codes from the magnitudes in byte `kByte` of eight words and the signs of eight values, the first in the lowest nibble.
template <int kByte>
__device__ uint32_t pack_codes(const uint32_t (&magnitude)[8], const float (&x)[8]) {
    uint32_t bits[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = __float_as_uint(x[i]);
    const uint32_t even = bytes_of<kByte>(magnitude[0], magnitude[2], magnitude[4], magnitude[6]);
    const uint32_t odd = bytes_of<kByte>(magnitude[1], magnitude[3], magnitude[5], magnitude[7]);
    const uint32_t even_sign = bytes_of<3>(bits[0], bits[2], bits[4], bits[6]);
    const uint32_t odd_sign = bytes_of<3>(bits[1], bits[3], bits[5], bits[7]);
    return even + 16 * odd | even_sign >> 4 & 0x08080808u | odd_sign & 0x80808080u;
}

// Eight values, none of them NaN, under one multiplier -> eight codes: to nearest, ties to the even code.
__device__ inline uint32_t encode_nearest(const float (&x)[8], float multiplier) {
    uint32_t place[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) place[i] = __float_as_uint(GridPlace(__fmul_rn(x[i], multiplier)).nearest());
    return pack_codes<0>(place, x);
}

// With grid neighbours lo <= |y| < hi and f = (|y| - lo) / (hi - lo): away from zero iff floor(256 f) + random >= 256.
__device__ inline uint32_t encode_by_chance(const float (&x)[8], float multiplier, uint32_t random, uint32_t random_high) {
    uint32_t place[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint32_t byte = __byte_perm(random, random_high, 0x4440 + i) & 0xFF;
        place[i] = __float_as_uint(GridPlace(__fmul_rn(x[i], multiplier)).in_256ths()) + byte;
    }
    return pack_codes<1>(place, x);
}

// The codes of NaNs, which the above give no meaning, become +6.
__device__ inline uint32_t mend_nan(const float (&x)[8], uint32_t codes) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (isnan(x[i])) codes = codes & ~(0xFu << 4 * i) | 7u << 4 * i;
    return codes;
}

__device__ inline float max_keeping_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// Philox4x32-10 for one block of 16 elements: 16 random bytes, byte b of word w for element 4w + b.
__device__ inline uint4 philox(uint4 counter, uint32_t key, uint32_t key_high) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32_t low = counter.x * 0xD2511F53u, high = __umulhi(counter.x, 0xD2511F53u);
        const uint32_t low2 = counter.z * 0xCD9E8D57u, high2 = __umulhi(counter.z, 0xCD9E8D57u);
        counter = make_uint4(high2 ^ counter.y ^ key, low2, high ^ counter.w ^ key_high, low);
        key += 0x9E3779B9u, key_high += 0xBB67AE85u;
    }
    return counter;
}

// y = x D H16 / 4, rounded once to bf16: D flips the signs of kRhtSigns, H16 is a butterfly of strides 1, 2, 4, 8.
constexpr uint32_t kRhtSigns = 0xD7E8;

__device__ inline void hadamard16(float (&v)[kSixteen]) {
#pragma unroll
    for (int i = 0; i < kSixteen; ++i) v[i] = kRhtSigns >> i & 1 ? -v[i] : v[i];
#pragma unroll
    for (int stride = 1; stride < kSixteen; stride *= 2)
#pragma unroll
        for (int i = 0; i < kSixteen; ++i)
            if (!(i & stride)) {
                const float left = v[i], right = v[i + stride];
                v[i] = __fadd_rn(left, right);
                v[i + stride] = __fsub_rn(left, right);
            }
#pragma unroll
    for (int i = 0; i < kSixteen; i += 2) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(__fmul_rn(v[i], 0.25f), __fmul_rn(v[i + 1], 0.25f));
        v[i] = __low2float(pair), v[i + 1] = __high2float(pair);
    }
}

// The eight columns of eight rows as they enter the transform: in bf16.
__device__ inline Octet<__nv_bfloat16> to_bf16(const Octet<__nv_bfloat16>& x) { return x; }
__device__ inline Octet<__nv_bfloat16> to_bf16(const Octet<float>& x) {
    Octet<__nv_bfloat16> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        out.word[i] = reinterpret_cast<const uint32_t&>(pair);
    }
    return out;
}

}  // namespace dlp
