// max |x| of one matrix, or of every matrix of a table in one launch. One read, deterministic: a maximum does not depend
// on the order it is taken in. NaN is ignored, Inf is kept.
//
// From the last chunk to the first: a cast reads the same from the first on, and finds there what the L2 cache still holds.
//
// A persistent grid: each block walks over chunks, keeps its maximum in registers while the chunks belong to one job, and
// ends with at most one atomic a job. The outputs are set to 0 by a small kernel in front, beside which this one begins to
// read. The road not taken: partial maxima in scratch memory and a last block that joins them, which needs zeroed counters
// that outlive the call.
#include "jobs.cuh"

namespace dlp {
namespace {

constexpr int kThreads = 256;
constexpr int kOctets = kAmaxChunk / (8 * kThreads);  // a thread and chunk
constexpr int kInFlight = 4;                          // of them at once
static_assert(kOctets % kInFlight == 0, "a chunk is a whole number of batches of loads");

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

template <class T>
__device__ void settle(const AmaxJob& job, const Maxima<T>& maxima, uint32_t* scratch) {
    const uint32_t bits = block_max(maxima.largest(), scratch);
    wait_for_previous();  // which sets the outputs to 0
    if (threadIdx.x == 0) raise(job.out, bits);
}

template <class T>
__global__ void __launch_bounds__(kThreads) amax_kernel(const __grid_constant__ Work<AmaxJob> work) {
    uint32_t* scratch = reinterpret_cast<uint32_t*>(shared_memory());
    Maxima<T> maxima;
    const AmaxJob* last = nullptr;
    for (int64_t item = work.items - 1 - blockIdx.x; item >= 0; item -= gridDim.x) {
        const AmaxJob* job = job_of(work, item);
        if (last && job != last) {
            settle(*last, maxima, scratch);
            __syncthreads();
            maxima = Maxima<T>{};
        }
        last = job;
        take_chunk(maxima, job->x, item - job->x.first);
    }
    if (last) settle(*last, maxima, scratch);
}

}  // namespace

// `out`: fp32 [out_count], what the jobs' own outputs point into; set to 0 here first.
void amax(const Work<AmaxJob>& work, Input input, uintptr_t out, int64_t out_count, Stream stream) {
    if (work.items == 0) return set_zero(out, out_count * sizeof(float), stream);
    few_zeros(out, out_count, stream);
    with_input(input, [&](auto element) {
        using T = decltype(element);
        launch_persistent<amax_kernel<T>, true>(work.items, kThreads, kThreads / 32 * sizeof(uint32_t), stream, work);
    });
}

}  // namespace dlp
