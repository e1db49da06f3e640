// Both amaxes of an NVFP4 cast from one read: max |x|, and max |bf16(H x)| with the Hadamard transform along groups of 16 rows
// of each column, as in the columnwise operand (reference.nvfp4.rht16).
//
// Grid: persistent, two blocks of 256 threads per SM, each block processes 128x128 tiles and prefetches the next tile. A group
// of 16 rows spans two patches, one below the other: two lanes exchange half of their columns, and each lane transforms four
// columns. Bound by memory: reads 2 (bf16) or 4 (fp32) bytes per element. Rows outside of the matrix count as 0.
#include "fp4.cuh"
#include "nibbles.cuh"

namespace dlp {
namespace {

constexpr int kBlocksPerSm = 2;

template <class T>
constexpr size_t kShared = Tiles<T, RhtAmaxJob>::kBytes + 2 * kTileWarps * sizeof(uint32_t);

template <class T>
__global__ void __launch_bounds__(kTileThreads, kBlocksPerSm) amax_rht_kernel(const __grid_constant__ Work<RhtAmaxJob> work) {
    Tiles<T, RhtAmaxJob> tiles(work, shared_memory());
    uint32_t* scratch = reinterpret_cast<uint32_t*>(shared_memory() + Tiles<T, RhtAmaxJob>::kBytes);
    Maxima<T> maxima;
    Maxima<__nv_bfloat16> transformed_maxima;

    Tile<T, RhtAmaxJob> tile;
    Octet<T> patch[kPatch];
    while (tiles.next(tile, patch)) {
        Octet<__nv_bfloat16> transformed[kPatch];
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            maxima.take(patch[i]);
            transformed[i] = to_bf16(patch[i]);
        }
        exchange_columns(transformed);
#pragma unroll
        for (int j = 0; j < kHalf; ++j) {
            float v[kFp4Block];
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] = transformed[k][j], v[k + 8] = transformed[k][j + kHalf];
            Octet<__nv_bfloat16> low, high;
            hadamard16(v, low, high);
            transformed_maxima.take(low);
            transformed_maxima.take(high);
        }
    }
    const uint32_t bits = block_max(maxima.largest(), scratch);
    const uint32_t transformed_bits = block_max(transformed_maxima.largest(), scratch + kTileWarps);
    wait_for_previous();  // the kernel that sets both outputs to 0
    if (threadIdx.x == 0) {
        atomic_max(work.one.out, bits);
        atomic_max(work.one.out_t, transformed_bits);
    }
}

}  // namespace

// Takes one job by value; `out_t` must be the word after `out`. First sets both outputs to 0.
void amax_rht(const Work<RhtAmaxJob>& work, Input input, Stream stream) {
    DLP_CHECK_EQ(work.one.out + 1, work.one.out_t);
    few_zeros(reinterpret_cast<uintptr_t>(work.one.out), 2, stream);
    with_input(input, [&](auto element) {
        using T = decltype(element);
        launch_persistent<amax_rht_kernel<T>, true>(work.items, kTileThreads, kShared<T>, stream, work);
    });
}

}  // namespace dlp
