// D = A @ B.T of FP8 codes with fp32 scales: one scale per 1x128 block of A and per 128x128 tile of B, contraction last.
//
// A persistent, warp-specialized kernel. A tile of D is 128 x 192. Two blocks of a cluster compute a pair of tiles, one below
// the other, with the same lines of B: each block loads half of the lines of B and multicasts them to both blocks. One cluster
// per pair of SMs stays resident, and processes pairs of tiles one after the other. Roles of the 12 warps of a block (384
// threads); in parentheses, registers per thread:
//
//     warps 0-3, 4-7   consumer warpgroups (240)   64 lines of the tile each, as two products of 64 x 96 (wgmma m64n96k32);
//                                                  these warps also store the result
//     warp  8          producer of codes    (24)   one lane starts TMA copies: A [128, 128], and half of B [192, 128]
//     warp  9          producer of scales   (24)   one lane starts bulk copies
//     warps 10, 11     none                 (24)   present because setmaxnreg applies to whole warpgroups
//
// Shared memory, beginning at a multiple of 1024 bytes, for a ring of five stages; a stage is 128 elements of the contraction:
//
//          0   5 x 40960   codes: A 128 lines of 128 bytes, B 192 lines, in the 128-byte swizzle
//     204800   5 x   544   scales: of 128 rows of A (512), of two tiles of B times four stages (32)
//     207520   5 x     8   full[stage]    a phase ends when all bytes of the stage have arrived: 1 arrival, of the producer
//     207560   5 x     8   empty[stage]   a phase ends when no thread reads the stage: 16 arrivals, of the 8 consumer warps of
//                                         both blocks, because the lines of B that a block loads go to both
//
// The tensor core sums 128 products to about 14 bits. Then the accumulator is promoted, that is, multiplied by both scales and
// added to fp32 registers, while the tensor core works on the other accumulator:
//
//     tensor core    left half of stage k │ right half of k │ left half of k + 1 │ right half of k + 1
//     fp32 units                          │ promote left k  │ promote right k    │ promote left k + 1
//                                                           └► empty[k]
//
// Under continuous load the power limit of the GPU bounds this kernel; dev/log.md lists other designs that were measured.
#include "gemm_tile.cuh"

namespace dlp {
namespace {

constexpr int kTileM = 128, kTileN = 192, kStages = 5, kCluster = 2;
constexpr int kHalf = kTileN / 2;        // columns of a product
constexpr int kSums = kHalf / 2;         // sums per thread and product
constexpr int kGroup = 8;                // pairs of tiles that share lines of B in L2
constexpr int kThreads = 384, kConsumers = 8;  // warps that empty a stage
constexpr uint32_t kBytesA = kTileM * kTileK, kBytesB = kTileN * kTileK, kStage = kBytesA + kBytesB;
constexpr uint32_t kScalesA = kTileM * sizeof(float), kScalesB = 2 * sizeof(float4), kScales = kScalesA + kScalesB;
constexpr uint32_t kAlignment = 1024;    // alignment of the swizzle
constexpr uint32_t kShared = kAlignment + kStages * (kStage + kScales + 2 * sizeof(uint64_t));
static_assert(kStage == 40960 && kScales == 544, "as drawn above");
static_assert(kShared <= 232448, "shared memory of a block");

struct Problem {
    BlockGemmJob job;
    int blocks, pairs_down, pairs_across;  // number of stages of the contraction; of pairs of tiles down and across D
};

// Order of tiles. Groups of kGroup rows of pairs are processed column by column, so that concurrent blocks share lines of A and
// B in L2.
struct Tiles {
    const Problem& p;
    int next_pair, row = 0, col = 0;

    __device__ explicit Tiles(const Problem& problem) : p(problem), next_pair(blockIdx.x / kCluster) {}
    __device__ bool next(int rank) {
        if (next_pair >= p.pairs_down * p.pairs_across) return false;
        const int group = next_pair / (kGroup * p.pairs_across), first = group * kGroup;
        const int size = min(kGroup, p.pairs_down - first), in = next_pair - first * p.pairs_across;
        row = ((first + in % size) * kCluster + rank) * kTileM;
        col = in / size * kTileN;
        next_pair += gridDim.x / kCluster;
        return true;
    }
};

// Shared memory, as drawn above.
struct Shared {
    uint8_t* base;

