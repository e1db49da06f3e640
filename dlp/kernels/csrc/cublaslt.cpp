// See cublaslt.h. cuBLASLt is column-major and computes D.T = B @ A.T: A of cuBLASLt is our B, and B of cuBLASLt is our A.
#include "cublaslt.h"

#include <dlfcn.h>

#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "check.h"

namespace dlp {
namespace {

// Declarations of cublasLt.h and library_types.h that are used here. The numbers are ABI and do not change.
using Status = int;
using Handle = void*;
using Opaque = void*;

constexpr int kTypeFp32 = 0;
constexpr int kComputeFp32 = 68, kComputeTf32 = 77;
constexpr int kOpN = 0, kOpT = 1;
constexpr int kPointersOnDevice = 1;
constexpr int kEpilogueBias = 4;
constexpr int64_t kOneShape = 4096;  // rows and columns for which the algorithm of problems with segments is chosen

enum DescAttribute {
    kPointerMode = 2, kTransA = 3, kTransB = 4, kEpilogue = 7, kBiasPointer = 8, kSmCountTarget = 15, kScalePointerA = 17,
    kScalePointerB = 18, kFastAccumulation = 25, kBiasType = 26, kScaleModeA = 31, kScaleModeB = 32,
};
enum LayoutAttribute { kBatches = 5, kBatchStride = 6 };
enum PreferenceAttribute { kMaxWorkspace = 1, kReductionSchemes = 3, kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7, kAlignmentD = 8 };

struct Algorithm {
    uint64_t data[8];
};

struct Candidate {  // cublasLtMatmulHeuristicResult_t
    Algorithm algorithm;
    size_t workspace;
    Status status;
    float waves;
    int reserved[4];
};
static_assert(sizeof(Candidate) == 96, "cuBLASLt writes an array of this struct");

constexpr const char* kStatusNames[16] = {
    "success", "not initialized", "", "allocation failed", "", "", "", "invalid value", "architecture mismatch", "", "",
    "mapping error", "", "execution failed", "internal error", "not supported"};

struct Library {
    Status (*Create)(Handle*);
    size_t (*GetVersion)();
    Status (*MatmulDescCreate)(Opaque*, int compute, int scale_type);
    Status (*MatmulDescDestroy)(Opaque);
    Status (*MatmulDescSetAttribute)(Opaque, int attribute, const void*, size_t);
    Status (*MatrixLayoutCreate)(Opaque*, int type, uint64_t rows, uint64_t cols, int64_t stride);
    Status (*MatrixLayoutDestroy)(Opaque);
    Status (*MatrixLayoutSetAttribute)(Opaque, int attribute, const void*, size_t);
    Status (*MatmulPreferenceCreate)(Opaque*);
    Status (*MatmulPreferenceDestroy)(Opaque);
    Status (*MatmulPreferenceSetAttribute)(Opaque, int attribute, const void*, size_t);
    Status (*MatmulAlgoGetHeuristic)(Handle, Opaque desc, Opaque a, Opaque b, Opaque c, Opaque d, Opaque preference,
                                     int wanted, Candidate*, int* found);
    Status (*MatmulAlgoCheck)(Handle, Opaque desc, Opaque a, Opaque b, Opaque c, Opaque d, const Algorithm*, Candidate*);
    Status (*Matmul)(Handle, Opaque desc, const void* alpha, const void* a, Opaque a_layout, const void* b,
                     Opaque b_layout, const void* beta, const void* c, Opaque c_layout, void* d, Opaque d_layout,
                     const Algorithm*, void* workspace, size_t workspace_bytes, void* stream);
};

Library library{};

void check(Status status, const char* call) {
    if (status == 0) return;
    const char* name = status > 0 && status < 16 ? kStatusNames[status] : "";
    throw std::runtime_error(std::string("cublasLt") + call + " failed with status " + std::to_string(status) + " (" +
                             name + ")");
}
#define LT(call, ...) check(library.call(__VA_ARGS__), #call)

template <class T>
void set(Opaque desc, DescAttribute attribute, const T& value) {
    LT(MatmulDescSetAttribute, desc, attribute, &value, sizeof(value));
}

// The handle of a device, which must be the current device in the first call for it.
Handle handle_of(int device) {
    static std::map<int, Handle> handles;
    Handle& handle = handles[device];
    if (handle == nullptr) LT(Create, &handle);
    return handle;
}

// Layout of a matrix [lines, along]. `stride`: elements between lines, or between columns if `col_major`.
Opaque make_layout(int type, int64_t lines, int64_t along, int64_t stride, bool col_major) {
    Opaque layout = nullptr;
    LT(MatrixLayoutCreate, &layout, type, col_major ? lines : along, col_major ? along : lines, stride);
    return layout;
}

// Turns the layout of a matrix into the layout of a batch of `count` matrices that begin `apart` elements after each other.
void repeat(Opaque layout, int32_t count, int64_t apart) {
    LT(MatrixLayoutSetAttribute, layout, kBatches, &count, sizeof(count));
    LT(MatrixLayoutSetAttribute, layout, kBatchStride, &apart, sizeof(apart));
}

}  // namespace

void open_cublaslt(const std::vector<std::string>& names) {
    if (library.Create != nullptr) return;
    std::string errors;
    void* opened = nullptr;
    for (const auto& name : names) {
        opened = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (opened != nullptr) break;
        errors += std::string("\n  ") + dlerror();
    }
    if (opened == nullptr) throw std::runtime_error("GEMMs need cuBLASLt, a part of CUDA that torch brings:" + errors);
    Library found{};
    const auto find = [&](auto& function, const char* name) {
        void* symbol = dlsym(opened, (std::string("cublasLt") + name).c_str());
        if (symbol == nullptr) throw std::runtime_error(std::string("cuBLASLt has no function cublasLt") + name);
        function = reinterpret_cast<std::decay_t<decltype(function)>>(symbol);
    };
    find(found.GetVersion, "GetVersion");
    find(found.MatmulDescCreate, "MatmulDescCreate");
    find(found.MatmulDescDestroy, "MatmulDescDestroy");
    find(found.MatmulDescSetAttribute, "MatmulDescSetAttribute");
    find(found.MatrixLayoutCreate, "MatrixLayoutCreate");
    find(found.MatrixLayoutDestroy, "MatrixLayoutDestroy");
    find(found.MatrixLayoutSetAttribute, "MatrixLayoutSetAttribute");
    find(found.MatmulPreferenceCreate, "MatmulPreferenceCreate");
    find(found.MatmulPreferenceDestroy, "MatmulPreferenceDestroy");
    find(found.MatmulPreferenceSetAttribute, "MatmulPreferenceSetAttribute");
    find(found.MatmulAlgoGetHeuristic, "MatmulAlgoGetHeuristic");
    find(found.MatmulAlgoCheck, "MatmulAlgoCheck");
    find(found.Matmul, "Matmul");
    find(found.Create, "Create");
    library = found;
}

int64_t cublaslt_version() { return static_cast<int64_t>(library.GetVersion()); }

struct GemmPlan::State {
    Handle handle = nullptr;
    Opaque desc = nullptr, a = nullptr, b = nullptr, d = nullptr;
    std::vector<Candidate> candidates;
    size_t chosen = 0;
    size_t workspace_bytes = 0;
    std::mutex running;  // each run sets the pointers of scales and bias in `desc`, which all layers of one shape share
    bool scaled_a = false, scaled_b = false, biased = false, device_alpha = false;
    float beta = 0.0f;

