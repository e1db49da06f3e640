// amax = max |x| of one matrix, or of each matrix of a table in one launch (reference.fp8.amax). NaN is ignored, Inf is
// preserved. The result does not depend on the order of the elements, and is therefore deterministic. Bound by memory: reads 2
// (bf16) or 4 (fp32) bytes per element.
//
// Grid: persistent blocks of 256 threads; a piece of work is a chunk of 16,384 elements, eight octets per thread, four of them
// in flight at once. A block keeps its maximum in registers while its chunks belong to one job, and ends with at most one
// atomic per job. A small kernel first sets the outputs to 0; this kernel begins to read while the small kernel runs
// (programmatic dependent launch).
//
// Blocks process chunks from the last to the first, because the cast that follows starts with the first chunks: these are then
// in the L2 cache.
//
// Rejected alternative: partial maxima in scratch memory, which the last block combines. This needs counters in memory that are
// set to 0 and outlive the call.
#include "jobs.cuh"

namespace dlp {
namespace {

constexpr int kThreads = 256;
constexpr int kOctets = kAmaxChunk / (8 * kThreads);  // octets per thread in a chunk
constexpr int kInFlight = 4;                          // octets that a thread loads at once
static_assert(kOctets % kInFlight == 0, "a chunk must be a multiple of the loads in flight");

template <class T>
__device__ void take_chunk(Maxima<T>& maxima, const Matrix& x, int64_t chunk) {
    const Octets<T> octets(x);
    const int64_t begin = chunk * (kAmaxChunk / 8);
    if (!octets.adjacent(begin, kAmaxChunk / 8)) {
        for (int i = 0; i < kOctets; ++i) maxima.take(octets.load(octets.place(begin + i * kThreads + threadIdx.x)));
        return;
    }
    const T* from = octets.data + 8 * (begin + threadIdx.x);
#pragma unroll
    for (int batch = 0; batch < kOctets; batch += kInFlight) {
        Octet<T> octet[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) octet[i] = load_octet<true>(from + 8 * (batch + i) * kThreads);
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) maxima.take(octet[i]);
    }
}

// Combines the maxima of the block with the output of a job.
template <class T>
__device__ void write_maximum(const AmaxJob& job, const Maxima<T>& maxima, uint32_t* scratch) {
    const uint32_t bits = block_max(maxima.largest(), scratch);
    wait_for_previous();  // the kernel that sets the outputs to 0
    if (threadIdx.x == 0) atomic_max(job.out, bits);
}

template <class T>
__global__ void __launch_bounds__(kThreads) amax_kernel(const __grid_constant__ Work<AmaxJob> work) {
    uint32_t* scratch = reinterpret_cast<uint32_t*>(shared_memory());
    Maxima<T> maxima;
    const AmaxJob* last = nullptr;
    for (int64_t item = work.items - 1 - blockIdx.x; item >= 0; item -= gridDim.x) {
        const AmaxJob* job = find_job(work, item);
        if (last && job != last) {
            write_maximum(*last, maxima, scratch);
            __syncthreads();
            maxima = Maxima<T>{};
        }
        last = job;
        take_chunk(maxima, job->x, item - job->x.first);
    }
    if (last) write_maximum(*last, maxima, scratch);
}

}  // namespace

// `out`: fp32 [out_count], the outputs of all jobs, which this function first sets to 0.
void amax(const Work<AmaxJob>& work, Input input, uintptr_t out, int64_t out_count, Stream stream) {
    if (work.items == 0) return set_zero(out, out_count * sizeof(float), stream);
    few_zeros(out, out_count, stream);
    with_input(input, [&](auto element) {
        using T = decltype(element);
        launch_persistent<amax_kernel<T>, true>(work.items, kThreads, kThreads / 32 * sizeof(uint32_t), stream, work);
    });
}

}  // namespace dlp
