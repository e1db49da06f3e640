// A program: launches with all their arguments, made once and run again on other memory, by one call from Python. What a
// launch needs to know was decided when it was recorded (dlp/kernels/program.py); a run exchanges addresses, and launches.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace dlp {

// One launch.
class Step {
public:
    virtual ~Step() = default;
    virtual void run(uintptr_t stream) = 0;
    virtual void addresses(std::vector<uintptr_t*>& found) = 0;  // appends its words that are addresses
};

class Program {
public:
    struct Memory {
        uintptr_t at, bytes;
        int64_t base;      // in a run it lies `offset` bytes behind this one of the bases; -1: where it lies now
        uintptr_t offset;
    };

    struct Placed {
        std::unique_ptr<Step> step;
        uintptr_t lane;  // the stream that it runs on; 0: that of the run
    };

    // `memory`: all that the steps read and write. Throws where an address of a step lies in none of it.
    Program(std::vector<Placed> steps, const std::vector<Memory>& memory, size_t bases);

    // `bases`: addresses, as many as there were to be.
    void run(const std::vector<uintptr_t>& bases, uintptr_t stream);

private:
    struct Patch {
        uintptr_t* word;
        size_t base;
        uintptr_t offset;
    };
    void patch(uintptr_t* word, const std::vector<Memory>& memory);

    std::vector<Placed> steps_;
    std::vector<Patch> patches_;
    size_t bases_;
    std::mutex running_;  // the arguments of the steps are one run's at a time
};

}  // namespace dlp
