// The sum over a row in an order that does not depend on the device (reference.producers.row_sums): one block of 128 threads
// per row; octet i of the row belongs to thread i % 128. The elements of an octet are added by halves, ((0+4)+(2+6)) +
// ((1+5)+(3+7)); a thread adds its octets in order; then the lanes and the warps are added by halves.
//
// `put_row` stores the result of a norm for a row, or raises an amax.
#pragma once

#include "elements.cuh"

namespace dlp {

constexpr int kRowThreads = 128;
constexpr int kRowWarps = kRowThreads / 32;

__device__ inline float octet_sum(const float (&v)[8]) {
    const float a = __fadd_rn(v[0], v[4]), b = __fadd_rn(v[1], v[5]), c = __fadd_rn(v[2], v[6]), d = __fadd_rn(v[3], v[7]);
    return __fadd_rn(__fadd_rn(a, c), __fadd_rn(b, d));
}

// The sum of `part` over the block's threads, in every thread. `scratch` has kRowWarps floats. Contains one barrier;
// threads read `scratch` after the barrier, so the next sum needs another `scratch` or another barrier.
__device__ inline float row_sum(float part, float* scratch) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) part = __fadd_rn(part, __shfl_xor_sync(kAllLanes, part, lanes));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = part;
    __syncthreads();
    static_assert(kRowWarps == 4, "halves of four warps");
    return __fadd_rn(__fadd_rn(scratch[0], scratch[2]), __fadd_rn(scratch[1], scratch[3]));
}

// The octets of a row that belong to this thread. The first kInRegisters octets (all octets of rows of up to 8192 bf16 or 4096
// fp32) are loaded at once and stay in registers; the others are loaded at each use.
template <class T>
struct RowOctets {
    static constexpr int kInRegisters = sizeof(T) == 2 ? 8 : 4;

    const T* row;
    int64_t cols;
    bool aligned;
    Octet<T> kept[kInRegisters];

    __device__ RowOctets(const T* row, int64_t cols, bool aligned) : row(row), cols(cols), aligned(aligned) {
#pragma unroll
        for (int i = 0; i < kInRegisters; ++i)
            if (column(i) < cols) kept[i] = load(i);
    }
    static __device__ int64_t column(int i) { return 8 * (int64_t(i) * kRowThreads + threadIdx.x); }
    __device__ Octet<T> load(int i) const { return load_octet(row + column(i), cols - column(i), aligned); }
};

template <class T>
__device__ RowOctets<T> octets_of(const void* data, int64_t row, int64_t stride, int64_t cols) {
    const T* at = static_cast<const T*>(data) + row * stride;
    return RowOctets<T>(at, cols, reinterpret_cast<uintptr_t>(at) % 16 == 0);
}

// Calls use(column, octets of each row) for this thread's octets of rows of equal length, in order.
template <class Use, class T, class... Rows>
__device__ void for_octets(Use use, const RowOctets<T>& first, const Rows&... others) {
    constexpr int kInRegisters = RowOctets<T>::kInRegisters;
#pragma unroll
    for (int i = 0; i < kInRegisters; ++i)
        if (first.column(i) < first.cols) use(first.column(i), first.kept[i], others.kept[i]...);
    for (int i = kInRegisters; first.column(i) < first.cols; ++i) use(first.column(i), first.load(i), others.load(i)...);
}

// Stores a row of job.y [rows, cols], or raises job.amax to max |y|; make(column, octet of x) returns an octet of y.
template <bool kStore, bool kObserve, class T, class Job, class Make>
__device__ void put_row(const RowOctets<T>& row, const Job& job, Make make) {
    __shared__ uint32_t largest[kRowWarps];
    if (!kStore && !kObserve) return;
    Maxima<T> maxima;
    for_octets([&](int64_t column, const Octet<T>& x) {
        const Octet<T> y = make(column, x);
        if (kStore) store_at(job.y, blockIdx.x, column, row.cols, y);
        if (kObserve) maxima.take(y);
    }, row);
    if (kObserve) {
        const uint32_t bits = block_max(maxima.largest(), largest);
        if (threadIdx.x == 0) atomic_max(job.amax, bits);
    }
}

}  // namespace dlp
