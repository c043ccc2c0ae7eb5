// The codec on a GPU: the products of codec_gemm.cuh, and what lies between them.
//
// Launch plans and the meaning of every parameter: codec_net.py. Nothing here allocates, waits or
// reads the batch from memory; every launch can be captured.

#include "codec_gemm.cuh"

#define WIDE(NAME, WN, WM, NT, MT, STAGES, BLOCKS)                              \
    extern "C" __global__ void __launch_bounds__(WN* WM * 32, BLOCKS)           \
        codec_##NAME(const __grid_constant__ GemmParams p) {                    \
        gemm_wide<WN, WM, NT, MT, STAGES>(p);                                   \
    }
#define DEEP(NAME, NT, MT, BK, STAGES)                                          \
    extern "C" __global__ void __launch_bounds__(DEEP_WARPS * 32)               \
        codec_##NAME(const __grid_constant__ GemmParams p) {                    \
        gemm_deep<NT, MT, BK, STAGES>(p);                                       \
    }

// columns x rows of a block
WIDE(wide_32x16, 2, 2, 1, 1, 6, 4)
DEEP(deep_16x8, 1, 1, 64, 1)
#ifndef CODEC_SMALLEST  // tests compile those two for every target
WIDE(wide_32x32, 2, 2, 1, 2, 5, 4)
WIDE(wide_64x32, 2, 2, 2, 2, 4, 4)
WIDE(wide_64x64, 2, 2, 2, 4, 4, 4)
WIDE(wide_32x128, 1, 4, 2, 4, 3, 4)
DEEP(deep_16x16, 1, 2, 64, 1)
DEEP(deep_32x32, 2, 4, 16, 2)
#endif

// What convolutions remember, between regions (C, R) and the rows in front of activations (R, C).
struct KeptWindow {
    const float* current;  // null: the rows are zeros
    float* next;
    float* buffer;     // front row of session 0
    int channels, rows;
    int session;       // numbers between sessions of the buffer
    int tail_row;      // row of the buffer at which what is kept begins
};

constexpr int MOST_WINDOWS = 24;

struct WindowParams {
    KeptWindow windows[MOST_WINDOWS];  // one per blockIdx.x
    const u8* live;           // (B,) or null
    const i64* position;      // counter to move on, or null
    i64* position_next;
    int advance;
};

