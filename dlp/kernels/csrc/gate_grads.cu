// Both gradients of a SwiGLU of bf16, cast to FP8 in both orientations from one read of dh, gate and up: 10 bytes an element,
// where a kernel that stores them and two casts move 18. A block makes one tile of each; that of dup waits in shared memory.
// Matrices are whole tiles, in rows that are aligned to 16 bytes.
#include "block_lines.cuh"
#include "transpose.cuh"

namespace dlp {
namespace {

using T = __nv_bfloat16;
using Kept = LaneCopies<T>;
constexpr int kBlocks = 2;  // of a multiprocessor; three would spill

template <class Job>
__device__ Tile<T, Job> tile_of(const Job& job, uint32_t number) {
    const uint32_t wide = uint32_t(job.x.cols) / kTile;
    return {&job, number / wide, number % wide, true, true};
}

// The patch of dgate; that of dup is kept where up has been copied to.
template <class Tile>
__device__ void read_gradients(const SwigluGradJob& from, const Tile& tile, Octet<T> (&gate)[kPatch], const Kept& of_up) {
    of_up.start(static_cast<const T*>(from.up) + tile.row() * from.up_stride + tile.col(), from.up_stride);
    const int64_t row = tile.row() + kPatch * patch_row(), col = tile.col() + kPatch * patch_column();
    const T* gates = static_cast<const T*>(from.gate.data) + row * from.gate.stride + col;
    const T* dhs = static_cast<const T*>(from.dh) + row * from.dh_stride + col;
    Octet<T> dh[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i)
        gate[i] = load_octet(gates + i * from.gate.stride), dh[i] = load_octet(dhs + i * from.dh_stride);
    of_up.wait();
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        Octet<T> up = of_up.get(i);
        to_gradients(gate[i], up, dh[i]);
        of_up.put(i, up);
        __syncwarp();  // one row after the other: all at once would not fit into registers
    }
}

template <class F8>
__global__ void __launch_bounds__(kTileThreads, kBlocks)
    block_kernel(const __grid_constant__ GateGradsJob<BlockJob> job, const ScaleRule rule, const bool gemm_layout) {
    ColumnWriter columns(shared_memory());
    const Kept of_up(shared_memory() + ColumnWriter::kBytes);
    BlockLines& shared = *reinterpret_cast<BlockLines*>(shared_memory() + ColumnWriter::kBytes + Kept::kBytes);
    auto tile = tile_of(job.of_gate, blockIdx.x);
    Octet<T> patch[kPatch];
    read_gradients(job.from, tile, patch, of_up);
    cast_block_lines<F8>(patch, tile, rule, gemm_layout, columns, shared);
    tile.job = &job.of_up;
    of_up.read(patch);
    __syncthreads();
    cast_block_lines<F8>(patch, tile, rule, gemm_layout, columns, shared);
}

template <class F8, bool kObserve>
__global__ void __launch_bounds__(kTileThreads, kBlocks)
    tensor_kernel(const __grid_constant__ GateGradsJob<TensorJob> job, const ScaleRule rule) {
    ColumnWriter columns(shared_memory());
    const Kept of_up(shared_memory() + ColumnWriter::kBytes);
    uint32_t* scratch = reinterpret_cast<uint32_t*>(shared_memory() + ColumnWriter::kBytes + Kept::kBytes);
    auto tile = tile_of(job.of_gate, blockIdx.x);
    Octet<T> patch[kPatch];
    read_gradients(job.from, tile, patch, of_up);
    const auto cast = [&](const TensorJob& job, uint32_t* scratch) {
        tile.job = &job;
        const float scale = scale_of(job, scale_source(job), rule);
        if (blockIdx.x == 0 && threadIdx.x == 0) *job.scale_inv = __frcp_rn(scale);
        cast_by_scale<F8, kObserve>(job, tile, patch, scale, columns, scratch);
    };
    cast(job.of_gate, scratch);
    of_up.read(patch);
    __syncthreads();
    cast(job.of_up, scratch + kTileWarps);
}

int64_t tiles_of(const Matrix& x) {
    DLP_CHECK_EQ(x.rows % kTile + x.cols % kTile, 0);
    return x.rows / kTile * (x.cols / kTile);
}

}  // namespace

// `observe`: both have `staging`.
void cast_gate_grads(const GateGradsJob<TensorJob>& job, Code code, const ScaleRule& rule, bool observe, Stream stream) {
    constexpr size_t shared = ColumnWriter::kBytes + Kept::kBytes + 2 * kTileWarps * sizeof(uint32_t);
    with_code(code, [&](auto f8) {
        using F8 = decltype(f8);
        const int64_t tiles = tiles_of(job.from.gate);
        if (observe) return launch_each<tensor_kernel<F8, true>>(tiles, kTileThreads, shared, stream, job, rule);
        launch_each<tensor_kernel<F8, false>>(tiles, kTileThreads, shared, stream, job, rule);
    });
}

void cast_gate_grads(const GateGradsJob<BlockJob>& job, Code code, const ScaleRule& rule, bool gemm_layout, Stream stream) {
    constexpr size_t shared = ColumnWriter::kBytes + Kept::kBytes + sizeof(BlockLines);
    with_code(code, [&](auto f8) {
        launch_each<block_kernel<decltype(f8)>>(tiles_of(job.from.gate), kTileThreads, shared, stream, job, rule, gemm_layout);
    });
}

}  // namespace dlp
