// NVFP4 (fp4.cuh) with one E4M3 scale per 16 elements of the contraction, both orientations in one read:
//
//   x [rows, cols] -> codes [rows, cols / 2], scales [rows, cols / 16]
//              x.T -> codes_t [cols, rows / 2], scales_t [cols, rows / 16]
//
// Rows are quantized as they are; columns after the random Hadamard transform of 16 rows if `rht`. Rounding is to
// nearest, or stochastic with one call of Philox per block of 16. Bitwise equal to reference.nvfp4.cast_nvfp4 with a
// block of (1, 16). cols must be a multiple of 16 if `codes` is requested, rows if `codes_t` is requested. With four over six a
// block is encoded with the scale for 6 and with the scale for 4, and the codes with the smaller error are stored.
//
// Bound by instructions, and by the number of resident warps that issue them; memory traffic is 3.1 bytes per element of bf16.
// A thread therefore reads one or two complete blocks of 16 at a time from a strip in shared memory (strip.cuh), and computes
// maximum, scale, transform and random bytes of a block without other threads. A thread block processes four tiles, and
// computes the multipliers of the 128 possible scales once, which avoids a division per block of 16.
//
// Shared memory, bytes of bf16 (fp32):
//   strips             34,816 (67,584)     one tile: the strips of eight warps
//   Columns             8,192              transposed codes, 64 bytes per column
//   Scales              2,048              eight scales of each row and column
//   2 Scaling           1,072              table of multipliers, for rows and for columns
//   sums                4,096              only with Producer::kColumnSums
#include "fp4.cuh"
#include "scale_bytes.cuh"
#include "strip.cuh"

namespace dlp {
namespace {

constexpr int kTilesPerBlock = 4;
enum class Rounding { kNearest, kStochastic, kFourOverSix };  // kFourOverSix: to nearest, with the better of two scales
using Columns = PieceWriter<kTile / kFp4Block, 2>;
using Scales = ScaleBytes<kTile / kFp4Block>;
template <class T>
using CastStrips = Strips<T, Nvfp4Job, kTilesPerBlock>;

// Resident blocks per SM for __launch_bounds__: shared memory limits fp32 to two blocks. With random bytes or a second set of
// codes, registers limit bf16 to three.
template <class T, Rounding kRounding>
constexpr int kBlocksPerSm = sizeof(T) == 4 ? 2 : kRounding == Rounding::kNearest ? 4 : 3;

// Factors of one orientation, in shared memory.
struct Scaling {
    static constexpr int kScales = 128;
    TensorScale tensor;
    float* flag;
    float multiplier[kScales];  // indexed by the E4M3 scale, whose sign bit is 0

    // kScales threads call this function, and each fills one entry.
    template <Rounding kRounding>
    __device__ void fill(const float* amax, float* its_flag) {
        const TensorScale given(amax ? stored_amax<kRounding == Rounding::kFourOverSix>(*amax) : 0.0f);
        const int scale = threadIdx.x % kScales;
        if (scale == 0) tensor = given, flag = its_flag;
        multiplier[scale] = given.multiplier(uint8_t(scale));
    }
};
static_assert(2 * Scaling::kScales == kTileThreads, "both orientations are filled at once");

// Bytes of the column sums of all strips of a tile.
constexpr size_t kSums = kTileWarps * kTile * sizeof(float);

template <class T, Producer kProducer>
constexpr size_t kShared = CastStrips<T>::kBytes + Columns::kBytes + Scales::kBytes + 2 * sizeof(Scaling) +
                           (kProducer == Producer::kColumnSums ? kSums : 0);

struct Block {
    uint2 codes;
    uint8_t scale;
};

// The random bytes of one orientation.
struct Random {
    PhiloxState state;
    RoundKeys keys;

    explicit Random(const PhiloxState& state) : state(state), keys(state.seed, state.tensor) {}

