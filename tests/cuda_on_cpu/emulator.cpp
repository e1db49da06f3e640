// Fibers, and replacements of functions of the CUDA runtime. See emulator.h.
#include <sys/mman.h>
#include <ucontext.h>

#include <array>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda.h>

#include "kernels.h"

namespace emulator {
namespace {

constexpr size_t kStack = 256 * 1024, kShared = 232448, kSharedByDefault = 48 * 1024;  // bytes
constexpr int kLargestCluster = 8;
constexpr uint8_t kPoison = 0xFF;                        // NaN

std::map<const void*, int> shared_limits;  // by kernel, for kernels whose limit was set

// State of a barrier (mbarrier) in its eight bytes of shared memory.
struct Barrier {
    int32_t bytes;  // bytes of copies that have not arrived
    uint8_t pending, arrivals;  // arrivals that are missing in this phase; arrivals per phase
    uint16_t phase;
};

// Bulk copy that has not arrived: `move` copies, then `barrier` counts `bytes`.
struct Copy {
    std::function<void()> move;
    Barrier* barrier;
    uint32_t bytes;
};

// The part of a thread in a matrix product of a warpgroup (see `multiply`). `a_values`: the value of each code of A.
struct Product {
    float* d;
    int count;
    uint64_t a, b;
    bool add;
    const float* a_values;
};

struct Fiber {
    std::unique_ptr<uint8_t[]> stack{new uint8_t[kStack]};
    jmp_buf place;
    bool started, done;
    uint3 thread, block;
    int warp, rank;
    std::vector<std::function<void()>> copies;
    std::vector<Product> products;                // not committed to a group
    std::vector<std::vector<Product>> committed;  // groups, oldest first
    uint64_t rests;                               // the round in which the fiber does not run again
};

std::mutex running;
jmp_buf scheduler;
ucontext_t first_switch;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Group> warps, blocks;
std::vector<std::array<Group, 16>> named;  // numbered barriers of each block
Group cluster;
std::vector<Copy> bulk;                // bulk copies that have not arrived
std::string failed;
Fiber* current = nullptr;
uint64_t steps = 0;                    // progress: arrivals, completed barriers, copies and ends of threads
uint64_t rounds = 0;
bool early = false;                    // bulk copies arrive at once
const std::function<void()>* body = nullptr;

uint8_t* window(int rank) {
    static uint8_t* windows[kLargestCluster] = {};
    if (windows[rank] == nullptr) {
        void* const at = mmap(nullptr, kShared, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) throw std::runtime_error("the emulator needs shared memory, and mmap gave none");
        windows[rank] = static_cast<uint8_t*>(at);
    }
    return windows[rank];
}

[[noreturn]] void live() {
    (*body)();
    current->done = true, ++steps;
    --cluster_group->members, --block_group->members, --warp_group->members;
    _longjmp(scheduler, 1);
}

void resume(Fiber& fiber) {
    current = &fiber;
    position.thread = fiber.thread, position.block = fiber.block;
    block_group = &blocks[fiber.rank], warp_group = &warps[fiber.warp];
    if (_setjmp(scheduler)) {
        if (!failed.empty()) throw std::runtime_error(std::exchange(failed, ""));
        return;
    }
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.get(), context.uc_stack.ss_size = kStack;
    makecontext(&context, reinterpret_cast<void (*)()>(&live), 0);
    setcontext(&context);
}

std::string order_name() {
    const char* named = std::getenv("EMULATOR_ORDER");
    return named ? named : "forward";
}

// Fill `order` with indices in the order EMULATOR_ORDER, for the warps of a cluster or the lanes of a warp.
void arrange(std::vector<int>& order) {
    const std::string name = order_name();
    std::iota(order.begin(), order.end(), 0);
    if (name == "backward") std::reverse(order.begin(), order.end());
    else if (name != "forward") std::shuffle(order.begin(), order.end(), std::mt19937(std::stoi(name)));
}

// Run a warp until all its threads wait for other warps, because a warp that runs ahead exposes missing barriers.
void run_warp(int first, const std::vector<int>& lanes, int end) {
    for (uint64_t before = steps - 1; steps != before;) {
        before = steps;
        for (int lane : lanes)
            if (Fiber& fiber = *fibers[first + lane]; first + lane < end && !fiber.done && fiber.rests != rounds) resume(fiber);
    }
}

void run_cluster(unsigned first, unsigned size, int threads, size_t shared_bytes) {
    const int each = (threads + kWarp - 1) / kWarp * kWarp;  // fibers of a block: complete warps
    while (int(fibers.size()) < each * int(size)) fibers.push_back(std::make_unique<Fiber>());
    cluster = Group{threads * int(size)}, cluster_group = &cluster;
    blocks.assign(size, Group{threads});
    named.assign(size, {});
    warps.assign(each * size / kWarp, Group{});
    bulk.clear();
    for (int i = 0; i < each * int(size); ++i) {
        Fiber& fiber = *fibers[i];
        fiber.rank = i / each, fiber.warp = i / kWarp;
        fiber.thread = {unsigned(i % each), 0, 0}, fiber.block = {first + fiber.rank, 0, 0};
        fiber.started = false, fiber.done = i % each >= threads, fiber.rests = 0;
        fiber.copies.clear(), fiber.products.clear(), fiber.committed.clear();
        if (!fiber.done) ++warps[fiber.warp].members;
        if (i % each == 0) std::memset(window(fiber.rank), kPoison, shared_bytes);
    }
    std::vector<int> order(warps.size()), lanes(kWarp);
    arrange(order), arrange(lanes);
    for (uint64_t before = steps; cluster.members > 0; before = steps) {
        ++rounds;
        for (int warp : order) run_warp(warp * kWarp, lanes, (warp + 1) * kWarp);
        if (steps == before) throw std::runtime_error("deadlock: no thread of the cluster can continue");
    }
}

Barrier& barrier(uint32_t at, int rank) { return *reinterpret_cast<Barrier*>(window(rank) + at); }

void complete(Barrier& its) {
    if (its.pending == 0 && its.bytes == 0) its.pending = its.arrivals, its.phase ^= 1, ++steps;
}

void arrive(Barrier& its) {
    if (its.pending == 0) fail("more threads arrive at a barrier than it counts");
    --its.pending, ++steps;
    complete(its);
}

// Make a copy, and count its bytes at its barrier.
void count(const Copy& copy) {
    copy.move(), ++steps;
    copy.barrier->bytes -= copy.bytes;
    complete(*copy.barrier);
}

void start(Copy copy) {
    if (early) count(copy);
    else bulk.push_back(std::move(copy));
}

// Matrix of bytes, as `encode_map` stores its description in a tensor map.
struct Map {
    const uint8_t* first;
    uint64_t sizes[2], pitch;
    uint32_t box[2];
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));

uint32_t swizzled(uint32_t at) { return at ^ (at >> 3 & 0x70); }

CUresult encode_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* first, const cuuint64_t* sizes,
                    const cuuint64_t* pitches, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
                    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    const bool known = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 && rank == 2 && swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
    const bool allowed = reinterpret_cast<uintptr_t>(first) % 16 == 0 && pitches[0] % 16 == 0 && sizes[0] > 0 && sizes[1] > 0 &&
                         box[0] == 128 && box[1] <= 256 && steps[0] == 1 && steps[1] == 1;
    if (!known || !allowed) return CUDA_ERROR_INVALID_VALUE;
    const Map made{static_cast<const uint8_t*>(first), {sizes[0], sizes[1]}, pitches[0], {box[0], box[1]}};
    std::memcpy(map, &made, sizeof(made));
    return CUDA_SUCCESS;
}

