// Python module `dlp_kernels`: pointers and sizes are integers, jobs are tuples of 64-bit words (kernels.h). The module
// includes no torch header, compiles in seconds and does not depend on the version of torch.
//
// `bind` adds a function to the module. `bind_step` also registers the function, by name, as a step that programs can replay
// (steps.h, program.h). Functions of steps take jobs as `Words<Job>`, whose type lists the words that are addresses.
#include <cstring>
#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cublaslt.h"
#include "kernels.h"
#include "steps.h"

namespace dlp {
namespace {

// A launch blocks while the queue of the device is full, for example after a peer has died. Launches release the GIL, so that
// other threads can run, such as the thread that ends the process.
using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;

template <class Kernel>
void bind(pybind11::module_& m, const char* name, Kernel kernel) {
    m.def(name, kernel, Unlocked());
}

// Binds a function that programs can also replay as a step.
template <class Kernel>
void bind_step(pybind11::module_& m, const char* name, Kernel kernel) {
    bind(m, name, kernel);
    step_makers()[name] = step_maker(kernel, &Kernel::operator());
}

// A job of a function that is not a step, as Python passes it; functions of steps take Words<Job> (steps.h).
template <class Job>
using Row = std::array<int64_t, sizeof(Job) / sizeof(int64_t)>;

// Makes the Work of a launch from the first arguments of a kernel: one job, or the address `many` of a table of `count` jobs.
template <class Job>
Work<Job> make_work(const Row<Job>& one, uintptr_t many, int64_t count, int64_t items) {
    static_assert(sizeof(Job) % sizeof(int64_t) == 0 && std::is_trivially_copyable_v<Job>, "a job consists of 64-bit words");
    Work<Job> work{};
    std::memcpy(&work.one, one.data(), sizeof(Job));
    work.many = reinterpret_cast<const Job*>(many);
    work.count = count;
    work.items = items;
    return work;
}

template <class Job>
Job make_job(const Row<Job>& words) {
    return make_work<Job>(words, 0, 1, 0).one;
}

Source make_source(const Words<Source>& words) { return make_job<Source>(words); }

ScaleRule make_rule(const Rule& rule) {
    return {std::get<0>(rule), std::get<1>(rule), std::get<2>(rule), std::get<3>(rule)};
}

Input input_of(bool wide) { return wide ? Input::kFp32 : Input::kBf16; }
Code code_of(bool e5m2) { return e5m2 ? Code::kE5m2 : Code::kE4m3; }

void bind_blocks(pybind11::module_& m) {
    bind_step(m, "cast_block_1d", [](const Words<BlockJob>& one, uintptr_t many, int64_t count, int64_t items, bool wide, bool e5m2,
                              const Rule& rule, bool gemm_layout, const Words<Source>& source, Stream stream) {
        const Work<BlockJob> work = make_work<BlockJob>(one, many, count, items);
        cast_block_1d(work, input_of(wide), code_of(e5m2), make_rule(rule), gemm_layout, make_source(source), stream);
    });
    bind_step(m, "cast_block_2d", [](const Words<BlockJob>& one, uintptr_t many, int64_t count, int64_t items, bool wide, bool e5m2,
                              const Rule& rule, bool gemm_layout, Stream stream) {
        const Work<BlockJob> work = make_work<BlockJob>(one, many, count, items);
        cast_block_2d(work, input_of(wide), code_of(e5m2), make_rule(rule), gemm_layout, stream);
    });
    bind_step(m, "cast_mxfp8_1d", [](const Words<BlockJob>& one, uintptr_t many, int64_t count, int64_t items, bool wide, bool e5m2,
                              bool floor, bool blocks_first, const Words<Source>& source, Stream stream) {
        const Work<BlockJob> work = make_work<BlockJob>(one, many, count, items);
        cast_mxfp8_1d(work, input_of(wide), code_of(e5m2), floor, blocks_first, make_source(source), stream);
    });
    bind_step(m, "cast_mxfp8_2d", [](const Words<BlockJob>& one, uintptr_t many, int64_t count, int64_t items, bool wide, bool e5m2,
                              bool floor, Stream stream) {
        cast_mxfp8_2d(make_work<BlockJob>(one, many, count, items), input_of(wide), code_of(e5m2), floor, stream);
    });
}

PhiloxState make_philox(const PhiloxWords& words) {
    return {reinterpret_cast<const int64_t*>(words[0]), words[1], words[2], words[3],
            uint32_t(words[4]), uint32_t(words[5]), uint32_t(words[6])};
}

template <class Kernel>
auto transpose_codes(Kernel kernel) {
    return [kernel](const Words<CodesJob>& one, int64_t items, Stream stream) {
        kernel(make_work<CodesJob>(one, 0, 1, items), stream);
    };
}

void bind_lines(pybind11::module_& m) {
    bind_step(m, "amax_lines", [](const Words<LinesJob>& one, uintptr_t many, int64_t count, int64_t items, bool wide,
                           const Words<Source>& source, Stream stream) {
        amax_lines(make_work<LinesJob>(one, many, count, items), input_of(wide), make_source(source), stream);
    });
    bind_step(m, "cast_rowwise", [](const Words<RowwiseJob>& one, uintptr_t many, int64_t count, int64_t items, bool wide,
                             bool e5m2, const Rule& rule, const Words<Source>& source, Stream stream) {
        const Work<RowwiseJob> work = make_work<RowwiseJob>(one, many, count, items);
        cast_rowwise(work, input_of(wide), code_of(e5m2), make_rule(rule), make_source(source), stream);
    });
}

void bind_nvfp4(pybind11::module_& m) {
    bind_step(m, "amax_rht", [](const Words<RhtAmaxJob>& one, int64_t items, bool wide, Stream stream) {
        amax_rht(make_work<RhtAmaxJob>(one, 0, 1, items), input_of(wide), stream);
    });
    bind_step(m, "cast_nvfp4_1d", [](const Words<Nvfp4Job>& one, uintptr_t many, int64_t count, int64_t items, bool wide, bool rht,
                              bool four_over_six, const PhiloxWords& philox, const PhiloxWords& philox_t,
                              const Words<Source>& source, Stream stream) {
        const Work<Nvfp4Job> work = make_work<Nvfp4Job>(one, many, count, items);
        const PhiloxState rows = make_philox(philox), columns = make_philox(philox_t);
        cast_nvfp4_1d(work, input_of(wide), rht, four_over_six, rows, columns, make_source(source), stream);
    });
    bind_step(m, "cast_nvfp4_2d", [](const Words<Nvfp4Job>& one, uintptr_t many, int64_t count, int64_t items, bool wide,
                              bool four_over_six, Stream stream) {
        cast_nvfp4_2d(make_work<Nvfp4Job>(one, many, count, items), input_of(wide), four_over_six, stream);
    });
}

void bind_producers(pybind11::module_& m) {
    bind_step(m, "rms_norm", [](const Words<NormJob>& job, float eps, bool wide, Stream stream) {
        rms_norm(make_job<NormJob>(job), eps, input_of(wide), stream);
    });
    bind_step(m, "rms_norm_backward", [](const Words<NormGradJob>& job, bool wide, Stream stream) {
        rms_norm_backward(make_job<NormGradJob>(job), input_of(wide), stream);
    });
    bind_step(m, "layer_norm", [](const Words<LayerNormJob>& job, float eps, bool wide, Stream stream) {
        layer_norm(make_job<LayerNormJob>(job), eps, input_of(wide), stream);
    });
    bind_step(m, "layer_norm_backward", [](const Words<LayerNormGradJob>& job, bool wide, Stream stream) {
        layer_norm_backward(make_job<LayerNormGradJob>(job), input_of(wide), stream);
    });
    bind_step(m, "swiglu", [](const Words<SwigluJob>& job, bool wide, Stream stream) {
        swiglu(make_job<SwigluJob>(job), input_of(wide), stream);
    });
    bind_step(m, "swiglu_backward", [](const Words<SwigluGradJob>& job, bool wide, Stream stream) {
        swiglu_backward(make_job<SwigluGradJob>(job), input_of(wide), stream);
    });
    bind_step(m, "cast_gate_grads_tensor", [](const Words<SwigluGradJob>& from, const Words<TensorJob>& of_gate,
                                              const Words<TensorJob>& of_up, bool e5m2, const Rule& rule, bool observe,
                                              Stream stream) {
        const GateGradsJob<TensorJob> job{make_job<SwigluGradJob>(from), make_job<TensorJob>(of_gate), make_job<TensorJob>(of_up)};
        cast_gate_grads(job, code_of(e5m2), make_rule(rule), observe, stream);
    });
    bind_step(m, "cast_gate_grads_block", [](const Words<SwigluGradJob>& from, const Words<BlockJob>& of_gate,
                                             const Words<BlockJob>& of_up, bool e5m2, const Rule& rule, bool gemm_layout,
                                             Stream stream) {
        const GateGradsJob<BlockJob> job{make_job<SwigluGradJob>(from), make_job<BlockJob>(of_gate), make_job<BlockJob>(of_up)};
        cast_gate_grads(job, code_of(e5m2), make_rule(rule), gemm_layout, stream);
    });
    bind_step(m, "activation", [](const Words<ActivationJob>& job, int64_t act, bool wide, Stream stream) {
        activation(make_job<ActivationJob>(job), static_cast<Act>(act), input_of(wide), stream);
    });
    bind_step(m, "gate", [](const Words<SwigluJob>& job, int64_t act, bool wide, Stream stream) {
        gate(make_job<SwigluJob>(job), static_cast<Act>(act), input_of(wide), stream);
    });
    bind_step(m, "gate_backward", [](const Words<SwigluGradJob>& job, int64_t act, bool wide, Stream stream) {
        gate_backward(make_job<SwigluGradJob>(job), static_cast<Act>(act), input_of(wide), stream);
    });
    bind_step(m, "tile_sums", [](const Words<MatrixJob>& one, int64_t items, uintptr_t sums, bool wide, Stream stream) {
        tile_sums(make_work<MatrixJob>(one, 0, 1, items), reinterpret_cast<float*>(sums), input_of(wide), stream);
    });
    bind_step(m, "sum_parts", [](uintptr_t parts, int64_t count, int64_t cols, uintptr_t out, Stream stream) {
        sum_parts(reinterpret_cast<const float*>(parts), count, cols, reinterpret_cast<float*>(out), stream);
    });
}

void bind_loss(pybind11::module_& m) {
    bind(m, "log_sum_exp", [](const Row<LossJob>& job, bool wide, Stream stream) {
        log_sum_exp(make_job<LossJob>(job), input_of(wide), stream);
    });
    bind(m, "softmax_gradient", [](const Row<LossGradJob>& job, bool wide, Stream stream) {
        softmax_gradient(make_job<LossGradJob>(job), input_of(wide), stream);
    });
}

void bind_codes(pybind11::module_& m) {
    bind_step(m, "transpose_words", [](uintptr_t from, uintptr_t to, int64_t rows, int64_t cols, Stream stream) {
        transpose_words(from, to, rows, cols, stream);
    });
    bind_step(m, "transpose_bytes", transpose_codes(transpose_bytes));
    bind_step(m, "transpose_nibbles", transpose_codes(transpose_nibbles));
    bind_step(m, "decode", [](const Words<DecodeJob>& one, int32_t encoding, Stream stream) {
        DecodeJob job;
        std::memcpy(&job, one.data(), sizeof(job));
        decode(job, Encoding(encoding), stream);
    });
    bind_step(m, "swizzle_scales", [](const Words<SwizzleJob>& one, Stream stream) {
        swizzle_scales(make_job<SwizzleJob>(one), stream);
    });
}

void bind_small(pybind11::module_& m) {
    bind_step(m, "gemm_fp8_blocks", [](const Words<BlockGemmJob>& job, bool e5m2, bool wide, Stream stream) {
        gemm_fp8_blocks(make_job<BlockGemmJob>(job), code_of(e5m2), input_of(wide), stream);
    });
    bind_step(m, "gemm_fp8_sum", [](const Words<GemmSumJob>& job, const Words<GemmTerm>& first, const Words<GemmTerm>& second,
                                    const Words<GemmTerm>& third, const Words<GemmTerm>& fourth, bool e5m2, bool wide,
                                    Stream stream) {
        const GemmTerm terms[kSumTerms] = {make_job<GemmTerm>(first), make_job<GemmTerm>(second), make_job<GemmTerm>(third),
                                           make_job<GemmTerm>(fourth)};
        gemm_fp8_sum(make_job<GemmSumJob>(job), terms, code_of(e5m2), input_of(wide), stream);
    });
    bind_step(m, "int4_gemv", [](const Words<Int4Job>& job, Stream stream) { int4_gemv(make_job<Int4Job>(job), stream); });
    bind_step(m, "nvfp4_alpha", [](const Words<AlphaJob>& words, Stream stream) {
        nvfp4_alpha(make_job<AlphaJob>(words), stream);
    });
    bind_step(m, "round_to_bf16", [](const Words<RoundJob>& words, Stream stream) {
        round_to_bf16(make_job<RoundJob>(words), stream);
    });
    bind_step(m, "set_zero", [](uintptr_t at, int64_t bytes, Stream stream) { set_zero(at, bytes, stream); });
}

// The fields of GemmProblem, in order.
using ProblemWords = std::array<int64_t, 21>;

GemmProblem make_problem(const ProblemWords& words) {
    const auto small = [&](int i) { return static_cast<int32_t>(words[i]); };
    return {small(0), small(1), small(2), small(3), words[4], words[5], words[6], words[7], words[8], words[9],
            small(10), small(11), small(12), small(13), small(14), small(15), small(16), small(17), small(18), small(19), small(20)};
}

void run_gemm(GemmPlan& plan, uintptr_t a, uintptr_t b, uintptr_t d, uintptr_t a_scale, uintptr_t b_scale, uintptr_t bias,
              uintptr_t alpha, uintptr_t beta, uintptr_t workspace, Stream stream) {
    const auto at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
    plan.run({at(a), at(b), at(d), at(a_scale), at(b_scale), at(bias), at(alpha), at(beta)}, at(workspace), stream);
}

// A step that runs a GEMM plan. The step keeps the plan alive.
class GemmStep final : public Step {
public:
    explicit GemmStep(const pybind11::tuple& arguments) : plan_(arguments[0]), run_(plan_.cast<GemmPlan*>()) {
        DLP_CHECK_EQ(arguments.size(), addresses_.size() + 1);
        for (size_t i = 0; i < addresses_.size(); ++i) addresses_[i] = arguments[i + 1].cast<uintptr_t>();
    }
    void run(uintptr_t stream) override {
        const auto& at = addresses_;
        run_gemm(*run_, at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8], stream);
    }
    void addresses(std::vector<uintptr_t*>& found) override {
        for (uintptr_t& address : addresses_) found.push_back(&address);
    }

private:
    pybind11::object plan_;
    GemmPlan* run_;
    std::array<uintptr_t, 9> addresses_{};
};

// Makes a program from recorded launches. A launch is (name of the function, arguments without the stream, stream), or ("gemm",
// (plan, nine addresses), stream); stream 0 is the stream of the run. A piece of memory is (address, bytes, base, offset), see
// Program::Memory.
std::unique_ptr<Program> make_program(const std::vector<std::tuple<std::string, pybind11::tuple, uintptr_t>>& recorded,
                                      const std::vector<std::tuple<uintptr_t, uintptr_t, int64_t, uintptr_t>>& memory,
                                      size_t bases) {
    std::vector<Program::Placed> steps;
    for (const auto& [name, arguments, lane] : recorded) steps.push_back({step_makers().at(name)(arguments), lane});
    std::vector<Program::Memory> pieces;
    for (const auto& [at, bytes, base, offset] : memory) pieces.push_back({at, bytes, base, offset});
    return std::make_unique<Program>(std::move(steps), pieces, bases);
}

// The slots of transport.cu are mapped once and never move. Their addresses are passed as int64_t, which a program does not
// replace.
void bind_transport(pybind11::module_& m) {
    const auto table = [](int64_t slots) { return reinterpret_cast<const uint64_t*>(slots); };
    bind_step(m, "begin_use", [](const Words<SlotBases>& slots, int64_t use, Stream stream) {
        begin_use(make_job<SlotBases>(slots), use, stream);
    });
    bind_step(m, "meet", [](const Words<SlotBases>& slots, int64_t use, Stream stream) {
        meet(make_job<SlotBases>(slots), use, stream);
    });
    bind_step(m, "release_use", [](const Words<SlotBases>& slots, Stream stream) { release_use(make_job<SlotBases>(slots), stream); });
    bind_step(m, "agree", [table](int64_t slots, const Words<AgreeJob>& job, const Words<Waiting>& waiting, Stream stream) {
        agree(table(slots), make_job<AgreeJob>(job), make_job<Waiting>(waiting), stream);
    });
    bind_step(m, "push_part", [](uintptr_t from, int64_t to, int64_t to_pitch, int64_t width, int64_t height, Stream stream) {
        copy_part(from, width, uintptr_t(to), to_pitch, width, height, stream);
    });
    bind_step(m, "copy_rows", [](uintptr_t from, int64_t from_pitch, uintptr_t to, int64_t to_pitch, int64_t width, int64_t height,
                                 Stream stream) {
        copy_part(from, from_pitch, to, to_pitch, width, height, stream);
    });
    m.def("new_event", &new_event);
    bind_step(m, "mark", [](int64_t event, Stream stream) { mark(event, stream); });
    bind_step(m, "await_mark", [](int64_t event, Stream stream) { await_mark(event, stream); });
}

void bind_program(pybind11::module_& m) {
    step_makers()["gemm"] = [](const pybind11::tuple& arguments) { return std::make_unique<GemmStep>(arguments); };
    pybind11::class_<Program>(m, "Program").def(pybind11::init(&make_program)).def("run", &Program::run, Unlocked());
}

}  // namespace
}  // namespace dlp

