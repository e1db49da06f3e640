// What makes the elements of a tile between memory and the cast, so that they are never stored: `Maker<T, kProducer>`.
//
//   begin(tile)                when the copy of a tile starts: a copy of its own
//   take(tile)                 when the tile is wanted: what is read beside it
//   make(taken, tile, patch)   the patch of this thread, from memory's elements to the producer's
//
// One that `kFills` makes a row of the patch after the other where its copy lies, in a loop, so that what takes many
// instructions is there once:
//
//   fill(tile, copies, ...)    the copy of this thread's patch, which has arrived if it is on its way
//   made(tile, patch)          the patch has been read
//
// Elements outside of the matrix are 0 before and after.
#pragma once

#include "activations.cuh"
#include "tile_copies.cuh"

namespace dlp {

// The patch of this thread, from a matrix whose rows lie `stride` apart.
template <class T, class Tile>
__device__ void read_patch(const T* matrix, int64_t stride, bool aligned, const Tile& tile, Octet<T> (&patch)[kPatch]) {
    const int64_t row = tile.row() + kPatch * patch_row(), col = tile.col() + kPatch * patch_column();
    const int64_t rows = tile.patch_rows(), cols = tile.patch_cols();
#pragma unroll
    for (int i = 0; i < kPatch; ++i)
        patch[i] = load_octet(matrix + (row + i) * stride + col, i < rows ? cols : 0, aligned);
}

// The matrix itself; and what a producer need not say.
template <class T, Producer kProducer>
struct Maker {
    static constexpr size_t kBytes = 0;
    static constexpr bool kFills = false;
    struct Taken {};

    __device__ Maker(const Source&, uint8_t*) {}
    __device__ bool aligned() const { return true; }
    template <class Tile>
    __device__ void begin(const Tile&) const {}
    template <class Tile>
    __device__ Taken take(const Tile&) const {
        return {};
    }
    template <class Tile>
    __device__ void make(const Taken&, const Tile&, Octet<T> (&)[kPatch]) const {}
};
template <class T>
using AsItIs = Maker<T, Producer::kMatrix>;

// Its rows normalized: x * rstd[row] * weight[col].
template <class T>
struct Maker<T, Producer::kRmsNorm> : AsItIs<T> {
    struct Taken {
        Octet<float> rstd, weight;  // of the patch's rows, of its columns
    };

    __device__ Maker(const Source& source, uint8_t* bytes) : AsItIs<T>(source, bytes), source_(source) {}
    template <class Tile>
    __device__ Taken take(const Tile& tile) const {
        const int64_t row = tile.row() + kPatch * patch_row(), col = tile.col() + kPatch * patch_column();
        return {load_kept(source_.rstd, true, row, tile.patch_rows()),
                load_kept(source_.weight, source_.wide, col, tile.patch_cols())};
    }
    template <class Tile>
    __device__ void make(const Taken& taken, const Tile& tile, Octet<T> (&patch)[kPatch]) const {
        const int64_t rows = tile.whole ? kPatch : tile.patch_rows();
#pragma unroll
        for (int i = 0; i < kPatch; ++i)
            if (i < rows) patch[i] = normed(patch[i], taken.rstd[i], taken.weight);
    }

   private:
    const Source& source_;
};

// silu(x) * up.
template <class T>
struct Maker<T, Producer::kSwiglu> : AsItIs<T> {
    static constexpr size_t kBytes = TileCopies<T>::kBytes;
    struct Taken {
        Octet<T> up[kPatch];
    };

    __device__ Maker(const Source& source, uint8_t* bytes) : AsItIs<T>(source, bytes), source_(source), copies_(bytes) {}
    __device__ bool aligned() const {
        return source_.up_stride * int64_t(sizeof(T)) % 16 == 0 && reinterpret_cast<uintptr_t>(source_.up) % 16 == 0;
    }
    template <class Tile>
    __device__ void begin(const Tile& tile) {
        copies_.start(static_cast<const T*>(source_.up) + tile.row() * source_.up_stride + tile.col(), source_.up_stride);
    }
    template <class Tile>
    __device__ Taken take(const Tile& tile) {
        Taken taken;
        if (tile.copied)
            copies_.finish(taken.up);
        else
            read_patch(static_cast<const T*>(source_.up), source_.up_stride, aligned(), tile, taken.up);
        return taken;
    }
    template <class Tile>
    __device__ void make(const Taken& taken, const Tile&, Octet<T> (&patch)[kPatch]) const {
#pragma unroll
        for (int i = 0; i < kPatch; ++i) patch[i] = gated(patch[i], taken.up[i]);
    }

