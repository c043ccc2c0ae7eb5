// Ring attention: write this step's rows into every session's ring and attend over what is valid.
//
// Decides who computes what, and in which order partial results meet. A ring is cut into segments
// of SEGMENT_ROWS, a segment into chunks; chunks fold left to right into their segment, segments
// left to right into the row of output. The tree depends on the session's own position alone, so
// the bits do not depend on the batch, the slot, the page order or the neighbours. Two entry
// points evaluate the same tree:
//   ring_attention_wide    a warp per segment: least traffic, for many sessions
//   ring_attention_narrow  a warp per chunk, a block per segment: most parallel, for few sessions
// Whichever warp finishes the last segment of a row folds the row; who that is changes nothing.
//
// ring_write stores the new rows alone, for heads with more than 4 query rows, where several warps
// read a segment and none may write it. The launch plan and the meaning of every parameter are in
// ring_attention.py.

#include "ring_rows.cuh"
#if RING_CACHE == CACHE_FP32
#include "ring_float.cuh"
#else
#include "ring_tensor.cuh"
#endif

constexpr int WIDE_WARPS = 4;
constexpr int CHUNKS = SEGMENT_ROWS / CHUNK_ROWS;
constexpr int HELD = STATES * (SUMS + 2);  // floats per lane in a partial

// Partials lie value by value, lane by lane, so that a warp's accesses are contiguous.
__device__ __forceinline__ void store_partial(float* at, const State& state, int held, int index) {
    at += index;
#pragma unroll
    for (int q = 0; q < STATES; ++q) {
        __stcg(at, state.m[q]);
        __stcg(at + held, state.l[q]);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) __stcg(at + (2 + i) * held, state.sum[q][i]);
        at += (2 + SUMS) * held;
    }
}

__device__ __forceinline__ void load_partial(State& state, const float* at, int held, int index) {
    at += index;
#pragma unroll
    for (int q = 0; q < STATES; ++q) {
        state.m[q] = __ldcg(at);
        state.l[q] = __ldcg(at + held);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) state.sum[q][i] = __ldcg(at + (2 + i) * held);
        at += (2 + SUMS) * held;
    }
}

__device__ __forceinline__ void write_output(const RingParams& a, const Work& work,
                                             const State& state) {
    int lane = threadIdx.x % LANES;
    int group = a.query_heads / a.kv_heads;
    float scale = a.v_scale != nullptr ? a.v_scale[work.head] : 1.0f;
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
        int query = work.first_query + lane_query(lane, s);
        if (query >= work.queries) continue;
        long long row = (long long)work.b * a.rows_per_step + query / group;
        long long at = row * a.out_stride + (work.head * group + query % group) * D;
        float weight = __fdiv_rn(scale, state.l[s]);
#pragma unroll
        for (int pair = 0; pair < SUMS / 2; ++pair) {
            float x = __fmul_rn(state.sum[s][2 * pair], weight);
            float y = __fmul_rn(state.sum[s][2 * pair + 1], weight);
            long long element = at + sum_index(lane, pair);
            if (RING_CACHE == CACHE_FP32)
                *(float2*)((float*)a.out + element) = make_float2(x, y);
            else
                *(u32*)((u16*)a.out + element) = pack_bf16(x, y);
        }
    }
}

// One warp hands in a finished segment; the last of the row's segments folds the row.
__device__ __forceinline__ void finish_segment(const RingParams& a, const Work& work,
                                               const State& state, int segment, int segments,
                                               int row) {
    int lane = threadIdx.x % LANES;
    int queries = min(4, work.queries - work.first_query);
    bool holds = lane_holds(lane, queries);
    State total;
    clear(total);
    if (segments == 1) {
        fold(total, state);
    } else {
        int held = held_lanes(queries), index = held_index(lane, queries);
        int held_most = held_lanes(min(4, work.queries));
        float* row_partials = a.partials + (long long)row * a.segments * held_most * HELD;
        float* own = row_partials + (long long)segment * held_most * HELD;
        if (holds) store_partial(own, state, held, index);
        __threadfence();
        __syncwarp();
        u32 before = 0;
        if (lane == 0) before = atomicAdd(&a.arrivals[row], 1u);
        before = __shfl_sync(~0u, before, 0);
        if (before != (u32)segments - 1) return;
        __threadfence();
        if (lane == 0) a.arrivals[row] = 0;
        if (holds) {
#pragma unroll 2
            for (int s = 0; s < segments; ++s) {
                State part;
                load_partial(part, row_partials + (long long)s * held_most * HELD, held, index);
                fold(total, part);
            }
        }
    }
    if (holds) write_output(a, work, total);
}

