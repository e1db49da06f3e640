// CUDA C++ on a CPU: the parts of the language, the intrinsics and the runtime that the kernels of dlp use.
//
// A launch runs its clusters of blocks one after the other. The threads of a cluster are fibers of one thread of the CPU: a
// fiber runs until it waits for its block, its warp, its cluster, or the bytes of a copy. A warp runs until all its threads
// wait, then the next warp runs, in the order that EMULATOR_ORDER names: "forward", "backward", or a number that seeds a random
// order. An error that a missing barrier allows therefore happens in one of the orders. Asynchronous copies arrive, and tensor
// cores multiply, as late as possible: when a thread waits for them. Only in the order "backward" do bulk copies arrive at
// once. A deadlock of threads is an error.
//
// Not emulated: writes of other GPUs while a kernel runs, races between clusters that run concurrently, registers, and caches.
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

// Threads that wait for one another: a cluster, a block or a warp. Threads that have returned are no longer members.
struct Group {
    int members = 0, here = 0;  // `here`: the members that have arrived
    uint32_t met = 0;  // number of completed barriers
    uint64_t given[2][kWarp];  // values of the lanes in `gather`; two successive calls use different rows
};

struct Position {
    uint3 thread, block;
    dim3 threads, blocks;
    unsigned cluster;  // number of blocks in a cluster
};

extern Position position;  // of the current fiber
extern Group *cluster_group, *block_group, *warp_group;

void run(dim3 blocks, dim3 threads, unsigned cluster, size_t shared_bytes, const std::function<void()>& kernel);
uint8_t* dynamic_shared();  // of the block of the current fiber
// Set the limit of dynamic shared memory of a kernel. Returns false if `bytes` is lower than the present limit, because another
// host thread may be about to launch the kernel with as much memory as the limit allows.
bool raise_shared_limit(const void* kernel, int bytes);
bool within_shared_limit(const void* kernel, size_t bytes);
uint32_t shared_address(const void* at);
[[noreturn]] void fail(const char* what);  // ends the launch
void yield();              // let the other threads of the cluster run
void meet(Group& group);

// Wait until all lanes of the warp have called; return the value `mine` of each lane, indexed by lane.
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

// Asynchronous copies of a thread: start a copy; wait for all copies that this thread has started.
void start_copy(void* to, const void* from, size_t bytes);
void finish_copies();

// Barriers (mbarrier) in shared memory, which count arrivals of threads and bytes of bulk copies.
void barrier_init(uint32_t at, int arrivals);
void barrier_expect(uint32_t at, uint32_t bytes);
void barrier_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t at);
void barrier_wait(uint32_t at, uint32_t phase);
void barrier_arrive_at(uint32_t at, uint32_t rank);  // barrier in block `rank` of this cluster

// Numbered barriers of a block, at which `count` threads arrive. Threads that call `named_sync` wait until all have arrived.
void named_arrive(int number, int count);
void named_sync(int number, int count);

// Copy a box of a tensor to address `to` in each block of the bit mask `blocks`, in the 128-byte swizzle.
void tile_copy(unsigned blocks, uint32_t to, const void* map, int x, int y, uint32_t at);

// Matrix products of warpgroups (wgmma). A thread computes its part of a committed group of products when it waits for the
// group. `count`: numbers in d, which are half as many as the columns of the product.
template <class A>
void product(float* d, int count, uint64_t a, uint64_t b, bool add);
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

// The runtime. There is one device, and every call is synchronous.

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
