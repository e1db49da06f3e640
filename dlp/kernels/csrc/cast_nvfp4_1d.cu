// NVFP4 with a scale every 16 elements of the contraction, both orientations in one read: rows as they are, columns
// after the Hadamard transform where `rht` says so, rounded to nearest or by chance.
//
// Two threads share the blocks that span their patches by halves (nibbles.cuh), so that a block's maximum, its scale, its
// transform and its random bytes stay within one thread. The multipliers that go with the 127 scales of E4M3 are made once
// a tensor: a division a block of 16 would be a tenth of all instructions.
#include "fp4.cuh"
#include "nibbles.cuh"
#include "scale_bytes.cuh"

namespace dlp {
namespace {

constexpr int kBlocks = 2;     // a multiprocessor
constexpr int kTilesEach = 4;  // of a block
using Scales = ScaleBytes<kTile / kSixteen>;

// What one orientation is multiplied by, in shared memory.
struct Scaling {
    static constexpr int kScales = 128;
    TensorScale tensor;
    float multiplier[kScales];  // by scale

    // Filled by kScales threads.
    __device__ void fill(const float* amax) {
        const TensorScale given(amax ? *amax : 0.0f);
        const int scale = threadIdx.x % kScales;
        if (scale == 0) tensor = given;
        multiplier[scale] = given.multiplier(uint8_t(scale));
    }
};
static_assert(2 * Scaling::kScales == kTileThreads, "both orientations are filled at once");

template <class T, Producer kProducer>
constexpr size_t kShared =
    Tiles<T, Nvfp4Job, kProducer>::kBytes + NibbleWriter::kBytes + Scales::kBytes + 2 * sizeof(Scaling);

struct Block {
    uint2 codes;
    uint8_t scale;
};

// Where the random bytes of one orientation come from.
struct Random {
    Draw draw;
    RoundKeys keys;

    explicit Random(const Draw& draw) : draw(draw), keys(draw.seed, draw.tensor) {}

    // Of the block at (line, block) of this matrix.
    __device__ uint4 bytes(int64_t line, int64_t block) const {
        const int64_t index = (draw.row + line) * draw.across + draw.first + block;
        return philox(make_uint4(uint32_t(index), uint32_t(index >> 32), draw.direction, uint32_t(*draw.counter)), keys);
    }
};

template <class Larger>
__device__ float amax_of(const float (&low)[8], const float (&high)[8], Larger larger) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = larger(amax, larger(fabsf(low[i]), fabsf(high[i])));
    return amax;
}

// A maximum that keeps NaN tells, for nothing, whether there is one; then the block takes the long way.
template <bool kByChance>
__device__ Block encode_block(const float (&low)[8], const float (&high)[8], const Scaling& scaling, uint4 random) {
    float amax = amax_of(low, high, [](float a, float b) { return max_keeping_nan(a, b); });
    const bool has_nan = isnan(amax);
    if (has_nan) amax = amax_of(low, high, [](float a, float b) { return fmaxf(a, b); });
    const uint8_t scale = scaling.tensor.scale(amax);
    const float multiplier = scaling.multiplier[scale];
    uint2 codes;
    if constexpr (kByChance)
        codes = make_uint2(encode_by_chance(low, multiplier, random.x, random.y),
                           encode_by_chance(high, multiplier, random.z, random.w));
    else
        codes = make_uint2(encode_nearest(low, multiplier), encode_nearest(high, multiplier));
    if (has_nan) codes = make_uint2(mend_nan(low, codes.x), mend_nan(high, codes.y));
    return {codes, scale};
}

template <bool kByChance, class T>
__device__ void cast_rows(Octet<T> (&patch)[kPatch], const Tile<T, Nvfp4Job>& tile, const Scaling& scaling,
                          const Random& random, Scales& scales) {
    exchange_rows(patch);
    const NibbleRowWriter writer(tile.job->codes, tile);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        float low[8], high[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) low[k] = patch[i][k], high[k] = patch[i + kHalf][k];
        uint4 bytes{};
        if (kByChance)
            bytes = random.bytes(tile.row() + Sixteens::row() + i, tile.col() / kSixteen + Sixteens::row_block());
        const Block block = encode_block<kByChance>(low, high, scaling, bytes);
        writer.put(i, block.codes);
        scales.put_row(Sixteens::row() + i, Sixteens::row_block(), block.scale);
    }
}

