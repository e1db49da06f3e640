// MXFP8 with one E8M0 scale per 32x32 tile, for weights, both orientations in one read: both have the same codes, and the
// scales of the second orientation are the transpose. Bitwise equal to reference.mx.cast_mxfp8 with a block of (32, 32).
//
// Grid: one 128x128 tile per thread block of 256 threads (tile.cuh). A 32x32 block is 4x4 patches, in eight lanes of one warp
// and eight lanes of the next warp; the amax is reduced by shuffles and through 128 bytes of shared memory. Bound by memory: 4
// bytes per element of bf16.
#include "e8m0.cuh"
#include "transpose.cuh"

namespace dlp {
namespace {

constexpr int kBlocksPerSm = 2;
constexpr int kPatches = 32 / kPatch;   // patches of a 32x32 block along rows, and along columns
constexpr int kBlocksAcross = kTile / 32;

template <class T>
constexpr size_t kShared =
    TileLoader<T, BlockJob>::kBytes + ColumnWriter::kBytes + kTileWarps * kBlocksAcross * sizeof(uint32_t);

// Returns the amax, as bits, of the 32x32 block that contains this thread's patch. Contains one barrier.
template <class T, class M>
__device__ uint32_t block_amax(const Octet<T> (&patch)[kPatch], uint32_t* scratch) {
    Maxima<T, M> maxima;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) maxima.take(patch[i]);
    uint32_t bits = maxima.largest();
#pragma unroll
    for (int lanes = 1; lanes < kPatches; lanes *= 2) bits = max(bits, __shfl_xor_sync(kAllLanes, bits, lanes));
    bits = max(bits, __shfl_xor_sync(kAllLanes, bits, kAcross));
    const int warp = threadIdx.x / 32, block = patch_column() / kPatches;
    scratch[warp * kBlocksAcross + block] = bits;  // eight lanes write the same value
    __syncthreads();
    return max(bits, scratch[(warp ^ 1) * kBlocksAcross + block]);
}

template <class T>
__device__ void store_scale(const Tile<T, BlockJob>& tile, uint32_t byte) {
    const int64_t down = (tile.rows() + 31) / 32, across = (tile.cols() + 31) / 32;
    const int64_t row = tile.row() / 32 + patch_row() / kPatches, col = tile.col() / 32 + patch_column() / kPatches;
    if (patch_row() % kPatches || patch_column() % kPatches || row >= down || col >= across) return;
    if (tile.job->scale) static_cast<uint8_t*>(tile.job->scale)[row * across + col] = uint8_t(byte);
    if (tile.job->scale_t) static_cast<uint8_t*>(tile.job->scale_t)[col * down + row] = uint8_t(byte);
}

template <class T, class F8, bool kFloor>
__global__ void __launch_bounds__(kTileThreads, kBlocksPerSm) cast_mxfp8_2d_kernel(const __grid_constant__ Work<BlockJob> work) {
    using M = std::conditional_t<kFloor, NanMagnitude<T>, Magnitude<T>>;
    TileLoader<T, BlockJob> loader(shared_memory());
    ColumnWriter columns(shared_memory() + TileLoader<T, BlockJob>::kBytes);
    uint32_t* scratch = reinterpret_cast<uint32_t*>(shared_memory() + TileLoader<T, BlockJob>::kBytes + ColumnWriter::kBytes);

    const auto tile = loader.start(work, blockIdx.x);
    Octet<T> patch[kPatch];
    loader.finish(tile, patch);
    flag_not_finite(patch, *tile.job);
    const uint32_t byte = e8m0_from_amax<F8, kFloor>(block_amax<T, M>(patch, scratch));
    store_scale(tile, byte);
    uint2 codes[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) codes[i] = encode_row<F8>(patch[i], e8m0_reciprocal(byte));
    write_codes(codes, tile, columns);
}

}  // namespace

void cast_mxfp8_2d(const Work<BlockJob>& work, Input input, Code code, bool floor, Stream stream) {
    if (work.items == 0) return;
    with_types(input, code, [&](auto element, auto f8) {
        using T = decltype(element);
        using F8 = decltype(f8);
        if (floor)
            launch_each<cast_mxfp8_2d_kernel<T, F8, true>>(work.items, kTileThreads, kShared<T>, stream, work);
        else
            launch_each<cast_mxfp8_2d_kernel<T, F8, false>>(work.items, kTileThreads, kShared<T>, stream, work);
    });
}

}  // namespace dlp
