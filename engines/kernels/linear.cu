// y[b, o] = finish(sum over i of w[o, i] * x[b, i]): every product of the language model.
//
// Weights are read once, as they lie in the file, and set the pace; a session more costs its own
// rows. The sum over i is cut into `slices` equal parts by the shape alone. A part is summed by one
// chain of products over 16 inputs each in ascending order, then parts are added in order. Who
// computes which part of which row differs between the kernels below, bits do not (that wgmma and
// mma agree in them is the hardware's doing, and tested):
//
//   linear_few_*  up to 8 sessions: every warp has stages of its own, all parts of a row one block
//   linear_many   more: weights and rows through shared memory; a block has all parts of its rows
//                 one after the other, or one of them, and then the last to arrive adds them up
//   linear_plain  any shape, float32 too: a warp per output; its bits are its own
//
// norm_rows is the norm in front of a product; linear_few can also do it itself, bit for bit.

#include "linear_types.cuh"

struct LinearParams {
    u64 w;         // (O, I) Element; finish GATE: (2 O, I)
    u64 x;         // (B, I) Element
    u64 alpha;     // (I,) Element: norm x first (linear_few alone); or 0
    u64 add;       // (B, O) Element, finish ADD
    u64 y;         // (B, O) Element, or float where finish is FLOAT
    u64 partials;  // float, linear_many with one part per block
    u64 arrivals;  // u32 per block of rows, zero before and after
    u32 outputs;
    u32 inputs;
    u32 batch;
    u32 x_stride;  // elements from session to session
    u32 add_stride;
    u32 y_stride;
    u32 slices;
    u32 finish;
    float eps;
    u32 reserved;
};

// 0: rounded to Element
constexpr u32 FINISH_ADD = 1;    // rounded, then `add` and rounded again
constexpr u32 FINISH_GATE = 2;   // silu(first half) * second half
constexpr u32 FINISH_FLOAT = 3;  // rounded to Element, stored as float

struct NormParams {
    u64 x;      // (B, I) Element
    u64 alpha;  // (I,) Element
    u64 y;      // (B, I) Element
    u32 inputs;
    u32 x_stride;
    u32 y_stride;
    float eps;
};

__device__ __forceinline__ float silu_times(float opened, float value) {
    float a = rounded(opened), b = rounded(value);
    return rounded(rounded(a / (1.0f + expf(-a))) * b);
}

// What finish ADD adds, else 0.
__device__ __forceinline__ float added(const LinearParams& p, u32 b, u32 o) {
    if (p.finish != FINISH_ADD) return 0;
    return widened(((const Element*)p.add)[(u64)b * p.add_stride + o]);
}

// One finished sum. For GATE `value` is the second half's, for ADD what is added.
__device__ __forceinline__ void finish(const LinearParams& p, u32 b, u32 o, float sum,
                                       float value) {
    if (p.finish == FINISH_FLOAT) {
        ((float*)p.y)[(u64)b * p.y_stride + o] = rounded(sum);
        return;
    }
    float y = rounded(sum);
    if (p.finish == FINISH_GATE) y = silu_times(sum, value);
    if (p.finish == FINISH_ADD) y = value + y;
    ((Element*)p.y)[(u64)b * p.y_stride + o] = narrowed(y);
}

__device__ __forceinline__ float normed(float x, float alpha, float scale) {
    return x * (alpha * scale);
}

// 8 elements in turn.
__device__ __forceinline__ float add_squares(float squares, const uint4& x) {
#if LINEAR_ELEMENT != 0
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float low = widened(word(x, j) & 0xffff), high = widened(word(x, j) >> 16);
        squares = fmaf(low, low, squares);
        squares = fmaf(high, high, squares);
    }
#endif
    return squares;
}