   private:
    const Source& source_;
    TileCopies<T> copies_;
};

// From the sums of each warp's columns to `to` [tiles down, cols]: added by halves.
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
    to[tile.down * tile.cols() + tile.col() + threadIdx.x] = sum[0];
}

// The sum of each column of a tile: rows of a patch in order, then the patch below, then the warps by halves. Contains a
// barrier; between two calls lies another.
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

// The matrix itself; beside it the sum of each column of each tile.
template <class T>
struct Maker<T, Producer::kColumnSums> : AsItIs<T> {
    static constexpr size_t kBytes = kTileWarps * kTile * sizeof(float);

    __device__ Maker(const Source& source, uint8_t* bytes)
        : AsItIs<T>(source, bytes), source_(source), sums_(reinterpret_cast<float(*)[kTile]>(bytes)) {}
    template <class Tile>
    __device__ void make(const typename AsItIs<T>::Taken&, const Tile& tile, Octet<T> (&patch)[kPatch]) const {
        sum_columns(patch, tile, sums_, source_.sums);
    }

   private:
    const Source& source_;
    float (*sums_)[kTile];
};

// act(x), act(x) * up or act'(x) * up, of which the last may take the sums of its columns.
template <class T, bool kBeside>
class Acted : public AsItIs<T> {
    static constexpr size_t kSums = kBeside ? kTileWarps * kTile * sizeof(float) : 0;

   public:
    static constexpr size_t kBytes = (kBeside ? TileCopies<T>::kBytes : 0) + kSums;
    static constexpr bool kFills = true;

    __device__ Acted(const Source& source, uint8_t* bytes)
        : AsItIs<T>(source, bytes), source_(source), sums_(reinterpret_cast<float(*)[kTile]>(bytes)), ups_(bytes + kSums) {}
    __device__ bool aligned() const {
        return !kBeside ||
               (source_.up_stride * int64_t(sizeof(T)) % 16 == 0 && reinterpret_cast<uintptr_t>(source_.up) % 16 == 0);
    }
    template <class Tile>
    __device__ void begin(const Tile& tile) {
        if (kBeside)
            ups_.start(static_cast<const T*>(source_.up) + tile.row() * source_.up_stride + tile.col(), source_.up_stride);
    }
    template <class Tile>
    __device__ void fill(const Tile& tile, TileCopies<T>& copies) const {
        const Matrix& x = tile.job->x;
        const int64_t row = tile.row() + kPatch * patch_row(), col = tile.col() + kPatch * patch_column();
        const T* from = static_cast<const T*>(x.data) + row * x.stride + col;
        const T* up = kBeside ? static_cast<const T*>(source_.up) + row * source_.up_stride + col : nullptr;
        const bool fast = rows_aligned<T>(x), up_fast = aligned();
        with_act(source_.act, [&](auto is) {
#pragma unroll 1
            for (int i = 0; i < kPatch; ++i) {
                const int64_t valid = i < tile.patch_rows() ? tile.patch_cols() : 0;
                const Octet<T> g = tile.copied ? copies.get(i) : load_octet(from + i * x.stride, valid, fast);
                Octet<T> beside;
                if (kBeside) beside = tile.copied ? ups_.get(i) : load_octet(up + i * source_.up_stride, valid, up_fast);
                Octet<float> made;
#pragma unroll
                for (int k = 0; k < 8; ++k) {
                    const Slope at = act<decltype(is)::value>(g[k]);
                    if constexpr (kBeside) made.set(k, __fmul_rn(source_.slope ? at.slope : at.value, beside[k]));
                    else made.set(k, at.value);
                }
                copies.put(i, rounded<T>(made));
            }
        });
    }
    template <class Tile>
    __device__ void made(const Tile& tile, const Octet<T> (&patch)[kPatch]) const {
        if (kBeside && source_.sums) sum_columns(patch, tile, sums_, source_.sums);
    }

   private:
    const Source& source_;
    float (*sums_)[kTile];
    TileCopies<T> ups_;
};
template <class T>
struct Maker<T, Producer::kActivation> : Acted<T, false> {
    using Acted<T, false>::Acted;
};
template <class T>
struct Maker<T, Producer::kBeside> : Acted<T, true> {
    using Acted<T, true>::Acted;
};

}  // namespace dlp
