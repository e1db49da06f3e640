// NVFP4 (fp4.cuh) with one E4M3 scale per 16x16 tile, for weights, both orientations in one read: both orientations have the
// same codes, and the scales of the second orientation are the transpose. Bitwise equal to reference.nvfp4.cast_nvfp4 with a
// block of (16, 16). rows and cols are multiples of 16. With four over six a 16x16 tile is encoded with two scales, and the
// errors of its four patches are added by two shuffles.
//
// Grid: two blocks of 256 threads per SM; each block processes four 128x128 tiles (tile.cuh) and prefetches the next tile. A
// 16x16 tile is 2x2 patches, in lanes t, t ^ 1, t ^ 16 and t ^ 17, whose maxima are combined by two shuffles. Neighbouring
// lanes exchange codes of rows, so that each lane stores 8 bytes; codes of columns are stored through 8 KB of shared memory.
// Memory traffic: 3 bytes per element of bf16.
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

// The sum of squared errors of a 16x16 block under one scale, in an order that is the same for the transposed block: in each
// patch the upper triangle, row by row, of e[i][i] and fl(e[i][j] + e[j][i]); then the sums of diagonally opposite patches are
// added, and then these two results.
template <class T>
__device__ float block_error(const Octet<T> (&patch)[kPatch], const uint32_t (&codes)[kPatch], float scale, float encode) {
    uint32_t pair[kPatch][4];
#pragma unroll
    for (int i = 0; i < kPatch; ++i)
        pair[i][0] = magnitudes<0>(codes[i]), pair[i][1] = magnitudes<1>(codes[i]),
        pair[i][2] = magnitudes<2>(codes[i]), pair[i][3] = magnitudes<3>(codes[i]);
    const auto error = [&](int i, int j) {
        const uint32_t word = pair[i][j / 2];
        return squared_error(patch[i][j], __uint_as_float(j & 1 ? word & 0xFFFF0000u : word << 16), scale, encode);
    };
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPatch; ++i)
#pragma unroll
        for (int j = i; j < kPatch; ++j) sum = __fadd_rn(sum, i == j ? error(i, i) : __fadd_rn(error(i, j), error(j, i)));
    sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, kBeside | kBelow));
    return __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, kBeside));
}

template <class T>
__device__ void encode_patch(const Octet<T> (&patch)[kPatch], float multiplier, uint32_t (&codes)[kPatch]) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) codes[i] = encode_nearest_lean(patch[i], multiplier);
}

template <class T, bool kFourOverSix>
__global__ void __launch_bounds__(kTileThreads, kBlocksPerSm) cast_nvfp4_2d_kernel(const __grid_constant__ Work<Nvfp4Job> work) {
    Tiles<T, Nvfp4Job> tiles(work, shared_memory());
    NibbleWriter columns(shared_memory() + Tiles<T, Nvfp4Job>::kBytes);

    const Nvfp4Job* scaled = nullptr;  // job of the amax in `tensor`
    TensorScale tensor(0.0f);

    Tile<T, Nvfp4Job> tile;
    Octet<T> patch[kPatch];
    while (tiles.next(tile, patch)) {
        const Nvfp4Job& job = *tile.job;
        flag_not_finite(patch, job);
        if (scaled != &job) {
            scaled = &job;
            tensor = TensorScale(stored_amax<kFourOverSix>(*job.amax));
        }
        if (tile.tile_row == 0 && tile.tile_col == 0 && threadIdx.x == 0) {
            if (job.amax_out) *job.amax_out = stored_amax<kFourOverSix>(*job.amax);
            if (job.amax_t_out) *job.amax_t_out = stored_amax<kFourOverSix>(*job.amax);
        }
        const float amax = quad_amax(largest_bits(patch));
        uint8_t scale = tensor.scale(amax);
        uint32_t row[kPatch];
        encode_patch(patch, tensor.multiplier(scale), row);
        if constexpr (kFourOverSix) {
            const uint8_t scale_four = tensor.scale_of_four(amax);
            uint32_t four[kPatch];
            encode_patch(patch, tensor.multiplier(scale_four), four);
            const float error_six = block_error(patch, row, unpack<E4m3>(scale), tensor.encode);
            if (block_error(patch, four, unpack<E4m3>(scale_four), tensor.encode) < error_six) {
                scale = scale_four;
#pragma unroll
                for (int i = 0; i < kPatch; ++i) row[i] = four[i];
            }
        }
        store_scale(tile, scale);
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

void cast_nvfp4_2d(const Work<Nvfp4Job>& work, Input input, bool four_over_six, Stream stream) {
    if (work.items == 0) return;
    with_input(input, [&](auto element) {
        using T = decltype(element);
        if (four_over_six)
            launch_few<cast_nvfp4_2d_kernel<T, true>>(work.items, kTilesPerBlock, kTileThreads, kShared<T>, stream, work);
        else
            launch_few<cast_nvfp4_2d_kernel<T, false>>(work.items, kTilesPerBlock, kTileThreads, kShared<T>, stream, work);
    });
}

}  // namespace dlp
