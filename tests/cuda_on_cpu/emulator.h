// CUDA C++ on a CPU: what the kernels of dlp use of the language, the intrinsics and the runtime.
//
// A launch runs its clusters of blocks one after the other. The threads of a cluster are fibers of one thread of the CPU: each
// runs until it waits for its block, its warp, its cluster, or bytes that are to arrive. A warp runs as far as it comes, then the
// next one does, in an order that EMULATOR_ORDER names: "forward", "backward" or a number to shuffle by. So what a missing barrier
// lets happen does happen, in one of the orders. Asynchronous copies arrive, and tensor cores multiply, as late as they may: when
// somebody waits for them; bulk copies of the order "backward" arrive at once. Threads that wait for one another for ever are an
// error.
//
// Not played: memory that other GPUs write while a kernel runs, what clusters that run at once do to one another, registers, and
// caches.
#pragma once

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <vector_functions.h>

namespace emulator {

constexpr int kWarp = 32;

// Those who wait for one another: a block or a warp. Who has left it is not waited for.
struct Group {
    int members = 0, here = 0;
    uint32_t met = 0;  // how often
    uint64_t given[2][kWarp];  // by the lanes of a warp, in turn
};

struct Position {
    uint3 thread, block;
    dim3 threads, blocks;
    unsigned cluster;  // its blocks
};

extern Position position;  // of the fiber that runs
extern Group *cluster_group, *block_group, *warp_group;

void run(dim3 blocks, dim3 threads, unsigned cluster, size_t shared_bytes, const std::function<void()>& kernel);
uint8_t* dynamic_shared();  // of the block that runs
// The limit of dynamic shared memory of a kernel. It is never lowered, since another thread of the host may be about to launch
// with as much as it allowed until then: false if `bytes` are less.
bool raise_shared_limit(const void* kernel, int bytes);
bool within_shared_limit(const void* kernel, size_t bytes);
uint32_t shared_address(const void* at);
[[noreturn]] void fail(const char* what);  // ends the launch
void yield();              // to the others of the block
void meet(Group& group);

// What each lane of the warp gives, when all have; `given[lane]`.
const uint64_t* gather(uint64_t mine);

template <class T>
uint64_t word_of(T value) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(T));
    return word;
}
template <class T>
T of_word(uint64_t word) {
    T value;
    std::memcpy(&value, &word, sizeof(T));
    return value;
}

inline int lane() { return position.thread.x % kWarp; }

// Copies that a thread has started, and waits for.
void start_copy(void* to, const void* from, size_t bytes);
void finish_copies();

// Barriers in shared memory, which count arrivals, and bytes of bulk copies.
void barrier_init(uint32_t at, int arrivals);
void barrier_expect(uint32_t at, uint32_t bytes);
void barrier_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t at);
void barrier_wait(uint32_t at, uint32_t phase);
void barrier_arrive_at(uint32_t at, uint32_t rank);  // of a block of this cluster

// Barriers of a block by number, at which `count` threads arrive; who calls `named_sync` waits for the others.
void named_arrive(int number, int count);
void named_sync(int number, int count);

// A box of a tensor to the same place in each block of `blocks`, in the swizzle of 128 bytes.
void tile_copy(unsigned blocks, uint32_t to, const void* map, int x, int y, uint32_t at);

// Products of warpgroups. Each thread makes its own share of them, when it waits for their group.
template <class A>
void product(float* d, int count, uint64_t a, uint64_t b, bool add);  // `count` numbers of d, for twice as many columns
void commit_products();
void wait_products(int pending);

}  // namespace emulator

#undef __launch_bounds__
#undef __grid_constant__
#undef __shared__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __CUDA_ARCH_FEAT_SM90_ALL

static const uint3 &threadIdx = emulator::position.thread, &blockIdx = emulator::position.block;
static const dim3 &blockDim = emulator::position.threads, &gridDim = emulator::position.blocks;

// The runtime. Everything is on one device, and done when a call returns.

namespace emulator {

template <class... Parameters, class... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
    const std::tuple<std::decay_t<Parameters>...> kept(std::forward<Arguments>(arguments)...);
    unsigned cluster = 1;
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[i].val.clusterDim.x;
    if (!within_shared_limit(reinterpret_cast<const void*>(kernel), config->dynamicSmemBytes)) return cudaErrorInvalidValue;
    emulator::run(config->gridDim, config->blockDim, cluster, config->dynamicSmemBytes, [&] { std::apply(kernel, kept); });
    return cudaSuccess;
}

}  // namespace emulator

#define cudaLaunchKernelEx emulator::launch

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    return emulator::raise_shared_limit(reinterpret_cast<const void*>(kernel), value) ? cudaSuccess : cudaErrorInvalidValue;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, size_t) {
    return *blocks = 2, cudaSuccess;
}
inline void cudaTriggerProgrammaticLaunchCompletion() {}
inline void cudaGridDependencySynchronize() {}

#include "intrinsics.h"
