// RMSNorm of the rows of x [rows, cols] (Zhang and Sennrich, arXiv 1910.07467), forward and backward:
//
//   y  = x * rstd * weight,   rstd = 1 / sqrt(mean(x^2) + eps)
//   dx = (g - n * mean(g * n)) * rstd,   dweight = sum over rows of dy * n,   g = dy * weight,   n = x * rstd
//
// Bitwise equal to reference.producers.rms_norm and rms_norm_backward: IEEE arithmetic, sums in the order of row_sum.cuh.
// Forward can first add a residual to x. For a cast that computes y with a producer, forward can compute only rstd, or rstd and
// max |y|.
//
// Forward: one row per block of 128 threads. The octets of a row stay in registers from the sum of squares to the result (up to
// 8192 columns of bf16, 4096 of fp32); further octets are read again. Bound by memory: 4 bytes per element of bf16.
//
// Backward: kNormParts blocks of 128 threads; block b takes rows b, b + 512, ... and has one row of the partial sums of dweight
// [512, cols] in shared memory, in fp32; column_sums.cu adds the partial sums. Memory traffic: 6 bytes per element of bf16, 8
// with `add`. Three kernels:
//
//   _bulk     without `add`, complete octets: bulk copies bring rows to shared memory, two rows ahead
//   _adding   with `add`, complete octets: a row stays in registers, and each used octet is replaced by that of the next row
//   (plain)   any alignment and up to 57,344 columns (dweight in 224 KB)
//
// Shared memory of _bulk: dweight 4 cols bytes, two stages of x and dy, 2 * 2 * cols * sizeof(T), two barriers of 8 bytes:
// 98,320 bytes for 8192 columns of bf16. With `add`, stages for a third matrix would leave shared memory for too few blocks.
#include "arrivals.cuh"
#include "row_sum.cuh"

namespace dlp {
namespace {

constexpr size_t kMostShared = 224 * 1024;  // largest dynamic shared memory of backward, in bytes

// Resident blocks per SM. Backward has kNormParts = 512 blocks: with four blocks per SM these are one wave (528 blocks on 132
// SMs), with three blocks per SM two waves.
constexpr int kForwardBlocksPerSm = 8, kAddingBlocksPerSm = 4, kBackwardBlocksPerSm = 4;

template <class T>
__device__ Octet<T> added(const Octet<T>& a, const Octet<T>& b) {
    Octet<float> both;
#pragma unroll
    for (int i = 0; i < 8; ++i) both.set(i, __fadd_rn(a[i], b[i]));
    return rounded<T>(both);
}

// Elements `first` to `first` + 7 of a weight that is aligned to 16 bytes.
__device__ inline Octet<float> load_weight(const NormGradJob& job, int first) {
    if (job.wide) return load_octet<true>(static_cast<const float*>(job.weight) + first);
    return widened(load_octet<true>(static_cast<const __nv_bfloat16*>(job.weight) + first));
}
// The column of octet i + 1 of this thread, or of its octet 0 if octet i was the last.
__device__ inline int next_of(int first, int i, int cols) {
    const int next = first + (i + 1) * 8 * kRowThreads;
    return next < cols ? next : first;
}

// Adds `residual` to x, rounded, and stores the sum in `sum_row`. Octets that are not in registers are later read from
// `sum_row`.
template <class T>
__device__ void add_row(RowOctets<T>& x, const RowOctets<T>& residual, T* sum_row) {
    const bool aligned = reinterpret_cast<uintptr_t>(sum_row) % 16 == 0;
    const auto store = [&](int i, const Octet<T>& sum) {
        store_values(sum_row + x.column(i), sum, x.cols - x.column(i), aligned);
    };
#pragma unroll
    for (int i = 0; i < RowOctets<T>::kInRegisters; ++i)
        if (x.column(i) < x.cols) {
            x.kept[i] = added(x.kept[i], residual.kept[i]);
            store(i, x.kept[i]);
        }
    for (int i = RowOctets<T>::kInRegisters; x.column(i) < x.cols; ++i) store(i, added(x.load(i), residual.load(i)));
    x.row = sum_row, x.aligned = aligned;
}

template <class T, bool kStore, bool kObserve, bool kAdd>
__global__ void __launch_bounds__(kRowThreads, kAdd ? kAddingBlocksPerSm : kForwardBlocksPerSm)
    rms_norm_kernel(const __grid_constant__ NormJob job, const float eps) {
    __shared__ float scratch[kRowWarps];
    const int64_t row = blockIdx.x, cols = job.x.cols;
    RowOctets<T> x = octets_of<T>(job.x.data, row, job.x.stride, cols);
    if constexpr (kAdd) add_row(x, octets_of<T>(job.residual, row, job.residual_stride, cols), static_cast<T*>(job.sum) + row * cols);
    float part = 0.0f;
    for_octets([&](int64_t, const Octet<T>& x) {
        float squares[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) squares[i] = __fmul_rn(x[i], x[i]);
        part = __fadd_rn(part, octet_sum(squares));
    }, x);
    const float mean = __fdiv_rn(row_sum(part, scratch), float(cols));
    const float rstd = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
    if (threadIdx.x == 0) job.rstd[row] = rstd;
    put_row<kStore, kObserve>(x, job, [&](int64_t column, const Octet<T>& x) {
        return normed(x, rstd, load_cached(job.weight, job.wide, column, cols - column));
    });
}

// The sum of g * n over an octet; g and n are defined at the top of this file.
template <class T>
__device__ float sum_of_products(const Octet<T>& x, const Octet<T>& dy, const Octet<float>& weight, float rstd) {
    float products[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) products[i] = __fmul_rn(__fmul_rn(dy[i], weight[i]), __fmul_rn(x[i], rstd));
    return octet_sum(products);
}
// Computes dx of an octet, and adds dy * n of the octet to `sum`.
template <class T>
__device__ void add_gradients(const Octet<T>& x, const Octet<T>& dy, const Octet<float>& weight, float rstd, float mean,
                              Octet<float>& dx, Octet<float>& sum) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float n = __fmul_rn(x[i], rstd);
        dx.set(i, __fmul_rn(__fsub_rn(__fmul_rn(dy[i], weight[i]), __fmul_rn(n, mean)), rstd));
        sum.set(i, __fadd_rn(sum[i], __fmul_rn(dy[i], n)));
    }
}

