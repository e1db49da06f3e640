// Activations, y = act(x), gates, h = act(gate) * up, and their gradients, in fp32 in the order of reference/activations.py.
#include <type_traits>

#include "elements.cuh"

namespace dlp {
namespace {

constexpr int kThreads = 256;

struct Slope {
    float value, slope;  // act(g), act'(g)
};

template <Act kAct>
__device__ Slope act(float g) {
    if constexpr (kAct == Act::kGelu) {
        const float a = 0.7978845608028654f, b = 0.044715f, square = __fmul_rn(g, g);
        const float t = tanhf(__fmul_rn(__fadd_rn(g, __fmul_rn(__fmul_rn(square, g), b)), a));
        const float inner = __fmul_rn(__fadd_rn(__fmul_rn(square, float(3 * 0.044715)), 1.0f), a);
        const float half = __fmul_rn(g, 0.5f), whole = __fadd_rn(t, 1.0f);
        const float falling = __fmul_rn(__fsub_rn(1.0f, __fmul_rn(t, t)), inner);
        return {__fmul_rn(half, whole), __fadd_rn(__fmul_rn(whole, 0.5f), __fmul_rn(half, falling))};
    } else if constexpr (kAct == Act::kRelu) {
        return {g < 0.0f ? 0.0f : g, g > 0.0f ? 1.0f : 0.0f};
    } else if constexpr (kAct == Act::kSrelu) {
        const float kept = g < 0.0f ? 0.0f : g;
        return {__fmul_rn(kept, kept), __fmul_rn(kept, 2.0f)};
    } else {
        const float s = sigmoid(g), rest = __fsub_rn(1.0f, s);
        if (kAct == Act::kSigmoid) return {s, __fmul_rn(s, rest)};
        return {__fmul_rn(g, s), __fmul_rn(s, __fadd_rn(__fmul_rn(g, rest), 1.0f))};
    }
}

template <class T>
__device__ Octets<T> beside(const Matrix& x, const void* data, int64_t stride) {
    return Octets<T>({data, x.rows, x.cols, stride, 0});
}

template <class T>
__device__ void store(void* data, int64_t cols, const typename Octets<T>::Place& at, const Octet<float>& x) {
    T* to = static_cast<T*>(data) + at.row * cols + at.column;
    store_values(to, rounded<T>(x), at.valid, reinterpret_cast<uintptr_t>(to) % 16 == 0);
}

// y = act(x), or with dy: dx = dy * act'(x).
template <class T, Act kAct, bool kBackward>
__global__ void __launch_bounds__(kThreads) activation_kernel(const __grid_constant__ ActivationJob job) {
    const Octets<T> x(job.x);
    const auto at = x.place(blockIdx.x * int64_t(kThreads) + threadIdx.x);
    const Octet<T> xs = x.load(at);
    Octet<T> dys{};
    if (kBackward) dys = beside<T>(job.x, job.dy, job.dy_stride).load(at);
    Octet<float> out;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const Slope made = act<kAct>(xs[i]);
        out.set(i, kBackward ? __fmul_rn(dys[i], made.slope) : made.value);
    }
    store<T>(job.out, job.x.cols, at, out);
}

template <class T, Act kAct>
__global__ void __launch_bounds__(kThreads) gate_kernel(const __grid_constant__ SwigluJob job) {
    const Octets<T> gate(job.gate);
    const auto at = gate.place(blockIdx.x * int64_t(kThreads) + threadIdx.x);
    const Octet<T> gates = gate.load(at), ups = beside<T>(job.gate, job.up, job.up_stride).load(at);
    Octet<float> out;
#pragma unroll
    for (int i = 0; i < 8; ++i) out.set(i, __fmul_rn(act<kAct>(gates[i]).value, ups[i]));
    store<T>(job.h, job.gate.cols, at, out);
}

// dup = dh * act(gate),   dgate = dh * up * act'(gate).
template <class T, Act kAct>
__global__ void __launch_bounds__(kThreads) gate_backward_kernel(const __grid_constant__ SwigluGradJob job) {
    const Octets<T> gate(job.gate);
    const auto at = gate.place(blockIdx.x * int64_t(kThreads) + threadIdx.x);
    const Octet<T> gates = gate.load(at), ups = beside<T>(job.gate, job.up, job.up_stride).load(at);
    const Octet<T> dhs = beside<T>(job.gate, job.dh, job.dh_stride).load(at);
    Octet<float> of_gate, of_up;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const Slope made = act<kAct>(gates[i]);
        of_gate.set(i, __fmul_rn(__fmul_rn(dhs[i], ups[i]), made.slope));
        of_up.set(i, __fmul_rn(dhs[i], made.value));
    }
    store<T>(job.dgate, job.gate.cols, at, of_gate);
    store<T>(job.dup, job.gate.cols, at, of_up);
}

int64_t blocks_of(const Matrix& x) { return (x.rows * ((x.cols + 7) / 8) + kThreads - 1) / kThreads; }

template <Act kAct>
using Is = std::integral_constant<Act, kAct>;

template <class Use>
void with_act(Act act, Use use) {
    switch (act) {
        case Act::kSilu: return use(Is<Act::kSilu>{});
        case Act::kGelu: return use(Is<Act::kGelu>{});
        case Act::kRelu: return use(Is<Act::kRelu>{});
        case Act::kSrelu: return use(Is<Act::kSrelu>{});
        case Act::kSigmoid: return use(Is<Act::kSigmoid>{});
    }
}

}  // namespace

void activation(const ActivationJob& job, Act act, Input input, Stream stream) {
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
