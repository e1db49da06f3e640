// Launching: facts of the device, grids that fill it once, and the choice of a template by the types of a call.
//
// sm_90a and sm_100a agree in everything used here: 64K registers and 227 KB of shared memory a multiprocessor, 2048
// threads, 16-byte asynchronous copies. Only sm_90a was run; sm_100a is compiled.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "check.h"
#include "kernels.h"

namespace dlp {

constexpr int kMaxDevices = 64;
constexpr int64_t kMaxGrid = 2147483647;
constexpr size_t kReservedShared = 1024;  // bytes the system takes from each block's share

// A kernel's place on each device: how many of its blocks are resident at once. Asking costs microseconds, so it is
// asked once. Attributes belong to a device, too: the limit of dynamic shared memory, and that as much of the L1 cache be
// shared memory as those blocks need together.
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

// `kEarly`: it may begin when the kernel in front says so (`let_next_begin`), and touches nothing that this one writes before
// `wait_for_previous`. What stood in front of that one has ended by then.
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

// A block for each piece of work. The device hands them out as blocks end, so that fast multiprocessors do more of them:
// dealt out beforehand, casts waited 7 to 9 % of their time for the slowest multiprocessor of an H200.
template <auto kKernel, class... Args>
void launch_each(int64_t items, int threads, size_t shared_bytes, Stream stream, const Args&... args) {
    resident_blocks<kKernel>(threads, shared_bytes);  // sets its attributes
    launch<kKernel>(items, threads, shared_bytes, stream, args...);
}

// The same with a block for every `few` pieces, among which what it keeps at hand is made once.
template <auto kKernel, class... Args>
void launch_few(int64_t items, int few, int threads, size_t shared_bytes, Stream stream, const Args&... args) {
    launch_each<kKernel>((items + few - 1) / few, threads, shared_bytes, stream, args...);
}

// A persistent grid: as many blocks as the device holds at once, each of which walks over pieces of work.
template <auto kKernel, bool kEarly = false, class... Args>
void launch_persistent(int64_t items, int threads, size_t shared_bytes, Stream stream, const Args&... args) {
    DLP_CHECK_LE(items, kMaxGrid);
    const int64_t resident = resident_blocks<kKernel>(threads, shared_bytes);
    launch<kKernel, kEarly>(std::min(items, resident), threads, shared_bytes, stream, args...);
}

__device__ inline void let_next_begin() { cudaTriggerProgrammaticLaunchCompletion(); }
__device__ inline void wait_for_previous() { cudaGridDependencySynchronize(); }

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
using Of = std::integral_constant<Producer, kProducer>;

// The input of a kernel that reads tiles, and which of `kProducers` makes what it casts, if any does. Producers are compiled
// for bf16, which is what layers compute in.
template <Producer... kProducers, class Run>
void with_source(Input input, const Source& source, Run run) {
    const Producer producer = source.producer;
    if (producer == Producer::kMatrix) return with_input(input, [&](auto element) { run(element, Of<Producer::kMatrix>{}); });
    DLP_CHECK_EQ(int(input), int(Input::kBf16));
    const bool known = ((producer == kProducers && (run(__nv_bfloat16{}, Of<kProducers>{}), true)) || ...);
    DLP_CHECK_EQ(known, true);
}

// The same of a cast to FP8. Activations are cast to E4M3, gradients to either.
template <class Run>
void with_source(Input input, Code code, const Source& source, Run run) {
    const auto of = [&](auto f8) { return [=](auto element, auto producer) { run(element, f8, producer); }; };
    if (code == Code::kE5m2) return with_source<Producer::kColumnSums, Producer::kBeside>(input, source, of(E5m2{}));
    with_source<Producer::kRmsNorm, Producer::kSwiglu, Producer::kColumnSums, Producer::kActivation, Producer::kBeside>(
        input, source, of(E4m3{}));
}

// The dynamic shared memory of a block.
__device__ inline uint8_t* shared_memory() {
    extern __shared__ __align__(16) uint8_t bytes[];
    return bytes;
}

}  // namespace dlp
