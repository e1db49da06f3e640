// Octet: eight adjacent elements of a row in the registers of one thread, the unit of loads of all kernels: 16
// bytes of bf16 (one vector load) or 32 of fp32 (two).
//
//   Octet<T>       eight elements; bf16 stays packed, two per 32-bit word, the even element in the low half
//   Octets<T>      a matrix as a sequence of octets, row by row
//   Magnitude<T>   |x| as words that can be compared; Maxima<T>: running maxima of each of the eight columns of octets
//   Finite<T>      whether all values passed to `take` so far are finite
//
// Magnitudes of bf16 are compared in bf16, two per instruction: the comparison is exact, and takes half of the instructions
// that fp32 would take. NaN is ignored, as by fmax: a maximum starts at 0, and the instruction returns the number if the other
// operand is NaN.
#pragma once

#include "launch.cuh"

namespace dlp {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Stores a word with an L2 policy that evicts it last. For scattered words: other blocks store the neighbours in the same
// sector, and the sector should stay in L2 until then. Casts with compact scales are faster with this policy (dev/log.md).
__device__ inline void store_evict_last(void* to, uint32_t word) {
    asm volatile(
        "{.reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0;"
        " st.global.L2::cache_hint.b32 [%0], %1, policy;}" ::"l"(to), "r"(word) : "memory");
}

template <class T>
struct Octet;

template <>
struct Octet<__nv_bfloat16> {
    static constexpr int kVectors = 1;  // 16-byte vectors
    static constexpr int kWords = 4;
    uint32_t word[kWords];              // element 2 i in the low half of word i

    __device__ uint32_t& bits(int i) { return word[i]; }
    __device__ float operator[](int i) const {
        return __uint_as_float(i & 1 ? word[i / 2] & 0xFFFF0000u : word[i / 2] << 16);
    }
    __device__ void set(int i, __nv_bfloat16 x) {
        const uint32_t bits = __bfloat16_as_ushort(x);
        word[i / 2] |= i & 1 ? bits << 16 : bits;  // the element must have been 0
    }
    __device__ void set_vector(int, uint4 v) { word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w; }
    __device__ uint4 vector(int) const { return make_uint4(word[0], word[1], word[2], word[3]); }
};

template <>
struct Octet<float> {
    static constexpr int kVectors = 2;
    static constexpr int kWords = 8;
    float element[kWords];

    __device__ uint32_t& bits(int i) { return reinterpret_cast<uint32_t&>(element[i]); }
    __device__ float operator[](int i) const { return element[i]; }
    __device__ void set(int i, float x) { element[i] = x; }
    __device__ void set_vector(int which, uint4 v) {
        element[4 * which] = __uint_as_float(v.x), element[4 * which + 1] = __uint_as_float(v.y);
        element[4 * which + 2] = __uint_as_float(v.z), element[4 * which + 3] = __uint_as_float(v.w);
    }
    __device__ uint4 vector(int which) const {
        const float* x = element + 4 * which;
        return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
    }
};

// Loads from an address that is a multiple of 16 bytes. `kCached`: the elements are read again soon, so caches may keep
// them; else they are loaded as streaming data.
template <bool kCached = false, class T>
__device__ Octet<T> load_octet(const T* from) {
    Octet<T> out;
#pragma unroll
    for (int v = 0; v < Octet<T>::kVectors; ++v) {
        const uint4* vector = reinterpret_cast<const uint4*>(from) + v;
        out.set_vector(v, kCached ? __ldg(vector) : __ldcs(vector));
    }
    return out;
}

// Loads the first min(valid, 8) elements; the others are 0. `aligned`: the address `from` is a multiple of 16.
template <class T>
__device__ Octet<T> load_octet(const T* from, int64_t valid, bool aligned) {
    if (aligned && valid >= 8) return load_octet(from);
    Octet<T> out{};
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < valid) out.set(i, from[i]);
    return out;
}

// Whether every row starts at a multiple of 16 bytes.
template <class T>
__host__ __device__ bool rows_aligned(const Matrix& x) {
    const bool strides = x.rows <= 1 || x.stride * int64_t(sizeof(T)) % 16 == 0;
    return strides && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

// a / b for a, b >= 0; a 32-bit division if both fit, because the 64-bit division is a slow subroutine.
__device__ inline int64_t divide(int64_t a, int64_t b) {
    if ((a | b) >> 32 == 0) return uint32_t(a) / uint32_t(b);
    return a / b;
}

// A matrix as a sequence of octets, row by row; the last octet of a row may be partial. Python passes a contiguous matrix as
// one long row, so that its octets are adjacent even if cols is not a multiple of 8.
template <class T>
struct Octets {
    const T* data;
    int64_t rows, cols, stride, across;
    bool aligned;

    __device__ explicit Octets(const Matrix& x)
        : data(static_cast<const T*>(x.data)), rows(x.rows), cols(x.cols), stride(x.stride), across((x.cols + 7) / 8),
          aligned(rows_aligned<T>(x)) {}

    // Whether octets [first, first + count) are full, adjacent and aligned.
    __device__ bool adjacent(int64_t first, int64_t count) const {
        return aligned && rows == 1 && 8 * (first + count) <= cols;
    }
    struct Place {
        // row and column of the first element; number of elements from there to the end of the row
        int64_t row, column, valid;
    };
    __device__ Place place(int64_t octet) const {
        const int64_t row = rows == 1 ? 0 : divide(octet, max(across, int64_t(1)));
        const int64_t column = 8 * (octet - row * across);
        return {row, column, row < rows ? cols - column : 0};
    }
    __device__ Octet<T> load(const Place& at) const {
        return load_octet(data + at.row * stride + at.column, at.valid, aligned);
    }
};

// Magnitudes |x| as 32-bit words: two bf16 per word, or one fp32.
template <class T>
struct Magnitude;

template <>
struct Magnitude<__nv_bfloat16> {
    static constexpr int kPerWord = 2;

    static __device__ uint32_t of(const Octet<__nv_bfloat16>& x, int i) {
        return word(__habs2(reinterpret_cast<const __nv_bfloat162&>(x.word[i])));
    }
    // The larger value, for each element; a NaN counts as smaller than any number.
    static __device__ uint32_t larger(uint32_t a, uint32_t b) {
        return word(__hmax2(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b)));
    }
    // Element `i` of a word as the bits of an fp32. The element is not negative, so its bits compare as integers.
    static __device__ uint32_t widen(uint32_t word, int i) { return i ? word & 0xFFFF0000u : word << 16; }

   private:
    static __device__ uint32_t word(const __nv_bfloat162& pair) { return reinterpret_cast<const uint32_t&>(pair); }
};

