// Transfers between ranks that map each other's memory: synchronization, and agreements on amaxes. Copy engines move the
// payload (`copy_part`), so that transfers take no SM from a running GEMM.
//
// A slot (of this file) is memory of one rank that all ranks of the group map. A use is one transfer through the slots of the
// group, with a number > 0. The header of a slot has the following words, initially 0:
//
//     unread[r]   number of the use in which this rank pushed data that rank r has not read yet; else 0
//     sent[r]     number of the use in which rank r pushed data to this rank; else 0
//     met[r]      number of the last agreement for which rank r has pushed its values, never reset
//     uses        number of agreements of this rank, never reset
//
//     begin_use     wait until unread[r] is 0 for all ranks r, then set unread[r] to `use`
//     meet          write sent = `use` at all peers (this rank has pushed), wait until all peers have done so, set sent to 0
//     release_use   write unread = 0 at all peers (this rank has read)
//
// All writes and waits are the same in every use, so that recorded launches and CUDA graphs can repeat them. Stream memory
// operations write and wait without a kernel: if a GEMM fills the GPU, even a kernel of one warp would start only after the
// GEMM and delay the peers. Such a write is ordered after the preceding copies; a flag that a copy engine copies may arrive
// before the data. There is no deadlock, because ranks signal before they wait, and all ranks use their slots in the same
// order.
//
// An agreement (`agree`) computes maxima over ranks, in one kernel. If a wait takes longer than `patience`, the kernel writes
// the waiting rank and the peer to host memory, and ends the program.
#include <cstdint>

#include <cuda.h>

#include "jobs.cuh"
#include "launch.cuh"

namespace dlp {
namespace {

// indices of the words in the header of a slot
constexpr int kUnread = 0, kSent = kSlotRanks, kMet = 2 * kSlotRanks, kUses = 3 * kSlotRanks;
constexpr int kAgreeThreads = 512;
constexpr uint32_t kHasNotAgreed = 2;  // index into WAITS_FOR (comm/slots.py)

__host__ __device__ inline uint32_t* header(uint64_t slot) { return reinterpret_cast<uint32_t*>(slot); }

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

// Waits until *at has reached `wanted`, counted modulo 2^32. Afterwards plain loads of this thread, and of threads that
// synchronize with it at a barrier, see all data that the peer wrote before *at.
//
// After `patience` milliseconds, one of the waiting threads writes `report` ([7] words of host memory, see `Waiting`) and ends
// the program. The other threads continue to wait, because a second trap could end the program before the report is complete.
__device__ inline void await(const uint32_t* at, uint32_t wanted, const Waiting& waiting, uint32_t peer) {
    const uint64_t began = nanoseconds();
    uint32_t seen;
    while (int32_t((seen = load_acquire(at)) - wanted) < 0) {
        if (nanoseconds() - began < uint64_t(waiting.patience) * 1000000 || atomicExch(waiting.said, 1u) != 0) continue;
        const uint32_t words[] = {1, uint32_t(waiting.rank), peer, kHasNotAgreed, wanted, seen, uint32_t(waiting.use)};
        volatile uint32_t* report = waiting.report;
        for (int i = 1; i < 7; ++i) report[i] = words[i];
        __threadfence_system();
        report[0] = words[0];  // the report is complete
        __threadfence_system();
        __trap();
    }
}

__device__ inline void store_release(uint32_t* at, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Computes the largest of the values of all ranks. Values are compared as bits: amaxes are not negative, and NaN is larger than
// all numbers. Agreement e uses half e % 2 of the payload of the slot. A rank that begins agreement e + 2 has seen that all
// ranks began e + 1, so that all ranks have read the values of e.
__global__ void __launch_bounds__(kAgreeThreads) agree_kernel(const uint64_t* slots, AgreeJob job, Waiting waiting) {
    uint32_t* mine = header(slots[waiting.rank]);
    const uint32_t use = mine[kUses] + 1, rank = waiting.rank, world = waiting.world;
    const int64_t half = job.capacity * world;
    const auto values = [&](uint32_t owner, uint32_t of) {
        return reinterpret_cast<uint32_t*>(slots[owner] + kSlotHeader) + (use & 1) * half + of * job.capacity;
    };
    int64_t first = 0;
    for (int i = 0; i < job.count; first += job.length[i++])
        for (int64_t k = threadIdx.x; k < job.length[i]; k += kAgreeThreads) {
            const uint32_t value = reinterpret_cast<const uint32_t*>(job.from[i])[k];
            for (uint32_t peer = 0; peer < world; ++peer)
                if (peer != rank) __stcg(values(peer, rank) + first + k, value);
        }
    __threadfence_system();
    __syncthreads();
    const uint32_t peer = threadIdx.x;
    if (peer < world && peer != rank) {
        store_release(header(slots[peer]) + kMet + rank, use);
        await(mine + kMet + peer, use, waiting, peer);
    }
    __syncthreads();
    first = 0;
    for (int i = 0; i < job.count; first += job.length[i++])
        for (int64_t k = threadIdx.x; k < job.length[i]; k += kAgreeThreads) {
            uint32_t largest = reinterpret_cast<const uint32_t*>(job.from[i])[k];
            for (uint32_t other = 0; other < world; ++other)
                if (other != rank) largest = max(largest, __ldcv(values(rank, other) + first + k));
            reinterpret_cast<uint32_t*>(job.to[i])[k] = largest;
        }
    if (threadIdx.x == 0) mine[kUses] = use;
}

cudaStream_t stream_of(Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }

using StreamValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

StreamValue driver_function(const char* name) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    DLP_CHECK_CUDA(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result));
    DLP_CHECK_EQ(int(result), int(cudaDriverEntryPointSuccess));
    return reinterpret_cast<StreamValue>(function);
}

CUdeviceptr word(const SlotBases& slots, int rank, int index) { return CUdeviceptr(slots.base[rank]) + 4 * index; }

void write_value(const SlotBases& slots, int rank, int index, uint32_t value, Stream stream) {
    static const StreamValue write = driver_function("cuStreamWriteValue32");
    DLP_CHECK_EQ(int(write(stream_of(stream), word(slots, rank, index), value, CU_STREAM_WRITE_VALUE_DEFAULT)), int(CUDA_SUCCESS));
}

void await_value(const SlotBases& slots, int rank, int index, uint32_t value, unsigned how, Stream stream) {
    static const StreamValue wait = driver_function("cuStreamWaitValue32");
    DLP_CHECK_EQ(int(wait(stream_of(stream), word(slots, rank, index), value, how)), int(CUDA_SUCCESS));
}

}  // namespace

