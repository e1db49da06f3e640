// Casts with one scale per row (or row block) in one orientation and one per column in the other: the elements are read once
// and encoded twice.
#pragma once

#include "tile.cuh"

namespace dlp {

// The scales of the eight rows, or of the eight columns, of a patch, read from shared memory; the address is a multiple of 16.
struct Scales {
    float of[kPatch];

    Scales() = default;
    __device__ explicit Scales(const float* from) {
        const float4 low = *reinterpret_cast<const float4*>(from), high = *reinterpret_cast<const float4*>(from + 4);
        of[0] = low.x, of[1] = low.y, of[2] = low.z, of[3] = low.w;
        of[4] = high.x, of[5] = high.y, of[6] = high.z, of[7] = high.w;
    }
};

template <class F8, class T, class Job>
__device__ void write_rows(const Octet<T> (&patch)[kPatch], const Scales& scales, const Tile<T, Job>& tile) {
    const RowWriter writer(tile.job->codes, tile);
#pragma unroll
    for (int i = 0; i < kPatch; ++i) writer.put(i, encode_row<F8>(patch[i], scales.of[i]));
}

template <class F8, class T>
__device__ void put_columns(const Octet<T> (&patch)[kPatch], const Scales& scales, ColumnWriter& columns) {
#pragma unroll
    for (int j = 0; j < kPatch; ++j) columns.put(j, encode_column<F8>(patch, j, scales.of[j]));
}

// Casts the patch of this thread and stores the requested orientations. `scale` [256], in shared memory: scales of the rows of
// the tile, then of the columns. Contains a barrier if codes_t is requested.
template <class F8, class T, class Job>
__device__ void write_scaled(const Octet<T> (&patch)[kPatch], const float* scale, const Tile<T, Job>& tile,
                             ColumnWriter& columns) {
    if (tile.job->codes) write_rows<F8>(patch, Scales(scale + kPatch * patch_row()), tile);
    if (tile.job->codes_t) {
        put_columns<F8>(patch, Scales(scale + kTile + kPatch * patch_column()), columns);
        __syncthreads();
        columns.write(tile.job->codes_t, tile);
    }
}

}  // namespace dlp
