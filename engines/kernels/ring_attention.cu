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

constexpr int WIDE_WARPS = 2;
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
    bool scaled = RING_CACHE == CACHE_E4M3 || RING_CACHE == CACHE_INT8;
    float scale = scaled ? a.v_scale[work.head] : 1.0f;
#pragma unroll
    for (int s = 0; s < STATES; ++s) {
        int query = work.first_query + lane_query(lane, s);
        if (query >= work.queries) continue;
        long long row = (long long)work.b * STEP_ROWS + query / group;
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

__device__ __forceinline__ int line_segments(const RingClock& clock) {
    return (clock.valid + SEGMENT_ROWS - 1) / SEGMENT_ROWS;
}

// Where a line's partials begin, and how they are spread over lanes.
struct Partials {
    float* line;
    int stride, held, index;
    bool holds;
};

__device__ __forceinline__ Partials find_partials(const RingParams& a, const Work& work,
                                                  int line_index) {
    int lane = threadIdx.x % LANES;
    int queries = min(4, work.queries - work.first_query);
    Partials at;
    at.holds = lane_holds(lane, queries);
    at.held = held_lanes(queries);
    at.index = held_index(lane, queries);
    at.stride = held_lanes(min(4, work.queries)) * HELD;
    at.line = a.partials + (long long)line_index * a.segments * at.stride;
    return at;
}

// A warp hands in a finished segment; the only segment of its line is the output.
__device__ __forceinline__ void emit_segment(const RingParams& a, const RingClock& clock,
                                             const Work& work, const Partials& at,
                                             const State& state) {
    if (!at.holds) return;
    if (line_segments(clock) == 1) {
        State total;
        clear(total);
        fold(total, state);
        write_output(a, work, total);
    } else {
        store_partial(at.line + (long long)work.segment * at.stride, state, at.held, at.index);
    }
}

// After a warp has handed in ``done`` segments; whoever completes the line folds it.
__device__ __forceinline__ void arrive(const RingParams& a, const RingClock& clock,
                                       const Work& work, const Partials& at, int line_index,
                                       int done) {
    int lane = threadIdx.x % LANES, segments = line_segments(clock);
    if (segments == 1) return;
    __threadfence();
    __syncwarp();
    u32 before = 0;
    if (lane == 0) before = atomicAdd(&a.arrivals[line_index], (u32)done);
    before = __shfl_sync(~0u, before, 0);
    if (before + (u32)done != (u32)segments) return;
    __threadfence();
    if (lane == 0) a.arrivals[line_index] = 0;
    if (!at.holds) return;
    State total;
    clear(total);
    // Several partials under way at a time: with few sessions everyone waits for this.
    constexpr int TOGETHER = STATES * SUMS <= 16 ? 6 : 3;
    for (int s = 0; s < segments; s += TOGETHER) {
        State part[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            if (s + i < segments)
                load_partial(part[i], at.line + (long long)(s + i) * at.stride, at.held,
                             at.index);
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            if (s + i < segments) fold(total, part[i]);
    }
    write_output(a, work, total);
}

// A line is one group of query rows of one KV head. False: nothing to do for this segment.
__device__ __forceinline__ bool find_work(const RingParams& a, int b, int segment, int line,
                                          float* shared, RingClock& clock, Work& work) {
    work.slot = a.slots[b];
    clock = ring_clock(a, b);
    work.b = b;
    work.head = line / a.query_groups;
    work.first_query = line % a.query_groups * 4;
    work.queries = STEP_ROWS * (a.query_heads / a.kv_heads);
    work.shared = shared;
    if (work.slot < 0 || segment * SEGMENT_ROWS >= clock.valid) return false;
    move_work(work, a, clock, segment);
    return true;
}

extern "C" __global__ void __launch_bounds__(WIDE_WARPS* LANES, RING_WIDE_WARPS / WIDE_WARPS)
    ring_attention_wide(const __grid_constant__ RingParams a) {
    __shared__ __align__(16) float shared[WIDE_WARPS][WARP_FLOATS];
    int warp = threadIdx.x / LANES;
    int lines = a.kv_heads * a.query_groups;
    int blocks = (lines + WIDE_WARPS - 1) / WIDE_WARPS;
    int runs = (a.segments + a.segments_per_warp - 1) / a.segments_per_warp;
    int line = blockIdx.x % blocks * WIDE_WARPS + warp;
    int segment = blockIdx.x / blocks % runs * a.segments_per_warp;
    int b = blockIdx.x / blocks / runs;
    RingClock clock;
    Work work;
    if (line >= lines || !find_work(a, b, segment, line, shared[warp], clock, work)) return;
    int end = min(segment + a.segments_per_warp, line_segments(clock));
    if (a.write_rows) write_new_rows(a, clock, work, segment * SEGMENT_ROWS, end * SEGMENT_ROWS);
    Partials at = find_partials(a, work, b * lines + line);
    attend<false>(a, clock, work, 0, end, [&](const State& state) {
        emit_segment(a, clock, work, at, state);
    });
    arrive(a, clock, work, at, b * lines + line, end - segment);
}

extern "C" __global__ void __launch_bounds__(CHUNKS* LANES, RING_NARROW_WARPS / CHUNKS)
    ring_attention_narrow(const __grid_constant__ RingParams a) {
    __shared__ __align__(16) float shared[CHUNKS][WARP_FLOATS];
    __shared__ float partials[CHUNKS][LANES * HELD];
    int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    int lines = a.kv_heads * a.query_groups;
    int line = blockIdx.x % lines;
    int segment = blockIdx.x / lines % a.segments;
    int b = blockIdx.x / lines / a.segments;
    RingClock clock;
    Work work;
    if (!find_work(a, b, segment, line, shared[warp], clock, work)) return;  // whole block
    int first = warp * CHUNK_ROWS, begin = work.begin + first;
    int chunks = (work.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    State state;
    clear(state);
    if (warp < chunks) {
        if (a.write_rows) write_new_rows(a, clock, work, begin, begin + CHUNK_ROWS);
        attend<true>(a, clock, work, first, segment + 1, [&](const State& x) { state = x; });
        if (warp > 0) {
            float* at = partials[warp] + lane;
#pragma unroll
            for (int q = 0; q < STATES; ++q) {
                at[(q * (SUMS + 2)) * LANES] = state.m[q];
                at[(q * (SUMS + 2) + 1) * LANES] = state.l[q];
#pragma unroll
                for (int i = 0; i < SUMS; ++i)
                    at[(q * (SUMS + 2) + 2 + i) * LANES] = state.sum[q][i];
            }
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
    Partials at = find_partials(a, work, b * lines + line);
    emit_segment(a, clock, work, at, state);
    arrive(a, clock, work, at, b * lines + line, 1);
}

// One warp per KV head of one session; the grid is (batch, kv_heads).
extern "C" __global__ void __launch_bounds__(LANES)
    ring_write(const __grid_constant__ RingParams a) {
    int b = blockIdx.x;
    Work work = {};
    work.b = b;
    work.slot = a.slots[b];
    work.head = blockIdx.y;
    if (work.slot < 0) return;
    RingClock clock = ring_clock(a, b);
    write_new_rows(a, clock, work, 0, a.capacity);
}
