// MXFP8 with a scale every 32 elements of the contraction, both orientations in one read.
//
// A block along a row lies in four lanes, one along a column in two lanes of each of two warps. So rows are joined by
// shuffles alone, and columns through shared memory. Scales are powers of two, cheap enough that every thread makes those
// it needs.
#include "e8m0.cuh"
#include "row_maxima.cuh"
#include "scale_bytes.cuh"
#include "two_scales.cuh"

namespace dlp {
namespace {

constexpr int kPatches = 32 / kPatch;  // that a block spans
using ScaleOut = ScaleBytes<kTile / 32>;

struct Maximum {
    alignas(16) uint32_t column[kTileWarps][kTile];  // a warp covers 16 rows
};

template <class T, Producer kProducer>
constexpr size_t kShared =
    Incoming<T, BlockJob, kProducer>::kBytes + ColumnWriter::kBytes + sizeof(Maximum) + ScaleOut::kBytes;

// Scales of the rows of this thread's patch, and the bytes of two of them handed on: four lanes hold equal ones.
template <class F8, bool kFloor, class T, class M>
__device__ Scales row_scales(const Octet<T> (&patch)[kPatch], ScaleOut& out) {
    Scales scales;
#pragma unroll
    for (int i = 0; i < PatchRows<T, M>::kWords; ++i) {
        uint32_t word = PatchRows<T, M>::word(patch, i);
#pragma unroll
        for (int lanes = 1; lanes < kPatches; lanes *= 2) word = M::larger(word, __shfl_xor_sync(kAllLanes, word, lanes));
#pragma unroll
        for (int k = 0; k < M::kPerWord; ++k) {
            const int row = i * M::kPerWord + k;
            const uint32_t byte = e8m0_from_amax<F8, kFloor>(M::widen(word, k));
            scales.of[row] = e8m0_reciprocal(byte);
            if (patch_column() % kPatches == row % kPatches)
                out.put_row(kPatch * patch_row() + row, patch_column() / kPatches, byte);
        }
    }
    return scales;
}

// The maxima of the columns of this thread's patch and the one below or above, for the warp that has the other half.
template <class T, class M>
__device__ void post_columns(const Octet<T> (&patch)[kPatch], Maximum& maximum) {
    Maxima<T, M> columns;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) columns.take(patch[i]);
    columns.join(kAcross);
    if (threadIdx.x % 32 >= kAcross) return;
    uint4* to = reinterpret_cast<uint4*>(maximum.column[threadIdx.x / 32] + kPatch * patch_column());
    to[0] = make_uint4(columns.column(0), columns.column(1), columns.column(2), columns.column(3));
    to[1] = make_uint4(columns.column(4), columns.column(5), columns.column(6), columns.column(7));
}

template <class F8, bool kFloor>
__device__ Scales column_scales(const Maximum& maximum, ScaleOut& out) {
    const int warp = threadIdx.x / 32, first = kPatch * patch_column();
    Scales scales;
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
        const uint32_t bits = max(maximum.column[warp][first + j], maximum.column[warp ^ 1][first + j]);
        const uint32_t byte = e8m0_from_amax<F8, kFloor>(bits);
        scales.of[j] = e8m0_reciprocal(byte);
        if (patch_row() % kPatches == j % kPatches) out.put_column(first + j, patch_row() / kPatches, byte);
    }
    return scales;
}

template <class T, class F8, Producer kProducer, bool kFloor>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T, kProducer>)
    cast_mxfp8_1d_kernel(const __grid_constant__ Work<BlockJob> work, const __grid_constant__ Source source,
                         const bool blocks_first) {
    using M = std::conditional_t<kFloor, NanMagnitude<T>, Magnitude<T>>;
    using Input = Incoming<T, BlockJob, kProducer>;
    Input incoming(shared_memory(), source);
    uint8_t* shared = shared_memory() + Input::kBytes;
    ColumnWriter columns(shared);
    Maximum& maximum = *reinterpret_cast<Maximum*>(shared + ColumnWriter::kBytes);
    ScaleOut out(shared + ColumnWriter::kBytes + sizeof(Maximum));

    const auto tile = incoming.start(work, blockIdx.x);
    const BlockJob& job = *tile.job;
    Octet<T> patch[kPatch];
    incoming.finish(tile, patch);
    if (job.codes_t) post_columns<T, M>(patch, maximum);
    if (job.codes) write_rows<F8>(patch, row_scales<F8, kFloor, T, M>(patch, out), tile);
    __syncthreads();
    if (job.codes_t) put_columns<F8>(patch, column_scales<F8, kFloor>(maximum, out), columns);
    __syncthreads();
    uint8_t *const scale = static_cast<uint8_t*>(job.scale), *const scale_t = static_cast<uint8_t*>(job.scale_t);
    if (blocks_first)
        out.write_blocks_first(scale, scale_t, tile);
    else
        out.write(scale, scale_t, tile);
    if (job.codes_t) columns.write(job.codes_t, tile);  // last, since it takes the longest
}

}  // namespace

// `floor`: the rule of OCP MX for scales, instead of the one that saturates nothing. `blocks_first`: see ScaleBytes.
void cast_mxfp8_1d(const Work<BlockJob>& work, Input input, Code code, bool floor, bool blocks_first, const Source& source,
                   Stream stream) {
    if (work.items == 0) return;
    with_source(input, code, source, [&](auto element, auto f8, auto producer) {
        using T = decltype(element);
        constexpr auto by_floor = cast_mxfp8_1d_kernel<T, decltype(f8), producer, true>;
        constexpr auto by_ceil = cast_mxfp8_1d_kernel<T, decltype(f8), producer, false>;
        constexpr size_t shared = kShared<T, producer>;
        if (floor)
            launch_each<by_floor>(work.items, kTileThreads, shared, stream, work, source, blocks_first);
        else
            launch_each<by_ceil>(work.items, kTileThreads, shared, stream, work, source, blocks_first);
    });
}

}  // namespace dlp