// A line is one group of query rows of one KV head. False: nothing to do for this segment.
__device__ __forceinline__ bool find_work(const RingParams& a, int b, int segment, int line,
                                          float* query_rows, RingClock& clock, Work& work) {
    int slot = a.slots[b];
    clock = ring_clock(a, b);
    work.b = b;
    work.head = line / a.query_groups;
    work.first_query = line % a.query_groups * 4;
    work.queries = a.rows_per_step * (a.query_heads / a.kv_heads);
    work.begin = segment * SEGMENT_ROWS;
    work.rows = min(SEGMENT_ROWS, clock.valid - work.begin);
    work.query_rows = query_rows;
    if (slot < 0 || work.rows <= 0) return false;
    long long offset = row_offset(a, slot, work.begin) + (long long)work.head * HEAD_BYTES;
    work.k = (char*)a.k_cache + offset;
    work.v = (char*)a.v_cache + offset;
    return true;
}

extern "C" __global__ void __launch_bounds__(WIDE_WARPS* LANES, RING_WIDE_WARPS / WIDE_WARPS)
    ring_attention_wide(const __grid_constant__ RingParams a) {
    __shared__ float query_rows[WIDE_WARPS][4 * D];
    int warp = threadIdx.x / LANES;
    int lines = a.kv_heads * a.query_groups;
    int blocks = (lines + WIDE_WARPS - 1) / WIDE_WARPS;
    int line = blockIdx.x % blocks * WIDE_WARPS + warp;
    int segment = blockIdx.x / blocks % a.segments;
    int b = blockIdx.x / blocks / a.segments;
    RingClock clock;
    Work work;
    if (line >= lines || !find_work(a, b, segment, line, query_rows[warp], clock, work)) return;
    if (a.write_rows) write_new_rows(a, clock, work, 0, SEGMENT_ROWS);
    State state;
    clear(state);
    attend(state, a, clock, work, 0, work.rows);
    finish_segment(a, work, state, segment, (clock.valid + SEGMENT_ROWS - 1) / SEGMENT_ROWS,
                   b * lines + line);
}

extern "C" __global__ void __launch_bounds__(CHUNKS* LANES, RING_NARROW_WARPS / CHUNKS)
    ring_attention_narrow(const __grid_constant__ RingParams a) {
    __shared__ float query_rows[CHUNKS][4 * D];
    __shared__ float partials[CHUNKS][LANES * HELD];
    int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    int lines = a.kv_heads * a.query_groups;
    int line = blockIdx.x % lines;
    int segment = blockIdx.x / lines % a.segments;
    int b = blockIdx.x / lines / a.segments;
    RingClock clock;
    Work work;
    if (!find_work(a, b, segment, line, query_rows[warp], clock, work)) return;  // whole block
    int first = warp * CHUNK_ROWS;
    int chunks = (work.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    State state;
    clear(state);
    if (warp < chunks) {
        if (a.write_rows) write_new_rows(a, clock, work, first, first + CHUNK_ROWS);
        State chunk;
        clear(chunk);
        attend(chunk, a, clock, work, first, min(first + CHUNK_ROWS, work.rows));
        if (warp > 0) {
            float* at = partials[warp] + lane;
#pragma unroll
            for (int q = 0; q < STATES; ++q) {
                at[(q * (SUMS + 2)) * LANES] = chunk.m[q];
                at[(q * (SUMS + 2) + 1) * LANES] = chunk.l[q];
#pragma unroll
                for (int i = 0; i < SUMS; ++i)
                    at[(q * (SUMS + 2) + 2 + i) * LANES] = chunk.sum[q][i];
            }
        } else {
            state = chunk;
        }
    }
    __syncthreads();
    if (warp > 0) return;
    for (int c = 1; c < chunks; ++c) {
        const float* at = partials[c] + lane;
        State chunk;
#pragma unroll
        for (int q = 0; q < STATES; ++q) {
            chunk.m[q] = at[(q * (SUMS + 2)) * LANES];
            chunk.l[q] = at[(q * (SUMS + 2) + 1) * LANES];
#pragma unroll
            for (int i = 0; i < SUMS; ++i)
                chunk.sum[q][i] = at[(q * (SUMS + 2) + 2 + i) * LANES];
        }
        fold(state, chunk);
    }
    finish_segment(a, work, state, segment, (clock.valid + SEGMENT_ROWS - 1) / SEGMENT_ROWS,
                   b * lines + line);
}

// One warp per KV head of one session; the grid is (batch, kv_heads).
extern "C" __global__ void __launch_bounds__(LANES)
    ring_write(const __grid_constant__ RingParams a) {
    int b = blockIdx.x, slot = a.slots[b];
    if (slot < 0) return;
    RingClock clock = ring_clock(a, b);
    int previous = -1;
    for (int p = 0; p < a.rows_per_step; ++p) {
        int row = clock.start + p;
        if (row >= a.capacity) row -= a.capacity;
        if (row / SEGMENT_ROWS == previous) continue;  // the segment's rows went together
        previous = row / SEGMENT_ROWS;
        Work work = {};
        work.b = b;
        work.head = blockIdx.y;
        work.begin = previous * SEGMENT_ROWS;
        long long offset = row_offset(a, slot, work.begin) + (long long)work.head * HEAD_BYTES;
        work.k = (char*)a.k_cache + offset;
        work.v = (char*)a.v_cache + offset;
        write_new_rows(a, clock, work, 0, SEGMENT_ROWS);
    }
}
