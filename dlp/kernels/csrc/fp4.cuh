// NVFP4 (arXiv 2509.25149): E2M1 codes, one E4M3 scale per 16 elements, an fp32 amax for the tensor; and the random
// Hadamard transform of wgrad operands. Bitwise equal to reference.fp4 and reference.nvfp4: the order of every product
// is part of the format.
//
//   S_enc = min(fl(2688 / amax), FLT_MAX), 1 if amax is 0, Inf or NaN         2688 = 448 * 6
//   s8    = e4m3(fl(amax_block * fl(S_enc * fl(1/6))))                        the stored scale
//   e     = min(fl(1 / fl(s8 * fl(1 / S_enc))), FLT_MAX)                      the multiplier into E2M1
//   q     = e2m1(fl(x * e))                                                   to nearest, or stochastically
//
// Four over six (arXiv 2512.02010): the formulas use 1.75 times the amax in place of the amax. A block has the scale s8 above,
// which maps the amax of the block to 6, or e4m3(fl(1.5 * fl(amax_block * fl(S_enc * fl(1/6))))), which maps the amax of the
// block to 4, if this gives the smaller squared error (reference.nvfp4).
//
// E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6: an index of 0 to 7 into this grid, and a sign in bit 3. sm_90a
// has no instruction for this conversion (cvt.e2m1x2 exists on sm_100a), so codes are computed in one of two ways:
//
//   encode_nearest                      the index by fp32 additions that round to the grid
//   encode_nearest_lean, _stochastic    the index from the top bits of an fp16 (a half), two elements per word: fewer registers
#pragma once

#include <math_constants.h>

#include "fp8.cuh"

namespace dlp {

constexpr int kFp4Block = 16;  // elements that share a scale

// Factors of a tensor; see the top of this file for the formulas.
struct TensorScale {
    float block;   // fl(S_enc / 6)
    float decode;  // fl(1 / S_enc)
    float encode;  // S_enc

    __device__ explicit TensorScale(float amax) {
        const bool usable = amax > 0.0f && amax <= FLT_MAX;  // not 0, Inf or NaN
        encode = usable ? fminf(__fdiv_rn(448.0f * 6.0f, amax), FLT_MAX) : 1.0f;
        block = __fmul_rn(encode, 1.0f / 6.0f);
        decode = __frcp_rn(encode);
    }
    // E4M3 scale of a block. The clamp of reference.nvfp4 to FLT_MAX is not needed, because Inf also saturates to 448.
    __device__ uint8_t scale(float block_amax) const {
        return __nv_cvt_float_to_fp8(__fmul_rn(block_amax, block), __NV_SATFINITE, __NV_E4M3);
    }
    // E4M3 scale of a block with 4 as the largest code in place of 6.
    __device__ uint8_t scale_of_four(float block_amax) const {
        return __nv_cvt_float_to_fp8(__fmul_rn(__fmul_rn(block_amax, block), 1.5f), __NV_SATFINITE, __NV_E4M3);
    }
    // The multiplier into E2M1 of a block with this scale; FLT_MAX if the scale is 0.
    __device__ float multiplier(uint8_t scale) const {
        return fminf(__frcp_rn(__fmul_rn(unpack<E4m3>(scale), decode)), FLT_MAX);
    }
};

// |y| -> index of the nearest grid point, ties to the even index, by the rounding of an fp32 addition. fp32 numbers are 0.5
// apart below 2^23 and 1 apart above, and so is the grid below and above 2. Therefore fl(|y| + 2^23 - 2) is a grid point (plus
// 2^23 - 2) for |y| up to 4. Beyond 4 the grid is 2 apart, and fl(|y| / 2 + 2^23) takes its place. The result is the smaller of
// the two, capped at the point of 6. Its last three mantissa bits are the index with bit 2 flipped, because the value 2 (index
// 4) has mantissa 0; for example, |y| = 0 gives 2^23 - 2, mantissa ...100. Equal to the definition for all fp32 from 0 to Inf
// (dev/log.md).
__device__ inline int nearest_index(float y) {
    const float fine = __fadd_rn(y, 0x1p23f - 2.0f), coarse = __fmaf_rn(y, 0.5f, 0x1p23f);
    return __vimin3_s32(__float_as_int(fine), __float_as_int(coarse), __float_as_int(0x1p23f + 3.0f));
}

// Byte kByte of each of four words, as one word.
template <int kByte>
__device__ uint32_t byte_of_each(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    constexpr unsigned kTwo = kByte | (kByte + 4) << 4;
    return __byte_perm(__byte_perm(a, b, kTwo), __byte_perm(c, d, kTwo), 0x5410);
}

// (a & kMask) | (b & ~kMask), in one instruction.
template <uint32_t kMask>
__device__ uint32_t select_bits(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(c) : "r"(a), "r"(b), "n"(kMask));
    return c;
}