    __device__ uint32_t a(int stage) const { return shared_address(base) + stage * kStage; }
    __device__ uint32_t b(int stage) const { return a(stage) + kBytesA; }
    __device__ float* a_scales(int stage) const { return reinterpret_cast<float*>(base + kStages * kStage + stage * kScales); }
    __device__ float* b_scales(int stage) const { return a_scales(stage) + kTileM; }
    __device__ Barrier full(int stage) const { return {shared_address(a_scales(kStages)) + 8 * stage}; }
    __device__ Barrier empty(int stage) const { return {full(kStages).at + 8 * stage}; }
};

// Bytes of the scales that a stage loads, without lines after the last line. A stage loads scales of B for four stages, of the
// one or two 128-column tiles that the 192 columns overlap.
__device__ inline uint32_t bytes_of_a(const Problem& p, int row) {
    return sizeof(float) * max(0, min(kTileM, int(p.job.a_scale_lines) - row));
}
__device__ inline uint32_t bytes_of_b(const Problem& p, int col) {
    return sizeof(float4) * max(0, min((col % 128 + kTileN + 127) / 128, int(p.job.b_scale_lines) - col / 128));
}

__device__ inline void produce_codes(const Problem& p, Shared shared, const CUtensorMap* a, const CUtensorMap* b, int rank) {
    const bool leader = elected();
    Ring<kStages> ring;
    for (Tiles tiles(p); tiles.next(rank);) {
        const uint32_t bytes = kStage + bytes_of_a(p, tiles.row) + bytes_of_b(p, tiles.col);
        for (int x = 0; x < p.blocks * kTileK; x += kTileK, ring.advance()) {
            shared.empty(ring.stage).wait(ring.parity ^ 1);
            if (!leader) continue;
            const Barrier full = shared.full(ring.stage);
            full.expect(bytes);
            copy_tile(shared.a(ring.stage), a, x, tiles.row, full);
            copy_tile_to((1 << kCluster) - 1, shared.b(ring.stage) + rank * (kBytesB / kCluster), b, x, tiles.col + rank * kHalf, full);
        }
    }
}

// Copies the scales. `a` points to the scales of the rows for the current stage.
__device__ inline void produce_scales(const Problem& p, Shared shared, int rank) {
    const bool leader = elected();
    Ring<kStages> ring;
    for (Tiles tiles(p); tiles.next(rank);) {
        const uint32_t a_bytes = bytes_of_a(p, tiles.row), b_bytes = bytes_of_b(p, tiles.col);
        const float* a = p.job.a_scale + tiles.row;
        const float* b = p.job.b_scale + tiles.col / 128 * p.job.b_scale_stride;
        for (int block = 0; block < p.blocks; ++block, ring.advance()) {
            shared.empty(ring.stage).wait(ring.parity ^ 1);
            if (leader) {
                const Barrier full = shared.full(ring.stage);
                const uint32_t to = shared_address(shared.b_scales(ring.stage));
                if (a_bytes > 0) copy_bytes(shared_address(shared.a_scales(ring.stage)), a, a_bytes, full);
                if (b_bytes > 0) copy_bytes(to, b + (block & ~3), sizeof(float4), full);
                if (b_bytes > sizeof(float4))
                    copy_bytes(to + sizeof(float4), b + p.job.b_scale_stride + (block & ~3), sizeof(float4), full);
            }
            a += p.job.a_scale_stride;
        }
    }
}

// Scales that a thread needs in a stage: of two rows, and of three groups of 64 columns.
struct StageScales {
    float a[2], b[kTileN / 64];

    // `row`: the thread's first row. `offset`: offset of the tile's columns within the 128 columns of a scale.
    __device__ void read(Shared shared, int stage, int block, int row, int offset) {
        a[0] = shared.a_scales(stage)[row], a[1] = shared.a_scales(stage)[row + 8];
#pragma unroll
        for (int i = 0; i < kTileN / 64; ++i) b[i] = shared.b_scales(stage)[(offset + 64 * i) / 128 * 4 + block % 4];
    }
};

// A thread has four sums per eight columns: two sums of the first row, and two sums of the row 8 below.
__device__ inline void promote(float (&sums)[kSums], const float (&products)[kSums], const StageScales& scales, int half) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
        const float scale = scales.a[i / 2 % 2] * scales.b[(half * kHalf + i / 4 * 8) / 64];
        sums[i] = fmaf(products[i], scale, sums[i]);
    }
}

__device__ inline float2 two_of(const float* p) { return *reinterpret_cast<const float2*>(p); }
__device__ inline float2 two_of(const __nv_bfloat16* p) { return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p)); }
__device__ inline float2 add(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }

// One row of a product; `first` is the first column. Four adjacent lanes have eight adjacent columns, two columns each.
__device__ inline void store_row(const BlockGemmJob& job, const float2 (&row)[kHalf / 8], int64_t line, int first, float*) {
    const int col = first + threadIdx.x % 4 * 2;
    float* to = static_cast<float*>(job.d) + line * job.d_stride + col;
#pragma unroll
    for (int i = 0; i < kHalf / 8; ++i)
        if (line < job.rows && col + 8 * i < job.cols) {
            float2* at = reinterpret_cast<float2*>(to + 8 * i);
            *at = job.accumulate ? add(row[i], *at) : row[i];
        }
}

