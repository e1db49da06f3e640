// Norms and SwiGLU of an octet (eight elements), and loads and stores of octets outside of tiles. All arithmetic is
// fp32, rounded once to the type of the matrix. Kernels that store a result and casts that compute the result with a
// producer (producer.cuh) call the same functions, so both give the same bits.
//
//   normed         y = x * rstd * weight                                       reference.producers.rms_norm
//   layer_normed   y = (x - mean) * rstd * weight + bias                       reference.activations.layer_norm
//   gated          h = gate * s(gate) * up,   s(g) = 1 / (1 + exp(-g))         reference.activations.swiglu
//   to_gradients   dgate = dh * up * s * (1 + gate * (1 - s)),   dup = dh * gate * s     reference.activations.swiglu_backward
//
// Norms use IEEE arithmetic in a fixed order and equal their references bit for bit. SwiGLU does not: `expf` and the
// approximate reciprocal depend on the device. Its results are reproducible on one device, and equal the reference within a
// bound.
#pragma once

#include "octet.cuh"

namespace dlp {

// fp32 -> T, to nearest even.
template <class T>
__device__ Octet<T> rounded(const Octet<float>& x) {
    if constexpr (std::is_same_v<T, float>) {
        return x;
    } else {
        Octet<T> out;
#pragma unroll
        for (int i = 0; i < Octet<T>::kWords; ++i) {
            const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
            out.word[i] = reinterpret_cast<const uint32_t&>(pair);
        }
        return out;
    }
}

template <class T>
__device__ Octet<float> widened(const Octet<T>& x) {
    Octet<float> out;
#pragma unroll
    for (int i = 0; i < 8; ++i) out.set(i, x[i]);
    return out;
}

// Elements `first` to `first` + 7 of a vector as fp32; the vector is fp32 if `wide`, else bf16. min(valid, 8) elements are
// loaded, the others are 0. Many blocks read weights and rstd, so the caches may keep them.
template <class T>
__device__ Octet<float> load_cached(const T* from, int64_t valid) {
    if (valid < 8 || reinterpret_cast<uintptr_t>(from) % 16) return widened(load_octet(from, valid, false));
    return widened(load_octet<true>(from));
}
__device__ inline Octet<float> load_cached(const void* vector, bool wide, int64_t first, int64_t valid) {
    if (wide) return load_cached(static_cast<const float*>(vector) + first, valid);
    return load_cached(static_cast<const __nv_bfloat16*>(vector) + first, valid);
}

// Stores the first min(valid, 8) elements. `aligned`: the address `to` is a multiple of 16.
template <class T>
__device__ void store_values(T* to, const Octet<T>& x, int64_t valid, bool aligned) {
    if (aligned && valid >= 8) {
#pragma unroll
        for (int v = 0; v < Octet<T>::kVectors; ++v) reinterpret_cast<uint4*>(to)[v] = x.vector(v);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < valid) to[i] = T(x[i]);
}

// Stores an octet at a row and column of a contiguous matrix with `cols` columns and any alignment.
template <class T>
__device__ void store_at(void* matrix, int64_t row, int64_t column, int64_t cols, const Octet<T>& x) {
    T* to = static_cast<T*>(matrix) + row * cols + column;
    store_values(to, x, cols - column, reinterpret_cast<uintptr_t>(to) % 16 == 0);
}

// Stores eight elements; the address `to` must be a multiple of 16.
template <class T>
__device__ void store_octet(T* to, const Octet<T>& x) {
#pragma unroll
    for (int v = 0; v < Octet<T>::kVectors; ++v) reinterpret_cast<uint4*>(to)[v] = x.vector(v);
}

template <class T>
__device__ Octet<T> normed(const Octet<T>& x, float rstd, const Octet<float>& weight) {
    Octet<float> y;
#pragma unroll
    for (int i = 0; i < 8; ++i) y.set(i, __fmul_rn(__fmul_rn(x[i], rstd), weight[i]));
    return rounded<T>(y);
}

template <class T>
__device__ Octet<T> layer_normed(const Octet<T>& x, float mean, float rstd, const Octet<float>& weight, const Octet<float>& bias) {
    Octet<float> y;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        y.set(i, __fadd_rn(__fmul_rn(__fmul_rn(__fsub_rn(x[i], mean), rstd), weight[i]), bias[i]));
    return rounded<T>(y);
}

// 1 / (1 + exp(-x)), to about two units in the last place; 0 where the result would be subnormal. The division is approximate,
// because expf is not exact either.
__device__ inline float sigmoid(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(__fadd_rn(1.0f, expf(-x))));
    return out;
}

template <class T>
__device__ Octet<T> gated(const Octet<T>& gate, const Octet<T>& up) {
    Octet<float> h;
#pragma unroll
    for (int i = 0; i < 8; ++i) h.set(i, __fmul_rn(__fmul_rn(gate[i], sigmoid(gate[i])), up[i]));
    return rounded<T>(h);
}

// Replaces gate by dgate and up by dup.
template <class T>
__device__ void to_gradients(Octet<T>& gate, Octet<T>& up, const Octet<T>& dh) {
    Octet<float> of_gate, of_up;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float g = gate[i], d = dh[i], s = sigmoid(g);
        const float slope = __fmul_rn(s, __fadd_rn(1.0f, __fmul_rn(g, __fsub_rn(1.0f, s))));
        of_up.set(i, __fmul_rn(d, __fmul_rn(g, s)));
        of_gate.set(i, __fmul_rn(__fmul_rn(d, up[i]), slope));
    }
    gate = rounded<T>(of_gate), up = rounded<T>(of_up);
}

}  // namespace dlp
