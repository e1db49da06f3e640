// Code that both Hopper GEMMs of FP8 codes share: tensor maps, the number of resident clusters, and the store of a row in bf16.
// The loops over the contraction are not shared: a common source changes the order of instructions, and is slower.
#pragma once

#include "hopper.cuh"

namespace dlp {

constexpr int kTileK = 128;  // codes along the contraction in a stage, one line of the 128-byte swizzle

// Exchange between two lanes that differ by `distance`: afterwards the first lane has both values of a, and the lane with
// `second` has both values of b.
__device__ inline void exchange(uint32_t& a, uint32_t& b, bool second, int distance) {
    const uint32_t other = __shfl_xor_sync(~0u, second ? a : b, distance);
    if (second) a = other;
    else b = other;
}

// One row of a product; `first` is the first column. Four adjacent lanes have eight adjacent columns, two columns each. Lanes
// exchange values of four times eight columns, so that each lane stores eight columns at once.
template <class Job, int kEights>
__device__ inline void store_row(const Job& job, const float2 (&row)[kEights], int64_t line, int first, __nv_bfloat16*) {
    const bool odd = threadIdx.x % 2, high = threadIdx.x / 2 % 2;
    const int col = first + threadIdx.x % 4 * 8;
    __nv_bfloat16* to = static_cast<__nv_bfloat16*>(job.d) + line * job.d_stride + col;
#pragma unroll
    for (int i = 0; i < kEights; i += 4) {
        uint32_t v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const __nv_bfloat162 two = __float22bfloat162_rn(row[i + k]);
            v[k] = reinterpret_cast<const uint32_t&>(two);
        }
        exchange(v[0], v[1], odd, 1), exchange(v[2], v[3], odd, 1);
        exchange(v[0], v[2], high, 2), exchange(v[1], v[3], high, 2);
        if (line < job.rows && col + 8 * i < job.cols) *reinterpret_cast<uint4*>(to + 8 * i) = {v[0], v[1], v[2], v[3]};
    }
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline Encode encode() {
    static const Encode found = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
        DLP_CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result));
        DLP_CHECK_EQ(int(result), int(cudaDriverEntryPointSuccess));
        return reinterpret_cast<Encode>(function);
    }();
    return found;
}

// Tensor map of codes [lines, along], which are copied in boxes of [box, 128]; elements outside of the matrix are 0. `stride`:
// bytes between lines.
inline CUtensorMap tensor_map(const uint8_t* codes, int64_t lines, int64_t along, int64_t stride, int box) {
    const cuuint64_t sizes[] = {cuuint64_t(along), cuuint64_t(lines)}, strides[] = {cuuint64_t(stride)};
    const cuuint32_t boxes[] = {kTileK, cuuint32_t(box)}, steps[] = {1, 1};
    CUtensorMap map;
    const CUresult status = encode()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<uint8_t*>(codes), sizes, strides, boxes,
                                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    DLP_CHECK_EQ(int(status), int(CUDA_SUCCESS));
    return map;
}

// Number of clusters that are resident at the same time on the current device.
template <auto kKernel, int kCluster>
int resident_clusters(cudaLaunchConfig_t config) {
    static std::array<int, kMaxDevices> resident{};
    int device;
    DLP_CHECK_CUDA(cudaGetDevice(&device));
    DLP_CHECK_LT(device, kMaxDevices);
    if (resident[device] == 0) {
        DLP_CHECK_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(config.dynamicSmemBytes)));
        config.gridDim = dim3(kCluster);
        DLP_CHECK_CUDA(cudaOccupancyMaxActiveClusters(&resident[device], kKernel, &config));
        DLP_CHECK_LT(0, resident[device]);
    }
    return resident[device];
}

inline int over(int64_t size, int unit) { return int((size + unit - 1) / unit); }

}  // namespace dlp
