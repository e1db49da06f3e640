// FP8 with a scale a row, and a scale a column in the transposed copy: the amaxes of all lines in one read, and after
// whatever ranks have to agree on the casts of both orientations in one more.
#include "line_maxima.cuh"
#include "two_scales.cuh"

namespace dlp {
namespace {

template <class T, Producer kProducer>
constexpr size_t kAmaxShared = Tiles<T, LinesJob, kProducer>::kBytes + sizeof(ColumnMaxima);

// A tile's maxima: rows by shuffles, columns through shared memory, then at most one atomic a line.
template <class T, Producer kProducer>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T, kProducer>)
    amax_lines_kernel(const __grid_constant__ Work<LinesJob> work, const __grid_constant__ Source source) {
    using Rows = RowMaxima<T, kAcross>;
    using Input = Tiles<T, LinesJob, kProducer>;
    Input tiles(work, shared_memory(), source);
    ColumnMaxima& column_max = *reinterpret_cast<ColumnMaxima*>(shared_memory() + Input::kBytes);

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
        if (tile.job->amax && patch_column() % (kAcross / Rows::kWords) == 0)  // of lanes that end with the same rows, one
#pragma unroll
            for (int i = 0; i < Rows::kRows; ++i)
                if (row + i < tile.rows()) raise(tile.job->amax + row + i, rows[i]);
        post_columns(columns, column_max);
        __syncthreads();
        if (tile.job->amax_t && threadIdx.x < kTile && tile.col() + threadIdx.x < tile.cols()) {
            uint32_t bits = 0;
#pragma unroll
            for (int warp = 0; warp < kTileWarps; ++warp) bits = max(bits, column_max[warp][threadIdx.x]);
            raise(tile.job->amax_t + tile.col() + threadIdx.x, bits);
        }
        __syncthreads();
    }
}

template <class T, Producer kProducer>
constexpr size_t kCastShared = Incoming<T, RowwiseJob, kProducer>::kBytes + ColumnWriter::kBytes + 2 * kTile * sizeof(float);

// The scale of row t or column t - 128 of the tile; the first tile along a line writes its inverse.
template <class T>
__device__ float line_scale(const Tile<T, RowwiseJob>& tile, const ScaleRule& rule) {
    const bool is_row = threadIdx.x < kTile;
    const int64_t line = is_row ? tile.row() + threadIdx.x : tile.col() + threadIdx.x - kTile;
    const float* amax = is_row ? tile.job->amax : tile.job->amax_t;
    if (!amax || line >= (is_row ? tile.rows() : tile.cols())) return 1.0f;
    const float scale = scale_from_amax(amax[line], rule);
    float* out = is_row ? tile.job->scale_inv : tile.job->scale_inv_t;
    if ((is_row ? tile.across : tile.down) == 0) out[line] = __frcp_rn(scale);
    return scale;
}

template <class T, class F8, Producer kProducer>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T, kProducer>)
    cast_rowwise_kernel(const __grid_constant__ Work<RowwiseJob> work, const __grid_constant__ Source source,
                        const ScaleRule rule) {
    using Input = Incoming<T, RowwiseJob, kProducer>;
    Input incoming(shared_memory(), source);
    ColumnWriter columns(shared_memory() + Input::kBytes);
    float* scale = reinterpret_cast<float*>(shared_memory() + Input::kBytes + ColumnWriter::kBytes);

    const auto tile = incoming.start(work, blockIdx.x);
    scale[threadIdx.x] = line_scale(tile, rule);
    Octet<T> patch[kPatch];
    incoming.finish(tile, patch);
    tell_not_finite(patch, *tile.job);
    __syncthreads();
    write_scaled<F8>(patch, scale, tile, columns);
}

}  // namespace

// Amaxes are raised: what they point to is set to 0 before.
void amax_lines(const Work<LinesJob>& work, Input input, const Source& source, Stream stream) {
    if (work.items == 0) return;
    constexpr auto kBeside = Producer::kBeside;
    with_source<Producer::kRmsNorm, Producer::kSwiglu, Producer::kActivation, kBeside>(input, source, [&](auto element, auto producer) {
        using T = decltype(element);
        constexpr size_t shared = kAmaxShared<T, producer>;
        launch_persistent<amax_lines_kernel<T, producer>>(work.items, kTileThreads, shared, stream, work, source);
    });
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
