// D = A @ B.T of FP8 codes with fp32 scales: A's of 1x128 blocks, B's of 128x128 tiles, both contracted along their last dimension.
//
// A persistent, warp-specialized kernel. A tile of D is 128 x 192. Two blocks of a cluster compute a pair of tiles, one below the
// other, with the same lines of B: each loads half of these and multicasts it to both. One cluster a pair of multiprocessors stays,
// and walks over the pairs of tiles. Roles of the 12 warps of a block (384 threads; registers a thread):
//
//     warps 0-3, 4-7   consumer warpgroups (240)   64 lines of the tile each, as two products of 64 x 96 (wgmma m64n96k32);
//                                                  they store their sums themselves: there is no warp for stores
//     warp  8          producer of codes    (24)   one lane starts TMA copies: A [128, 128], and its half of B [192, 128]
//     warp  9          producer of scales   (24)   one lane starts bulk copies
//     warp  10         waits for rows       (24)   one lane, where rows arrive; else none
//     warp  11         none                 (24)   it is there because setmaxnreg is for whole warpgroups
//
// Shared memory, from a multiple of 1024 bytes on, for a ring of five stages, each 128 of the contraction:
//
//          0   5 x 40960   codes: A 128 lines of 128 bytes, B 192 lines, in the 128-byte swizzle
//     204800   5 x   544   scales: of 128 rows of A (512), of two tiles of B times four stages (32)
//     207520   5 x     8   full[stage]    a phase ends when all bytes of the stage are here: 1 arrival, of who expects them
//     207560   5 x     8   empty[stage]   a phase ends when nobody reads the stage: 16 arrivals, of the 8 consumer warps of both
//                                         blocks, since the lines of B that a block loads go to both
//
// and where rows arrive
//
//     204800   5 x  2176   scales: of 128 rows of A times four stages, as they lie where they arrive (2048), of B as above
//     215680  10 x     8   full, empty
//     215760  32 x     8   here[turn]     its one phase ends when the rows of that turn's rank are here: 1 arrival
//
// The tensor core sums 128 products to some 14 bits. Then an accumulator is promoted: multiplied by both scales and added to fp32
// registers, while the tensor core works on the other one, so that it always has work:
//
//     tensor core    left half of stage k │ right half of k │ left half of k + 1 │ right half of k + 1
//     fp32 units                          │ promote left k  │ promote right k    │ promote left k + 1
//                                                           └► empty[k]
//
// Under a steady load power is the limit of this kernel; what else was tried is in docs/log.md.
//
// Rows of A may still be arriving from other ranks (`ArrivingProblem`). Then tiles of this rank's rows come first, and producers
// wait before those of each other rank's, for whose rows one lane waits, by a word that the other rank writes behind them. Nothing
// that has to happen for it may need a multiprocessor, since this kernel holds all of them but `spare`.
//
// Or rows of D go to other ranks (`SendingProblem`), straight into memory that they map. Then tiles of the rank behind come first
// and this rank's own last, and nothing waits inside: what the stream does in front of the kernel has waited until the others'
// memory is free, and what it does behind tells them.
#include "hopper.cuh"
#include "waiting.cuh"

namespace dlp {
namespace {

constexpr int kTileM = 128, kTileN = 192, kTileK = 128, kStages = 5, kCluster = 2;
constexpr int kHalf = kTileN / 2;        // columns of a product
constexpr int kSums = kHalf / 2;         // of a thread in it
constexpr int kGroup = 8;                // pairs of tiles that share lines of B in L2
constexpr int kThreads = 384, kConsumers = 8;  // warps that empty a stage
constexpr uint32_t kBytesA = kTileM * kTileK, kBytesB = kTileN * kTileK, kStage = kBytesA + kBytesB;
constexpr uint32_t kScalesB = 2 * sizeof(float4);
constexpr uint32_t kAlignment = 1024;    // of the swizzle
static_assert(kStage == 40960, "as drawn above");

struct Problem {
    BlockGemmJob job;
    int blocks, pairs_down, pairs_across;  // of 128 along the contraction; of tiles
};

// Which tile is next. Groups of kGroup pairs of rows are walked over column by column, so that the blocks that run at once share
// lines of A and B in L2.
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

// A problem whose rows arrive: [world] times `pairs_each` pairs of tiles, all of whose rows are of one rank.
struct ArrivingProblem : Problem {
    ArrivingRows from;
    Waiting waiting;
    int pairs_each;
    CUtensorMap a_scales;  // [rows, blocks]