template <bool kRht, bool kByChance, class T, class U>
__device__ void cast_columns(Octet<U> (&patch)[kPatch], const Tile<T, Nvfp4Job>& tile, const Scaling& scaling,
                             const Random& random, NibbleWriter& columns, Scales& scales) {
    exchange_columns(patch);
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
        float v[kSixteen], low[8], high[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) v[k] = patch[k][j], v[k + 8] = patch[k][j + kHalf];
        if (kRht) hadamard16(v);
#pragma unroll
        for (int k = 0; k < 8; ++k) low[k] = v[k], high[k] = v[k + 8];
        uint4 bytes{};
        if (kByChance)
            bytes = random.bytes(tile.col() + Sixteens::column() + j, tile.row() / kSixteen + Sixteens::column_block());
        const Block block = encode_block<kByChance>(low, high, scaling, bytes);
        columns.put(Sixteens::column() + j, Sixteens::column_block(), block.codes);
        scales.put_column(Sixteens::column() + j, Sixteens::column_block(), block.scale);
    }
}

template <class T, Producer kProducer, bool kRht, bool kByChance>
__global__ void __launch_bounds__(kTileThreads, kBlocks)
    cast_nvfp4_1d_kernel(const __grid_constant__ Work<Nvfp4Job> work, const __grid_constant__ Source source,
                         const __grid_constant__ Random random, const __grid_constant__ Random random_t) {
    using Input = Tiles<T, Nvfp4Job, kProducer>;
    Input tiles(work, shared_memory(), source);
    NibbleWriter columns(shared_memory() + Input::kBytes);
    Scales scales(shared_memory() + Input::kBytes + NibbleWriter::kBytes);
    Scaling* scaling = reinterpret_cast<Scaling*>(shared_memory() + kShared<T, kProducer>) - 2;  // rows, columns
    const Nvfp4Job* scaled = nullptr;                                                            // whose scaling it is

    Tile<T, Nvfp4Job> tile;
    Octet<T> patch[kPatch];
    while (tiles.next(tile, patch)) {
        const Nvfp4Job& job = *tile.job;
        if (scaled != &job) {
            scaled = &job;
            if (threadIdx.x < Scaling::kScales)
                scaling[0].fill(job.amax);
            else
                scaling[1].fill(job.amax_t);
            __syncthreads();
        }
        if (tile.down == 0 && tile.across == 0 && threadIdx.x == 0) {
            if (job.amax_out) *job.amax_out = *job.amax;
            if (job.amax_t_out) *job.amax_t_out = *job.amax_t;
        }
        if (job.codes_t) {
            using U = std::conditional_t<kRht, __nv_bfloat16, T>;
            Octet<U> turned[kPatch];
#pragma unroll
            for (int i = 0; i < kPatch; ++i)
                if constexpr (kRht) turned[i] = to_bf16(patch[i]);
                else turned[i] = patch[i];
            cast_columns<kRht, kByChance>(turned, tile, scaling[1], random_t, columns, scales);
        }
        if (job.codes) cast_rows<kByChance>(patch, tile, scaling[0], random, scales);
        __syncthreads();
        if (job.codes_t) columns.write(job.codes_t, tile);
        scales.write(job.scale, job.scale_t, tile);
        __syncthreads();
    }
}

template <class T, Producer kProducer, bool kRht, bool kByChance>
void run(const Work<Nvfp4Job>& work, const Source& source, const Draw& draw, const Draw& draw_t, Stream stream) {
    constexpr auto kernel = cast_nvfp4_1d_kernel<T, kProducer, kRht, kByChance>;
    constexpr size_t shared = kShared<T, kProducer>;
    const Random random(draw), random_t(draw_t);
    launch_few<kernel>(work.items, kTilesEach, kTileThreads, shared, stream, work, source, random, random_t);
}

}  // namespace

// A counter in either draw rounds by chance, null in both to nearest.
void cast_nvfp4_1d(const Work<Nvfp4Job>& work, Input input, bool rht, const Draw& draw, const Draw& draw_t,
                   const Source& source, Stream stream) {
    if (work.items == 0) return;
    with_source<Producer::kColumnSums>(input, source, [&](auto element, auto producer) {
        using T = decltype(element);
        const bool by_chance = draw.counter || draw_t.counter;
        if (rht && by_chance) return run<T, producer, true, true>(work, source, draw, draw_t, stream);
        if (rht) return run<T, producer, true, false>(work, source, draw, draw_t, stream);
        if (by_chance) return run<T, producer, false, true>(work, source, draw, draw_t, stream);
        run<T, producer, false, false>(work, source, draw, draw_t, stream);
    });
}

}  // namespace dlp
