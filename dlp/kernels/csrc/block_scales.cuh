// Where the fp32 scales of 128-element blocks are stored: compact, as they travel, or as the GEMM reads them.
#pragma once

#include "fp8.cuh"

namespace dlp {

// The scales of one operand: `lines` rows or row tiles by `blocks` along the contraction. Compact is [lines, blocks].
// VEC128_32F (one row a line) wants [blocks, pad4(lines)], BLK128x128_32F (a tile a line) [lines, pad4(blocks)]: in both
// the dimension that ends in memory is filled up to a multiple of 4, with zeros.
struct BlockScales {
    float* to;
    int64_t lines, blocks;
    bool gemm_layout;

    __device__ void store_row(int64_t line, int64_t block, float scale_inv) const {
        const int64_t pitch = gemm_layout ? pad4(lines) : blocks;
        if (gemm_layout && line < pitch)
            to[block * pitch + line] = line < lines ? scale_inv : 0.0f;
        else if (line < lines)
            store_lasting(to + line * pitch + block, __float_as_uint(scale_inv));
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
