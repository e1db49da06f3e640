// A 128x128 tile in the registers of 256 threads, on its way to codes in both orientations from one read.
//
// A thread owns an 8x8 patch: 16 threads lie side by side along a row, so a warp reads two whole rows of the tile with 16
// bytes a lane. The codes of a patch row are 8 adjacent bytes and go straight to memory. Those of a patch column are 8
// adjacent bytes of the transposed matrix; they meet in shared memory, from where whole 128-byte rows are written.
//
// Blocks are persistent. While a tile is worked on, the next one is on its way to shared memory by asynchronous copies;
// each thread copies what it will read itself, so no barrier guards them. The copies hold as many bytes in flight as
// registers would, and leave the registers to a third block a multiprocessor.
#pragma once

#include <cuda_pipeline.h>

#include "fp8.cuh"
#include "walk.cuh"

namespace dlp {

constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kPatch = 8;
constexpr int kAcross = kTile / kPatch;  // patches
static_assert(kAcross * kAcross == kTileThreads, "a patch a thread");

template <class T>
constexpr int kTileBlocks = sizeof(T) == 2 ? 3 : 2;  // a multiprocessor

// The patch of this thread: its column and row among the patches of a tile.
__device__ inline int patch_column() { return threadIdx.x % kAcross; }
__device__ inline int patch_row() { return threadIdx.x / kAcross; }

// One tile of one job. Tiles of a matrix are counted row by row; there is at least one, so that an empty matrix gets its
// scale written.
template <class T, class Job>
struct Tile {
    const Job* job;
    uint32_t down, across;  // tiles before this one
    bool whole, copied;     // lies wholly in the matrix; and was fetched ahead

    __device__ int64_t rows() const { return job->x.rows; }
    __device__ int64_t cols() const { return job->x.cols; }
    __device__ int64_t row() const { return int64_t(down) * kTile; }
    __device__ int64_t col() const { return int64_t(across) * kTile; }
    // What is left of the matrix from this thread's patch on.
    __device__ int64_t patch_rows() const { return rows() - row() - kPatch * patch_row(); }
    __device__ int64_t patch_cols() const { return cols() - col() - kPatch * patch_column(); }
};

// The tiles of this block in turn, each fetched while the one before is worked on.
template <class T, class Job>
class Tiles {
   public:
    static constexpr int kVectors = Octet<T>::kVectors;
    static constexpr size_t kBytes = sizeof(uint4) * kPatch * kVectors * kTileThreads;

    __device__ Tiles(const Work<Job>& work, uint8_t* bytes)
        : walk_(work), items_(uint32_t(work.items)), item_(blockIdx.x), slots_(reinterpret_cast<uint4*>(bytes) + threadIdx.x) {
        fetch();
    }
    // Hands out the next tile and its patch; false after the last.
    __device__ bool next(Tile<T, Job>& tile, Octet<T> (&patch)[kPatch]) {
        if (item_ >= items_) return false;
        tile = ahead_;
        if (tile.copied) {
            __pipeline_wait_prior(0);
#pragma unroll
            for (int i = 0; i < kPatch; ++i)
#pragma unroll
                for (int v = 0; v < kVectors; ++v) patch[i].set_vector(v, *slot(i, v));
        } else {
            read(tile, patch);
        }
        item_ += gridDim.x;
        fetch();
        return true;
    }