    // Random bytes of block `block` of line `line` of this matrix. The counter is the index of the block in the unsharded
    // matrix, so that shards draw the same bytes as the unsharded matrix.
    __device__ uint4 bytes(int64_t line, int64_t block) const {
        const int64_t index = (state.row + line) * state.across + state.first + block;
        return philox(make_uint4(uint32_t(index), uint32_t(index >> 32), state.orientation, uint32_t(*state.counter)), keys);
    }
};

// Encodes a block of 16 with the given scale, rounded to nearest. `error`: sum of the squared errors of the elements, in order.
template <class T>
__device__ Block encode_under(const Octet<T>& low, const Octet<T>& high, const Scaling& scaling, uint8_t scale, float& error) {
    const float multiplier = scaling.multiplier[scale], value = unpack<E4m3>(scale), encode = scaling.tensor.encode;
    const uint2 codes = make_uint2(encode_nearest(low, multiplier), encode_nearest(high, multiplier));
    error = add_errors(add_errors(0.0f, low, codes.x, value, encode), high, codes.y, value, encode);
    return {codes, scale};
}

// Computes scale and codes of a block of 16. The first maximum is NaN if an element is NaN, so that one comparison finds values
// that are not finite; only then the flag is set, and the maximum is computed again without NaN.
template <Rounding kRounding, class T>
__device__ Block encode_block(Octet<T>& low, Octet<T>& high, const Scaling& scaling, uint4 random) {
    float amax = amax_keeping_nan(low, high);
    if (!(amax <= FLT_MAX)) {
        if (scaling.flag) Finite<T>::set(scaling.flag);
        Maxima<T> maxima;
        maxima.take(low);
        maxima.take(high);
        amax = __uint_as_float(maxima.largest());
        nan_to_infinity(low);
        nan_to_infinity(high);
    }
    const uint8_t scale = scaling.tensor.scale(amax);
    if constexpr (kRounding == Rounding::kFourOverSix) {
        float error_six, error_four;
        const Block six = encode_under(low, high, scaling, scale, error_six);
        const Block four = encode_under(low, high, scaling, scaling.tensor.scale_of_four(amax), error_four);
        return error_four < error_six ? four : six;
    }
    const float multiplier = scaling.multiplier[scale];
    if constexpr (kRounding == Rounding::kStochastic)
        return {make_uint2(encode_stochastic(low, multiplier, random.x, random.y),
                           encode_stochastic(high, multiplier, random.z, random.w)), scale};
    else
        return {make_uint2(encode_nearest(low, multiplier), encode_nearest(high, multiplier)), scale};
}

template <Rounding kRounding, class T>
__device__ void cast_rows(const CastStrips<T>& strips, const Tile<T, Nvfp4Job>& tile, const Scaling& scaling,
                          const Random& random, Scales& scales) {
    const int64_t pitch = tile.cols() / 2;
    uint8_t* const codes = tile.job->codes + tile.row() * pitch + tile.col() / 2;
    const bool fast = tile.whole && reinterpret_cast<uintptr_t>(codes) % 8 == 0;
#pragma unroll 1
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Octet<T> low, high;
            strips.read_block(i, j, low, high);
            const int row = kFp4Block * strips.number() + strips.row(i), block = strips.block(j);
            uint4 bytes{};
            if (kRounding == Rounding::kStochastic) bytes = random.bytes(tile.row() + row, tile.col() / kFp4Block + block);
            const Block cast = encode_block<kRounding>(low, high, scaling, bytes);
            scales.put_row(row, block, cast.scale);
            uint8_t* const to = codes + row * pitch + 8 * block;
            if (fast)
                *reinterpret_cast<uint2*>(to) = cast.codes;
            else if (tile.row() + row < tile.rows() && tile.col() + kFp4Block * block < tile.cols())
                store_bytes(to, cast.codes, 8);
        }
}

template <bool kRht, Rounding kRounding, class T>
__device__ void cast_columns(const CastStrips<T>& strips, const Tile<T, Nvfp4Job>& tile, const Scaling& scaling,
                             const Random& random, Columns& columns, Scales& scales) {
#pragma unroll 1
    for (int j = 0; j < 2; ++j) {
        Pair<T> pair[kFp4Block];
        strips.read_columns(j, pair);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            std::conditional_t<kRht, Octet<__nv_bfloat16>, Octet<T>> low, high;
            if constexpr (kRht) {
                float v[kFp4Block];
#pragma unroll
                for (int k = 0; k < kFp4Block; ++k) v[k] = element(to_bf16(pair[k]), i);
                hadamard16(v, low, high);
            } else {
                low = column_of(pair, i), high = column_of(pair + 8, i);
            }
            const int column = strips.column(j) + i, block = strips.number();
            uint4 bytes{};
            if (kRounding == Rounding::kStochastic) bytes = random.bytes(tile.col() + column, tile.row() / kFp4Block + block);
            const Block cast = encode_block<kRounding>(low, high, scaling, bytes);
            columns.put(column, block, cast.codes);
            scales.put_column(column, block, cast.scale);
        }
    }
}

// The sum of each column of a strip, in the order of producer.cuh: the sum of the first eight rows in order, plus the
// sum of the other eight rows.
template <class T>
__device__ void sum_columns(const CastStrips<T>& strips, float (*sums)[kTile]) {
#pragma unroll 1
    for (int j = 0; j < 2; ++j) {
        Pair<T> pair[kFp4Block];
        strips.read_columns(j, pair);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float above = element(pair[0], i), below = element(pair[8], i);
#pragma unroll
            for (int k = 1; k < 8; ++k)
                above = __fadd_rn(above, element(pair[k], i)), below = __fadd_rn(below, element(pair[k + 8], i));
            sums[strips.number()][strips.column(j) + i] = __fadd_rn(above, below);
        }
    }
}

