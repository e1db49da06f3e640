// E2M1: eight values to eight codes, to nearest or by chance; the two-level scales of NVFP4; the Hadamard transform.
//
// No conversion unit of sm_90a knows E2M1, so codes are made by additions to nearest, and from halves by chance. The order of
// every product is part of the format.
#pragma once

#include <math_constants.h>

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
    // The E4M3 scale of a block; a product beyond fp32 is beyond E4M3, too.
    __device__ uint8_t scale(float block_amax) const {
        return __nv_cvt_float_to_fp8(__fmul_rn(block_amax, block), __NV_SATFINITE, __NV_E4M3);
    }
    // The multiplier into E2M1; FLT_MAX where the scale is 0.
    __device__ float multiplier(uint8_t scale) const {
        return fminf(__frcp_rn(__fmul_rn(unpack<E4m3>(scale), decode)), FLT_MAX);
    }
};

// To nearest, ties to the even code: the place of |y| on the grid 0, 0.5, 1, 1.5, 2, 3, 4, 6, with its bit of 4 flipped, in the
// last three bits. Below 2^23 floats lie 0.5 apart, above it 1 apart, as the grid does below and above 2: so |y| + 2^23 - 2 is
// rounded to the grid up to 4, and |y| / 2 + 2^23 beyond. The lesser of the two, and no more than the place of 6, is it.
__device__ inline int nearest_place(float y) {
    const float fine = __fadd_rn(y, 0x1p23f - 2.0f), coarse = __fmaf_rn(y, 0.5f, 0x1p23f);
    return __vimin3_s32(__float_as_int(fine), __float_as_int(coarse), __float_as_int(0x1p23f + 3.0f));
}

// One byte of each of four words.
template <int kByte>
__device__ uint32_t byte_of_each(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    constexpr unsigned kTwo = kByte | (kByte + 4) << 4;
    return __byte_perm(__byte_perm(a, b, kTwo), __byte_perm(c, d, kTwo), 0x5410);
}

// Bits of `a` where those of `mask` are 1, of `b` elsewhere.
template <uint32_t kMask>
__device__ uint32_t select_bits(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(c) : "r"(a), "r"(b), "n"(kMask));
    return c;
}

// The signs of eight values where their codes have them; the other bits mean nothing.
__device__ inline uint32_t code_signs(const Octet<__nv_bfloat16>& x) {
    const uint32_t low = __byte_perm(x.word[0], x.word[1], 0x7351), high = __byte_perm(x.word[2], x.word[3], 0x7351);
    return select_bits<0x0F0F0F0Fu>(__byte_perm(low, high, 0x5410) >> 4, __byte_perm(low, high, 0x7632));
}
__device__ inline uint32_t code_signs(const Octet<float>& x) {
    uint32_t bits[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = __float_as_uint(x[i]);
    const uint32_t even = byte_of_each<3>(bits[0], bits[2], bits[4], bits[6]);
    return select_bits<0x0F0F0F0Fu>(even >> 4, byte_of_each<3>(bits[1], bits[3], bits[5], bits[7]));
}

// Eight values, none of them NaN, under one multiplier -> eight codes, the first in the lowest nibble.
template <class T>
__device__ uint32_t encode_nearest(const Octet<T>& x, float multiplier) {
    uint32_t place[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) place[i] = nearest_place(fabsf(__fmul_rn(x[i], multiplier)));
    const uint32_t even = byte_of_each<0>(place[0], place[2], place[4], place[6]);
    const uint32_t odd = byte_of_each<0>(place[1], place[3], place[5], place[7]);
    return select_bits<0x77777777u>(select_bits<0x0F0F0F0Fu>(even, odd << 4) ^ 0x44444444u, code_signs(x));
}

// E2M1 is also the top of a half: in the half of y / 2^14, a sign is followed by 512 times the place of |y| on the grid, since
// halves are denormal, evenly spaced, where the grid is. So codes are made two at a time, by integers, from halves rounded
// toward zero: by chance, and to nearest where a kernel is short of registers. NaN becomes +6, as it should: a product that is
// NaN has no sign, and its half loses against that of 6.
constexpr float kToHalf = 0x1p-14f;
constexpr uint32_t kLargestPlace = 0x0E000E00u;  // 7, twice

// Two values -> halves, rounded toward zero.
__device__ inline uint32_t halves(float low, float high) {
    uint32_t pair;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The same halves, none beyond that of 6.
__device__ inline uint32_t at_most_six(uint32_t pair) {
    uint32_t least;
    asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(least) : "r"(pair), "r"(kLargestPlace));
    return least;
}

// Two values -> 512 times their places, rounded to the nearest place, ties to the even one; the last nine bits mean nothing.
// Halves have lost what lies beyond their last bit, which decides where they seem to lie in the middle: nothing was lost iff
// the float just below has another half.
__device__ inline uint32_t nearest_places(float low, float high) {
    constexpr float kJustBelow = 0x1.fffffep-1f;
    const uint32_t pair = halves(low, high), below = halves(__fmul_rn(low, kJustBelow), __fmul_rn(high, kJustBelow));
    const uint32_t place = at_most_six(pair), up = (place >> 9 | ~(pair ^ below)) & 0x00010001u;
    return place + 0x00FF00FFu + up;
}

// Two values -> 512 times their places. With grid neighbours lo <= |y| < hi and f = (|y| - lo) / (hi - lo): away from zero
// iff floor(256 f) + random >= 256. `random`: a byte for each half.
__device__ inline uint32_t places_by_chance(float low, float high, uint32_t random) {
    return at_most_six(halves(low, high)) + 2 * random;
}

// The codes of elements 0, 1, 2, 3 in bytes 1 and 3, from the places of elements 0 and 2, and of 1 and 3.
__device__ inline uint32_t pack_places(uint32_t even, uint32_t odd) {
    const uint32_t high = (odd & 0x80008000u) | (odd << 3 & 0x70007000u);
    return high | (even >> 1 & 0x07000700u) | (even >> 4 & 0x08000800u);
}

// `encode_nearest` for any rounding: `places(low, high, i)` makes those of elements i and i + 2.
template <class T, class Places>
__device__ uint32_t encode_by_halves(const Octet<T>& x, float multiplier, Places places) {
    float y[8];
    if (multiplier >= 0x1p-112f) {
        multiplier = __fmul_rn(multiplier, kToHalf);
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = __fmul_rn(x[i], multiplier);
    } else {  // would become denormal; the values that count are large then
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = __fmul_rn(__fmul_rn(x[i], kToHalf), multiplier);
    }
    const uint32_t low = pack_places(places(y[0], y[2], 0), places(y[1], y[3], 1));
    const uint32_t high = pack_places(places(y[4], y[6], 4), places(y[5], y[7], 5));
    return __byte_perm(low, high, 0x7531);
}

// The codes of `encode_nearest`, by more instructions and fewer registers.
template <class T>
__device__ uint32_t encode_nearest_lean(const Octet<T>& x, float multiplier) {
    return encode_by_halves(x, multiplier, [](float low, float high, int) { return nearest_places(low, high); });
}

// By chance: byte i of `random` and `random_high` is element i's.
template <class T>
__device__ uint32_t encode_by_chance(const Octet<T>& x, float multiplier, uint32_t random, uint32_t random_high) {
    return encode_by_halves(x, multiplier, [=](float low, float high, int i) {
        const uint32_t four = i < 4 ? random : random_high;
        return places_by_chance(low, high, (i % 2 ? four >> 8 : four) & 0x00FF00FFu);
    });
}

// NaN, of which encoding knows nothing -> +Inf, whose code is its own.
__device__ inline void nan_to_infinity(Octet<__nv_bfloat16>& x) {
    constexpr uint32_t kInfinity = 0x7F80;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t low = x.word[i] & 0xFFFFu, high = x.word[i] >> 16;
        x.word[i] = ((low & 0x7FFFu) > kInfinity ? kInfinity : low) | ((high & 0x7FFFu) > kInfinity ? kInfinity : high) << 16;
    }
}
__device__ inline void nan_to_infinity(Octet<float>& x) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (isnan(x[i])) x.element[i] = CUDART_INF_F;
}

