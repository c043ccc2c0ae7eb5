// What only Hopper has: products from shared memory, and blocks that read each other's.
//
// Included by linear_many.cuh, which says how many sessions (TILES) and rows there are. For other
// targets IS_CLUSTER is false and nothing else is here.

// Blocks that have a part each of one sum: a cluster, where there are clusters.
constexpr int PARTS = LINEAR_PARTS;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && LINEAR_PARTS > 1 && LINEAR_CLUSTER
constexpr bool IS_CLUSTER = true;
#define CLUSTER __cluster_dims__(LINEAR_PARTS, 1, 1)

__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// A float at the same place of shared memory in block `rank` of the cluster.
__device__ __forceinline__ float load_other(u32 address, u32 rank) {
    u32 there;
    float x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(there) : "memory");
    return x;
}
#else
constexpr bool IS_CLUSTER = false;
#define CLUSTER
__device__ __forceinline__ void meet_cluster() {}
__device__ __forceinline__ float load_other(u32, u32) { return 0; }
#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define LIST8(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), \
    "+f"(c[6]), "+f"(c[7])
#define LIST16(c) LIST8(c), LIST8((c + 8))
#define LIST24(c) LIST16(c), LIST8((c + 16))
#define LIST32(c) LIST16(c), LIST16((c + 16))
#define LIST40(c) LIST32(c), LIST8((c + 32))
#define NAMES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES16 NAMES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES24 NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES32 NAMES24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES40 NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#if LINEAR_ELEMENT == 1
#define WGMMA_TYPES ".f32.bf16.bf16 {"
#else
#define WGMMA_TYPES ".f32.f16.f16 {"
#endif
#define WGMMA(N, NAMES, LIST, A, B, MORE)                                            \
    asm volatile("{.reg .pred p; setp.ne.b32 p, " MORE ", 0; "                       \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16" WGMMA_TYPES NAMES "}, " \
                 A ", " B ", p, 1, 1, 0, 0;}"                                        \
                 : LIST(c)                                                           \
                 : "l"(a), "l"(b), "r"(more)                                         \
                 : "memory")

// c (64, 8 * COUNT / 4) += 16 inputs of 64 rows and of the sessions; if not `more`, c is zero.
template <int COUNT>
__device__ __forceinline__ void multiply(float* c, u64 a, u64 b, u32 more) {
    static_assert(COUNT == 8 || COUNT == 16 || COUNT == 24 || COUNT == 32 || COUNT == 40, "");
    if (COUNT == 8) WGMMA("16", NAMES8, LIST8, "%8", "%9", "%10");
    if (COUNT == 16) WGMMA("32", NAMES16, LIST16, "%16", "%17", "%18");
    if (COUNT == 24) WGMMA("48", NAMES24, LIST24, "%24", "%25", "%26");
    if (COUNT == 32) WGMMA("64", NAMES32, LIST32, "%32", "%33", "%34");
    if (COUNT == 40) WGMMA("80", NAMES40, LIST40, "%40", "%41", "%42");
}

// What wgmma is told of rows of 128 bytes in the order of `place_of`.
__device__ __forceinline__ u64 matrix_at(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

#endif
