// Every convolution and matrix of the codec as one product: rows of windows times a matrix (K, N).
//
// Between kernels activations lie step by step, channels side by side, with what a convolution
// remembers in front: (B, remembered + T, C). A window of k steps is then k*C neighbouring numbers,
// and the windows of a session are rows `a_row` apart, which overlap. A transposed convolution
// whose kernel is two strides long is the same with windows of two steps and N = stride * Cout: row
// t makes the stride of output that steps t-1 and t share, row T the tail that is kept.
//
// The order of every sum is fixed by the layer alone: k runs upwards within a chunk, chunks are
// added upwards within a span, spans upwards into the result. How rows and columns are cut into
// tiles changes nothing, nor whether a block sums one chunk or all of them, so the bits of a
// session do not depend on the batch. Sizes and orders are chosen in codec_gemm.py.

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
    int chunk, span, chunks;
    int bias_n;
    int add_session, add_row, out_session, out_row, elu_session, elu_row;
    int steps;   // transposed: the row that is the tail
    int stride;  // transposed
    int gelu;    // 1: out is the GELU of the result
    int reduce;  // 0: leave parts to the kernel that follows
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

// Four neighbouring columns of one row, summed: bias, residual, activation, and where it goes.
__device__ __forceinline__ void emit(const GemmParams& p, int m, int n, float4 v) {
    int b = m / p.rows, t = m - b * p.rows;
    if (p.tail) {
        int j = n / p.bias_n, c = n - j * p.bias_n;
        i64 at = (i64)b * p.n + (i64)c * p.stride + j;
        float x[4] = {v.x, v.y, v.z, v.w};
        if (t == p.steps) {
            bool live = !p.live || p.live[b];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                p.tail_next[at + i * p.stride] = live ? x[i] : p.tail[at + i * p.stride];
            return;
        }
        if (t == 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] += p.tail[at + i * p.stride];
            v = make_float4(x[0], x[1], x[2], x[3]);
        }
        if (p.bias) v = plus(v, *(const float4*)(p.bias + c));
    } else if (p.bias) {
        v = plus(v, *(const float4*)(p.bias + n));
    }
    if (p.add) v = plus(*(const float4*)(p.add + (i64)b * p.add_session + t * p.add_row + n), v);
    if (p.gelu) v = make_float4(gelu(v.x), gelu(v.y), gelu(v.z), gelu(v.w));
    if (p.out) *(float4*)(p.out + (i64)b * p.out_session + (i64)t * p.out_row + n) = v;
    if (p.out_elu)
        *(float4*)(p.out_elu + (i64)b * p.elu_session + (i64)t * p.elu_row + n) =
            make_float4(elu(v.x), elu(v.y), elu(v.z), elu(v.w));
}

