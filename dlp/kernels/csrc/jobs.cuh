// Look-up of the job of a piece of work: one job by value, or a table of jobs in order of `first`.
#pragma once

#include "octet.cuh"

namespace dlp {

// The job with the largest `first` <= item. All lanes of a warp search together and compare 32 jobs at once, so that a table of
// a thousand jobs takes two dependent loads; a binary search would take ten. All lanes of the warp must call this function.
template <class Job>
__device__ const Job* find_job(const Work<Job>& work, int64_t item) {
    if (!work.many) return &work.one;
    const int lane = threadIdx.x % 32;
    const Job* first = work.many;
    for (int64_t count = work.count; count > 1;) {
        const int64_t step = (count + 31) / 32;
        const bool begun = lane * step < count && first[lane * step].x.first <= item;
        const int64_t before = (__popc(__ballot_sync(kAllLanes, begun)) - 1) * step;
        first += before;
        count = min(step, count - before);
    }
    return first;
}

}  // namespace dlp