    // This rank first, then the one behind it, which sends to it first.
    __device__ int owner(int turn) const {
        const int owner = int(waiting.rank) - turn;
        return owner < 0 ? owner + int(waiting.world) : owner;
    }
};

// A problem whose result goes to its ranks, as many rows to each: of these, too, `pairs_each` pairs of tiles.
struct SendingProblem : Problem {
    __nv_bfloat16* lines[kSlotRanks];  // by rank: where line 0 of D would lie, if all lines lay where this rank's do
    int rank, world, pairs_each;

    // The rank in front of this one first, so that no two store to one at a time; this one last.
    __device__ int owner(int turn) const {
        const int owner = rank + 1 + turn;
        return owner < world ? owner : owner - world;
    }
};

// Rank after rank; of each as `Tiles` walks.
template <class P>
struct TilesByRank {
    const P& p;
    int next_pair, row = 0, col = 0, turn = 0, owner = 0;

    __device__ explicit TilesByRank(const P& problem) : p(problem), next_pair(blockIdx.x / kCluster) {}
    __device__ bool next(int rank) {
        if (next_pair >= p.pairs_down * p.pairs_across) return false;
        turn = next_pair / (p.pairs_each * p.pairs_across);
        owner = p.owner(turn);
        const int pair = next_pair - turn * (p.pairs_each * p.pairs_across);
        const int group = pair / (kGroup * p.pairs_across), first = group * kGroup;
        const int size = min(kGroup, p.pairs_each - first), in = pair - first * p.pairs_across;
        row = ((owner * p.pairs_each + first + in % size) * kCluster + rank) * kTileM;
        col = in / size * kTileN;
        next_pair += gridDim.x / kCluster;
        return true;
    }
};

template <class P>
using TilesOf = std::conditional_t<std::is_same_v<P, Problem>, Tiles, TilesByRank<P>>;

// Shared memory, as drawn above.
template <class P>
struct Shared {
    static constexpr bool kArriving = std::is_same_v<P, ArrivingProblem>;
    static constexpr int kOfRow = kArriving ? 4 : 1;  // scales of a row of A that a stage holds
    static constexpr uint32_t kScalesA = kTileM * kOfRow * sizeof(float);
    static constexpr uint32_t kScales = kArriving ? (kScalesA + kScalesB + 127) / 128 * 128 : kScalesA + kScalesB;  // TMA: 128 bytes
    static constexpr uint32_t kBytes =
        kAlignment + kStages * (kStage + kScales + 2 * sizeof(uint64_t)) + (kArriving ? kSlotRanks * sizeof(uint64_t) : 0);
    static_assert(kBytes <= 232448, "a block's share");
    static_assert(kScales == (kArriving ? 2176 : 544), "as drawn above");

    uint8_t* base;

