// Entry points of all kernels, and the structs of the arguments, in plain C++: bindings.cpp compiles without a CUDA header.
// README.md in this folder lists the files, and describes how to add a kernel.
//
// A job is one matrix with the requested outputs. Each field is one 64-bit word, so that Python passes a job as a tuple of
// integers in the order of the fields (dlp/kernels/cuda*.py). Kernels over `Work<Job>` take one job by value, or a table of
// jobs in device memory, so that one launch casts all weights of a model. A null pointer means that an output is not requested.
//
// Conventions of the comments below:
//   [rows, cols]   rows of adjacent columns. Outputs are contiguous, inputs have a `stride` between rows, in elements.
//   `..._t`        output of the transposed matrix: columnwise copies are stored transposed, with the contraction last.
//   scale          multiplier of values in a cast; `scale_inv`, which is stored, is the multiplier of codes in decoding.
//   flag           fp32 []: becomes NaN if a value of the matrix is not finite. Null: no check.
//   addresses      words of a struct that are device pointers, which a replay of captured launches replaces (steps.h).
#pragma once

#include <array>
#include <cstdint>

namespace dlp {

// Bit mask of the words with these indices. A Matrix takes words 0 to 4; word 0 is the address.
template <class... Index>
constexpr uint32_t words(Index... index) {
    return (0u | ... | (1u << index));
}

struct Matrix {
    const void* data;         // [rows, cols] of bf16, or of fp32 (codes: see CodesJob)
    int64_t rows, cols, stride;
    int64_t first;            // pieces of work (tiles, chunks) of the previous jobs of the table
};

struct AmaxJob {              // out = max |x|
    Matrix x;
    float* out;               // []
    static constexpr uint32_t addresses = words(0, 5);
};

struct TensorJob {            // FP8, one scale for the tensor
    Matrix x;
    uint8_t* codes;           // [rows, cols]
    uint8_t* codes_t;         // [cols, rows]
    const float* amax;        // []: the scale is computed from the amax (current scaling), or
    const float* scale;       // []: the given scale (delayed scaling)
    float* staging;           // []: becomes max(staging, max |x|)
    float* scale_inv;         // []
    float* flag;
    static constexpr uint32_t addresses = words(0, 5, 6, 7, 8, 9, 10, 11);
};

struct BlockJob {             // FP8, one fp32 scale per 1x128 or 128x128 block, or one E8M0 scale per 1x32 or 32x32 block
    Matrix x;
    uint8_t* codes;           // [rows, cols]
    void* scale;              // of `codes`; for the layout see BlockScales and ScaleBytes
    uint8_t* codes_t;         // [cols, rows]
    void* scale_t;            // of `codes_t`
    float* flag;
    static constexpr uint32_t addresses = words(0, 5, 6, 7, 8, 9);
};

struct LinesJob {             // max |x| of every row and column, by atomic max: the caller first sets the outputs to 0
    Matrix x;
    float* amax;              // [rows]
    float* amax_t;            // [cols]
    static constexpr uint32_t addresses = words(0, 5, 6);
};

struct RowwiseJob {           // FP8, one scale per row of `codes` and of `codes_t`, computed from the amax of the row
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

struct RhtAmaxJob {           // max |x|, and max |x| after the Hadamard transform of 16 rows of each column
    Matrix x;
    float* out;               // []
    float* out_t;             // [], the word after `out` in memory
    static constexpr uint32_t addresses = words(0, 5, 6);
};

struct Nvfp4Job {             // E2M1 codes, two per byte; one E4M3 scale per 1x16 or 16x16 block; one amax per tensor
    Matrix x;
    uint8_t* codes;           // [rows, cols / 2]
    uint8_t* scale;           // [rows, cols / 16], or [rows / 16, cols / 16]
    const float* amax;        // []
    float* amax_out;          // []: becomes the amax stored with the codes, `amax` or 1.75 times `amax` (four over six)
    uint8_t* codes_t;         // [cols, rows / 2]
    uint8_t* scale_t;         // [cols, rows / 16], or [cols / 16, rows / 16]
    const float* amax_t;      // [], of x.T; after the Hadamard transform if x.T is transformed
    float* amax_t_out;
    float* flag;
    static constexpr uint32_t addresses = words(0, 5, 6, 7, 8, 9, 10, 11, 12, 13);
};

struct AlphaJob {             // alpha, by which an NVFP4 GEMM multiplies its sums
    const float* a_amax;      // [], stored with the operand A
    const float* b_amax;      // []
    float* out;               // []
    static constexpr uint32_t addresses = words(0, 1, 2);
};

struct RoundJob {             // fp32 rounded to bf16; both addresses are multiples of 16
    const float* x;           // [count]
    void* out;                // bf16 [count]
    int64_t count;
    static constexpr uint32_t addresses = words(0, 1);
};

struct PhiloxState {          // random bits of one orientation, by position in the unsharded matrix (reference/fp4.py)
    const int64_t* counter;   // [], number of the microbatch; null: round to nearest
    int64_t row;              // row of the unsharded matrix at which this matrix starts
    int64_t first;            // block of 16 columns of the unsharded matrix at which this matrix starts
    int64_t across;           // blocks of 16 in a row of the unsharded matrix
    uint32_t orientation, seed, tensor;  // rowwise or columnwise; seed and tensor are the Philox key
};

struct CodesJob {             // transpose of codes, one byte or half a byte per code
    Matrix x;                 // [rows, cols] codes, contiguous
    uint8_t* out;             // [cols, rows] codes
    static constexpr uint32_t addresses = words(0, 5);
};

struct DecodeJob {            // codes * scales -> bf16
    const uint8_t* codes;     // [rows, cols], one byte or half a byte per code
    const void* scale;        // [ceil(rows / block_rows), ceil(cols / block_cols)], with any strides
    void* out;                // bf16 [rows, cols]
    int64_t rows, cols, block_rows, block_cols;
    int64_t scale_row_stride, scale_col_stride;  // in elements
    const float* amax;        // [] of an NVFP4 tensor; null: the scale of the tensor is not applied
    static constexpr uint32_t addresses = words(0, 1, 2, 9);
};

struct Int4Job {              // few tokens times int4 weights with one scale per group
    const void* x;            // bf16 [tokens, cols]
    const uint8_t* codes;     // [rows, cols], half a byte per code: stored as code + 8, even columns in the low half
    const float* scale_inv;   // [rows, cols / group]
    const int8_t* zero;       // [rows, cols / group]; null: 0
    void* out;                // [tokens, rows], fp32 if `wide`, else bf16
    int64_t tokens, rows, cols;
    int64_t chunks_log2;      // a group has 32 << chunks_log2 codes
    int64_t wide;
    static constexpr uint32_t addresses = words(0, 1, 2, 3, 4);
};

struct SwizzleJob {           // scale bytes -> layout of a block-scaled GEMM
    const uint8_t* scale;     // [ceil(lines / lines_per_scale), blocks], with any strides
    uint32_t* out;            // [ceil(lines / 128), ceil(blocks / 4), 128] words of 4 blocks
    int64_t lines, blocks, lines_per_scale;
    int64_t line_stride, block_stride;  // in elements
    static constexpr uint32_t addresses = words(0, 1);
};

struct DelayedJob {           // slots of delayed scaling with the same history length and algorithm
    Matrix x;                 // history fp32 [length, slots], updated in place; row 0 is the staging row (delayed_update.cu)
    float* scale;             // [slots]
    const float* reduced;     // [slots]: amaxes of this step, reduced over ranks; may be `staging`
    const float* target;      // [slots]: fp8_max * 2^-margin
    float* staging;           // [slots]: set to 0
    int64_t most_recent;      // 1: amax_compute_algo "most_recent"; 0: "max"
};

struct WireMatrix {           // contribution to a reduce-scatter -> E4M3 codes with one scale per 128 columns
    const void* x;            // [rows, cols], contiguous
    int64_t rows, cols;
    uint8_t* codes;           // [rows, cols]
    float* scale;             // [rows, ceil(cols / 128)], scale_inv
    float min_amax;           // lower bound of the amax
};

struct WireSum {              // sum of the packed contributions of `ranks` ranks
    const uint8_t* codes;     // codes of rank 0 [rows, cols]; the next ranks follow
    int64_t codes_stride;     // from rank to rank, in bytes
    const float* scale;       // scale_inv of rank 0 [rows, ceil(cols / 128)]
    int64_t scale_stride;     // from rank to rank, in elements
    void* out;                // [rows, cols]
    int64_t ranks, rows, cols;
    const uint8_t* own_codes; // codes and scale_inv of rank `own`, which are not read from `codes` and `scale`
    const float* own_scale;
    int64_t own;
    static constexpr uint32_t addresses = words(0, 2, 4, 8, 9);
};

// Producer: the function by which a cast computes the elements from the matrix of the job (producer.cuh). The numbers are those
// of dlp/kernels/cuda_producers.py.
enum class Producer : int64_t { kMatrix, kRmsNorm, kSwiglu, kColumnSums, kActivation, kGate, kLayerNorm };

// Activations act(g), in this order: g * s(g), GELU by tanh, max(g, 0), max(g, 0)^2, s(g), g * s(1.702 g), with
// s(g) = 1 / (1 + exp(-g)) (reference/activations.py).
enum class Act : int64_t { kSilu, kGelu, kRelu, kSrelu, kSigmoid, kQgelu };

struct Source {               // a producer, and its inputs besides the matrix of the job
    Producer producer;
    const float* rstd;        // kRmsNorm, kLayerNorm: [rows]
    const void* weight;       // [cols], fp32 if `wide`, else bf16
    int64_t wide;
    const void* up;           // kSwiglu, kGate: [rows, cols] of the type of the matrix; the matrix is the gate
    int64_t up_stride;
    float* sums;              // kColumnSums: [row tiles, cols], the sum of each column of a tile; kGate: the same, or null
    Act act;                  // kActivation, kGate: the activation
    int64_t slope;            // kGate: 0: act(x) * up; 1: act'(x) * up
    const float* mean;        // kLayerNorm: [rows]
    const void* bias;         // kLayerNorm: [cols], of the type of weight
    static constexpr uint32_t addresses = words(1, 2, 4, 6, 9, 10);
};

struct MatrixJob {            // a matrix; outputs are separate arguments (tile_sums)
    Matrix x;
    static constexpr uint32_t addresses = words(0);
};

struct NormJob {              // RMSNorm of the rows of x
    Matrix x;
    const void* weight;       // [cols], fp32 if `wide`, else bf16
    int64_t wide;
    float* rstd;              // [rows]
    void* y;                  // [rows, cols] of the type of x; null: y is not stored
    float* amax;              // []: max |y|; at most one of y and amax is requested
    const void* residual;     // [rows, cols], rows `residual_stride` apart, added to x first; null: none
    int64_t residual_stride;
    void* sum;                // [rows, cols]: x + residual, rounded
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
    float* dweight;           // [min(rows, kNormParts), cols]: part b sums over rows b, b + kNormParts, ...
    const void* add;          // [rows, cols], rows `add_stride` apart, added to dx; null: none
    int64_t add_stride;
    static constexpr uint32_t addresses = words(0, 5, 7, 8, 10, 11, 12);
};

struct LayerNormJob {         // LayerNorm of the rows of x
    Matrix x;
    const void *weight, *bias;  // [cols], fp32 if `wide`, else bf16
    int64_t wide;
    float *mean, *rstd;       // [rows]
    void* y;                  // [rows, cols] as x; null: y is not stored
    float* amax;              // []: max |y|; at most one of y and amax is requested
    static constexpr uint32_t addresses = words(0, 5, 6, 8, 9, 10, 11);
};

struct LayerNormGradJob {
    Matrix x;
    const void* weight;       // [cols], fp32 if `wide`, else bf16
    int64_t wide;
    const float *mean, *rstd; // [rows]
    const void* dy;           // [rows, cols] as x, rows `dy_stride` apart
    int64_t dy_stride;
    void* dx;                 // [rows, cols] as x
    float *dweight, *dbias;   // [min(rows, kNormParts), cols], parts as in NormGradJob
    static constexpr uint32_t addresses = words(0, 5, 7, 8, 9, 11, 12, 13);
};

struct SwigluJob {            // h = silu(gate) * up
    Matrix gate;
    const void* up;           // rows `up_stride` apart
    int64_t up_stride;
    void* h;                  // [rows, cols] of the type of gate; null: `amax` is requested
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
    void* dup;                // [rows, cols]
    float* amax;              // [2]: max |dgate|, max |dup|, in place of dgate and dup. In a GateGradsJob all three are null
    static constexpr uint32_t addresses = words(0, 5, 7, 9, 10, 11);
};

template <class Job>
struct GateGradsJob {         // casts of both gradients of a SwiGLU, which are not stored; x of the jobs gives only the sizes
    SwigluGradJob inputs;
    Job dgate, dup;
};

struct ActivationJob {        // act(x), or with dy: dy * act'(x)
    Matrix x;
    const void* dy;           // rows `dy_stride` apart; null: forward
    int64_t dy_stride;
    void* out;                // [rows, cols]; null: `amax` is requested
    float* amax;              // []: max |out|
    static constexpr uint32_t addresses = words(0, 5, 7, 8);
};

struct LossJob {
    Matrix x;
    const int64_t* target;    // [rows]: a column, or a number that is no column
    float* log_sum;           // [rows]: log(sum(exp(x)))
    float* picked;            // [rows]: x at the target; 0 if the target is no column
};

struct LossGradJob {          // dx = (exp(x - log_sum) - one_hot(target)) * weight
    Matrix x;
    const int64_t* target;    // [rows]
    const float* log_sum;     // [rows]
    const float* weight;      // [rows]: d(loss) / d(loss of the row)
    void* dx;                 // [rows, cols] as x
};

template <class Job>
struct Work {                 // the jobs of a launch
    Job one;                  // used if `many` is null
    const Job* many;          // table of jobs in device memory
    int64_t count;            // jobs in the table
    int64_t items;            // pieces of work (tiles, chunks) in all jobs together
};

struct BlockGemmJob {         // D = A @ B.T, contraction last; strides are elements between lines
    const uint8_t *a, *b;     // [rows, contraction], [cols, contraction]
    void* d;                  // [rows, cols]
    const float *a_scale;     // [contraction / 128, rows padded to a multiple of 4]
    const float *b_scale;     // [cols / 128, contraction / 128 padded to a multiple of 4]
    const void* bias;         // [cols] in the type of D, or nullptr
    int64_t rows, cols, contraction;
    int64_t a_stride, b_stride, d_stride;
    int64_t a_scale_lines, a_scale_stride, b_scale_lines, b_scale_stride;  // a_scale_lines: the padded number of rows
    int64_t accumulate;       // 1: D += the product, in fp32; 0: D = the product
    static constexpr uint32_t addresses = words(0, 1, 2, 3, 4, 5);
};

constexpr int kSumTerms = 4;  // largest number of products in a GemmSumJob

struct GemmTerm {             // scaled product of FP8 codes A @ B.T, contraction last; strides are bytes between lines
    const uint8_t *a, *b;     // [rows, contraction], [cols, contraction]
    const float *a_scale, *b_scale;  // [] scale_inv
    int64_t contraction, a_stride, b_stride;
    static constexpr uint32_t addresses = words(0, 1, 2, 3);
};

struct GemmSumJob {           // D = the sum of `terms` products
    void* d;                  // [rows, cols]
    int64_t terms, rows, cols, d_stride;
    static constexpr uint32_t addresses = words(0);
};

constexpr int kSlotRanks = 32;      // largest number of ranks that map one slot (transport.cu)
constexpr int64_t kSlotHeader = 512;  // bytes of a slot before the payload
constexpr int kAgreed = 8;          // largest number of tensors in an AgreeJob

struct Waiting {              // time limit of a wait, and the report after the time limit (transport.cu)
    int64_t patience;         // time limit in milliseconds
    uint32_t* report;         // [7] words in host memory: 1, rank, peer, kind of wait, expected value, value found, use
    uint32_t* said;           // [] on the device, 0 at first: the thread that sets it to 1 writes the report
    int64_t rank, world, use;
    static constexpr uint32_t addresses = 0;
};

struct SlotBases {            // address of a slot on each rank of a group (transport.cu)
    int64_t base[kSlotRanks];
    int64_t rank, world;
    static constexpr uint32_t addresses = 0;
};

struct AgreeJob {             // maxima over ranks of non-negative fp32 values
    const float* from[kAgreed];
    float* to[kAgreed];
    int64_t length[kAgreed];
    int64_t count, capacity;  // number of tensors; capacity of the slot in values per rank
    static constexpr uint32_t addresses = (1u << 2 * kAgreed) - 1;
};

struct ScaleRule {            // rule for a scale from an amax (scale_from_amax, fp8.cuh)
    float largest;            // largest finite value of the element type: 448 or 57344
    float epsilon;            // lower bound of the amax
    float overflow;           // value of the scale if largest / amax is Inf
    int32_t power_of_two;     // 1: round the scale down to a power of two
};

enum class Input : int32_t { kBf16, kFp32 };
enum class Code : int32_t { kE4m3, kE5m2 };
enum class Encoding : int32_t { kE4m3Fp32, kE5m2Fp32, kE4m3E8m0, kE5m2E8m0, kE2m1E4m3 };  // type of codes, type of scales

using Stream = uintptr_t;               // a cudaStream_t

constexpr int64_t kAmaxChunk = 16384;   // elements of a piece of work of `amax`
constexpr int64_t kTile = 128;          // rows and columns of a tile, the piece of work of kernels over tiles
constexpr int kChecksums = 128;         // largest number of tensors of a launch of `checksums`
constexpr int64_t kNormParts = 512;     // partial sums of the weight gradients of norms, one per block of the backward kernel

using ByteRange = std::array<int64_t, 2>;  // address and number of bytes

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
void cast_nvfp4_1d(const Work<Nvfp4Job>& work, Input input, bool rht, bool four_over_six, const PhiloxState& philox,
                   const PhiloxState& philox_t, const Source& source, Stream stream);
void cast_nvfp4_2d(const Work<Nvfp4Job>& work, Input input, bool four_over_six, Stream stream);
void transpose_bytes(const Work<CodesJob>& work, Stream stream);
void transpose_nibbles(const Work<CodesJob>& work, Stream stream);
void decode(const DecodeJob& job, Encoding encoding, Stream stream);
void int4_gemv(const Int4Job& job, Stream stream);
void nvfp4_alpha(const AlphaJob& job, Stream stream);
void round_to_bf16(const RoundJob& job, Stream stream);
void transpose_words(uintptr_t from, uintptr_t to, int64_t rows, int64_t cols, Stream stream);  // words of 4 bytes
void set_zero(uintptr_t at, int64_t bytes, Stream stream);
// Sets `count` fp32 to 0 by a kernel of one block; a next kernel that is launched with kEarly (launch.cuh) may begin at once.
void few_zeros(uintptr_t at, int64_t count, Stream stream);
void gemm_fp8_blocks(const BlockGemmJob& job, Code a_code, Input out, Stream stream);
void gemm_fp8_sum(const GemmSumJob& job, const GemmTerm* terms, Code a_code, Input out, Stream stream);
void swizzle_scales(const SwizzleJob& job, Stream stream);
void delayed_update(const Work<DelayedJob>& work, Stream stream);
void sum_in_order(const void* from, const void* own, int64_t index, void* to, int64_t contributions, int64_t count, Input input,
                  Input output, float divisor, Stream stream);
void sum_by_tree(const float* from, void* to, int64_t parts, int64_t count, Input output, Stream stream);
// Adds the checksum of each range of bytes to `out` [count]. Up to kChecksums ranges take one launch.
void checksums(const ByteRange* ranges, int64_t count, uint64_t* out, Stream stream);
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
void release_use(const SlotBases& slots, Stream stream);
void agree(const uint64_t* slots, const AgreeJob& job, const Waiting& waiting, Stream stream);
void copy_part(uintptr_t from, int64_t from_pitch, uintptr_t to, int64_t to_pitch, int64_t width, int64_t height, Stream stream);
int64_t new_event();
void mark(int64_t event, Stream stream);
void await_mark(int64_t event, Stream stream);

}  // namespace dlp
