// Small kernels: the factor of the NVFP4 GEMM (reference.nvfp4.nvfp4_alpha), zeros before an amax, fp32 rounded to
// bf16, and a transpose of 4-byte words (fp32 scales) by tiles of 32x32.
#include "octet.cuh"

namespace dlp {
namespace {

constexpr int kThreads = 256;

// fl(fl(amaxA * amaxB) * fl(1 / (6 * 6 * 448 * 448))), in this order: the bits of the reference.
__global__ void nvfp4_alpha_kernel(AlphaJob job) {
    constexpr float kUnit = float(1.0 / (6.0 * 6.0 * 448.0 * 448.0));
    *job.out = __fmul_rn(__fmul_rn(*job.a_amax, *job.b_amax), kUnit);
}

__global__ void __launch_bounds__(kThreads) round_to_bf16_kernel(const float* x, __nv_bfloat16* out, int64_t count) {
    const int64_t at = 8 * (int64_t(blockIdx.x) * kThreads + threadIdx.x), valid = count - at;
    if (valid <= 0) return;
    const Octet<float> values = load_octet(x + at, valid, true);
    alignas(16) __nv_bfloat16 rounded[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) rounded[k] = __float2bfloat16_rn(values[k]);
    if (valid >= 8) {
        *reinterpret_cast<uint4*>(out + at) = *reinterpret_cast<const uint4*>(rounded);
        return;
    }
    for (int k = 0; k < valid; ++k) out[at + k] = rounded[k];
}

__global__ void __launch_bounds__(kThreads) zeros_kernel(float* at, int64_t count) {
    let_next_begin();
    for (int64_t i = threadIdx.x; i < count; i += kThreads) at[i] = 0.0f;
}

constexpr int kSide = 32;

__global__ void __launch_bounds__(kThreads) transpose_words_kernel(const uint32_t* from, uint32_t* to, int64_t rows, int64_t cols) {
    __shared__ uint32_t tile[kSide][kSide + 1];
    const int64_t across = (cols + kSide - 1) / kSide, top = blockIdx.x / across * kSide, left = blockIdx.x % across * kSide;
    const int lane = threadIdx.x % kSide, warp = threadIdx.x / kSide;
    for (int i = warp; i < kSide; i += kThreads / kSide)
        if (top + i < rows && left + lane < cols) tile[i][lane] = from[(top + i) * cols + left + lane];
    __syncthreads();
    for (int i = warp; i < kSide; i += kThreads / kSide)
        if (left + i < cols && top + lane < rows) to[(left + i) * rows + top + lane] = tile[lane][i];
}

}  // namespace

void nvfp4_alpha(const AlphaJob& job, Stream stream) { launch<nvfp4_alpha_kernel>(1, 1, 0, stream, job); }

// Both addresses must be multiples of 16.
void round_to_bf16(const RoundJob& job, Stream stream) {
    DLP_CHECK_EQ((reinterpret_cast<uintptr_t>(job.x) | reinterpret_cast<uintptr_t>(job.out)) % 16, 0u);
    const int64_t blocks = (job.count + 8 * kThreads - 1) / (8 * kThreads);
    if (blocks) launch<round_to_bf16_kernel>(blocks, kThreads, 0, stream, job.x, static_cast<__nv_bfloat16*>(job.out), job.count);
}

void transpose_words(uintptr_t from, uintptr_t to, int64_t rows, int64_t cols, Stream stream) {
    const int64_t tiles = (rows + kSide - 1) / kSide * ((cols + kSide - 1) / kSide);
    if (tiles == 0) return;
    launch<transpose_words_kernel>(tiles, kThreads, 0, stream, reinterpret_cast<const uint32_t*>(from),
                                   reinterpret_cast<uint32_t*>(to), rows, cols);
}

void few_zeros(uintptr_t at, int64_t count, Stream stream) {
    launch<zeros_kernel>(1, kThreads, 0, stream, reinterpret_cast<float*>(at), count);
}

void set_zero(uintptr_t at, int64_t bytes, Stream stream) {
    DLP_CHECK_CUDA(cudaMemsetAsync(reinterpret_cast<void*>(at), 0, bytes, reinterpret_cast<cudaStream_t>(stream)));
}

}  // namespace dlp