    __device__ uint32_t a(int stage) const { return shared_address(base) + stage * kStage; }
    __device__ uint32_t b(int stage) const { return a(stage) + kBytesA; }
    __device__ float* a_scales(int stage) const { return reinterpret_cast<float*>(base + kStages * kStage + stage * kScales); }
    __device__ float* b_scales(int stage) const { return a_scales(stage) + kTileM * kOfRow; }
    __device__ Barrier full(int stage) const { return {shared_address(a_scales(kStages)) + 8 * stage}; }
    __device__ Barrier empty(int stage) const { return {full(kStages).at + 8 * stage}; }
    __device__ Barrier here(int turn) const { return {empty(kStages).at + 8 * turn}; }
    __device__ float a_scale(int stage, int row, int block) const {
        return a_scales(stage)[kArriving ? kOfRow * row + block % kOfRow : row];
    }
};

// One lane waits for the rows of rank after rank, so that producers, who wait for its barriers, stay as fast as where all rows are
// here: a loop over a word of theirs would take their addresses out of uniform registers, and each copy would start later.
//
// What is copied then is what the other rank has written. It wrote the rows, then the word, with a fence of the system between
// (cuStreamWriteValue32). This lane acquires the word, at the scope of the system; its proxy fence, and its arrival at the barrier
// behind that, put the word in front of the copies of who has waited there. These are all TMA copies, in the async proxy, of codes
// and of scales.
//
// No cluster waits for another one, and its two blocks wait for the same words, since the rows of a rank are whole pairs of tiles.
// The one that sees one first fills no more than the stages that consumers of both have emptied.
__device__ inline void await_ranks(const ArrivingProblem& p, Shared<ArrivingProblem> shared) {
    if (!elected()) return;
    for (int turn = 0; turn < int(p.waiting.world); ++turn) {
        if (turn > 0) {
            await(p.from.sent + p.owner(turn), uint32_t(p.waiting.use), p.waiting, p.owner(turn), kHasNotSent);
            asm volatile("fence.proxy.async.global;" ::: "memory");
        }
        shared.here(turn).arrive();
    }
}

// Until the rows of a tile are here.
template <class P>
__device__ inline void await_rows(const TilesOf<P>& tiles, Shared<P> shared) {
    if constexpr (Shared<P>::kArriving) shared.here(tiles.turn).wait(0);
}

// Bytes of scales that a stage gets: none of lines behind the last. Of B it gets those of four stages, for one or two tiles.
__device__ inline uint32_t bytes_of_a(const Problem& p, int row) {
    return sizeof(float) * max(0, min(kTileM, int(p.job.a_scale_lines) - row));
}
__device__ inline uint32_t bytes_of_a(const ArrivingProblem&, int) { return Shared<ArrivingProblem>::kScalesA; }
__device__ inline uint32_t bytes_of_b(const Problem& p, int col) {
    return sizeof(float4) * max(0, min((col % 128 + kTileN + 127) / 128, int(p.job.b_scale_lines) - col / 128));
}

template <class P>
__device__ inline void produce_codes(const P& p, Shared<P> shared, const CUtensorMap* a, const CUtensorMap* b, int rank) {
    const bool leader = elected();
    Ring<kStages> ring;
    for (TilesOf<P> tiles(p); tiles.next(rank);) {
        await_rows<P>(tiles, shared);
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

// Scales of A lie in the order in which stages read them, block after block; those that arrive as they were sent, row after row, so
// that a stage copies four blocks of each row, the least that TMA takes.
template <class P>
__device__ inline void produce_scales(const P& p, Shared<P> shared, int rank) {
    const bool leader = elected();
    Ring<kStages> ring;
    for (TilesOf<P> tiles(p); tiles.next(rank);) {
        await_rows<P>(tiles, shared);
        const uint32_t a_bytes = bytes_of_a(p, tiles.row), b_bytes = bytes_of_b(p, tiles.col);
        const float* a = p.job.a_scale + tiles.row;
        const float* b = p.job.b_scale + tiles.col / 128 * p.job.b_scale_stride;
        for (int block = 0; block < p.blocks; ++block, ring.advance()) {
            shared.empty(ring.stage).wait(ring.parity ^ 1);
            if (leader) {
                const Barrier full = shared.full(ring.stage);
                const uint32_t to_a = shared_address(shared.a_scales(ring.stage)), to = shared_address(shared.b_scales(ring.stage));
                if constexpr (Shared<P>::kArriving) copy_tile(to_a, &p.a_scales, block & ~3, tiles.row, full);
                else if (a_bytes > 0) copy_bytes(to_a, a, a_bytes, full);
                if (b_bytes > 0) copy_bytes(to, b + (block & ~3), sizeof(float4), full);
                if (b_bytes > sizeof(float4))
                    copy_bytes(to + sizeof(float4), b + p.job.b_scale_stride + (block & ~3), sizeof(float4), full);
            }
            a += p.job.a_scale_stride;
        }
    }
}

// The scales that a thread needs of a stage: of its two rows, and of three times 64 columns.
struct StageScales {
    float a[2], b[kTileN / 64];

    // `row`: the thread's first one. `offset`: of the tile's columns among the 128 of a scale.
    template <class P>
    __device__ void read(Shared<P> shared, int stage, int block, int row, int offset) {
        a[0] = shared.a_scale(stage, row, block), a[1] = shared.a_scale(stage, row + 8, block);
#pragma unroll
        for (int i = 0; i < kTileN / 64; ++i) b[i] = shared.b_scales(stage)[(offset + 64 * i) / 128 * 4 + block % 4];
    }
};

// Of the sums of a thread four are of eight columns: two of its first row, two of the row 8 below.
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

// Where the lines of a tile lie, from line 0 of D on.
template <class P>
__device__ inline void* lines_of(const P& p, const TilesOf<P>&) { return p.job.d; }
__device__ inline void* lines_of(const SendingProblem& p, const TilesOf<SendingProblem>& tiles) { return p.lines[tiles.owner]; }

// What is added to sums that go elsewhere: D, which stays as it is.
__device__ inline const float* added_to(const Problem&) { return nullptr; }
__device__ inline const float* added_to(const SendingProblem& p) {
    return p.job.accumulate ? static_cast<const float*>(p.job.d) : nullptr;
}

// Others see what was stored before what a stream writes behind the kernel.
__device__ inline void end_stores(const Problem&) {}
__device__ inline void end_stores(const SendingProblem&) { __threadfence_system(); }

// One row of a product; `first` is where its columns begin. Four adjacent lanes have eight adjacent columns, two each.
__device__ inline void store_row(const BlockGemmJob& job, const float2 (&row)[kHalf / 8], int64_t line, int first, float* d) {
    const int col = first + threadIdx.x % 4 * 2;
    float* to = d + line * job.d_stride + col;
#pragma unroll
    for (int i = 0; i < kHalf / 8; ++i)
        if (line < job.rows && col + 8 * i < job.cols) {
            float2* at = reinterpret_cast<float2*>(to + 8 * i);
            *at = job.accumulate ? add(row[i], *at) : row[i];
        }
}

// What the lanes of a pair have of a and b becomes both a in the first of them, both b in the second.
__device__ inline void exchange(uint32_t& a, uint32_t& b, bool second, int distance) {
    const uint32_t other = __shfl_xor_sync(~0u, second ? a : b, distance);
    if (second) a = other;
    else b = other;
}

// The lanes exchange what they have of four times eight columns: each stores eight columns at once.
__device__ inline void store_row(const BlockGemmJob& job, const float2 (&row)[kHalf / 8], int64_t line, int first, __nv_bfloat16* d) {
    const bool odd = threadIdx.x % 2, high = threadIdx.x / 2 % 2;
    const int col = first + threadIdx.x % 4 * 8;
    __nv_bfloat16* to = d + line * job.d_stride + col;
#pragma unroll
    for (int i = 0; i < kHalf / 8; i += 4) {
        uint32_t v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const __nv_bfloat162 two = __float22bfloat162_rn(row[i + k]);
            v[k] = reinterpret_cast<const uint32_t&>(two);
        }
        exchange(v[0], v[1], odd, 1), exchange(v[2], v[3], odd, 1);
        exchange(v[0], v[2], high, 2), exchange(v[1], v[3], high, 2);
        if (line < job.rows && col + 8 * i < job.cols) *reinterpret_cast<uint4*>(to + 8 * i) = {v[0], v[1], v[2], v[3]};
    }
}

template <class Out>
__device__ void store(const BlockGemmJob& job, Out* d, const float* more, const float (&sums)[kSums], int row, int first) {
    const Out* bias = static_cast<const Out*>(job.bias);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float2 twos[kHalf / 8];
#pragma unroll
        for (int i = 0; i < kHalf / 8; ++i) {
            const int col = first + 8 * i + threadIdx.x % 4 * 2;
            twos[i] = {sums[4 * i + 2 * r], sums[4 * i + 2 * r + 1]};
            if (bias != nullptr && col < job.cols) twos[i] = add(twos[i], two_of(bias + col));
            if (more != nullptr && col < job.cols) twos[i] = add(twos[i], two_of(more + (row + 8 * r) * job.d_stride + col));
        }
        store_row(job, twos, row + 8 * r, first, d);
    }
}

template <class A, class Out, class P>
__device__ void consume(const P& p, Shared<P> shared, int group, int rank) {
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
    for (TilesOf<P> tiles(p); tiles.next(rank);) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[0][i] = sums[1][i] = 0.0f;
        shared.full(ring.stage).wait(ring.parity);
        start(0, ring.stage);
        // 128 of the contraction: the first product is under way, and that of the next block begins before the second is promoted.
        // The order matters to ptxas (docs/log.md): look for C7514 in its report, which says that products wait for each other.
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
            if (lane < kCluster) shared.empty(stage).arrive_at(lane);  // its lines of B come from both blocks
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
        for (int i = 0; i < 2; ++i)
            store(p.job, static_cast<Out*>(lines_of(p, tiles)), added_to(p), sums[i], tiles.row + row, tiles.col + i * kHalf);
    }
    end_stores(p);
}

template <class A, class Out, class P>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const __grid_constant__ P p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const Shared<P> shared{shared_memory() + (-shared_address(shared_memory()) & (kAlignment - 1))};
    const int rank = cluster_rank(), warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);  // the compiler sees that it is the warp's
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) shared.full(i).init(1), shared.empty(i).init(kCluster * kConsumers);
        if constexpr (Shared<P>::kArriving)
            for (int turn = 0; turn < kSlotRanks; ++turn) shared.here(turn).init(1);
        asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
    }
    cluster_sync();
    if (warp >= kConsumers) {
        give_registers<24>();
        if (warp == kConsumers) produce_codes(p, shared, &a, &b, rank);
        if (warp == kConsumers + 1) produce_scales(p, shared, rank);
        if constexpr (Shared<P>::kArriving)
            if (warp == kConsumers + 2) await_ranks(p, shared);
    } else {
        take_registers<240>();
        consume<A, Out>(p, shared, warp / 4, rank);
    }
    cluster_sync();  // the other block may still send to this one's shared memory, and arrive at its barriers