   private:
    // Finds tile `item_` and starts its copy. Tiles at an edge, or with unaligned rows, are read when their turn comes.
    __device__ void fetch() {
        if (item_ >= items_) return;
        ahead_.job = walk_.to(item_);
        const Matrix x = ahead_.job->x;
        const uint32_t number = item_ - uint32_t(x.first), wide = max(uint32_t((x.cols + kTile - 1) / kTile), 1u);
        ahead_.down = number / wide, ahead_.across = number - ahead_.down * wide;
        ahead_.whole = ahead_.row() + kTile <= x.rows && ahead_.col() + kTile <= x.cols;
        ahead_.copied = ahead_.whole && rows_aligned<T>(x);
        if (!ahead_.copied) return;
        const T* from = first(x, ahead_);
#pragma unroll
        for (int i = 0; i < kPatch; ++i)
#pragma unroll
            for (int v = 0; v < kVectors; ++v)
                __pipeline_memcpy_async(slot(i, v), reinterpret_cast<const uint4*>(from + i * x.stride) + v, sizeof(uint4));
        __pipeline_commit();
    }
    static __device__ void read(const Tile<T, Job>& tile, Octet<T> (&patch)[kPatch]) {
        const Matrix x = tile.job->x;
        const bool aligned = rows_aligned<T>(x);
        const T* from = first(x, tile);
        const int64_t rows = tile.patch_rows(), cols = tile.patch_cols();
#pragma unroll
        for (int i = 0; i < kPatch; ++i) patch[i] = load_octet(from + i * x.stride, i < rows ? cols : 0, aligned);
    }
    static __device__ const T* first(const Matrix& x, const Tile<T, Job>& tile) {
        const int64_t row = tile.row() + kPatch * patch_row(), col = tile.col() + kPatch * patch_column();
        return static_cast<const T*>(x.data) + row * x.stride + col;
    }
    __device__ uint4* slot(int i, int v) const { return slots_ + (i * kVectors + v) * kTileThreads; }

    Walk<Job> walk_;
    uint32_t items_, item_;
    uint4* slots_;
    Tile<T, Job> ahead_;
};

// Codes of patch rows, from registers to codes [rows, cols].
class RowWriter {
   public:
    template <class T, class Job>
    __device__ RowWriter(uint8_t* codes, const Tile<T, Job>& tile)
        : to_(codes + (tile.row() + kPatch * patch_row()) * tile.cols() + tile.col() + kPatch * patch_column()),
          pitch_(tile.cols()), rows_(tile.patch_rows()), cols_(tile.patch_cols()),
          fast_(tile.whole && codes_aligned(codes, tile.rows(), tile.cols())) {}

    __device__ void put(int i, uint2 codes) const {
        if (fast_)
            *reinterpret_cast<uint2*>(to_ + i * pitch_) = codes;
        else if (i < rows_)
            store_bytes(to_ + i * pitch_, codes, cols_);
    }

   private:
    uint8_t* to_;
    int64_t pitch_, rows_, cols_;
    bool fast_;
};

// Codes of patch columns, through shared memory to codes [cols, rows] of the transposed matrix. Between the last `put` of
// a tile and its `write`, and between that and the next `put`, lies a barrier.
//
// Column c of the tile is a row of sixteen 8-byte pieces; piece g is kept at g ^ (c / 8). So the 16 lanes of a patch row
// write to 16 different bank pairs, and 8 lanes that read a row with 16 bytes each cover all banks, too.
class ColumnWriter {
   public:
    static constexpr size_t kBytes = kTile * kTile;

    __device__ explicit ColumnWriter(uint8_t* bytes) : bytes_(bytes) {}

    __device__ void put(int j, uint2 codes) {
        const int column = kPatch * patch_column() + j;
        reinterpret_cast<uint2*>(bytes_)[column * kAcross + (patch_row() ^ patch_column())] = codes;
    }
    template <class T, class Job>
    __device__ void write(uint8_t* codes_t, const Tile<T, Job>& tile) const {
        const int64_t rows = tile.rows();
        const bool fast = tile.whole && rows % 16 == 0 && reinterpret_cast<uintptr_t>(codes_t) % 16 == 0;
        const int piece = threadIdx.x % 8, first = threadIdx.x / 8;
        uint8_t* to = codes_t + (tile.col() + first) * rows + tile.row() + 16 * piece;
#pragma unroll
        for (int i = 0; i < kTile; i += kTileThreads / 8) {
            const int column = first + i, twist = column / kPatch;
            uint4 codes = reinterpret_cast<const uint4*>(bytes_)[column * 8 + (piece ^ twist / 2)];
            if (twist & 1) codes = make_uint4(codes.z, codes.w, codes.x, codes.y);
            if (fast) {
                *reinterpret_cast<uint4*>(to + i * rows) = codes;
            } else if (tile.col() + column < tile.cols()) {
                const int64_t left = rows - tile.row() - 16 * piece;
                store_bytes(to + i * rows, make_uint2(codes.x, codes.y), left);
                store_bytes(to + i * rows + 8, make_uint2(codes.z, codes.w), left - 8);
            }
        }
    }

   private:
    uint8_t* bytes_;
};

}  // namespace dlp
