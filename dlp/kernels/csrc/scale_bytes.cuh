// Stores of scales of one byte (E8M0, E4M3) from the threads of a tile to memory, through 1 or 2 KB of shared memory. A line (a
// row or column of the tile) has kPerLine scales (4 for MXFP8, 8 for NVFP4).
//
//   write                compact: [rows, cols / block] and [cols, rows / block]; one store for the kPerLine scales of a line
//   write_blocks_first   [cols / block, pad4(rows)] and [rows / block, pad4(cols)]: 128 adjacent bytes at a time
//
// Gathers need compact scales, which can be concatenated. But the words of compact scales are one line apart in memory, which
// slows the cast down (bench/results/quantize.md). Operands that are not gathered therefore have blocks first.
#pragma once

#include "tile.cuh"

namespace dlp {

template <int kPerLine>
class ScaleBytes {
   public:
    static constexpr size_t kBytes = size_t(2) * kTile * kPerLine;
    static constexpr int kBlock = kTile / kPerLine;

    __device__ explicit ScaleBytes(uint8_t* bytes) : bytes_(bytes) {}

    __device__ void put_row(int row, int block, uint32_t scale) { bytes_[row * kPerLine + block] = uint8_t(scale); }
    __device__ void put_column(int column, int block, uint32_t scale) { put_row(kTile + column, block, scale); }

    // Stores compact scales: thread t stores the scales of row t or of column t - 128. The caller must put a barrier before
    // this call, and another before the next `put_row` or `put_column`.
    template <class T, class Job>
    __device__ void write(uint8_t* scale, uint8_t* scale_t, const Tile<T, Job>& tile) const {
        if (threadIdx.x < kTile)
            write_line(scale, tile.row() + threadIdx.x, tile.rows(), tile.tile_col, tile.cols());
        else
            write_line(scale_t, tile.col() + threadIdx.x - kTile, tile.cols(), tile.tile_row, tile.rows());
    }

    // The same with blocks first. The padding after the last line, up to a multiple of 4, has the scale of a block of zeros.
    template <class T, class Job>
    __device__ void write_blocks_first(uint8_t* scale, uint8_t* scale_t, const Tile<T, Job>& tile) const {
        if (threadIdx.x < kTile)
            write_block(scale, tile.row(), tile.rows(), tile.tile_col, tile.cols());
        else
            write_block(scale_t, tile.col(), tile.cols(), tile.tile_row, tile.rows());
    }

   private:
    using Word = std::conditional_t<kPerLine == 8, uint2, uint32_t>;
    static_assert(sizeof(Word) == kPerLine, "the scales of a line must fill one word");

    __device__ void write_line(uint8_t* to, int64_t line, int64_t lines, int64_t tiles, int64_t along) const {
        if (!to || line >= lines) return;
        const int64_t pitch = (along + kBlock - 1) / kBlock, left = pitch - tiles * kPerLine;
        to += line * pitch + tiles * kPerLine;
        const uint8_t* from = bytes_ + threadIdx.x * kPerLine;
        if (left >= kPerLine && reinterpret_cast<uintptr_t>(to) % kPerLine == 0) {
            if constexpr (kPerLine == 4)
                store_evict_last(to, *reinterpret_cast<const Word*>(from));
            else
                *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(from);
        } else {
#pragma unroll 1
            for (int i = 0; i < min(left, int64_t(kPerLine)); ++i) to[i] = from[i];
        }
    }

    // A warp stores the scales of one block index for 128 lines, beginning with line `first`; four lines per lane.
    __device__ void write_block(uint8_t* to, int64_t first, int64_t lines, int64_t tiles, int64_t along) const {
        static_assert(kPerLine == 4 && kTile == 128, "a warp stores one block index; a lane reads four lines as one vector");
        const int64_t pitch = (lines + 3) / 4 * 4, line = first + threadIdx.x % 32 * 4;
        const uint32_t within = threadIdx.x / 32 % kPerLine;
        const int64_t block = tiles * kPerLine + within;
        if (!to || line >= pitch || block * kBlock >= along) return;
        to += block * pitch + line;
        const uint4 from = reinterpret_cast<const uint4*>(bytes_)[threadIdx.x / kTile * 32 + threadIdx.x % 32];
        const uint32_t each = within | (within + 4) << 4;
        const uint32_t word = __byte_perm(__byte_perm(from.x, from.y, each), __byte_perm(from.z, from.w, each), 0x5410);
        if (reinterpret_cast<uintptr_t>(to) % 4 == 0) {
            *reinterpret_cast<uint32_t*>(to) = word;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[i] = uint8_t(word >> 8 * i);
        }
    }

    uint8_t* bytes_;
};

}  // namespace dlp