// Signs of eight values in bits 3, 7, ..., 31, where eight packed codes have their signs; the other bits are arbitrary.
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

// Eight values, none of them NaN, times a multiplier -> eight codes to nearest, the first in the lowest nibble.
template <class T>
__device__ uint32_t encode_nearest(const Octet<T>& x, float multiplier) {
    uint32_t index[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) index[i] = nearest_index(fabsf(__fmul_rn(x[i], multiplier)));
    const uint32_t even = byte_of_each<0>(index[0], index[2], index[4], index[6]);
    const uint32_t odd = byte_of_each<0>(index[1], index[3], index[5], index[7]);
    return select_bits<0x77777777u>(select_bits<0x0F0F0F0Fu>(even, odd << 4) ^ 0x44444444u, code_signs(x));
}

// The second way: the bits of E2M1 are also the top bits of an fp16. The fp16 of y / 2^14 consists of the sign and of 512 times
// the index of |y| on the grid: fp16 numbers up to 1 / 2^14 (y = 1) are denormal and evenly spaced, and above that the exponent
// field grows like the exponent of E2M1. For example, y = 3: 3 / 2^14 has exponent field 2 and mantissa 0x200, that is 0x0A00 =
// 5 * 512. Codes are therefore computed two at a time by integer arithmetic from fp16 pairs that are rounded toward zero; the
// last nine bits are the fraction between two grid points. This way is used for stochastic rounding, and for rounding to
// nearest in kernels that are short of registers. NaN becomes +6, as the format requires: a NaN product has no sign here, and
// the minimum with 6 returns 6.
constexpr float kToHalf = 0x1p-14f;
constexpr uint32_t kLargestIndex = 0x0E000E00u;  // index 7, the value 6, twice

// Two values -> a pair of fp16 in one word, rounded toward zero.
__device__ inline uint32_t halves(float low, float high) {
    uint32_t pair;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// A pair of fp16 with magnitudes capped at 6; signs do not change.
__device__ inline uint32_t at_most_six(uint32_t pair) {
    uint32_t least;
    asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(least) : "r"(pair), "r"(kLargestIndex));
    return least;
}

// Two values -> 512 times their indices, to nearest, ties to even; the last nine bits are arbitrary. The fraction has nine
// bits: adding 0x100 carries for fractions of at least 256, adding 0xFF for larger fractions only. A fraction of 256 is a tie,
// which goes to the even index, unless the rounding to fp16 dropped bits. No bits were dropped iff the next smaller fp32 rounds
// to another fp16.
__device__ inline uint32_t nearest_indices(float low, float high) {
    constexpr float kJustBelow = 0x1.fffffep-1f;
    const uint32_t pair = halves(low, high), below = halves(__fmul_rn(low, kJustBelow), __fmul_rn(high, kJustBelow));
    const uint32_t index = at_most_six(pair), up = (index >> 9 | ~(pair ^ below)) & 0x00010001u;
    return index + 0x00FF00FFu + up;
}

