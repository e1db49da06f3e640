// Sums of columns in fp32 in a fixed order, for gradients of biases and norms. Two kernels:
//
//   tile_sums   x [rows, cols] -> [ceil(rows / 128), cols], one sum per tile of 128 rows (reference.producers.tile_sums).
//               producer.cuh computes the same sums in the read of a cast.
//   sum_parts   parts [count, cols] -> [cols] (reference.producers.sum_parts). A block has 32 warps and computes 32 columns:
//               warp g adds parts g, g + 32, ... in order, with four loads in flight; then the 32 sums are added by halves.
#include "tile.cuh"

namespace dlp {
namespace {

constexpr int kGroups = 32;
constexpr int kInFlight = 4;  // parts that a thread loads at once

template <class T>
__global__ void __launch_bounds__(kTileThreads, kTileBlocksPerSm<T>)
    tile_sums_kernel(const __grid_constant__ Work<MatrixJob> work, const __grid_constant__ Source source) {
    Tiles<T, MatrixJob, Producer::kColumnSums> tiles(work, shared_memory(), source);
    Tile<T, MatrixJob> tile;
    Octet<T> patch[kPatch];
    while (tiles.next(tile, patch)) __syncthreads();
}

__global__ void __launch_bounds__(32 * kGroups)
    sum_parts_kernel(const float* parts, int64_t count, int64_t cols, float* out) {
    __shared__ float sums[kGroups][32];
    const int group = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t col = 32 * int64_t(blockIdx.x) + lane;
    float sum = 0.0f;
    if (col < cols)
        for (int64_t first = group; first < count; first += kInFlight * kGroups) {
            float part[kInFlight];
#pragma unroll
            for (int i = 0; i < kInFlight; ++i)
                part[i] = first + i * kGroups < count ? parts[(first + i * kGroups) * cols + col] : 0.0f;
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) sum = __fadd_rn(sum, part[i]);
        }
    sums[group][lane] = sum;
    for (int half = kGroups / 2; half > 0; half /= 2) {
        __syncthreads();
        if (group < half) sums[group][lane] = __fadd_rn(sums[group][lane], sums[group + half][lane]);
    }
    if (group == 0 && col < cols) out[col] = sums[0][lane];
}

}  // namespace

// x [rows, cols] -> sums [row tiles, cols].
void tile_sums(const Work<MatrixJob>& work, float* sums, Input input, Stream stream) {
    if (work.items == 0) return;
    Source source{};
    source.sums = sums;
    with_input(input, [&](auto element) {
        using T = decltype(element);
        constexpr size_t shared = Tiles<T, MatrixJob, Producer::kColumnSums>::kBytes;
        launch_persistent<tile_sums_kernel<T>>(work.items, kTileThreads, shared, stream, work, source);
    });
}

// parts [count, cols] -> out [cols].
void sum_parts(const float* parts, int64_t count, int64_t cols, float* out, Stream stream) {
    if (cols == 0) return;
    launch<sum_parts_kernel>((cols + 31) / 32, 32 * kGroups, 0, stream, parts, count, cols, out);
}

}  // namespace dlp