// Of a row of `inputs` elements, in an order that is always the same.
__device__ float row_scale(const Element* x, u32 inputs, float eps, float* shared) {
    float squares = 0;
    bool is_wide = sizeof(Element) == 2 && inputs % 8 == 0 && (u64)x % 16 == 0;
    for (u32 first = threadIdx.x * 8; first < inputs; first += THREADS * 8) {
        if (is_wide) {
            squares = add_squares(squares, load_row(x + first));
            continue;
        }
        for (u32 i = first; i < min(first + 8, inputs); i++) {
            float value = widened(x[i]);
            squares = fmaf(value, value, squares);
        }
    }
    return rsqrtf(block_sum(squares, shared) / inputs + eps);
}

#if LINEAR_TILES == 0

// grid (B). A norm of every row.
extern "C" __global__ void __launch_bounds__(THREADS) norm_rows(NormParams p) {
    __shared__ float sums[WARPS];
    let_others_start();
    wait_for_others();
    const Element* x = (const Element*)p.x + (u64)blockIdx.x * p.x_stride;
    const Element* alpha = (const Element*)p.alpha;
    Element* y = (Element*)p.y + (u64)blockIdx.x * p.y_stride;
    float scale = row_scale(x, p.inputs, p.eps, sums);
    for (u32 i = threadIdx.x; i < p.inputs; i += THREADS)
        y[i] = narrowed(normed(widened(x[i]), widened(alpha[i]), scale));
}

// grid (outputs / 8, B / 4). A warp per output and up to four sessions.
extern "C" __global__ void __launch_bounds__(THREADS) linear_plain(LinearParams p) {
    constexpr int GROUP = 4;
    let_others_start();
    wait_for_others();
    u32 o = blockIdx.x * WARPS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    u32 first = blockIdx.y * GROUP, count = min(p.batch - first, (u32)GROUP);
    if (o >= p.outputs) return;
    float sums[2][GROUP] = {};
    const Element* x = (const Element*)p.x + (u64)first * p.x_stride;
    for (int half = 0; half < (p.finish == FINISH_GATE ? 2 : 1); half++) {
        const Element* w = (const Element*)p.w + ((u64)half * p.outputs + o) * p.inputs;
        for (u32 i = lane; i < p.inputs; i += LANES) {
            float weight = widened(w[i]);
#pragma unroll
            for (int n = 0; n < GROUP; n++)
                if (n < count)
                    sums[half][n] = fmaf(weight, widened(x[n * p.x_stride + i]), sums[half][n]);
        }
    }
#pragma unroll
    for (int n = 0; n < GROUP; n++) {
        for (int half = 0; half < 2; half++)
            for (int step = 16; step; step /= 2)
                sums[half][n] += __shfl_xor_sync(~0u, sums[half][n], step);
        if (lane == n && n < count) {
            bool adds = p.finish == FINISH_ADD;
            finish(p, first + n, o, sums[0][n], adds ? added(p, first + n, o) : sums[1][n]);
        }
    }
}

#endif  // LINEAR_TILES
#if LINEAR_ELEMENT != 0

__device__ __forceinline__ void mma(float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if LINEAR_ELEMENT == 1
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Row of the matrix; GATE: of its second half. Rows past the last are read as the last.
__device__ __forceinline__ u32 clamped_row(const LinearParams& p, u32 row, bool second) {
    return min(row, p.outputs - 1) + (second ? p.outputs : 0);
}

// A stage holds 64 inputs of some rows, 128 bytes each, as eight pieces of 16. A row's pieces trade
// places by its number, so that one piece of eight rows lies in all banks; wgmma knows this order.
__device__ __forceinline__ u32 place_of(u32 row, u32 piece) {
    return row * 128 + (piece ^ row % 8) * 16;
}

__device__ __forceinline__ void copy_async(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source)
                 : "memory");
}

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// All copies but those of the last LEFT groups are there.
template <int LEFT>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four 8 x 8 matrices; lanes 8 k .. 8 k + 7 say where the rows of matrix k lie.
__device__ __forceinline__ uint4 load_matrices(u32 at) {
    uint4 x;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
    return x;
}

