// The Python module: pointers and sizes as integers, jobs as tuples of 64-bit words (see kernels.h). No torch header is
// included, so this builds in seconds and does not depend on the version of torch.
#include <cstring>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "kernels.h"

namespace dlp {
namespace {

template <class Job>
using Words = std::array<int64_t, sizeof(Job) / sizeof(int64_t)>;

// The arguments every kernel over jobs starts with: one job, or the address of a table and its length.
template <class Job>
Work<Job> make_work(const Words<Job>& one, uintptr_t many, int64_t count, int64_t items) {
    static_assert(sizeof(Job) % sizeof(int64_t) == 0 && std::is_trivially_copyable_v<Job>, "a job is a row of words");
    Work<Job> work{};
    std::memcpy(&work.one, one.data(), sizeof(Job));
    work.many = reinterpret_cast<const Job*>(many);
    work.count = count;
    work.items = items;
    return work;
}

template <class Job>
Job make_job(const Words<Job>& words) {
    return make_work<Job>(words, 0, 1, 0).one;
}

// (largest, epsilon, overflow, power_of_two)
using Rule = std::tuple<float, float, float, bool>;

ScaleRule make_rule(const Rule& rule) {
    return {std::get<0>(rule), std::get<1>(rule), std::get<2>(rule), std::get<3>(rule)};
}

Input input_of(bool wide) { return wide ? Input::kFp32 : Input::kBf16; }
Code code_of(bool e5m2) { return e5m2 ? Code::kE5m2 : Code::kE4m3; }

template <class Job, class Kernel>
auto block_cast(Kernel kernel) {
    return [kernel](const Words<Job>& one, uintptr_t many, int64_t count, int64_t items, bool wide, bool e5m2,
                    const Rule& rule, bool gemm_layout, Stream stream) {
        const Work<Job> work = make_work<Job>(one, many, count, items);
        kernel(work, input_of(wide), code_of(e5m2), make_rule(rule), gemm_layout, stream);
    };
}

}  // namespace
}  // namespace dlp

PYBIND11_MODULE(dlp_kernels, m) {
    using namespace dlp;
    m.attr("AMAX_CHUNK") = kAmaxChunk;
    m.attr("TILE") = kTile;

    m.def("amax", [](const Words<AmaxJob>& one, uintptr_t many, int64_t count, int64_t items, bool wide, uintptr_t out,
                     Stream stream) {
        amax(make_work<AmaxJob>(one, many, count, items), input_of(wide), out, count, stream);
    });
    m.def("cast_tensor", [](const Words<TensorJob>& one, bool wide, bool e5m2, const Rule& rule, Stream stream) {
        cast_tensor(make_job<TensorJob>(one), input_of(wide), code_of(e5m2), make_rule(rule), stream);
    });
    m.def("cast_transpose", [](const Words<TensorJob>& one, uintptr_t many, int64_t count, int64_t items, bool wide,
                               bool e5m2, const Rule& rule, bool observe, Stream stream) {
        const Work<TensorJob> work = make_work<TensorJob>(one, many, count, items);
        cast_transpose(work, input_of(wide), code_of(e5m2), make_rule(rule), observe, stream);
    });
    m.def("cast_block_1d", block_cast<BlockJob>(cast_block_1d));
    m.def("cast_block_2d", block_cast<BlockJob>(cast_block_2d));
}
