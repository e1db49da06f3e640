// max |x| of the rows and columns of a tile whose patches are in registers (tile.cuh): the maxima of the eight rows of a patch
// are combined with the patches to the left and right, the maxima of the eight columns with the patch above or below.
//
// A row is distributed over kLanes neighbouring lanes. Eight butterflies for eight rows would take 8 * log2(kLanes) shuffles,
// 32 for 16 lanes. Instead, at each step a lane passes half of the rows to a partner and continues with the other half:
//
//   lanes L and L ^ 8    8 rows each  ->  rows 0 to 3 in the lower lane, 4 to 7 in the upper    4 shuffles of fp32, 2 of bf16
//   L and L ^ 4          4            ->  2 each                                                2                   1
//   L and L ^ 2          2            ->  1 each (bf16 has two rows per word: both lanes, all)  1                   1
//   L and L ^ 1          1            ->  both lanes have the maximum of all                    1                   1
#pragma once

#include "tile_copies.cuh"

namespace dlp {

// Maxima within each of the eight rows of a patch. A word has the maximum of one row (fp32) or of two rows (bf16).
template <class T, class M = Magnitude<T>>
struct PatchRows {
    static constexpr int kWords = 8 / M::kPerWord;

    static __device__ uint32_t word(const Octet<T> (&row)[8], int i) {
        if constexpr (M::kPerWord == 1) {
            Maxima<T, M> maxima;
            maxima.take(row[i]);
            return maxima.largest();
        } else {
            const uint32_t a = pair(row[2 * i]), b = pair(row[2 * i + 1]);
            const uint32_t joined = M::larger(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
            return M::larger(joined, 0);  // a row of NaNs counts as 0
        }
    }

   private:
    static __device__ uint32_t pair(const Octet<T>& x) {
        return M::larger(M::larger(M::of(x, 0), M::of(x, 1)), M::larger(M::of(x, 2), M::of(x, 3)));
    }
};

template <class T, int kLanes, class M = Magnitude<T>>
class RowMaxima {
    static constexpr int kLeft = PatchRows<T, M>::kWords > kLanes ? PatchRows<T, M>::kWords / kLanes : 1;

   public:
    static constexpr int kWords = PatchRows<T, M>::kWords;

    // `word`: the maxima of this thread's eight rows, from PatchRows.
    __device__ explicit RowMaxima(uint32_t (&word)[kWords]) {
        int words = kWords;
#pragma unroll
        for (int bits = kLanes / 2; bits > 0; bits /= 2) {
            if (words == 1) {
                word[0] = M::larger(word[0], __shfl_xor_sync(kAllLanes, word[0], bits));
                continue;
            }
            words /= 2;
            const bool upper = threadIdx.x & bits;
#pragma unroll
            for (int i = 0; i < words; ++i) {
                const uint32_t given = __shfl_xor_sync(kAllLanes, upper ? word[i] : word[i + words], bits);
                word[i] = M::larger(upper ? word[i + words] : word[i], given);
            }
            first_ += upper ? words * M::kPerWord : 0;
        }
#pragma unroll
        for (int i = 0; i < kLeft; ++i) word_[i] = word[i];
    }

    static constexpr int kRows = kLeft * M::kPerWord;  // number of rows whose maxima this lane has in the end
    __device__ int first() const { return first_; }    // the first of these rows, 0 to 7
    __device__ uint32_t operator[](int i) const {      // maximum of row first() + i, as bits of an fp32
        return M::widen(word_[i / M::kPerWord], i % M::kPerWord);
    }

   private:
    uint32_t word_[kLeft];
    int first_ = 0;
};

// The maxima of the columns of a tile, separately for the 16 rows of each warp.
using ColumnMaxima = uint32_t[kTileWarps][kTile];

// Combines the column maxima of this thread's patch with those of the patch above or below, and stores the results in `out`.
template <class T, class M>
__device__ void post_columns(Maxima<T, M>& columns, ColumnMaxima& out) {
    columns.join(kAcross);
    if (threadIdx.x % 32 >= kAcross) return;
    uint4* to = reinterpret_cast<uint4*>(out[threadIdx.x / 32] + kPatch * patch_column());
    to[0] = make_uint4(columns.column(0), columns.column(1), columns.column(2), columns.column(3));
    to[1] = make_uint4(columns.column(4), columns.column(5), columns.column(6), columns.column(7));
}

}  // namespace dlp