__device__ __forceinline__ void store_shared(u32 at, const uint4& x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
}

#if LINEAR_TILES == 0

__device__ __forceinline__ uint4 normed8(const uint4& x, const uint4& alpha, float scale) {
    uint4 y;
    u32* to = (u32*)&y;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 v = word(x, j), a = word(alpha, j);
        Element low = narrowed(normed(widened(v & 0xffff), widened(a & 0xffff), scale));
        Element high = narrowed(normed(widened(v >> 16), widened(a >> 16), scale));
        to[j] = low | (u32)high << 16;
    }
    return y;
}

constexpr int STAGES = LINEAR_STAGES;
constexpr u32 TILE_BYTES = 16 * 128;

// grid (rows / (16 * 8 / slices)), up to 8 sessions. A warp has 16 rows and one part of the sum,
// and stages of its own; warps of one block have all parts of their rows. NORM: one session,
// normed in shared memory first.
template <bool NORM>
__device__ __forceinline__ void linear_few(const LinearParams& p) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ float sums[WARPS];
    let_others_start();
    u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, t = lane % 4;
    u32 slice = warp % p.slices, tile = warp / p.slices, tiles = WARPS / p.slices;
    bool is_gate = p.finish == FINISH_GATE;
    u32 stripe = is_gate ? tiles / 2 : tiles;  // 16-row tiles of outputs per block
    bool second = is_gate && tile >= stripe;
    u32 row0 = (blockIdx.x * stripe + tile % stripe) * 16;
    u32 length = p.inputs / p.slices, steps = length / 64;
    u64 row_bytes = (u64)p.inputs * 2;

    u32 stage_bytes = TILE_BYTES + (NORM ? 0 : p.batch * 128);
    u32 base = (u32)__cvta_generic_to_shared(shared);
    u32 normed_bytes = NORM ? (p.inputs * 2 + 127) / 128 * 128 : 0;
    u32 first = base + normed_bytes + warp * STAGES * stage_bytes;
    u32 end = first + STAGES * stage_bytes;

    // What this lane copies: piece `piece` of rows `copied`, `copied` + 4, ...
    u32 piece = lane % 8, copied = lane / 8;
    u32 places[4];
#pragma unroll
    for (u32 k = 0; k < 4; k++) places[k] = place_of(copied + 4 * k, piece);
    const u8* w = (const u8*)p.w + (u64)slice * length * 2 + piece * 16;
    const u8* weights[4];
#pragma unroll
    for (u32 k = 0; k < 4; k++)
        weights[k] = w + clamped_row(p, row0 + copied + 4 * k, second) * row_bytes;
    u32 into = first;
#pragma unroll
    for (u32 s = 0; s < STAGES - 1; s++) {
        if (s < steps) {
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                copy_async(into + places[k], weights[k]);
                weights[k] += 128;
            }
        }
        commit_copies();
        into += stage_bytes;
    }
    constexpr int HELD = 2;  // eights of inputs that a thread norms from registers
    const Element* alpha = (const Element*)p.alpha;
    u32 first_input = threadIdx.x * 8;
    uint4 alphas[HELD];
    if (NORM)