// Any cols and alignment. Shared memory: sums [2][octets] float4, the low and the high halves of the octets.
template <class T, bool kAdd>
__global__ void __launch_bounds__(kRowThreads, kBackwardBlocksPerSm) rms_norm_backward_kernel(const __grid_constant__ NormGradJob job) {
    __shared__ float scratch[2][kRowWarps];  // two buffers used in turn, so that a row needs one barrier
    float4* sums = reinterpret_cast<float4*>(shared_memory());
    const int64_t cols = job.x.cols, octets = (cols + 7) / 8;
    for (int64_t i = threadIdx.x; i < octets; i += kRowThreads) sums[i] = sums[octets + i] = make_float4(0, 0, 0, 0);

    int turn = 0;
    for (int64_t row = blockIdx.x; row < job.x.rows; row += kNormParts, turn ^= 1) {
        const float rstd = job.rstd[row];
        const RowOctets<T> x = octets_of<T>(job.x.data, row, job.x.stride, cols);
        const RowOctets<T> dy = octets_of<T>(job.dy, row, job.dy_stride, cols);
        float part = 0.0f;
        for_octets([&](int64_t column, const Octet<T>& x, const Octet<T>& dy) {
            const Octet<float> weight = load_cached(job.weight, job.wide, column, cols - column);
            part = __fadd_rn(part, sum_of_products(x, dy, weight, rstd));
        }, x, dy);
        const float mean = __fdiv_rn(row_sum(part, scratch[turn]), float(cols));

        for_octets([&](int64_t column, const Octet<T>& x, const Octet<T>& dy) {
            const Octet<float> weight = load_cached(job.weight, job.wide, column, cols - column);
            Octet<float> dx, sum;
            float4 &low = sums[column / 8], &high = sums[octets + column / 8];
            sum.set_vector(0, reinterpret_cast<const uint4&>(low)), sum.set_vector(1, reinterpret_cast<const uint4&>(high));
            add_gradients(x, dy, weight, rstd, mean, dx, sum);
            low = make_float4(sum[0], sum[1], sum[2], sum[3]), high = make_float4(sum[4], sum[5], sum[6], sum[7]);
            Octet<T> result = rounded<T>(dx);
            if constexpr (kAdd) {
                const T* addend = static_cast<const T*>(job.add) + row * job.add_stride + column;
                result = added(result, load_octet(addend, cols - column, reinterpret_cast<uintptr_t>(addend) % 16 == 0));
            }
            store_at(job.dx, row, column, cols, result);
        }, x, dy);
    }
    for (int64_t i = threadIdx.x; i < octets; i += kRowThreads) {
        Octet<float> sum;
        sum.set_vector(0, reinterpret_cast<const uint4&>(sums[i])), sum.set_vector(1, reinterpret_cast<const uint4&>(sums[octets + i]));
        store_at(job.dweight, blockIdx.x, 8 * i, cols, sum);
    }
}