// max |x| of two values, NaN where one is; pairs of bf16 keep some sign.
__device__ inline float max_keeping_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(fabsf(a)), "f"(fabsf(b)));
    return c;
}
__device__ inline uint32_t max_keeping_nan(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// The same of sixteen. bf16 is compared as it is, two at a time.
__device__ inline float amax_keeping_nan(const Octet<__nv_bfloat16>& low, const Octet<__nv_bfloat16>& high) {
    uint32_t amax = max_keeping_nan(low.word[0], high.word[0]);
#pragma unroll
    for (int i = 1; i < 4; ++i) amax = max_keeping_nan(amax, max_keeping_nan(low.word[i], high.word[i]));
    return max_keeping_nan(__uint_as_float(amax << 16), __uint_as_float(amax & 0xFFFF0000u));
}
__device__ inline float amax_keeping_nan(const Octet<float>& low, const Octet<float>& high) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = max_keeping_nan(amax, max_keeping_nan(low[i], high[i]));
    return amax;
}

// The keys of the rounds of Philox4x32-10. The host makes them, so that they reach the device as operands.
struct RoundKeys {
    static constexpr int kRounds = 10;
    uint32_t low[kRounds], high[kRounds];

    RoundKeys(uint32_t key, uint32_t key_high) {
        for (int round = 0; round < kRounds; ++round)
            low[round] = key + round * 0x9E3779B9u, high[round] = key_high + round * 0xBB67AE85u;
    }
};

// For one block of 16 elements: 16 random bytes, byte b of word w for element 4w + b.
__device__ inline uint4 philox(uint4 counter, const RoundKeys& key) {
#pragma unroll
    for (int round = 0; round < RoundKeys::kRounds; ++round) {
        const uint32_t low = counter.x * 0xD2511F53u, high = __umulhi(counter.x, 0xD2511F53u);
        const uint32_t low2 = counter.z * 0xCD9E8D57u, high2 = __umulhi(counter.z, 0xCD9E8D57u);
        counter = make_uint4(high2 ^ counter.y ^ key.low[round], low2, high ^ counter.w ^ key.high[round], low);
    }
    return counter;
}

// (low, high) = v D H16 / 4, rounded once to bf16: D flips the signs of kRhtSigns, H16 is a butterfly of strides 1, 2, 4, 8.
constexpr uint32_t kRhtSigns = 0xD7E8;

__device__ inline void hadamard16(float (&v)[kSixteen], Octet<__nv_bfloat16>& low, Octet<__nv_bfloat16>& high) {
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
        (i < 8 ? low : high).word[i / 2 % 4] = reinterpret_cast<const uint32_t&>(pair);
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