#pragma unroll
        for (u32 k = 0; k < HELD; k++)
            if (first_input + k * THREADS * 8 < p.inputs)
                alphas[k] = load_row(alpha + first_input + k * THREADS * 8);
    wait_for_others();

    const u8* x = (const u8*)p.x + ((u64)copied * p.x_stride + (u64)slice * length) * 2 +
                  piece * 16;
    u64 x_apart = (u64)p.x_stride * 8;  // bytes from a session to the fourth after it
    u32 x_from = 0;
    if (NORM) {
        const Element* row = (const Element*)p.x;
        uint4 values[HELD];
        float squares = 0;
#pragma unroll
        for (u32 k = 0; k < HELD; k++)
            if (first_input + k * THREADS * 8 < p.inputs)
                values[k] = load_row(row + first_input + k * THREADS * 8);
#pragma unroll
        for (u32 k = 0; k < HELD; k++)
            if (first_input + k * THREADS * 8 < p.inputs)
                squares = add_squares(squares, values[k]);
        for (u32 i = first_input + HELD * THREADS * 8; i < p.inputs; i += THREADS * 8)
            squares = add_squares(squares, load_row(row + i));
        float scale = rsqrtf(block_sum(squares, sums) / p.inputs + p.eps);
#pragma unroll
        for (u32 k = 0; k < HELD; k++) {
            u32 i = first_input + k * THREADS * 8;
            if (i < p.inputs) store_shared(base + i * 2, normed8(values[k], alphas[k], scale));
        }
        for (u32 i = first_input + HELD * THREADS * 8; i < p.inputs; i += THREADS * 8)
            store_shared(base + i * 2, normed8(load_row(row + i), load_row(alpha + i), scale));
        __syncthreads();
        x_from = base + slice * length * 2 + lane / 8 * 16;
    } else {
        // The first stages' rows come by way of registers, so that nobody waits for all weights.
        uint4 rows[STAGES - 1][2];
#pragma unroll
        for (u32 s = 0; s < STAGES - 1; s++)
#pragma unroll
            for (u32 k = 0; k < 2; k++)
                if (s < steps && copied + 4 * k < p.batch)
                    rows[s][k] = load_row(x + s * 128 + k * x_apart);
#pragma unroll
        for (u32 s = 0; s < STAGES - 1; s++)
#pragma unroll
            for (u32 k = 0; k < 2; k++)
                if (s < steps && copied + 4 * k < p.batch)
                    store_shared(first + s * stage_bytes + TILE_BYTES + places[k], rows[s][k]);
        x += (STAGES - 1) * 128;
    }

    float sum[4] = {};
    // Matrices of weights: rows 0..7, rows 8..15, both again 8 inputs on. Of x: 32 inputs in turn.
    u32 from = first, w_row = lane % 16, w_piece = lane / 16;
    u32 x_row = min(lane % 8, p.batch - 1), x_piece = lane / 8;
    for (u32 step = 0; step < steps; step++) {
        wait_copies<STAGES - 2>();
        __syncwarp();
        if (step + STAGES - 1 < steps) {
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                copy_async(into + places[k], weights[k]);
                weights[k] += 128;
            }
            if (!NORM) {
#pragma unroll
                for (u32 k = 0; k < 2; k++)
                    if (copied + 4 * k < p.batch)
                        copy_async(into + TILE_BYTES + places[k], x + k * x_apart);
                x += 128;
            }
        }
        commit_copies();
        into = into + stage_bytes == end ? first : into + stage_bytes;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 at = NORM ? x_from + step * 128 + half * 64
                          : from + TILE_BYTES + place_of(x_row, half * 4 + x_piece);
            uint4 rows = load_matrices(at);
            uint4 a = load_matrices(from + place_of(w_row, half * 4 + w_piece));
            uint4 b = load_matrices(from + place_of(w_row, half * 4 + 2 + w_piece));
            mma(sum, a.x, a.y, a.z, a.w, rows.x, rows.y);
            mma(sum, b.x, b.y, b.z, b.w, rows.z, rows.w);
        }
        from = from + stage_bytes == end ? first : from + stage_bytes;
    }

    // A warp's sums lie where its stages were: [row][session], rows 9 apart.
    float* own = (float*)(shared + (first - base));
    __syncwarp();
    own[g * 9 + 2 * t] = sum[0];
    own[g * 9 + 2 * t + 1] = sum[1];
    own[(g + 8) * 9 + 2 * t] = sum[2];
    own[(g + 8) * 9 + 2 * t + 1] = sum[3];
    __syncthreads();
    const float* sums0 = (const float*)(shared + normed_bytes);
    u32 apart = STAGES * stage_bytes / 4;  // floats from warp to warp
    for (u32 i = threadIdx.x; i < stripe * 16 * 8; i += THREADS) {
        u32 r = i % (stripe * 16), b = i / (stripe * 16), o = blockIdx.x * stripe * 16 + r;
        if (b >= p.batch || o >= p.outputs) continue;
        float total[2] = {0, 0};
        for (u32 half = 0; half < (is_gate ? 2 : 1); half++) {
            const float* at = sums0 + (half * stripe + r / 16) * p.slices * apart + r % 16 * 9 + b;
            total[half] = at[0];
            for (u32 k = 1; k < p.slices; k++) total[half] += at[k * apart];
        }
        finish(p, b, o, total[0], is_gate ? total[1] : added(p, b, o));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) linear_few_rows(LinearParams p) {
    linear_few<false>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS) linear_few_normed(LinearParams p) {
    linear_few<true>(p);
}

