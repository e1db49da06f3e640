// Per-tensor FP8 cast in one orientation:
//
//   x [rows, cols] -> codes [rows, cols], scale_inv []
//   q = enc(fl(x * scale)),   scale_inv = fl(1 / scale)
//
// The scale is computed from an amax on the device (current scaling) or given (delayed scaling). With `staging` max |x|
// is computed in the same read. Bitwise equal to reference.fp8.cast_fp8_tensor. Any rows, cols and stride.
//
// Grid: a block of 256 threads processes one chunk of 1024 octets; this keeps more loads in flight than a persistent grid.
// Neighbouring lanes load adjacent 16 bytes and store adjacent 8 bytes. Bound by memory: 3 bytes per element of bf16, 5 of
// fp32.
#include "fp8.cuh"

namespace dlp {
namespace {

constexpr int kThreads = 256;
constexpr int kOctets = 4;  // octets per thread
constexpr int64_t kChunk = kThreads * kOctets;

template <class T, class F8>
__global__ void __launch_bounds__(kThreads) cast_tensor_kernel(TensorJob job, ScaleRule rule) {
    const Octets<T> octets(job.x);
    const int64_t begin = blockIdx.x * kChunk;
    const bool adjacent = octets.adjacent(begin, kChunk);
    const float source = scale_source(job);

    Octet<T> octet[kOctets];
    if (adjacent) {
        const T* from = octets.data + 8 * (begin + threadIdx.x);
#pragma unroll
        for (int i = 0; i < kOctets; ++i) octet[i] = load_octet(from + 8 * i * kThreads);
    } else {
#pragma unroll
        for (int i = 0; i < kOctets; ++i) octet[i] = octets.load(octets.place(begin + i * kThreads + threadIdx.x));
    }

    Finite<T> finite;
#pragma unroll
    for (int i = 0; i < kOctets; ++i) finite.take(octet[i]);
    finite.report(job.flag);

    const float scale = scale_of(job, source, rule);
    const bool aligned = codes_aligned(job.codes, octets.rows, octets.cols);
#pragma unroll
    for (int i = 0; i < kOctets; ++i) {
        const int64_t number = begin + i * kThreads + threadIdx.x;
        const auto at = adjacent ? typename Octets<T>::Place{0, 8 * number, 8} : octets.place(number);
        store_octet(job.codes + at.row * octets.cols + at.column, encode_row<F8>(octet[i], scale), at.valid, aligned);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0 && job.scale_inv) *job.scale_inv = __frcp_rn(scale);

    if (job.staging) {
        Maxima<T> maxima;
#pragma unroll
        for (int i = 0; i < kOctets; ++i) maxima.take(octet[i]);
        const uint32_t bits = block_max(maxima.largest(), reinterpret_cast<uint32_t*>(shared_memory()));
        if (threadIdx.x == 0) atomic_max(job.staging, bits);
    }
}

}  // namespace

void cast_tensor(const TensorJob& job, Input input, Code code, const ScaleRule& rule, Stream stream) {
    const int64_t octets = job.x.rows * ((job.x.cols + 7) / 8);
    const int64_t blocks = std::max((octets + kChunk - 1) / kChunk, int64_t(1));
    with_types(input, code, [&](auto element, auto f8) {
        constexpr auto kernel = cast_tensor_kernel<decltype(element), decltype(f8)>;
        launch<kernel>(blocks, kThreads, kThreads / 32 * sizeof(uint32_t), stream, job, rule);
    });
}

}  // namespace dlp
