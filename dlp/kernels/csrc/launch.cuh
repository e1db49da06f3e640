// Launches of kernels: properties of the device, grid sizes, and the choice of template arguments by the types of a
// call.
//
//   launch              a given number of blocks
//   launch_up_to        a given number of blocks, with dynamic shared memory that differs between calls
//   launch_each         one block per piece of work; the device starts blocks as others end
//   launch_few          one block per group of a few pieces of work
//   launch_persistent   as many blocks as are resident at once; block b processes pieces b, b + number of blocks, ...
//
// sm_90a and sm_100a agree in all properties used here: per SM 64K registers, 227 KB of shared memory and 2048 threads; and
// asynchronous copies of 16 bytes.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "check.h"
#include "kernels.h"

namespace dlp {

constexpr int kMaxDevices = 64;
constexpr int64_t kMaxGrid = 2147483647;
constexpr size_t kReservedShared = 1024;  // bytes that the system reserves in each block

// Number of blocks of a kernel that are resident at the same time on the current device. Computed in the first call for
// a device, because the query is slow. The first call also sets attributes of the kernel on the device: the limit of dynamic
// shared memory, and a carve-out of the L1 cache as large as all resident blocks need. All calls for a kernel must have the
// same `threads` and `shared_bytes`.
template <auto kKernel>
int resident_blocks(int threads, size_t shared_bytes) {
    static std::array<int, kMaxDevices> resident{};
    int device;
    DLP_CHECK_CUDA(cudaGetDevice(&device));
    DLP_CHECK_LT(device, kMaxDevices);
    if (resident[device] == 0) {
        int per_sm, sms;
        DLP_CHECK_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)));
        DLP_CHECK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kKernel, threads, shared_bytes));
        DLP_CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
        DLP_CHECK_LT(0, per_sm);
        int most;
        DLP_CHECK_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
        const int percent = std::min(100, 1 + int(100 * per_sm * (shared_bytes + kReservedShared) / most));
        DLP_CHECK_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent));
        resident[device] = per_sm * sms;
    }
    return resident[device];
}

// `kEarly`: programmatic dependent launch. The kernel may begin when the previous kernel has called `let_next_begin`, and must
// call `wait_for_previous` before it accesses memory that the previous kernel writes. All launches before the previous kernel
// have ended when this kernel begins.
template <auto kKernel, bool kEarly = false, class... Args>
void launch(int64_t blocks, int threads, size_t shared_bytes, Stream stream, const Args&... args) {
    DLP_CHECK_LE(blocks, kMaxGrid);
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.attrs = &early;
    config.numAttrs = kEarly;
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = reinterpret_cast<cudaStream_t>(stream);
    DLP_CHECK_CUDA(cudaLaunchKernelEx(&config, kKernel, args...));
}

// One block for each piece of work. The device starts blocks as others end, so that faster SMs run more blocks; with a
// persistent grid, casts would wait for the slowest SM.
template <auto kKernel, class... Args>
void launch_each(int64_t items, int threads, size_t shared_bytes, Stream stream, const Args&... args) {
    resident_blocks<kKernel>(threads, shared_bytes);  // sets the attributes of the kernel
    launch<kKernel>(items, threads, shared_bytes, stream, args...);
}

// One block for every `per_block` pieces of work, for kernels in which the preparation of a block (a table, a first copy) is
// too expensive for a single piece.
template <auto kKernel, class... Args>
void launch_few(int64_t items, int per_block, int threads, size_t shared_bytes, Stream stream, const Args&... args) {
    launch_each<kKernel>((items + per_block - 1) / per_block, threads, shared_bytes, stream, args...);
}

// A persistent grid: as many blocks as are resident at once; block b processes pieces b, b + grid, ... (amax.cu: from the end).
template <auto kKernel, bool kEarly = false, class... Args>
void launch_persistent(int64_t items, int threads, size_t shared_bytes, Stream stream, const Args&... args) {
    DLP_CHECK_LE(items, kMaxGrid);
    const int64_t resident = resident_blocks<kKernel>(threads, shared_bytes);
    launch<kKernel, kEarly>(std::min(items, resident), threads, shared_bytes, stream, args...);
}

// `blocks` blocks whose dynamic shared memory differs between calls. The first call for a device sets the limit of the kernel
// to `kMost`, the largest size of all calls. If each call set the limit to its size, another host thread could lower the limit
// before the launch.
template <auto kKernel, size_t kMost, class... Args>
void launch_up_to(int64_t blocks, int threads, size_t shared_bytes, Stream stream, const Args&... args) {
    static std::array<std::atomic<bool>, kMaxDevices> allowed{};
    DLP_CHECK_LE(shared_bytes, kMost);
    int device;
    DLP_CHECK_CUDA(cudaGetDevice(&device));
    DLP_CHECK_LT(device, kMaxDevices);
    if (!allowed[device]) {
        DLP_CHECK_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kMost)));
        allowed[device] = true;
    }
    launch<kKernel>(blocks, threads, shared_bytes, stream, args...);
}

// GPUs before sm_90 have no programmatic dependent launch: a kernel begins when the previous kernel has ended.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ inline void let_next_begin() { cudaTriggerProgrammaticLaunchCompletion(); }
__device__ inline void wait_for_previous() { cudaGridDependencySynchronize(); }
#else
__device__ inline void let_next_begin() {}
__device__ inline void wait_for_previous() {}
#endif

struct E4m3 {};
struct E5m2 {};

template <class Run>
void with_input(Input input, Run run) {
    if (input == Input::kBf16) return run(__nv_bfloat16{});
    run(float{});
}

template <class Run>
void with_code(Code code, Run run) {
    if (code == Code::kE4m3) return run(E4m3{});
    run(E5m2{});
}

template <class Run>
void with_types(Input input, Code code, Run run) {
    with_input(input, [&](auto element) { with_code(code, [&](auto f8) { run(element, f8); }); });
}

template <Producer kProducer>
using ProducerConstant = std::integral_constant<Producer, kProducer>;

// Calls run(element, producer) for a kernel that reads tiles. `element` has the type of the input; `producer` is the producer
// of `source` as a constant, kMatrix or one of `kProducers`. Other producers than kMatrix are compiled only for bf16.
template <Producer... kProducers, class Run>
void with_source(Input input, const Source& source, Run run) {
    const Producer producer = source.producer;
    if (producer == Producer::kMatrix) return with_input(input, [&](auto element) { run(element, ProducerConstant<Producer::kMatrix>{}); });
    DLP_CHECK_EQ(int(input), int(Input::kBf16));
    const bool known = ((producer == kProducers && (run(__nv_bfloat16{}, ProducerConstant<kProducers>{}), true)) || ...);
    DLP_CHECK_EQ(known, true);
}

// The same for a cast to FP8: calls run(element, f8, producer). E5M2 is a format of gradients, so only producers of gradients
// are compiled for E5M2; all producers are compiled for E4M3.
template <class Run>
void with_source(Input input, Code code, const Source& source, Run run) {
    const auto of = [&](auto f8) { return [=](auto element, auto producer) { run(element, f8, producer); }; };
    if (code == Code::kE5m2) return with_source<Producer::kColumnSums, Producer::kGate>(input, source, of(E5m2{}));
    with_source<Producer::kRmsNorm, Producer::kLayerNorm, Producer::kSwiglu, Producer::kColumnSums, Producer::kActivation,
                Producer::kGate>(input, source, of(E4m3{}));
}

// The dynamic shared memory of a block.
__device__ inline uint8_t* shared_memory() {
    extern __shared__ __align__(16) uint8_t bytes[];
    return bytes;
}

}  // namespace dlp
