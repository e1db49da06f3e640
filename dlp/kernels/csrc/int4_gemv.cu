// Few tokens times int4 weights with one scale per group: y[m, n] = sum over k of x[m, k] * (code[n, k] - zero[n, group]) *
// scale_inv[n, group], for at most 8 rows of x in bf16. Equal to reference.gemm.gemm_int4_group within a bound: products are
// exact, tensor cores sum the 32 products of a chunk, and all other sums are fp32 in a fixed order.
//
// A chunk is 32 codes of a row (16 bytes), which one lane loads. A span is four chunks. A tensor core multiplies 16 rows of the
// weight by 8 columns. Column 4 i + j contains chunk j of token i, and zeros for the other chunks, so that the sum of each
// chunk of two tokens is separate, and is multiplied by the scale of the group of the chunk. More than two tokens are
// multiplied in further products with the same decoded codes (kPasses).
//
//   lane 4 g + t    codes of rows g and g + 8, chunk t; x of column g if this column contains chunk t; sums of columns 2 t and
//                   2 t + 1
//
// Grid: a block of eight warps computes 16 rows; warp w takes spans w, w + 8, ... and keeps kDepth spans in flight. The sums of
// the warps are added in the order of the warps. Bound by memory: half a byte per code.
#include "octet.cuh"

namespace dlp {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 16, kTokens = 8;
constexpr int kChunk = 32, kChunks = 4, kDepth = 4;  // codes of a chunk, chunks of a span, spans in flight

// D += A [16, 16] B [16, 8], bf16 products summed in fp32.
__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t plus(uint32_t pair, uint32_t other) {  // adds bf16 pairs; exact, as all values are small integers
    const uint32_t one = 0x3F803F80u;
    const auto of = [](const uint32_t& word) -> const __nv_bfloat162& { return reinterpret_cast<const __nv_bfloat162&>(word); };
    const __nv_bfloat162 sum = __hfma2(of(pair), of(one), of(other));
    return reinterpret_cast<const uint32_t&>(sum);
}

// Codes i and i + 4 of a word of eight codes, as bf16. A stored code is code + 8. As the low bits of the bf16 number 128 it
// gives 128 + 8 + code, from which 136 is subtracted.
__device__ inline uint32_t decoded(uint32_t word, int i) {
    uint32_t pair;  // (shifted & mask) | exponent in one instruction; nvcc 13.0 would generate two from C++
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(pair) : "r"(word >> 4 * i), "r"(0x000F000Fu), "r"(0x43004300u));
    return plus(pair, 0xC308C308u);
}

// Positions of the loads of a lane. For chunks after the last chunk, the codes of the last chunk are read, and x is 0.
struct Lane {
    uint32_t codes[2], groups[2];  // beginning of the lane's two rows: in vectors of 16 bytes of codes, and in scales
    uint32_t last;                 // index of the last chunk of a row
    uint32_t log2;                 // chunks_log2 of the job
    uint32_t chunk, pair;          // within a span: chunk of the lane's codes, and first of the chunks of the lane's two sums
    uint32_t x;                    // row of x of the lane's column in the first pass, in vectors of 16 bytes
    int tokens;                    // number of tokens from this row on; 0 if the column does not contain the lane's chunk
};

// The part of a span that a lane loads: codes of two rows, the scales of the lane's sums, and the negated zero points of the
// codes as pairs of bf16.
template <bool kZeros>
struct Span {
    uint4 codes[2];
    float scale[2][2];
    uint32_t minus[2];

    __device__ void load(const Int4Job& job, const Lane& lane, uint32_t span) {
        const uint32_t chunk = min(span * kChunks + lane.chunk, lane.last), first = min(span * kChunks + lane.pair, lane.last);
        const uint32_t group = first >> lane.log2, other = min(first + 1, lane.last) >> lane.log2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            codes[i] = __ldcs(reinterpret_cast<const uint4*>(job.codes) + (lane.codes[i] + chunk));
            scale[i][0] = job.scale_inv[lane.groups[i] + group];
            scale[i][1] = job.scale_inv[lane.groups[i] + other];
            if constexpr (kZeros) {
                const float zero = float(job.zero[lane.groups[i] + (chunk >> lane.log2)]);
                minus[i] = __byte_perm(__float_as_uint(-zero), 0, 0x3232);
            }
        }
    }
};

