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
// are added upwards into a chunk, chunks upwards into a part, parts upwards into the result. How
// rows and columns are cut into tiles changes nothing, nor who adds, so the bits of a session do
// not depend on the batch. Sizes are chosen in codec_gemm.py.

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
    float* parts;         // (parts, total_rows, n) scratch
    u32* arrivals;        // one per tile, zero before and after every launch
    const float* tail;    // transposed: (B, n) remembered, channel by channel; else null
    float* tail_next;
    const u8* live;       // (B,) or null: where 0 the tail stays as it was
    int a_session, a_row;
    int rows, total_rows;  // per session, and of all sessions
    int k, n;
    int chunk, span;
    int bias_n;
    int add_session, add_row, out_session, out_row, elu_session, elu_row;
    int steps;   // transposed: the row that is the tail
    int stride;  // transposed
    int gelu;    // 1: out is the GELU of the result
    int reduce;       // 1: whoever comes last adds parts up; 0: the launch that follows does
    int parts_count;  // for that launch
};

__device__ __forceinline__ float elu(float x) { return x > 0.0f ? x : expm1f(x); }
__device__ __forceinline__ float gelu(float x) {
    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
}

__device__ __forceinline__ void copy_async(float* to, const float* from, bool there) {
    u32 at = (u32)__cvta_generic_to_shared(to);
    int bytes = there ? 16 : 0;  // the rest is filled with zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// A launch may begin before the one in front of it has ended (programmatic dependent launch): it may
// then read weights, and nothing else until this returns.
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

// A warp: 16*NT columns times 8*MT rows, 8 numbers of k from shared memory. w: (k, n), x: (m, k).
template <int NT, int MT, int W_PITCH, int X_PITCH>
__device__ __forceinline__ void multiply_8(float (&acc)[NT][MT][4], const float* w,
                                           const float* x) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 a_hi[NT][4], a_lo[NT][4], b_hi[MT][2], b_lo[MT][2];
#pragma unroll
    for (int i = 0; i < NT; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            split(w[(t + e / 2 * 4) * W_PITCH + i * 16 + e % 2 * 8 + g], a_hi[i][e], a_lo[i][e]);
#pragma unroll
    for (int j = 0; j < MT; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            split(x[(j * 8 + g) * X_PITCH + t + e * 4], b_hi[j][e], b_lo[j][e]);
#pragma unroll
    for (int i = 0; i < NT; ++i)
#pragma unroll
        for (int j = 0; j < MT; ++j) multiply(acc[i][j], a_lo[i], b_hi[j]);
#pragma unroll
    for (int i = 0; i < NT; ++i)
#pragma unroll
        for (int j = 0; j < MT; ++j) multiply(acc[i][j], a_hi[i], b_lo[j]);
#pragma unroll
    for (int i = 0; i < NT; ++i)
#pragma unroll
        for (int j = 0; j < MT; ++j) multiply(acc[i][j], a_hi[i], b_hi[j]);
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

// to = is_first ? x : to + x; then x = 0.
template <int NT, int MT>
__device__ __forceinline__ void add_up(float (&to)[NT][MT][4], float (&x)[NT][MT][4],
                                       bool is_first) {
#pragma unroll
    for (int i = 0; i < NT; ++i)
#pragma unroll
        for (int j = 0; j < MT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                to[i][j][e] = is_first ? x[i][j][e] : to[i][j][e] + x[i][j][e];
                x[i][j][e] = 0.0f;
            }
}

// Fragments to shared memory as (m, n); adds: to what lies there.
template <int NT, int MT, int PITCH>
__device__ __forceinline__ void lay_down(float* tile, const float (&x)[NT][MT][4], bool adds) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < NT; ++i)
#pragma unroll
        for (int j = 0; j < MT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float* at = tile + (j * 8 + 2 * t + e % 2) * PITCH + i * 16 + e / 2 * 8 + g;
                *at = adds ? *at + x[i][j][e] : x[i][j][e];
            }
}

// Four neighbouring columns of row t of session b, summed, and what is added to them.
__device__ __forceinline__ float4 add_rest(const GemmParams& p, int b, int t, int n, float4 v) {
    int c = n;
    if (p.tail) {
        if (t == p.steps) return v;
        int j = n / p.bias_n;
        c = n - j * p.bias_n;
        if (t == 0) {
            const float* tail = p.tail + (i64)b * p.n + (i64)c * p.stride + j;
            v = plus(v, make_float4(tail[0], tail[p.stride], tail[2 * p.stride],
                                    tail[3 * p.stride]));
        }
    }
    if (p.bias) v = plus(v, *(const float4*)(p.bias + c));
    if (p.add) v = plus(*(const float4*)(p.add + (i64)b * p.add_session + t * p.add_row + n), v);
    return v;
}

// Where they go, and through which activation.
__device__ __forceinline__ void emit(const GemmParams& p, int b, int t, int n, float4 v) {
    if (p.tail && t == p.steps) {
        int j = n / p.bias_n, c = n - j * p.bias_n;
        i64 at = (i64)b * p.n + (i64)c * p.stride + j;
        float x[4] = {v.x, v.y, v.z, v.w};
        bool live = !p.live || p.live[b];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            p.tail_next[at + i * p.stride] = live ? x[i] : p.tail[at + i * p.stride];
        return;
    }
    if (p.gelu) v = make_float4(gelu(v.x), gelu(v.y), gelu(v.z), gelu(v.w));
    if (p.out) *(float4*)(p.out + (i64)b * p.out_session + (i64)t * p.out_row + n) = v;
    if (p.out_elu)
        *(float4*)(p.out_elu + (i64)b * p.elu_session + (i64)t * p.elu_row + n) =
            make_float4(elu(v.x), elu(v.y), elu(v.z), elu(v.w));
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

// True in every thread of the block that comes last at this tile; it sees all parts.
__device__ __forceinline__ bool comes_last(const GemmParams& p, int tile, int count) {
    __shared__ u32 before;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        before = atomicAdd(p.arrivals + tile, 1u);
        if (before == (u32)count - 1) p.arrivals[tile] = 0;
    }
    __syncthreads();
    __threadfence();
    return before == (u32)count - 1;
}

// What becomes of a tile of sums in shared memory, (BM, BN) with PITCH.
template <int BM, int BN, int PITCH, int THREADS>
__device__ __forceinline__ void finish(const GemmParams& p, float* tile, int m0, int n0) {
    constexpr int TOGETHER = 4, QUADS = BM * BN / 4;
    int tid = threadIdx.x, count = gridDim.z;
    bool to_parts = count > 1 || p.reduce != 1;
    i64 stride = (i64)p.total_rows * p.n;
    if (to_parts) {
        float* part = p.parts + blockIdx.z * stride;
#pragma unroll 1
        for (int i = tid; i < QUADS; i += THREADS) {
            int row = i / (BN / 4), column = i % (BN / 4) * 4, m = m0 + row, n = n0 + column;
            if (m < p.total_rows && n < p.n)
                __stcg((float4*)(part + (i64)m * p.n + n),
                       *(const float4*)(tile + row * PITCH + column));
        }
        if (p.reduce != 1) return;
        if (!comes_last(p, blockIdx.y * gridDim.x + blockIdx.x, count)) return;
    }
    // First all that must be read, several at a time, then the rest: a thread sees its own alone.
#pragma unroll 1
    for (int first = tid; first < QUADS; first += THREADS * TOGETHER) {
        float4 v[TOGETHER];
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            int i = first + u * THREADS, row = i / (BN / 4), column = i % (BN / 4) * 4;
            int m = m0 + row, n = n0 + column;
            if (i >= QUADS || m >= p.total_rows || n >= p.n) continue;
            int b = m / p.rows, t = m - b * p.rows;
            v[u] = to_parts ? sum_parts(p.parts, (i64)m * p.n + n, stride, count)
                            : *(const float4*)(tile + row * PITCH + column);
            v[u] = add_rest(p, b, t, n, v[u]);
        }
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            int i = first + u * THREADS, row = i / (BN / 4), column = i % (BN / 4) * 4;
            if (i < QUADS) *(float4*)(tile + row * PITCH + column) = v[u];
        }
    }