template <class A>
const float* values_of() {
    static const std::array<float, 256> values = [] {
        std::array<float, 256> made;
        for (int i = 0; i < 256; ++i) {
            A code;
            code.__x = __nv_fp8_storage_t(i);
            made[i] = float(code);
        }
        return made;
    }();
    return values.data();
}

// Read 32 numbers of one line (row of A, or column of B) of an operand that stores eight lines in 1024 bytes of shared memory.
// `operand`: descriptor of wgmma.
void read_line(uint64_t operand, int line, const float* values, float (&to)[32]) {
    if (operand >> 62 != 1 || (operand >> 32 & 0x3FFF) != 1024 >> 4)
        fail("the emulator supports only operands in the 128-byte swizzle with eight lines in 1024 bytes");
    const uint32_t first = (operand & 0x3FFF) << 4;
    const uint8_t* shared = dynamic_shared();
    for (int k = 0; k < 32; ++k) to[k] = values[shared[swizzled(first + line * 128 + k)]];
}

// Compute the part of the current thread of d = A [64, 32] @ B [2 count, 32].T: two rows, and two columns in every eight.
void multiply(const Product& its) {
    const int row = position.thread.x / kWarp % 4 * 16 + lane() / 4;
    float a[2][32], b[32];
    for (int r = 0; r < 2; ++r) read_line(its.a, row + 8 * r, its.a_values, a[r]);
    for (int i = 0; i < its.count / 2; ++i) {
        read_line(its.b, i / 2 * 8 + lane() % 4 * 2 + i % 2, values_of<__nv_fp8_e4m3>(), b);
        for (int r = 0; r < 2; ++r) {
            float sum = 0.0f;
            for (int k = 0; k < 32; ++k) sum += a[r][k] * b[k];
            float& d = its.d[i / 2 * 4 + 2 * r + i % 2];
            d = its.add ? d + sum : sum;
        }
    }
}

}  // namespace

