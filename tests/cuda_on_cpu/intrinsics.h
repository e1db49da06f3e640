// Intrinsics and PTX as functions. They are compiled with -ffp-contract=off, so that every operation is rounded.
#pragma once

inline void __syncthreads() { emulator::meet(*emulator::block_group); }
inline void __syncwarp(unsigned = ~0u) { emulator::meet(*emulator::warp_group); }
inline void __threadfence() {}
inline void __threadfence_system() { emulator::yield(); }  // slow, so other threads run first
[[noreturn]] inline void __trap() { emulator::fail("a kernel trapped"); }

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    return emulator::of_word<T>(emulator::gather(emulator::word_of(value))[lane % emulator::kWarp]);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int bits) {
    return emulator::of_word<T>(emulator::gather(emulator::word_of(value))[emulator::lane() ^ bits]);
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    const uint64_t* given = emulator::gather(value);
    return unsigned(*std::max_element(given, given + emulator::kWarp));
}
inline unsigned __ballot_sync(unsigned, int predicate) {
    const uint64_t* given = emulator::gather(predicate != 0);
    unsigned bits = 0;
    for (int lane = 0; lane < emulator::kWarp; ++lane) bits |= unsigned(given[lane]) << lane;
    return bits;
}

template <class T>
T atomicMax(T* at, T value) {
    const T before = *at;
    *at = std::max(before, value);
    return before;
}
template <class T>
T atomicAdd(T* at, T value) {
    return std::exchange(*at, *at + value);
}
template <class T>
T atomicExch(T* at, T value) {
    return std::exchange(*at, value);
}

// Memory

template <class T>
T __ldg(const T* at) {
    return *at;
}
template <class T>
T __ldcs(const T* at) {
    return *at;
}
template <class T>
T __ldcv(const T* at) {
    return *at;
}
template <class T>
void __stcg(T* at, T value) {
    *at = value;
}
inline size_t __cvta_generic_to_shared(const void* at) { return emulator::shared_address(at); }

// Arithmetic

using std::isnan;

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned __float_as_uint(float a) { return emulator::of_word<unsigned>(emulator::word_of(a)); }
inline int __float_as_int(float a) { return emulator::of_word<int>(emulator::word_of(a)); }
inline float __uint_as_float(unsigned a) { return emulator::of_word<float>(a); }
inline float __int_as_float(int a) { return emulator::of_word<float>(unsigned(a)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __popc(unsigned a) { return __builtin_popcount(a); }
inline int __vimin3_s32(int a, int b, int c) { return std::min(a, std::min(b, c)); }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
    return std::max(a & 0xFFFFu, b & 0xFFFFu) | std::max(a >> 16, b >> 16) << 16;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = uint64_t(high) << 32 | low;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned chosen = selector >> 4 * i & 15, byte = unsigned(bytes >> 8 * (chosen & 7)) & 255u;
        out |= (chosen & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;  // 8: repeat the sign of the byte
    }
    return out;
}

inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    const float2 x = __bfloat1622float2(a), y = __bfloat1622float2(b), z = __bfloat1622float2(c);
    return __floats2bfloat162_rn(std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}

template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(b) : T(a);
}
template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(b) < T(a) ? T(b) : T(a);
}

// PTX of sm_90: one function per instruction, named like the instruction. `build.py` replaces asm in the kernels by calls of
// these functions.