// For complete, aligned octets and `add`: a row stays in registers, and the load of each octet of the next row is issued as
// soon as the same octet of this row has been used. Loads that are issued one octet later are slower (dev/log.md).
template <class T>
__global__ void __launch_bounds__(kRowThreads, kBackwardBlocksPerSm) rms_norm_backward_adding_kernel(const __grid_constant__ NormGradJob job) {
    constexpr int kInRegisters = RowOctets<T>::kInRegisters, kApart = 8 * kRowThreads;
    __shared__ float scratch[2][kRowWarps];
    float4* low = reinterpret_cast<float4*>(shared_memory()) + threadIdx.x;
    const int cols = int(job.x.cols), first = 8 * threadIdx.x;
    float4* high = low + cols / 8;
    for (int i = 0; first + i * kApart < cols; ++i) low[i * kRowThreads] = high[i * kRowThreads] = make_float4(0, 0, 0, 0);

    const int64_t row_begin = blockIdx.x;
    const T* x_row = static_cast<const T*>(job.x.data) + row_begin * job.x.stride + first;
    const T* dy_row = static_cast<const T*>(job.dy) + row_begin * job.dy_stride + first;
    const T* add_row = static_cast<const T*>(job.add) + row_begin * job.add_stride + first;
    T* dx_row = static_cast<T*>(job.dx) + row_begin * cols + first;
    Octet<T> x[kInRegisters], dy[kInRegisters];
#pragma unroll
    for (int i = 0; i < kInRegisters; ++i)
        if (first + i * kApart < cols) x[i] = load_octet(x_row + i * kApart), dy[i] = load_octet(dy_row + i * kApart);
    float rstd = job.rstd[row_begin];

    int turn = 0;
    for (int64_t row = row_begin; row < job.x.rows; row += kNormParts, turn ^= 1) {
        Octet<float> weight = load_weight(job, first);
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < kInRegisters; ++i)
            if (first + i * kApart < cols) {
                const Octet<float> current = weight;
                weight = load_weight(job, next_of(first, i, cols));
                part = __fadd_rn(part, sum_of_products(x[i], dy[i], current, rstd));
            }
        const float mean = __fdiv_rn(row_sum(part, scratch[turn]), float(cols));

        const bool has_next = row + kNormParts < job.x.rows;
        const float next_rstd = has_next ? job.rstd[row + kNormParts] : 0.0f;
        x_row += kNormParts * job.x.stride, dy_row += kNormParts * job.dy_stride;
        weight = load_weight(job, first);
#pragma unroll
        for (int i = 0; i < kInRegisters; ++i)
            if (first + i * kApart < cols) {
                const Octet<float> current = weight;
                const Octet<T> add = load_octet(add_row + i * kApart);
                weight = load_weight(job, next_of(first, i, cols));
                Octet<float> dx, sum;
                float4 &to_low = low[i * kRowThreads], &to_high = high[i * kRowThreads];
                sum.set_vector(0, reinterpret_cast<const uint4&>(to_low)), sum.set_vector(1, reinterpret_cast<const uint4&>(to_high));
                add_gradients(x[i], dy[i], current, rstd, mean, dx, sum);
                if (has_next) x[i] = load_octet(x_row + i * kApart), dy[i] = load_octet(dy_row + i * kApart);
                to_low = make_float4(sum[0], sum[1], sum[2], sum[3]), to_high = make_float4(sum[4], sum[5], sum[6], sum[7]);
                store_octet(dx_row + i * kApart, added(rounded<T>(dx), add));
            }
        rstd = next_rstd, dx_row += kNormParts * int64_t(cols);
        add_row += kNormParts * job.add_stride;
    }
    float* to = job.dweight + row_begin * cols + first;
    for (int i = 0; first + i * kApart < cols; ++i) {
        reinterpret_cast<float4*>(to + i * kApart)[0] = low[i * kRowThreads];
        reinterpret_cast<float4*>(to + i * kApart)[1] = high[i * kRowThreads];
    }
}

