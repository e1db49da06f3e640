// What NVFP4 has to know before its cast, in one read: max |x|, and max |x| of the columns after the Hadamard transform.
#include "fp4.cuh"
#include "nibbles.cuh"

namespace dlp {
namespace {

constexpr int kBlocks = 2;  // a multiprocessor

template <class T>
constexpr size_t kShared = Tiles<T, RhtAmaxJob>::kBytes + 2 * kTileWarps * sizeof(uint32_t);

template <class T>
__global__ void __launch_bounds__(kTileThreads, kBlocks) amax_rht_kernel(const __grid_constant__ Work<RhtAmaxJob> work) {
    Tiles<T, RhtAmaxJob> tiles(work, shared_memory());
    uint32_t* scratch = reinterpret_cast<uint32_t*>(shared_memory() + Tiles<T, RhtAmaxJob>::kBytes);
    Maxima<T> maxima;
    Maxima<__nv_bfloat16> turned_maxima;

    Tile<T, RhtAmaxJob> tile;
    Octet<T> patch[kPatch];
    while (tiles.next(tile, patch)) {
        Octet<__nv_bfloat16> turned[kPatch];
#pragma unroll
        for (int i = 0; i < kPatch; ++i) {
            maxima.take(patch[i]);
            turned[i] = to_bf16(patch[i]);
        }
        exchange_columns(turned);
#pragma unroll
        for (int j = 0; j < kHalf; ++j) {
            float v[kSixteen];
#pragma unroll
            for (int k = 0; k < 8; ++k) v[k] = turned[k][j], v[k + 8] = turned[k][j + kHalf];
            Octet<__nv_bfloat16> low, high;
            hadamard16(v, low, high);
            turned_maxima.take(low);
            turned_maxima.take(high);
        }
    }
    const uint32_t bits = block_max(maxima.largest(), scratch);
    const uint32_t turned_bits = block_max(turned_maxima.largest(), scratch + kTileWarps);
    wait_for_previous();  // which sets both to 0
    if (threadIdx.x == 0) {
        raise(work.one.out, bits);
        raise(work.one.out_t, turned_bits);
    }
}

}  // namespace

// One job, whose `out` and `out_t` are neighbours; they are set to 0 here first.
void amax_rht(const Work<RhtAmaxJob>& work, Input input, Stream stream) {
    DLP_CHECK_EQ(work.one.out + 1, work.one.out_t);
    few_zeros(reinterpret_cast<uintptr_t>(work.one.out), 2, stream);
    with_input(input, [&](auto element) {
        using T = decltype(element);
        launch_persistent<amax_rht_kernel<T>, true>(work.items, kTileThreads, kShared<T>, stream, work);
    });
}

}  // namespace dlp
