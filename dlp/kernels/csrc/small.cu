// What is too small to be more than a launch: a factor, a fill, a rounding.
#include "octet.cuh"

namespace dlp {
namespace {

constexpr int kThreads = 256;

// fl(fl(amaxA * amaxB) * fl(1 / (6 * 6 * 448 * 448))), the rule of the reference.
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

}  // namespace

void nvfp4_alpha(const AlphaJob& job, Stream stream) { launch<nvfp4_alpha_kernel>(1, 1, 0, stream, job); }

// Both matrices begin at multiples of 16 bytes.
void round_to_bf16(const RoundJob& job, Stream stream) {
    DLP_CHECK_EQ((reinterpret_cast<uintptr_t>(job.x) | reinterpret_cast<uintptr_t>(job.out)) % 16, 0u);
    const int64_t blocks = (job.count + 8 * kThreads - 1) / (8 * kThreads);
    if (blocks) launch<round_to_bf16_kernel>(blocks, kThreads, 0, stream, job.x, static_cast<__nv_bfloat16*>(job.out), job.count);
}

void few_zeros(uintptr_t at, int64_t count, Stream stream) {
    launch<zeros_kernel>(1, kThreads, 0, stream, reinterpret_cast<float*>(at), count);
}

void set_zero(uintptr_t at, int64_t bytes, Stream stream) {
    DLP_CHECK_CUDA(cudaMemsetAsync(reinterpret_cast<void*>(at), 0, bytes, reinterpret_cast<cudaStream_t>(stream)));
}

}  // namespace dlp
