// LayerNorm of the rows of x [rows, cols]: y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(mean((x - mean)^2) + eps),
// and its gradient (Ba et al., arXiv 1607.06450). Bitwise equal to reference.activations.layer_norm and layer_norm_backward.
// For a cast that computes y with a producer, forward can compute only mean and rstd, or mean, rstd and max |y|.
//
// Grid and order of sums as in rms_norm.cu: forward takes one row per block of 128 threads; block b of backward takes rows b, b
// + kNormParts, ... and has fp32 sums of dweight and dbias in dynamic shared memory, 8 bytes per column, so that cols is at
// most 28,672 (224 KB).
#include "row_sum.cuh"

namespace dlp {
namespace {

constexpr int kForwardBlocksPerSm = 8, kBackwardBlocksPerSm = 4;
constexpr size_t kMostShared = 224 * 1024;  // largest dynamic shared memory of backward, in bytes

template <class T, bool kStore, bool kObserve>
__global__ void __launch_bounds__(kRowThreads, kForwardBlocksPerSm)
    layer_norm_kernel(const __grid_constant__ LayerNormJob job, const float eps) {
    __shared__ float scratch[2][kRowWarps];
    const int64_t row = blockIdx.x, cols = job.x.cols;
    const RowOctets<T> x = octets_of<T>(job.x.data, row, job.x.stride, cols);
    float part = 0.0f;
    for_octets([&](int64_t, const Octet<T>& x) {
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = x[i];
        part = __fadd_rn(part, octet_sum(values));
    }, x);
    const float mean = __fdiv_rn(row_sum(part, scratch[0]), float(cols));
    part = 0.0f;
    for_octets([&](int64_t column, const Octet<T>& x) {
        float squares[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float centred = __fsub_rn(x[i], mean);
            squares[i] = column + i < cols ? __fmul_rn(centred, centred) : 0.0f;
        }
        part = __fadd_rn(part, octet_sum(squares));
    }, x);
    const float variance = __fdiv_rn(row_sum(part, scratch[1]), float(cols));
    const float rstd = __frcp_rn(__fsqrt_rn(__fadd_rn(variance, eps)));
    if (threadIdx.x == 0) job.mean[row] = mean, job.rstd[row] = rstd;
    put_row<kStore, kObserve>(x, job, [&](int64_t column, const Octet<T>& x) {
        return layer_normed(x, mean, rstd, load_cached(job.weight, job.wide, column, cols - column),
                            load_cached(job.bias, job.wide, column, cols - column));
    });
}

// With g = dy * weight and n = (x - mean) * rstd:
//   dx = (g - mean(g) - n * mean(g * n)) * rstd,   dweight = sum over rows of dy * n,   dbias = sum over rows of dy
template <class T>
__global__ void __launch_bounds__(kRowThreads, kBackwardBlocksPerSm)
    layer_norm_backward_kernel(const __grid_constant__ LayerNormGradJob job) {
    __shared__ float scratch[2][2][kRowWarps];  // two buffers used in turn, so that a row needs one barrier per sum
    Octet<float>* sums = reinterpret_cast<Octet<float>*>(shared_memory());
    const int64_t cols = job.x.cols, octets = (cols + 7) / 8;
    for (int64_t i = threadIdx.x; i < octets; i += kRowThreads) sums[i] = sums[octets + i] = Octet<float>{};

    int turn = 0;
    for (int64_t row = blockIdx.x; row < job.x.rows; row += kNormParts, turn ^= 1) {
        const float rstd = job.rstd[row], mean = job.mean[row];
        const RowOctets<T> x = octets_of<T>(job.x.data, row, job.x.stride, cols);
        const RowOctets<T> dy = octets_of<T>(job.dy, row, job.dy_stride, cols);
        float of_g = 0.0f, of_gn = 0.0f;
        for_octets([&](int64_t column, const Octet<T>& x, const Octet<T>& dy) {
            const Octet<float> weight = load_cached(job.weight, job.wide, column, cols - column);
            float g[8], gn[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                g[i] = __fmul_rn(dy[i], weight[i]);
                gn[i] = column + i < cols ? __fmul_rn(g[i], __fmul_rn(__fsub_rn(x[i], mean), rstd)) : 0.0f;
            }
            of_g = __fadd_rn(of_g, octet_sum(g));
            of_gn = __fadd_rn(of_gn, octet_sum(gn));
        }, x, dy);
        const float mean_g = __fdiv_rn(row_sum(of_g, scratch[turn][0]), float(cols));
        const float mean_gn = __fdiv_rn(row_sum(of_gn, scratch[turn][1]), float(cols));

        for_octets([&](int64_t column, const Octet<T>& x, const Octet<T>& dy) {
            const Octet<float> weight = load_cached(job.weight, job.wide, column, cols - column);
            Octet<float>&of_weight = sums[column / 8], &of_bias = sums[octets + column / 8];
            Octet<float> dx;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float n = __fmul_rn(__fsub_rn(x[i], mean), rstd), g = __fmul_rn(dy[i], weight[i]);
                dx.set(i, __fmul_rn(__fsub_rn(__fsub_rn(g, mean_g), __fmul_rn(n, mean_gn)), rstd));
                of_weight.set(i, __fadd_rn(of_weight[i], __fmul_rn(dy[i], n)));
                of_bias.set(i, __fadd_rn(of_bias[i], dy[i]));
            }
            store_at(job.dx, row, column, cols, rounded<T>(dx));
        }, x, dy);
    }
    for (int64_t i = threadIdx.x; i < octets; i += kRowThreads) {
        store_at(job.dweight, blockIdx.x, 8 * i, cols, sums[i]);
        store_at(job.dbias, blockIdx.x, 8 * i, cols, sums[octets + i]);
    }
}

}  // namespace

void layer_norm(const LayerNormJob& job, float eps, Input input, Stream stream) {
    if (job.amax) set_zero(reinterpret_cast<uintptr_t>(job.amax), sizeof(float), stream);
    if (job.x.rows == 0) return;
    with_input(input, [&](auto element) {
        using T = decltype(element);
        if (job.y) return launch<layer_norm_kernel<T, true, false>>(job.x.rows, kRowThreads, 0, stream, job, eps);
        if (job.amax) return launch<layer_norm_kernel<T, false, true>>(job.x.rows, kRowThreads, 0, stream, job, eps);
        launch<layer_norm_kernel<T, false, false>>(job.x.rows, kRowThreads, 0, stream, job, eps);
    });
}

// Stores min(rows, kNormParts) partial sums of dweight and of dbias, which sum_parts adds.
void layer_norm_backward(const LayerNormGradJob& job, Input input, Stream stream) {
    if (job.x.rows == 0) return;
    const size_t shared = 2 * (size_t(job.x.cols + 7) / 8) * sizeof(Octet<float>);
    with_input(input, [&](auto element) {
        launch_up_to<layer_norm_backward_kernel<decltype(element)>, kMostShared>(
            std::min(job.x.rows, kNormParts), kRowThreads, shared, stream, job);
    });
}

}  // namespace dlp
