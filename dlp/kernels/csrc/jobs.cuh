// From a piece of work to its job: one job by value, or a table in order of `first`.
#pragma once

#include "octet.cuh"

namespace dlp {

// A warp searches together: its lanes look at 32 jobs at once, so that a table of a thousand takes two loads one after
// the other. Other warps find what the first has brought to the cache.
template <class Job>
__device__ const Job* job_of(const Work<Job>& work, int64_t item) {
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
