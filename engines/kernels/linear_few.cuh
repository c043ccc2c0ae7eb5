// Products of up to 8 sessions: weights through stages of each warp's own. Included by linear.cu.
//
// One session's product is as fast as its weights arrive, so every warp keeps some stages of 2 KiB
// under way and waits for nobody; parts of a sum meet once, at the end.

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
    const Element* alpha = (const Element*)p.alpha;
    uint4 alphas[HELD];
    if (NORM) load_alphas(alphas, alpha, p.inputs);
    wait_for_others();

    const u8* x = (const u8*)p.x + ((u64)copied * p.x_stride + (u64)slice * length) * 2 +
                  piece * 16;
    u64 x_apart = (u64)p.x_stride * 8;  // bytes from a session to the fourth after it
    u32 x_from = 0;
    if (NORM) {
        norm_eights((const Element*)p.x, alpha, alphas, p.inputs, p.eps, sums,
                    [&](u32 i, const uint4& eight) { store_shared(base + i * 2, eight); });
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
