// SwiGLU, h = silu(gate) * up (Shazeer, arXiv 2002.05202), on matrices [rows, cols], forward and backward. For casts that
// compute the elements, the kernels can compute only max |h|, or max |dgate| and max |dup|. Results equal
// reference.activations.swiglu and swiglu_backward within a bound (elements.cuh).
//
// Grid: two octets per thread, 256 threads per block. Bound by memory: 6 bytes per element of bf16 forward, 10 backward.
#include "elements.cuh"

namespace dlp {
namespace {

constexpr int kThreads = 256;
constexpr int kOctets = 2;  // octets per thread
constexpr int64_t kChunk = kThreads * kOctets;

// A second matrix of the shape of x, read as octets at the same positions.
template <class T>
__device__ Octets<T> same_shape(const Matrix& x, const void* data, int64_t stride) {
    return Octets<T>({data, x.rows, x.cols, stride, 0});
}

template <class T>
struct Results {  // a contiguous output of the shape of the inputs
    T* data;
    int64_t cols;

    __device__ Results(void* data, int64_t cols) : data(static_cast<T*>(data)), cols(cols) {}
    __device__ void store(const typename Octets<T>::Place& at, const Octet<T>& x) const {
        T* to = data + at.row * cols + at.column;
        store_values(to, x, at.valid, reinterpret_cast<uintptr_t>(to) % 16 == 0);
    }
};

template <class T, bool kStore>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(const __grid_constant__ SwigluJob job) {
    __shared__ uint32_t scratch[kThreads / 32];
    const Octets<T> gate(job.gate), up = same_shape<T>(job.gate, job.up, job.up_stride);
    const Results<T> h(job.h, job.gate.cols);
    const int64_t first = blockIdx.x * kChunk + threadIdx.x;
    Octet<T> gates[kOctets], ups[kOctets];
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
        const auto at = gate.place(first + i * kThreads);
        gates[i] = gate.load(at), ups[i] = up.load(at);
    }
    Maxima<T> maxima;
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
        const Octet<T> made = gated(gates[i], ups[i]);
        if (kStore) h.store(gate.place(first + i * kThreads), made);
        else maxima.take(made);
    }
    if (!kStore) {
        const uint32_t bits = block_max(maxima.largest(), scratch);
        if (threadIdx.x == 0) atomic_max(job.amax, bits);
    }
}

// Stores dgate and dup, or computes only their amaxes.
template <class T, bool kStore>
__global__ void __launch_bounds__(kThreads) swiglu_backward_kernel(const __grid_constant__ SwigluGradJob job) {
    __shared__ uint32_t scratch[2][kThreads / 32];
    const Octets<T> gate(job.gate), up = same_shape<T>(job.gate, job.up, job.up_stride), dh = same_shape<T>(job.gate, job.dh, job.dh_stride);
    const Results<T> dgate(job.dgate, job.gate.cols), dup(job.dup, job.gate.cols);
    const int64_t first = blockIdx.x * kChunk + threadIdx.x;
    Octet<T> gates[kOctets], ups[kOctets], dhs[kOctets];
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
        const auto at = gate.place(first + i * kThreads);
        gates[i] = gate.load(at), ups[i] = up.load(at), dhs[i] = dh.load(at);
    }
    Maxima<T> of_gate, of_up;
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
        to_gradients(gates[i], ups[i], dhs[i]);
        const auto at = gate.place(first + i * kThreads);
        if (kStore) dgate.store(at, gates[i]), dup.store(at, ups[i]);
        else of_gate.take(gates[i]), of_up.take(ups[i]);
    }
    if (!kStore) {
        const uint32_t gate_bits = block_max(of_gate.largest(), scratch[0]), up_bits = block_max(of_up.largest(), scratch[1]);
        if (threadIdx.x == 0) atomic_max(job.amax, gate_bits), atomic_max(job.amax + 1, up_bits);
    }
}

int64_t blocks_of(const Matrix& x) { return (x.rows * ((x.cols + 7) / 8) + kChunk - 1) / kChunk; }

}  // namespace

void swiglu(const SwigluJob& job, Input input, Stream stream) {
    if (job.amax) set_zero(reinterpret_cast<uintptr_t>(job.amax), sizeof(float), stream);
    const int64_t blocks = blocks_of(job.gate);
    if (blocks == 0) return;
    with_input(input, [&](auto element) {
        using T = decltype(element);
        if (job.h) return launch<swiglu_kernel<T, true>>(blocks, kThreads, 0, stream, job);
        launch<swiglu_kernel<T, false>>(blocks, kThreads, 0, stream, job);
    });
}

void swiglu_backward(const SwigluGradJob& job, Input input, Stream stream) {
    if (job.amax) set_zero(reinterpret_cast<uintptr_t>(job.amax), 2 * sizeof(float), stream);
    const int64_t blocks = blocks_of(job.gate);
    if (blocks == 0) return;
    with_input(input, [&](auto element) {
        using T = decltype(element);
        if (job.amax) return launch<swiglu_backward_kernel<T, false>>(blocks, kThreads, 0, stream, job);
        launch<swiglu_backward_kernel<T, true>>(blocks, kThreads, 0, stream, job);
    });
}

}  // namespace dlp
