// Copies of a tile from global to shared memory, and from shared memory to the patches of 256 threads (tile.cuh).
//
//   LaneCopies   bf16: cp.async of 16 bytes per lane, 32 KB. Each warp copies the elements that it reads, so that no barrier of
//                the block is needed.
//   BulkCopies   fp32: cp.async.bulk of rows of 512 bytes, 64 KB and an mbarrier (arrivals.cuh) that counts the bytes.
//
// Copies by lanes start sooner, but block the issuing threads until the memory system accepts the copies; bulk copies take
// longer to start. By measurements on an H200 (bench/results/quantize.md), casts of bf16 are faster with copies by lanes, casts
// of fp32 with bulk copies.
#pragma once

#include <cuda_pipeline.h>

#include "arrivals.cuh"
#include "octet.cuh"

namespace dlp {

constexpr int kTileThreads = 256;
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kPatch = 8;                  // rows and columns of the patch of a thread
constexpr int kAcross = kTile / kPatch;    // patches in a row of patches of a tile, and in a column
static_assert(kAcross * kAcross == kTileThreads, "each thread has one patch");

// Resident blocks for __launch_bounds__: registers and shared memory allow three blocks for bf16, two for fp32 or with
// a second tile.
template <class T, Producer kProducer = Producer::kMatrix>
constexpr int kTileBlocksPerSm = sizeof(T) == 2 && kProducer != Producer::kSwiglu && kProducer != Producer::kGate ? 3 : 2;

// The patch of this thread among the 16x16 patches of a tile.
__device__ inline int patch_column() { return threadIdx.x % kAcross; }
__device__ inline int patch_row() { return threadIdx.x / kAcross; }

// All threads call `start` for a complete tile with rows aligned to 16 bytes, then `finish`, then `start` for the next tile.
//
// Shared memory: slot (i, v, t) of 16 bytes is vector v of row i of the patch of thread t; slots of neighbouring threads are
// adjacent.
template <class T>
class LaneCopies {
   public:
    static constexpr int kVectors = Octet<T>::kVectors;
    static constexpr size_t kBytes = sizeof(uint4) * kPatch * kVectors * kTileThreads;

    __device__ explicit LaneCopies(uint8_t* bytes) : slots_(reinterpret_cast<uint4*>(bytes)) {}

    // Adjacent lanes copy adjacent bytes of a row. Each lane copies to the slot of the thread whose patch has the bytes; this
    // thread belongs to the same warp, so that no barrier of the block is needed.
    __device__ void start(const T* tile, int64_t stride) const {
        const T* from = tile + kPatch * patch_row() * stride;
#pragma unroll
        for (int i = 0; i < kPatch; ++i)
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                const int vector = v * kAcross + patch_column(), owner = vector / kVectors;
                __pipeline_memcpy_async(slot(i, vector % kVectors, threadIdx.x - patch_column() + owner),
                                        reinterpret_cast<const uint4*>(from + i * stride) + vector, sizeof(uint4));
            }
        __pipeline_commit();
    }
    __device__ void finish(Octet<T> (&patch)[kPatch]) const {
        wait();
        read(patch);
    }

    // The parts of `finish`. Between `wait` and `read`, a thread may change rows of its patch in shared memory by `get` and
    // `put`.
    __device__ void wait() const {
        __pipeline_wait_prior(0);
        __syncwarp();
    }
    __device__ Octet<T> get(int i) const {
        Octet<T> row;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) row.set_vector(v, *slot(i, v, threadIdx.x));
        return row;
    }
    __device__ void put(int i, const Octet<T>& row) const {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) *slot(i, v, threadIdx.x) = row.vector(v);
    }
    __device__ void read(Octet<T> (&patch)[kPatch]) const {
#pragma unroll
        for (int i = 0; i < kPatch; ++i) patch[i] = get(i);
        __syncwarp();
    }

   private:
    __device__ uint4* slot(int i, int v, int thread) const { return slots_ + (i * kVectors + v) * kTileThreads + thread; }

    uint4* slots_;
};

template <class T>
class BulkCopies {
    static_assert(Octet<T>::kVectors == 2, "two vectors per octet: fp32");

   public:
    static constexpr uint32_t kRowBytes = kTile * sizeof(T);
    static constexpr size_t kBytes = kTile * kRowBytes + 16;  // the tile, and the barrier

    __device__ explicit BulkCopies(uint8_t* bytes) : bytes_(bytes), arrived_(bytes + kTile * kRowBytes) {
        if (threadIdx.x == 0) arrived_.init();
    }
    // Every other thread copies a row, 16 rows per warp, because a warp issues bulk copies one by one. Contains a barrier:
    // afterwards all threads see the initialized mbarrier, and have read the previous tile, which the copies overwrite.
    __device__ void start(const T* tile, int64_t stride) {
        __syncthreads();
        if (threadIdx.x == 0) arrived_.expect(kTile * kRowBytes);
        if (threadIdx.x % 2) return;
        const int row = threadIdx.x / 2;
        arrived_.copy(bytes_ + row * kRowBytes, tile + row * stride, kRowBytes);
    }
    __device__ void finish(Octet<T> (&patch)[kPatch]) {
        arrived_.wait();
        const uint4* from = reinterpret_cast<const uint4*>(bytes_ + kPatch * patch_row() * kRowBytes) + 2 * patch_column();
        const int second = patch_column() / 4 & 1;  // vector to read first, so that eight lanes cover all banks
#pragma unroll
        for (int i = 0; i < kPatch; ++i, from += kRowBytes / sizeof(uint4)) {
            const uint4 a = from[second], b = from[1 - second];
            patch[i].set_vector(0, second ? b : a), patch[i].set_vector(1, second ? a : b);
        }
    }

   private:
    uint8_t* bytes_;
    Arrivals arrived_;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900  // no bulk copies
template <class T>
using TileCopies = LaneCopies<T>;
#else
template <class T>
using TileCopies = std::conditional_t<sizeof(T) == 4, BulkCopies<T>, LaneCopies<T>>;
#endif

}  // namespace dlp
