// MXFP8 (OCP MX v1.0; scales by the rule of arXiv 2506.08027): one E8M0 scale per 32 elements of the contraction, both
// orientations in one read.
//
//   x [rows, cols] -> codes [rows, cols], bytes [rows, cols / 32]
//              x.T -> codes_t [cols, rows], bytes_t [cols, rows / 32]
//   b = e8m0(amax_block / max),   q = enc(fl(x * 2^(127 - b)))
//
// Bitwise equal to reference.mx.cast_mxfp8 with a block of (1, 32).
//
// Grid: one 128x128 tile per thread block of 256 threads (tile.cuh). A block of 32 along a row belongs to four neighbouring
// lanes, whose amaxes are combined by shuffles. A block along a column belongs to two lanes of each of two warps, whose amaxes
// are combined through shared memory. A tile has 1024 scales: a thread computes two scales of rows and two scales of columns,
// and reads the eight scales of the rows and the eight scales of the columns of the patch.
//
// Shared memory, bytes of bf16 (fp32): tile 32,768 (65,552), transposed codes 16,384, maxima and multipliers 8,192, scale bytes
// 1,024. Bound by memory: 4 (6) bytes per element and 1/16 byte for scales. Scales with blocks first are stored faster than
// compact scales (scale_bytes.cuh).
#include "e8m0.cuh"
#include "line_maxima.cuh"
#include "scale_bytes.cuh"
#include "two_scales.cuh"

namespace dlp {
namespace {

constexpr int kPatches = 32 / kPatch;  // patches that a block of 32 spans
constexpr int kBlocksAcross = kTile / 32;
using ScaleOut = ScaleBytes<kBlocksAcross>;

struct Shared {
    alignas(16) ColumnMaxima column_max;
    alignas(16) float row_scale[kBlocksAcross][kTile];  // multipliers 2^(127 - b)
    alignas(16) float column_scale[kBlocksAcross][kTile];
};

template <class T, Producer kProducer>
constexpr size_t kShared =
    TileLoader<T, BlockJob, kProducer>::kBytes + ColumnWriter::kBytes + sizeof(Shared) + ScaleOut::kBytes;

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
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm<T, kProducer>)
    cast_mxfp8_1d_kernel(const __grid_constant__ Work<BlockJob> work, const __grid_constant__ Source source,
                         const bool blocks_first) {
    using M = std::conditional_t<kFloor, NanMagnitude<T>, Magnitude<T>>;
    using Loader = TileLoader<T, BlockJob, kProducer>;
    Loader loader(shared_memory(), source);
    uint8_t* bytes = shared_memory() + Loader::kBytes;
    ColumnWriter columns(bytes);
    Shared& shared = *reinterpret_cast<Shared*>(bytes + ColumnWriter::kBytes);
    ScaleOut out(bytes + ColumnWriter::kBytes + sizeof(Shared));

    const auto tile = loader.start(work, blockIdx.x);
    const BlockJob& job = *tile.job;
    Octet<T> patch[kPatch];
    loader.finish(tile, patch);
    flag_not_finite(patch, job);
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
    columns.write(job.codes_t, tile);  // last, because this store takes the longest time
}

}  // namespace

// `floor`: scales by the rule of OCP MX instead of the rule without saturation (e8m0.cuh). `blocks_first`: see
// scale_bytes.cuh.
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
