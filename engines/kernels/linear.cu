// y[b, o] = finish(sum over i of w[o, i] * x[b, i]): every product of the language model.
//
// Weights are read once, as they lie in the file, and set the pace; a session more costs its own
// rows. The sum over i is cut into `slices` equal parts by the shape alone. A part is summed by one
// chain of products over 16 inputs each in ascending order, then parts are added in order. Who
// computes which part of which row differs between the kernels below, bits do not (that wgmma and
// mma agree in them is the hardware's doing, and tested):
//
//   linear_few_*  (linear_few.cuh) up to 8 sessions: every warp has stages of its own, and a block
//                 all parts of its rows
//   linear_many   (linear_many.cuh) more: a block has all parts of its rows one after the other, or
//                 one of them; then the last to arrive adds them up, or a cluster does together
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

#if LINEAR_ELEMENT != 0

constexpr int HELD = 2;  // eights of inputs that a thread norms from registers

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

// What of alpha this thread will need; weights, so before anybody is waited for.
__device__ __forceinline__ void load_alphas(uint4 (&alphas)[HELD], const Element* alpha,
                                            u32 inputs) {
#pragma unroll
    for (u32 k = 0; k < HELD; k++) {
        u32 i = (threadIdx.x + k * THREADS) * 8;
        if (i < inputs) alphas[k] = load_row(alpha + i);
    }
}

// The norm of a row of eights: store(i, eight) for all of this thread's. Reads all it can before
// it writes, as nothing that is read may overtake what is written.
template <class Store>
__device__ __forceinline__ void norm_eights(const Element* row, const Element* alpha,
                                            const uint4 (&alphas)[HELD], u32 inputs, float eps,
                                            float* sums, Store store) {
    uint4 values[HELD];
    float squares = 0;
    u32 first = threadIdx.x * 8, rest = first + HELD * THREADS * 8;
#pragma unroll
    for (u32 k = 0; k < HELD; k++)
        if (first + k * THREADS * 8 < inputs) values[k] = load_row(row + first + k * THREADS * 8);
#pragma unroll
    for (u32 k = 0; k < HELD; k++)
        if (first + k * THREADS * 8 < inputs) squares = add_squares(squares, values[k]);
    for (u32 i = rest; i < inputs; i += THREADS * 8)
        squares = add_squares(squares, load_row(row + i));
    float scale = rsqrtf(block_sum(squares, sums) / inputs + eps);
#pragma unroll
    for (u32 k = 0; k < HELD; k++) {
        u32 i = first + k * THREADS * 8;
        if (i < inputs) store(i, normed8(values[k], alphas[k], scale));
    }
    for (u32 i = rest; i < inputs; i += THREADS * 8)
        store(i, normed8(load_row(row + i), load_row(alpha + i), scale));
}

#endif  // LINEAR_ELEMENT

// grid (B). A norm of every row.
extern "C" __global__ void __launch_bounds__(THREADS) norm_rows(NormParams p) {
    __shared__ float sums[WARPS];
    let_others_start();
    const Element* x = (const Element*)p.x + (u64)blockIdx.x * p.x_stride;
    const Element* alpha = (const Element*)p.alpha;
    Element* y = (Element*)p.y + (u64)blockIdx.x * p.y_stride;
#if LINEAR_ELEMENT != 0
    if ((p.inputs | p.x_stride | p.y_stride) % 8 == 0 && (p.x | p.alpha | p.y) % 16 == 0) {
        uint4 alphas[HELD];
        load_alphas(alphas, alpha, p.inputs);
        wait_for_others();
        norm_eights(x, alpha, alphas, p.inputs, p.eps, sums,
                    [&](u32 i, const uint4& eight) { *(uint4*)(y + i) = eight; });
        return;
    }
#endif
    wait_for_others();
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
#include "linear_few.cuh"
#elif LINEAR_WIDE
#include "linear_wide.cuh"
#else
#include "linear_many.cuh"
#endif

#endif  // LINEAR_ELEMENT
