// Codes of half a byte, two a byte, the even element in the low nibble: blocks of 16 of them in a thread.
//
// A block of 16 elements spans two patches, beside each other or one below the other. The two threads share the work by
// halves: after `exchange` each has whole blocks, four of them along rows and four along columns.
#pragma once

#include "tile.cuh"

namespace dlp {

constexpr int kPair = 2;                          // patches that a block of 16 spans
constexpr int kBeside = 1, kBelow = kAcross;      // what lanes of such patches differ by
constexpr int kHalf = kPatch / kPair;             // blocks of a thread, each way
using NibbleWriter = PieceWriter<kAcross / kPair>;

// Of (a, b) in two threads, the first one's a's and the second one's b's stay together: (first's, second's) in each.
__device__ inline void exchange(uint32_t& a, uint32_t& b, int lanes) {
    const bool second = threadIdx.x & lanes;
    const uint32_t given = __shfl_xor_sync(kAllLanes, second ? a : b, lanes);
    a = second ? given : a;
    b = second ? b : given;
}

// The four columns, of the patch and the one below it: column `j` is element j of patch[0..7], then j + kHalf of them.
template <class T>
__device__ void exchange_columns(Octet<T> (&patch)[kPatch]) {
    constexpr int kWords = Octet<T>::kWords / 2;
#pragma unroll
    for (int i = 0; i < kPatch; ++i)
#pragma unroll
        for (int w = 0; w < kWords; ++w) exchange(patch[i].bits(w), patch[i].bits(w + kWords), kBelow);
}

// Where the blocks lie in the tile: rows from row() on, at row_block(); columns from column() on, at column_block().
struct Sixteens {
    static __device__ int row() { return kPatch * patch_row() + (threadIdx.x & kBeside ? kHalf : 0); }
    static __device__ int row_block() { return patch_column() / kPair; }
    static __device__ int column() { return kPatch * patch_column() + (threadIdx.x & kBelow ? kHalf : 0); }
    static __device__ int column_block() { return patch_row() / kPair; }
};

// Codes of row blocks, from registers to codes [rows, cols / 2].
class NibbleRowWriter {
   public:
    template <class T, class Job>
    __device__ NibbleRowWriter(uint8_t* codes, const Tile<T, Job>& tile)
        : pitch_(tile.cols() / 2), rows_(tile.rows() - tile.row() - Sixteens::row()),
          left_(pitch_ - tile.col() / 2 - 8 * Sixteens::row_block()), aligned_(codes_aligned(codes, tile.rows(), pitch_)) {
        to_ = codes + (tile.row() + Sixteens::row()) * pitch_ + pitch_ - left_;
    }
    __device__ void put(int i, uint2 codes) const {
        if (i < rows_) store_octet(to_ + i * pitch_, codes, left_, aligned_);
    }

   private:
    int64_t pitch_, rows_, left_;
    bool aligned_;
    uint8_t* to_;
};

// 8x8 codes, a row in each word: rows before and columns after.
__device__ inline void transpose_nibbles_8x8(uint32_t (&row)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {  // neighbours change nibbles
        const uint32_t a = row[i], b = row[i + 1];
        row[i] = (a & 0x0F0F0F0Fu) | (b << 4 & 0xF0F0F0F0u);
        row[i + 1] = (a >> 4 & 0x0F0F0F0Fu) | (b & 0xF0F0F0F0u);
    }
#pragma unroll
    for (int i = 0; i < 8; i += i % 2 ? 3 : 1) {  // i and i + 2 bytes
        const uint32_t a = row[i], b = row[i + 2];
        row[i] = __byte_perm(a, b, 0x6240);
        row[i + 2] = __byte_perm(a, b, 0x7351);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // i and i + 4 halves
        const uint32_t a = row[i], b = row[i + 4];
        row[i] = __byte_perm(a, b, 0x5410);
        row[i + 4] = __byte_perm(a, b, 0x7632);
    }
}

// The codes of a patch, a row in each word -> the pieces of columns that this thread puts.
__device__ inline void put_nibbles(uint32_t (&row)[kPatch], NibbleWriter& columns) {
    transpose_nibbles_8x8(row);
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
        exchange(row[j], row[j + kHalf], kBelow);
        columns.put(Sixteens::column() + j, Sixteens::column_block(), make_uint2(row[j], row[j + kHalf]));
    }
}

}  // namespace dlp
