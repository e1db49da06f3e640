// FP8 cast of a tile in registers with one fp32 scale per 128 elements of the contraction, in both orientations: the 128 rows
// and the 128 columns of a tile are 256 blocks, one per thread.
//
//   1. the warps store amaxes of rows and of columns in shared memory
//   2. thread t computes the scale of row t, or of column t - 128, and stores the inverse
//   3. each thread reads the scales of the eight rows and of the eight columns of its patch, and encodes
//
// So each scale is computed once; without shared memory, 16 threads would compute the same scale.
// Shared memory: BlockLines, 5,632 bytes.
#pragma once

#include "block_scales.cuh"
#include "line_maxima.cuh"
#include "two_scales.cuh"

namespace dlp {

struct BlockLines {
    alignas(16) uint32_t row_max[kTile];
    alignas(16) ColumnMaxima column_max;
    alignas(16) float scale[2 * kTile];  // rows, then columns
};

// Stores the maxima of this thread's patch, combined with the maxima of neighbouring patches, in shared memory.
template <class T>
__device__ void post_maxima(const Octet<T> (&patch)[kPatch], BlockLines& shared) {
    using Rows = RowMaxima<T, kAcross>;
    Maxima<T> columns;
    uint32_t word[Rows::kWords];
#pragma unroll
    for (int i = 0; i < Rows::kWords; ++i) {  // rows and columns in one loop, so that magnitudes do not stay in registers
        word[i] = PatchRows<T>::word(patch, i);
#pragma unroll
        for (int row = i * Rows::kRows; row < (i + 1) * Rows::kRows; ++row) columns.take(patch[row]);
    }
    const Rows rows(word);
#pragma unroll
    for (int i = 0; i < Rows::kRows; ++i) shared.row_max[kPatch * patch_row() + rows.first() + i] = rows[i];
    post_columns(columns, shared.column_max);
}

// Thread t: the amax of row t or of column t - 128 of the tile.
__device__ inline float posted_amax(const BlockLines& shared) {
    if (threadIdx.x < kTile) return __uint_as_float(shared.row_max[threadIdx.x]);
    uint32_t bits = 0;
#pragma unroll
    for (int warp = 0; warp < kTileWarps; ++warp) bits = max(bits, shared.column_max[warp][threadIdx.x - kTile]);
    return __uint_as_float(bits);
}

// Thread t stores the scale_inv of row t or of column t - 128.
template <class T>
__device__ void store_scale(const Tile<T, BlockJob>& tile, float scale_inv, bool gemm_layout) {
    const int64_t row_blocks = (tile.rows() + kTile - 1) / kTile, column_blocks = (tile.cols() + kTile - 1) / kTile;
    if (threadIdx.x < kTile) {
        const BlockScales to{static_cast<float*>(tile.job->scale), tile.rows(), column_blocks, gemm_layout};
        if (to.to) to.store_row(tile.row() + threadIdx.x, tile.tile_col, scale_inv);
    } else {
        const BlockScales to{static_cast<float*>(tile.job->scale_t), tile.cols(), row_blocks, gemm_layout};
        if (to.to) to.store_row(tile.col() + threadIdx.x - kTile, tile.tile_row, scale_inv);
    }
}

// Stores codes and scales of the requested orientations. Contains barriers; the caller must put another barrier between
// two calls.
template <class F8, class T>
__device__ void cast_block_lines(const Octet<T> (&patch)[kPatch], const Tile<T, BlockJob>& tile, const ScaleRule& rule,
                                 bool gemm_layout, ColumnWriter& columns, BlockLines& shared) {
    flag_not_finite(patch, *tile.job);
    post_maxima(patch, shared);
    __syncthreads();
    const float scale = scale_from_amax(posted_amax(shared), rule);
    shared.scale[threadIdx.x] = scale;
    store_scale(tile, __frcp_rn(scale), gemm_layout);
    __syncthreads();
    write_scaled<F8>(patch, shared.scale, tile, columns);
}

}  // namespace dlp
