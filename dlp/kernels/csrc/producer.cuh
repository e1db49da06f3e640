// A producer computes the elements of a tile between the loads and the cast, so that the elements are never stored. A cast
// kernel is compiled for each producer that the kernel supports (`with_source`, launch.cuh).
//
//   Producer      elements that are cast                        bytes read per element of bf16
//   kMatrix       x                                             2
//   kRmsNorm      x * rstd[row] * weight[col]                   2
//   kLayerNorm    (x - mean) * rstd * weight + bias             2
//   kSwiglu       silu(x) * up                                  4
//   kColumnSums   x; also sums[tile row, col], for dbias        2
//   kActivation   act(x)                                        2
//   kGate         act(x) * up or act'(x) * up; optional sums    4
//
// `TileProducer<T, kProducer>` has these steps; TileLoader (tile.cuh) calls them:
//
//   start(tile)                   when the copy of the tile starts: starts the copy of a second matrix
//   load(tile)                    before the wait for the tile: loads and returns further inputs
//   apply(loaded, tile, patch)    after the loads: replaces the loaded elements in this thread's patch by the computed elements
//
// A producer with `kInPlace` rewrites the patch row by row in shared memory. The loop over rows is not unrolled, so
// that the code of tanh and exp exists once per activation, not eight times.
//
//   apply_in_place(tile, copies)  when the copy of a prefetched tile has arrived: writes the computed patch to `copies`
//   finish(tile, patch)           when the patch has been read into registers
//
// Elements outside of the matrix are 0 before and after, because they enter amaxes of blocks and sums.
// bench/results/producers.md compares casts with a producer to separate kernels. Casts to NVFP4, which are bound by
// instructions, are slower with producers, and support only kColumnSums.
#pragma once

#include "activations.cuh"
#include "tile_copies.cuh"

namespace dlp {

// Patch of this thread, directly from a matrix with `stride` between rows; zeros outside of the matrix.
template <class T, class Tile>
__device__ void read_patch(const T* matrix, int64_t stride, bool aligned, const Tile& tile, Octet<T> (&patch)[kPatch]) {
    const int64_t row = tile.row() + kPatch * patch_row(), col = tile.col() + kPatch * patch_column();
    const int64_t rows = tile.patch_rows(), cols = tile.patch_cols();
#pragma unroll
    for (int i = 0; i < kPatch; ++i)
        patch[i] = load_octet(matrix + (row + i) * stride + col, i < rows ? cols : 0, aligned);
}

// kMatrix: the elements of the matrix. Base class of the other producers, whose steps do nothing.
template <class T, Producer kProducer>
struct TileProducer {
    static constexpr size_t kBytes = 0;
    static constexpr bool kInPlace = false;
    struct Loaded {};

    __device__ TileProducer(const Source&, uint8_t*) {}
    __device__ bool aligned() const { return true; }
    template <class Tile>
    __device__ void start(const Tile&) const {}
    template <class Tile>
    __device__ Loaded load(const Tile&) const {
        return {};
    }
    template <class Tile>
    __device__ void apply(const Loaded&, const Tile&, Octet<T> (&)[kPatch]) const {}
};
template <class T>
using StoredMatrix = TileProducer<T, Producer::kMatrix>;

// kRmsNorm: x * rstd[row] * weight[col].
template <class T>
struct TileProducer<T, Producer::kRmsNorm> : StoredMatrix<T> {
    struct Loaded {
        Octet<float> rstd, weight;  // rstd of the rows of the patch; weight of its columns
    };

    __device__ TileProducer(const Source& source, uint8_t* bytes) : StoredMatrix<T>(source, bytes), source_(source) {}
    template <class Tile>
    __device__ Loaded load(const Tile& tile) const {
        const int64_t row = tile.row() + kPatch * patch_row(), col = tile.col() + kPatch * patch_column();
        return {load_cached(source_.rstd, true, row, tile.patch_rows()),
                load_cached(source_.weight, source_.wide, col, tile.patch_cols())};
    }
    template <class Tile>
    __device__ void apply(const Loaded& loaded, const Tile& tile, Octet<T> (&patch)[kPatch]) const {
        const int64_t rows = tile.whole ? kPatch : tile.patch_rows();
#pragma unroll
        for (int i = 0; i < kPatch; ++i)
            if (i < rows) patch[i] = normed(patch[i], loaded.rstd[i], loaded.weight);
    }

