// Layouts of the fp32 scales of 128-element blocks: compact for transfers, or the layout that GEMMs of cuBLASLt read
// (reference.layout.block_1d_layout and block_2d_layout).
#pragma once

#include "fp8.cuh"

namespace dlp {

// The scales of one operand: `lines` (rows, or rows of tiles) by `blocks` along the contraction.
//
//   compact                               [lines, blocks]
//   VEC128_32F      1x128 blocks          [blocks, pad4(lines)]
//   BLK128x128_32F  128x128 blocks        [lines, pad4(blocks)]
//
// pad4: zero-padded to a multiple of 4.
struct BlockScales {
    float* to;
    int64_t lines, blocks;
    bool gemm_layout;

    __device__ void store_row(int64_t line, int64_t block, float scale_inv) const {
        const int64_t pitch = gemm_layout ? pad4(lines) : blocks;
        if (gemm_layout && line < pitch)
            to[block * pitch + line] = line < lines ? scale_inv : 0.0f;
        else if (line < lines)
            store_evict_last(to + line * pitch + block, __float_as_uint(scale_inv));
    }
    __device__ void store_tile(int64_t line, int64_t block, float scale_inv) const {
        const int64_t pitch = gemm_layout ? pad4(blocks) : blocks;
        to[line * pitch + block] = scale_inv;
        if (block == blocks - 1)
#pragma unroll 1
            for (int64_t pad = blocks; pad < pitch; ++pad) to[line * pitch + pad] = 0.0f;
    }
    static __device__ int64_t pad4(int64_t size) { return (size + 3) / 4 * 4; }
};

}  // namespace dlp