#else  // LINEAR_TILES

constexpr int TILES = LINEAR_TILES;  // of 8 sessions each
constexpr int SESSIONS = 8 * TILES;
constexpr int ROWS = LINEAR_HEIGHT;
constexpr int STAGES = LINEAR_STAGES;
constexpr u32 STAGE_BYTES = (ROWS + SESSIONS) * 128;  // rows of weights, then sessions of x
constexpr int WIDTH = 2 * ROWS;                       // threads: four warps for 64 rows
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool HAS_WGMMA = true;
#else
constexpr bool HAS_WGMMA = false;
#endif

// Sums of one warp. With wgmma four warps have 64 rows and all sessions, 16 rows each, and two
// steps are under way; else two by two warps have 32 rows and half of the sessions each.
constexpr int MT = HAS_WGMMA ? 1 : 2, NT = HAS_WGMMA ? TILES : TILES / 2;
constexpr int LAG = HAS_WGMMA ? 2 : 1;  // steps until a stage is free again

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

// The 64 inputs of one stage. `more`: sums go on.
__device__ __forceinline__ void sum_stage(float (&sum)[MT][NT][4], u32 from, u32 more) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int CALLS = NT * 4 <= 40 ? 1 : 2, COUNT = NT * 4 / CALLS;
    u32 a = from + threadIdx.x / 128 * 64 * 128, b = from + ROWS * 128;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (u32 k = 0; k < 4; k++)
#pragma unroll
        for (int call = 0; call < CALLS; call++)
            multiply<COUNT>(&sum[0][0][0] + call * COUNT, matrix_at(a + k * 32),
                            matrix_at(b + call * COUNT * 2 * 128 + k * 32), k ? 1 : more);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
    u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    u32 row = warp / 2 * 32 + lane % 16, session = ROWS + warp % 2 * (NT * 8) + lane % 8;
    if (!more)
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) sum[m][n][i] = 0;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        uint4 a[MT], b[MT], rows[NT];
#pragma unroll
        for (int m = 0; m < MT; m++) {
            a[m] = load_matrices(from + place_of(row + m * 16, half * 4 + lane / 16));
            b[m] = load_matrices(from + place_of(row + m * 16, half * 4 + 2 + lane / 16));
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
            rows[n] = load_matrices(from + place_of(session + n * 8, half * 4 + lane / 8));
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int m = 0; m < MT; m++)
                mma(sum[m][n], a[m].x, a[m].y, a[m].z, a[m].w, rows[n].x, rows[n].y);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int m = 0; m < MT; m++)
                mma(sum[m][n], b[m].x, b[m].y, b[m].z, b[m].w, rows[n].z, rows[n].w);
    }
#endif
}

// Sums of all but the last LEFT stages are there.
template <int LEFT>
__device__ __forceinline__ void wait_sums(float (&sum)[MT][NT][4]) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    if (LEFT == 0)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) asm volatile("" : "+f"(sum[0][n][i])::"memory");
#endif
}