template <>
struct Magnitude<float> {
    static constexpr int kPerWord = 1;

    static __device__ uint32_t of(const Octet<float>& x, int i) { return __float_as_uint(fabsf(x[i])); }
    static __device__ uint32_t larger(uint32_t a, uint32_t b) {
        return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
    }
    static __device__ uint32_t widen(uint32_t word, int) { return word; }
};

// The same, but NaN counts as larger than any number, because magnitudes are compared as integers: by the floor rule of OCP MX,
// a block with a NaN has the scale NaN.
template <class T>
struct NanMagnitude : Magnitude<T> {
    static __device__ uint32_t of(const Octet<T>& x, int i) {
        if constexpr (Magnitude<T>::kPerWord == 2) return x.word[i] & 0x7FFF7FFFu;
        else return __float_as_uint(x[i]) & 0x7FFFFFFFu;
    }
    static __device__ uint32_t larger(uint32_t a, uint32_t b) {
        return Magnitude<T>::kPerWord == 2 ? __vmaxu2(a, b) : max(a, b);
    }
};

// The running max |x| of each of the eight columns of octets; 0 before the first octet.
template <class T, class M = Magnitude<T>>
struct Maxima {
    static constexpr int kWords = 8 / M::kPerWord;
    uint32_t word[kWords] = {};

    __device__ void take(const Octet<T>& x) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) word[i] = M::larger(word[i], M::of(x, i));
    }
    // Combines with the maxima of lane ^ bits.
    __device__ void join(int bits) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) word[i] = M::larger(word[i], __shfl_xor_sync(kAllLanes, word[i], bits));
    }
    __device__ uint32_t column(int i) const { return M::widen(word[i / M::kPerWord], i % M::kPerWord); }
    __device__ uint32_t largest() const {
        uint32_t largest = word[0];
#pragma unroll
        for (int i = 1; i < kWords; ++i) largest = M::larger(largest, word[i]);
        return max(M::widen(largest, 0), M::widen(largest, M::kPerWord - 1));
    }
};

// Whether all values so far are finite: the sum of 0 * x is 0, or NaN if a value is Inf or NaN. One FMA per word.
template <class T>
class Finite {
   public:
    __device__ void take(const Octet<T>& x) {
#pragma unroll
        for (int i = 0; i < Octet<T>::kWords; ++i) add(sum_[i % kSums], x, i);
    }
    // Sets *flag to NaN if a value was not finite. Threads race, but write the same value.
    __device__ void report(float* flag) const {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < kSums; ++i) bits |= sum_[i];
        if (bits & 0x7FFF7FFFu && flag) set(flag);
    }
    static __device__ void set(float* flag) { *flag = __uint_as_float(0x7FC00000u); }

   private:
    static constexpr int kSums = 2;  // number of independent sums, which hide the latency of the FMA

    static __device__ void add(uint32_t& sum, const Octet<__nv_bfloat16>& x, int i) {
        const auto pair = [](uint32_t& word) -> __nv_bfloat162& { return reinterpret_cast<__nv_bfloat162&>(word); };
        uint32_t word = x.word[i], zero = 0;
        pair(sum) = __hfma2(pair(word), pair(zero), pair(sum));
    }
    static __device__ void add(uint32_t& sum, const Octet<float>& x, int i) {
        sum = __float_as_uint(__fmaf_rn(x[i], 0.0f, __uint_as_float(sum)));
    }

    uint32_t sum_[kSums] = {};
};

// The maximum of `bits` over the thread block, in thread 0. `scratch` has one word per warp. Contains one barrier; thread 0
// reads `scratch` after the barrier, so another barrier must precede the next write to `scratch`.
__device__ inline uint32_t block_max(uint32_t bits, uint32_t* scratch) {
    bits = __reduce_max_sync(kAllLanes, bits);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = bits;
    __syncthreads();
    if (threadIdx.x == 0)
        for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) bits = max(bits, scratch[warp]);
    return bits;
}

// *out = max(*out, bits), for fp32 values >= 0. In most blocks the value is smaller than *out: the plain load before saves
// thousands of atomics on one word.
__device__ inline void atomic_max(float* out, uint32_t bits) {
    if (bits > *reinterpret_cast<volatile uint32_t*>(out)) atomicMax(reinterpret_cast<uint32_t*>(out), bits);
}

}  // namespace dlp