template <class Out>
__device__ void store(const BlockGemmJob& job, const float (&sums)[kSums], int row, int first) {
    const Out* bias = static_cast<const Out*>(job.bias);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float2 twos[kHalf / 8];
#pragma unroll
        for (int i = 0; i < kHalf / 8; ++i) {
            const int col = first + 8 * i + threadIdx.x % 4 * 2;
            twos[i] = {sums[4 * i + 2 * r], sums[4 * i + 2 * r + 1]};
            if (bias != nullptr && col < job.cols) twos[i] = add(twos[i], two_of(bias + col));
        }
        store_row(job, twos, row + 8 * r, first, static_cast<Out*>(nullptr));
    }
}

template <class A, class Out>
__device__ void consume(const Problem& p, Shared shared, int group, int rank) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    float sums[2][kSums], products[2][kSums];
    StageScales scales;
    const uint64_t a_first = descriptor(shared.a(0) + group * (64 * kTileK)), b_first = descriptor(shared.b(0));
    Ring<kStages> ring;
    const auto start = [&](int product, int stage) {
        const uint64_t a = a_first + stage * (kStage >> 4), b = b_first + stage * (kStage >> 4) + product * (kHalf * kTileK >> 4);
        products_begin();
#pragma unroll
        for (int k = 0; k < kTileK / 32; ++k) multiply<A>(products[product], a + 2 * k, b + 2 * k, k > 0);
        products_end();
    };
    for (Tiles tiles(p); tiles.next(rank);) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[0][i] = sums[1][i] = 0.0f;
        shared.full(ring.stage).wait(ring.parity);
        start(0, ring.stage);
        // Computes 128 elements of the contraction. At the beginning the first product is running, and the first product of the
        // next block begins before the second product is promoted. In another order of these statements, ptxas may serialize
        // the products, which it reports as C7514 (dev/log.md).
        const auto block = [&](int number, auto last) {
            const int stage = ring.stage;
            ring.advance();
            if constexpr (!decltype(last)::value) shared.full(ring.stage).wait(ring.parity);
            scales.read(shared, stage, number, row, tiles.col % 128);
            start(1, stage);
            wait_products<1>();
            promote(sums[0], products[0], scales, 0);
            if constexpr (!decltype(last)::value) {
                start(0, ring.stage);
                wait_products<1>();
            } else {
                wait_products<0>();
            }
            __syncwarp();
            if (lane < kCluster) shared.empty(stage).arrive_at(lane);  // lines of B come from both blocks
            promote(sums[1], products[1], scales, 1);
        };
        int i = 0;
#pragma unroll 1
        for (; i < p.blocks - 2; i += 2) block(i, std::false_type()), block(i + 1, std::false_type());
        if (i < p.blocks - 1) {
            block(i, std::false_type());
            block(i + 1, std::true_type());
        } else {
            block(i, std::true_type());
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) store<Out>(p.job, sums[i], tiles.row + row, tiles.col + i * kHalf);
    }
}

template <class A, class Out>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const __grid_constant__ Problem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const Shared shared{shared_memory() + (-shared_address(shared_memory()) & (kAlignment - 1))};
    // the shuffle tells the compiler that the value is uniform in the warp
    const int rank = cluster_rank(), warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) shared.full(i).init(1), shared.empty(i).init(kCluster * kConsumers);
        asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
    }
    cluster_sync();
    if (warp >= kConsumers) {
        give_registers<24>();
        if (warp == kConsumers) produce_codes(p, shared, &a, &b, rank);
        if (warp == kConsumers + 1) produce_scales(p, shared, rank);
    } else {
        take_registers<240>();
        consume<A, Out>(p, shared, warp / 4, rank);
    }
    cluster_sync();  // the other block may still write to the shared memory of this block, and arrive at the barriers
#endif
}

template <class A, class Out>
void run(const BlockGemmJob& job, Stream stream) {
    const Problem p{job, over(job.contraction, kTileK), over(job.rows, kCluster * kTileM), over(job.cols, kTileN)};
    const CUtensorMap a = tensor_map(job.a, job.rows, job.contraction, job.a_stride, kTileM);
    const CUtensorMap b = tensor_map(job.b, job.cols, job.contraction, job.b_stride, kHalf);
    constexpr auto kKernel = &gemm_kernel<A, Out>;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.attrs = &cluster, config.numAttrs = 1;
    config.blockDim = dim3(kThreads), config.dynamicSmemBytes = kShared, config.stream = reinterpret_cast<cudaStream_t>(stream);
    config.gridDim = dim3(kCluster * std::min(p.pairs_down * p.pairs_across, resident_clusters<kKernel, kCluster>(config)));
    DLP_CHECK_CUDA(cudaLaunchKernelEx(&config, kKernel, a, b, p));
}

}  // namespace

void gemm_fp8_blocks(const BlockGemmJob& job, Code a_code, Input out, Stream stream) {
    DLP_CHECK_EQ(job.cols % 8, 0);
    with_types(out, a_code, [&](auto element, auto code) { run<decltype(code), decltype(element)>(job, stream); });
}

}  // namespace dlp
