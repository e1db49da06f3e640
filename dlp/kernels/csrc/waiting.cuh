// Waiting inside a kernel for what another rank does: a word in memory, and what is said where it does not come.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace dlp {

constexpr uint32_t kHasNotSent = 1, kHasNotAgreed = 2;  // of WAITS_FOR (comm/slots.py)

__device__ inline uint32_t load_acquire(const uint32_t* at) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ inline uint64_t nanoseconds() {
    uint64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
}

// Until *at has reached `wanted`, counted in a circle. What was written before *at was may be read by this thread's plain loads
// then, and by those of threads that it meets; bulk copies want a proxy fence besides.
//
// Too long: one thread of all that wait writes `report` ([7] words of the host, see `Waiting`) and ends the program. The others
// go on waiting for that: a trap of theirs would end it before the report is whole.
__device__ inline void await(const uint32_t* at, uint32_t wanted, const Waiting& waiting, uint32_t peer, uint32_t what) {
    const uint64_t began = nanoseconds();
    uint32_t seen;
    while (int32_t((seen = load_acquire(at)) - wanted) < 0) {
        if (nanoseconds() - began < uint64_t(waiting.patience) * 1000000 || atomicExch(waiting.said, 1u) != 0) continue;
        const uint32_t words[] = {1, uint32_t(waiting.rank), peer, what, wanted, seen, uint32_t(waiting.use)};
        volatile uint32_t* report = waiting.report;
        for (int i = 1; i < 7; ++i) report[i] = words[i];
        __threadfence_system();
        report[0] = words[0];  // it is whole
        __threadfence_system();
        __trap();
    }
}

}  // namespace dlp
