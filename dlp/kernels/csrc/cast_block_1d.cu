// FP8 with a scale every 128 elements of the contraction, both orientations in one read (block_lines.cuh).
#include "block_lines.cuh"

namespace dlp {
namespace {

template <class T, Producer kProducer>
constexpr size_t kShared = Incoming<T, BlockJob, kProducer>::kBytes + ColumnWriter::kBytes + sizeof(BlockLines);

template <class T, class F8, Producer kProducer>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T, kProducer>)
    cast_block_1d_kernel(const __grid_constant__ Work<BlockJob> work, const __grid_constant__ Source source,
                         const ScaleRule rule, const bool gemm_layout) {
    using Input = Incoming<T, BlockJob, kProducer>;
    Input incoming(shared_memory(), source);
    ColumnWriter columns(shared_memory() + Input::kBytes);
    BlockLines& shared = *reinterpret_cast<BlockLines*>(shared_memory() + Input::kBytes + ColumnWriter::kBytes);

    const auto tile = incoming.start(work, blockIdx.x);
    Octet<T> patch[kPatch];
    incoming.finish(tile, patch);
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
