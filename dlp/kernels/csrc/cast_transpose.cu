// Per-tensor FP8 cast and its transpose in one read, of one matrix or each matrix of a table:
//
//   x [rows, cols] -> codes [rows, cols], codes_t [cols, rows], scale_inv []
//   q = enc(fl(x * scale)),   scale_inv = fl(1 / scale)
//
// Bitwise equal to reference.fp8.cast_fp8_tensor and its transpose. Any rows and cols.
//
// Both orientations have the same codes, so that a patch is encoded once and its bytes are transposed in registers
// (transpose.cuh). With `staging` (delayed scaling) max |x| is computed in the same read. A job may request only one of the
// orientations, so that a table of weights takes one launch even if some weights need no transpose.
//
// Grid: one 128x128 tile per block of 256 threads (tile.cuh), 49,184 bytes of shared memory for bf16 (81,968 for fp32). Bound
// by memory: 4 bytes per element of bf16, 6 of fp32.
#include "transpose.cuh"

namespace dlp {
namespace {

template <class T, Producer kProducer>
constexpr size_t kShared = TileLoader<T, TensorJob, kProducer>::kBytes + ColumnWriter::kBytes + kTileWarps * sizeof(uint32_t);

template <class T, class F8, Producer kProducer, bool kObserve>
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm<T, kProducer>)
    cast_transpose_kernel(const __grid_constant__ Work<TensorJob> work, const __grid_constant__ Source source,
                          const ScaleRule rule) {
    using Loader = TileLoader<T, TensorJob, kProducer>;
    Loader loader(shared_memory(), source);
    ColumnWriter columns(shared_memory() + Loader::kBytes);
    uint32_t* scratch = reinterpret_cast<uint32_t*>(shared_memory() + Loader::kBytes + ColumnWriter::kBytes);

    const auto tile = loader.start(work, blockIdx.x);
    const TensorJob& job = *tile.job;
    const float scale = scale_of(job, scale_source(job), rule);
    if (tile.tile_row == 0 && tile.tile_col == 0 && threadIdx.x == 0) *job.scale_inv = __frcp_rn(scale);
    Octet<T> patch[kPatch];
    loader.finish(tile, patch);
    cast_by_scale<F8, kObserve>(job, tile, patch, scale, columns, scratch);
}

}  // namespace

// `observe`: true if all jobs have `staging`, false if no job has `staging`.
void cast_transpose(const Work<TensorJob>& work, Input input, Code code, const ScaleRule& rule, bool observe,
                    const Source& source, Stream stream) {
    if (work.items == 0) return;
    with_source(input, code, source, [&](auto element, auto f8, auto producer) {
        using T = decltype(element);
        constexpr auto observing = cast_transpose_kernel<T, decltype(f8), producer, true>;
        constexpr auto casting = cast_transpose_kernel<T, decltype(f8), producer, false>;
        constexpr size_t shared = kShared<T, producer>;
        if (observe)
            launch_each<observing>(work.items, kTileThreads, shared, stream, work, source, rule);
        else
            launch_each<casting>(work.items, kTileThreads, shared, stream, work, source, rule);
    });
}

}  // namespace dlp
