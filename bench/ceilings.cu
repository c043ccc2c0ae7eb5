// How fast this device reads and copies memory with plain 16-byte loads: what a kernel can hope for.

struct CeilingParams {
    const uint4* from;
    uint4* to;
    unsigned long long count;
};

extern "C" __global__ void __launch_bounds__(512) read_all(const __grid_constant__ CeilingParams a) {
    const uint4* from = a.from;
    unsigned long long count = a.count;
    unsigned int x = 0;
    unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * stride < count; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = __ldcs(from + i + j * stride);
#pragma unroll
        for (int j = 0; j < 8; ++j) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (x == 0x12345678u) a.to->x = x;  // never, but the compiler cannot know
}

extern "C" __global__ void __launch_bounds__(512) copy_all(const __grid_constant__ CeilingParams a) {
    const uint4* from = a.from;
    uint4* to = a.to;
    unsigned long long count = a.count;
    unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < count; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = __ldcs(from + i + j * stride);
#pragma unroll
        for (int j = 0; j < 4; ++j) __stcs(to + i + j * stride, v[j]);
    }
}