extern "C" __global__ void __launch_bounds__(256)
    codec_windows_in(const __grid_constant__ WindowParams p) {
    wait_for_others();
    let_next_begin();
    KeptWindow k = p.windows[blockIdx.x];
    int b = blockIdx.y, count = k.channels * k.rows;
    float* to = k.buffer + (i64)b * k.session;
    for (int i = threadIdx.x; i < count; i += 256) {
        int c = i / k.rows, r = i - c * k.rows;
        to[r * k.channels + c] = k.current ? k.current[(i64)b * count + i] : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(256)
    codec_windows_out(const __grid_constant__ WindowParams p) {
    wait_for_others();
    let_next_begin();
    int b = blockIdx.y;
    bool live = !p.live || p.live[b];
    if (p.position && blockIdx.x == 0 && threadIdx.x == 0)
        p.position_next[b] = p.position[b] + (live ? p.advance : 0);
    KeptWindow k = p.windows[blockIdx.x];
    if (!k.current) return;
    int count = k.channels * k.rows;
    const float* from = k.buffer + (i64)b * k.session + (i64)k.tail_row * k.channels;
    for (int i = threadIdx.x; i < count; i += 256) {
        int c = i / k.rows, r = i - c * k.rows;
        i64 at = (i64)b * count + i;
        k.next[at] = live ? from[r * k.channels + c] : k.current[at];
    }
}

// One channel of sound into many: the first convolution, which remembers k-1 samples.
struct SoundParams {
    const float* sound;     // in: (B, T); out: (B, rows + T, C) with what is kept in front
    const float* w;         // (k, C)
    const float* bias;      // (C,) or (1,)
    float* out;             // in: (B, T, C); out: (B, T)
    float* out_elu;         // in: ELU of out, row t of session b at b*elu_session + t*C
    const float* kept;      // in: (B, k-1)
    float* kept_next;
    const u8* live;         // out: silence where 0
    int steps, channels, kernel, elu_session;
};

constexpr int SOUND_STEPS = 64;

extern "C" __global__ void __launch_bounds__(256)
    codec_sound_in(const __grid_constant__ SoundParams p) {
    __shared__ float heard[SOUND_STEPS + 32];
    wait_for_others();
    let_next_begin();
    int b = blockIdx.y, t0 = blockIdx.x * SOUND_STEPS, before = p.kernel - 1;
    auto joined = [&](int i) {  // i counts from the first remembered sample
        return i < before ? p.kept[(i64)b * before + i] : p.sound[(i64)b * p.steps + i - before];
    };
    int steps = min(SOUND_STEPS, p.steps - t0);
    for (int i = threadIdx.x; i < steps + before; i += 256) heard[i] = joined(t0 + i);
    if (blockIdx.x == 0 && threadIdx.x < before)
        p.kept_next[(i64)b * before + threadIdx.x] = joined(p.steps + threadIdx.x);
    __syncthreads();
    int quads = p.channels / 4;
    for (int i = threadIdx.x; i < steps * quads; i += 256) {
        int t = i / quads, c = i % quads * 4;
        float4 v = make_float4(0, 0, 0, 0);
        for (int k = 0; k < p.kernel; ++k) {
            float x = heard[t + k];
            float4 w = __ldg((const float4*)(p.w + k * p.channels + c));
            v.x = fmaf(x, w.x, v.x), v.y = fmaf(x, w.y, v.y);
            v.z = fmaf(x, w.z, v.z), v.w = fmaf(x, w.w, v.w);
        }
        v = plus(v, __ldg((const float4*)(p.bias + c)));
        i64 row = (i64)(t0 + t) * p.channels + c;
        *(float4*)(p.out + (i64)b * p.steps * p.channels + row) = v;
        *(float4*)(p.out_elu + (i64)b * p.elu_session + row) =
            make_float4(elu(v.x), elu(v.y), elu(v.z), elu(v.w));
    }
}

// Many channels into one: the last convolution. A thread sums one sample.
constexpr int LAST_STEPS = 128, LAST_CHANNELS = 64, LAST_KERNEL = 4;
constexpr int LAST_PITCH = LAST_CHANNELS + 4;

extern "C" __global__ void __launch_bounds__(LAST_STEPS)
    codec_sound_out(const __grid_constant__ SoundParams p) {
    __shared__ __align__(16) float rows[(LAST_STEPS + LAST_KERNEL - 1) * LAST_PITCH];
    wait_for_others();
    let_next_begin();
    int b = blockIdx.y, t0 = blockIdx.x * LAST_STEPS;
    int steps = min(LAST_STEPS, p.steps - t0), quads = p.channels / 4;
    const float* from = p.sound + (i64)b * p.elu_session + (i64)t0 * p.channels;
    for (int i = threadIdx.x; i < (steps + p.kernel - 1) * quads; i += LAST_STEPS) {
        int t = i / quads, c = i % quads * 4;
        copy_async(rows + t * LAST_PITCH + c, from + t * p.channels + c, true);
    }
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    int t = threadIdx.x;
    if (t >= steps) return;
    float v = 0.0f;
    for (int k = 0; k < p.kernel; ++k)
        for (int c = 0; c < p.channels; c += 4) {
            float4 x = *(const float4*)(rows + (t + k) * LAST_PITCH + c);
            float4 w = __ldg((const float4*)(p.w + k * p.channels + c));
            v = fmaf(x.x, w.x, v), v = fmaf(x.y, w.y, v);
            v = fmaf(x.z, w.z, v), v = fmaf(x.w, w.w, v);
        }
    bool live = !p.live || p.live[b];
    p.out[(i64)b * p.steps + t0 + t] = live ? v + p.bias[0] : 0.0f;
}

// Rows between two products: parts summed, residual, layer norm.
struct RowsParams {
    const float* parts;   // (count, rows, C); for `codec_upsample` (count, sessions, C)
    const float* bias;    // (C,) or null
    const float* scale;   // (C,) or null: x = add + scale * sum
    const float* add;     // (rows, C) or null
    float* x;             // row m of session b: x + b*x_session + (m % steps)*C
    float* normed;        // (rows, C) or null
    const float* gain;    // (C,) of the norm
    const float* shift;
    const float* kept;    // downsampling: (B, C, steps) remembered, or null; upsampling: its tail
    float* kept_next;
    float* front;         // downsampling: the rows in front of x
    const float* w;       // upsampling: (C, 2 * steps)
    const i64* position;  // downsampling: a session's first tick repeats its first step
    i64* position_next;
    const u8* live;
    int count, channels, steps, total_rows, x_session;
    float eps;
};

constexpr int ROW_THREADS = 128, ROW_QUADS = 4;

__device__ __forceinline__ float block_sum(float x) {
    __shared__ float warps[ROW_THREADS / 32];
#pragma unroll
    for (int far = 16; far > 0; far /= 2) x += __shfl_xor_sync(~0u, x, far);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = warps[0];
#pragma unroll
    for (int i = 1; i < ROW_THREADS / 32; ++i) x += warps[i];
    return x;
}

__device__ __forceinline__ float sum4(float4 v) { return (v.x + v.y) + (v.z + v.w); }

__device__ __forceinline__ void write_normed(const RowsParams& p, int m, float4* v) {
    if (!p.normed) return;
    float sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int i = 0; i < ROW_QUADS; ++i) {
        int c = (threadIdx.x + i * ROW_THREADS) * 4;
        if (c < p.channels) sum += sum4(v[i]);
    }
    float mean = block_sum(sum) / (float)p.channels;
#pragma unroll
    for (int i = 0; i < ROW_QUADS; ++i) {
        int c = (threadIdx.x + i * ROW_THREADS) * 4;
        if (c >= p.channels) continue;
        v[i] = make_float4(v[i].x - mean, v[i].y - mean, v[i].z - mean, v[i].w - mean);
        square += sum4(make_float4(v[i].x * v[i].x, v[i].y * v[i].y, v[i].z * v[i].z,
                                   v[i].w * v[i].w));
    }
    float root = 1.0f / sqrtf(block_sum(square) / (float)p.channels + p.eps);
#pragma unroll
    for (int i = 0; i < ROW_QUADS; ++i) {
        int c = (threadIdx.x + i * ROW_THREADS) * 4;
        if (c >= p.channels) continue;
        float4 g = *(const float4*)(p.gain + c), s = *(const float4*)(p.shift + c);
        *(float4*)(p.normed + (i64)m * p.channels + c) =
            make_float4(v[i].x * root * g.x + s.x, v[i].y * root * g.y + s.y,
                        v[i].z * root * g.z + s.z, v[i].w * root * g.w + s.w);
    }
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    codec_rows(const __grid_constant__ RowsParams p) {
    wait_for_others();
    let_next_begin();
    int m = blockIdx.x, b = m / p.steps, t = m % p.steps;
    i64 stride = (i64)p.total_rows * p.channels;
    float4 v[ROW_QUADS];
    bool is_first = p.position && p.position[b] == 0;
    if (p.position && t == 0 && threadIdx.x == 0) p.position_next[b] = p.position[b] + p.steps;
#pragma unroll
    for (int i = 0; i < ROW_QUADS; ++i) {
        int c = (threadIdx.x + i * ROW_THREADS) * 4;
        if (c >= p.channels) continue;
        i64 at = (i64)m * p.channels + c;
        v[i] = sum_parts(p.parts, at, stride, p.count);
        if (p.bias) v[i] = plus(v[i], *(const float4*)(p.bias + c));
        if (p.scale) {
            float4 s = *(const float4*)(p.scale + c);
            v[i] = make_float4(s.x * v[i].x, s.y * v[i].y, s.z * v[i].z, s.w * v[i].w);
        }
        if (p.add) v[i] = plus(*(const float4*)(p.add + at), v[i]);
        *(float4*)(p.x + (i64)b * p.x_session + (i64)t * p.channels + c) = v[i];
        if (!p.kept) continue;
        float x[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            i64 place = ((i64)b * p.channels + c + e) * p.steps;
            p.kept_next[place + t] = x[e];
            if (t > 0) continue;
            for (int r = 0; r < p.steps; ++r)
                p.front[(i64)b * p.x_session + (i64)r * p.channels + c + e] =
                    is_first ? x[e] : p.kept[place + r];
        }
    }
    write_normed(p, m, v);
}

// A frame's latent made into `steps` positions, channel by channel.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    codec_upsample(const __grid_constant__ RowsParams p) {
    wait_for_others();
    let_next_begin();
    int m = blockIdx.x, b = m / p.steps, t = m % p.steps;
    i64 stride = (i64)(p.total_rows / p.steps) * p.channels;
    bool live = !p.live || p.live[b];
    float4 v[ROW_QUADS];
#pragma unroll
    for (int i = 0; i < ROW_QUADS; ++i) {
        int c = (threadIdx.x + i * ROW_THREADS) * 4;
        if (c >= p.channels) continue;
        float4 latent = sum_parts(p.parts, (i64)b * p.channels + c, stride, p.count);
        float x[4] = {latent.x, latent.y, latent.z, latent.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float* w = p.w + (i64)(c + e) * 2 * p.steps;
            i64 at = ((i64)b * p.channels + c + e) * p.steps + t;
            float kept = p.kept[at];
            p.kept_next[at] = live ? __fmul_rn(x[e], w[p.steps + t]) : kept;
            x[e] = __fadd_rn(__fmul_rn(x[e], w[t]), kept);
        }
        v[i] = make_float4(x[0], x[1], x[2], x[3]);
        *(float4*)(p.x + (i64)b * p.x_session + (i64)t * p.channels + c) = v[i];
    }
    write_normed(p, m, v);
}

// Codebooks, stored (F, bins).
struct BookParams {
    const float* books[32];    // of the levels, the semantic one first
    const float* squared[32];  // |c|^2
    float* left;               // (B, 2, F): semantic, and what the levels so far left over
    i64* codes;                // (B, levels)
    float* best;               // (2, B, blocks) scratch
    int* best_at;
    u32* arrivals;             // (2, groups of sessions)
    int level, levels, bins, features, sessions, blocks;
};

constexpr int BOOK_BINS = 32, BOOK_CHUNK = 64, BOOK_CHUNKS = 4, BOOK_SESSIONS = 8;
constexpr int BOOK_THREADS = 256;  // a warp per chunk and 16 bins, then one per session

struct Nearest {
    float distance;
    int bin;
};

// The smaller distance; of equal ones the lower bin. A NaN is never nearer.
__device__ __forceinline__ Nearest nearer(Nearest x, Nearest y) {
    bool take = y.distance < x.distance || (y.distance == x.distance && y.bin < x.bin);
    return take ? y : x;
}

__device__ __forceinline__ Nearest nearest_of_warp(Nearest x) {
#pragma unroll
    for (int far = 16; far > 0; far /= 2) {
        Nearest y;
        y.distance = __shfl_xor_sync(~0u, x.distance, far);
        y.bin = __shfl_xor_sync(~0u, x.bin, far);
        x = nearer(x, y);
    }
    return x;
}

// One level: grid (bins / 32, books, sessions / 8). blockIdx.y 1 is the semantic book, which shares
// the first launch with level 1. Distances are |c|^2 - 2 x.c; whichever block comes last chooses.
extern "C" __global__ void __launch_bounds__(BOOK_THREADS)
    codec_level(const __grid_constant__ BookParams p) {
    constexpr int X_PITCH = BOOK_CHUNK + 4, S_PITCH = BOOK_BINS + 4, W_FLOATS = BOOK_CHUNK * 16;
    constexpr int FOUND = BOOK_CHUNKS * BOOK_CHUNK / 32;
    __shared__ __align__(16) float sw[BOOK_THREADS / 32 * W_FLOATS];
    __shared__ __align__(16) float sx[BOOK_CHUNKS * BOOK_SESSIONS * X_PITCH];
    __shared__ u32 before;
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, is_semantic = blockIdx.y;
    int level = is_semantic ? 0 : p.level;
    int bin0 = blockIdx.x * BOOK_BINS, b0 = blockIdx.z * BOOK_SESSIONS;
    const float* book = p.books[level];
    int half = warp % 2 * 16, chunk = warp / 2;
    float* w = sw + warp * W_FLOATS;
#pragma unroll
    for (int at = lane; at < W_FLOATS / 4; at += 32) {
        int k = chunk * BOOK_CHUNK + at / 4, n = bin0 + half + at % 4 * 4;
        bool there = k < p.features && n < p.bins;
        copy_async(w + at * 4, there ? book + (i64)k * p.bins + n : book, there);
    }
    wait_for_others();
    let_next_begin();
    const float* left = p.left + (is_semantic ? 0 : p.features);
    constexpr int QUADS = BOOK_CHUNKS * BOOK_CHUNK / 4;  // of a session
#pragma unroll
    for (int at = tid; at < BOOK_SESSIONS * QUADS; at += BOOK_THREADS) {
        int r = at / QUADS, k = at % QUADS * 4;
        bool there = b0 + r < p.sessions && k < p.features;
        copy_async(sx + (k / BOOK_CHUNK * BOOK_SESSIONS + r) * X_PITCH + k % BOOK_CHUNK,
                   there ? left + (i64)(b0 + r) * 2 * p.features + k : left, there);
    }
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    float sums[2][1][1][4];
    clear(sums[0]);
    clear(sums[1]);
    const float* w_now = w + w_place<16>();
    const float* x_now = sx + chunk * BOOK_SESSIONS * X_PITCH + x_place<X_PITCH>();
#pragma unroll
    for (int k = 0; k < 32; k += 8)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            multiply_8<1, 1, 16, X_PITCH>(sums[h], w_now + (k + 32 * h) * 16, x_now + k + 32 * h);
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h)
        lay_down<1, 1, S_PITCH>(sw + (2 * chunk + h) * BOOK_SESSIONS * S_PITCH + half, sums[h]);
    __syncthreads();
    int b = b0 + warp, bin = bin0 + lane;
    Nearest none, mine;
    none.distance = __int_as_float(0x7f800000), none.bin = p.bins;
    mine = none;
    if (b < p.sessions && bin < p.bins) {
        float dot = 0.0f;
        for (int i = 0; i < (p.features + 31) / 32; ++i)
            dot += sw[(i * BOOK_SESSIONS + warp) * S_PITCH + lane];
        Nearest found;
        found.distance = fmaf(-2.0f, dot, p.squared[level][bin]), found.bin = bin;
        mine = nearer(none, found);
    }
    mine = nearest_of_warp(mine);
    i64 line = ((i64)is_semantic * p.sessions + b) * p.blocks;
    if (lane == 0 && b < p.sessions) {
        __stcg(p.best + line + blockIdx.x, mine.distance);
        __stcg(p.best_at + line + blockIdx.x, mine.bin);
    }
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        u32* arrivals = p.arrivals + is_semantic * gridDim.z + blockIdx.z;
        before = atomicAdd(arrivals, 1u);
        if (before == gridDim.x - 1) *arrivals = 0;
    }
    __syncthreads();
    if (before != gridDim.x - 1 || b >= p.sessions) return;
    __threadfence();
    mine = none;
    for (int i = lane; i < p.blocks; i += 32) {
        Nearest found;
        found.distance = __ldcg(p.best + line + i), found.bin = __ldcg(p.best_at + line + i);
        mine = nearer(mine, found);
    }
    mine = nearest_of_warp(mine);
    int code = mine.bin < p.bins ? mine.bin : 0;  // every distance NaN
    if (lane == 0) p.codes[(i64)b * p.levels + level] = code;
    if (is_semantic || level + 1 >= p.levels) return;
    float* rest = p.left + (i64)b * 2 * p.features + p.features;
    float found[FOUND];  // all on their way before the first is used
