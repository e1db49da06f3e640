// One clean kernel and three with a defect each, which tell whether a tool of compute-sanitizer works on this device.
//
//     sanitize_probe clean | memcheck | racecheck | initcheck        the kernel that this tool must find fault with

#include <cstdio>
#include <cstring>

namespace dlp {  // as our kernels are, since some tools look only there

__global__ void clean(int* out, const int* in, int size) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < size) out[i] = in[i] + 1;
}

__global__ void beyond(int* out, int size) {
    out[size + threadIdx.x] = 1;
}

// Each thread reads what another one wrote; were it its own, nothing would be left of the shared memory.
__global__ void race(int* out) {
    __shared__ int cells[1024];
    cells[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = cells[blockDim.x - 1 - threadIdx.x];
}

__global__ void unwritten(int* out, const int* in) {
    out[threadIdx.x] = in[threadIdx.x] + 1;
}

}  // namespace dlp

int main(int count, char** arguments) {
    const char* which = count == 2 ? arguments[1] : "";
    const int size = 256;
    int *in, *out;
    if (cudaMalloc(&in, size * sizeof(int)) || cudaMalloc(&out, size * sizeof(int))) return 3;
    if (!strcmp(which, "clean")) {
        cudaMemset(in, 0, size * sizeof(int));
        dlp::clean<<<1, size>>>(out, in, size);
    } else if (!strcmp(which, "memcheck")) {
        dlp::beyond<<<1, size>>>(out, size);
    } else if (!strcmp(which, "racecheck")) {
        dlp::race<<<1, size>>>(out);
    } else if (!strcmp(which, "initcheck")) {
        dlp::unwritten<<<1, size>>>(out, in);
    } else {
        fprintf(stderr, "usage: sanitize_probe clean | memcheck | racecheck | initcheck\n");
        return 2;
    }
    cudaError_t error = cudaDeviceSynchronize();
    cudaFree(in);
    cudaFree(out);
    return error == cudaSuccess ? 0 : 1;
}
