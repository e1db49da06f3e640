// A 128x128 tile in the registers of 256 threads, on its way to codes in both orientations from one read.
//
// A thread owns an 8x8 patch: 16 threads lie side by side along a row, so a warp reads two whole rows of the tile with 16
// bytes a lane. The codes of a patch row are 8 adjacent bytes and go straight to memory. Those of a patch column are 8
// adjacent bytes of the transposed matrix; they meet in shared memory, from where whole 128-byte rows are written.
//
// Tiles come by way of shared memory (tile_copies.cuh). Kernels at the speed of memory take one tile a block: while one
// block works, the tiles of others on the same multiprocessor are on their way. Blocks of kernels bound by instructions take
// a few tiles, those of kernels that write nearly nothing are persistent; both fetch their next tile ahead.
#pragma once

#include "fp8.cuh"
#include "jobs.cuh"
#include "producer.cuh"

namespace dlp {

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

// The tile that is piece of work `item`.
template <class T, class Job>
__device__ Tile<T, Job> tile_at(const Work<Job>& work, uint32_t item) {
    Tile<T, Job> tile;
    tile.job = job_of(work, item);
    const Matrix& x = tile.job->x;
    const uint32_t number = item - uint32_t(x.first), wide = max(uint32_t((x.cols + kTile - 1) / kTile), 1u);
    tile.down = number / wide, tile.across = number - tile.down * wide;
    tile.whole = tile.row() + kTile <= x.rows && tile.col() + kTile <= x.cols;
    tile.copied = false;
    return tile;
}

// A tile on its way from memory to the patches of a block, and what a producer makes of it there. `start` one, `finish` it
// in every thread, `start` the next.
template <class T, class Job, Producer kProducer = Producer::kMatrix>
class Incoming {
    using Copies = TileCopies<T>;

   public:
    static constexpr size_t kBytes = Copies::kBytes + Maker<T, kProducer>::kBytes;

    __device__ explicit Incoming(uint8_t* bytes, const Source& source = {})
        : copies_(bytes), maker_(source, bytes + Copies::kBytes) {}

    // Starts the copy of a tile. One at an edge, or with unaligned rows, is read when it is finished. May contain a barrier.
    __device__ Tile<T, Job> start(const Work<Job>& work, uint32_t item) {
        auto tile = tile_at<T>(work, item);
        const Matrix& x = tile.job->x;
        tile.copied = tile.whole && rows_aligned<T>(x) && maker_.aligned();
        if (tile.copied) {
            copies_.start(static_cast<const T*>(x.data) + tile.row() * x.stride + tile.col(), x.stride);
            maker_.begin(tile);
        }
        return tile;
    }
    // May contain a barrier.
    __device__ void finish(const Tile<T, Job>& tile, Octet<T> (&patch)[kPatch]) {
        const Matrix& x = tile.job->x;
        if constexpr (Maker<T, kProducer>::kFills) {
            if (tile.copied) copies_.wait();
            maker_.fill(tile, copies_);
            copies_.read(patch);
            return maker_.made(tile, patch);
        }
        const auto taken = maker_.take(tile);
        if (tile.copied)
            copies_.finish(patch);
        else
            read_patch(static_cast<const T*>(x.data), x.stride, rows_aligned<T>(x), tile, patch);
        maker_.make(taken, tile, patch);
    }

   private:
    Copies copies_;
    Maker<T, kProducer> maker_;
};

// The tiles of a block in turn, each fetched while the one before is worked on.
template <class T, class Job, Producer kProducer = Producer::kMatrix>
class Tiles {
   public:
    static constexpr size_t kBytes = Incoming<T, Job, kProducer>::kBytes;

    __device__ Tiles(const Work<Job>& work, uint8_t* bytes, const Source& source = {})
        : work_(work), item_(blockIdx.x), incoming_(bytes, source) {
        fetch();
    }

    // Hands out the next tile and its patch; false after the last. May contain a barrier.
    __device__ bool next(Tile<T, Job>& tile, Octet<T> (&patch)[kPatch]) {
        if (item_ >= work_.items) return false;
        tile = ahead_;
        incoming_.finish(tile, patch);
        item_ += gridDim.x;
        fetch();
        return true;
    }

   private:
    __device__ void fetch() {
        if (item_ < work_.items) ahead_ = incoming_.start(work_, item_);
    }

    const Work<Job>& work_;
    uint32_t item_;
    Incoming<T, Job, kProducer> incoming_;
    Tile<T, Job> ahead_;
};

// The flag of the job becomes NaN where a value of this thread's patch is not finite.
template <class T, class Job>
__device__ void tell_not_finite(const Octet<T> (&patch)[kPatch], const Job& job) {
    Finite<T> finite;
#pragma unroll
    for (int i = 0; i < kPatch; ++i) finite.take(patch[i]);
    finite.tell(job.flag);
}

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

// Codes of tile columns, through shared memory to codes [cols, rows] of the transposed matrix: a column of the tile is
// kPieces pieces of 8 bytes, 16 for codes of a byte and 8 for codes of half a byte. Between the last `put` of a tile and
// its `write`, and between that and the next `put`, lies a barrier.
//
// Lanes put every kStep-th column. Piece g of column c is kept at g ^ (c / kStep); with half bytes, neighbouring columns change
// places in every other run of 8 kStep, too. So the lanes write to all banks, and 8 lanes that read with 16 bytes each
// cover all banks.
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
        constexpr int kLanes = kPieces / 2;  // a column
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

// Of codes of a byte, from patch columns: column `j` of this thread's patch is one piece.
class ColumnWriter : public PieceWriter<kAcross> {
   public:
    using PieceWriter::PieceWriter;
    using PieceWriter::put;
    __device__ void put(int j, uint2 codes) { put(kPatch * patch_column() + j, patch_row(), codes); }
};

}  // namespace dlp