   private:
    const Source& source_;
};

// kLayerNorm: (x - mean[row]) * rstd[row] * weight[col] + bias[col]. mean and rstd are loaded row by row: four octets besides
// the patch would spill registers.
template <class T>
struct TileProducer<T, Producer::kLayerNorm> : StoredMatrix<T> {
    struct Loaded {
        Octet<float> weight, bias;
    };

    __device__ TileProducer(const Source& source, uint8_t* bytes) : StoredMatrix<T>(source, bytes), source_(source) {}
    template <class Tile>
    __device__ Loaded load(const Tile& tile) const {
        const int64_t col = tile.col() + kPatch * patch_column(), cols = tile.patch_cols();
        return {load_cached(source_.weight, source_.wide, col, cols), load_cached(source_.bias, source_.wide, col, cols)};
    }
    template <class Tile>
    __device__ void apply(const Loaded& loaded, const Tile& tile, Octet<T> (&patch)[kPatch]) const {
        const int64_t first = tile.row() + kPatch * patch_row(), rows = tile.whole ? kPatch : tile.patch_rows();
#pragma unroll
        for (int i = 0; i < kPatch; ++i)
            if (i < rows)
                patch[i] = layer_normed(patch[i], source_.mean[first + i], source_.rstd[first + i], loaded.weight, loaded.bias);
    }

   private:
    const Source& source_;
};

// kSwiglu: silu(x) * up. The tile of `up` is copied to shared memory like the tile of x.
template <class T>
struct TileProducer<T, Producer::kSwiglu> : StoredMatrix<T> {
    static constexpr size_t kBytes = TileCopies<T>::kBytes;
    struct Loaded {
        Octet<T> up[kPatch];
    };

    __device__ TileProducer(const Source& source, uint8_t* bytes) : StoredMatrix<T>(source, bytes), source_(source), copies_(bytes) {}
    __device__ bool aligned() const {
        return source_.up_stride * int64_t(sizeof(T)) % 16 == 0 && reinterpret_cast<uintptr_t>(source_.up) % 16 == 0;
    }
    template <class Tile>
    __device__ void start(const Tile& tile) {
        copies_.start(static_cast<const T*>(source_.up) + tile.row() * source_.up_stride + tile.col(), source_.up_stride);
    }
    template <class Tile>
    __device__ Loaded load(const Tile& tile) {
        Loaded loaded;
        if (tile.prefetched)
            copies_.finish(loaded.up);
        else
            read_patch(static_cast<const T*>(source_.up), source_.up_stride, aligned(), tile, loaded.up);
        return loaded;
    }
    template <class Tile>
    __device__ void apply(const Loaded& loaded, const Tile&, Octet<T> (&patch)[kPatch]) const {
#pragma unroll
        for (int i = 0; i < kPatch; ++i) patch[i] = gated(patch[i], loaded.up[i]);
    }