// grid (blocks of ROWS outputs (GATE: ROWS / 2) * PARTS).
extern "C" __global__ void CLUSTER __launch_bounds__(WIDTH) linear_many(LinearParams p) {
    constexpr u32 COPIED = WIDTH / 8;  // rows that one round of copies covers
    constexpr int W_COPIES = ROWS / COPIED, X_COPIES = (SESSIONS + COPIED - 1) / COPIED;
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u32 arrived;
    let_others_start();
    u32 base = ((u32)__cvta_generic_to_shared(shared) + 1023) / 1024 * 1024;
    u32 end = base + STAGES * STAGE_BYTES;
    u32 warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, t = lane % 4;
    bool is_gate = p.finish == FINISH_GATE;
    constexpr u32 ROWS_BITS = ROWS == 64 ? 6 : ROWS == 128 ? 7 : 8;
    u32 stripe_bits = is_gate ? ROWS_BITS - 1 : ROWS_BITS, stripe = 1 << stripe_bits;
    u32 stripe_index = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
    u32 row0 = stripe_index * stripe;
    u32 slice_steps = p.inputs / p.slices / 64, own_slices = p.slices / PARTS;
    u32 steps = slice_steps * own_slices;
    u64 from_byte = (u64)part * steps * 128;  // into every row
    u64 row_bytes = (u64)p.inputs * 2;

    // What this thread copies: piece `piece` of rows `copied`, `copied` + COPIED, ...
    u32 piece = threadIdx.x % 8, copied = threadIdx.x / 8, place = place_of(copied, piece);
    const u8* weights[W_COPIES];
#pragma unroll
    for (u32 k = 0; k < W_COPIES; k++) {
        u32 r = copied + COPIED * k;
        weights[k] = (const u8*)p.w + clamped_row(p, row0 + r % stripe, r >= stripe) * row_bytes +
                     from_byte + piece * 16;
    }
    const u8* x[X_COPIES];
#pragma unroll
    for (u32 k = 0; k < X_COPIES; k++)
        x[k] = (const u8*)p.x + (u64)min(copied + COPIED * k, p.batch - 1) * p.x_stride * 2 +
               from_byte + piece * 16;

    auto copy_weights = [&](u32 into) {
#pragma unroll
        for (u32 k = 0; k < W_COPIES; k++) {
            copy_async(into + place + k * COPIED * 128, weights[k]);
            weights[k] += 128;
        }
    };
    auto copy_rows = [&](u32 into) {
#pragma unroll
        for (u32 k = 0; k < X_COPIES; k++) {
            if (SESSIONS % COPIED == 0 || k + 1 < X_COPIES || copied + COPIED * k < SESSIONS)
                copy_async(into + (ROWS + COPIED * k) * 128 + place, x[k]);
            x[k] += 128;
        }
    };

    for (u32 s = 0; s < STAGES - LAG; s++)
        if (s < steps) copy_weights(base + s * STAGE_BYTES);
    wait_for_others();
    for (u32 s = 0; s < STAGES - LAG; s++) {
        if (s < steps) copy_rows(base + s * STAGE_BYTES);
        commit_copies();
    }

    float total[MT][NT][4], sum[MT][NT][4];
    u32 into = base + (STAGES - LAG) * STAGE_BYTES, from = base;
    u32 step = 0;
    for (u32 own = 0; own < own_slices; own++) {
        for (u32 done = 0; done < slice_steps; done++, step++) {
            wait_copies<STAGES - LAG - 1>();
            if (HAS_WGMMA) {
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                wait_sums<LAG - 1>(sum);
            }
            __syncthreads();
            if (HAS_WGMMA) sum_stage(sum, from, done);
            if (step + STAGES - LAG < steps) {
                copy_weights(into);
                copy_rows(into);
            }
            commit_copies();
            if (!HAS_WGMMA) sum_stage(sum, from, done);
            into = into + STAGE_BYTES == end ? base : into + STAGE_BYTES;
            from = from + STAGE_BYTES == end ? base : from + STAGE_BYTES;
        }
        wait_sums<0>(sum);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    total[m][n][i] = own ? total[m][n][i] + sum[m][n][i] : sum[m][n][i];
    }

    if (PARTS > 1 && !IS_CLUSTER) {
        constexpr int HELD = MT * NT;
        float4* partials = (float4*)p.partials + (u64)stripe_index * p.slices * HELD * WIDTH;
        u32* arrivals = (u32*)p.arrivals + stripe_index;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
                __stcg(partials + (part * HELD + m * NT + n) * WIDTH + threadIdx.x,
                       make_float4(total[m][n][0], total[m][n][1], total[m][n][2],
                                   total[m][n][3]));
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) arrived = atomicAdd(arrivals, 1);
        __syncthreads();
        if (arrived + 1 != PARTS) return;
        __threadfence();
        if (threadIdx.x == 0) *arrivals = 0;
        const float4* held = partials + threadIdx.x;
        for (u32 k = 0; k < p.slices; k++, held += HELD * WIDTH) {
            float4 more[HELD];
#pragma unroll
            for (int i = 0; i < HELD; i++) more[i] = __ldcg(held + i * WIDTH);
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    float* to = total[m][n];
                    const float4& from = more[m * NT + n];
                    to[0] = k ? to[0] + from.x : from.x;
                    to[1] = k ? to[1] + from.y : from.y;
                    to[2] = k ? to[2] + from.z : from.z;
                    to[3] = k ? to[3] + from.w : from.w;
                }
        }
    }

    // Sums cross shared memory so that a session's outputs are written side by side.
    constexpr u32 PITCH = ROWS + 4;
    u32 m0 = HAS_WGMMA ? warp * 16 : warp / 2 * 32, n0 = HAS_WGMMA ? 0 : warp % 2 * (NT * 8);
    float* out = (float*)(shared + (base - (u32)__cvta_generic_to_shared(shared)));
    wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                out[(n0 + n * 8 + 2 * t + i % 2) * PITCH + m0 + m * 16 + g + i / 2 * 8] =
                    total[m][n][i];
    __syncthreads();
    constexpr int ROUND = IS_CLUSTER ? 8 : 16;  // outputs for which all is read at once
    constexpr u32 APART = IS_CLUSTER ? PARTS * WIDTH : WIDTH;
    u32 count = stripe * p.batch, out_at = base;
    if (IS_CLUSTER) meet_cluster();
    // Of a cluster every block finishes a share of the outputs.
    u32 start = (IS_CLUSTER ? part * WIDTH : 0) + threadIdx.x;
    for (u32 first = start; first < count; first += ROUND * APART) {
        float sums[ROUND], values[ROUND];
#pragma unroll
        for (int k = 0; k < ROUND; k++) {
            u32 i = first + k * APART, r = i & (stripe - 1), b = i >> stripe_bits, o = row0 + r;
            if (i >= count || o >= p.outputs) continue;
            u32 at = b * PITCH + r;
            values[k] = added(p, b, o);
            if (IS_CLUSTER) {
#pragma unroll
                for (int rank = 0; rank < PARTS; rank++) {
                    float more = load_other(out_at + at * 4, rank);
                    sums[k] = rank ? sums[k] + more : more;
                    if (is_gate) {
                        more = load_other(out_at + (at + stripe) * 4, rank);
                        values[k] = rank ? values[k] + more : more;
                    }
                }
            } else {
                sums[k] = out[at];
                if (is_gate) values[k] = out[at + stripe];
            }
        }
#pragma unroll
        for (int k = 0; k < ROUND; k++) {
            u32 i = first + k * APART, r = i & (stripe - 1), b = i >> stripe_bits, o = row0 + r;
            if (i < count && o < p.outputs) finish(p, b, o, sums[k], values[k]);
        }
    }
    if (IS_CLUSTER) meet_cluster();  // nobody's memory goes before all have read it
}

#endif  // LINEAR_TILES
#endif  // LINEAR_ELEMENT
