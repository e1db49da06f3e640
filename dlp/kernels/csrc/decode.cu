// Codes times their scales -> bf16, exact wherever bf16 holds the product: what a GEMM multiplies that has no unit for the
// format. The product is made in fp32 and rounded once.
#include "e8m0.cuh"

namespace dlp {
namespace {

constexpr int kThreads = 256;
constexpr int kCodes = 16;  // a thread: a vector of bytes, or half a vector of nibbles

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

template <class Codes, class Scale>
__global__ void __launch_bounds__(kThreads) decode_kernel(const DecodeJob job) {
    constexpr int kBytes = kCodes / Codes::kPerByte;
    const int64_t across = (job.cols + kCodes - 1) / kCodes, piece = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t row = divide(piece, across), col = (piece - row * across) * kCodes;
    if (row >= job.rows) return;
    const int64_t scales = (job.cols + job.block_cols - 1) / job.block_cols;
    const float scale = Scale::at(job.scale, divide(row, job.block_rows) * scales + divide(col, job.block_cols));
    const uint8_t* from = job.codes + (row * job.cols + col) / Codes::kPerByte;
    __nv_bfloat16* to = static_cast<__nv_bfloat16*>(job.out) + row * job.cols + col;

    alignas(16) uint8_t codes[kBytes] = {};
    alignas(16) __nv_bfloat16 out[kCodes];
    const int64_t left = job.cols - col;
    const bool aligned = reinterpret_cast<uintptr_t>(from) % kBytes == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0;
    const bool whole = aligned && left >= kCodes;
    using Vector = std::conditional_t<kBytes == 16, uint4, uint2>;
    if (whole)
        *reinterpret_cast<Vector*>(codes) = __ldcs(reinterpret_cast<const Vector*>(from));
    else
#pragma unroll
        for (int i = 0; i < kBytes; ++i)
            if (i * Codes::kPerByte < left) codes[i] = from[i];
#pragma unroll
    for (int i = 0; i < kCodes; ++i) out[i] = __float2bfloat16_rn(__fmul_rn(Codes::value(codes, i), scale));
    if (whole) {
        reinterpret_cast<uint4*>(to)[0] = reinterpret_cast<const uint4*>(out)[0];
        reinterpret_cast<uint4*>(to)[1] = reinterpret_cast<const uint4*>(out)[1];
    } else {
#pragma unroll
        for (int i = 0; i < kCodes; ++i)
            if (i < left) to[i] = out[i];
    }
}

template <class Codes, class Scale>
void run(const DecodeJob& job, Stream stream) {
    const int64_t pieces = job.rows * ((job.cols + kCodes - 1) / kCodes);
    if (pieces) launch<decode_kernel<Codes, Scale>>((pieces + kThreads - 1) / kThreads, kThreads, 0, stream, job);
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
