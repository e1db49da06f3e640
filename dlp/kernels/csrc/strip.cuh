// A 128x128 tile as eight strips of 16 rows, one per warp, for casts whose blocks of 16 elements run along rows and
// along columns (cast_nvfp4_1d.cu).
//
// A strip is in shared memory, and each lane reads complete blocks of 16 elements from the strip: lanes exchange no elements,
// have one or two blocks in registers at a time, and do not wait for other warps.
//
//   read_columns(j)     16 rows x 128 columns: lane L has columns 64 j + 2 L and 64 j + 2 L + 1, each a block of 16 rows
//   read_block(i, j)    lane L has elements 16 b to 16 b + 15 of row 8 i + L % 8, where b = 4 j + L / 8
//
// Shared memory, in bytes for bf16 (fp32): rows have 256 (512) bytes and begin 272 (528) bytes apart. The 16 additional bytes
// shift each row by four banks, so that eight lanes that read 16 bytes of eight rows cover all 32 banks. A tile takes 34,816
// (67,584).
//
// Rejected alternative: 8x8 patches in registers as in tile.cuh, where a block of 16 spans two threads: this needs more
// instructions per element, and more registers, so that fewer warps are resident (dev/log.md).
#pragma once

#include "tile.cuh"

namespace dlp {

// Two neighbouring elements of a row.
template <class T>
using Pair = std::conditional_t<sizeof(T) == 2, uint32_t, float2>;

inline __device__ float element(uint32_t pair, int i) { return __uint_as_float(i ? pair & 0xFFFF0000u : pair << 16); }
inline __device__ float element(float2 pair, int i) { return i ? pair.y : pair.x; }

inline __device__ uint32_t to_bf16(uint32_t pair) { return pair; }
inline __device__ uint32_t to_bf16(float2 pair) {
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(pair.x, pair.y);
    return reinterpret_cast<const uint32_t&>(rounded);
}

// Element `i` (0 or 1) of each of eight pairs, which are in consecutive rows.
inline __device__ Octet<__nv_bfloat16> column_of(const uint32_t* pair, int i) {
    Octet<__nv_bfloat16> out;
#pragma unroll
    for (int k = 0; k < 4; ++k) out.word[k] = __byte_perm(pair[2 * k], pair[2 * k + 1], i ? 0x7632 : 0x5410);
    return out;
}
inline __device__ Octet<float> column_of(const float2* pair, int i) {
    Octet<float> out;
#pragma unroll
    for (int k = 0; k < 8; ++k) out.element[k] = element(pair[k], i);
    return out;
}

// The strips of this warp in the kTilesPerBlock tiles of the block, in order. Uses kBytes of shared memory.
template <class T, class Job, int kTilesPerBlock>
class Strips {
   public:
    static constexpr int kRows = 16;
    static constexpr int kPitch = kTile * sizeof(T) + sizeof(uint4);  // bytes
    static constexpr size_t kBytes = size_t(kPitch) * kTile;

    __device__ Strips(const Work<Job>& work, uint8_t* bytes)
        : work_(work), item_(blockIdx.x * kTilesPerBlock), end_(min(item_ + kTilesPerBlock, uint32_t(work.items))),
          bytes_(bytes + number() * kRows * kPitch), ahead_(tile_at<T>(work, item_)) {
        start();
    }

    // Waits for the strip of the next tile; returns false after the last tile.
    __device__ bool next(Tile<T, Job>& tile) {
        if (item_ >= end_) return false;
        tile = ahead_;
        __pipeline_wait_prior(0);
        __syncwarp();
        return true;
    }
    // Starts the copy of the strip of the next tile into the same memory; call it after this warp has read the strip.
    __device__ void fetch() {
        if (++item_ >= end_) return;
        __syncwarp();
        advance();
        start();
    }

    // Index of this strip in the tile, which begins at row 16 * number().
    static __device__ int number() { return threadIdx.x / 32; }

