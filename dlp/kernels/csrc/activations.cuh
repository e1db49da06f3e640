// Activations and their derivatives in fp32, in the order of operations of reference/activations.py. Kernels that store
// a result (activations.cu) and casts that compute the result with a producer (producer.cuh) call the same function.
#pragma once

#include <type_traits>

#include "elements.cuh"

namespace dlp {

struct ValueAndSlope {
    float value, slope;  // act(g), act'(g)
};

template <Act kAct>
__device__ ValueAndSlope act(float g) {
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
    } else if constexpr (kAct == Act::kQgelu) {
        const float scaled = __fmul_rn(g, 1.702f), s = sigmoid(scaled), rest = __fsub_rn(1.0f, s);
        return {__fmul_rn(g, s), __fmul_rn(s, __fadd_rn(__fmul_rn(scaled, rest), 1.0f))};
    } else {
        const float s = sigmoid(g), rest = __fsub_rn(1.0f, s);
        if (kAct == Act::kSigmoid) return {s, __fmul_rn(s, rest)};
        return {__fmul_rn(g, s), __fmul_rn(s, __fadd_rn(__fmul_rn(g, rest), 1.0f))};
    }
}

template <Act kAct>
using ActConstant = std::integral_constant<Act, kAct>;

#pragma nv_exec_check_disable  // `use` is a lambda of the host or of the device
template <class Use>
__host__ __device__ void with_act(Act act, Use use) {
    switch (act) {
        case Act::kSilu: return use(ActConstant<Act::kSilu>{});
        case Act::kGelu: return use(ActConstant<Act::kGelu>{});
        case Act::kRelu: return use(ActConstant<Act::kRelu>{});
        case Act::kSrelu: return use(ActConstant<Act::kSrelu>{});
        case Act::kSigmoid: return use(ActConstant<Act::kSigmoid>{});
        case Act::kQgelu: return use(ActConstant<Act::kQgelu>{});
    }
}

}  // namespace dlp