#pragma unroll 1
    for (int i = tid; i < QUADS; i += THREADS) {
        int row = i / (BN / 4), column = i % (BN / 4) * 4, m = m0 + row, n = n0 + column;
        if (m >= p.total_rows || n >= p.n) continue;
        int b = m / p.rows;
        emit(p, b, m - b * p.rows, n, *(const float4*)(tile + row * PITCH + column));
    }
}

// For many rows: WN x WM warps share BK numbers of k at a time and sum `span` chunks in turn.
template <int WN, int WM, int NT, int MT, int STAGES, bool MANY>
__device__ __forceinline__ void gemm_wide(const GemmParams& p) {
    constexpr int BK = 16, BN = WN * NT * 16, BM = WM * MT * 8, THREADS = WN * WM * 32;
    constexpr int W_PITCH = BN + 8, X_PITCH = BK + 4, T_PITCH = BN + 4;  // different banks
    constexpr int W_FLOATS = BK * W_PITCH, X_FLOATS = BM * X_PITCH;
    constexpr int X_STEP = THREADS / (BK / 4);  // rows between copies of a thread
    constexpr int X_COPIES = (BM + X_STEP - 1) / X_STEP;
    constexpr int W_COPIES = (BK * BN / 4 + THREADS - 1) / THREADS;
    constexpr int FLOATS = STAGES * (W_FLOATS + X_FLOATS);
    __shared__ __align__(16) float shared[FLOATS > BM * T_PITCH ? FLOATS : BM * T_PITCH];
    int tid = threadIdx.x, warp = tid / 32;
    int n0 = blockIdx.x * BN, m0 = blockIdx.y * BM;
    int first = blockIdx.z * p.span * p.chunk;
    int end = min(p.k, first + p.span * p.chunk);
    int tiles = (end - first + BK - 1) / BK;

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
    int left = end - first;  // numbers of k not yet copied
    auto load_x = [&](int stage, int k) {
        float* to = shared + stage * (W_FLOATS + X_FLOATS) + W_FLOATS;
        bool there = x_k < left - k;
#pragma unroll
        for (int i = 0; i < X_COPIES; ++i)
            if (BM % X_STEP == 0 || x_row + i * X_STEP < BM)
                copy_async(to + (x_row + i * X_STEP) * X_PITCH + x_k,
                           there && x_there[i] ? x_from[i] + k : p.a, there && x_there[i]);
    };
    auto load_w = [&](int stage, int k) {
        float* to = shared + stage * (W_FLOATS + X_FLOATS);
#pragma unroll
        for (int i = 0; i < W_COPIES; ++i) {
            int at = tid + i * THREADS, row = at / (BN / 4), n = at % (BN / 4) * 4;
            if (BK * BN / 4 % THREADS != 0 && row >= BK) continue;
            bool there = row < left - k && n0 + n < p.n;
            const float* from = there ? p.w + (i64)(first + k + row) * p.n + n0 + n : p.w;
            copy_async(to + row * W_PITCH + n, from, there);
        }
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
        if (s < tiles) load_w(s, s * BK);
    wait_for_others();
    let_next_begin();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < tiles) load_x(s, s * BK);
        copy_commit();
    }
    float acc[NT][MT][4], chunk[NT][MT][4], total[MANY ? NT : 1][MANY ? MT : 1][4];
    clear(acc);
    clear(chunk);
    int w_at = warp % WN * NT * 16, x_at = warp / WN * MT * 8;
    int until = p.chunk / BK, stage = 0, next = STAGES - 1;
    bool is_first = true;
    for (int tile = 0; tile < tiles; ++tile) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        if (tile + STAGES - 1 < tiles) {
            load_x(next, (tile + STAGES - 1) * BK);
            load_w(next, (tile + STAGES - 1) * BK);
        }
        copy_commit();
        const float* w = shared + stage * (W_FLOATS + X_FLOATS);
        const float* x = w + W_FLOATS;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