// For complete, aligned octets without `add`: bulk copies bring rows of x and dy to shared memory, two rows in flight.
template <class T>
__global__ void __launch_bounds__(kRowThreads, kBackwardBlocksPerSm) rms_norm_backward_bulk_kernel(const __grid_constant__ NormGradJob job) {
    constexpr int kInRegisters = RowOctets<T>::kInRegisters, kApart = 8 * kRowThreads;
    __shared__ float scratch[2][kRowWarps];
    const int cols = int(job.x.cols), first = 8 * threadIdx.x;
    float4* low = reinterpret_cast<float4*>(shared_memory()) + threadIdx.x;
    float4* high = low + cols / 8;
    const uint32_t bytes = cols * sizeof(T);
    uint8_t* stages = shared_memory() + cols * sizeof(float);
    Arrivals arrived[2] = {Arrivals(stages + 4 * bytes), Arrivals(stages + 4 * bytes + 8)};
    if (threadIdx.x == 0) arrived[0].init(), arrived[1].init();
    for (int i = 0; first + i * kApart < cols; ++i) low[i * kRowThreads] = high[i * kRowThreads] = make_float4(0, 0, 0, 0);
    __syncthreads();
    const auto fetch = [&](int stage, int64_t row) {
        if (threadIdx.x != 0 || row >= job.x.rows) return;
        uint8_t* to = stages + stage * 2 * bytes;
        arrived[stage].expect(2 * bytes);
        arrived[stage].copy(to, static_cast<const T*>(job.x.data) + row * job.x.stride, bytes);
        arrived[stage].copy(to + bytes, static_cast<const T*>(job.dy) + row * job.dy_stride, bytes);
    };
    fetch(0, blockIdx.x), fetch(1, blockIdx.x + kNormParts);
    Octet<float> weight[kInRegisters];
#pragma unroll
    for (int i = 0; i < kInRegisters; ++i)
        if (first + i * kApart < cols) weight[i] = load_weight(job, first + i * kApart);

    const auto load_staged = [](const T* from) {
        Octet<T> out;
#pragma unroll
        for (int v = 0; v < Octet<T>::kVectors; ++v) out.set_vector(v, reinterpret_cast<const uint4*>(from)[v]);
        return out;
    };
    const auto work = [&](int stage, int64_t row) {
        const float rstd = job.rstd[row];
        const T* x_row = reinterpret_cast<const T*>(stages + stage * 2 * bytes) + first;
        const T* dy_row = x_row + cols;
        arrived[stage].wait();
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < kInRegisters; ++i)
            if (first + i * kApart < cols) {
                const Octet<T> x = load_staged(x_row + i * kApart), dy = load_staged(dy_row + i * kApart);
                part = __fadd_rn(part, sum_of_products(x, dy, weight[i], rstd));
            }
        const float mean = __fdiv_rn(row_sum(part, scratch[stage]), float(cols));
        T* dx_row = static_cast<T*>(job.dx) + row * cols + first;
#pragma unroll
        for (int i = 0; i < kInRegisters; ++i)
            if (first + i * kApart < cols) {
                const Octet<T> x = load_staged(x_row + i * kApart), dy = load_staged(dy_row + i * kApart);
                Octet<float> dx, sum;
                float4 &to_low = low[i * kRowThreads], &to_high = high[i * kRowThreads];
                sum.set_vector(0, reinterpret_cast<const uint4&>(to_low)), sum.set_vector(1, reinterpret_cast<const uint4&>(to_high));
                add_gradients(x, dy, weight[i], rstd, mean, dx, sum);
                to_low = make_float4(sum[0], sum[1], sum[2], sum[3]), to_high = make_float4(sum[4], sum[5], sum[6], sum[7]);
                store_octet(dx_row + i * kApart, rounded<T>(dx));
            }
        __syncthreads();
        fetch(stage, row + 2 * kNormParts);
    };
    for (int64_t row = blockIdx.x; row < job.x.rows; row += 2 * kNormParts) {
        work(0, row);
        if (row + kNormParts < job.x.rows) work(1, row + kNormParts);
    }
    float* to = job.dweight + int64_t(blockIdx.x) * cols + first;
    for (int i = 0; first + i * kApart < cols; ++i) {
        reinterpret_cast<float4*>(to + i * kApart)[0] = low[i * kRowThreads];
        reinterpret_cast<float4*>(to + i * kApart)[1] = high[i * kRowThreads];
    }
}

