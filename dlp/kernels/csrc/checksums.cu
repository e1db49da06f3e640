// Checksums of the bits of tensors (reference.checksums): sum_i (2 i + 1) w_i modulo 2^64 over the words of 8 bytes of a
// tensor; the last word is filled up with zero bytes. Additions of integers commute, so the order of blocks does not matter.
//
// Grid: one block per piece of kPiece words of a tensor, for up to kChecksums tensors, whose addresses are arguments of the
// launch. Each warp adds one number to the checksum of the tensor. Bound by memory.
#include "octet.cuh"

namespace dlp {
namespace {

constexpr int kThreads = 256, kInFlight = 8;  // words that a thread loads at once
constexpr int64_t kPiece = 4 * kThreads * kInFlight;

struct Tensors {
    const uint8_t* data[kChecksums];
    int64_t bytes[kChecksums];
    int64_t first[kChecksums];  // number of pieces of previous tensors
    uint64_t* out;              // [count]
    int count;                  // number of tensors
};

__device__ uint64_t load_word(const uint8_t* data, int64_t bytes, int64_t i, bool aligned) {
    const int64_t valid = bytes - 8 * i;
    if (aligned && valid >= 8) return __ldcs(reinterpret_cast<const unsigned long long*>(data) + i);
    uint64_t word = 0;
    for (int k = 0; k < min(valid, int64_t(8)); ++k) word |= uint64_t(data[8 * i + k]) << 8 * k;
    return word;
}

__global__ void __launch_bounds__(kThreads) checksums_kernel(const __grid_constant__ Tensors tensors) {
    int job = 0;  // index of the tensor of this piece: the last one that begins at or before it
    for (int half = kChecksums / 2; half > 0; half /= 2)
        if (job + half < tensors.count && tensors.first[job + half] <= blockIdx.x) job += half;
    const uint8_t* data = tensors.data[job];
    const int64_t bytes = tensors.bytes[job], begin = (blockIdx.x - tensors.first[job]) * kPiece + threadIdx.x;
    const bool aligned = reinterpret_cast<uintptr_t>(data) % 8 == 0;
    uint64_t sum = 0;
    for (int64_t at = begin; at < begin + kPiece; at += kThreads * kInFlight) {
        uint64_t word[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) word[k] = load_word(data, bytes, at + k * kThreads, aligned);
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) sum += (2 * uint64_t(at + k * kThreads) + 1) * word[k];
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
    if (threadIdx.x % 32 == 0) atomicAdd(reinterpret_cast<unsigned long long*>(tensors.out + job), (unsigned long long)(sum));
}

}  // namespace

void checksums(const ByteRange* ranges, int64_t count, uint64_t* out, Stream stream) {
    for (int64_t begin = 0; begin < count; begin += kChecksums) {
        Tensors tensors{};
        int64_t pieces = 0;
        tensors.out = out + begin;
        tensors.count = int(std::min(count - begin, int64_t(kChecksums)));
        for (int i = 0; i < tensors.count; ++i) {
            const auto [data, bytes] = ranges[begin + i];
            tensors.data[i] = reinterpret_cast<const uint8_t*>(data), tensors.bytes[i] = bytes;
            tensors.first[i] = pieces;
            pieces += (bytes + 8 * kPiece - 1) / (8 * kPiece);
        }
        if (pieces) launch<checksums_kernel>(pieces, kThreads, 0, stream, tensors);
    }
}

}  // namespace dlp
