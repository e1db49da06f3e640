// Both gradients of a SwiGLU of bf16, cast to FP8 in both orientations from one read of dh, gate and up [rows, cols]:
//
//   dgate = dh * up * s * (1 + gate * (1 - s)),   dup = dh * gate * s,   s = 1 / (1 + exp(-gate));   rounded to bf16, then cast
//
// Memory traffic is 10 bytes per element (6 read, 4 written); a kernel that stores both gradients, and two casts, would need
// 18. The codes are bitwise equal to those of swiglu_backward followed by cast_transpose.cu or cast_block_1d.cu.
//
// Grid: one 128x128 tile per block of 256 threads, which computes the tile of dgate in registers and keeps the tile of
// dup in shared memory, in place of up. Shared memory: transposed codes 16,384 bytes, dup 32,768, then 5,632 for block scales
// (block_lines.cuh), or 64 for one scale per tensor. Two blocks per SM: with three, registers would spill.
//
// Input: rows and cols must be multiples of 128, and rows must be aligned to 16 bytes. For other matrices gate_grads.py runs
// two separate casts.
#include "block_lines.cuh"
#include "transpose.cuh"

namespace dlp {
namespace {

using T = __nv_bfloat16;
using DupStage = LaneCopies<T>;
constexpr int kBlocksPerSm = 2;

template <class Job>
__device__ Tile<T, Job> tile_of(const Job& job, uint32_t number) {
    const uint32_t wide = uint32_t(job.x.cols) / kTile;
    return {&job, number / wide, number % wide, true, true};
}

// Computes both gradients of this thread's patch: dgate in `gate`, and dup in shared memory, in place of the copy of up.
template <class Tile>
__device__ void read_gradients(const SwigluGradJob& from, const Tile& tile, Octet<T> (&gate)[kPatch], const DupStage& dup_stage) {
    dup_stage.start(static_cast<const T*>(from.up) + tile.row() * from.up_stride + tile.col(), from.up_stride);
    const int64_t row = tile.row() + kPatch * patch_row(), col = tile.col() + kPatch * patch_column();
    const T* gates = static_cast<const T*>(from.gate.data) + row * from.gate.stride + col;
    const T* dhs = static_cast<const T*>(from.dh) + row * from.dh_stride + col;
    Octet<T> dh[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i)
        gate[i] = load_octet(gates + i * from.gate.stride), dh[i] = load_octet(dhs + i * from.dh_stride);
    dup_stage.wait();
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        Octet<T> up = dup_stage.get(i);
        to_gradients(gate[i], up, dh[i]);
        dup_stage.put(i, up);
        __syncwarp();  // prevents the compiler from interleaving rows, which would exceed the registers
    }
}

template <class F8>
__global__ void __launch_bounds__(kTileThreads, kBlocksPerSm)
    block_kernel(const __grid_constant__ GateGradsJob<BlockJob> job, const ScaleRule rule, const bool gemm_layout) {
    ColumnWriter columns(shared_memory());
    const DupStage dup_stage(shared_memory() + ColumnWriter::kBytes);
    BlockLines& shared = *reinterpret_cast<BlockLines*>(shared_memory() + ColumnWriter::kBytes + DupStage::kBytes);
    auto tile = tile_of(job.dgate, blockIdx.x);
    Octet<T> patch[kPatch];
    read_gradients(job.inputs, tile, patch, dup_stage);
    cast_block_lines<F8>(patch, tile, rule, gemm_layout, columns, shared);
    tile.job = &job.dup;
    dup_stage.read(patch);
    __syncthreads();
    cast_block_lines<F8>(patch, tile, rule, gemm_layout, columns, shared);
}

template <class F8, bool kObserve>
__global__ void __launch_bounds__(kTileThreads, kBlocksPerSm)
    tensor_kernel(const __grid_constant__ GateGradsJob<TensorJob> job, const ScaleRule rule) {
    ColumnWriter columns(shared_memory());
    const DupStage dup_stage(shared_memory() + ColumnWriter::kBytes);
    uint32_t* scratch = reinterpret_cast<uint32_t*>(shared_memory() + ColumnWriter::kBytes + DupStage::kBytes);
    auto tile = tile_of(job.dgate, blockIdx.x);
    Octet<T> patch[kPatch];
    read_gradients(job.inputs, tile, patch, dup_stage);
    const auto cast = [&](const TensorJob& job, uint32_t* scratch) {
        tile.job = &job;
        const float scale = scale_of(job, scale_source(job), rule);
        if (blockIdx.x == 0 && threadIdx.x == 0) *job.scale_inv = __frcp_rn(scale);
        cast_by_scale<F8, kObserve>(job, tile, patch, scale, columns, scratch);
    };
    cast(job.dgate, scratch);
    dup_stage.read(patch);
    __syncthreads();
    cast(job.dup, scratch + kTileWarps);
}

int64_t tiles_of(const Matrix& x) {
    DLP_CHECK_EQ(x.rows % kTile + x.cols % kTile, 0);
    return x.rows / kTile * (x.cols / kTile);
}

}  // namespace

// `observe`: true if both jobs have `staging`, false if neither job has `staging`.
void cast_gate_grads(const GateGradsJob<TensorJob>& job, Code code, const ScaleRule& rule, bool observe, Stream stream) {
    constexpr size_t shared = ColumnWriter::kBytes + DupStage::kBytes + 2 * kTileWarps * sizeof(uint32_t);
    with_code(code, [&](auto f8) {
        using F8 = decltype(f8);
        const int64_t tiles = tiles_of(job.inputs.gate);
        if (observe) return launch_each<tensor_kernel<F8, true>>(tiles, kTileThreads, shared, stream, job, rule);
        launch_each<tensor_kernel<F8, false>>(tiles, kTileThreads, shared, stream, job, rule);
    });
}

void cast_gate_grads(const GateGradsJob<BlockJob>& job, Code code, const ScaleRule& rule, bool gemm_layout, Stream stream) {
    constexpr size_t shared = ColumnWriter::kBytes + DupStage::kBytes + sizeof(BlockLines);
    with_code(code, [&](auto f8) {
        launch_each<block_kernel<decltype(f8)>>(tiles_of(job.inputs.gate), kTileThreads, shared, stream, job, rule, gemm_layout);
    });
}

}  // namespace dlp
