// Fibers, and what stands in for the runtime. See emulator.h.
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "kernels.h"

namespace emulator {
namespace {

constexpr size_t kStack = 256 * 1024, kShared = 232448;  // bytes
constexpr uint8_t kPoison = 0xFF;                        // NaN

struct Copy {
    void* to;
    const void* from;
    size_t bytes;
    uint32_t barrier;
};

struct Fiber {
    std::unique_ptr<uint8_t[]> stack{new uint8_t[kStack]};
    jmp_buf place;
    bool started, done;
    uint3 thread;
    int warp;
    std::vector<Copy> copies;
};

// In shared memory, of eight bytes.
struct Barrier {
    int32_t bytes;  // still to come
    uint16_t arrivals, phase;
};

std::mutex running;
jmp_buf scheduler;
ucontext_t first_switch;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Group> warps;
std::vector<Copy> bulk;  // under way
Fiber* current = nullptr;
uint64_t steps = 0;  // that threads have made from one wait to another
const std::function<void()>* body = nullptr;

uint8_t* shared_memory() {
    static void* const at = mmap(nullptr, kShared, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
    if (at == MAP_FAILED) throw std::runtime_error("the emulator needs shared memory below 4 GB, and mmap gave none");
    return static_cast<uint8_t*>(at);
}

[[noreturn]] void live() {
    (*body)();
    current->done = true, ++steps;
    --block_group.members, --warp_group->members;
    _longjmp(scheduler, 1);
}

void resume(Fiber& fiber) {
    current = &fiber;
    position.thread = fiber.thread, warp_group = &warps[fiber.warp];
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.get(), context.uc_stack.ss_size = kStack;
    makecontext(&context, reinterpret_cast<void (*)()>(&live), 0);
    setcontext(&context);
}

// The order of warps, and of their lanes.
void arrange(std::vector<int>& order) {
    const char* named = std::getenv("EMULATOR_ORDER");
    const std::string name = named ? named : "forward";
    std::iota(order.begin(), order.end(), 0);
    if (name == "backward") std::reverse(order.begin(), order.end());
    else if (name != "forward") std::shuffle(order.begin(), order.end(), std::mt19937(std::stoi(name)));
}

// As far as it comes without the others: a warp that runs ahead finds what it should have waited for.
void run_warp(int first, const std::vector<int>& lanes, int threads) {
    for (uint64_t before = steps - 1; steps != before;) {
        before = steps;
        for (int lane : lanes)
            if (first + lane < threads && !fibers[first + lane]->done) resume(*fibers[first + lane]);
    }
}

void run_block(int threads, size_t shared_bytes) {
    std::memset(shared_memory(), kPoison, shared_bytes);
    while (int(fibers.size()) < threads) fibers.push_back(std::make_unique<Fiber>());
    block_group = Group{threads};
    warps.assign((threads + kWarp - 1) / kWarp, Group{});
    bulk.clear();
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = *fibers[i];
        fiber.started = fiber.done = false, fiber.thread = {unsigned(i), 0, 0}, fiber.warp = i / kWarp;
        fiber.copies.clear();
        ++warps[fiber.warp].members;
    }
    std::vector<int> order(warps.size()), lanes(kWarp);
    arrange(order), arrange(lanes);
    for (uint64_t before = steps; block_group.members > 0; before = steps) {
        for (int warp : order) run_warp(warp * kWarp, lanes, threads);
        if (steps == before) throw std::runtime_error("the threads of a block wait for one another for ever");
    }
}

Barrier& barrier(uint32_t at) { return *reinterpret_cast<Barrier*>(uintptr_t(at)); }

void complete(Barrier& its) {
    if (its.arrivals == 0 && its.bytes == 0) its.arrivals = 1, its.phase ^= 1;
}

}  // namespace

Position position;
Group block_group, *warp_group;

void run(dim3 blocks, dim3 threads, size_t shared_bytes, const std::function<void()>& kernel) {
    if (threads.y * threads.z * blocks.y * blocks.z != 1) throw std::runtime_error("the emulator knows one dimension");
    if (threads.x == 0 || threads.x > 1024 || blocks.x == 0 || shared_bytes > kShared)
        throw std::runtime_error("no GPU would launch " + std::to_string(blocks.x) + " blocks of " + std::to_string(threads.x) +
                                 " threads with " + std::to_string(shared_bytes) + " bytes of shared memory");
    const std::lock_guard<std::mutex> alone(running);
    body = &kernel;
    position.threads = threads, position.blocks = blocks;
    for (unsigned block = 0; block < blocks.x; ++block) {
        position.block = {block, 0, 0};
        run_block(threads.x, shared_bytes);
    }
}

uint8_t* dynamic_shared() { return shared_memory(); }

void yield() {
    Fiber* mine = current;
    if (!_setjmp(mine->place)) _longjmp(scheduler, 1);
}

void meet(Group& group) {
    const uint32_t before = group.met;
    ++group.here, ++steps;
    while (group.met == before) {
        if (group.here == group.members) {
            group.here = 0, ++group.met, ++steps;
            return;
        }
        yield();
    }
}

const uint64_t* gather(uint64_t mine) {
    Group& warp = *warp_group;
    uint64_t* given = warp.given[warp.met % 2];
    given[lane()] = mine;
    meet(warp);
    return given;
}

void start_copy(void* to, const void* from, size_t bytes) { current->copies.push_back({to, from, bytes, 0}); }

void finish_copies() {
    for (const Copy& copy : current->copies) std::memcpy(copy.to, copy.from, copy.bytes);
    current->copies.clear();
}

void barrier_init(uint32_t at) { barrier(at) = {0, 1, 0}; }

void barrier_expect(uint32_t at, uint32_t bytes) {
    Barrier& its = barrier(at);
    its.bytes += bytes, --its.arrivals;
    complete(its);
}

void barrier_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t at) {
    bulk.push_back({reinterpret_cast<void*>(uintptr_t(to)), from, bytes, at});
}

void barrier_wait(uint32_t at, uint32_t phase) {
    while (barrier(at).phase == phase) {
        yield();
        std::vector<Copy> others;
        for (const Copy& copy : bulk) {
            if (copy.barrier != at) {
                others.push_back(copy);
                continue;
            }
            std::memcpy(copy.to, copy.from, copy.bytes), ++steps;
            barrier(at).bytes -= copy.bytes;
        }
        bulk = others;
        complete(barrier(at));
    }
}

}  // namespace emulator

// The runtime, as far as the kernels' host code calls it.

extern "C" {
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorNotSupported"; }
const char* cudaGetErrorString(cudaError_t) { return "the emulator does not know it"; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
    *value = what == cudaDevAttrMultiProcessorCount ? 3 : 233472;  // few, so that persistent blocks take several pieces
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
    return std::memset(at, value, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    return std::memmove(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind, cudaStream_t) {
    for (size_t i = 0; i < height; ++i)
        std::memcpy(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    return *event = reinterpret_cast<cudaEvent_t>(new int), cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, unsigned long long, cudaDriverEntryPointQueryResult*) {
    return cudaErrorNotSupported;  // streams that write and wait
}
}

namespace dlp {

constexpr const char* kNoCores = "the emulator has no tensor cores";

void gemm_fp8_blocks(const BlockGemmJob&, Code, Input, Stream) { throw std::runtime_error(kNoCores); }
void gemm_fp8_arriving(const BlockGemmJob&, const ArrivingRows&, const Waiting&, Code, Input, Stream) {
    throw std::runtime_error(kNoCores);
}

}  // namespace dlp
