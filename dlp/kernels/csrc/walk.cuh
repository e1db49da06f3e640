// From a piece of work to its job: one job by value, or a table in order of `first`.
#pragma once

#include "launch.cuh"

namespace dlp {

// Pieces are asked for in growing order, so the walk only ever goes on.
template <class Job>
class Walk {
   public:
    __device__ explicit Walk(const Work<Job>& work)
        : job_(work.many ? work.many : &work.one), last_(work.many ? work.many + work.count - 1 : &work.one) {}

    __device__ const Job* to(int64_t item) {
        while (job_ < last_ && job_[1].x.first <= item) ++job_;
        return job_;
    }

   private:
    const Job* job_;
    const Job* last_;
};

}  // namespace dlp
