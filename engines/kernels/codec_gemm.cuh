// Every convolution and matrix of the codec as one product: rows of windows times a matrix (K, N).
//
// Between kernels activations lie step by step, channels side by side, with what a convolution
// remembers in front: (B, remembered + T, C). A window of k steps is then k*C neighbouring numbers,
// and the windows of a session are rows `a_row` apart, which overlap. A transposed convolution
// whose kernel is two strides long is the same with windows of two steps and N = stride * Cout: row
// t makes the stride of output that steps t-1 and t share, row T the tail that is kept.
//
// float32 on tensor cores: each number is split into two of 11 bits, x = hi + lo, and a product is
// lo*hi + hi*lo + hi*hi. What is left out is below 2^-21 of a product, less than what adding up
// rounds away. Tensor cores cut off where they add, so sums leave them every 32 numbers.
//
// The order of every sum is fixed by the layer alone: 32 numbers meet in a tensor core, those sums
// are added upwards into a part, parts upwards into the result. How rows and columns are cut into
// tiles changes nothing, nor who adds, so the bits of a session do not depend on the batch. Sizes
// are chosen in codec_gemm.py.

typedef unsigned int u32;
typedef unsigned char u8;
typedef long long i64;

struct GemmParams {
    const float* a;       // row t of session b: a + b*a_session + t*a_row, k numbers
    const float* w;       // (k, n)
    const float* bias;    // (bias_n,) or null; column j takes bias[j % bias_n]
    const float* add;     // residual or null, laid out by add_session, add_row
    float* out;           // result, or null
    float* out_elu;       // ELU of the result, or null
    float* parts;         // (parts, total_rows, n) scratch, or null: one part, the result
    const float* tail;    // transposed: (B, n) remembered, channel by channel; else null
    float* tail_next;
    const u8* live;       // (B,) or null: where 0 the tail stays as it was
    int a_session, a_row;
    int rows, total_rows;  // per session, and of all sessions
    int k, n;
    int part;  // numbers of k a block sums, a multiple of 32
    int bias_n;
    int add_session, add_row, out_session, out_row, elu_session, elu_row;
    int steps;   // transposed: the row that is the tail
    int stride;  // transposed
    int gelu;    // 1: out is the GELU of the result
    int parts_count;  // for the launch in which they meet
};

__device__ __forceinline__ float elu(float x) { return x > 0.0f ? x : expf(x) - 1.0f; }
__device__ __forceinline__ float gelu(float x) {
    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
}

