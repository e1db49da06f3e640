// Activations, y = act(x); gates, h = act(gate) * up; and their gradients, dx = dy * act'(x), dgate = dh * up * act'(gate),
// dup = dh * act(gate). x, gate, up [rows, cols] of bf16 or fp32; all arithmetic in fp32, in the order of operations of
// reference.activations (activation, activation_backward, gated, gated_backward).
//
// Grid: one octet per thread, 256 threads per block. Instead of storing y or h, a kernel can compute max |y| or max |h|, for a
// cast that computes the elements with a producer (producer.cuh). Bound by memory, except for activations with tanh or exp: 4
// (y), 6 (h, dx) and 10 (dgate and dup) bytes per element of bf16.
#include "activations.cuh"

namespace dlp {
namespace {

constexpr int kThreads = 256;

// A second matrix of the shape of x, read as octets at the same positions.
template <class T>
__device__ Octets<T> same_shape(const Matrix& x, const void* data, int64_t stride) {
    return Octets<T>({data, x.rows, x.cols, stride, 0});
}

template <class T>
__device__ void store(void* data, int64_t cols, const typename Octets<T>::Place& at, const Octet<float>& x) {
    T* to = static_cast<T*>(data) + at.row * cols + at.column;
    store_values(to, rounded<T>(x), at.valid, reinterpret_cast<uintptr_t>(to) % 16 == 0);
}

// *amax = max(*amax, max |x|) over the block. Elements outside of the matrix are set to 0 first, because act(0) may not be 0.
template <class T>
__device__ void observe(float* amax, const typename Octets<T>::Place& at, Octet<float> x) {
    __shared__ uint32_t scratch[kThreads / 32];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i >= at.valid) x.set(i, 0.0f);
    Maxima<T> maxima;
    maxima.take(rounded<T>(x));
    const uint32_t bits = block_max(maxima.largest(), scratch);
    if (threadIdx.x == 0) atomic_max(amax, bits);
}

// y = act(x), or dx = dy * act'(x).
template <class T, Act kAct, bool kBackward>
__global__ void __launch_bounds__(kThreads) activation_kernel(const __grid_constant__ ActivationJob job) {
    const Octets<T> x(job.x);
    const auto at = x.place(blockIdx.x * int64_t(kThreads) + threadIdx.x);
    const Octet<T> xs = x.load(at);
    Octet<T> dys{};
    if (kBackward) dys = same_shape<T>(job.x, job.dy, job.dy_stride).load(at);
    Octet<float> out;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const ValueAndSlope a = act<kAct>(xs[i]);
        out.set(i, kBackward ? __fmul_rn(dys[i], a.slope) : a.value);
    }
    if (job.out) store<T>(job.out, job.x.cols, at, out);
    else observe<T>(job.amax, at, out);
}

template <class T, Act kAct>
__global__ void __launch_bounds__(kThreads) gate_kernel(const __grid_constant__ SwigluJob job) {
    const Octets<T> gate(job.gate);
    const auto at = gate.place(blockIdx.x * int64_t(kThreads) + threadIdx.x);
    const Octet<T> gates = gate.load(at), ups = same_shape<T>(job.gate, job.up, job.up_stride).load(at);
    Octet<float> out;
#pragma unroll
    for (int i = 0; i < 8; ++i) out.set(i, __fmul_rn(act<kAct>(gates[i]).value, ups[i]));
    if (job.h) store<T>(job.h, job.gate.cols, at, out);
    else observe<T>(job.amax, at, out);
}

// dup = dh * act(gate),   dgate = dh * up * act'(gate).
template <class T, Act kAct>
__global__ void __launch_bounds__(kThreads) gate_backward_kernel(const __grid_constant__ SwigluGradJob job) {
    const Octets<T> gate(job.gate);
    const auto at = gate.place(blockIdx.x * int64_t(kThreads) + threadIdx.x);
    const Octet<T> gates = gate.load(at), ups = same_shape<T>(job.gate, job.up, job.up_stride).load(at);
    const Octet<T> dhs = same_shape<T>(job.gate, job.dh, job.dh_stride).load(at);
    Octet<float> of_gate, of_up;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const ValueAndSlope a = act<kAct>(gates[i]);
        of_gate.set(i, __fmul_rn(__fmul_rn(dhs[i], ups[i]), a.slope));
        of_up.set(i, __fmul_rn(dhs[i], a.value));
    }
    store<T>(job.dgate, job.gate.cols, at, of_gate);
    store<T>(job.dup, job.gate.cols, at, of_up);
}

int64_t blocks_of(const Matrix& x) { return (x.rows * ((x.cols + 7) / 8) + kThreads - 1) / kThreads; }

}  // namespace

void activation(const ActivationJob& job, Act act, Input input, Stream stream) {
    if (job.amax) set_zero(reinterpret_cast<uintptr_t>(job.amax), sizeof(float), stream);
    const int64_t blocks = blocks_of(job.x);
    if (blocks == 0) return;
    with_input(input, [&](auto element) {
        with_act(act, [&](auto is) {
            using T = decltype(element);
            constexpr Act kAct = decltype(is)::value;
            if (job.dy) return launch<activation_kernel<T, kAct, true>>(blocks, kThreads, 0, stream, job);
            launch<activation_kernel<T, kAct, false>>(blocks, kThreads, 0, stream, job);
        });
    });
}

void gate(const SwigluJob& job, Act act, Input input, Stream stream) {
    if (job.amax) set_zero(reinterpret_cast<uintptr_t>(job.amax), sizeof(float), stream);
    const int64_t blocks = blocks_of(job.gate);
    if (blocks == 0) return;
    with_input(input, [&](auto element) {
        with_act(act, [&](auto is) {
            launch<gate_kernel<decltype(element), decltype(is)::value>>(blocks, kThreads, 0, stream, job);
        });
    });
}

void gate_backward(const SwigluGradJob& job, Act act, Input input, Stream stream) {
    const int64_t blocks = blocks_of(job.gate);
    if (blocks == 0) return;
    with_input(input, [&](auto element) {
        with_act(act, [&](auto is) {
            launch<gate_backward_kernel<decltype(element), decltype(is)::value>>(blocks, kThreads, 0, stream, job);
        });
    });
}

}  // namespace dlp