void begin_use(const SlotBases& slots, int64_t use, Stream stream) {
    for (int peer = 0; peer < slots.world; ++peer) {
        if (peer == slots.rank) continue;
        await_value(slots, slots.rank, kUnread + peer, 0, CU_STREAM_WAIT_VALUE_EQ, stream);
        write_value(slots, slots.rank, kUnread + peer, uint32_t(use), stream);
    }
}

void meet(const SlotBases& slots, int64_t use, Stream stream) {
    for (int peer = 0; peer < slots.world; ++peer)
        if (peer != slots.rank) write_value(slots, peer, kSent + slots.rank, uint32_t(use), stream);
    for (int peer = 0; peer < slots.world; ++peer) {
        if (peer == slots.rank) continue;
        await_value(slots, slots.rank, kSent + peer, 1, CU_STREAM_WAIT_VALUE_GEQ, stream);
        write_value(slots, slots.rank, kSent + peer, 0, stream);
    }
}

void release_use(const SlotBases& slots, Stream stream) {
    for (int peer = 0; peer < slots.world; ++peer)
        if (peer != slots.rank) write_value(slots, peer, kUnread + slots.rank, 0, stream);
}

void agree(const uint64_t* slots, const AgreeJob& job, const Waiting& waiting, Stream stream) {
    launch<agree_kernel>(1, kAgreeThreads, 0, stream, slots, job, waiting);
}

void copy_part(uintptr_t from, int64_t from_pitch, uintptr_t to, int64_t to_pitch, int64_t width, int64_t height, Stream stream) {
    void* target = reinterpret_cast<void*>(to);
    const void* source = reinterpret_cast<const void*>(from);
    if (height == 1 || (from_pitch == width && to_pitch == width))
        DLP_CHECK_CUDA(cudaMemcpyAsync(target, source, width * height, cudaMemcpyDeviceToDevice, stream_of(stream)));
    else
        DLP_CHECK_CUDA(cudaMemcpy2DAsync(target, to_pitch, source, from_pitch, width, height, cudaMemcpyDeviceToDevice, stream_of(stream)));
}

int64_t new_event() {
    cudaEvent_t event;
    DLP_CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return reinterpret_cast<int64_t>(event);
}

void mark(int64_t event, Stream stream) { DLP_CHECK_CUDA(cudaEventRecord(reinterpret_cast<cudaEvent_t>(event), stream_of(stream))); }

void await_mark(int64_t event, Stream stream) {
    DLP_CHECK_CUDA(cudaStreamWaitEvent(stream_of(stream), reinterpret_cast<cudaEvent_t>(event), 0));
}

}  // namespace dlp
