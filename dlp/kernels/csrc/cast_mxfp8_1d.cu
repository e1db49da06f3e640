// MXFP8 with a scale every 32 elements of the contraction, both orientations in one read.
//
// A block along a row lies in four lanes, one along a column in two lanes of each of two warps: amaxes of rows are joined by
// shuffles, those of columns through shared memory. Of a tile's 1024 scales a thread makes two of rows and two of columns,
// and reads back the eight of its rows and the eight of its columns.
#include "e8m0.cuh"
#include "line_maxima.cuh"
#include "scale_bytes.cuh"
#include "two_scales.cuh"

namespace dlp {
namespace {

constexpr int kPatches = 32 / kPatch;  // that a block spans
constexpr int kBlocksAcross = kTile / 32;
using ScaleOut = ScaleBytes<kBlocksAcross>;

struct Shared {
    alignas(16) ColumnMaxima column_max;
    alignas(16) float row_scale[kBlocksAcross][kTile];  // by block along the line, and line
    alignas(16) float column_scale[kBlocksAcross][kTile];
};

template <class T, Producer kProducer>
constexpr size_t kShared =
    Incoming<T, BlockJob, kProducer>::kBytes + ColumnWriter::kBytes + sizeof(Shared) + ScaleOut::kBytes;

template <class F8, bool kFloor, class T, class M>
__device__ void make_row_scales(const Octet<T> (&patch)[kPatch], Shared& shared, ScaleOut& out) {
    using Rows = RowMaxima<T, kPatches, M>;
    uint32_t word[Rows::kWords];
#pragma unroll
    for (int i = 0; i < Rows::kWords; ++i) word[i] = PatchRows<T, M>::word(patch, i);
    const Rows rows(word);
    const int block = patch_column() / kPatches;
#pragma unroll
    for (int i = 0; i < Rows::kRows; ++i) {
        const int row = kPatch * patch_row() + rows.first() + i;
        const uint32_t byte = e8m0_from_amax<F8, kFloor>(rows[i]);
        shared.row_scale[block][row] = e8m0_reciprocal(byte);
        out.put_row(row, block, byte);
    }
}

template <class F8, bool kFloor>
__device__ void make_column_scales(Shared& shared, ScaleOut& out) {
    const int column = threadIdx.x % kTile;
#pragma unroll
    for (int i = 0; i < kBlocksAcross; i += kTileThreads / kTile) {
        const int block = threadIdx.x / kTile + i;
        const uint32_t bits = max(shared.column_max[2 * block][column], shared.column_max[2 * block + 1][column]);
        const uint32_t byte = e8m0_from_amax<F8, kFloor>(bits);
        shared.column_scale[block][column] = e8m0_reciprocal(byte);
        out.put_column(column, block, byte);
    }
}

template <class T, class F8, Producer kProducer, bool kFloor>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<T, kProducer>)
    cast_mxfp8_1d_kernel(const __grid_constant__ Work<BlockJob> work, const __grid_constant__ Source source,
                         const bool blocks_first) {
    using M = std::conditional_t<kFloor, NanMagnitude<T>, Magnitude<T>>;
    using Input = Incoming<T, BlockJob, kProducer>;
    Input incoming(shared_memory(), source);
    uint8_t* bytes = shared_memory() + Input::kBytes;
    ColumnWriter columns(bytes);
    Shared& shared = *reinterpret_cast<Shared*>(bytes + ColumnWriter::kBytes);
    ScaleOut out(bytes + ColumnWriter::kBytes + sizeof(Shared));

    const auto tile = incoming.start(work, blockIdx.x);
    const BlockJob& job = *tile.job;
    Octet<T> patch[kPatch];
    incoming.finish(tile, patch);
    tell_not_finite(patch, job);
    if (job.codes) make_row_scales<F8, kFloor, T, M>(patch, shared, out);
    if (job.codes_t) {
        Maxima<T, M> maxima;
#pragma unroll
        for (int i = 0; i < kPatch; ++i) maxima.take(patch[i]);
        post_columns(maxima, shared.column_max);
    }
    __syncthreads();
    if (job.codes) write_rows<F8>(patch, Scales(shared.row_scale[patch_column() / kPatches] + kPatch * patch_row()), tile);
    if (job.codes_t) make_column_scales<F8, kFloor>(shared, out);
    __syncthreads();
    uint8_t *const scale = static_cast<uint8_t*>(job.scale), *const scale_t = static_cast<uint8_t*>(job.scale_t);
    if (blocks_first)
        out.write_blocks_first(scale, scale_t, tile);
    else
        out.write(scale, scale_t, tile);
    if (!job.codes_t) return;
    put_columns<F8>(patch, Scales(shared.column_scale[patch_row() / kPatches] + kPatch * patch_column()), columns);
    __syncthreads();
    columns.write(job.codes_t, tile);  // last, since it takes the longest
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
