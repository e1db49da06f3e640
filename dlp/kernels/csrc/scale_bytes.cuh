// Scales of one byte, on their way from the threads of a tile to [rows, cols / block] and [cols, rows / block]: they meet
// in shared memory, and the kPerLine scales of a row or column of the tile are written as one word.
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

    // A barrier lies before, and one before the next `put`.
    template <class T, class Job>
    __device__ void write(uint8_t* scale, uint8_t* scale_t, const Tile<T, Job>& tile) const {
        if (threadIdx.x < kTile)
            write_line(scale, tile.row() + threadIdx.x, tile.rows(), tile.across, tile.cols());
        else
            write_line(scale_t, tile.col() + threadIdx.x - kTile, tile.cols(), tile.down, tile.rows());
    }

   private:
    using Word = std::conditional_t<kPerLine == 8, uint2, uint32_t>;
    static_assert(sizeof(Word) == kPerLine, "a word for the scales of a line");

    __device__ void write_line(uint8_t* to, int64_t line, int64_t lines, int64_t tiles, int64_t along) const {
        if (!to || line >= lines) return;
        const int64_t pitch = (along + kBlock - 1) / kBlock, left = pitch - tiles * kPerLine;
        to += line * pitch + tiles * kPerLine;
        const uint8_t* from = bytes_ + threadIdx.x * kPerLine;
        if (left >= kPerLine && reinterpret_cast<uintptr_t>(to) % kPerLine == 0) {
            if constexpr (kPerLine == 4)
                store_lasting(to, *reinterpret_cast<const Word*>(from));
            else
                *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(from);
        } else {
#pragma unroll 1
            for (int i = 0; i < min(left, int64_t(kPerLine)); ++i) to[i] = from[i];
        }
    }

    uint8_t* bytes_;
};

}  // namespace dlp