Position position;
Group *cluster_group, *block_group, *warp_group;

void run(dim3 blocks, dim3 threads, unsigned cluster, size_t shared_bytes, const std::function<void()>& kernel) {
    if (threads.y * threads.z * blocks.y * blocks.z != 1)
        throw std::runtime_error("the emulator supports only one dimension of blocks and of threads");
    if (threads.x == 0 || threads.x > 1024 || blocks.x == 0 || shared_bytes > kShared || blocks.x % cluster || cluster > kLargestCluster)
        throw std::runtime_error("no GPU would launch " + std::to_string(blocks.x) + " blocks of " + std::to_string(threads.x) +
                                 " threads with " + std::to_string(shared_bytes) + " bytes of shared memory");
    const std::lock_guard<std::mutex> alone(running);
    body = &kernel;
    position.threads = threads, position.blocks = blocks, position.cluster = cluster;
    early = order_name() == "backward";
    for (unsigned block = 0; block < blocks.x; block += cluster) run_cluster(block, cluster, threads.x, shared_bytes);
}

uint8_t* dynamic_shared() { return window(current->rank); }

uint32_t shared_address(const void* at) {
    const ptrdiff_t offset = static_cast<const uint8_t*>(at) - dynamic_shared();
    if (offset < 0 || size_t(offset) > kShared) fail("an address lies outside of dynamic shared memory");
    return uint32_t(offset);
}

bool raise_shared_limit(const void* kernel, int bytes) {
    int& limit = shared_limits.try_emplace(kernel, bytes).first->second;
    return bytes >= limit ? (limit = bytes, true) : false;
}

bool within_shared_limit(const void* kernel, size_t bytes) {
    const auto found = shared_limits.find(kernel);
    return bytes <= size_t(found == shared_limits.end() ? kSharedByDefault : found->second);
}

void fail(const char* what) {
    failed = what;
    _longjmp(scheduler, 1);
}

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

void start_copy(void* to, const void* from, size_t bytes) {
    current->copies.push_back([=] { std::memcpy(to, from, bytes); });
}

void finish_copies() {
    for (const auto& copy : current->copies) copy();
    current->copies.clear();
}

void barrier_init(uint32_t at, int arrivals) { barrier(at, current->rank) = {0, uint8_t(arrivals), uint8_t(arrivals), 0}; }

