// Codes times their scales -> bf16 [rows, cols], for a GEMM that has no unit for the format: fl_bf16(value(code) *
// value(scale)), one product in fp32, rounded once. The result is exact if bf16 can represent the product: for NVFP4 without
// the amax, and for power-of-two scales within the range of bf16. With the amax of an NVFP4 tensor, value(scale) is
// fl(fl(scale * amax) * fl(1/2688)). Bitwise equal to the decode functions of reference.fp8, reference.mx and reference.nvfp4,
// rounded to bf16.
//
// Grid: a block of 256 threads decodes a tile of 32 rows by 256 columns. Eight threads process a row; a thread takes four
// pieces of eight codes, 64 columns apart, so that neighbouring threads write adjacent vectors of 16 bytes. Bound by memory: 3
// bytes per element of FP8, 2.6 of E2M1.
#include "e8m0.cuh"

namespace dlp {
namespace {

constexpr int kThreads = 256, kAcross = 8;  // threads per block and per row
constexpr int kRows = kThreads / kAcross;
constexpr int kCodes = 8, kPieces = 4, kStep = kAcross * kCodes;
constexpr int kCols = kPieces * kStep;

// Reads codes and scales of an encoding: codes in pairs, the first code in the low bits. `Raw` is the stored form of a scale. A
// scale is converted only after all loads of a thread are issued, which is faster than a conversion right after each load
// (dev/log.md).
template <class F8>
struct Bytes {
    static constexpr int kPerByte = 1;
    static __device__ float2 pair(const uint8_t* codes, int i) {
        return unpack2<F8>(reinterpret_cast<const uint16_t*>(codes)[i]);
    }
};
struct Nibbles {
    static constexpr int kPerByte = 2;
    // The three bits of a magnitude, moved to the lowest bits of the exponent and the highest bit of the mantissa of an
    // fp32, are 2^-126 times the value, including denormals.
    static __device__ float2 pair(const uint8_t* codes, int i) {
        const uint32_t two = codes[i];
        const uint32_t low = (two & 0x07) << 22 | (two & 0x08) << 28, high = (two & 0x70) << 18 | (two & 0x80) << 24;
        return {__fmul_rn(__uint_as_float(low), 0x1p126f), __fmul_rn(__uint_as_float(high), 0x1p126f)};
    }
};
struct Fp32Scale {
    using Raw = float;
    static __device__ float value(float scale, const float*) { return scale; }
};
struct E8m0Scale {
    using Raw = uint8_t;
    static __device__ float value(uint8_t scale, const float*) { return e8m0_value(scale); }
};
struct E4m3Scale {
    using Raw = uint8_t;
    static __device__ float value(uint8_t scale, const float* amax) {
        constexpr float kUnit = float(1.0 / (6.0 * 448.0));
        return amax ? __fmul_rn(__fmul_rn(unpack<E4m3>(scale), *amax), kUnit) : unpack<E4m3>(scale);
    }
};

// Eight adjacent codes of a row, which are loaded, decoded and stored as bf16.
template <class Codes>
struct Piece {
    static constexpr int kBytes = kCodes / Codes::kPerByte;
    using Vector = std::conditional_t<kBytes == 8, uint2, uint32_t>;

    alignas(8) uint8_t codes[kBytes];

    // Loads the first min(valid, 8) codes; the others are 0.
    __device__ void load(const uint8_t* from, uint32_t valid) {
        if (valid >= kCodes && reinterpret_cast<uintptr_t>(from) % kBytes == 0) {
            *reinterpret_cast<Vector*>(codes) = __ldcs(reinterpret_cast<const Vector*>(from));
            return;
        }
#pragma unroll
        for (int i = 0; i < kBytes; ++i) codes[i] = i * Codes::kPerByte < valid ? from[i] : 0;
    }
    __device__ void store(__nv_bfloat16* to, uint32_t valid, float scale) const {
        alignas(16) __nv_bfloat162 out[kCodes / 2];
#pragma unroll
        for (int i = 0; i < kCodes / 2; ++i) {
            const float2 two = Codes::pair(codes, i);
            out[i] = __floats2bfloat162_rn(__fmul_rn(two.x, scale), __fmul_rn(two.y, scale));
        }
        if (valid >= kCodes && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(out);
            return;
        }
#pragma unroll
        for (int i = 0; i < kCodes; ++i)
            if (i < valid) to[i] = i % 2 ? out[i / 2].y : out[i / 2].x;
    }
};

template <class Codes, class Scale>
__global__ void __launch_bounds__(kThreads) decode_kernel(const DecodeJob job) {
    const uint32_t rows = uint32_t(job.rows), cols = uint32_t(job.cols);
    const uint32_t across = (cols + kCols - 1) / kCols, tile = blockIdx.x / across;
    const uint32_t row = tile * kRows + threadIdx.x / kAcross;
    const uint32_t first = (blockIdx.x - tile * across) * kCols + threadIdx.x % kAcross * kCodes;
    if (row >= rows) return;
    Piece<Codes> piece[kPieces];
    typename Scale::Raw scale[kPieces];
    const auto* scales = static_cast<const typename Scale::Raw*>(job.scale) + row / uint32_t(job.block_rows) * job.scale_row_stride;
    const int64_t at = int64_t(row) * cols;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        const uint32_t col = first + i * kStep;
        if (col >= cols) continue;
        piece[i].load(job.codes + (at + col) / Codes::kPerByte, cols - col);
        scale[i] = scales[col / uint32_t(job.block_cols) * job.scale_col_stride];
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        const uint32_t col = first + i * kStep;
        if (col >= cols) continue;
        piece[i].store(static_cast<__nv_bfloat16*>(job.out) + at + col, cols - col, Scale::value(scale[i], job.amax));
    }
}

template <class Codes, class Scale>
void run(const DecodeJob& job, Stream stream) {
    const int64_t tiles = (job.rows + kRows - 1) / kRows * ((job.cols + kCols - 1) / kCols);
    if (tiles) launch<decode_kernel<Codes, Scale>>(tiles, kThreads, 0, stream, job);
}

}  // namespace

// block_cols must be a multiple of kCodes; for E2M1, cols must be even.
void decode(const DecodeJob& job, Encoding encoding, Stream stream) {
    DLP_CHECK_EQ(job.block_cols % kCodes, 0);
    DLP_CHECK_LE(job.rows, INT32_MAX);
    DLP_CHECK_LE(job.cols, INT32_MAX);
    switch (encoding) {
        case Encoding::kE4m3Fp32: return run<Bytes<E4m3>, Fp32Scale>(job, stream);
        case Encoding::kE5m2Fp32: return run<Bytes<E5m2>, Fp32Scale>(job, stream);
        case Encoding::kE4m3E8m0: return run<Bytes<E4m3>, E8m0Scale>(job, stream);
        case Encoding::kE5m2E8m0: return run<Bytes<E5m2>, E8m0Scale>(job, stream);
        case Encoding::kE2m1E4m3: return run<Nibbles, E4m3Scale>(job, stream);
    }
}

}  // namespace dlp
