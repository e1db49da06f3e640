// Per-tensor FP8 cast and its transpose in one read, for one matrix or all of a table: q = enc(fl(x * scale)).
//
// Both orientations hold the same codes, so a patch is encoded once and its bytes are transposed in registers. With
// `staging` (delayed scaling) the amax of x is taken in the same read. Either orientation may be left out: a table of
// weights whose transposes nobody wants is still one launch.
#include "transpose.cuh"

namespace dlp {
namespace {

template <class T, Producer kProducer>
constexpr size_t kShared = Incoming<T, TensorJob, kProducer>::kBytes + ColumnWriter::kBytes + kTileWarps * sizeof(uint32_t);

template <class T, class F8, Producer kProducer, bool kObserve>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T, kProducer>)
    cast_transpose_kernel(const __grid_constant__ Work<TensorJob> work, const __grid_constant__ Source source,
                          const ScaleRule rule) {
    using Input = Incoming<T, TensorJob, kProducer>;
    Input incoming(shared_memory(), source);
    ColumnWriter columns(shared_memory() + Input::kBytes);
    uint32_t* scratch = reinterpret_cast<uint32_t*>(shared_memory() + Input::kBytes + ColumnWriter::kBytes);

    const auto tile = incoming.start(work, blockIdx.x);
    const TensorJob& job = *tile.job;
    const float scale = scale_of(job, scale_source(job), rule);
    if (tile.down == 0 && tile.across == 0 && threadIdx.x == 0) *job.scale_inv = __frcp_rn(scale);
    Octet<T> patch[kPatch];
    incoming.finish(tile, patch);
    cast_by_scale<F8, kObserve>(job, tile, patch, scale, columns, scratch);
}

}  // namespace

// `observe`: every job has `staging`.
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
