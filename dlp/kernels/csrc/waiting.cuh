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

// Until *at has reached `wanted`. `report`: [6] words of the host: 1, rank, peer, what is waited for, wanted, seen.
__device__ inline void await(const uint32_t* at, uint32_t wanted, const Waiting& waiting, uint32_t peer, uint32_t what) {
    const uint64_t began = nanoseconds();
    uint32_t seen;
    while (int32_t((seen = load_acquire(at)) - wanted) < 0) {
        if (nanoseconds() - began < uint64_t(waiting.patience) * 1000000) continue;
        volatile uint32_t* report = waiting.report;
        if (atomicExch(waiting.said, 1u) == 0) {
            report[1] = waiting.rank, report[2] = peer, report[3] = what, report[4] = wanted, report[5] = seen;
            report[6] = uint32_t(waiting.use);
            __threadfence_system();
            report[0] = 1;
            __threadfence_system();
        }
        __trap();
    }
}

}  // namespace dlp