// Adds the products of a span to the sums of two rows. Word i of a chunk has codes 8 i to 8 i + 7. The loads of x for kAhead
// words are issued together, for all passes.
template <int kPasses, bool kZeros>
__device__ __forceinline__ void take(const Int4Job& job, const Span<kZeros>& loaded, uint32_t span, const Lane& lane, float (&sum)[kPasses][2]) {
    const uint32_t chunk = span * kChunks + lane.chunk;
    const uint32_t words[2][4] = {{loaded.codes[0].x, loaded.codes[0].y, loaded.codes[0].z, loaded.codes[0].w},
                                  {loaded.codes[1].x, loaded.codes[1].y, loaded.codes[1].z, loaded.codes[1].w}};
    constexpr int kAhead = 4 / kPasses;
    const auto* x = static_cast<const uint4*>(job.x) + (lane.x + chunk * (kChunk / 8));
    uint4 ahead[kAhead][kPasses];
    float d[kPasses][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i % kAhead == 0) {
#pragma unroll
            for (int pass = 0; pass < kPasses; ++pass) {
                const bool reads = lane.tokens > 2 * pass & chunk <= lane.last;
#pragma unroll
                for (int j = 0; j < kAhead; ++j) ahead[j][pass] = uint4{};
                if (!reads) continue;
#pragma unroll
                for (int j = 0; j < kAhead; ++j) ahead[j][pass] = x[pass * 2 * (lane.last + 1) * (kChunk / 8) + i + j];
            }
        }
        uint32_t a[2][4];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int row = j % 2, pair = j / 2;
            uint32_t& two = a[pair / 2][row + pair % 2 * 2];
            two = decoded(words[row][i], pair);
            if constexpr (kZeros) two = plus(two, loaded.minus[row]);
        }
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const uint4& b = ahead[i % kAhead][pass];
            multiply(d[pass], a[0], __byte_perm(b.x, b.z, 0x5410), __byte_perm(b.x, b.z, 0x7632));
            multiply(d[pass], a[1], __byte_perm(b.y, b.w, 0x5410), __byte_perm(b.y, b.w, 0x7632));
        }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[pass][j / 2] = __fmaf_rn(d[pass][j], loaded.scale[j / 2][j % 2], sum[pass][j / 2]);
}

template <int kPasses, bool kZeros>
__global__ void __launch_bounds__(kThreads, 2) int4_gemv_kernel(const __grid_constant__ Int4Job job) {
    __shared__ float sums[kWarps][2 * kPasses][kRows];
    const uint32_t at = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = uint32_t(job.cols) / kChunk;
    const uint32_t first = blockIdx.x * kRows, spans = (chunks + kChunks - 1) / kChunks;
    const uint32_t column = at / 4, token = column / kChunks;
    Lane lane{{}, {}, chunks - 1, uint32_t(job.chunks_log2), at % kChunks, at % 2 * 2, token * chunks * (kChunk / 8),
              column % kChunks == at % kChunks ? int(job.tokens) - int(token) : 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t row = min(first + column + 8 * i, uint32_t(job.rows) - 1);
        lane.codes[i] = row * chunks, lane.groups[i] = row * ((lane.last >> lane.log2) + 1);
    }
    wait_for_previous();
    let_next_begin();
    Span<kZeros> loaded[kDepth];
    float sum[kPasses][2] = {};
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
        if (warp + i * kWarps < spans) loaded[i].load(job, lane, warp + i * kWarps);
    for (uint32_t from = warp; from < spans; from += kDepth * kWarps) {
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
            const uint32_t span = from + i * kWarps, next = span + kDepth * kWarps;
            if (span < spans) take<kPasses>(job, loaded[i], span, lane, sum);
            if (next < spans) loaded[i].load(job, lane, next);
        }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float both = __fadd_rn(sum[pass][i], __shfl_xor_sync(kAllLanes, sum[pass][i], 1));
            if (at % 2 == 0) sums[warp][2 * pass + at % 4 / 2][column + 8 * i] = both;
        }
    __syncthreads();
    const int64_t out = int64_t(first) + threadIdx.x % kRows;
    const int written = threadIdx.x / kRows;
    if (written >= job.tokens || out >= job.rows) return;
    float total = sums[0][written][threadIdx.x % kRows];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) total = __fadd_rn(total, sums[i][written][threadIdx.x % kRows]);
    if (job.wide) static_cast<float*>(job.out)[written * job.rows + out] = total;
    else static_cast<__nv_bfloat16*>(job.out)[written * job.rows + out] = __float2bfloat16_rn(total);
}

template <int kPasses>
void run(const Int4Job& job, Stream stream) {
    const int64_t blocks = (job.rows + kRows - 1) / kRows;
    if (job.zero) launch<int4_gemv_kernel<kPasses, true>, true>(blocks, kThreads, 0, stream, job);
    else launch<int4_gemv_kernel<kPasses, false>, true>(blocks, kThreads, 0, stream, job);
}

}  // namespace

// The addresses of x and codes are multiples of 16; cols is a multiple of 32, and at least 32.
void int4_gemv(const Int4Job& job, Stream stream) {
    DLP_CHECK_EQ((reinterpret_cast<uintptr_t>(job.x) | reinterpret_cast<uintptr_t>(job.codes)) % 16, 0u);
    DLP_CHECK_EQ(job.cols % kChunk, 0);
    DLP_CHECK_LE(job.cols, INT32_MAX);
    DLP_CHECK_LE(job.rows * job.cols / kChunk, INT32_MAX);
    DLP_CHECK_LE(job.tokens, kTokens);
    if (job.rows * job.cols * job.tokens == 0) return;
    if (job.tokens <= 2) return run<1>(job, stream);
    if (job.tokens <= 4) return run<2>(job, stream);
    run<4>(job, stream);
}

}  // namespace dlp
