// Codes times their scales -> bf16, exact wherever bf16 holds the product: what a GEMM multiplies that has no unit for the
// format. The product is made in fp32 and rounded once.
#include "e8m0.cuh"

namespace dlp {
namespace {

// A block decodes a tile. A thread takes eight codes at a time, so that neighbours write adjacent vectors; its pieces lie
// kStep columns apart.
constexpr int kThreads = 256, kAcross = 8;  // threads, and those of a row
constexpr int kRows = kThreads / kAcross;
constexpr int kCodes = 8, kPieces = 4, kStep = kAcross * kCodes;
constexpr int kCols = kPieces * kStep;

template <class F8>
__device__ float fp8_value(uint32_t code) {
    constexpr auto kind = std::is_same_v<F8, E4m3> ? __NV_E4M3 : __NV_E5M2;
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(uint8_t(code), kind)));
}

// How codes and scales of one encoding are read.
template <class F8>
struct Bytes {
    static constexpr int kPerByte = 1;
    static __device__ float value(const uint8_t* codes, int i) { return fp8_value<F8>(codes[i]); }
};
struct Nibbles {
    static constexpr int kPerByte = 2;
    // As the top bits of an fp32 the three bits of a magnitude are 2^-126 of it, denormals included.
    static __device__ float value(const uint8_t* codes, int i) {
        const uint32_t code = codes[i / 2] >> 4 * (i % 2) & 0xF;
        return __fmul_rn(__uint_as_float((code & 7) << 22 | code >> 3 << 31), 0x1p126f);
    }
};
struct Fp32Scale {
    static __device__ float at(const void* scale, int64_t i) { return static_cast<const float*>(scale)[i]; }
};
struct E8m0Scale {
    static __device__ float at(const void* scale, int64_t i) { return e8m0_value(static_cast<const uint8_t*>(scale)[i]); }
};
struct E4m3Scale {
    static __device__ float at(const void* scale, int64_t i) {
        return fp8_value<E4m3>(static_cast<const uint8_t*>(scale)[i]);
    }
};

// Codes of a row on their way to bf16.
template <class Codes>
struct Piece {
    static constexpr int kBytes = kCodes / Codes::kPerByte;
    using Vector = std::conditional_t<kBytes == 8, uint2, uint32_t>;

    alignas(8) uint8_t codes[kBytes];

    // `valid` of them are read, the rest is 0.
    __device__ void load(const uint8_t* from, int64_t valid) {
        if (valid >= kCodes && reinterpret_cast<uintptr_t>(from) % kBytes == 0) {
            *reinterpret_cast<Vector*>(codes) = __ldcs(reinterpret_cast<const Vector*>(from));
            return;
        }
#pragma unroll
        for (int i = 0; i < kBytes; ++i) codes[i] = i * Codes::kPerByte < valid ? from[i] : 0;
    }
    __device__ void store(__nv_bfloat16* to, int64_t valid, float scale) const {
        alignas(16) __nv_bfloat16 out[kCodes];
#pragma unroll
        for (int i = 0; i < kCodes; ++i) out[i] = __float2bfloat16_rn(__fmul_rn(Codes::value(codes, i), scale));
        if (valid >= kCodes && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(out);
            return;
        }
#pragma unroll
        for (int i = 0; i < kCodes; ++i)
            if (i < valid) to[i] = out[i];
    }
};

template <class Codes, class Scale>
__global__ void __launch_bounds__(kThreads) decode_kernel(const DecodeJob job) {
    const int64_t across = (job.cols + kCols - 1) / kCols, tile = divide(blockIdx.x, across);
    const int64_t row = tile * kRows + threadIdx.x / kAcross;
    const int64_t first = (blockIdx.x - tile * across) * kCols + threadIdx.x % kAcross * kCodes;
    if (row >= job.rows) return;
    Piece<Codes> piece[kPieces];
    float scale[kPieces];
    const int64_t scales = divide(row, job.block_rows) * job.down;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        const int64_t col = first + i * kStep;
        if (col >= job.cols) continue;
        piece[i].load(job.codes + (row * job.cols + col) / Codes::kPerByte, job.cols - col);
        scale[i] = Scale::at(job.scale, scales + divide(col, job.block_cols) * job.across);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        const int64_t col = first + i * kStep;
        if (col >= job.cols) continue;
        piece[i].store(static_cast<__nv_bfloat16*>(job.out) + row * job.cols + col, job.cols - col, scale[i]);
    }
}

template <class Codes, class Scale>
void run(const DecodeJob& job, Stream stream) {
    const int64_t tiles = (job.rows + kRows - 1) / kRows * ((job.cols + kCols - 1) / kCols);
    if (tiles) launch<decode_kernel<Codes, Scale>>(tiles, kThreads, 0, stream, job);
}

}  // namespace

// Blocks along the contraction are multiples of kCodes.
void decode(const DecodeJob& job, Encoding encoding, Stream stream) {
    DLP_CHECK_EQ(job.block_cols % kCodes, 0);
    switch (encoding) {
        case Encoding::kE4m3Fp32: return run<Bytes<E4m3>, Fp32Scale>(job, stream);
        case Encoding::kE5m2Fp32: return run<Bytes<E5m2>, Fp32Scale>(job, stream);
        case Encoding::kE4m3E8m0: return run<Bytes<E4m3>, E8m0Scale>(job, stream);
        case Encoding::kE5m2E8m0: return run<Bytes<E5m2>, E8m0Scale>(job, stream);
        case Encoding::kE2m1E4m3: return run<Nibbles, E4m3Scale>(job, stream);
    }
}

}  // namespace dlp