#pragma unroll
        for (int k = 0; k < BK; k += 8)
            multiply_8<NT, MT, W_PITCH, X_PITCH>(acc, w + k * W_PITCH + w_at,
                                                 x + x_at * X_PITCH + k);
        if (tile % 2) add_up(chunk, acc, false);  // every 32
        if constexpr (MANY)
            if (--until == 0) {
                add_up(total, chunk, is_first);
                until = p.chunk / BK;
                is_first = false;
            }
    }
    if (tiles % 2) add_up(chunk, acc, false);
    if constexpr (MANY) {
        if (until != p.chunk / BK) add_up(total, chunk, is_first);
    }
    __syncthreads();  // the last copies have been read
    float* tile = shared + x_at * T_PITCH + w_at;
    if constexpr (MANY)
        lay_down<NT, MT, T_PITCH>(tile, total, false);
    else
        lay_down<NT, MT, T_PITCH>(tile, chunk, false);
    __syncthreads();
    finish<BM, BN, T_PITCH, THREADS>(p, shared, m0, n0);
}

// For few rows, where time goes into reading the matrix: a warp per chunk of 64, each with copies
// of its own, eight chunks a block. Shared memory is asked for at launch: deep_bytes.
constexpr int DEEP_WARPS = 8, DEEP_CHUNK = 64;

