// A 128x128 tile in the registers of 256 threads, loaded once, and stores of the codes in both orientations.
//
// A thread has a patch of 8x8 elements, as eight octets, one per row. 16 patches are side by side, so that a warp covers 16
// rows:
//
//                   128 columns, 16 patches
//             +------+------+-- ... --+------+
//     8 rows  | t0   | t1   |         | t15  |   warp 0: tile rows 0 to 15
//             +------+------+-- ... --+------+
//     8 rows  | t16  | t17  |         | t31  |   t and t ^ 1 are side by side, t and t ^ 16 one below the other
//             +======+======+== ... ==+======+
//             | t32  |                           warp 1: tile rows 16 to 31
//               ...                              warp 7: tile rows 112 to 127
//
// Codes of a patch row are 8 adjacent bytes of codes [rows, cols] and are stored from registers: 128 adjacent bytes per tile
// row. Codes of a patch column are 8 adjacent bytes of codes_t [cols, rows]; stored from registers they would be 8
// bytes per line of memory, so they are collected in shared memory first (PieceWriter, 16 KB for FP8), from which
// complete lines of 128 bytes are written.
//
// Tiles are loaded through shared memory (tile_copies.cuh: 32 KB of bf16, 64 KB of fp32). Kernels bound by memory process one
// tile per block, and the copies of other resident blocks run while one block computes; persistent blocks are slower, because
// SMs differ in speed (bench/results/quantize.md). Kernels bound by instructions process a few tiles per block, and kernels
// with small outputs (amaxes) are persistent; both prefetch the next tile.
//
// Input: any rows, cols and stride. Partial tiles and tiles with unaligned rows are read without a copy to shared memory, by
// loads of single elements if necessary; elements outside of the matrix are 0.
#pragma once

#include "fp8.cuh"
#include "jobs.cuh"
#include "producer.cuh"

namespace dlp {

// One tile of one job. Tiles of a matrix are numbered row by row. A size of 0 counts as 1, so that kernels write the scales and
// sums of all lines.
template <class T, class Job>
struct Tile {
    const Job* job;
    uint32_t tile_row, tile_col;  // position among the tiles of the matrix
    bool whole, prefetched;       // the tile has 128 rows and columns; TileLoader::start has started its copy

    __device__ int64_t rows() const { return job->x.rows; }
    __device__ int64_t cols() const { return job->x.cols; }
    __device__ int64_t row() const { return int64_t(tile_row) * kTile; }
    __device__ int64_t col() const { return int64_t(tile_col) * kTile; }
    // Number of rows and columns from the beginning of this thread's patch to the end of the matrix; may be negative.
    __device__ int64_t patch_rows() const { return rows() - row() - kPatch * patch_row(); }
    __device__ int64_t patch_cols() const { return cols() - col() - kPatch * patch_column(); }
};

// The tile of piece of work `item`.
template <class T, class Job>
__device__ Tile<T, Job> tile_at(const Work<Job>& work, uint32_t item) {
    Tile<T, Job> tile;
    tile.job = find_job(work, item);
    const Matrix& x = tile.job->x;
    const uint32_t number = item - uint32_t(x.first), wide = max(uint32_t((x.cols + kTile - 1) / kTile), 1u);
    tile.tile_row = number / wide, tile.tile_col = number - tile.tile_row * wide;
    tile.whole = tile.row() + kTile <= x.rows && tile.col() + kTile <= x.cols;
    tile.prefetched = false;
    return tile;
}

// Loads a tile into the patches of the threads of a block, through shared memory and a producer. All threads call `start`, then
// `finish`, then `start` for the next tile. Uses kBytes of shared memory.
template <class T, class Job, Producer kProducer = Producer::kMatrix>
class TileLoader {
    using Copies = TileCopies<T>;

   public:
    static constexpr size_t kBytes = Copies::kBytes + TileProducer<T, kProducer>::kBytes;

    __device__ explicit TileLoader(uint8_t* bytes, const Source& source = {})
        : copies_(bytes), producer_(source, bytes + Copies::kBytes) {}

    // Starts the copy of a complete tile with aligned rows; `finish` reads any other tile. May contain a barrier.
    __device__ Tile<T, Job> start(const Work<Job>& work, uint32_t item) {
        auto tile = tile_at<T>(work, item);
        const Matrix& x = tile.job->x;
        tile.prefetched = tile.whole && rows_aligned<T>(x) && producer_.aligned();
        if (tile.prefetched) {
            copies_.start(static_cast<const T*>(x.data) + tile.row() * x.stride + tile.col(), x.stride);
            producer_.start(tile);
        }
        return tile;
    }
    // Writes the elements to cast, after the producer, to the patch of this thread. May contain a barrier.
    __device__ void finish(const Tile<T, Job>& tile, Octet<T> (&patch)[kPatch]) {
        const Matrix& x = tile.job->x;
        if constexpr (TileProducer<T, kProducer>::kInPlace) {
            if (tile.prefetched) copies_.wait();
            producer_.apply_in_place(tile, copies_);
            copies_.read(patch);
            return producer_.finish(tile, patch);
        }
        const auto loaded = producer_.load(tile);
        if (tile.prefetched)
            copies_.finish(patch);
        else
            read_patch(static_cast<const T*>(x.data), x.stride, rows_aligned<T>(x), tile, patch);
        producer_.apply(loaded, tile, patch);
    }

