// D = sum over i of scale_i A_i @ B_i.T, i < 4, of FP8 codes with one fp32 scale per operand, contraction last: the dgrads of
// siblings in one launch. The sum stays in registers, and is rounded and stored once.
//
// A persistent, warp-specialized kernel. The blocks of a cluster compute two tiles of D [256, 128] side by side, with the same
// lines of A: each block loads half of the lines of A and multicasts them to both blocks. One cluster per pair of SMs stays
// resident, and processes pairs of tiles one after the other. Roles of the 12 warps of a block (384 threads); in parentheses,
// registers per thread:
//
//     warps 0-3, 4-7   consumer warpgroups (240)   128 lines of the tile each, as two products of 64 x 128 (wgmma m64n128k32)
//     warp  8          producer            (24)    one lane starts TMA copies: half of A [256, 128], and B [128, 128]
//     warps 9-11       none                (24)    present because setmaxnreg applies to whole warpgroups
//
// Shared memory, beginning at a multiple of 1024 bytes, for a ring of four stages; a stage is 128 elements of the contraction
// of one term. The ring continues from term to term and from tile to tile:
//
//          0   4 x 49152   codes: A 256 lines of 128 bytes, B 128 lines, in the 128-byte swizzle
//     196608   4 x     8   full[stage]    a phase ends when all bytes of the stage have arrived: 1 arrival, of the producer
//     196640   4 x     8   empty[stage]   a phase ends when no thread reads the stage: 16 arrivals, of the 8 consumer warps of
//                                         both blocks, because the lines of A that a block loads go to both
//     196672   4 x     4   fl(a_scale * b_scale) of each term
//
// The tensor core sums 128 products to about 14 bits. Then the accumulator (64 registers) is promoted, that is, multiplied by
// the scale and added to fp32 sums (128 registers). A second accumulator would need 256 registers, so the two warpgroups
// alternate:
//
//     tensor core    first half, group 0 │ first half, group 1 │ second half, group 0 │ second half, group 1
//     group 0                            │ promote             │                      │ promote
//     group 1                                                  │ promote              │                      │ promote
//
// With tiles of 256 x 128, the tensor core reads 6144 bytes of shared memory per 64 x 128 x 32 products, which is less per
// product than with products of 64 x 96. Sizes that are powers of two divide into pairs of 256 x 256, so that few SMs are idle
// in the last wave.
//
// The bits of a row of D depend neither on the number of rows nor on the position of the row.
#include "gemm_tile.cuh"

namespace dlp {
namespace {

constexpr int kTileM = 256, kTileN = 128, kStages = 4, kCluster = 2;
constexpr int kLines = kTileM / kCluster;  // lines of A that a block loads, and lines of a consumer warpgroup
constexpr int kHalf = kLines / 2;          // lines of a product
constexpr int kSums = kTileN / 2;          // sums per thread and product
constexpr int kGroup = 8;                  // rows of tiles that share lines of B in L2
constexpr int kThreads = 384, kConsumers = 8;  // warps that empty a stage
constexpr uint32_t kBytesA = kTileM * kTileK, kBytesB = kTileN * kTileK, kStage = kBytesA + kBytesB;
constexpr uint32_t kAlignment = 1024;      // alignment of the swizzle
constexpr uint32_t kShared = kAlignment + kStages * (kStage + 2 * sizeof(uint64_t)) + kSumTerms * sizeof(float);
static_assert(kStage == 49152, "as drawn above");
static_assert(kShared <= 232448, "shared memory of a block");

struct Problem {
    GemmSumJob job;
    const float* scales[kSumTerms][2];
    int blocks[kSumTerms];       // number of stages of each term
    int pairs_down, pairs_across;  // number of pairs of tiles down and across D
};
struct Maps {
    CUtensorMap a[kSumTerms], b[kSumTerms];
};

// Order of tiles. Groups of kGroup rows of tiles are processed column by column, so that concurrent blocks share lines of A
// and B in L2.
struct Tiles {
    const Problem& p;
    int next_pair, row = 0, col = 0;

