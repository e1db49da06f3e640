// Transposes of codes: one byte per code, [rows, cols] -> [cols, rows], or half a byte per code, [rows, cols / 2] -> [cols,
// rows / 2]. For gathered operands whose columnwise codes are the transpose of the rowwise codes. Bitwise equal to
// x.t().contiguous() for bytes, and to reference.fp4.transpose_e2m1 for half bytes.
//
// Grid: one 128x128 tile per block of 256 threads, patches in registers, transposed there and written through shared memory
// (tile.cuh). Bound by memory: 2 bytes per element of FP8, 1 of E2M1. For half bytes, rows and cols must be even.
#include "nibbles.cuh"
#include "transpose.cuh"

namespace dlp {
namespace {

constexpr int kBlocksPerSm = 4;

// Loads the first min(valid, sizeof(Word)) bytes; the others are 0.
template <class Word>
__device__ Word load_codes(const uint8_t* from, int64_t valid) {
    if (valid >= int64_t(sizeof(Word)) && reinterpret_cast<uintptr_t>(from) % sizeof(Word) == 0)
        return __ldcs(reinterpret_cast<const Word*>(from));
    uint64_t bytes = 0;
#pragma unroll
    for (int i = 0; i < int(sizeof(Word)); ++i)
        if (i < valid) bytes |= uint64_t(from[i]) << 8 * i;
    if constexpr (sizeof(Word) == 8) return make_uint2(uint32_t(bytes), uint32_t(bytes >> 32));
    else return uint32_t(bytes);
}

// The codes of this thread's patch, one row per word; `kPerByte` codes in a byte.
template <int kPerByte, class Word>
__device__ void load_patch(Word (&row)[kPatch], const Tile<uint8_t, CodesJob>& tile) {
    const int64_t pitch = tile.cols() / kPerByte, left = tile.patch_cols() / kPerByte;
    const int64_t first = (tile.row() + kPatch * patch_row()) * pitch + pitch - left;
    const uint8_t* from = static_cast<const uint8_t*>(tile.job->x.data) + first;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) row[i] = load_codes<Word>(from + i * pitch, i < tile.patch_rows() ? left : 0);
}

__global__ void __launch_bounds__(kTileThreads, kBlocksPerSm)
    transpose_bytes_kernel(const __grid_constant__ Work<CodesJob> work) {
    ColumnWriter columns(shared_memory());
    const auto tile = tile_at<uint8_t>(work, blockIdx.x);
    uint2 row[kPatch];
    load_patch<1>(row, tile);
    transpose_8x8(row);
#pragma unroll
    for (int j = 0; j < kPatch; ++j) columns.put(j, row[j]);
    __syncthreads();
    columns.write(tile.job->out, tile);
}

__global__ void __launch_bounds__(kTileThreads, kBlocksPerSm)
    transpose_nibbles_kernel(const __grid_constant__ Work<CodesJob> work) {
    NibbleWriter columns(shared_memory());
    const auto tile = tile_at<uint8_t>(work, blockIdx.x);
    uint32_t row[kPatch];
    load_patch<2>(row, tile);
    put_nibbles(row, columns);
    __syncthreads();
    columns.write(tile.job->out, tile);
}

}  // namespace

void transpose_bytes(const Work<CodesJob>& work, Stream stream) {
    launch_each<transpose_bytes_kernel>(work.items, kTileThreads, ColumnWriter::kBytes, stream, work);
}

void transpose_nibbles(const Work<CodesJob>& work, Stream stream) {
    launch_each<transpose_nibbles_kernel>(work.items, kTileThreads, NibbleWriter::kBytes, stream, work);
}

}  // namespace dlp
