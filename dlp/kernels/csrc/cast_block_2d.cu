// FP8 with one fp32 scale per 128x128 tile, for weights (DeepSeek-V3, arXiv 2412.19437), both orientations in one read.
// Both orientations have the same codes, and the scales of the second orientation are the transpose. Bitwise equal to
// reference.fp8.cast_fp8_block with a block of (128, 128). Any rows and cols: missing elements count as 0.
//
// Grid: one tile, and thus one scale, per block of 256 threads (tile.cuh); the amax is reduced over the warps through eight
// words of shared memory. Bound by memory: 4 bytes per element of bf16, 6 of fp32.
#include "block_scales.cuh"
#include "transpose.cuh"

namespace dlp {
namespace {

template <class T>
constexpr size_t kShared = TileLoader<T, BlockJob>::kBytes + ColumnWriter::kBytes + kTileWarps * sizeof(uint32_t);

// Returns the amax of the tile, in all threads. Contains one barrier.
template <class T>
__device__ float tile_amax(const Octet<T> (&patch)[kPatch], uint32_t* scratch) {
    Maxima<T> maxima;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) maxima.take(patch[i]);
    const uint32_t own = __reduce_max_sync(kAllLanes, maxima.largest());
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = own;
    __syncthreads();
    uint32_t bits = 0;
#pragma unroll
    for (int warp = 0; warp < kTileWarps; ++warp) bits = max(bits, scratch[warp]);
    return __uint_as_float(bits);
}

template <class T>
__device__ void store_scale(const Tile<T, BlockJob>& tile, float scale_inv, bool gemm_layout) {
    if (tile.rows() == 0 || tile.cols() == 0) return;
    const int64_t down = (tile.rows() + kTile - 1) / kTile, across = (tile.cols() + kTile - 1) / kTile;
    const BlockScales scales{static_cast<float*>(tile.job->scale), down, across, gemm_layout};
    const BlockScales scales_t{static_cast<float*>(tile.job->scale_t), across, down, gemm_layout};
    if (scales.to) scales.store_tile(tile.tile_row, tile.tile_col, scale_inv);
    if (scales_t.to) scales_t.store_tile(tile.tile_col, tile.tile_row, scale_inv);
}

template <class T, class F8>
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm<T>)
    cast_block_2d_kernel(const __grid_constant__ Work<BlockJob> work, const ScaleRule rule, const bool gemm_layout) {
    TileLoader<T, BlockJob> loader(shared_memory());
    ColumnWriter columns(shared_memory() + TileLoader<T, BlockJob>::kBytes);
    uint32_t* scratch = reinterpret_cast<uint32_t*>(shared_memory() + TileLoader<T, BlockJob>::kBytes + ColumnWriter::kBytes);

    const auto tile = loader.start(work, blockIdx.x);
    Octet<T> patch[kPatch];
    loader.finish(tile, patch);
    flag_not_finite(patch, *tile.job);
    const float scale = scale_from_amax(tile_amax(patch, scratch), rule);
    if (threadIdx.x == 0) store_scale(tile, __frcp_rn(scale), gemm_layout);
    uint2 codes[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) codes[i] = encode_row<F8>(patch[i], scale);
    write_codes(codes, tile, columns);
}

}  // namespace

void cast_block_2d(const Work<BlockJob>& work, Input input, Code code, const ScaleRule& rule, bool gemm_layout,
                   Stream stream) {
    if (work.items == 0) return;
    with_types(input, code, [&](auto element, auto f8) {
        using T = decltype(element);
        constexpr auto kernel = cast_block_2d_kernel<T, decltype(f8)>;
        launch_each<kernel>(work.items, kTileThreads, kShared<T>, stream, work, rule, gemm_layout);
    });
}

}  // namespace dlp
