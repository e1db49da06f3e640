// Cross entropy of logits x [rows, cols]; the columns may be a shard of the vocabulary. Two kernels with one read each:
//
//   log_sum_exp        log_sum[row] = log(sum(exp(x))),   picked[row] = x[row, target], or 0 for other targets
//   softmax_gradient   dx = (exp(x - log_sum) - one_hot(target)) * weight[row]     (Goodfellow et al., Deep Learning, 6.2.2.3)
//                      dx = 0 in rows with weight 0, for any x: ignored tokens may have logits that are not finite
//
// Logits are read in their dtype and never stored in fp32. log_sum_exp takes one row per block of 256 threads, four octets per
// thread in flight, and keeps a running maximum and sum in each thread (Milakov and Gimelshein, arXiv 1805.02867).
// softmax_gradient takes a chunk of 8192 columns of a row per block. log_sum_exp reads 2 bytes per element of bf16 and is bound
// by expf; softmax_gradient reads and writes 4 bytes and is bound by memory.
//
// Exponentials depend on the device, so that results differ from reference.loss within a bound. The order of all sums is fixed,
// so that results do not change from run to run.
#include <limits>

#include "elements.cuh"

namespace dlp {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kAhead = 4;  // octets that a thread loads at once
constexpr int64_t kChunk = 8 * kThreads * kAhead;

// The largest of the elements so far, and the sum of exp(x - largest) over them; if `largest` is infinite, the sum of exp(x),
// which avoids Inf - Inf.
struct Partial {
    float largest, sum;

    static __device__ float finite(float largest) { return fabsf(largest) == kInfinity ? 0.0f : largest; }
    // The factor for `sum` when `largest` becomes `other`.
    __device__ float factor(float other) const { return largest == other ? 1.0f : expf(largest - finite(other)); }

    template <class T>
    __device__ void take(const Octet<T>& x) {
        float most = largest;
#pragma unroll
        for (int i = 0; i < 8; ++i) most = fmaxf(most, x[i]);
        sum = __fmul_rn(sum, factor(most));
        largest = most;
        const float shift = finite(most);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = __fadd_rn(sum, expf(__fsub_rn(x[i], shift)));
    }
    __device__ void join(const Partial& other) {
        const float most = fmaxf(largest, other.largest);
        sum = __fadd_rn(__fmul_rn(sum, factor(most)), __fmul_rn(other.sum, other.factor(most)));
        largest = most;
    }
    __device__ float log_sum() const { return __fadd_rn(finite(largest), logf(sum)); }
};

// Replaces elements from `valid` on by -Inf, which adds 0 to the sum.
template <class T>
__device__ Octet<float> mask_tail(const Octet<T>& x, int64_t valid) {
    Octet<float> out;
#pragma unroll
    for (int i = 0; i < 8; ++i) out.set(i, i < valid ? x[i] : -kInfinity);
    return out;
}

template <class T>
__device__ Octet<T> load_row(const T* row, int64_t column, int64_t cols) {
    const T* from = row + column;
    return load_octet(from, cols - column, reinterpret_cast<uintptr_t>(from) % 16 == 0);
}

template <class T>
__global__ void __launch_bounds__(kThreads) log_sum_exp_kernel(const __grid_constant__ LossJob job) {
    __shared__ Partial partials[kWarps];
    const int64_t at = blockIdx.x, cols = job.x.cols;
    const T* row = static_cast<const T*>(job.x.data) + at * job.x.stride;
    Partial partial{-kInfinity, 0.0f};
    for (int64_t first = 8 * threadIdx.x; first < cols; first += kChunk) {
        Octet<T> x[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) x[i] = load_row(row, first + i * 8 * kThreads, cols);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int64_t valid = cols - first - i * 8 * kThreads;
            if (valid >= 8)
                partial.take(x[i]);
            else if (valid > 0)
                partial.take(mask_tail(x[i], valid));
        }
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        const float largest = __shfl_xor_sync(kAllLanes, partial.largest, lanes);
        partial.join({largest, __shfl_xor_sync(kAllLanes, partial.sum, lanes)});
    }
    if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = partial;
    __syncthreads();
    if (threadIdx.x) return;
    for (int warp = 1; warp < kWarps; ++warp) partial.join(partials[warp]);
    const int64_t target = job.target[at];
    job.log_sum[at] = partial.log_sum();
    job.picked[at] = target >= 0 && target < cols ? float(row[target]) : 0.0f;
}

template <class T>
__global__ void __launch_bounds__(kThreads) softmax_gradient_kernel(const __grid_constant__ LossGradJob job, const uint32_t chunks) {
    const int64_t at = blockIdx.x / chunks, cols = job.x.cols;
    const int64_t first = blockIdx.x % chunks * kChunk + 8 * threadIdx.x;
    const T* row = static_cast<const T*>(job.x.data) + at * job.x.stride;
    T* out = static_cast<T*>(job.dx) + at * cols;
    const float log_sum = job.log_sum[at], weight = job.weight[at];
    const int64_t target = job.target[at];
    Octet<T> x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) x[i] = load_row(row, first + i * 8 * kThreads, cols);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
        const int64_t column = first + i * 8 * kThreads;
        Octet<float> dx;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float softmax = expf(__fsub_rn(x[i][k], log_sum));
            const float factor = column + k == target ? __fsub_rn(softmax, 1.0f) : softmax;
            dx.set(k, weight == 0.0f ? 0.0f : __fmul_rn(factor, weight));
        }
        store_values(out + column, rounded<T>(dx), cols - column, reinterpret_cast<uintptr_t>(out + column) % 16 == 0);
    }
}

}  // namespace

void log_sum_exp(const LossJob& job, Input input, Stream stream) {
    if (job.x.rows == 0) return;
    with_input(input, [&](auto element) { launch<log_sum_exp_kernel<decltype(element)>>(job.x.rows, kThreads, 0, stream, job); });
}

void softmax_gradient(const LossGradJob& job, Input input, Stream stream) {
    const int64_t chunks = (job.x.cols + kChunk - 1) / kChunk;
    if (job.x.rows * chunks == 0) return;
    with_input(input, [&](auto element) {
        launch<softmax_gradient_kernel<decltype(element)>>(job.x.rows * chunks, kThreads, 0, stream, job, uint32_t(chunks));
    });
}

}  // namespace dlp
