// Scale bytes of MXFP8 and NVFP4 -> the layout that block-scaled GEMMs of cuBLASLt read (reference.layout.swizzle_128x4):
// tiles of 128 lines by 4 blocks, 512 bytes each, where the byte of line r and block c lies at
//
//   ((r / 128) * ceil(blocks / 4) + c / 4) * 512 + (r % 32) * 16 + (r % 128) / 32 * 4 + c % 4
//
// A thread writes the four bytes of one line in one tile. Bytes beyond the matrix are 0. If several lines share a scale (2D
// blocks), the scale is repeated for each line.
#include "launch.cuh"

namespace dlp {
namespace {

constexpr int kThreads = 256;
constexpr int kWords = 128;  // number of 4-byte words in a tile

__global__ void __launch_bounds__(kThreads) swizzle_scales_kernel(SwizzleJob job, int64_t words) {
    const int64_t word = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (word >= words) return;
    const int64_t across = (job.blocks + 3) / 4, tile = word / kWords;
    const int within = int(word % kWords);
    const int64_t line = tile / across * 128 + within % 4 * 32 + within / 4, block = tile % across * 4;
    uint32_t bytes = 0;
    if (line < job.lines) {
        const uint8_t* from = job.scale + line / job.lines_per_scale * job.line_stride + block * job.block_stride;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (block + i < job.blocks) bytes |= uint32_t(from[i * job.block_stride]) << 8 * i;
    }
    job.out[word] = bytes;
}

}  // namespace

void swizzle_scales(const SwizzleJob& job, Stream stream) {
    const int64_t words = (job.lines + 127) / 128 * ((job.blocks + 3) / 4) * kWords;
    if (words) launch<swizzle_scales_kernel>((words + kThreads - 1) / kThreads, kThreads, 0, stream, job, words);
}

}  // namespace dlp
