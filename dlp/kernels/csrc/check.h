// Checks that two values compare as required. A failed check prints both values and throws std::runtime_error, a RuntimeError
// in Python.
#pragma once

#include <sstream>
#include <stdexcept>

namespace dlp {

template <class A, class B>
[[noreturn]] void fail(const char* expected, const A& a, const B& b, const char* file, int line) {
    std::ostringstream message;
    message << file << ":" << line << ": expected " << expected << ", got " << a << " and " << b;
    throw std::runtime_error(message.str());
}

}  // namespace dlp

#define DLP_CHECK_OP(a, op, b)                                                 \
    do {                                                                       \
        const auto a_ = (a);                                                   \
        const auto b_ = (b);                                                   \
        if (!(a_ op b_)) dlp::fail(#a " " #op " " #b, a_, b_, __FILE__, __LINE__); \
    } while (0)
#define DLP_CHECK_EQ(a, b) DLP_CHECK_OP(a, ==, b)
#define DLP_CHECK_LE(a, b) DLP_CHECK_OP(a, <=, b)
#define DLP_CHECK_LT(a, b) DLP_CHECK_OP(a, <, b)

#define DLP_CHECK_CUDA(call)                                                                   \
    do {                                                                                       \
        const cudaError_t status_ = (call);                                                    \
        if (status_ != cudaSuccess)                                                            \
            dlp::fail(#call " to succeed", cudaGetErrorName(status_), cudaGetErrorString(status_), __FILE__, __LINE__); \
    } while (0)