PYBIND11_MODULE(dlp_kernels, m) {
    using namespace dlp;
    m.attr("AMAX_CHUNK") = kAmaxChunk;
    m.attr("TILE") = kTile;
    m.attr("NORM_PARTS") = kNormParts;

    bind_step(m, "amax", [](const Words<AmaxJob>& one, uintptr_t many, int64_t count, int64_t items, bool wide, uintptr_t out,
                     Stream stream) {
        amax(make_work<AmaxJob>(one, many, count, items), input_of(wide), out, count, stream);
    });
    bind_step(m, "cast_tensor", [](const Words<TensorJob>& one, bool wide, bool e5m2, const Rule& rule, Stream stream) {
        cast_tensor(make_job<TensorJob>(one), input_of(wide), code_of(e5m2), make_rule(rule), stream);
    });
    bind_step(m, "cast_transpose", [](const Words<TensorJob>& one, uintptr_t many, int64_t count, int64_t items, bool wide,
                               bool e5m2, const Rule& rule, bool observe, const Words<Source>& source, Stream stream) {
        const Work<TensorJob> work = make_work<TensorJob>(one, many, count, items);
        cast_transpose(work, input_of(wide), code_of(e5m2), make_rule(rule), observe, make_source(source), stream);
    });
    bind_blocks(m);
    bind_lines(m);
    bind_nvfp4(m);
    bind_producers(m);
    bind_loss(m);
    bind_codes(m);
    bind_small(m);
    bind(m, "delayed_update", [](const Row<DelayedJob>& one, uintptr_t many, int64_t count, int64_t items, Stream stream) {
        delayed_update(make_work<DelayedJob>(one, many, count, items), stream);
    });
    bind_step(m, "sum_in_order", [](uintptr_t from, uintptr_t own, int64_t index, uintptr_t to, int64_t contributions,
                                    int64_t count, bool wide, bool wide_sum, int64_t divisor, Stream stream) {
        sum_in_order(reinterpret_cast<const void*>(from), reinterpret_cast<const void*>(own), index,
                     reinterpret_cast<void*>(to), contributions, count, input_of(wide), input_of(wide_sum), float(divisor), stream);
    });

    bind_step(m, "sum_by_tree", [](uintptr_t from, uintptr_t to, int64_t parts, int64_t count, bool wide, Stream stream) {
        sum_by_tree(reinterpret_cast<const float*>(from), reinterpret_cast<void*>(to), parts, count, input_of(wide), stream);
    });

    bind(m, "checksums", [](const std::vector<ByteRange>& ranges, uintptr_t out, Stream stream) {
        checksums(ranges.data(), int64_t(ranges.size()), reinterpret_cast<uint64_t*>(out), stream);
    });
    m.def("open_cublaslt", &open_cublaslt);
    m.def("cublaslt_version", &cublaslt_version);
    pybind11::class_<GemmPlan>(m, "GemmPlan")
        .def(pybind11::init([](const ProblemWords& words, int device, int64_t workspace_bytes, int wanted) {
            return std::make_unique<GemmPlan>(make_problem(words), device, workspace_bytes, wanted);
        }))
        .def_property_readonly("candidates", &GemmPlan::candidates)
        .def("choose", &GemmPlan::choose)
        .def("run", &run_gemm, Unlocked());
    bind_program(m);
    bind_transport(m);
    bind_step(m, "pack_fp8_wire", [](const WireWords& words, float min_amax, bool wide, Stream stream) {
        WireMatrix job{};
        std::memcpy(&job, words.data(), sizeof(words));
        job.min_amax = min_amax;
        pack_fp8_wire(job, input_of(wide), stream);
    });
    bind_step(m, "sum_fp8_wire", [](const Words<WireSum>& words, bool wide, Stream stream) {
        sum_fp8_wire(make_job<WireSum>(words), input_of(wide), stream);
    });
}
