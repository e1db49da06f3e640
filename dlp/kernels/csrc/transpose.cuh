// Casts in which one scale covers the tile or the tensor, so that both orientations have the same codes: a patch is encoded
// once, and its bytes are transposed in registers.
#pragma once

#include "tile.cuh"

namespace dlp {

// Transposes 4x4 bytes, one row per word.
__device__ inline void transpose_4x4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
    const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);  // a0 b0 a1 b1, a2 b2 a3 b3
    const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab_low, cd_low, 0x5410);
    b = __byte_perm(ab_low, cd_low, 0x7632);
    c = __byte_perm(ab_high, cd_high, 0x5410);
    d = __byte_perm(ab_high, cd_high, 0x7632);
}

// Transposes 8x8 bytes: transposes each of the four 4x4 quarters, then exchanges the upper right and the lower left quarter.
__device__ inline void transpose_8x8(uint2 (&row)[8]) {
    transpose_4x4(row[0].x, row[1].x, row[2].x, row[3].x);
    transpose_4x4(row[0].y, row[1].y, row[2].y, row[3].y);
    transpose_4x4(row[4].x, row[5].x, row[6].x, row[7].x);
    transpose_4x4(row[4].y, row[5].y, row[6].y, row[7].y);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t corner = row[i].y;
        row[i].y = row[i + 4].x;
        row[i + 4].x = corner;
    }
}

// Stores the codes of a patch, row[i] for row i, in the requested orientations. Contains a barrier if codes_t is requested.
template <class T, class Job>
__device__ void write_codes(uint2 (&row)[kPatch], const Tile<T, Job>& tile, ColumnWriter& columns) {
    if (uint8_t* codes = tile.job->codes) {
        const RowWriter writer(codes, tile);
#pragma unroll
        for (int i = 0; i < kPatch; ++i) writer.put(i, row[i]);
    }
    if (uint8_t* codes_t = tile.job->codes_t) {
        transpose_8x8(row);
#pragma unroll
        for (int j = 0; j < kPatch; ++j) columns.put(j, row[j]);
        __syncthreads();
        columns.write(codes_t, tile);
    }
}

// Casts the patch of a tile by one scale and stores the requested outputs; with `kObserve` also staging = max(staging,
// max |x|). `scratch` has one word per warp. Contains barriers.
template <class F8, bool kObserve, class T>
__device__ void cast_by_scale(const TensorJob& job, const Tile<T, TensorJob>& tile, const Octet<T> (&patch)[kPatch], float scale,
                              ColumnWriter& columns, uint32_t* scratch) {
    flag_not_finite(patch, job);

    Maxima<T> maxima;
    uint2 codes[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
        codes[i] = encode_row<F8>(patch[i], scale);
        if (kObserve) maxima.take(patch[i]);
    }
    write_codes(codes, tile, columns);
    if (kObserve) {
        const uint32_t bits = block_max(maxima.largest(), scratch);
        if (threadIdx.x == 0) atomic_max(job.staging, bits);
    }
}

}  // namespace dlp