__device__ __forceinline__ void copy_async(float* to, const float* from, bool there) {
    u32 at = (u32)__cvta_generic_to_shared(to);
    int bytes = there ? 16 : 0;  // the rest is filled with zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(at), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LEFT>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// A launch may begin before the one in front of it has ended (programmatic dependent launch): it
// may then read weights, and nothing else until this returns.
__device__ __forceinline__ void wait_for_others() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ float4 plus(float4 x, float4 y) {
    return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

// x = hi + lo, hi rounded to the 11 bits a tensor core takes; of lo it takes the first 11.
__device__ __forceinline__ void split(float x, u32& hi, u32& lo) {
    float wide = __fmul_rn(x, 8193.0f);
    float high = __fsub_rn(wide, __fsub_rn(wide, x));
    hi = __float_as_uint(high);
    lo = __float_as_uint(__fsub_rn(x, high));
}

__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A warp: 16*NT columns times 8*MT rows, 8 numbers of k from shared memory. w: (k, n), x: (m, k),
// both from this lane's place on: see w_place, x_place.
template <int NT, int MT, int W_PITCH, int X_PITCH>
__device__ __forceinline__ void multiply_8(float (&acc)[NT][MT][4], const float* w,
                                           const float* x) {
    u32 a_hi[NT][4], a_lo[NT][4];
#pragma unroll
    for (int i = 0; i < NT; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            split(w[e / 2 * 4 * W_PITCH + i * 16 + e % 2 * 8], a_hi[i][e], a_lo[i][e]);
#pragma unroll
    for (int j = 0; j < MT; ++j) {
        u32 b_hi[2], b_lo[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) split(x[j * 8 * X_PITCH + e * 4], b_hi[e], b_lo[e]);
#pragma unroll
        for (int i = 0; i < NT; ++i) multiply(acc[i][j], a_lo[i], b_hi);
#pragma unroll
        for (int i = 0; i < NT; ++i) multiply(acc[i][j], a_hi[i], b_lo);
#pragma unroll
        for (int i = 0; i < NT; ++i) multiply(acc[i][j], a_hi[i], b_hi);
    }
}

template <int W_PITCH>
__device__ __forceinline__ int w_place() {
    int lane = threadIdx.x % 32;
    return lane % 4 * W_PITCH + lane / 4;
}
template <int X_PITCH>
__device__ __forceinline__ int x_place() {
    int lane = threadIdx.x % 32;
    return lane / 4 * X_PITCH + lane % 4;
}

template <int NT, int MT>
__device__ __forceinline__ void clear(float (&x)[NT][MT][4]) {
#pragma unroll
    for (int i = 0; i < NT; ++i)
#pragma unroll
        for (int j = 0; j < MT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[i][j][e] = 0.0f;
}

// to += x, x = 0.
template <int NT, int MT>
__device__ __forceinline__ void add_up(float (&to)[NT][MT][4], float (&x)[NT][MT][4]) {
#pragma unroll
    for (int i = 0; i < NT; ++i)
#pragma unroll
        for (int j = 0; j < MT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) to[i][j][e] += x[i][j][e], x[i][j][e] = 0.0f;
}

// Fragments to shared memory as (m, n).
template <int NT, int MT, int PITCH>
__device__ __forceinline__ void lay_down(float* tile, const float (&x)[NT][MT][4]) {
    int lane = threadIdx.x % 32;
    float* at = tile + lane % 4 * 2 * PITCH + lane / 4;
#pragma unroll
    for (int i = 0; i < NT; ++i)
#pragma unroll
        for (int j = 0; j < MT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                at[(j * 8 + e % 2) * PITCH + i * 16 + e / 2 * 8] = x[i][j][e];
}

// Sum of all parts of four columns, upwards.
__device__ __forceinline__ float4 sum_parts(const float* parts, i64 at, i64 stride, int count) {
    float4 v = __ldcg((const float4*)(parts + at));
    int s = 1;
    for (; s + 3 < count; s += 4) {  // all four on their way before the first is added
        float4 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = __ldcg((const float4*)(parts + at + (s + i) * stride));
#pragma unroll
        for (int i = 0; i < 4; ++i) v = plus(v, x[i]);
    }
    for (; s < count; ++s) v = plus(v, __ldcg((const float4*)(parts + at + s * stride)));
    return v;
}

// Four neighbouring columns of all rows: what is the same for each of them.
struct Columns {
    int n;
    int tail_at;  // transposed: place of the first in (Cout, stride)
    float4 bias;
};

__device__ __forceinline__ Columns find_columns(const GemmParams& p, int n) {
    Columns c;
    c.n = n, c.tail_at = 0, c.bias = make_float4(0, 0, 0, 0);
    int at = n;
    if (p.tail) {
        int j = n / p.bias_n;
        at = n - j * p.bias_n;
        c.tail_at = at * p.stride + j;
    }
    if (p.bias) c.bias = __ldg((const float4*)(p.bias + at));
    return c;
}

__device__ __forceinline__ const float4* residual(const GemmParams& p, int b, int t, int n) {
    return (const float4*)(p.add + (i64)b * p.add_session + (i64)t * p.add_row + n);
}

// One row of them, summed: bias, residual, activation, and where it goes.
__device__ __forceinline__ void emit(const GemmParams& p, const Columns& c, int b, int t, float4 v,
                                     float4 extra) {
    if (p.tail && (t == 0 || t == p.steps)) {
        i64 at = (i64)b * p.n + c.tail_at;
        if (t == p.steps) {
            bool live = !p.live || p.live[b];
            float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                p.tail_next[at + i * p.stride] = live ? x[i] : p.tail[at + i * p.stride];
            return;
        }
        v = plus(v, make_float4(p.tail[at], p.tail[at + p.stride], p.tail[at + 2 * p.stride],
                                p.tail[at + 3 * p.stride]));
    }
    if (p.bias) v = plus(v, c.bias);
    if (p.add) v = plus(extra, v);
    if (p.gelu) v = make_float4(gelu(v.x), gelu(v.y), gelu(v.z), gelu(v.w));
    if (p.out) *(float4*)(p.out + (i64)b * p.out_session + (i64)t * p.out_row + c.n) = v;
    if (p.out_elu)
        *(float4*)(p.out_elu + (i64)b * p.elu_session + (i64)t * p.elu_row + c.n) =
            make_float4(elu(v.x), elu(v.y), elu(v.z), elu(v.w));
}

// What becomes of a tile of sums in shared memory, (BM, BN) with PITCH. A thread has four columns,
// and of them every STEP-th row.
template <int BM, int BN, int PITCH, int THREADS>
__device__ __forceinline__ void finish(const GemmParams& p, const float* tile, int m0, int n0) {
    constexpr int STEP = THREADS / (BN / 4), TOGETHER = BM / STEP < 4 ? BM / STEP : 4;
    static_assert(THREADS % (BN / 4) == 0 && (BM % STEP == 0 || BM < STEP), "uneven");
    int column = threadIdx.x % (BN / 4) * 4, first = threadIdx.x / (BN / 4), n = n0 + column;
    int end = min(BM, p.total_rows - m0);
    if (n >= p.n) return;
    const float* from = tile + column;
    if (p.parts) {
        float* to = p.parts + ((i64)blockIdx.z * p.total_rows + m0) * p.n + n;
        for (int row = first; row < end; row += STEP)
            __stcg((float4*)(to + (i64)row * p.n), *(const float4*)(from + row * PITCH));
        return;
    }
    Columns columns = find_columns(p, n);
    int m = m0 + first, b = m / p.rows, t = m - b * p.rows;
    constexpr int ROUNDS = TOGETHER < 1 ? 1 : TOGETHER;
#pragma unroll 1
    for (int row = first; row < end; row += STEP * ROUNDS) {
        float4 extra[ROUNDS];
        int bs[ROUNDS], ts[ROUNDS];
#pragma unroll
        for (int u = 0; u < ROUNDS; ++u) {
            bs[u] = b, ts[u] = t;
            extra[u] = make_float4(0, 0, 0, 0);
            if (p.add && row + u * STEP < end) extra[u] = *residual(p, b, t, n);
            t += STEP;
            while (t >= p.rows) t -= p.rows, ++b;
        }
#pragma unroll
        for (int u = 0; u < ROUNDS; ++u)
            if (row + u * STEP < end)
                emit(p, columns, bs[u], ts[u],
                     *(const float4*)(from + (row + u * STEP) * PITCH), extra[u]);
    }
}

// The residual of a tile is read last and comes from far: it is sent for in time.
template <int BM, int BN, int THREADS>
__device__ __forceinline__ void send_for_residual(const GemmParams& p, int m0, int n0) {
    if (!p.add || p.parts) return;
    constexpr int LINE = 32;  // numbers
    for (int i = threadIdx.x; i < BM * (BN / LINE); i += THREADS) {
        int m = m0 + i / (BN / LINE), n = n0 + i % (BN / LINE) * LINE;
        if (m >= p.total_rows || n >= p.n) continue;
        int b = m / p.rows;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(residual(p, b, m - b * p.rows, n)));
    }
}

// For many rows: WN x WM warps share BK numbers of k at a time.
template <int WN, int WM, int NT, int MT, int STAGES>
__device__ __forceinline__ void gemm_wide(const GemmParams& p) {
    constexpr int BK = 16, BN = WN * NT * 16, BM = WM * MT * 8, THREADS = WN * WM * 32;
    constexpr int W_PITCH = BN + 8, X_PITCH = BK + 4, T_PITCH = BN + 4;  // different banks
    constexpr int W_FLOATS = BK * W_PITCH, STAGE = W_FLOATS + BM * X_PITCH;
    constexpr int X_STEP = THREADS / (BK / 4);  // rows between copies of a thread
    constexpr int X_COPIES = (BM + X_STEP - 1) / X_STEP;
    constexpr int W_STEP = THREADS / (BN / 4), W_COPIES = (BK + W_STEP - 1) / W_STEP;
    static_assert(THREADS % (BN / 4) == 0, "a thread copies the same columns of several rows");
    constexpr int FLOATS = STAGES * STAGE;
    __shared__ __align__(16) float shared[FLOATS > BM * T_PITCH ? FLOATS : BM * T_PITCH];
    int tid = threadIdx.x, warp = tid / 32;
    int n0 = blockIdx.x * BN, m0 = blockIdx.y * BM;
    int first = blockIdx.z * p.part, left = min(p.k - first, p.part);
    int tiles = (left + BK - 1) / BK;

    int x_k = tid % (BK / 4) * 4, x_row = tid / (BK / 4);
    const float* x_from[X_COPIES];
    bool x_there[X_COPIES];
#pragma unroll
    for (int i = 0; i < X_COPIES; ++i) {
        int row = x_row + i * X_STEP, m = m0 + row;
        int b = m / p.rows, t = m - b * p.rows;
        x_there[i] = m < p.total_rows && row < BM;
        x_from[i] = p.a + (x_there[i] ? (i64)b * p.a_session + (i64)t * p.a_row : 0) + first + x_k;
    }
    int w_n = tid % (BN / 4) * 4, w_row = tid / (BN / 4);
    bool w_there = n0 + w_n < p.n;
    const float* w_from = p.w + (i64)(first + w_row) * p.n + (w_there ? n0 + w_n : 0);
    i64 w_step = (i64)W_STEP * p.n;
    float* x_to = shared + W_FLOATS + x_row * X_PITCH + x_k;
    float* w_to = shared + w_row * W_PITCH + w_n;
    int x_left = left - x_k, w_left = left - w_row;  // of those not yet sent for
    auto load_x = [&](int stage) {
        bool there = x_left > 0;
#pragma unroll
        for (int i = 0; i < X_COPIES; ++i) {
            if (BM % X_STEP == 0 || x_row + i * X_STEP < BM)
                copy_async(x_to + stage * STAGE + i * X_STEP * X_PITCH,
                           there && x_there[i] ? x_from[i] : p.a, there && x_there[i]);
            x_from[i] += BK;
        }
        x_left -= BK;
    };
    auto load_w = [&](int stage) {
        const float* from = w_from;
#pragma unroll
        for (int i = 0; i < W_COPIES; ++i) {
            bool there = w_there && i * W_STEP < w_left;
            if (BK % W_STEP == 0 || w_row + i * W_STEP < BK)
                copy_async(w_to + stage * STAGE + i * W_STEP * W_PITCH, there ? from : p.w, there);
            from += w_step;
        }
        w_from += (i64)BK * p.n;
        w_left -= BK;
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
        if (s < tiles) load_w(s);
    wait_for_others();
    let_next_begin();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < tiles) load_x(s);
        copy_commit();
    }
    send_for_residual<BM, BN, THREADS>(p, m0, n0);
    float acc[NT][MT][4], sum[NT][MT][4];
    clear(acc);
    clear(sum);
    int w_at = warp % WN * NT * 16, x_at = warp / WN * MT * 8;
    const float* w = shared + w_at + w_place<W_PITCH>();
    const float* x = shared + W_FLOATS + x_at * X_PITCH + x_place<X_PITCH>();
    int stage = 0, next = STAGES - 1;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        if (tile + STAGES - 1 < tiles) {
            load_x(next);
            load_w(next);
        }
        copy_commit();
        const float* w_now = w + stage * STAGE;
        const float* x_now = x + stage * STAGE;
#pragma unroll
        for (int k = 0; k < BK; k += 8)
            multiply_8<NT, MT, W_PITCH, X_PITCH>(acc, w_now + k * W_PITCH, x_now + k);
        if (tile % 2) add_up(sum, acc);  // every 32
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }
    if (tiles % 2) add_up(sum, acc);
    __syncthreads();  // the last copies have been read
    lay_down<NT, MT, T_PITCH>(shared + x_at * T_PITCH + w_at, sum);
    __syncthreads();
    finish<BM, BN, T_PITCH, THREADS>(p, shared, m0, n0);
}

// For few rows, where time goes into reading the matrix: a warp takes 64 numbers of k, with copies
// of its own, and a block of eight warps a part. Shared memory is asked for at launch.
constexpr int DEEP_WARPS = 8, DEEP_CHUNK = 64;

template <int NT, int MT, int BK, int STAGES>
__device__ __forceinline__ void gemm_deep(const GemmParams& p) {
    constexpr int BN = NT * 16, BM = MT * 8, THREADS = DEEP_WARPS * 32, TILES = DEEP_CHUNK / BK;
    constexpr int W_PITCH = BN == 16 ? BN : BN + 8, X_PITCH = BK + 4, T_PITCH = BN + 4;
    constexpr int W_FLOATS = BK * W_PITCH, STAGE = W_FLOATS + BM * X_PITCH;
    constexpr int AHEAD = STAGES == 1 ? 1 : STAGES - 1;
    static_assert(BK == 64 || BK == 16, "all at once, or in turns of half a sum");
    extern __shared__ __align__(16) float shared[];
    __shared__ i64 row_at[BM];  // of A; below 0: there is no such row
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* mine = shared + warp * STAGES * STAGE;
    int n0 = blockIdx.x * BN, m0 = blockIdx.y * BM;
    int begin = blockIdx.z * p.part, whole = min(p.k - begin, p.part);
    int first = begin + warp * DEEP_CHUNK, left = min(whole - warp * DEEP_CHUNK, DEEP_CHUNK);
    if (threadIdx.x < BM) {
        int m = m0 + threadIdx.x, b = m / p.rows, t = m - b * p.rows;
        bool there = m < p.total_rows;
        row_at[threadIdx.x] = there ? (i64)b * p.a_session + (i64)t * p.a_row : -1;
    }
    auto load_w = [&](int stage, int k) {
        float* to = mine + stage * STAGE;
#pragma unroll
        for (int at = lane; at < BK * BN / 4; at += 32) {
            int row = at / (BN / 4), n = at % (BN / 4) * 4;
            bool there = row < left - k && n0 + n < p.n;
            const float* from = there ? p.w + (i64)(first + k + row) * p.n + n0 + n : p.w;
            copy_async(to + row * W_PITCH + n, from, there);
        }
    };
    auto load_x = [&](int stage, int k) {
        float* to = mine + stage * STAGE + W_FLOATS;
#pragma unroll
        for (int at = lane; at < BM * BK / 4; at += 32) {
            int row = at / (BK / 4), c = at % (BK / 4) * 4;
            i64 from = row_at[row];
            bool there = c < left - k && from >= 0;
            copy_async(to + row * X_PITCH + c, there ? p.a + from + first + k + c : p.a, there);
        }
    };
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) load_w(s, s * BK);
    __syncthreads();
    wait_for_others();
    let_next_begin();
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) {
        load_x(s, s * BK);
        copy_commit();
    }
    float sums[2][NT][MT][4];  // of the first 32 numbers and the others
    clear(sums[0]);
    clear(sums[1]);
    const float* w = mine + w_place<W_PITCH>();
    const float* x = mine + W_FLOATS + x_place<X_PITCH>();
    if constexpr (STAGES == 1) {
        copy_wait<0>();
        __syncwarp();
#pragma unroll
        for (int k = 0; k < 32; k += 8)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                multiply_8<NT, MT, W_PITCH, X_PITCH>(sums[h], w + (k + 32 * h) * W_PITCH,
                                                     x + k + 32 * h);
    } else {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            copy_wait<AHEAD - 1>();
            __syncwarp();
            if (tile + AHEAD < TILES) {
                load_x((tile + AHEAD) % STAGES, (tile + AHEAD) * BK);
                load_w((tile + AHEAD) % STAGES, (tile + AHEAD) * BK);
            }
            copy_commit();
#pragma unroll
            for (int k = 0; k < BK; k += 8)
                multiply_8<NT, MT, W_PITCH, X_PITCH>(sums[tile / 2],
                                                     w + tile % STAGES * STAGE + k * W_PITCH,
                                                     x + tile % STAGES * STAGE + k);
            __syncwarp();
        }
    }
    __syncthreads();  // everybody's copies have been read
#pragma unroll
    for (int h = 0; h < 2; ++h)
        lay_down<NT, MT, T_PITCH>(shared + (2 * warp + h) * BM * T_PITCH, sums[h]);
    __syncthreads();
    int count = (whole + 31) / 32;
    for (int i = threadIdx.x; i < BM * BN / 4; i += THREADS) {
        float4* at = (float4*)(shared + i / (BN / 4) * T_PITCH + i % (BN / 4) * 4);
        float4 v = make_float4(0, 0, 0, 0);
        for (int c = 0; c < count; ++c) v = plus(v, at[c * (BM * T_PITCH / 4)]);
        *at = v;
    }
    // `finish` reads what the same thread wrote.
    finish<BM, BN, T_PITCH, THREADS>(p, shared, m0, n0);
}