template <int NT, int MT, int BK, int STAGES>
__device__ __forceinline__ void gemm_deep(const GemmParams& p) {
    constexpr int BN = NT * 16, BM = MT * 8, THREADS = DEEP_WARPS * 32, TILES = DEEP_CHUNK / BK;
    constexpr int W_PITCH = BN + 8, X_PITCH = BK + 4, T_PITCH = BN + 4;
    constexpr int W_FLOATS = BK * W_PITCH, X_FLOATS = BM * X_PITCH;
    static_assert(BK == 64 || BK == 32 || BK == 16, "sums leave the tensor cores every 32");
    extern __shared__ __align__(16) float shared[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* mine = shared + warp * STAGES * (W_FLOATS + X_FLOATS);
    int n0 = blockIdx.x * BN, m0 = blockIdx.y * BM;
    int begin = blockIdx.z * p.span * DEEP_CHUNK;
    int chunks = (min(p.k, begin + p.span * DEEP_CHUNK) - begin + DEEP_CHUNK - 1) / DEEP_CHUNK;
    int first = begin + warp * DEEP_CHUNK, left = min(p.k - first, DEEP_CHUNK);
    if (warp >= chunks) left = 0;
    __shared__ i64 row_at[BM];  // of A; below 0: there is no such row
    if (threadIdx.x < BM) {
        int m = m0 + threadIdx.x, b = m / p.rows, t = m - b * p.rows;
        bool there = m < p.total_rows;
        row_at[threadIdx.x] = there ? (i64)b * p.a_session + (i64)t * p.a_row : -1;
    }
    auto load_w = [&](int stage, int k) {
        float* to = mine + stage * (W_FLOATS + X_FLOATS);
#pragma unroll
        for (int at = lane; at < BK * BN / 4; at += 32) {
            int row = at / (BN / 4), n = at % (BN / 4) * 4;
            bool there = row < left - k && n0 + n < p.n;
            const float* from = there ? p.w + (i64)(first + k + row) * p.n + n0 + n : p.w;
            copy_async(to + row * W_PITCH + n, from, there);
        }
    };
    auto load_x = [&](int stage, int k) {
        float* to = mine + stage * (W_FLOATS + X_FLOATS) + W_FLOATS;
#pragma unroll
        for (int at = lane; at < BM * BK / 4; at += 32) {
            int row = at / (BK / 4), c = at % (BK / 4) * 4;
            i64 from = row_at[row];
            bool there = c < left - k && from >= 0;
            copy_async(to + row * X_PITCH + c, there ? p.a + from + first + k + c : p.a, there);
        }
    };
    constexpr int AHEAD = STAGES == 1 ? 1 : STAGES - 1;
#pragma unroll
    for (int s = 0; s < AHEAD; ++s)
        if (s < TILES) load_w(s, s * BK);
    __syncthreads();
    wait_for_others();
    let_next_begin();
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) {
        if (s < TILES) load_x(s, s * BK);
        copy_commit();
    }
    float acc[NT][MT][4], chunk[NT][MT][4];
    clear(acc);
    clear(chunk);
#pragma unroll 1
    for (int tile = 0; tile < TILES; ++tile) {
        copy_wait<AHEAD - 1>();
        __syncwarp();
        const float* w = mine + tile % STAGES * (W_FLOATS + X_FLOATS);
        const float* x = w + W_FLOATS;
        if (STAGES > 1 && tile + AHEAD < TILES) {
            load_x((tile + AHEAD) % STAGES, (tile + AHEAD) * BK);
            load_w((tile + AHEAD) % STAGES, (tile + AHEAD) * BK);
        }
        copy_commit();
#pragma unroll
        for (int k = 0; k < BK; k += 8) {
            multiply_8<NT, MT, W_PITCH, X_PITCH>(acc, w + k * W_PITCH, x + k);
            if (BK > 16 && k % 32 == 24) add_up(chunk, acc, false);
        }
        if (BK == 16 && tile % 2) add_up(chunk, acc, false);
        __syncwarp();
    }
    // Chunks meet upwards.
    for (int turn = 0; turn < chunks; ++turn) {
        __syncthreads();
        if (turn == warp) lay_down<NT, MT, T_PITCH>(shared, chunk, turn > 0);
    }
    __syncthreads();
    finish<BM, BN, T_PITCH, THREADS>(p, shared, m0, n0);
}