// Largest number of columns of _adding and _bulk: a row fits into the registers of a block.
template <class T>
constexpr int64_t kWholeCols = 8 * kRowThreads * RowOctets<T>::kInRegisters;

// The shared memory of _bulk without dweight: two stages of x and dy, and two barriers.
template <class T>
constexpr size_t stages_bytes(int64_t cols) { return 2 * 2 * size_t(cols) * sizeof(T) + 2 * 8; }

template <class T>
bool whole_octets(const void* data, int64_t stride) {
    return stride * int64_t(sizeof(T)) % 16 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// Whether _adding and _bulk support the job: rows of complete octets that fit into registers, and all addresses aligned
// to 16 bytes.
template <class T>
bool is_whole(const NormGradJob& job) {
    const int64_t cols = job.x.cols;
    const bool fits = cols % 8 == 0 && cols <= kWholeCols<T>;
    const bool read = whole_octets<T>(job.x.data, job.x.stride) && whole_octets<T>(job.dy, job.dy_stride);
    const bool beside = whole_octets<T>(job.dx, cols) && whole_octets<float>(job.dweight, cols) && whole_octets<float>(job.weight, 0);
    return fits && read && beside && (!job.add || whole_octets<T>(job.add, job.add_stride));
}

}  // namespace

void rms_norm(const NormJob& job, float eps, Input input, Stream stream) {
    if (job.amax) set_zero(reinterpret_cast<uintptr_t>(job.amax), sizeof(float), stream);
    if (job.x.rows == 0) return;
    with_input(input, [&](auto element) {
        using T = decltype(element);
        const auto run = [&](auto adds) {
            constexpr bool kAdd = decltype(adds)::value;
            if (job.y) return launch<rms_norm_kernel<T, true, false, kAdd>>(job.x.rows, kRowThreads, 0, stream, job, eps);
            if (job.amax) return launch<rms_norm_kernel<T, false, true, kAdd>>(job.x.rows, kRowThreads, 0, stream, job, eps);
            launch<rms_norm_kernel<T, false, false, kAdd>>(job.x.rows, kRowThreads, 0, stream, job, eps);
        };
        if (job.residual) run(std::true_type{});
        else run(std::false_type{});
    });
}

// Stores min(rows, kNormParts) partial sums of dweight, which sum_parts adds.
void rms_norm_backward(const NormGradJob& job, Input input, Stream stream) {
    if (job.x.rows == 0) return;
    const int64_t blocks = std::min(job.x.rows, kNormParts);
    const size_t sums = size_t(job.x.cols + 7) / 8 * sizeof(Octet<float>);
    with_input(input, [&](auto element) {
        using T = decltype(element);
        constexpr size_t kMostCols = kWholeCols<T>, kMostSums = kMostCols * sizeof(float);
        if (is_whole<T>(job) && !job.add)
            return launch_up_to<rms_norm_backward_bulk_kernel<T>, kMostSums + stages_bytes<T>(kMostCols)>(
                blocks, kRowThreads, sums + stages_bytes<T>(job.x.cols), stream, job);
        if (is_whole<T>(job))
            return launch_up_to<rms_norm_backward_adding_kernel<T>, kMostSums>(blocks, kRowThreads, sums, stream, job);
        const auto run = [&](auto adds) {
            constexpr auto kernel = rms_norm_backward_kernel<T, decltype(adds)::value>;
            launch_up_to<kernel, kMostShared>(blocks, kRowThreads, sums, stream, job);
        };
        if (job.add) run(std::true_type{});
        else run(std::false_type{});
    });
}

}  // namespace dlp
