// NVFP4 (fp4.cuh) with an E4M3 scale every 16x16 tile, for weights, both orientations in one read: they hold the same codes,
// and the scales of the second are the transpose of the first's. Equals reference.nvfp4.cast_nvfp4 with a block of (16, 16).
// rows and cols are multiples of 16.
//
// Grid: two blocks of 256 threads a multiprocessor, four 128x128 tiles each (tile.cuh), the next one fetched ahead. A 16x16
// tile is 2x2 patches, lanes t, t ^ 1, t ^ 16 and t ^ 17, joined by two shuffles. Codes of a row are exchanged by neighbours
// so that each stores 8 bytes; those of columns go through 8 KB of shared memory. 3 bytes an element of bf16; 0.79 of a copy
// on an H200.
#include "fp4.cuh"
#include "nibbles.cuh"

namespace dlp {
namespace {

constexpr int kBlocksPerSm = 2;
constexpr int kTilesPerBlock = 4;

template <class T>
constexpr size_t kShared = Tiles<T, Nvfp4Job>::kBytes + NibbleWriter::kBytes;

template <class T>
__device__ uint32_t largest_bits(const Octet<T> (&patch)[kPatch]) {
    Maxima<T> maxima;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) maxima.take(patch[i]);
    return maxima.largest();
}

// `bits`: the amax of this thread's patch, a quarter of a 16x16 block -> the amax of the block.
__device__ inline float quad_amax(uint32_t bits) {
    bits = max(bits, __shfl_xor_sync(kAllLanes, bits, kBeside));
    bits = max(bits, __shfl_xor_sync(kAllLanes, bits, kBelow));
    return __uint_as_float(bits);
}

template <class T>
__device__ void store_scale(const Tile<T, Nvfp4Job>& tile, uint8_t scale) {
    const int64_t down = (tile.rows() + kFp4Block - 1) / kFp4Block, across = (tile.cols() + kFp4Block - 1) / kFp4Block;
    const int64_t row = tile.row() / kFp4Block + patch_row() / kPair, col = tile.col() / kFp4Block + patch_column() / kPair;
    if (threadIdx.x & (kBeside | kBelow) || row >= down || col >= across) return;
    if (tile.job->scale) tile.job->scale[row * across + col] = scale;
    if (tile.job->scale_t) tile.job->scale_t[col * down + row] = scale;
}

template <class T>
__global__ void __launch_bounds__(kTileThreads, kBlocksPerSm) cast_nvfp4_2d_kernel(const __grid_constant__ Work<Nvfp4Job> work) {
    Tiles<T, Nvfp4Job> tiles(work, shared_memory());
    NibbleWriter columns(shared_memory() + Tiles<T, Nvfp4Job>::kBytes);

    const Nvfp4Job* scaled = nullptr;  // the job whose amax `tensor` was made from
    TensorScale tensor(0.0f);

    Tile<T, Nvfp4Job> tile;
    Octet<T> patch[kPatch];
    while (tiles.next(tile, patch)) {
        const Nvfp4Job& job = *tile.job;
        flag_not_finite(patch, job);
        if (scaled != &job) {
            scaled = &job;
            tensor = TensorScale(*job.amax);
        }
        if (tile.tile_row == 0 && tile.tile_col == 0 && threadIdx.x == 0) {
            if (job.amax_out) *job.amax_out = *job.amax;
            if (job.amax_t_out) *job.amax_t_out = *job.amax;
        }
        const uint8_t scale = tensor.scale(quad_amax(largest_bits(patch)));
        const float multiplier = tensor.multiplier(scale);
        store_scale(tile, scale);

        uint32_t row[kPatch];
#pragma unroll
        for (int i = 0; i < kPatch; ++i) row[i] = encode_nearest_lean(patch[i], multiplier);
        if (job.codes) {
            const NibbleRowWriter writer(job.codes, tile);
#pragma unroll
            for (int i = 0; i < kHalf; ++i) {
                uint32_t low = row[i], high = row[i + kHalf];
                exchange(low, high, kBeside);
                writer.put(i, make_uint2(low, high));
            }
        }
        if (job.codes_t) {
            put_nibbles(row, columns);
            __syncthreads();
            columns.write(job.codes_t, tile);
        }
        __syncthreads();
    }
}

}  // namespace

void cast_nvfp4_2d(const Work<Nvfp4Job>& work, Input input, Stream stream) {
    if (work.items == 0) return;
    with_input(input, [&](auto element) {
        using T = decltype(element);
        launch_few<cast_nvfp4_2d_kernel<T>>(work.items, kTilesPerBlock, kTileThreads, kShared<T>, stream, work);
    });
}

}  // namespace dlp
