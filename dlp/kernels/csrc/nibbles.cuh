// Codes of half a byte, two per byte, the even element in the low nibble: blocks of 16 elements in the 8x8 patches of tile.cuh.
//
// A block of 16 elements spans two patches: side by side along a row (lanes t and t ^ 1), or one below the other along a column
// (lanes t and t ^ 16). The two threads exchange elements (`exchange`), after which each thread has four complete blocks along
// rows, or four along columns.
#pragma once

#include "tile.cuh"

namespace dlp {

constexpr int kPair = 2;                          // patches that a block of 16 spans
constexpr int kBeside = 1, kBelow = kAcross;      // lane ^ kBeside (kBelow): lane with the patch beside (above or below)
constexpr int kHalf = kPatch / kPair;             // blocks of a thread along rows; also along columns
using NibbleWriter = PieceWriter<kAcross / kPair>;

// Exchange between two lanes that differ by `lanes`: afterwards (a, b) is (a of the lower lane, a of the upper lane) in
// the lower lane, and (b of the lower lane, b of the upper lane) in the upper lane.
__device__ inline void exchange(uint32_t& a, uint32_t& b, int lanes) {
    const bool second = threadIdx.x & lanes;
    const uint32_t given = __shfl_xor_sync(kAllLanes, second ? a : b, lanes);
    a = second ? given : a;
    b = second ? b : given;
}

// Exchanges elements with the lane of the patch above or below. Afterwards a thread has four complete columns of 16 rows:
// column j is element j of patch[0..7], then element j + kHalf of patch[0..7]. NibbleBlocks gives the positions of these
// columns in the tile.
template <class T>
__device__ void exchange_columns(Octet<T> (&patch)[kPatch]) {
    constexpr int kWords = Octet<T>::kWords / 2;
#pragma unroll
    for (int i = 0; i < kPatch; ++i)
#pragma unroll
        for (int w = 0; w < kWords; ++w) exchange(patch[i].bits(w), patch[i].bits(w + kWords), kBelow);
}

// Positions of the blocks of this thread in the tile: block row_block() of rows row() to row() + 3, and block
// column_block() of columns column() to column() + 3.
struct NibbleBlocks {
    static __device__ int row() { return kPatch * patch_row() + (threadIdx.x & kBeside ? kHalf : 0); }
    static __device__ int row_block() { return patch_column() / kPair; }
    static __device__ int column() { return kPatch * patch_column() + (threadIdx.x & kBelow ? kHalf : 0); }
    static __device__ int column_block() { return patch_row() / kPair; }
};

// Stores codes of row blocks from registers to codes [rows, cols / 2], 8 bytes per block.
class NibbleRowWriter {
   public:
    template <class T, class Job>
    __device__ NibbleRowWriter(uint8_t* codes, const Tile<T, Job>& tile)
        : pitch_(tile.cols() / 2), rows_(tile.rows() - tile.row() - NibbleBlocks::row()),
          left_(pitch_ - tile.col() / 2 - 8 * NibbleBlocks::row_block()), aligned_(codes_aligned(codes, tile.rows(), pitch_)) {
        to_ = codes + (tile.row() + NibbleBlocks::row()) * pitch_ + pitch_ - left_;
    }
    __device__ void put(int i, uint2 codes) const {
        if (i < rows_) store_octet(to_ + i * pitch_, codes, left_, aligned_);
    }

   private:
    int64_t pitch_, rows_, left_;
    bool aligned_;
    uint8_t* to_;
};

// Transposes 8x8 codes: word i is row i before and column i after. Swaps nibbles, then bytes, then half words.
__device__ inline void transpose_nibbles_8x8(uint32_t (&row)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {  // rows i, i + 1
        const uint32_t a = row[i], b = row[i + 1];
        row[i] = (a & 0x0F0F0F0Fu) | (b << 4 & 0xF0F0F0F0u);
        row[i + 1] = (a >> 4 & 0x0F0F0F0Fu) | (b & 0xF0F0F0F0u);
    }
#pragma unroll
    for (int i = 0; i < 8; i += i % 2 ? 3 : 1) {  // rows i, i + 2
        const uint32_t a = row[i], b = row[i + 2];
        row[i] = __byte_perm(a, b, 0x6240);
        row[i + 2] = __byte_perm(a, b, 0x7351);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows i, i + 4
        const uint32_t a = row[i], b = row[i + 4];
        row[i] = __byte_perm(a, b, 0x5410);
        row[i + 4] = __byte_perm(a, b, 0x7632);
    }
}

// Puts the codes of a patch, one row per word, into shared memory: the 8-byte pieces of four columns.
__device__ inline void put_nibbles(uint32_t (&row)[kPatch], NibbleWriter& columns) {
    transpose_nibbles_8x8(row);
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
        exchange(row[j], row[j + kHalf], kBelow);
        columns.put(NibbleBlocks::column() + j, NibbleBlocks::column_block(), make_uint2(row[j], row[j + kHalf]));
    }
}

}  // namespace dlp