    ~State() {
        if (desc != nullptr) library.MatmulDescDestroy(desc);
        free_layouts();
    }
    void describe(const GemmProblem& problem);
    void lay_out(const GemmProblem& problem);
    void free_layouts();
    void search(const GemmProblem& problem, int wanted);
    bool supports(Candidate& candidate);
};

void GemmPlan::State::describe(const GemmProblem& problem) {
    LT(MatmulDescCreate, &desc, problem.tf32 ? kComputeTf32 : kComputeFp32, kTypeFp32);
    set(desc, kTransA, problem.b_col_major ? kOpN : kOpT);
    set(desc, kTransB, problem.a_col_major ? kOpT : kOpN);
    if (problem.fast_accumulation) set(desc, kFastAccumulation, int8_t{1});
    if (problem.sms > 0) set(desc, kSmCountTarget, problem.sms);
    // Scales and bias are attributes of the descriptor. Each run sets the pointers, but the heuristics need non-null pointers
    // at creation, hence a placeholder.
    const void* placeholder = reinterpret_cast<const void*>(uintptr_t{256});
    scaled_a = problem.b_scale >= 0, scaled_b = problem.a_scale >= 0;
    if (scaled_a) set(desc, kScalePointerA, placeholder);
    if (scaled_b) set(desc, kScalePointerB, placeholder);
    if (problem.b_scale > 0) set(desc, kScaleModeA, problem.b_scale);
    if (problem.a_scale > 0) set(desc, kScaleModeB, problem.a_scale);
    biased = problem.bias_type >= 0;
    if (biased) {
        set(desc, kEpilogue, kEpilogueBias);
        set(desc, kBiasType, problem.bias_type);
        set(desc, kBiasPointer, placeholder);
    }
    device_alpha = problem.device_alpha != 0;
    if (device_alpha) set(desc, kPointerMode, kPointersOnDevice);
    beta = problem.accumulate ? 1.0f : 0.0f;
}

void GemmPlan::State::lay_out(const GemmProblem& problem) {
    free_layouts();
    a = make_layout(problem.b_type, problem.cols, problem.contraction, problem.b_stride, problem.b_col_major);
    b = make_layout(problem.a_type, problem.rows, problem.contraction, problem.a_stride, problem.a_col_major);
    d = make_layout(problem.d_type, problem.rows, problem.cols, problem.d_stride, false);
    if (problem.segments == 0) return;
    repeat(a, problem.segments, problem.contraction);
    repeat(b, problem.segments, problem.contraction);
    repeat(d, problem.segments, problem.rows * problem.d_stride);
}

void GemmPlan::State::free_layouts() {
    for (Opaque* layout : {&a, &b, &d})
        if (*layout != nullptr) library.MatrixLayoutDestroy(std::exchange(*layout, nullptr));
}

// Whether an algorithm that was found for other layouts supports the current layouts.
bool GemmPlan::State::supports(Candidate& candidate) {
    const Algorithm algorithm = candidate.algorithm;
    return library.MatmulAlgoCheck(handle, desc, a, b, d, d, &algorithm, &candidate) == 0 && candidate.status == 0 &&
           candidate.workspace <= workspace_bytes && (candidate.algorithm = algorithm, true);
}

void GemmPlan::State::search(const GemmProblem& problem, int wanted) {
    if (problem.segments > 0) {  // search for one shape; all shapes with this contraction use the algorithm
        GemmProblem one = problem;
        one.rows = one.cols = one.d_stride = kOneShape;
        one.a_stride = one.b_stride = one.contraction;
        one.segments = 1;
        lay_out(one);
    } else {
        lay_out(problem);
    }
    Opaque preference = nullptr;
    LT(MatmulPreferenceCreate, &preference);
    LT(MatmulPreferenceSetAttribute, preference, kMaxWorkspace, &workspace_bytes, sizeof(workspace_bytes));
    const uint32_t bytes = static_cast<uint32_t>(problem.alignment), no_reductions = 0;
    if (problem.segments > 0)  // the contraction is not split among thread blocks
        LT(MatmulPreferenceSetAttribute, preference, kReductionSchemes, &no_reductions, sizeof(no_reductions));
    for (int attribute : {kAlignmentA, kAlignmentB, kAlignmentC, kAlignmentD})
        LT(MatmulPreferenceSetAttribute, preference, attribute, &bytes, sizeof(bytes));
    candidates.resize(wanted);
    int found = 0;
    const Status status = library.MatmulAlgoGetHeuristic(handle, desc, a, b, d, d, preference, wanted,
                                                         candidates.data(), &found);
    library.MatmulPreferenceDestroy(preference);
    candidates.resize(status == 0 ? found : 0);
    while (!candidates.empty() && candidates.back().status != 0) candidates.pop_back();
    if (problem.segments == 0 || candidates.empty()) return;
    lay_out(problem);
    candidates.resize(1);  // only the first: shapes that used another candidate would sum in another order
    if (!supports(candidates[0])) candidates.clear();
}

GemmPlan::GemmPlan(const GemmProblem& problem, int device, int64_t workspace_bytes, int wanted) : state_(new State) {
    DLP_CHECK_LT(0, wanted);
    state_->handle = handle_of(device);
    state_->workspace_bytes = static_cast<size_t>(workspace_bytes);
    state_->describe(problem);
    state_->search(problem, wanted);
}

GemmPlan::~GemmPlan() = default;

int GemmPlan::candidates() const { return static_cast<int>(state_->candidates.size()); }

void GemmPlan::choose(int candidate) {
    DLP_CHECK_LE(0, candidate);
    DLP_CHECK_LT(candidate, candidates());
    state_->chosen = static_cast<size_t>(candidate);
}

void GemmPlan::run(const GemmPointers& pointers, void* workspace, uintptr_t stream) {
    State& plan = *state_;
    DLP_CHECK_LT(plan.chosen, plan.candidates.size());
    const std::lock_guard<std::mutex> alone(plan.running);
    if (plan.scaled_a) set(plan.desc, kScalePointerA, pointers.b_scale);
    if (plan.scaled_b) set(plan.desc, kScalePointerB, pointers.a_scale);
    if (plan.biased) set(plan.desc, kBiasPointer, pointers.bias);
    const float one = 1.0f;
    const void* alpha = plan.device_alpha ? pointers.alpha : &one;
    const void* beta = plan.device_alpha ? pointers.beta : &plan.beta;
    LT(Matmul, plan.handle, plan.desc, alpha, pointers.b, plan.a, pointers.a, plan.b, beta, pointers.d, plan.d, pointers.d,
       plan.d, &plan.candidates[plan.chosen].algorithm, workspace, plan.workspace_bytes, reinterpret_cast<void*>(stream));
}

}  // namespace dlp
