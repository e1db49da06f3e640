// Bulk copies (cp.async.bulk) from global to shared memory, and the mbarrier that counts the copied bytes, in 8 bytes of shared
// memory.
#pragma once

#include <cstdint>

namespace dlp {

// One thread calls `init`, and a barrier of the block follows. In each phase, one thread calls `expect` with the number of
// bytes of the phase, any threads issue copies of this number of bytes in total, and every thread that reads the bytes calls
// `wait` once, before the next `expect`.
class Arrivals {
   public:
    __device__ explicit Arrivals(uint8_t* bytes) : address_(shared_address(bytes)) {}

    __device__ void init() const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.proxy.async.shared::cta;" ::"r"(address_) : "memory");
    }
    __device__ void expect(uint32_t count) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_), "r"(count) : "memory");
    }
    // Both addresses and `count`, in bytes, are multiples of 16.
    __device__ void copy(uint8_t* to, const void* from, uint32_t count) const {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(to)), "l"(from), "r"(count), "r"(address_)
                     : "memory");
    }
    __device__ void wait() {
        asm volatile(
            "{\n\t.reg .pred done;\n"
            "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n}" ::"r"(address_),
            "r"(phase_)
            : "memory");
        phase_ ^= 1;
    }

   private:
    static __device__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

    uint32_t address_, phase_ = 0;
};

}  // namespace dlp
