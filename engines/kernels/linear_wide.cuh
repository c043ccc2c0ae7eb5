// Products of 9 sessions and more on Hopper. Included by linear.cu.
//
// Every multiprocessor has one block with an equal share of the rows of weights, so all of them read
// until the end, and rows of x are read by as few blocks as can be. Where a share would be narrow, so
// that x weighed as much as weights, four blocks of a cluster have a part of the sum each and four
// times the rows. One thread asks for tiles; warpgroups multiply 64 sessions each by all rows.

#include "linear_hopper.cuh"

constexpr int MOST_STAGES = 16;
constexpr int GROUPS = LINEAR_TILES;   // of 64 sessions, a warpgroup each
constexpr int ROWS = LINEAR_HEIGHT;    // of weights; GATE: half of them of the second half
constexpr int PARTS = LINEAR_PARTS;    // blocks of a cluster
constexpr int SUMMING = GROUPS * 128;  // threads
constexpr u32 W_BYTES = ROWS * 128;    // of a stage
constexpr int HELD = ROWS / 2;  // sums of a thread: two by two, session g and g + 8 of its warp's

#if LINEAR_PARTS > 1
#define CLUSTER __cluster_dims__(LINEAR_PARTS, 1, 1)
#else
#define CLUSTER
#endif

struct WideParams {
    Map w;  // boxes of 64 inputs and of a block's rows, of one half where there are two
    Map x;  // boxes of 64 inputs and of all sessions
    LinearParams product;
    u32 stages;
    u32 x_bytes;  // of a stage, before the weights'
    u32 lead;     // steps that are left to copy when the launch behind this one may begin
    u32 unused;
    u64 reserved[2];
};
static_assert(sizeof(WideParams) == 384, "WideParams in linear.py must match");

__device__ __forceinline__ u32 narrowed_pair(float2 x) {
    return (u32)narrowed(x.x) | (u32)narrowed(x.y) << 16;
}

__device__ __forceinline__ float2 widened_pair(u32 x) {
    return make_float2(widened((Element)(x & 0xffff)), widened((Element)(x >> 16)));
}

// `finish` of outputs o and o + 1.
__device__ __forceinline__ void finish_pair(const LinearParams& p, u32 b, u32 o, float2 sum,
                                            float2 value) {
    u64 at = (u64)b * p.y_stride + o;
    if (p.finish == FINISH_FLOAT) {
        *(float2*)((float*)p.y + at) = make_float2(rounded(sum.x), rounded(sum.y));
        return;
    }
    float2 y = make_float2(rounded(sum.x), rounded(sum.y));
    if (p.finish == FINISH_GATE)
        y = make_float2(silu_times(sum.x, value.x), silu_times(sum.y, value.y));
    if (p.finish == FINISH_ADD) y = make_float2(value.x + y.x, value.y + y.y);
    *(u32*)((Element*)p.y + at) = narrowed_pair(y);
}

// From a thread's sums to outputs: eight outputs of 16 sessions a warp and unit. Blocks of a cluster
// have every PARTS-th unit each, and add what all of them summed.
template <bool GATE>
__device__ __forceinline__ void finish_all(const LinearParams& p, const float (&sum)[HELD],
                                           u32 base, u32 part, u32 row0) {
    constexpr int UNITS = ROWS / 8 / (GATE ? 2 : 1), OWN = (UNITS + PARTS - 1) / PARTS;
    u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    u32 session = warp * 16 + lane / 4, output = row0 + lane % 4 * 2;
    bool is_used = warp * 16 < p.batch;  // any session of this warp
    float2 sums[OWN][2], values[OWN][2];
#pragma unroll
    for (int k = 0; k < OWN; k++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 unit = k * PARTS + part, b = session + h * 8, o = output + unit * 8;
            values[k][h] = make_float2(0, 0);
            if (p.finish == FINISH_ADD && unit < UNITS && b < p.batch && o < p.outputs)
                values[k][h] = widened_pair(
                    __ldcg((const u32*)((const Element*)p.add + (u64)b * p.add_stride + o)));
        }
    if (PARTS > 1) {
        u32 own = base + threadIdx.x * 8;
        asm volatile("bar.sync 1, %0;" ::"n"(SUMMING) : "memory");  // all have read the stages
        if (is_used)
#pragma unroll
            for (int j = 0; j < HELD / 2; j++)
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(own + j * SUMMING * 8),
                             "f"(sum[2 * j]), "f"(sum[2 * j + 1])
                             : "memory");
        meet_cluster();
#pragma unroll
        for (int k = 0; k < OWN; k++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 unit = k * PARTS + part;
                if (!is_used || unit >= UNITS) continue;
#pragma unroll
                for (int rank = 0; rank < PARTS; rank++) {
                    float2 more = load_other(own + (unit * 2 + h) * SUMMING * 8, rank);
                    float2& to = sums[k][h];
                    to = rank ? make_float2(to.x + more.x, to.y + more.y) : more;
                    if (GATE) {
                        more = load_other(own + ((UNITS + unit) * 2 + h) * SUMMING * 8, rank);
                        float2& other = values[k][h];
                        other = rank ? make_float2(other.x + more.x, other.y + more.y) : more;
                    }
                }
            }
        meet_cluster();  // nobody's memory goes before all have read it
    } else {
#pragma unroll
        for (int k = 0; k < OWN; k++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int j = (k * 2 + h) * 2, second = GATE ? j + UNITS * 4 : j;
                sums[k][h] = make_float2(sum[j], sum[j + 1]);
                if (GATE) values[k][h] = make_float2(sum[second], sum[second + 1]);
            }
    }
