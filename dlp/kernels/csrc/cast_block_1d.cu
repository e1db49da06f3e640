// FP8 with one fp32 scale per 128 elements of the contraction (DeepSeek-V3, arXiv 2412.19437), both orientations in one read:
//
//   x [rows, cols] -> codes [rows, cols], scale_inv [rows, cols / 128]
//              x.T -> codes_t [cols, rows], scale_inv_t [cols, rows / 128]
//   scale = scale_from_amax(max |x| of the block),   q = enc(fl(x * scale)),   scale_inv = fl(1 / scale)
//
// Bitwise equal to reference.fp8.cast_fp8_block with a block of (1, 128). Any rows and cols: missing elements count as 0.
//
// Grid: one 128x128 tile per block of 256 threads (tile.cuh). Shared memory, bytes of bf16 (fp32): tile 32,768 (65,552),
// transposed codes 16,384, amaxes and scales 5,632 (block_lines.cuh): three (two) blocks per SM. Bound by memory: 4 (6) bytes
// per element and 1/16 byte for scales. Scales in the layout of the GEMM are stored faster than compact scales.
#include "block_lines.cuh"

namespace dlp {
namespace {

template <class T, Producer kProducer>
constexpr size_t kShared = TileLoader<T, BlockJob, kProducer>::kBytes + ColumnWriter::kBytes + sizeof(BlockLines);

template <class T, class F8, Producer kProducer>
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm<T, kProducer>)
    cast_block_1d_kernel(const __grid_constant__ Work<BlockJob> work, const __grid_constant__ Source source,
                         const ScaleRule rule, const bool gemm_layout) {
    using Loader = TileLoader<T, BlockJob, kProducer>;
    Loader loader(shared_memory(), source);
    ColumnWriter columns(shared_memory() + Loader::kBytes);
    BlockLines& shared = *reinterpret_cast<BlockLines*>(shared_memory() + Loader::kBytes + ColumnWriter::kBytes);

    const auto tile = loader.start(work, blockIdx.x);
    Octet<T> patch[kPatch];
    loader.finish(tile, patch);
    cast_block_lines<F8>(patch, tile, rule, gemm_layout, columns, shared);
}

}  // namespace

void cast_block_1d(const Work<BlockJob>& work, Input input, Code code, const ScaleRule& rule, bool gemm_layout,
                   const Source& source, Stream stream) {
    if (work.items == 0) return;
    with_source(input, code, source, [&](auto element, auto f8, auto producer) {
        using T = decltype(element);
        constexpr auto kernel = cast_block_1d_kernel<T, decltype(f8), producer>;
        constexpr size_t shared = kShared<T, producer>;
        launch_each<kernel>(work.items, kTileThreads, shared, stream, work, source, rule, gemm_layout);
    });
}

}  // namespace dlp