    __device__ explicit Tiles(const Problem& problem) : p(problem), next_pair(blockIdx.x / kCluster) {}
    __device__ bool next(int rank) {
        if (next_pair >= p.pairs_down * p.pairs_across) return false;
        const int group = next_pair / (kGroup * p.pairs_across), first = group * kGroup;
        const int size = min(kGroup, p.pairs_down - first), in = next_pair - first * p.pairs_across;
        row = (first + in % size) * kTileM;
        col = (in / size * kCluster + rank) * kTileN;
        next_pair += gridDim.x / kCluster;
        return true;
    }
};

// Shared memory, as drawn above.
struct Shared {
    uint8_t* base;

    __device__ uint32_t a(int stage) const { return shared_address(base) + stage * kStage; }
    __device__ uint32_t b(int stage) const { return a(stage) + kBytesA; }
    __device__ Barrier full(int stage) const { return {a(kStages) + 8 * stage}; }
    __device__ Barrier empty(int stage) const { return {full(kStages).at + 8 * stage}; }
    __device__ float* scales() const { return reinterpret_cast<float*>(base + kStages * (kStage + 2 * sizeof(uint64_t))); }
};

__device__ inline void produce(const Problem& p, Shared shared, const Maps& maps, int rank) {
    const bool leader = elected();
    Ring<kStages> ring;
    for (Tiles tiles(p); tiles.next(rank);)
        for (int term = 0; term < p.job.terms; ++term)
            for (int x = 0; x < p.blocks[term] * kTileK; x += kTileK, ring.advance()) {
                shared.empty(ring.stage).wait(ring.parity ^ 1);
                if (!leader) continue;
                const Barrier full = shared.full(ring.stage);
                full.expect(kStage);  // A arrives from both blocks; boxes outside of the matrix count with all bytes, as zeros
                const int line = rank * kLines;
                copy_tile_to((1 << kCluster) - 1, shared.a(ring.stage) + line * kTileK, &maps.a[term], x, tiles.row + line, full);
                copy_tile(shared.b(ring.stage), &maps.b[term], x, tiles.col, full);
            }
}

__device__ inline void store_row(const GemmSumJob& job, const float2 (&row)[kTileN / 8], int64_t line, int first, float*) {
    const int col = first + threadIdx.x % 4 * 2;
    float* to = static_cast<float*>(job.d) + line * job.d_stride + col;
#pragma unroll
    for (int i = 0; i < kTileN / 8; ++i)
        if (line < job.rows && col + 8 * i < job.cols) *reinterpret_cast<float2*>(to + 8 * i) = row[i];
}

// A thread has four sums per eight columns: two sums of the first row, and two sums of the row 8 below.
template <class Out>
__device__ void store(const GemmSumJob& job, const float (&sums)[kSums], int row, int first) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float2 twos[kTileN / 8];
#pragma unroll
        for (int i = 0; i < kTileN / 8; ++i) twos[i] = {sums[4 * i + 2 * r], sums[4 * i + 2 * r + 1]};
        store_row(job, twos, row + 8 * r, first, static_cast<Out*>(nullptr));
    }
}