template <class T, Producer kProducer, bool kRht, Rounding kRounding>
__global__ void __launch_bounds__(kTileThreads, kBlocksPerSm<T, kRounding>)
    cast_nvfp4_1d_kernel(const __grid_constant__ Work<Nvfp4Job> work, const __grid_constant__ Source source,
                         const __grid_constant__ Random random, const __grid_constant__ Random random_t) {
    constexpr bool kSummed = kProducer == Producer::kColumnSums;
    uint8_t* bytes = shared_memory();
    CastStrips<T> strips(work, bytes);
    Columns columns(bytes += CastStrips<T>::kBytes);
    Scales scales(bytes += Columns::kBytes);
    Scaling* scaling = reinterpret_cast<Scaling*>(bytes += Scales::kBytes);  // [2]: for rows, for columns
    float(*sums)[kTile] = reinterpret_cast<float(*)[kTile]>(bytes += 2 * sizeof(Scaling));
    const Nvfp4Job* scaled = nullptr;  // job of the factors in `scaling`

    Tile<T, Nvfp4Job> tile;
    while (strips.next(tile)) {
        const Nvfp4Job& job = *tile.job;
        if (scaled != &job) {
            scaled = &job;
            if (threadIdx.x < Scaling::kScales)
                scaling[0].fill<kRounding>(job.amax, job.flag);
            else
                scaling[1].fill<kRounding>(job.amax_t, job.flag);
            __syncthreads();
        }
        if (tile.tile_row == 0 && tile.tile_col == 0 && threadIdx.x == 0) {
            constexpr bool kFour = kRounding == Rounding::kFourOverSix;
            if (job.amax_out) *job.amax_out = stored_amax<kFour>(*job.amax);
            if (job.amax_t_out) *job.amax_t_out = stored_amax<kFour>(*job.amax_t);
        }
        if (kSummed) sum_columns<T>(strips, sums);
        if (job.codes_t) cast_columns<kRht, kRounding, T>(strips, tile, scaling[1], random_t, columns, scales);
        if (job.codes) cast_rows<kRounding, T>(strips, tile, scaling[0], random, scales);
        strips.fetch();
        __syncthreads();
        if (kSummed) write_sums(source.sums, sums, tile);
        if (job.codes_t) columns.write(job.codes_t, tile);
        scales.write(job.scale, job.scale_t, tile);
        __syncthreads();
    }
}

template <class T, Producer kProducer, bool kRht, Rounding kRounding>
void run(const Work<Nvfp4Job>& work, const Source& source, const PhiloxState& philox, const PhiloxState& philox_t, Stream stream) {
    constexpr auto kernel = cast_nvfp4_1d_kernel<T, kProducer, kRht, kRounding>;
    constexpr size_t shared = kShared<T, kProducer>;
    const Random random(philox), random_t(philox_t);
    launch_few<kernel>(work.items, kTilesPerBlock, kTileThreads, shared, stream, work, source, random, random_t);
}

template <class T, Producer kProducer, Rounding kRounding>
void run_with(const Work<Nvfp4Job>& work, const Source& source, bool rht, const PhiloxState& philox, const PhiloxState& philox_t,
              Stream stream) {
    if (rht) return run<T, kProducer, true, kRounding>(work, source, philox, philox_t, stream);
    run<T, kProducer, false, kRounding>(work, source, philox, philox_t, stream);
}

}  // namespace

// Rounds stochastically if one of the two Philox states has a counter, else to nearest. `four_over_six` requires rounding to
// nearest.
void cast_nvfp4_1d(const Work<Nvfp4Job>& work, Input input, bool rht, bool four_over_six, const PhiloxState& philox,
                   const PhiloxState& philox_t, const Source& source, Stream stream) {
    if (work.items == 0) return;
    with_source<Producer::kColumnSums>(input, source, [&](auto element, auto producer) {
        using T = decltype(element);
        if (four_over_six) return run_with<T, producer, Rounding::kFourOverSix>(work, source, rht, philox, philox_t, stream);
        if (philox.counter || philox_t.counter)
            return run_with<T, producer, Rounding::kStochastic>(work, source, rht, philox, philox_t, stream);
        run_with<T, producer, Rounding::kNearest>(work, source, rht, philox, philox_t, stream);
    });
}

}  // namespace dlp