   private:
    Copies copies_;
    TileProducer<T, kProducer> producer_;
};

// The tiles blockIdx.x, blockIdx.x + gridDim.x, ... of a persistent block; the copy of the next tile runs while a tile
// is processed.
template <class T, class Job, Producer kProducer = Producer::kMatrix>
class Tiles {
   public:
    static constexpr size_t kBytes = TileLoader<T, Job, kProducer>::kBytes;

    __device__ Tiles(const Work<Job>& work, uint8_t* bytes, const Source& source = {})
        : work_(work), item_(blockIdx.x), loader_(bytes, source) {
        fetch();
    }

    // The next tile and its patch; false after the last tile. May contain a barrier.
    __device__ bool next(Tile<T, Job>& tile, Octet<T> (&patch)[kPatch]) {
        if (item_ >= work_.items) return false;
        tile = ahead_;
        loader_.finish(tile, patch);
        item_ += gridDim.x;
        fetch();
        return true;
    }

   private:
    __device__ void fetch() {
        if (item_ < work_.items) ahead_ = loader_.start(work_, item_);
    }

    const Work<Job>& work_;
    uint32_t item_;
    TileLoader<T, Job, kProducer> loader_;
    Tile<T, Job> ahead_;
};

// Sets the flag of the job to NaN if a value of this thread's patch is not finite.
template <class T, class Job>
__device__ void flag_not_finite(const Octet<T> (&patch)[kPatch], const Job& job) {
    Finite<T> finite;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) finite.take(patch[i]);
    finite.report(job.flag);
}

// Stores codes of patch rows from registers to codes [rows, cols], 8 bytes at a time.
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

// Codes of tile columns, through shared memory to codes_t [cols, rows]. A column of the tile is kPieces pieces of 8
// bytes: 16 pieces for codes of one byte, 8 for codes of half a byte. The caller must put a barrier between the last
// `put` of a tile and `write`, and between `write` and the next `put`.
//
// Layout: [128 columns][kPieces], swizzled against bank conflicts. Neighbouring lanes put columns that are kStep apart,
// so piece g of column c is stored at position g ^ (c / kStep); with codes of half a byte a column has only 64 bytes,
// so columns c and c ^ 1 are also exchanged in every other run of 8 kStep columns. Then the `put`s of a warp cover all
// banks, and 8 lanes that read 16 bytes each cover all banks too.
template <int kPieces, int kStep = kPatch>
class PieceWriter {
   public:
    static constexpr size_t kBytes = size_t(8) * kPieces * kTile;

    __device__ explicit PieceWriter(uint8_t* bytes) : bytes_(bytes) {}

    __device__ void put(int column, int piece, uint2 codes) {
        reinterpret_cast<uint2*>(bytes_)[line(column) * kPieces + (piece ^ twist(column))] = codes;
    }
    template <class T, class Job>
    __device__ void write(uint8_t* codes_t, const Tile<T, Job>& tile) const {
        const int64_t pitch = tile.rows() * kPieces / kAcross, start = tile.row() * kPieces / kAcross;  // bytes
        const bool fast = tile.whole && pitch % 16 == 0 && reinterpret_cast<uintptr_t>(codes_t) % 16 == 0;
        constexpr int kLanes = kPieces / 2;  // lanes per column
        const int pair = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
        uint8_t* to = codes_t + (tile.col() + first) * pitch + start + 16 * pair;
        const auto piece = [&](int column) {
            const int twisted = twist(column);
            const uint4 codes = reinterpret_cast<const uint4*>(bytes_)[line(column) * kLanes + (pair ^ twisted / 2)];
            return twisted & 1 ? make_uint4(codes.z, codes.w, codes.x, codes.y) : codes;
        };
        if (fast) {
#pragma unroll
            for (int i = 0; i < kTile; i += kTileThreads / kLanes) *reinterpret_cast<uint4*>(to + i * pitch) = piece(first + i);
            return;
        }
#pragma unroll 1
        for (int i = 0; i < kTile && tile.col() + first + i < tile.cols(); i += kTileThreads / kLanes) {
            const uint4 codes = piece(first + i);
            const int64_t left = pitch - start - 16 * pair;
            store_bytes(to + i * pitch, make_uint2(codes.x, codes.y), left);
            store_bytes(to + i * pitch + 8, make_uint2(codes.z, codes.w), left - 8);
        }
    }

   private:
    static __device__ int twist(int column) { return column / kStep % kPieces; }
    static __device__ int line(int column) { return kPieces < kAcross ? column ^ (column / (8 * kStep) & 1) : column; }

    uint8_t* bytes_;
};

// PieceWriter of FP8 codes: column `j` of this thread's patch is one piece.
class ColumnWriter : public PieceWriter<kAcross> {
   public:
    using PieceWriter::PieceWriter;
    using PieceWriter::put;
    __device__ void put(int j, uint2 codes) { put(kPatch * patch_column() + j, patch_row(), codes); }
};

}  // namespace dlp