// Sum of all parts of four columns, upwards.
__device__ __forceinline__ float4 sum_parts(const float* parts, i64 at, i64 stride, int count) {
    float4 v = __ldcg((const float4*)(parts + at));
    for (int s = 1; s < count; ++s) v = plus(v, __ldcg((const float4*)(parts + at + s * stride)));
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

// One block: BM rows, BN columns, `span` chunks; TM rows and TN columns a thread.
template <int BM, int BN, int BK, int TM, int TN, int STAGES, bool MANY>
__device__ __forceinline__ void gemm_tile(const GemmParams& p) {
    constexpr int NX = BN / TN, NY = BM / TM, THREADS = NX * NY;
    constexpr int PITCH = BK + 4;  // keeps the rows a warp reads at once in different banks
    constexpr int QUADS = TN / 4;
    constexpr int A_COPIES = BM * BK / 4 / THREADS, W_COPIES = BK * BN / 4 / THREADS;
    static_assert(A_COPIES * THREADS * 4 == BM * BK && W_COPIES * THREADS * 4 == BK * BN, "uneven");
    static_assert(THREADS % (BK / 4) == 0, "a thread copies the same k of several rows");
    constexpr int A_FLOATS = STAGES * BM * PITCH, FLOATS = A_FLOATS + STAGES * BK * BN;
    __shared__ __align__(16) float shared[FLOATS > BM * BN ? FLOATS : BM * BN];
    auto sa = (float(*)[BM * PITCH])shared;
    auto sw = (float(*)[BK * BN])(shared + A_FLOATS);
    int tid = threadIdx.x, tx = tid % NX, ty = tid / NX;
    int n0 = blockIdx.x * BN, m0 = blockIdx.y * BM;
    int first = blockIdx.z * p.span * p.chunk;
    int end = min(p.k, first + p.span * p.chunk);
    int tiles = (end - first + BK - 1) / BK, per_chunk = p.chunk / BK;

    int a_k = tid % (BK / 4) * 4;
    const float* a_from[A_COPIES];
    bool a_there[A_COPIES];
#pragma unroll
    for (int i = 0; i < A_COPIES; ++i) {
        int m = m0 + tid / (BK / 4) + i * (THREADS / (BK / 4));
        int b = m / p.rows, t = m - b * p.rows;
        a_there[i] = m < p.total_rows;
        a_from[i] = a_there[i] ? p.a + (i64)b * p.a_session + (i64)t * p.a_row + a_k : p.a;
    }
    auto load_a = [&](int tile) {
        int stage = tile % STAGES, k = first + tile * BK;
#pragma unroll
        for (int i = 0; i < A_COPIES; ++i) {
            int m = tid / (BK / 4) + i * (THREADS / (BK / 4));
            bool there = a_there[i] && k + a_k < end;
            copy_async(&sa[stage][m * PITCH + a_k], there ? a_from[i] + k : p.a, there);
        }
    };
    auto load_w = [&](int tile) {
        int stage = tile % STAGES, k = first + tile * BK;
#pragma unroll
        for (int i = 0; i < W_COPIES; ++i) {
            int at = tid + i * THREADS, row = at / (BN / 4), n = at % (BN / 4) * 4;
            bool there = k + row < end && n0 + n < p.n;
            const float* from = there ? p.w + (i64)(k + row) * p.n + n0 + n : p.w;
            copy_async(&sw[stage][row * BN + n], from, there);
        }
    };

    float acc[TM][TN], total[MANY ? TM : 1][MANY ? TN : 1];
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int j = 0; j < TN; ++j) acc[i][j] = 0.0f;

#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
        if (s < tiles) load_w(s);
    wait_for_others();
    let_next_begin();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < tiles) load_a(s);
        copy_commit();
    }
    int until = per_chunk;
    bool is_first = true;
    for (int tile = 0; tile < tiles; ++tile) {
        copy_wait<STAGES - 2>();
        __syncthreads();
        if (tile + STAGES - 1 < tiles) {
            load_a(tile + STAGES - 1);
            load_w(tile + STAGES - 1);
        }
        copy_commit();
        const float* xa = sa[tile % STAGES] + ty * PITCH;
        const float* xw = sw[tile % STAGES] + tx * 4;
#pragma unroll 2
        for (int k = 0; k < BK; k += 4) {
            float av[TM][4];
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                float4 x = *(const float4*)(xa + i * NY * PITCH + k);
                av[i][0] = x.x, av[i][1] = x.y, av[i][2] = x.z, av[i][3] = x.w;
            }
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                float wv[TN];
#pragma unroll
                for (int g = 0; g < QUADS; ++g) {
                    float4 x = *(const float4*)(xw + (k + q) * BN + g * (BN / QUADS));
                    wv[4 * g] = x.x, wv[4 * g + 1] = x.y, wv[4 * g + 2] = x.z, wv[4 * g + 3] = x.w;
                }
#pragma unroll
                for (int i = 0; i < TM; ++i)
#pragma unroll
                    for (int j = 0; j < TN; ++j) acc[i][j] = fmaf(av[i][q], wv[j], acc[i][j]);
            }
        }
        if (MANY && --until == 0) {
            until = per_chunk;
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int j = 0; j < TN; ++j) {
                    float& sum = total[MANY ? i : 0][MANY ? j : 0];
                    sum = is_first ? acc[i][j] : sum + acc[i][j];
                    acc[i][j] = 0.0f;
                }
            is_first = false;
        }
    }
    if (MANY) {
        bool rest = until != per_chunk;
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j) {
                float sum = total[MANY ? i : 0][MANY ? j : 0];
                if (rest) sum = is_first ? acc[i][j] : sum + acc[i][j];
                acc[i][j] = sum;
            }
    }
    int count = gridDim.z;
    bool to_parts = count > 1 || !p.reduce;
    i64 stride = (i64)p.total_rows * p.n;
    if (!to_parts) __syncthreads();  // the last copies have been read
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
        for (int g = 0; g < QUADS; ++g) {
            int row = ty + i * NY, column = tx * 4 + g * (BN / QUADS);
            int m = m0 + row, n = n0 + column;
            float4 v = make_float4(acc[i][4 * g], acc[i][4 * g + 1], acc[i][4 * g + 2],
                                   acc[i][4 * g + 3]);
            if (!to_parts)
                *(float4*)(shared + row * BN + column) = v;
            else if (m < p.total_rows && n < p.n)
                __stcg((float4*)(p.parts + blockIdx.z * stride + (i64)m * p.n + n), v);
        }
    if (!p.reduce) return;
    if (to_parts) {
        if (!comes_last(p, blockIdx.y * gridDim.x + blockIdx.x, count)) return;
    } else {
        __syncthreads();
    }
#pragma unroll 1
    for (int i = tid; i < BM * BN / 4; i += THREADS) {
        int row = i / (BN / 4), column = i % (BN / 4) * 4, m = m0 + row, n = n0 + column;
        if (m >= p.total_rows || n >= p.n) continue;
        emit(p, m, n,
             to_parts ? sum_parts(p.parts, (i64)m * p.n + n, stride, count)
                      : *(const float4*)(shared + row * BN + column));
    }
}

