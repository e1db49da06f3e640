// The sum of a reduce-scatter after the transfers: contributions [R, count] of R ranks -> sum [count], added in fp32 in the
// order of the ranks, divided by `divisor` and rounded once (reference.fp8.sum_in_order). The contribution of rank `index` is
// read from `own`, so that a rank need not copy its own contribution.
//
// `sum_by_tree` adds 1, 2, 4 or 8 fp32 tensors by a binary tree of neighbours instead (reference.fp8.sum_by_tree).
//
// Grid: one octet per thread; the loads of four contributions are in flight, for a tree the loads of all. Bound by memory: R +
// 1 times the bytes of the sum.
#include "octet.cuh"

namespace dlp {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // contributions that a thread loads at once

template <class T>
__device__ T rounded(float x) {
    if constexpr (std::is_same_v<T, float>) return x;
    else return __float2bfloat16_rn(x);
}

template <class T>
__device__ void store(T* to, const float (&total)[8], int64_t valid, bool aligned) {
    alignas(16) T out[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) out[k] = rounded<T>(total[k]);
    if (aligned && valid >= 8) {
#pragma unroll
        for (int v = 0; v < Octet<T>::kVectors; ++v)
            reinterpret_cast<uint4*>(to)[v] = reinterpret_cast<const uint4*>(out)[v];
    } else {
#pragma unroll
        for (int k = 0; k < 8; ++k)
            if (k < valid) to[k] = out[k];
    }
}

template <class T, class Out>
__global__ void __launch_bounds__(kThreads)
    sum_in_order_kernel(const T* from, const T* own, int64_t index, Out* to, int64_t contributions, int64_t count, float divisor) {
    const int64_t at = 8 * (int64_t(blockIdx.x) * kThreads + threadIdx.x), valid = count - at;
    if (valid <= 0) return;
    const bool rows = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(own) | count * sizeof(T)) % 16 == 0;
    const bool aligned = reinterpret_cast<uintptr_t>(to) % 16 == 0;
    float total[8];
    for (int64_t first = 0; first < contributions; first += kInFlight) {
        Octet<T> x[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
            if (first + i < contributions)
                x[i] = load_octet((first + i == index ? own : from + (first + i) * count) + at, valid, rows);
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
            if (first + i < contributions)
#pragma unroll
                for (int k = 0; k < 8; ++k) total[k] = first + i ? __fadd_rn(total[k], x[i][k]) : x[i][k];
    }
    if (divisor != 1.0f)
#pragma unroll
        for (int k = 0; k < 8; ++k) total[k] = __fdiv_rn(total[k], divisor);
    store(to + at, total, valid, aligned);
}

template <class Out, int kParts>
__global__ void __launch_bounds__(kThreads) sum_by_tree_kernel(const float* from, Out* to, int64_t count) {
    const int64_t at = 8 * (int64_t(blockIdx.x) * kThreads + threadIdx.x), valid = count - at;
    if (valid <= 0) return;
    const bool rows = (reinterpret_cast<uintptr_t>(from) | count * sizeof(float)) % 16 == 0;
    const bool aligned = reinterpret_cast<uintptr_t>(to) % 16 == 0;
    Octet<float> x[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i) x[i] = load_octet(from + i * count + at, valid, rows);
    float sums[kParts][8];
#pragma unroll
    for (int i = 0; i < kParts; ++i)
#pragma unroll
        for (int k = 0; k < 8; ++k) sums[i][k] = x[i][k];
#pragma unroll
    for (int apart = 1; apart < kParts; apart *= 2)
#pragma unroll
        for (int i = 0; i < kParts; i += 2 * apart)
#pragma unroll
            for (int k = 0; k < 8; ++k) sums[i][k] = __fadd_rn(sums[i][k], sums[i + apart][k]);
    store(to + at, sums[0], valid, aligned);
}

}  // namespace

void sum_by_tree(const float* from, void* to, int64_t parts, int64_t count, Input output, Stream stream) {
    const int64_t blocks = (count + 8 * kThreads - 1) / (8 * kThreads);
    if (blocks == 0) return;
    with_input(output, [&](auto result) {
        using Out = decltype(result);
        const auto run = [&](auto number) {
            launch<sum_by_tree_kernel<Out, decltype(number)::value>>(blocks, kThreads, 0, stream, from, static_cast<Out*>(to), count);
        };
        switch (parts) {
            case 1: return run(std::integral_constant<int, 1>());
            case 2: return run(std::integral_constant<int, 2>());
            case 4: return run(std::integral_constant<int, 4>());
            default: DLP_CHECK_EQ(parts, 8); return run(std::integral_constant<int, 8>());
        }
    });
}

void sum_in_order(const void* from, const void* own, int64_t index, void* to, int64_t contributions, int64_t count, Input input,
                  Input output, float divisor, Stream stream) {
    DLP_CHECK_LT(0, contributions);
    const int64_t blocks = (count + 8 * kThreads - 1) / (8 * kThreads);
    if (blocks == 0) return;
    with_input(input, [&](auto element) {
        with_input(output, [&](auto result) {
            using T = decltype(element);
            using Out = decltype(result);
            launch<sum_in_order_kernel<T, Out>>(blocks, kThreads, 0, stream, static_cast<const T*>(from),
                                                static_cast<const T*>(own), index, static_cast<Out*>(to), contributions, count,
                                                divisor);
        });
    });
}

}  // namespace dlp
