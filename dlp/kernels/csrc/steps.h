// Calls of bound kernels as steps of a program (program.h): a step stores the arguments of one call. An argument is an address
// if its type is `uintptr_t`, or if it is a word of a job that `Job::addresses` lists.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "check.h"
#include "kernels.h"
#include "program.h"

namespace dlp {

// A job as Python passes it: a tuple of 64-bit words.
template <class Job>
struct Words : std::array<int64_t, sizeof(Job) / sizeof(int64_t)> {
    static constexpr uint32_t addresses = Job::addresses;
};

// PhiloxState: (counter, row, first, across, orientation, seed, tensor); counter 0 rounds to nearest
struct PhiloxWords : std::array<int64_t, 7> {
    static constexpr uint32_t addresses = words(0);
};

// WireMatrix: (x, rows, cols, codes, scale)
struct WireWords : std::array<int64_t, 5> {
    static constexpr uint32_t addresses = words(0, 3, 4);
};

// ScaleRule: (largest, epsilon, overflow, power_of_two)
using Rule = std::tuple<float, float, float, bool>;

}  // namespace dlp

namespace pybind11::detail {

template <class Job>
struct type_caster<dlp::Words<Job>>
    : array_caster<dlp::Words<Job>, int64_t, false, sizeof(Job) / sizeof(int64_t)> {};
template <>
struct type_caster<dlp::PhiloxWords> : array_caster<dlp::PhiloxWords, int64_t, false, 7> {};
template <>
struct type_caster<dlp::WireWords> : array_caster<dlp::WireWords, int64_t, false, 5> {};

}  // namespace pybind11::detail

namespace dlp {

// A call of a bound function as a step. `Arguments`: the argument types of the function; the last one is the stream.
template <class Kernel, class... Arguments>
class KernelStep final : public Step {
public:
    KernelStep(Kernel kernel, const pybind11::tuple& arguments) : kernel_(kernel) {
        DLP_CHECK_EQ(arguments.size() + 1, sizeof...(Arguments));
        read(arguments, std::make_index_sequence<sizeof...(Arguments) - 1>());
    }
    void run(uintptr_t stream) override {
        std::get<sizeof...(Arguments) - 1>(arguments_) = stream;
        std::apply(kernel_, arguments_);
    }
    void addresses(std::vector<uintptr_t*>& found) override {
        add_addresses(found, std::make_index_sequence<sizeof...(Arguments) - 1>());
    }

private:
    template <size_t... I>
    void read(const pybind11::tuple& arguments, std::index_sequence<I...>) {
        ((std::get<I>(arguments_) = arguments[I].template cast<std::tuple_element_t<I, decltype(arguments_)>>()), ...);
    }
    template <size_t... I>
    void add_addresses(std::vector<uintptr_t*>& found, std::index_sequence<I...>) {
        (add(std::get<I>(arguments_), found), ...);
    }
    template <class Argument>
    static void add(Argument& argument, std::vector<uintptr_t*>& found) {
        if constexpr (std::is_same_v<Argument, uintptr_t>) {
            found.push_back(&argument);
        } else if constexpr (std::is_class_v<Argument> && !std::is_same_v<Argument, Rule>) {
            for (size_t i = 0; i < argument.size(); ++i)
                if (Argument::addresses >> i & 1) found.push_back(reinterpret_cast<uintptr_t*>(&argument[i]));
        }
    }

    Kernel kernel_;
    std::tuple<Arguments...> arguments_{};
};

using MakeStep = std::function<std::unique_ptr<Step>(const pybind11::tuple&)>;

// Factories of the steps that a program can run, by name. Initialization of the module fills the map.
inline std::map<std::string, MakeStep>& step_makers() {
    static std::map<std::string, MakeStep> makers;
    return makers;
}

template <class Kernel, class... Arguments>
MakeStep step_maker(Kernel kernel, void (Kernel::*)(Arguments...) const) {
    return [kernel](const pybind11::tuple& arguments) {
        return std::make_unique<KernelStep<Kernel, std::decay_t<Arguments>...>>(kernel, arguments);
    };
}

}  // namespace dlp