void barrier_expect(uint32_t at, uint32_t bytes) {
    barrier(at, current->rank).bytes += bytes;
    arrive(barrier(at, current->rank));
}

void barrier_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t at) {
    if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16)
        fail("the addresses and the size of a bulk copy must be multiples of 16");
    uint8_t* const there = dynamic_shared() + to;
    start({[=] { std::memcpy(there, from, bytes); }, &barrier(at, current->rank), bytes});
}

void tile_copy(unsigned blocks, uint32_t to, const void* map, int x, int y, uint32_t at) {
    Map its;
    std::memcpy(&its, map, sizeof(its));
    if (to % 1024) fail("the destination of a tensor copy must be aligned to 1024 bytes, because of the swizzle");
    const auto bytes_of = [=](uint32_t line) -> uint32_t {  // bytes of a line that are inside of the matrix
        if (x < 0 || y < 0 || uint64_t(x) >= its.sizes[0] || y + line >= its.sizes[1]) return 0;
        return uint32_t(std::min<uint64_t>(its.box[0], its.sizes[0] - x));
    };
    const uint8_t* const first = its.first + y * its.pitch + x;
    for (int rank = 0; rank < int(position.cluster); ++rank) {
        if (!(blocks >> rank & 1)) continue;
        const auto move = [=] {
            for (uint32_t line = 0; line < its.box[1]; ++line)
                for (uint32_t i = 0; i < its.box[0]; ++i)
                    window(rank)[swizzled(to + line * 128 + i)] = i < bytes_of(line) ? first[line * its.pitch + i] : 0;
        };
        start({move, &barrier(at, rank), its.box[0] * its.box[1]});
    }
}

void barrier_arrive_at(uint32_t at, uint32_t rank) {
    if (blocks[rank].members == 0) fail("a thread arrives at a barrier of a block that has ended");
    arrive(barrier(at, int(rank)));
    current->rests = rounds;  // threads that waited for this arrival can run before this thread continues
    yield();
}

void barrier_wait(uint32_t at, uint32_t phase) {
    Barrier& its = barrier(at, current->rank);
    while (its.phase == phase) {
        yield();
        std::vector<Copy> mine, others;
        for (Copy& copy : bulk) (copy.barrier == &its ? mine : others).push_back(std::move(copy));
        bulk = std::move(others);
        for (const Copy& copy : mine) count(copy);
    }
}

void named_arrive(int number, int count) {
    Group& its = named[current->rank][number];
    ++its.here, ++steps;
    if (its.here == count) its.here = 0, ++its.met;
}

void named_sync(int number, int count) {
    const Group& its = named[current->rank][number];
    const uint32_t before = its.met;
    named_arrive(number, count);
    while (its.met == before) yield();
}

template <class A>
void product(float* d, int count, uint64_t a, uint64_t b, bool add) {
    current->products.push_back({d, count, a, b, add, values_of<A>()});
}
template void product<__nv_fp8_e4m3>(float*, int, uint64_t, uint64_t, bool);
template void product<__nv_fp8_e5m2>(float*, int, uint64_t, uint64_t, bool);

void commit_products() { current->committed.push_back(std::exchange(current->products, {})); }

void wait_products(int pending) {
    while (int(current->committed.size()) > pending) {
        for (const Product& each : current->committed.front()) multiply(each);
        current->committed.erase(current->committed.begin());
    }
}

}  // namespace emulator

// The functions of the CUDA runtime that the host code of the kernels calls.

extern "C" {
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorNotSupported"; }
const char* cudaGetErrorString(cudaError_t) { return "the emulator does not support this call"; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
    *value = what == cudaDevAttrMultiProcessorCount ? 3 : 233472;  // 3 SMs, so that a persistent block has several tiles
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
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
    return *clusters = 3, cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    if (std::string(name) != "cuTensorMapEncodeTiled") return cudaErrorNotSupported;  // such as stream memory operations
    *function = reinterpret_cast<void*>(&emulator::encode_map), *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
}
