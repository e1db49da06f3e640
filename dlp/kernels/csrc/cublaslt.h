// GEMMs by cuBLASLt, as plans: descriptors and an algorithm, created once for a problem and run many times.
//
// The header of cuBLASLt is part of a large package that may not be installed, but torch always loads the library. The library
// is therefore opened by name, and cublaslt.cpp declares the few types and constants that plans need.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace dlp {

// One GEMM, D = A @ B.T with A [rows, contraction], B [cols, contraction] and D [rows, cols]. Types are cudaDataType,
// strides are elements between rows. If `*_col_major` is 1, elements of a column are adjacent, and strides are between columns.
struct GemmProblem {
    int32_t a_type, b_type, d_type;
    int32_t bias_type;              // type of a vector [cols] that is added to D; -1: none
    int64_t rows, cols, contraction;
    int64_t a_stride, b_stride, d_stride;
    int32_t a_col_major, b_col_major;
    int32_t a_scale, b_scale;       // cublasLtMatmulMatrixScale_t; -1: not scaled
    int32_t accumulate;             // 1: D += the product; 0: D = the product
    int32_t device_alpha;           // 1: the product is multiplied by a factor in device memory
    int32_t fast_accumulation, tf32;  // fast accumulation of FP8; TF32 for fp32 operands
    int32_t sms;                    // number of SMs; 0: all
    int32_t alignment;              // alignment of all pointers, in bytes
    int32_t segments;               // 0: one GEMM. n: one GEMM for each of n adjacent parts of the contraction, which have
                                    // `contraction` elements each: D is [n, rows, d_stride]. The order in which an element is
                                    // summed depends only on `contraction` and the types, not on rows, cols and n
};

struct GemmPointers {
    const void *a, *b;
    void* d;
    const void *a_scale, *b_scale, *bias;
    const void *alpha, *beta;       // fp32 in device memory, if the problem has device_alpha
};

// Opens the first existing library of `names`. Throws with the messages of the loader if no library exists.
void open_cublaslt(const std::vector<std::string>& names);

// The version of the library as one number, such as 130101.
int64_t cublaslt_version();

class GemmPlan {
public:
    // Asks the heuristics for at most `wanted` algorithms, best estimate first. `device` must be the current device.
    GemmPlan(const GemmProblem& problem, int device, int64_t workspace_bytes, int wanted);
    ~GemmPlan();
    GemmPlan(const GemmPlan&) = delete;
    GemmPlan& operator=(const GemmPlan&) = delete;

    int candidates() const;         // number of algorithms found; 0: cuBLASLt does not support the problem
    void choose(int candidate);
    void run(const GemmPointers& pointers, void* workspace, uintptr_t stream);

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace dlp