namespace ptx {

constexpr uint32_t kNan32 = 0x7FFFFFFFu, kNan16 = 0x7FFFu;

inline void store_hint(const void* to, uint32_t word) { *static_cast<uint32_t*>(const_cast<void*>(to)) = word; }
inline void rcp_approx_ftz(float& out, float a) {
    out = 1.0f / a;
    if (std::fpclassify(out) == FP_SUBNORMAL) out = std::copysign(0.0f, out);
}
inline void lop3_e4(uint32_t& out, uint32_t a, uint32_t b, uint32_t mask) { out = (a & mask) | (b & ~mask); }
inline void lop3_ea(uint32_t& out, uint32_t a, uint32_t mask, uint32_t b) { out = (a & mask) | b; }

inline uint32_t half_toward_zero(float x) {
    const uint32_t sign = __float_as_uint(x) >> 16 & 0x8000u;
    const float size = std::fabs(x);
    if (std::isnan(x)) return kNan16;
    if (std::isinf(x)) return sign | 0x7C00u;
    if (size >= 65504.0f) return sign | 0x7BFFu;
    if (size < 0x1p-14f) return sign | uint32_t(size * 0x1p24f);  // a denormal, in units of 2^-24
    const uint32_t bits = __float_as_uint(size);
    return sign | ((bits >> 23) - 112) << 10 | (bits >> 13 & 0x3FFu);
}
inline void cvt_rz_f16x2(uint32_t& out, float high, float low) { out = half_toward_zero(high) << 16 | half_toward_zero(low); }

// Call `choose` for both 16-bit halves, with the bits of the magnitudes, which compare like integers, and the xor of the signs.
// Magnitudes above `kInfinity` are NaN.
template <class Choose>
void each_half(uint32_t& out, uint32_t a, uint32_t b, Choose choose) {
    out = 0;
    for (int shift : {0, 16}) {
        const uint32_t x = a >> shift & 0xFFFFu, y = b >> shift & 0xFFFFu;
        out |= choose(x & 0x7FFFu, y & 0x7FFFu, (x ^ y) & 0x8000u) << shift;
    }
}
inline void min_xorsign_abs_f16x2(uint32_t& out, uint32_t a, uint32_t b) {
    constexpr uint32_t kInfinity = 0x7C00u;
    each_half(out, a, b, [](uint32_t x, uint32_t y, uint32_t sign) {
        if (x > kInfinity && y > kInfinity) return kNan16;
        return (x > kInfinity ? y : y > kInfinity ? x : std::min(x, y)) | sign;
    });
}
inline void max_nan_xorsign_abs_bf16x2(uint32_t& out, uint32_t a, uint32_t b) {
    constexpr uint32_t kInfinity = 0x7F80u;
    each_half(out, a, b, [](uint32_t x, uint32_t y, uint32_t sign) {
        return x > kInfinity || y > kInfinity ? kNan16 : std::max(x, y) | sign;
    });
}
inline void max_nan_f32(float& out, float a, float b) {
    out = std::isnan(a) || std::isnan(b) ? __uint_as_float(kNan32) : std::fmax(a, b);
}

using emulator::barrier_arrive_at, emulator::barrier_copy, emulator::barrier_expect, emulator::barrier_init,
    emulator::barrier_wait, emulator::commit_products, emulator::wait_products;

inline void barrier_init(uint32_t at) { emulator::barrier_init(at, 1); }

// Let other threads run first, because the caller may read in a loop until another thread has written.
inline void ld_acquire(uint32_t& out, const uint32_t* at) {
    emulator::yield();
    out = __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
inline void st_release(uint32_t* at, uint32_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
inline void globaltimer(uint64_t& out) { out = 0; }  // constant, so that no wait times out

// Clusters, tensor copies and matrix products (PTX of sm_90a)

inline void cluster_rank(uint32_t& out) { out = emulator::position.block.x % emulator::position.cluster; }
inline void cluster_sync() { emulator::meet(*emulator::cluster_group); }
inline void elect(uint32_t& out) {
    emulator::meet(*emulator::warp_group);
    out = emulator::lane() == 17;
}
inline void fence_barriers() {}
inline void named_sync(int number) { emulator::named_sync(number, 256); }
inline void named_arrive(int number) { emulator::named_arrive(number, 256); }
inline void set_registers(int) {}
inline void tile_copy(uint32_t to, const void* map, int x, int y, uint32_t at) {
    emulator::tile_copy(1u << emulator::position.block.x % emulator::position.cluster, to, map, x, y, at);
}
inline void tile_copy_to_all(uint32_t to, const void* map, int x, int y, uint32_t at, uint16_t blocks) {
    emulator::tile_copy(blocks, to, map, x, y, at);
}
inline void begin_products() {}

// Compute D += A B for a warp, with A [16, 16] and B [16, 8] in bf16. Lane 4 g + t holds parts of rows g and g + 8 of A and D,
// and of column g of B.
inline void warp_product_bf16(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint32_t b0, uint32_t b1) {
    const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
    uint32_t given[6][emulator::kWarp];
    for (int i = 0; i < 6; ++i) {
        const uint64_t* words = emulator::gather(mine[i]);
        for (int lane = 0; lane < emulator::kWarp; ++lane) given[i][lane] = uint32_t(words[lane]);
    }
    const auto value = [](uint32_t pair, int k) { return __uint_as_float(k % 2 ? pair & 0xFFFF0000u : pair << 16); };
    float* const d[4] = {&d0, &d1, &d2, &d3};
    for (int i = 0; i < 4; ++i) {
        const int row = emulator::lane() / 4, column = 2 * (emulator::lane() % 4) + i % 2;
        for (int k = 0; k < 16; ++k) {
            const int lane = k % 8 / 2, half = k / 8;
            *d[i] += value(given[i / 2 + 2 * half][4 * row + lane], k) * value(given[4 + half][4 * column + lane], k);
        }
    }
}
template <int kCount>
void product_e4m3(float (&d)[kCount], uint64_t a, uint64_t b, int add) { emulator::product<__nv_fp8_e4m3>(d, kCount, a, b, add); }
template <int kCount>
void product_e5m2(float (&d)[kCount], uint64_t a, uint64_t b, int add) { emulator::product<__nv_fp8_e5m2>(d, kCount, a, b, add); }

}  // namespace ptx
