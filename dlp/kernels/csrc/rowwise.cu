// FP8 with one fp32 scale per row, and one scale per column in the transposed copy. Two kernels; ranks may agree on
// amaxes between them:
//
//   amax_lines     x [rows, cols] -> amax[row] = max |x[row, :]|, amax_t[col] = max |x[:, col]|
//   cast_rowwise   codes [rows, cols], scale_inv [rows], codes_t [cols, rows], scale_inv_t [cols], by scale_from_amax
//
// Bitwise equal to reference.fp8.amax_lines and cast_fp8_rowwise_both. Both kernels work on 128x128 tiles (tile.cuh):
// amax_lines in persistent blocks with at most one atomic per line and tile, cast_rowwise with one tile per block. Bound by
// memory: 2 and 4 bytes per element of bf16.
#include "line_maxima.cuh"
#include "two_scales.cuh"

namespace dlp {
namespace {

template <class T, Producer kProducer>
constexpr size_t kAmaxShared = Tiles<T, LinesJob, kProducer>::kBytes + sizeof(ColumnMaxima);

// Maxima of a tile: rows by shuffles, columns through shared memory, then at most one atomic operation per line.
template <class T, Producer kProducer>
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm<T, kProducer>)
    amax_lines_kernel(const __grid_constant__ Work<LinesJob> work, const __grid_constant__ Source source) {
    using Rows = RowMaxima<T, kAcross>;
    using Loader = Tiles<T, LinesJob, kProducer>;
    Loader tiles(work, shared_memory(), source);
    ColumnMaxima& column_max = *reinterpret_cast<ColumnMaxima*>(shared_memory() + Loader::kBytes);

    Tile<T, LinesJob> tile;
    Octet<T> patch[kPatch];
    while (tiles.next(tile, patch)) {
        Maxima<T> columns;
        uint32_t word[Rows::kWords];
#pragma unroll
        for (int i = 0; i < Rows::kWords; ++i) word[i] = PatchRows<T>::word(patch, i);
#pragma unroll
        for (int i = 0; i < kPatch; ++i) columns.take(patch[i]);
        const Rows rows(word);
        const int64_t row = tile.row() + kPatch * patch_row() + rows.first();
        if (tile.job->amax && patch_column() % (kAcross / Rows::kWords) == 0)  // one of the lanes that have the same rows
#pragma unroll
            for (int i = 0; i < Rows::kRows; ++i)
                if (row + i < tile.rows()) atomic_max(tile.job->amax + row + i, rows[i]);
        post_columns(columns, column_max);
        __syncthreads();
        if (tile.job->amax_t && threadIdx.x < kTile && tile.col() + threadIdx.x < tile.cols()) {
            uint32_t bits = 0;
#pragma unroll
            for (int warp = 0; warp < kTileWarps; ++warp) bits = max(bits, column_max[warp][threadIdx.x]);
            atomic_max(tile.job->amax_t + tile.col() + threadIdx.x, bits);
        }
        __syncthreads();
    }
}

template <class T, Producer kProducer>
constexpr size_t kCastShared = TileLoader<T, RowwiseJob, kProducer>::kBytes + ColumnWriter::kBytes + 2 * kTile * sizeof(float);

// Returns, in thread t, the scale of row t or of column t - 128 of the tile. The first tile of a row (column) of tiles stores
// the inverse.
template <class T>
__device__ float line_scale(const Tile<T, RowwiseJob>& tile, const ScaleRule& rule) {
    const bool is_row = threadIdx.x < kTile;
    const int64_t line = is_row ? tile.row() + threadIdx.x : tile.col() + threadIdx.x - kTile;
    const float* amax = is_row ? tile.job->amax : tile.job->amax_t;
    if (!amax || line >= (is_row ? tile.rows() : tile.cols())) return 1.0f;
    const float scale = scale_from_amax(amax[line], rule);
    float* out = is_row ? tile.job->scale_inv : tile.job->scale_inv_t;
    if ((is_row ? tile.tile_col : tile.tile_row) == 0) out[line] = __frcp_rn(scale);
    return scale;
}

template <class T, class F8, Producer kProducer>
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm<T, kProducer>)
    cast_rowwise_kernel(const __grid_constant__ Work<RowwiseJob> work, const __grid_constant__ Source source,
                        const ScaleRule rule) {
    using Loader = TileLoader<T, RowwiseJob, kProducer>;
    Loader loader(shared_memory(), source);
    ColumnWriter columns(shared_memory() + Loader::kBytes);
    float* scale = reinterpret_cast<float*>(shared_memory() + Loader::kBytes + ColumnWriter::kBytes);

    const auto tile = loader.start(work, blockIdx.x);
    scale[threadIdx.x] = line_scale(tile, rule);
    Octet<T> patch[kPatch];
    loader.finish(tile, patch);
    flag_not_finite(patch, *tile.job);
    __syncthreads();
    write_scaled<F8>(patch, scale, tile, columns);
}

}  // namespace

// The caller must first set both vectors of amaxes to 0.
void amax_lines(const Work<LinesJob>& work, Input input, const Source& source, Stream stream) {
    if (work.items == 0) return;
    const auto run = [&](auto element, auto producer) {
        using T = decltype(element);
        constexpr size_t shared = kAmaxShared<T, producer>;
        launch_persistent<amax_lines_kernel<T, producer>>(work.items, kTileThreads, shared, stream, work, source);
    };
    with_source<Producer::kRmsNorm, Producer::kLayerNorm, Producer::kSwiglu, Producer::kActivation, Producer::kGate>(
        input, source, run);
}

void cast_rowwise(const Work<RowwiseJob>& work, Input input, Code code, const ScaleRule& rule, const Source& source,
                  Stream stream) {
    if (work.items == 0) return;
    with_source(input, code, source, [&](auto element, auto f8, auto producer) {
        using T = decltype(element);
        constexpr auto kernel = cast_rowwise_kernel<T, decltype(f8), producer>;
        constexpr size_t shared = kCastShared<T, producer>;
        launch_each<kernel>(work.items, kTileThreads, shared, stream, work, source, rule);
    });
}

}  // namespace dlp