   private:
    const Source& source_;
    TileCopies<T> copies_;
};

// Adds sums[warp][column of the tile], each over the 16 rows of a warp, by halves over the warps, and stores the results in
// `to` [row tiles, cols].
template <class Tile>
__device__ void write_sums(float* to, const float (*sums)[kTile], const Tile& tile) {
    if (threadIdx.x >= kTile || tile.col() + threadIdx.x >= tile.cols()) return;
    float sum[kTileWarps];
#pragma unroll
    for (int i = 0; i < kTileWarps; ++i) sum[i] = sums[i][threadIdx.x];
#pragma unroll
    for (int half = kTileWarps / 2; half > 0; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) sum[i] = __fadd_rn(sum[i], sum[i + half]);
    to[tile.tile_row * tile.cols() + tile.col() + threadIdx.x] = sum[0];
}

// The sum of each column of a tile, in the order of reference.producers.tile_sums: the rows of a patch in order, plus
// the rows of the patch below, then the warps by halves. Contains a barrier; the caller must put another barrier
// between two calls.
template <class T, class Tile>
__device__ void sum_columns(const Octet<T> (&patch)[kPatch], const Tile& tile, float (*sums)[kTile], float* to) {
    float sum[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        sum[j] = patch[0][j];
#pragma unroll
        for (int i = 1; i < kPatch; ++i) sum[j] = __fadd_rn(sum[j], patch[i][j]);
        sum[j] = __fadd_rn(sum[j], __shfl_xor_sync(kAllLanes, sum[j], kAcross));
    }
    if (threadIdx.x % 32 < kAcross) {
        float4* place = reinterpret_cast<float4*>(sums[threadIdx.x / 32] + kPatch * patch_column());
        place[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        place[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
    __syncthreads();
    write_sums(to, sums, tile);
}

// kColumnSums: the elements of the matrix; also sums the columns.
template <class T>
struct TileProducer<T, Producer::kColumnSums> : StoredMatrix<T> {
    static constexpr size_t kBytes = kTileWarps * kTile * sizeof(float);

    __device__ TileProducer(const Source& source, uint8_t* bytes)
        : StoredMatrix<T>(source, bytes), source_(source), sums_(reinterpret_cast<float(*)[kTile]>(bytes)) {}
    template <class Tile>
    __device__ void apply(const typename StoredMatrix<T>::Loaded&, const Tile& tile, Octet<T> (&patch)[kPatch]) const {
        sum_columns(patch, tile, sums_, source_.sums);
    }

   private:
    const Source& source_;
    float (*sums_)[kTile];
};

// kActivation: act(x). kGate (`kHasUp`): act(x) * up or act'(x) * up, optionally with column sums for a bias gradient. Elements
// outside of the matrix are 0, because act(0) is 0 or `up` is 0. Sigmoid is the exception: sigmoid(0) is 0.5, and the code sets
// these elements to 0.
template <class T, bool kHasUp>
class ActivationProducer : public StoredMatrix<T> {
    static constexpr size_t kSums = kHasUp ? kTileWarps * kTile * sizeof(float) : 0;

   public:
    static constexpr size_t kBytes = (kHasUp ? TileCopies<T>::kBytes : 0) + kSums;
    static constexpr bool kInPlace = true;

    __device__ ActivationProducer(const Source& source, uint8_t* bytes)
        : StoredMatrix<T>(source, bytes), source_(source), sums_(reinterpret_cast<float(*)[kTile]>(bytes)), up_copies_(bytes + kSums) {}
    __device__ bool aligned() const {
        return !kHasUp ||
               (source_.up_stride * int64_t(sizeof(T)) % 16 == 0 && reinterpret_cast<uintptr_t>(source_.up) % 16 == 0);
    }
    template <class Tile>
    __device__ void start(const Tile& tile) {
        if (kHasUp)
            up_copies_.start(static_cast<const T*>(source_.up) + tile.row() * source_.up_stride + tile.col(), source_.up_stride);
    }
    template <class Tile>
    __device__ void apply_in_place(const Tile& tile, TileCopies<T>& copies) const {
        const Matrix& x = tile.job->x;
        const int64_t row = tile.row() + kPatch * patch_row(), col = tile.col() + kPatch * patch_column();
        const T* from = static_cast<const T*>(x.data) + row * x.stride + col;
        const T* up = kHasUp ? static_cast<const T*>(source_.up) + row * source_.up_stride + col : nullptr;
        const bool fast = rows_aligned<T>(x), up_fast = aligned();
        with_act(source_.act, [&](auto is) {
#pragma unroll 1
            for (int i = 0; i < kPatch; ++i) {
                const int64_t valid = i < tile.patch_rows() ? tile.patch_cols() : 0;
                const Octet<T> g = tile.prefetched ? copies.get(i) : load_octet(from + i * x.stride, valid, fast);
                Octet<T> up_octet;
                if (kHasUp) up_octet = tile.prefetched ? up_copies_.get(i) : load_octet(up + i * source_.up_stride, valid, up_fast);
                Octet<float> result;
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    const ValueAndSlope at = act<decltype(is)::value>(g[k]);
                    if constexpr (kHasUp) result.set(k, __fmul_rn(source_.slope ? at.slope : at.value, up_octet[k]));
                    else result.set(k, decltype(is)::value == Act::kSigmoid && k >= valid ? 0.0f : at.value);
                }
                copies.put(i, rounded<T>(result));
            }
        });
    }
    template <class Tile>
    __device__ void finish(const Tile& tile, const Octet<T> (&patch)[kPatch]) const {
        if (kHasUp && source_.sums) sum_columns(patch, tile, sums_, source_.sums);
    }

   private:
    const Source& source_;
    float (*sums_)[kTile];
    TileCopies<T> up_copies_;
};
template <class T>
struct TileProducer<T, Producer::kActivation> : ActivationProducer<T, false> {
    using ActivationProducer<T, false>::ActivationProducer;
};
template <class T>
struct TileProducer<T, Producer::kGate> : ActivationProducer<T, true> {
    using ActivationProducer<T, true>::ActivationProducer;
};

}  // namespace dlp
