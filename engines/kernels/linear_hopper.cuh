// What only Hopper has, in words: barriers in shared memory, copies of tiles, products of warpgroups,
// blocks of a cluster. Included by linear_wide.cuh.

struct alignas(64) Map {  // CUtensorMap
    u64 words[16];
};

__device__ __forceinline__ void init_barrier(u32 at, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

// What was initialized can be seen by copies, and by other blocks of a cluster once they met.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(u32 at) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// Arrives, and has the barrier wait for so many bytes of copies too.
__device__ __forceinline__ void arrive_expecting(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
                 : "memory");
}

// Waits for the end of the phase whose number's last bit is `parity`.
__device__ __forceinline__ void wait_barrier(u32 at, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
            "selp.u32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(at), "r"(parity)
            : "memory");
    } while (!done);
}

// A box of the mapped matrix, from (row, column) on; what lies outside of it comes as zeros.
__device__ __forceinline__ void copy_box(u32 target, const Map& map, u32 column, u32 row,
                                         u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(target),
        "l"(&map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

__device__ __forceinline__ void fetch_map(const Map& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// Two floats at the same place of shared memory in block `rank` of the cluster.
__device__ __forceinline__ float2 load_other(u32 address, u32 rank) {
    u32 there;
    float2 x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x.x), "=f"(x.y)
                 : "r"(there)
                 : "memory");
    return x;
}

#define LIST8(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), \
    "+f"(c[6]), "+f"(c[7])
#define LIST16(c) LIST8(c), LIST8((c + 8))
#define LIST24(c) LIST16(c), LIST8((c + 16))
#define LIST32(c) LIST24(c), LIST8((c + 24))
#define LIST40(c) LIST32(c), LIST8((c + 32))
#define LIST48(c) LIST40(c), LIST8((c + 40))
#define LIST56(c) LIST48(c), LIST8((c + 48))
#define LIST64(c) LIST56(c), LIST8((c + 56))
#define LIST72(c) LIST64(c), LIST8((c + 64))
#define LIST80(c) LIST72(c), LIST8((c + 72))
#define LIST88(c) LIST80(c), LIST8((c + 80))
#define NAMES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES16 NAMES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES24 NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES32 NAMES24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES40 NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES48 NAMES40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES56 NAMES48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES64 NAMES56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES72 NAMES64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES80 NAMES72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES88 NAMES80 ", %80, %81, %82, %83, %84, %85, %86, %87"
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

// c (64, 2 * COUNT) += 16 inputs of 64 rows of a and of 2 * COUNT of b; if not `more`, c is zero.
template <int COUNT>
__device__ __forceinline__ void multiply(float* c, u64 a, u64 b, u32 more) {
    static_assert(COUNT % 8 == 0 && COUNT <= 88, "");
    if (COUNT == 8) WGMMA("16", NAMES8, LIST8, "%8", "%9", "%10");
    if (COUNT == 16) WGMMA("32", NAMES16, LIST16, "%16", "%17", "%18");
    if (COUNT == 24) WGMMA("48", NAMES24, LIST24, "%24", "%25", "%26");
    if (COUNT == 32) WGMMA("64", NAMES32, LIST32, "%32", "%33", "%34");
    if (COUNT == 40) WGMMA("80", NAMES40, LIST40, "%40", "%41", "%42");
    if (COUNT == 48) WGMMA("96", NAMES48, LIST48, "%48", "%49", "%50");
    if (COUNT == 56) WGMMA("112", NAMES56, LIST56, "%56", "%57", "%58");
    if (COUNT == 64) WGMMA("128", NAMES64, LIST64, "%64", "%65", "%66");
    if (COUNT == 72) WGMMA("144", NAMES72, LIST72, "%72", "%73", "%74");
    if (COUNT == 80) WGMMA("160", NAMES80, LIST80, "%80", "%81", "%82");
    if (COUNT == 88) WGMMA("176", NAMES88, LIST88, "%88", "%89", "%90");
}

__device__ __forceinline__ void fence_sums() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_sums() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// All but the last LEFT groups of sums are there.
template <int LEFT>
__device__ __forceinline__ void wait_sums() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// What wgmma is told of rows of 128 bytes in the order of `place_of`.
__device__ __forceinline__ u64 matrix_at(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