template <class A, class Out>
__device__ void consume(const Problem& p, Shared shared, int group, int rank) {
    const int lane = threadIdx.x % 32, row = group * kLines + threadIdx.x % 128 / 32 * 16 + lane / 4;
    float sums[2][kSums], products[kSums];
    const uint64_t a_first = descriptor(shared.a(0) + group * (kLines * kTileK)), b_first = descriptor(shared.b(0));
    Ring<kStages> ring;
    if (group == 1) pass_turn(0);
    for (Tiles tiles(p); tiles.next(rank);) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[0][i] = sums[1][i] = 0.0f;
        for (int term = 0; term < p.job.terms; ++term) {
            const float scale = shared.scales()[term];
#pragma unroll 1
            for (int block = 0; block < p.blocks[term]; ++block, ring.advance()) {
                const uint64_t a = a_first + ring.stage * (kStage >> 4), b = b_first + ring.stage * (kStage >> 4);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    // For the second half this wait returns at once. It is a loop, below which ptxas does not move the
                    // promotion of the first half. Without the loop, ptxas would move the promotion below `await_turn`, where
                    // the tensor core would wait for it.
                    shared.full(ring.stage).wait(ring.parity);
                    await_turn(group);
                    products_begin();
#pragma unroll
                    for (int k = 0; k < kTileK / 32; ++k)
                        multiply<A>(products, a + half * (kHalf * kTileK >> 4) + 2 * k, b + 2 * k, k > 0);
                    products_end();
                    pass_turn(1 - group);
                    wait_products<0>();
                    if (half == 1) {
                        __syncwarp();
                        if (lane < kCluster) shared.empty(ring.stage).arrive_at(lane);  // lines of A come from both blocks
                    }
#pragma unroll
                    for (int i = 0; i < kSums; ++i) sums[half][i] = fmaf(products[i], scale, sums[half][i]);
                }
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) store<Out>(p.job, sums[half], tiles.row + row + half * kHalf, tiles.col);
    }
    if (group == 0) await_turn(0);  // waits for the last turn of the other warpgroup
}

template <class A, class Out>
__global__ void __launch_bounds__(kThreads, 1) sum_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const Shared shared{shared_memory() + (-shared_address(shared_memory()) & (kAlignment - 1))};
    // the shuffle tells the compiler that the value is uniform in the warp
    const int rank = cluster_rank(), warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) shared.full(i).init(1), shared.empty(i).init(kCluster * kConsumers);
        asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
    }
    if (threadIdx.x < p.job.terms) shared.scales()[threadIdx.x] = *p.scales[threadIdx.x][0] * *p.scales[threadIdx.x][1];
    cluster_sync();
    if (warp >= kConsumers) {
        give_registers<24>();
        if (warp == kConsumers) produce(p, shared, maps, rank);
    } else {
        take_registers<240>();
        consume<A, Out>(p, shared, warp / 4, rank);
    }
    cluster_sync();  // the other block may still write to the shared memory of this block, and arrive at the barriers
#endif
}

template <class A, class Out>
void run(const GemmSumJob& job, const GemmTerm* terms, Stream stream) {
    Problem p{job};
    Maps maps{};
    p.pairs_down = over(job.rows, kTileM), p.pairs_across = over(job.cols, kCluster * kTileN);
    for (int i = 0; i < job.terms; ++i) {
        const GemmTerm& term = terms[i];
        DLP_CHECK_LT(0, term.contraction);
        p.scales[i][0] = term.a_scale, p.scales[i][1] = term.b_scale, p.blocks[i] = over(term.contraction, kTileK);
        maps.a[i] = tensor_map(term.a, job.rows, term.contraction, term.a_stride, kLines);
        maps.b[i] = tensor_map(term.b, job.cols, term.contraction, term.b_stride, kTileN);
    }
    constexpr auto kKernel = &sum_kernel<A, Out>;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.attrs = &cluster, config.numAttrs = 1;
    config.blockDim = dim3(kThreads), config.dynamicSmemBytes = kShared, config.stream = reinterpret_cast<cudaStream_t>(stream);
    config.gridDim = dim3(kCluster * std::min(p.pairs_down * p.pairs_across, resident_clusters<kKernel, kCluster>(config)));
    DLP_CHECK_CUDA(cudaLaunchKernelEx(&config, kKernel, maps, p));
}

}  // namespace

void gemm_fp8_sum(const GemmSumJob& job, const GemmTerm* terms, Code a_code, Input out, Stream stream) {
    DLP_CHECK_LT(0, job.terms);
    DLP_CHECK_LE(job.terms, kSumTerms);
    DLP_CHECK_EQ(job.cols % 8, 0);
    with_types(out, a_code, [&](auto element, auto code) { run<decltype(code), decltype(element)>(job, terms, stream); });
}

}  // namespace dlp