// Two values -> 512 times their indices, rounded stochastically. With grid neighbours lo <= |y| < hi and
// f = (|y| - lo) / (hi - lo), a value is rounded away from zero iff floor(256 f) + random >= 256, which is the carry out of the
// fraction. `random`: one byte for each value, in bits 0 to 7 and 16 to 23.
__device__ inline uint32_t stochastic_indices(float low, float high, uint32_t random) {
    return at_most_six(halves(low, high)) + 2 * random;
}

// Returns the codes of elements 0 and 1 in byte 1, and those of elements 2 and 3 in byte 3. `even`, `odd`: 512 times the
// indices of elements 0 and 2, and of elements 1 and 3.
__device__ inline uint32_t pack_indices(uint32_t even, uint32_t odd) {
    const uint32_t high = (odd & 0x80008000u) | (odd << 3 & 0x70007000u);
    return high | (even >> 1 & 0x07000700u) | (even >> 4 & 0x08000800u);
}

// Eight values times a multiplier -> eight codes, by the rounding of `round(low, high, i)`, which takes elements i and i + 2.
template <class T, class Round>
__device__ uint32_t encode_from_halves(const Octet<T>& x, float multiplier, Round round) {
    float y[8];
    if (multiplier >= 0x1p-112f) {
        multiplier = __fmul_rn(multiplier, kToHalf);
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = __fmul_rn(x[i], multiplier);
    } else {  // multiplier / 2^14 would be denormal: divide the values instead, which are large if their codes are not 0
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = __fmul_rn(__fmul_rn(x[i], kToHalf), multiplier);
    }
    const uint32_t low = pack_indices(round(y[0], y[2], 0), round(y[1], y[3], 1));
    const uint32_t high = pack_indices(round(y[4], y[6], 4), round(y[5], y[7], 5));
    return __byte_perm(low, high, 0x7531);
}

// The same codes as `encode_nearest`, and +6 for NaN, with more instructions and fewer registers.
template <class T>
__device__ uint32_t encode_nearest_lean(const Octet<T>& x, float multiplier) {
    return encode_from_halves(x, multiplier, [](float low, float high, int) { return nearest_indices(low, high); });
}

// The amax that an operand stores. With four over six it is 1.75 times the amax, so that the scales that map to 6 reach 256 and
// the scales that map to 4 reach 384, which E4M3 can represent. Inf and NaN do not change.
template <bool kFourOverSix>
__device__ float stored_amax(float amax) {
    return kFourOverSix && amax <= FLT_MAX ? fminf(__fmul_rn(amax, 448.0f / 256.0f), FLT_MAX) : amax;
}

// Magnitudes of the codes 2 kPair and 2 kPair + 1 of eight packed codes, as two bf16 in one word.
template <int kPair>
__device__ uint32_t magnitudes(uint32_t codes) {
    const uint32_t selector = codes >> 8 * kPair & 0x77u;
    const uint32_t high = __byte_perm(0x3F3F3F00u, 0x40404040u, selector);  // of 0, 0.5, 1, 1.5, 2, 3, 4, 6
    const uint32_t low = __byte_perm(0xC0800000u, 0xC0804000u, selector);
    return __byte_perm(low, high, 0x5140);
}

// fl(d * d), d = fl(|e2m1| * s8 - fl(|x| * S_enc)): the squared error of one element in units of 1 / S_enc. The code has the
// sign of x, so that magnitudes suffice. The product of a code and a scale is exact. `magnitude`: value of the code without
// sign; `scale`: s8.
__device__ inline float squared_error(float x, float magnitude, float scale, float encode) {
    const float difference = __fmaf_rn(magnitude, scale, -__fmul_rn(fabsf(x), encode));
    return __fmul_rn(difference, difference);
}