#pragma unroll
    for (int k = 0; k < OWN; k++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 unit = k * PARTS + part, b = session + h * 8, o = output + unit * 8;
            if (unit < UNITS && b < p.batch && o < p.outputs)
                finish_pair(p, b, o, sums[k][h], values[k][h]);
        }
}

// grid (blocks of ROWS rows * PARTS). Outputs are even in number.
extern "C" __global__ void CLUSTER __launch_bounds__(SUMMING + LANES)
    linear_wide(const __grid_constant__ WideParams params) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ u64 barriers[2 * MOST_STAGES];  // a stage is full; a stage is free
    const LinearParams& p = params.product;
    u32 stages = params.stages, x_bytes = params.x_bytes, stage_bytes = x_bytes + W_BYTES;
    u32 base = ((u32)__cvta_generic_to_shared(shared) + 1023) / 1024 * 1024;
    u32 full = (u32)__cvta_generic_to_shared(barriers), free = full + MOST_STAGES * 8;
    u32 warp = threadIdx.x / LANES;
    bool is_gate = p.finish == FINISH_GATE;
    u32 part = blockIdx.x % PARTS, stripe = is_gate ? ROWS / 2 : ROWS;
    u32 row0 = blockIdx.x / PARTS * stripe;
    u32 slice_steps = p.inputs / p.slices / 64, own_slices = p.slices / PARTS;
    u32 steps = slice_steps * own_slices, column0 = part * steps * 64;
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < stages; s++) {
            init_barrier(full + s * 8, 1);
            init_barrier(free + s * 8, SUMMING / LANES);
        }
        publish_barriers();
    }
    __syncthreads();

    if (warp == SUMMING / LANES) {
        if (threadIdx.x % LANES == 0) {
            fetch_map(params.w);
            fetch_map(params.x);
            auto copy_weights = [&](u32 step, u32 s) {
                u32 to = base + s * stage_bytes + x_bytes, column = column0 + step * 64;
                arrive_expecting(full + s * 8, stage_bytes);
                copy_box(to, params.w, column, row0, full + s * 8);
                if (is_gate)
                    copy_box(to + W_BYTES / 2, params.w, column, p.outputs + row0, full + s * 8);
            };
            auto copy_rows = [&](u32 step, u32 s) {
                copy_box(base + s * stage_bytes, params.x, column0 + step * 64, 0, full + s * 8);
            };
            u32 first = min(steps, stages), s = 0, parity = 0;
            for (u32 step = 0; step < first; step++) copy_weights(step, step);
            if (first + params.lead >= steps) let_others_start();
            wait_for_others();
            for (u32 step = 0; step < first; step++) copy_rows(step, step);
            for (u32 step = first; step < steps; step++) {
                if (step + params.lead == steps) let_others_start();
                wait_barrier(free + s * 8, parity);
                copy_weights(step, s);
                copy_rows(step, s);
                if (++s == stages) s = 0, parity ^= 1;
            }
        }
        __syncwarp();
        if (PARTS > 1) {
            meet_cluster();
            meet_cluster();
        }
        return;
    }

    wait_for_others();
    float total[HELD], sum[HELD];
    u32 s = 0, parity = 0;
    u32 rows_at = warp / 4 * 64 * 128;
    for (u32 own = 0; own < own_slices; own++) {
        for (u32 done = 0; done < slice_steps; done++) {
            wait_barrier(full + s * 8, parity);
            u32 a = base + s * stage_bytes + rows_at, b = base + s * stage_bytes + x_bytes;
            fence_sums();
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                multiply<HELD>(sum, matrix_at(a + k * 32), matrix_at(b + k * 32), k ? 1 : done);
            commit_sums();
            wait_sums<0>();  // copies are waited for longer than sums: a stage is free at once
            if (threadIdx.x % LANES == 0) arrive(free + s * 8);
            if (++s == stages) s = 0, parity ^= 1;
        }
#pragma unroll
        for (int i = 0; i < HELD; i++) asm volatile("" : "+f"(sum[i])::"memory");
#pragma unroll
        for (int i = 0; i < HELD; i++) total[i] = PARTS == 1 && own ? total[i] + sum[i] : sum[i];
    }
    if (is_gate)
        finish_all<true>(p, total, base, part, row0);
    else
        finish_all<false>(p, total, base, part, row0);
}