#pragma unroll
    for (int i = 0; i < FOUND; ++i)
        if (lane + i * 32 < p.features)
            found[i] = __ldg(book + (i64)(lane + i * 32) * p.bins + code);
#pragma unroll
    for (int i = 0; i < FOUND; ++i)
        if (lane + i * 32 < p.features) rest[lane + i * 32] -= found[i];
}

// Codes to what the two output projections take, (B, 2, F).
extern "C" __global__ void __launch_bounds__(256)
    codec_gather(const __grid_constant__ BookParams p) {
    wait_for_others();
    let_next_begin();
    int b = blockIdx.x;
    for (int k = threadIdx.x; k < p.features; k += 256) {
        float sum = 0.0f;
        for (int level = 0; level < p.levels; ++level) {
            i64 code = p.codes[(i64)b * p.levels + level];
            code = code < 0 ? 0 : code >= p.bins ? p.bins - 1 : code;
            float x = p.books[level][(i64)k * p.bins + code];
            if (level == 0) p.left[(i64)b * 2 * p.features + k] = x;
            else sum = level == 1 ? x : sum + x;
        }
        p.left[(i64)b * 2 * p.features + p.features + k] = sum;
    }
}

// A matrix as products want it, (k, n), from how the checkpoint has it; once, after loading.
struct TurnParams {
    const float* from;
    float* to;
    int inputs, outputs, kernel;  // of the convolution; a linear one has kernel 1
    int stride;                   // of a transposed one, else 0
};

