// What the kernels are called with: plain C++, so that the bindings compile without a CUDA header.
//
// A job is one matrix and what shall be made of it, written as a row of 64-bit words. A call takes one job by value or a
// table of them in device memory: the second is how all weights of a model are cast in one launch. Python writes the
// words (dlp/kernels/cuda.py), in the order of the structs below. Null pointers say that an output is not wanted.
#pragma once

#include <array>
#include <cstdint>

namespace dlp {

struct Matrix {
    const void* data;         // [rows, cols] bf16 or fp32, rows `stride` elements apart, columns adjacent
    int64_t rows, cols, stride;
    int64_t first;            // the number of this job's first piece of work, counted over the table
};

struct AmaxJob {              // max |x| of all elements -> out []
    Matrix x;
    float* out;
};

struct TensorJob {            // one scale for all elements
    Matrix x;
    uint8_t* codes;           // [rows, cols]
    uint8_t* codes_t;         // [cols, rows]
    const float* amax;        // []: the scale is made from it, or
    const float* scale;       // []: given
    float* staging;           // []: the amax of x is maxed into it
    float* scale_inv;         // []
};

struct BlockJob {             // a scale every 128 or 32 elements along the contraction, or every tile
    Matrix x;
    uint8_t* codes;           // [rows, cols]
    void* scale;              // of `codes`
    uint8_t* codes_t;         // [cols, rows]
    void* scale_t;            // of `codes_t`
};

template <class Job>
struct Work {
    Job one;
    const Job* many;          // in device memory; null: `one` is the job
    int64_t count;            // of jobs
    int64_t items;            // pieces of work in all jobs together
};

struct ScaleRule {            // how a scale is made from an amax, see scale.cuh
    float largest;            // of the element type
    float epsilon;            // amaxes below it count as it
    float overflow;           // what an infinite quotient becomes
    int32_t power_of_two;
};

enum class Input : int32_t { kBf16, kFp32 };
enum class Code : int32_t { kE4m3, kE5m2 };

using Stream = uintptr_t;

// Elements that one piece of work covers.
constexpr int64_t kAmaxChunk = 16384;
constexpr int64_t kTile = 128;  // squared

void amax(const Work<AmaxJob>& work, Input input, uintptr_t out, int64_t out_count, Stream stream);
void cast_tensor(const TensorJob& job, Input input, Code code, const ScaleRule& rule, Stream stream);
void cast_transpose(const Work<TensorJob>& work, Input input, Code code, const ScaleRule& rule, bool observe,
                    Stream stream);
void cast_block_1d(const Work<BlockJob>& work, Input input, Code code, const ScaleRule& rule, bool gemm_layout,
                   Stream stream);
void cast_block_2d(const Work<BlockJob>& work, Input input, Code code, const ScaleRule& rule, bool gemm_layout,
                   Stream stream);

}  // namespace dlp