#endif
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode encode() {
    static const Encode found = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
        DLP_CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result));
        DLP_CHECK_EQ(int(result), int(cudaDriverEntryPointSuccess));
        return reinterpret_cast<Encode>(function);
    }();
    return found;
}

// A matrix [lines, along] of which copies take boxes [down, across]; what lies outside is 0. `stride`: bytes between lines.
struct Boxes {
    const void* first;
    int64_t lines, along, stride;
    int down, across;
};

CUtensorMap tensor_map(const Boxes& its, CUtensorMapDataType type, CUtensorMapSwizzle swizzle) {
    const cuuint64_t sizes[] = {cuuint64_t(its.along), cuuint64_t(its.lines)}, strides[] = {cuuint64_t(its.stride)};
    const cuuint32_t boxes[] = {cuuint32_t(its.across), cuuint32_t(its.down)}, steps[] = {1, 1};
    CUtensorMap map;
    const CUresult status = encode()(&map, type, 2, const_cast<void*>(its.first), sizes, strides, boxes, steps,
                                     CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    DLP_CHECK_EQ(int(status), int(CUDA_SUCCESS));
    return map;
}

CUtensorMap map_codes(const uint8_t* codes, int64_t lines, int64_t along, int64_t stride, int down) {
    return tensor_map({codes, lines, along, stride, down, kTileK}, CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B);
}

// How many clusters run at once.
template <auto kKernel>
int resident_clusters(cudaLaunchConfig_t config) {
    static std::array<int, kMaxDevices> resident{};
    int device;
    DLP_CHECK_CUDA(cudaGetDevice(&device));
    DLP_CHECK_LT(device, kMaxDevices);
    if (resident[device] == 0) {
        DLP_CHECK_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(config.dynamicSmemBytes)));
        config.gridDim = dim3(kCluster);
        DLP_CHECK_CUDA(cudaOccupancyMaxActiveClusters(&resident[device], kKernel, &config));
        DLP_CHECK_LT(0, resident[device]);
    }
    return resident[device];
}

