// Products of 9 to 160 sessions, weights and rows through shared memory. Included by linear.cu.
//
// A block has 64 or more rows of weights and every session, so that rows of x are read as seldom as
// may be. Hopper has `linear_wide` instead.

constexpr int TILES = LINEAR_TILES;  // of 8 sessions each
constexpr int SESSIONS = 8 * TILES;
constexpr int ROWS = LINEAR_HEIGHT;
constexpr int STAGES = LINEAR_STAGES;
constexpr u32 STAGE_BYTES = (ROWS + SESSIONS) * 128;  // rows of weights, then sessions of x
constexpr int WIDTH = 2 * ROWS;                       // threads: four warps for 64 rows
constexpr int PARTS = LINEAR_PARTS;                   // blocks that have a part each of one sum

// Sums of one warp: two by two warps have 32 rows and half of the sessions each.
constexpr int MT = 2, NT = TILES / 2;

// The 64 inputs of one stage. `more`: sums go on.
__device__ __forceinline__ void sum_stage(float (&sum)[MT][NT][4], u32 from, u32 more) {
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
}

// grid (blocks of ROWS outputs (GATE: ROWS / 2) * PARTS).
extern "C" __global__ void __launch_bounds__(WIDTH) linear_many(LinearParams p) {
    constexpr u32 COPIED = WIDTH / 8;  // rows that one round of copies covers
    constexpr int W_COPIES = ROWS / COPIED, X_COPIES = (SESSIONS + COPIED - 1) / COPIED;
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u32 arrived;
    let_others_start();
    u32 base = (u32)__cvta_generic_to_shared(shared);
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

    for (u32 s = 0; s < STAGES - 1; s++)
        if (s < steps) copy_weights(base + s * STAGE_BYTES);
    wait_for_others();
    for (u32 s = 0; s < STAGES - 1; s++) {
        if (s < steps) copy_rows(base + s * STAGE_BYTES);
        commit_copies();
    }

    float total[MT][NT][4], sum[MT][NT][4];
    u32 into = base + (STAGES - 1) * STAGE_BYTES, from = base;
    u32 step = 0;
    for (u32 own = 0; own < own_slices; own++) {
        for (u32 done = 0; done < slice_steps; done++, step++) {
            wait_copies<STAGES - 2>();
            __syncthreads();
            if (step + STAGES - 1 < steps) {
                copy_weights(into);
                copy_rows(into);
            }
            commit_copies();
            sum_stage(sum, from, done);
            into = into + STAGE_BYTES == end ? base : into + STAGE_BYTES;
            from = from + STAGE_BYTES == end ? base : from + STAGE_BYTES;
        }
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    total[m][n][i] = own ? total[m][n][i] + sum[m][n][i] : sum[m][n][i];
    }

    if (PARTS > 1) {
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
    u32 m0 = warp / 2 * 32, n0 = warp % 2 * (NT * 8);
    float* out = (float*)shared;
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
    constexpr int ROUND = 16;  // outputs for which all is read at once
    u32 count = stripe * p.batch;
    for (u32 first = threadIdx.x; first < count; first += ROUND * WIDTH) {
        float sums[ROUND], values[ROUND];
#pragma unroll
        for (int k = 0; k < ROUND; k++) {
            u32 i = first + k * WIDTH, r = i & (stripe - 1), b = i >> stripe_bits, o = row0 + r;
            if (i >= count || o >= p.outputs) continue;
            u32 at = b * PITCH + r;
            sums[k] = out[at];
            values[k] = is_gate ? out[at + stripe] : added(p, b, o);
        }
#pragma unroll
        for (int k = 0; k < ROUND; k++) {
            u32 i = first + k * WIDTH, r = i & (stripe - 1), b = i >> stripe_bits, o = row0 + r;
            if (i < count && o < p.outputs) finish(p, b, o, sums[k], values[k]);
        }
    }
}
