#include "program.h"

#include <stdexcept>
#include <string>

#include "check.h"

namespace dlp {

Program::Program(std::vector<Placed> steps, const std::vector<Memory>& memory, size_t bases)
    : steps_(std::move(steps)), bases_(bases) {
    for (const Memory& piece : memory) DLP_CHECK_LT(piece.base, static_cast<int64_t>(bases));
    std::vector<uintptr_t*> found;
    for (const auto& placed : steps_) placed.step->addresses(found);
    for (uintptr_t* word : found)
        if (*word != 0) patch(word, memory);
}

void Program::patch(uintptr_t* word, const std::vector<Memory>& memory) {
    for (const Memory& piece : memory) {
        if (*word < piece.at || *word >= piece.at + piece.bytes) continue;
        if (piece.base >= 0) patches_.push_back({word, size_t(piece.base), *word - piece.at + piece.offset});
        return;
    }
    throw std::invalid_argument("a launch reads or writes memory at " + std::to_string(*word) + ", which was not declared");
}

void Program::run(const std::vector<uintptr_t>& bases, uintptr_t stream) {
    DLP_CHECK_EQ(bases.size(), bases_);
    const std::lock_guard<std::mutex> alone(running_);
    for (const Patch& patch : patches_) *patch.word = bases[patch.base] + patch.offset;
    for (const auto& [step, lane] : steps_) step->run(lane ? lane : stream);
}

}  // namespace dlp