int over(int64_t size, int unit) { return int((size + unit - 1) / unit); }

Problem problem_of(const BlockGemmJob& job) {
    return {job, over(job.contraction, kTileK), over(job.rows, kCluster * kTileM), over(job.cols, kTileN)};
}

// `spare`: multiprocessors that are left to others.
template <class A, class Out, class P>
void run(const P& p, int spare, Stream stream) {
    const BlockGemmJob& job = p.job;
    const CUtensorMap a = map_codes(job.a, job.rows, job.contraction, job.a_stride, kTileM);
    const CUtensorMap b = map_codes(job.b, job.cols, job.contraction, job.b_stride, kHalf);
    constexpr auto kKernel = &gemm_kernel<A, Out, P>;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.attrs = &cluster, config.numAttrs = 1;
    config.blockDim = dim3(kThreads), config.dynamicSmemBytes = Shared<P>::kBytes, config.stream = reinterpret_cast<cudaStream_t>(stream);
    const int clusters = resident_clusters<kKernel>(config) - over(spare, kCluster);
    DLP_CHECK_LT(0, clusters);
    config.gridDim = dim3(kCluster * std::min(p.pairs_down * p.pairs_across, clusters));
    DLP_CHECK_CUDA(cudaLaunchKernelEx(&config, kKernel, a, b, p));
}

}  // namespace

