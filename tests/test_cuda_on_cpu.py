"""The simulated GPU for tests of kernels (`make emulate`): translation of asm, and detection of missing barriers."""

from __future__ import annotations

import ctypes
import subprocess

import pytest

from dlp.kernels import loader
from tests.cuda_on_cpu import build
from tests.cuda_on_cpu.hopper_gemm import NEEDS

# Threads exchange values through shared memory twice, from one end of the thread block to the other. Without the barrier
# after the write, a thread reads too early; without the barrier after the read, a thread overwrites too early.
PROBE = """
#include <stdexcept>

template <int kBarriers>
__global__ void neighbours(const int* from, int* to) {
    __shared__ int shared[64];
    const int mine = threadIdx.x, other = 63 - mine;
    shared[mine] = from[mine];
    if (kBarriers > 0) __syncthreads();
    int sum = shared[other];
    if (kBarriers > 1) __syncthreads();
    shared[mine] = 10 * __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    if (kBarriers > 0) __syncthreads();
    to[mine] = sum + shared[other];
}
__global__ void half_a_barrier(int* to) {
    if (threadIdx.x % 2) __syncthreads();
    else while (*static_cast<volatile int*>(to) == 0) __syncwarp();
}

extern "C" __attribute__((visibility("default"))) int probe(int which, const int* from, int* to) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1), config.blockDim = dim3(64);
    void (*const kernels[])(const int*, int*) = {neighbours<0>, neighbours<1>, neighbours<2>};
    try {
        if (which < 3) cudaLaunchKernelEx(&config, kernels[which], from, to);
        else cudaLaunchKernelEx(&config, half_a_barrier, to);
    } catch (const std::runtime_error&) {
        return 1;
    }
    return 0;
}
"""


def test_every_asm_of_the_kernels_is_known():
    assert not any("asm" in build.translate(source.read_text()).split() for source in build.translated())
    with pytest.raises(ValueError, match=r"does not support the asm .*ex2\.approx.*: add a function to intrinsics\.h"):
        build.translate('asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));')
    made = build.translate('asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at(i)) : "memory");')
    assert made == "ptx::ld_acquire(value, at(i));"


@pytest.mark.slow
@NEEDS
def test_what_threads_do_wrong_is_seen(tmp_path, monkeypatch):
    (tmp_path / "probe.cu").write_text(build.translate(PROBE))
    library = tmp_path / "probe.so"
    files = [str(tmp_path / "probe.cu"), str(build.HERE / "emulator.cpp")]
    command = [
        "c++",
        *build.flags(loader.find_toolchain(), loader.CSRC),
        "-x",
        "c++",
        *files,
        "-shared",
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True)
    probe, given = ctypes.CDLL(str(library)).probe, list(range(64))

    def run(which: int, order: str) -> list[int] | None:
        monkeypatch.setenv("EMULATOR_ORDER", order)
        to = (ctypes.c_int * 64)()
        return None if probe(which, (ctypes.c_int * 64)(*given), to) else list(to)

    expected = [(63 - i) + 10 * (i ^ 1) for i in given]
    orders = ("forward", "backward", "1")
    assert [run(2, order) == expected for order in orders] == [True] * 3
    assert not all(run(1, order) == expected for order in orders)
    assert not all(run(0, order) == expected for order in orders)
    assert run(3, "forward") is None