    // Columns column(j) and column(j) + 1 of the strip, j < 2: element i of pair[k] is row k of column(j) + i.
    static __device__ int column(int j) { return kTile / 2 * j + 2 * lane(); }
    __device__ void read_columns(int j, Pair<T> (&pair)[kRows]) const {
        const uint8_t* from = bytes_ + column(j) * sizeof(T);
#pragma unroll
        for (int i = 0; i < kRows; ++i) pair[i] = *reinterpret_cast<const Pair<T>*>(from + i * kPitch);
    }

    // The block of 16 elements at row(i) of the strip and block(j) along it, i and j < 2.
    static __device__ int row(int i) { return lane() % 8 + 8 * i; }
    static __device__ int block(int j) { return lane() / 8 + 4 * j; }
    __device__ void read_block(int i, int j, Octet<T>& low, Octet<T>& high) const {
        constexpr int kVectors = Octet<T>::kVectors;
        const uint4* from = reinterpret_cast<const uint4*>(bytes_ + row(i) * kPitch) + 2 * kVectors * block(j);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) low.set_vector(v, from[v]), high.set_vector(v, from[kVectors + v]);
    }

   private:
    // elements of a vector of 16 bytes; vectors of a row
    static constexpr int kElements = sizeof(uint4) / sizeof(T), kAcross = kTile / kElements;
    static constexpr int kStep = 32 / kAcross;  // rows that the 32 lanes copy at once

    static __device__ int lane() { return threadIdx.x % 32; }

    // Advances to the next tile. For a single job this avoids the division of tile_at.
    __device__ void advance() {
        if (work_.many) {
            ahead_ = tile_at<T>(work_, item_);
            return;
        }
        const Matrix& x = work_.one.x;
        if (int64_t(++ahead_.tile_col) * kTile >= x.cols) ahead_.tile_col = 0, ++ahead_.tile_row;
        ahead_.whole = ahead_.row() + kTile <= x.rows && ahead_.col() + kTile <= x.cols;
    }
    // Starts the copy of a strip of a complete tile with aligned rows; any other strip is read here, with zeros outside
    // of the matrix.
    __device__ void start() {
        const Matrix x = ahead_.job->x;
        const int64_t row = ahead_.row() + kRows * number() + lane() / kAcross;
        const int64_t col = ahead_.col() + lane() % kAcross * kElements;
        const T* from = static_cast<const T*>(x.data) + row * x.stride + col;
        uint4* to = reinterpret_cast<uint4*>(bytes_ + lane() / kAcross * kPitch) + lane() % kAcross;
        if (ahead_.whole && rows_aligned<T>(x)) {
#pragma unroll
            for (int i = 0; i < kRows; i += kStep) {
                __pipeline_memcpy_async(to, from, sizeof(uint4));
                from += kStep * x.stride, to += kStep * kPitch / sizeof(uint4);
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < kRows; i += kStep) {
                *to = load_vector(from, row + i < x.rows ? x.cols - col : 0);
                from += kStep * x.stride, to += kStep * kPitch / sizeof(uint4);
            }
        }
        __pipeline_commit();
    }
    // A vector of 16 bytes of elements; elements from `valid` on are 0 and not loaded.
    static __device__ uint4 load_vector(const T* from, int64_t valid) {
        using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
        constexpr int kInWord = sizeof(uint32_t) / sizeof(T);
        uint32_t word[4] = {};
#pragma unroll
        for (int i = 0; i < kElements; ++i)
            if (i < valid) word[i / kInWord] |= uint32_t(reinterpret_cast<const Bits*>(from)[i]) << i % kInWord * 16;
        return make_uint4(word[0], word[1], word[2], word[3]);
    }

    const Work<Job>& work_;
    uint32_t item_, end_;
    uint8_t* bytes_;
    Tile<T, Job> ahead_;
};

}  // namespace dlp
