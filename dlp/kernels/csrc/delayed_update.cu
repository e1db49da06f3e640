// One step of delayed scaling for all slots of a model in one launch: the amaxes of this step enter the histories, and the
// scales follow from them. Bitwise equal to reference.fp8.delayed_update; the rule is Transformer Engine's
// (common/recipe/delayed_scaling.cu).
//
//   last = reduced != 0 ? reduced : history[0];   if last == 0: staging = 0, and history and scale stay as they are; else
//   window = history[1], ..., history[L - 1], last;   history = 0, window[1], ..., window[L - 1]
//   amax = max(window), or last;   scale = min(fl(target / amax), FLT_MAX) if amax is finite and > 0, else unchanged
//
// history [L, slots] is contiguous. A block of 32 warps processes 32 slots, one per lane. The warps divide the L rows, and each
// warp moves its rows by one: row i takes the value of row i + 1. The last row of a warp takes the value of the first row of
// the next warp, which is read before a barrier.
#include <cfloat>

#include "jobs.cuh"
#include "launch.cuh"

namespace dlp {
namespace {

constexpr int kSlots = 32, kWarps = 32;
constexpr int kInFlight = 8;  // rows that a thread loads at once

// For one slot: if `used`, row i in [begin, end) takes the value of row i + 1, and the last row takes `next`. Returns
// the largest of the previous values.
__device__ float roll(float* row, int64_t begin, int64_t end, int64_t pitch, float next, bool used) {
    float largest = 0.0f;
    for (int64_t at = begin; at < end; at += kInFlight) {
        float value[kInFlight + 1];
#pragma unroll
        for (int i = 0; i <= kInFlight; ++i) value[i] = at + i < end ? row[(at + i) * pitch] : next;
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            if (at + i >= end) break;
            largest = fmaxf(largest, fabsf(value[i]));
            if (used) row[(at + i) * pitch] = value[i + 1];
        }
    }
    return largest;
}

__global__ void __launch_bounds__(kSlots* kWarps) delayed_update_kernel(const __grid_constant__ Work<DelayedJob> work) {
    __shared__ float largest[kWarps][kSlots];
    const DelayedJob& job = *find_job(work, blockIdx.x);
    const int warp = threadIdx.x / kSlots;
    const int64_t slot = (blockIdx.x - job.x.first) * kSlots + threadIdx.x % kSlots;
    const int64_t length = job.x.rows, slots = job.x.cols;
    const int64_t share = (length - 1 + kWarps - 1) / kWarps, begin = min(1 + warp * share, length);
    const int64_t end = min(begin + share, length);
    float* history = static_cast<float*>(const_cast<void*>(job.x.data)) + slot;
    const bool mine = slot < slots;

    float last = 0.0f, next = 0.0f;
    if (mine) {
        last = job.reduced[slot] != 0.0f ? job.reduced[slot] : *history;
        next = end < length ? history[end * slots] : last;
    }
    __syncthreads();  // every warp has read the row after its last row, which the next warp overwrites
    const bool used = last != 0.0f;
    largest[warp][threadIdx.x % kSlots] = mine ? roll(history, begin, end, slots, next, used) : 0.0f;
    __syncthreads();
    if (warp != 0 || !mine) return;

    job.staging[slot] = 0.0f;
    if (!used) return;
    *history = 0.0f;
    float amax = fmaxf(0.0f, fabsf(last));
    for (int i = 0; i < kWarps; ++i) amax = fmaxf(amax, largest[i][threadIdx.x]);
    if (job.most_recent) amax = last;
    if (amax > 0.0f && amax <= FLT_MAX) job.scale[slot] = fminf(__fdiv_rn(job.target[slot], amax), FLT_MAX);
}

}  // namespace

// A piece of work is 32 slots of one job.
void delayed_update(const Work<DelayedJob>& work, Stream stream) {
    if (work.items) launch<delayed_update_kernel>(work.items, kSlots * kWarps, 0, stream, work);
}

}  // namespace dlp
