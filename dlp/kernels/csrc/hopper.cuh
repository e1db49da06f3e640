// PTX instructions of Hopper that have no intrinsics in CUDA C++: mbarriers in shared memory, bulk and tensor (TMA) copies,
// clusters, register reallocation, and WGMMA. Only the Hopper GEMMs use this header. See the PTX ISA, sections "mbarrier",
// "cp.async.bulk.tensor" and "wgmma".
#pragma once

#include <cuda.h>

#include <cstdint>

#include "launch.cuh"

namespace dlp {

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// An mbarrier at the shared-memory address `at`. A phase ends when `arrivals` threads and all expected bytes have arrived.
// `wait` waits for the end of the phase with this parity: 0 for the first phase, then 1, 0, ...
struct Barrier {
    uint32_t at;

    __device__ void init(int arrivals) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
    }
    __device__ void wait(uint32_t parity) const {
        asm volatile(
            "{\n\t.reg .pred done;\n"
            "again_%=:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again_%=;\n}" ::"r"(at),
            "r"(parity)
            : "memory");
    }
    __device__ void expect(uint32_t bytes) const {  // one arrival, which adds to the expected bytes of the phase
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
    }
    // Arrives at the barrier with the same address in block `rank` of this cluster, which signals that this thread has read the
    // stage. Only reads must be ordered before the arrival, so the instruction has no `.release.cluster`, which would cost a
    // fence of all memory each time.
    __device__ void arrive_at(uint32_t rank) const {
        asm volatile(
            "{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n"
            "\tmbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(at), "r"(rank)
            : "memory");
    }
};

// A position in the ring of stages, which one warp fills and other warps read: the stage, and the parity of the current phase
// of the barriers of the stage.
template <int kStages>
struct Ring {
    int stage = 0;
    uint32_t parity = 0;

    __device__ void advance() {
        if (++stage == kStages) stage = 0, parity ^= 1;
    }
};

// True in one lane of a converged warp. With elect.sync the compiler knows that one lane takes the branch; with `lane == 0` the
// compiler would put a loop around each copy in the branch.
__device__ inline bool elected() {
    uint32_t chosen;
    asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen != 0;
}

__device__ inline void copy_bytes(uint32_t to, const void* from, uint32_t bytes, Barrier done) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(done.at)
                 : "memory");
}
__device__ inline void copy_tile(uint32_t to, const CUtensorMap* map, int x, int y, Barrier done) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(done.at)
        : "memory");
}
// Multicast to the same address in each block of the cluster whose bit is set in `blocks`; the bytes arrive at the
// barrier of each block.
__device__ inline void copy_tile_to(uint16_t blocks, uint32_t to, const CUtensorMap* map, int x, int y, Barrier done) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(done.at), "h"(blocks)
        : "memory");
}

__device__ inline uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

template <int kRegisters>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Two warpgroups take turns by named barriers: `await_turn` returns after the other warpgroup has called `pass_turn` with the
// same number. Turn n uses barrier n + 1, because barrier 0 is __syncthreads.
__device__ inline void await_turn(int number) { asm volatile("bar.sync %0, 256;" ::"r"(number + 1) : "memory"); }
__device__ inline void pass_turn(int number) { asm volatile("bar.arrive %0, 256;" ::"r"(number + 1) : "memory"); }

// WGMMA. Both operands are in shared memory, K-major, as lines of 128 bytes in the 128-byte swizzle, aligned to 1024 bytes.
// The matrix descriptor: bits 0-13 address / 16, 16-29 leading offset (1, unused with this swizzle), 32-45 stride offset / 16
// = 64, from eight lines to the next eight, 62-63 = 1, the 128-byte swizzle. A step of 32 bytes along the lines adds 2.
__device__ inline uint64_t descriptor(uint32_t address) { return uint64_t(0x40000040) << 32 | 1 << 16 | address >> 4; }

__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_products() {  // waits until at most kPending groups are in flight
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d = A [64, 32] @ B [96, 32].T, or d += the product if `add`, by a warpgroup. A is E4M3 or E5M2, B is E4M3.
template <class A>
__device__ inline void multiply(float (&d)[48], uint64_t a, uint64_t b, bool add) {
#define DLP_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
    if constexpr (std::is_same_v<A, E4m3>) {
        asm volatile(
            "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %50, 0;\n\t"
            "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
            "%48, %49, add, 1, 1;\n}"
            : DLP_D8(0), DLP_D8(8), DLP_D8(16), DLP_D8(24), DLP_D8(32), DLP_D8(40)
            : "l"(a), "l"(b), "r"(int(add)));
    } else {
        asm volatile(
            "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %50, 0;\n\t"
            "wgmma.mma_async.sync.aligned.m64n96k32.f32.e5m2.e4m3 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
            "%48, %49, add, 1, 1;\n}"
            : DLP_D8(0), DLP_D8(8), DLP_D8(16), DLP_D8(24), DLP_D8(32), DLP_D8(40)
            : "l"(a), "l"(b), "r"(int(add)));
    }
}

// The same for B [128, 32].
template <class A>
__device__ inline void multiply(float (&d)[64], uint64_t a, uint64_t b, bool add) {
    if constexpr (std::is_same_v<A, E4m3>) {
        asm volatile(
            "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %66, 0;\n\t"
            "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
            "%64, %65, add, 1, 1;\n}"
            : DLP_D8(0), DLP_D8(8), DLP_D8(16), DLP_D8(24), DLP_D8(32), DLP_D8(40), DLP_D8(48), DLP_D8(56)
            : "l"(a), "l"(b), "r"(int(add)));
    } else {
        asm volatile(
            "{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %66, 0;\n\t"
            "wgmma.mma_async.sync.aligned.m64n128k32.f32.e5m2.e4m3 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
            "%64, %65, add, 1, 1;\n}"
            : DLP_D8(0), DLP_D8(8), DLP_D8(16), DLP_D8(24), DLP_D8(32), DLP_D8(40), DLP_D8(48), DLP_D8(56)
            : "l"(a), "l"(b), "r"(int(add)));
    }
}
#undef DLP_D8

}  // namespace dlp
