// A program: launches with all arguments, recorded once and replayed on other memory by one call from Python
// (dlp/runtime/capture.py, CapturedLaunches). A replay replaces the addresses and launches; all other arguments are those of
// the recording.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace dlp {

// One recorded launch.
class Step {
public:
    virtual ~Step() = default;
    virtual void run(uintptr_t stream) = 0;
    virtual void addresses(std::vector<uintptr_t*>& found) = 0;  // appends pointers to the address arguments of this launch
};

class Program {
public:
    struct Memory {
        uintptr_t at, bytes;  // memory of the recording: address and size
        // A run uses memory at base address number `base` plus `offset` bytes instead; -1: the memory does not move.
        int64_t base;
        uintptr_t offset;
    };

    struct Placed {
        std::unique_ptr<Step> step;
        uintptr_t lane;  // handle of the stream of this step; 0: the stream that `run` is called with
    };

    // `memory`: all memory that the steps read and write; `bases`: number of base addresses of a run. Throws
    // std::invalid_argument if an address of a step lies outside of `memory`.
    Program(std::vector<Placed> steps, const std::vector<Memory>& memory, size_t bases);

    // Launches the steps with memory at these base addresses, which must be as many as the constructor was given.
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
    std::mutex running_;  // runs of a program share the arguments of the steps, so only one run is active at a time
};

}  // namespace dlp