extern "C" __global__ void __launch_bounds__(256)
    codec_turn(const __grid_constant__ TurnParams p) {
    i64 count = (i64)p.inputs * p.outputs * p.kernel;
    for (i64 i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll) {
        i64 at;
        if (p.stride) {  // (in, out, 2s) -> ((tap, in), (step, out)); tap 0 is the step before
            int o = i % p.outputs, j = i / p.outputs % p.stride;
            i64 k = i / p.outputs / p.stride;
            int c = k % p.inputs, tap = k / p.inputs;
            at = ((i64)c * p.outputs + o) * p.kernel + (tap ? j : p.stride + j);
        } else {  // (out, in, k) -> ((tap, in), out)
            int o = i % p.outputs;
            i64 k = i / p.outputs;
            int c = k % p.inputs, tap = k / p.inputs;
            at = ((i64)o * p.inputs + c) * p.kernel + tap;
        }
        p.to[i] = p.from[at];
    }
}

// Parts of a product that many blocks made, added up by many: a thread takes four columns.
extern "C" __global__ void __launch_bounds__(256)
    codec_meet(const __grid_constant__ GemmParams p) {
    wait_for_others();
    let_next_begin();
    i64 stride = (i64)p.total_rows * p.n, i = (blockIdx.x * 256ll + threadIdx.x) * 4;
    if (i >= stride) return;
    int m = i / p.n, n = i - (i64)m * p.n, b = m / p.rows, t = m - b * p.rows;
    float4 extra = make_float4(0, 0, 0, 0);
    if (p.add) extra = *residual(p, b, t, n);
    Columns columns = find_columns(p, n);
    emit(p, columns, b, t, sum_parts(p.parts, i, stride, p.parts_count), extra);
}
