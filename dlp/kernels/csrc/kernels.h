// What the kernels are called with: plain C++, so that the bindings compile without a CUDA header.
//
// A job is one matrix and what shall be made of it, written as a row of 64-bit words. A call takes one job by value or a
// table of them in device memory: the second is how all weights of a model are cast in one launch. Python writes the
// words (dlp/kernels/cuda.py), in the order of the structs below. Null pointers say that an output is not wanted.
//
// The `flag` of a cast, fp32 [], becomes NaN where a value that it quantizes is not finite; else it stays as it is.
#pragma once

#include <array>
#include <cstdint>

namespace dlp {

// Bits for those words of a job that are addresses, counted from 0; a job that begins with a matrix has 5 words of it.
template <class... Index>
constexpr uint32_t words(Index... index) {
    return (0u | ... | (1u << index));
}

struct Matrix {
    const void* data;         // [rows, cols] bf16 or fp32, rows `stride` elements apart, columns adjacent
    int64_t rows, cols, stride;
    int64_t first;            // the number of this job's first piece of work, counted over the table
};

struct AmaxJob {              // max |x| of all elements -> out []
    Matrix x;
    float* out;
    static constexpr uint32_t addresses = words(0, 5);
};

struct TensorJob {            // one scale for all elements
    Matrix x;
    uint8_t* codes;           // [rows, cols]
    uint8_t* codes_t;         // [cols, rows]
    const float* amax;        // []: the scale is made from it, or
    const float* scale;       // []: given
    float* staging;           // []: the amax of x is maxed into it
    float* scale_inv;         // []
    float* flag;
    static constexpr uint32_t addresses = words(0, 5, 6, 7, 8, 9, 10, 11);
};

struct BlockJob {             // a scale every 128 or 32 elements along the contraction, or every tile
    Matrix x;
    uint8_t* codes;           // [rows, cols]
    void* scale;              // of `codes`
    uint8_t* codes_t;         // [cols, rows]
    void* scale_t;            // of `codes_t`
    float* flag;
    static constexpr uint32_t addresses = words(0, 5, 6, 7, 8, 9);
};

struct LinesJob {             // max |x| of every row and of every column, raised where they are
    Matrix x;
    float* amax;              // [rows]
    float* amax_t;            // [cols]
    static constexpr uint32_t addresses = words(0, 5, 6);
};

struct RowwiseJob {           // one scale a row, made from its amax; `..._t`: of x transposed
    Matrix x;
    uint8_t* codes;           // [rows, cols]
    const float* amax;        // [rows]
    float* scale_inv;         // [rows]
    uint8_t* codes_t;         // [cols, rows]
    const float* amax_t;      // [cols]
    float* scale_inv_t;       // [cols]
    float* flag;
    static constexpr uint32_t addresses = words(0, 5, 6, 7, 8, 9, 10, 11);
};

struct RhtAmaxJob {           // max |x|, and max |x| after the Hadamard transform along the columns
    Matrix x;
    float* out;               // []
    float* out_t;             // []
    static constexpr uint32_t addresses = words(0, 5, 6);
};

struct Nvfp4Job {             // E2M1 codes, two a byte, an E4M3 scale every 16 elements or 16x16 tile, an amax a tensor
    Matrix x;
    uint8_t* codes;           // [rows, cols / 2]
    uint8_t* scale;           // [rows, cols / 16], or [rows / 16, cols / 16]
    const float* amax;        // []
    float* amax_out;          // []: `amax` is copied there
    uint8_t* codes_t;         // [cols, rows / 2]
    uint8_t* scale_t;
    const float* amax_t;
    float* amax_t_out;
    float* flag;
    static constexpr uint32_t addresses = words(0, 5, 6, 7, 8, 9, 10, 11, 12, 13);
};

struct AlphaJob {             // what the sums of an NVFP4 GEMM are multiplied by
    const float* a_amax;      // []
    const float* b_amax;      // []
    float* out;               // []
    static constexpr uint32_t addresses = words(0, 1, 2);
};

struct RoundJob {             // fp32 values rounded to bf16
    const float* x;           // [count]
    void* out;                // bf16 [count]
    int64_t count;
    static constexpr uint32_t addresses = words(0, 1);
};

struct Draw {                 // whose random bits one orientation takes, see reference/fp4.py
    const int64_t* counter;   // []; null: nothing is drawn
    int64_t row;              // of the unsharded matrix, where this one starts
    int64_t first;            // block of 16 there, along a row
    int64_t across;           // blocks of 16 along a row of the unsharded matrix
    uint32_t direction, seed, tensor;
};

struct CodesJob {             // codes to be transposed; `data` holds bytes, or two codes a byte
    Matrix x;                 // [rows, cols] codes
    uint8_t* out;             // [cols, rows]
    static constexpr uint32_t addresses = words(0, 5);
};

struct DecodeJob {            // codes * scales -> bf16
    const uint8_t* codes;     // [rows, cols] bytes, or two codes a byte
    const void* scale;        // [rows / block_rows, cols / block_cols], rounded up
    void* out;                // bf16 [rows, cols]
    int64_t rows, cols, block_rows, block_cols;
    int64_t down, across;     // between scales, in elements
    static constexpr uint32_t addresses = words(0, 1, 2);
};

struct SwizzleJob {           // scale bytes for a block-scaled GEMM
    const uint8_t* scale;     // [ceil(lines / lines_each), blocks]
    uint32_t* out;            // tiles of 128 lines by 4 blocks
    int64_t lines, blocks, lines_each;
    int64_t down, across;     // between scales
    static constexpr uint32_t addresses = words(0, 1);
};

struct DelayedJob {           // slots that have one history length and algorithm
    Matrix x;                 // their history, fp32 [length, slots], updated in place
    float* scale;             // [slots]
    const float* reduced;     // [slots], may be `staging`
    const float* target;      // [slots]
    float* staging;           // [slots]: set to 0
    int64_t most_recent;
};

struct WireMatrix {           // packed for the wire of a sum: FP8 with a scale every 128 columns
    const void* x;            // [rows, cols], contiguous
    int64_t rows, cols;
    uint8_t* codes;           // [rows, cols]
    float* scale;             // [rows, ceil(cols / 128)]
    float least;              // smaller amaxes count as it
};

struct WireSum {              // the sum over ranks of what they packed
    const uint8_t* codes;     // of rank 0; [rows, cols] each
    int64_t codes_apart;      // bytes from one rank's to the next
    const float* scale;
    int64_t scales_apart;     // in scales
    void* out;                // [rows, cols]
    int64_t ranks, rows, cols;
    const uint8_t* own_codes; // those of rank `own`, which may lie apart from the others
    const float* own_scale;
    int64_t own;
    static constexpr uint32_t addresses = words(0, 2, 4, 8, 9);
};

// What the elements of a cast are, made from those of its matrix on the way (see producer.cuh).
enum class Producer : int64_t { kMatrix, kRmsNorm, kSwiglu, kColumnSums, kActivation, kBeside };

// act(g): g * s(g), GELU by tanh, max(g, 0), its square, s(g) (reference/activations.py).
enum class Act : int64_t { kSilu, kGelu, kRelu, kSrelu, kSigmoid };

struct Source {
    Producer producer;
    const float* rstd;        // kRmsNorm: [rows]
    const void* weight;       // [cols], fp32 if `wide`, else bf16
    int64_t wide;
    const void* up;           // kSwiglu, kBeside: [rows, cols] like the matrix, which is the gate
    int64_t up_stride;
    float* sums;              // kColumnSums: [row tiles, cols], the sum of each column of a tile; kBeside: the same, or null
    Act act;                  // kActivation: act(x); kBeside: act(x) * up, or
    int64_t slope;            // act'(x) * up
    static constexpr uint32_t addresses = words(1, 2, 4, 6);
};

struct MatrixJob {            // a matrix that is only read
    Matrix x;
    static constexpr uint32_t addresses = words(0);
};

struct NormJob {              // RMSNorm of the rows of x
    Matrix x;
    const void* weight;       // [cols], fp32 if `wide`, else bf16
    int64_t wide;
    float* rstd;              // [rows]
    void* y;                  // [rows, cols] as x, or
    float* amax;              // []: max |y|, or neither
    const void* more;         // [rows, cols] as x, rows `more_stride` apart, added to x first; null: nothing is
    int64_t more_stride;
    void* total;              // [rows, cols]: the sum
    static constexpr uint32_t addresses = words(0, 5, 7, 8, 9, 10, 12);
};

struct NormGradJob {
    Matrix x;
    const void* weight;       // [cols], fp32 if `wide`, else bf16
    int64_t wide;
    const float* rstd;        // [rows]
    const void* dy;           // [rows, cols] as x, rows `dy_stride` apart
    int64_t dy_stride;
    void* dx;                 // [rows, cols] as x
    float* dweight;           // [kNormParts, cols]: the sums over every kNormParts-th row
    const void* add;          // [rows, cols] as x, rows `add_stride` apart, added to dx; null: nothing is
    int64_t add_stride;
    static constexpr uint32_t addresses = words(0, 5, 7, 8, 10, 11, 12);
};

struct LayerNormJob {         // LayerNorm of the rows of x
    Matrix x;
    const void *weight, *bias;  // [cols], fp32 if `wide`, else bf16
    int64_t wide;
    float *mean, *rstd;       // [rows]
    void* y;                  // [rows, cols] as x
    static constexpr uint32_t addresses = words(0, 5, 6, 8, 9, 10);
};

struct LayerNormGradJob {
    Matrix x;
    const void* weight;       // [cols], fp32 if `wide`, else bf16
    int64_t wide;
    const float *mean, *rstd; // [rows]
    const void* dy;           // [rows, cols] as x, rows `dy_stride` apart
    int64_t dy_stride;
    void* dx;                 // [rows, cols] as x
    float *dweight, *dbias;   // [kNormParts, cols]: the sums over every kNormParts-th row
    static constexpr uint32_t addresses = words(0, 5, 7, 8, 9, 11, 12, 13);
};

struct SwigluJob {            // h = silu(gate) * up
    Matrix gate;
    const void* up;           // rows `up_stride` apart
    int64_t up_stride;
    void* h;                  // [rows, cols] as gate, or
    float* amax;              // []: max |h|
    static constexpr uint32_t addresses = words(0, 5, 7, 8);
};

struct SwigluGradJob {
    Matrix gate;
    const void* up;
    int64_t up_stride;
    const void* dh;
    int64_t dh_stride;
    void* dgate;              // [rows, cols]
    void* dup;                // or
    float* amax;              // [2]: max |dgate|, max |dup|, or neither
    static constexpr uint32_t addresses = words(0, 5, 7, 9, 10, 11);
};

template <class Job>
struct GateGradsJob {         // what is made of both gradients of a SwiGLU, which nobody stores; x of their jobs says its sizes
    SwigluGradJob from;
    Job of_gate, of_up;
};

struct ActivationJob {        // act(x), or with dy: dy * act'(x)
    Matrix x;
    const void* dy;           // rows `dy_stride` apart; null: forward
    int64_t dy_stride;
    void* out;                // [rows, cols], or
    float* amax;              // []: max |out|
    static constexpr uint32_t addresses = words(0, 5, 7, 8);
};

struct LossJob {
    Matrix x;
    const int64_t* target;    // [rows]: a column; one that is none picks nothing
    float* log_sum;           // [rows]: log(sum(exp(x)))
    float* picked;            // [rows]: x at the target, else 0
};

struct LossGradJob {          // dx = (exp(x - log_sum) - one at the target) * weight
    Matrix x;
    const int64_t* target;    // [rows]
    const float* log_sum;     // [rows]
    const float* weight;      // [rows]
    void* dx;                 // [rows, cols] as x
};

template <class Job>
struct Work {
    Job one;
    const Job* many;          // in device memory; null: `one` is the job
    int64_t count;            // of jobs
    int64_t items;            // pieces of work in all jobs together
};

struct BlockGemmJob {         // D = A @ B.T, contraction last; strides are elements between lines
    const uint8_t *a, *b;     // [rows, contraction], [cols, contraction]
    void* d;                  // [rows, cols]
    const float *a_scale;     // [contraction / 128, rows filled up to 4]
    const float *b_scale;     // [cols / 128, contraction / 128 filled up to 4]
    const void* bias;         // [cols] in the type of D, or nullptr
    int64_t rows, cols, contraction;
    int64_t a_stride, b_stride, d_stride;
    int64_t a_scale_lines, a_scale_stride, b_scale_lines, b_scale_stride;  // of A the filled up number of lines
    int64_t accumulate;       // D, in fp32, += instead of D =
    static constexpr uint32_t addresses = words(0, 1, 2, 3, 4, 5);
};

constexpr int kSlotRanks = 32;      // at most so many ranks share a slot
constexpr int64_t kSlotHeader = 512;  // bytes before its payload
constexpr int kAgreed = 8;          // tensors in one agreement

struct Waiting {              // who waits, how long, and what is said if it is too long (transport.cu)
    int64_t patience;         // milliseconds
    uint32_t* report;         // [7] words of the host: 1, rank, peer, what, wanted, seen, use
    uint32_t* said;           // []: on the device; one thread writes the report
    int64_t rank, world, use;
    static constexpr uint32_t addresses = 0;
};

struct ArrivingRows {         // of A: equal parts, of which that of each other rank comes while the GEMM runs (gemm_sm90.cu)
    const uint32_t* sent;     // [world]: that of a rank is here once its word has reached Waiting::use
    int64_t rows;             // of a part; the scales of all lie as they were sent: [rows of all, contraction / 128]
    int64_t all_here;         // an event, marked when all are
    int64_t spare;            // multiprocessors that are left to others
    static constexpr uint32_t addresses = 0;
};

struct SlotBases {            // where a slot lies on each rank of a group (transport.cu)
    int64_t base[kSlotRanks];
    int64_t rank, world;
    static constexpr uint32_t addresses = 0;
};

struct AgreeJob {             // fp32 values that are not negative -> their maxima over ranks
    const float* from[kAgreed];
    float* to[kAgreed];
    int64_t length[kAgreed];
    int64_t count, capacity;  // how many tensors; values of a rank that the slot has room for
    static constexpr uint32_t addresses = (1u << 2 * kAgreed) - 1;
};

struct ScaleRule {            // how a scale is made from an amax, see scale.cuh
    float largest;            // of the element type
    float epsilon;            // amaxes below it count as it
    float overflow;           // what an infinite quotient becomes
    int32_t power_of_two;
};

enum class Input : int32_t { kBf16, kFp32 };
enum class Code : int32_t { kE4m3, kE5m2 };
enum class Encoding : int32_t { kE4m3Fp32, kE5m2Fp32, kE4m3E8m0, kE5m2E8m0, kE2m1E4m3 };  // codes and their scales

using Stream = uintptr_t;

// Elements that one piece of work covers.
constexpr int64_t kAmaxChunk = 16384;
constexpr int64_t kTile = 128;  // squared
constexpr int64_t kNormParts = 512;

void amax(const Work<AmaxJob>& work, Input input, uintptr_t out, int64_t out_count, Stream stream);
void cast_tensor(const TensorJob& job, Input input, Code code, const ScaleRule& rule, Stream stream);
void cast_transpose(const Work<TensorJob>& work, Input input, Code code, const ScaleRule& rule, bool observe,
                    const Source& source, Stream stream);
void cast_block_1d(const Work<BlockJob>& work, Input input, Code code, const ScaleRule& rule, bool gemm_layout,
                   const Source& source, Stream stream);
void cast_block_2d(const Work<BlockJob>& work, Input input, Code code, const ScaleRule& rule, bool gemm_layout,
                   Stream stream);
void amax_lines(const Work<LinesJob>& work, Input input, const Source& source, Stream stream);
void cast_rowwise(const Work<RowwiseJob>& work, Input input, Code code, const ScaleRule& rule, const Source& source,
                  Stream stream);
void cast_mxfp8_1d(const Work<BlockJob>& work, Input input, Code code, bool floor, bool blocks_first, const Source& source,
                   Stream stream);
void cast_mxfp8_2d(const Work<BlockJob>& work, Input input, Code code, bool floor, Stream stream);
void amax_rht(const Work<RhtAmaxJob>& work, Input input, Stream stream);
void cast_nvfp4_1d(const Work<Nvfp4Job>& work, Input input, bool rht, const Draw& draw, const Draw& draw_t,
                   const Source& source, Stream stream);
void cast_nvfp4_2d(const Work<Nvfp4Job>& work, Input input, Stream stream);
void transpose_bytes(const Work<CodesJob>& work, Stream stream);
void transpose_nibbles(const Work<CodesJob>& work, Stream stream);
void decode(const DecodeJob& job, Encoding encoding, Stream stream);
void nvfp4_alpha(const AlphaJob& job, Stream stream);
void round_to_bf16(const RoundJob& job, Stream stream);
void transpose_words(uintptr_t from, uintptr_t to, int64_t rows, int64_t cols, Stream stream);  // of 4 bytes each
void set_zero(uintptr_t at, int64_t bytes, Stream stream);
// Sets a few fp32 to 0, by a kernel beside which the next one may begin (`launch`, kEarly).
void few_zeros(uintptr_t at, int64_t count, Stream stream);
void gemm_fp8_blocks(const BlockGemmJob& job, Code a_code, Input out, Stream stream);
void gemm_fp8_arriving(const BlockGemmJob& job, const ArrivingRows& from, const Waiting& waiting, Code a_code, Input out,
                       Stream stream);
void swizzle_scales(const SwizzleJob& job, Stream stream);
void delayed_update(const Work<DelayedJob>& work, Stream stream);
void sum_in_order(const void* from, const void* own, int64_t index, void* to, int64_t contributions, int64_t count, Input input,
                  Stream stream);
void pack_fp8_wire(const WireMatrix& job, Input input, Stream stream);
void sum_fp8_wire(const WireSum& job, Input output, Stream stream);
void rms_norm(const NormJob& job, float eps, Input input, Stream stream);
void rms_norm_backward(const NormGradJob& job, Input input, Stream stream);
void layer_norm(const LayerNormJob& job, float eps, Input input, Stream stream);
void layer_norm_backward(const LayerNormGradJob& job, Input input, Stream stream);
void activation(const ActivationJob& job, Act act, Input input, Stream stream);
void gate(const SwigluJob& job, Act act, Input input, Stream stream);
void gate_backward(const SwigluGradJob& job, Act act, Input input, Stream stream);
void swiglu(const SwigluJob& job, Input input, Stream stream);
void swiglu_backward(const SwigluGradJob& job, Input input, Stream stream);
void cast_gate_grads(const GateGradsJob<TensorJob>& job, Code code, const ScaleRule& rule, bool observe, Stream stream);
void cast_gate_grads(const GateGradsJob<BlockJob>& job, Code code, const ScaleRule& rule, bool gemm_layout, Stream stream);
void tile_sums(const Work<MatrixJob>& work, float* sums, Input input, Stream stream);
void log_sum_exp(const LossJob& job, Input input, Stream stream);
void softmax_gradient(const LossGradJob& job, Input input, Stream stream);
void sum_parts(const float* parts, int64_t count, int64_t cols, float* out, Stream stream);

void begin_use(const SlotBases& slots, int64_t use, Stream stream);
void meet(const SlotBases& slots, int64_t use, Stream stream);
void tell(const SlotBases& slots, int64_t peer, int64_t use, Stream stream);
void await_sent(const SlotBases& slots, Stream stream);
void forget_sent(const SlotBases& slots, Stream stream);
void release_use(const SlotBases& slots, Stream stream);
void agree(const uint64_t* slots, const AgreeJob& job, const Waiting& waiting, Stream stream);
void copy_part(uintptr_t from, int64_t from_pitch, uintptr_t to, int64_t to_pitch, int64_t width, int64_t height, Stream stream);
int64_t new_event();
void mark(int64_t event, Stream stream);
void await_mark(int64_t event, Stream stream);

}  // namespace dlp