// Adds the squared errors of eight elements to `sum`, in their order.
template <class T>
__device__ float add_errors(float sum, const Octet<T>& x, uint32_t codes, float scale, float encode) {
    const uint32_t pair[4] = {magnitudes<0>(codes), magnitudes<1>(codes), magnitudes<2>(codes), magnitudes<3>(codes)};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float magnitude = __uint_as_float(i & 1 ? pair[i / 2] & 0xFFFF0000u : pair[i / 2] << 16);
        sum = __fadd_rn(sum, squared_error(x[i], magnitude, scale, encode));
    }
    return sum;
}

// Stochastic rounding (reference.fp4.encode_e2m1_stochastic): byte i % 4 of `random` (i < 4) or `random_high` is for element i.
template <class T>
__device__ uint32_t encode_stochastic(const Octet<T>& x, float multiplier, uint32_t random, uint32_t random_high) {
    return encode_from_halves(x, multiplier, [=](float low, float high, int i) {
        const uint32_t four = i < 4 ? random : random_high;
        return stochastic_indices(low, high, (i % 2 ? four >> 8 : four) & 0x00FF00FFu);
    });
}

// NaN -> +Inf, because `encode_nearest` does not support NaN; the code of both is +6.
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

// max |x| of two values (of each of two pairs of bf16), NaN if one is NaN. For pairs, the sign bits of the result are
// arbitrary.
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

// max |x| of sixteen values, NaN if one is NaN.
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

// Round keys of Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011), which the host computes
// and passes to the kernel.
struct RoundKeys {
    static constexpr int kRounds = 10;
    uint32_t low[kRounds], high[kRounds];

    RoundKeys(uint32_t key, uint32_t key_high) {
        for (int round = 0; round < kRounds; ++round)
            low[round] = key + round * 0x9E3779B9u, high[round] = key_high + round * 0xBB67AE85u;
    }
};

// One call gives the 16 random bytes of a block of 16 elements: byte b of word w is for element 4 w + b.
__device__ inline uint4 philox(uint4 counter, const RoundKeys& key) {
#pragma unroll
    for (int round = 0; round < RoundKeys::kRounds; ++round) {
        const uint32_t low = counter.x * 0xD2511F53u, high = __umulhi(counter.x, 0xD2511F53u);
        const uint32_t low2 = counter.z * 0xCD9E8D57u, high2 = __umulhi(counter.z, 0xCD9E8D57u);
        counter = make_uint4(high2 ^ counter.y ^ key.low[round], low2, high ^ counter.w ^ key.high[round], low);
    }
    return counter;
}

// Random Hadamard transform: (low, high) = v D H16 / 4, rounded once to bf16. D flips the signs at the bits of kRhtSigns; H16
// is Sylvester's matrix, applied as an fp32 butterfly with strides 1, 2, 4, 8. The order of the strides determines the rounding
// (reference.nvfp4.rht16).
constexpr uint32_t kRhtSigns = 0xD7E8;

__device__ inline void hadamard16(float (&v)[kFp4Block], Octet<__nv_bfloat16>& low, Octet<__nv_bfloat16>& high) {
#pragma unroll
    for (int i = 0; i < kFp4Block; ++i) v[i] = kRhtSigns >> i & 1 ? -v[i] : v[i];
#pragma unroll
    for (int stride = 1; stride < kFp4Block; stride *= 2)
#pragma unroll
        for (int i = 0; i < kFp4Block; ++i)
            if (!(i & stride)) {
                const float left = v[i], right = v[i + stride];
                v[i] = __fadd_rn(left, right);
                v[i + stride] = __fsub_rn(left, right);
            }
#pragma unroll
    for (int i = 0; i < kFp4Block; i += 2) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(__fmul_rn(v[i], 0.25f), __fmul_rn(v[i + 1], 0.25f));
        (i < 8 ? low : high).word[i / 2 % 4] = reinterpret_cast<const uint32_t&>(pair);
    }
}

// An octet in bf16, the input of the Hadamard transform.
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