// For few rows, where all time goes into reading the matrix: a block takes 16 columns and asks for
// its whole piece of the matrix at once; a thread sums one chunk of 64 for 4 rows.
constexpr int SKINNY_ROWS = 4, SKINNY_COLUMNS = 16, SKINNY_CHUNK = 64, SKINNY_CHUNKS = 8;
constexpr int SKINNY_THREADS = SKINNY_COLUMNS * SKINNY_CHUNKS;
constexpr int SKINNY_W = SKINNY_CHUNK * SKINNY_COLUMNS + 16;  // chunks of a warp: other banks
constexpr int SKINNY_A = SKINNY_CHUNK + 4;

__device__ __forceinline__ void gemm_skinny(const GemmParams& p) {
    __shared__ __align__(16) float sw[SKINNY_CHUNKS * SKINNY_W];
    __shared__ __align__(16) float sa[SKINNY_ROWS][SKINNY_CHUNKS * SKINNY_A];
    int tid = threadIdx.x;
    int n0 = blockIdx.x * SKINNY_COLUMNS, m0 = blockIdx.y * SKINNY_ROWS;
    int first = blockIdx.z * p.span * SKINNY_CHUNK;
    int end = min(p.k, first + p.span * SKINNY_CHUNK);
    int chunks = (end - first + SKINNY_CHUNK - 1) / SKINNY_CHUNK;
    for (int at = tid; at < chunks * SKINNY_CHUNK * (SKINNY_COLUMNS / 4); at += SKINNY_THREADS) {
        int k = at / (SKINNY_COLUMNS / 4), n = at % (SKINNY_COLUMNS / 4) * 4;
        bool there = first + k < end && n0 + n < p.n;
        const float* from = there ? p.w + (i64)(first + k) * p.n + n0 + n : p.w;
        float* to = sw + k / SKINNY_CHUNK * SKINNY_W + k % SKINNY_CHUNK * SKINNY_COLUMNS + n;
        copy_async(to, from, there);
    }
    wait_for_others();
    let_next_begin();
    for (int at = tid; at < SKINNY_ROWS * chunks * (SKINNY_CHUNK / 4); at += SKINNY_THREADS) {
        int r = at / (chunks * (SKINNY_CHUNK / 4)), k = at % (chunks * (SKINNY_CHUNK / 4)) * 4;
        int m = m0 + r, b = m / p.rows, t = m - b * p.rows;
        bool there = m < p.total_rows && first + k < end;
        const float* from =
            there ? p.a + (i64)b * p.a_session + (i64)t * p.a_row + first + k : p.a;
        copy_async(&sa[r][k / SKINNY_CHUNK * SKINNY_A + k % SKINNY_CHUNK], from, there);
    }
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    int column = tid % SKINNY_COLUMNS, chunk = tid / SKINNY_COLUMNS;
    float acc[SKINNY_ROWS];
#pragma unroll
    for (int r = 0; r < SKINNY_ROWS; ++r) acc[r] = 0.0f;
    if (chunk < chunks) {
        const float* xw = sw + chunk * SKINNY_W + column;
#pragma unroll 4
        for (int k = 0; k < SKINNY_CHUNK; k += 4) {
            float w[4];
#pragma unroll
            for (int q = 0; q < 4; ++q) w[q] = xw[(k + q) * SKINNY_COLUMNS];
#pragma unroll
            for (int r = 0; r < SKINNY_ROWS; ++r) {
                float4 x = *(const float4*)&sa[r][chunk * SKINNY_A + k];
                acc[r] = fmaf(x.x, w[0], acc[r]);
                acc[r] = fmaf(x.y, w[1], acc[r]);
                acc[r] = fmaf(x.z, w[2], acc[r]);
                acc[r] = fmaf(x.w, w[3], acc[r]);
            }
        }
    }
    __syncthreads();
    float* sums = sw;  // (chunks, rows, columns)
    if (chunk < chunks)
#pragma unroll
        for (int r = 0; r < SKINNY_ROWS; ++r)
            sums[(chunk * SKINNY_ROWS + r) * SKINNY_COLUMNS + column] = acc[r];
    __syncthreads();
    int row = tid / (SKINNY_COLUMNS / 4), n = n0 + tid % (SKINNY_COLUMNS / 4) * 4;
    int m = m0 + row, count = gridDim.z;
    bool mine = row < SKINNY_ROWS && m < p.total_rows && n < p.n;
    i64 stride = (i64)p.total_rows * p.n;
    bool to_parts = count > 1 || !p.reduce;
    float4 v = make_float4(0, 0, 0, 0);
    if (mine) {
        const float4* from = (const float4*)(sums + row * SKINNY_COLUMNS + n - n0);
        v = from[0];
        for (int c = 1; c < chunks; ++c) v = plus(v, from[c * SKINNY_ROWS * SKINNY_COLUMNS / 4]);
        if (to_parts) __stcg((float4*)(p.parts + blockIdx.z * stride + (i64)m * p.n + n), v);
    }
    if (!p.reduce) return;
    if (to_parts) {
        if (!comes_last(p, blockIdx.y * gridDim.x + blockIdx.x, count)) return;
        if (mine) v = sum_parts(p.parts, (i64)m * p.n + n, stride, count);
    }
    if (mine) emit(p, m, n, v);
}
