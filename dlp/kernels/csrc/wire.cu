// FP8 wire of a reduce-scatter: pack_fp8_wire quantizes the contribution [rows, cols] of a rank to E4M3 with one fp32 scale per
// 128 columns, sum_fp8_wire adds the contributions of R ranks. Bitwise equal to reference.wire.pack_fp8 and sum_fp8, except for
// the payload of a NaN.
//
// Packing: 16 threads process a block of 128, one octet per thread, and reduce their maxima by shuffles. Magnitudes are
// compared as bits, so that NaN exceeds Inf, and Inf exceeds all numbers: scale_inv of such a block is NaN or Inf, and no value
// of the block decodes to a finite value. The sum reads each contribution once, adds in fp32 in the order of the ranks and
// rounds once.
//
// If cols % 8 == 0, codes are read and written eight at a time, and a bf16 sum 16 bytes at a time. The addresses must then be
// multiples of 8 and 16, which the host functions check.
#include "fp8.cuh"

namespace dlp {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlock = 128;
constexpr unsigned kLanes = kBlock / 8;  // threads that process a block of 128
constexpr uint32_t kInfinity = 0x7F800000u;

template <class T>
__device__ uint32_t largest_magnitude(const Octet<T>& x) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits = max(bits, __float_as_uint(x[i]) & 0x7FFFFFFFu);
    return bits;
}

template <class T>
__global__ void __launch_bounds__(kThreads) pack_fp8_wire_kernel(const __grid_constant__ WireMatrix job) {
    const int64_t across = (job.cols + kBlock - 1) / kBlock, blocks = job.rows * across;
    const int64_t step = int64_t(gridDim.x) * blockDim.x / kLanes;
    const T* x = static_cast<const T*>(job.x);
    const bool aligned = job.cols % 8 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
    // Both halves of a warp leave the loop together, because all lanes take part in the shuffles: the loop ends when the lower
    // half is past the last block.
    const int64_t first = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / kLanes, lane = threadIdx.x % kLanes;
    for (int64_t at = first; at - int64_t(threadIdx.x / kLanes % 2) < blocks; at += step) {
        const int64_t row = at < blocks ? divide(at, across) : 0, column = kBlock * (at - row * across) + 8 * lane;
        const int64_t valid = at < blocks ? job.cols - column : 0;
        const Octet<T> octet = load_octet(x + row * job.cols + column, valid, aligned);
        uint32_t bits = largest_magnitude(octet);
#pragma unroll
        for (unsigned other = 1; other < kLanes; other *= 2) bits = max(bits, __shfl_xor_sync(kAllLanes, bits, other));
        const float amax = __uint_as_float(bits);
        const bool usual = bits != 0 && bits < kInfinity;
        const float scale = usual ? __fdiv_rn(448.0f, fmaxf(amax, job.min_amax)) : 1.0f;
        if (valid > 0)
            store_octet(job.codes + row * job.cols + column, encode_row<E4m3>(octet, scale), valid, job.cols % 8 == 0);
        if (lane == 0 && at < blocks) job.scale[at] = bits < kInfinity ? __frcp_rn(scale) : amax;
    }
}

__device__ uint2 load_codes(const uint8_t* from, int64_t valid, bool aligned) {
    if (aligned && valid >= 8) return __ldcs(reinterpret_cast<const uint2*>(from));
    uint64_t bytes = 0;
    for (int i = 0; i < min(valid, int64_t(8)); ++i) bytes |= uint64_t(from[i]) << 8 * i;
    return make_uint2(uint32_t(bytes), uint32_t(bytes >> 32));
}

__device__ void store(float* to, const float (&x)[8], int64_t valid, bool) {
    for (int i = 0; i < min(valid, int64_t(8)); ++i) to[i] = x[i];
}

__device__ void store(__nv_bfloat16* to, const float (&x)[8], int64_t valid, bool aligned) {
    __nv_bfloat162 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    if (aligned && valid >= 8) {
        *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4&>(pairs);
        return;
    }
    for (int i = 0; i < min(valid, int64_t(8)); ++i) to[i] = reinterpret_cast<const __nv_bfloat16*>(pairs)[i];
}

template <class T>
__global__ void __launch_bounds__(kThreads) sum_fp8_wire_kernel(const __grid_constant__ WireSum job) {
    const int64_t across = (job.cols + 7) / 8, octets = job.rows * across, blocks = (job.cols + kBlock - 1) / kBlock;
    const bool aligned = job.cols % 8 == 0;
    for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < octets; at += int64_t(gridDim.x) * blockDim.x) {
        const int64_t row = divide(at, across), column = 8 * (at - row * across), valid = job.cols - column;
        const int64_t element = row * job.cols + column;
        float total[8];
        for (int64_t rank = 0; rank < job.ranks; ++rank) {
            const uint8_t* of_rank = rank == job.own ? job.own_codes : job.codes + rank * job.codes_stride;
            const float* scales = rank == job.own ? job.own_scale : job.scale + rank * job.scale_stride;
            const uint2 codes = load_codes(of_rank + element, valid, aligned);
            const float scale = scales[row * blocks + column / kBlock];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 pair = unpack2<E4m3>((i < 2 ? codes.x : codes.y) >> 16 * (i % 2) & 0xFFFF);
                const float a = __fmul_rn(pair.x, scale), b = __fmul_rn(pair.y, scale);
                total[2 * i] = rank ? __fadd_rn(total[2 * i], a) : a;
                total[2 * i + 1] = rank ? __fadd_rn(total[2 * i + 1], b) : b;
            }
        }
        store(static_cast<T*>(job.out) + element, total, valid, aligned);
    }
}

}  // namespace

void pack_fp8_wire(const WireMatrix& job, Input input, Stream stream) {
    const int64_t threads = job.rows * ((job.cols + kBlock - 1) / kBlock) * kLanes;
    if (threads == 0) return;
    if (job.cols % 8 == 0) DLP_CHECK_EQ(reinterpret_cast<uintptr_t>(job.codes) % 8, 0u);
    with_input(input, [&](auto element) {
        launch_persistent<pack_fp8_wire_kernel<decltype(element)>>((threads + kThreads - 1) / kThreads, kThreads, 0,
                                                                  stream, job);
    });
}

void sum_fp8_wire(const WireSum& job, Input output, Stream stream) {
    const int64_t threads = job.rows * ((job.cols + 7) / 8);
    if (threads == 0) return;
    if (job.cols % 8 == 0) {
        DLP_CHECK_EQ(reinterpret_cast<uintptr_t>(job.codes) % 8, 0u);
        DLP_CHECK_EQ(reinterpret_cast<uintptr_t>(job.own_codes) % 8, 0u);
        if (job.ranks > 1) DLP_CHECK_EQ(job.codes_stride % 8, 0);
        if (output == Input::kBf16) DLP_CHECK_EQ(reinterpret_cast<uintptr_t>(job.out) % 16, 0u);
    }
    with_input(output, [&](auto element) {
        launch_persistent<sum_fp8_wire_kernel<decltype(element)>>((threads + kThreads - 1) / kThreads, kThreads, 0,
                                                                 stream, job);
    });
}

}  // namespace dlp
