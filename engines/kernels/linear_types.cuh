// What the language model's kernels share: the element type, loads, and order between launches.
//
// LINEAR_ELEMENT says what weights, rows and wires are made of: 0 float32, 1 bfloat16, 2 float16.
// Everything is summed in float32; `rounded` is where the graph would have rounded to the element.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int LANES = 32;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / LANES;

#if LINEAR_ELEMENT == 0
typedef float Element;
#else
typedef u16 Element;
#endif

__device__ __forceinline__ float widened(Element x) {
#if LINEAR_ELEMENT == 0
    return x;
#elif LINEAR_ELEMENT == 1
    return __uint_as_float((u32)x << 16);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
#endif
}

__device__ __forceinline__ Element narrowed(float x) {
#if LINEAR_ELEMENT == 0
    return x;
#elif LINEAR_ELEMENT == 1
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
    return (u16)pair;
#else
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
#endif
}

__device__ __forceinline__ float rounded(float x) { return widened(narrowed(x)); }

__device__ __forceinline__ u32 word(const uint4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Waits until the launch in front of this one has ended and its writes can be seen. Before it a
// kernel may read weights, which nobody writes, and nothing else.
__device__ __forceinline__ void wait_for_others() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the launch behind this one start as soon as all blocks have come here.
__device__ __forceinline__ void let_others_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Rows were written by a launch before this one, so not through the read-only path.
__device__ __forceinline__ uint4 load_row(const void* at) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at)
                 : "memory");
    return x;
}

// Sum over a block of THREADS threads in an order that is always the same; every thread gets it.
__device__ __forceinline__ float block_sum(float x, float* shared) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    if (threadIdx.x % LANES == 0) shared[threadIdx.x / LANES] = x;
    __syncthreads();
    float sum = 0;
    for (int warp = 0; warp < WARPS; warp++) sum += shared[warp];
    return sum;
}