void gemm_fp8_blocks(const BlockGemmJob& job, Code a_code, Input out, Stream stream) {
    DLP_CHECK_EQ(job.cols % 8, 0);
    with_types(out, a_code, [&](auto element, auto code) {
        run<decltype(code), decltype(element)>(problem_of(job), 0, stream);
    });
}

// A CUDA graph does not promise that what brings the rows runs beside it: there it begins when all are here.
void gemm_fp8_arriving(const BlockGemmJob& job, const ArrivingRows& from, const Waiting& waiting, Code a_code, Input out,
                       Stream stream) {
    DLP_CHECK_EQ(job.cols % 8, 0);
    DLP_CHECK_EQ(from.rows % (kCluster * kTileM), 0);
    DLP_CHECK_EQ(from.rows * waiting.world, job.rows);
    DLP_CHECK_LE(waiting.world, kSlotRanks);
    cudaStreamCaptureStatus capturing;
    DLP_CHECK_CUDA(cudaStreamIsCapturing(reinterpret_cast<cudaStream_t>(stream), &capturing));
    if (capturing != cudaStreamCaptureStatusNone) await_mark(from.all_here, stream);
    const Problem problem = problem_of(job);
    const int64_t stride = job.a_scale_stride * int64_t(sizeof(float));
    const ArrivingProblem p{problem, from, waiting, int(from.rows / (kCluster * kTileM)),
                            tensor_map({job.a_scale, job.rows, problem.blocks, stride, kTileM, Shared<ArrivingProblem>::kOfRow},
                                       CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_NONE)};
    with_types(out, a_code, [&](auto element, auto code) {
        run<decltype(code), decltype(element)>(p, int(from.spare), stream);
    });
}

// What it stores is bf16. Where it adds to D, fp32 without gaps, D stays as it is.
void gemm_fp8_sending(const BlockGemmJob& job, const SlotBases& slots, const SentRows& to, Code a_code, Stream stream) {
    DLP_CHECK_EQ(job.cols % 8, 0);
    DLP_CHECK_EQ(to.rows % (kCluster * kTileM), 0);
    DLP_CHECK_EQ(to.rows * slots.world, job.rows);
    DLP_CHECK_EQ(to.offset % 16, 0);
    DLP_CHECK_EQ(job.d_stride, job.cols);
    SendingProblem p{problem_of(job), {}, int(slots.rank), int(slots.world), int(to.rows / (kCluster * kTileM))};
    for (int rank = 0; rank < p.world; ++rank)
        p.lines[rank] = reinterpret_cast<__nv_bfloat16*>(slots.base[rank] + to.offset) - rank * to.rows * job.cols;
    with_code(a_code, [&](auto code) { run<decltype(code), __nv_bfloat16>(p, 0, stream); });
}

}  // namespace dlp
