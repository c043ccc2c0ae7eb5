// Attention of up to 4 query rows over float32 ring rows, on ordinary arithmetic.
//
// For the codec, whose streamed output must equal the float32 reference to 1e-4: tensor cores
// would round to tf32. Decides which lane loads which bytes and the order in which a chunk of 32
// rows is summed; does not know about segments, slots or who else runs.
//
// One warp. A lane holds 4 of D: a row takes 16 lanes (D = 64, two rows a load) or 32 (D = 128).

constexpr int CHUNK_ROWS = 32;
constexpr int STATES = RING_QUERIES;
constexpr int SUMS = 4;
constexpr int ROW_LANES = D / 4;
constexpr int LOAD_ROWS = LANES / ROW_LANES;
constexpr int UNIT_ROWS = 4 * LOAD_ROWS;                // a unit is 2 KiB: 16 registers
constexpr int HALF_UNITS = CHUNK_ROWS / UNIT_ROWS;      // of K, and as many of V
constexpr int UNITS = 2 * HALF_UNITS;
constexpr int LANE_ROWS = CHUNK_ROWS / LOAD_ROWS;

constexpr int WARP_FLOATS = 4 * D;  // rotated queries

using State = Partial<STATES, SUMS>;

__device__ __forceinline__ bool lane_holds(int lane, int) { return lane < ROW_LANES; }
__device__ __forceinline__ int lane_query(int, int state) { return state; }
__device__ __forceinline__ int held_lanes(int) { return ROW_LANES; }
__device__ __forceinline__ int held_index(int lane, int) { return lane; }

// D index of the first of two neighbouring sums, 2 * pair and 2 * pair + 1.
__device__ __forceinline__ int sum_index(int lane, int pair) {
    return lane % ROW_LANES * 4 + 2 * pair;
}

struct Unit {
    uint4 x[4];
};

// Rows past the last valid one are read as the last valid one and masked later: what lies
// beyond may be anything, or not be there at all.
__device__ __forceinline__ void load_unit(Unit& unit, int u, const RingParams& a,
                                          const Work& work, int first) {
    int lane = threadIdx.x % LANES;
    const char* base = (const char*)(u < HALF_UNITS ? a.k_cache : a.v_cache) + work.offset +
                       chunk_gap(a, first);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int row = first + u % HALF_UNITS * UNIT_ROWS + i * LOAD_ROWS + lane / ROW_LANES;
        const char* from = base + (long long)min(row, work.rows - 1) * a.row_stride_bytes;
        unit.x[i] = load_ring16(from + lane % ROW_LANES * 16);
    }
}

__device__ __forceinline__ float4 as_floats(const uint4& x) {
    return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z),
                       __uint_as_float(x.w));
}

// Attend over whole segments from ``work``'s up to ``segment_end``, ring rows in order, and call
// ``emit(state)`` after each; or, NARROW, over the one chunk at ``first``. ``work`` moves along.
template <bool NARROW, class Emit>
__device__ __forceinline__ void attend(const RingParams& a, const RingClock& clock, Work& work,
                                       int first, int segment_end, Emit emit) {
    int lane = threadIdx.x % LANES;
    int group = a.query_heads / a.kv_heads;
    constexpr int BUFFERS = buffers<NARROW>(UNITS);
    static_assert(UNITS % BUFFERS == 0, "unit u of every chunk must lie in buffer u % BUFFERS");
    Unit buffer[BUFFERS];
#pragma unroll
    for (int u = 0; u < BUFFERS; ++u) load_unit(buffer[u], u, a, work, first);
    load_queries(a, clock, work);  // while the first units are under way
    float4 query[STATES];
#pragma unroll
    for (int q = 0; q < STATES; ++q)
        query[q] = *(const float4*)(work.shared + q * D + lane % ROW_LANES * 4);

    State state;
    clear(state);
    while (true) {
        // Where the next chunk lies: its loads start before this one is done.
        Work next = work;
        int next_first = first + CHUNK_ROWS;
        bool ends = NARROW || next_first >= work.rows;
        bool more = !ends;
        if (!NARROW && ends) {
            more = work.segment + 1 < segment_end;
            next_first = 0;
            if (more) move_work(next, a, clock, work.segment + 1);
        }
        float s[LANE_ROWS][STATES];
        State chunk;
        clear(chunk);
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if (u == HALF_UNITS) {
#pragma unroll
                for (int q = 0; q < STATES; ++q) {
                    float m = -infinity(), l = 0.0f;
#pragma unroll
                    for (int i = 0; i < LANE_ROWS; ++i) {
                        int row = first + i * LOAD_ROWS + lane / ROW_LANES;
                        bool hidden = row >= work.rows;
                        if (STEP_ROWS > 1)
                            hidden |= is_future_row(work.begin + row,
                                                    (work.first_query + q) / group, clock, a);
                        s[i][q] = hidden ? -infinity() : __fmul_rn(s[i][q], a.score_scale);
                        m = fmaxf(m, s[i][q]);
                    }
                    if (LOAD_ROWS == 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, 16));
                    float shift = m == -infinity() ? 0.0f : m;
#pragma unroll
                    for (int i = 0; i < LANE_ROWS; ++i) {
                        s[i][q] = exp2_approx(__fsub_rn(s[i][q], shift));
                        l = __fadd_rn(l, s[i][q]);
                    }
                    if (LOAD_ROWS == 2) l = __fadd_rn(l, __shfl_xor_sync(~0u, l, 16));
                    chunk.m[q] = m;
                    chunk.l[q] = l;
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float4 x = as_floats(buffer[u % BUFFERS].x[i]);
                int held = u % HALF_UNITS * 4 + i;
#pragma unroll
                for (int q = 0; q < STATES; ++q) {
                    if (u < HALF_UNITS) {
                        float dot = __fmul_rn(x.x, query[q].x);
                        dot = __fmaf_rn(x.y, query[q].y, dot);
                        dot = __fmaf_rn(x.z, query[q].z, dot);
                        dot = __fmaf_rn(x.w, query[q].w, dot);
#pragma unroll
                        for (int step = 1; step < ROW_LANES; step *= 2)
                            dot = __fadd_rn(dot, __shfl_xor_sync(~0u, dot, step));
                        s[held][q] = dot;
                    } else {
                        float* sum = chunk.sum[q];
                        sum[0] = __fmaf_rn(x.x, s[held][q], sum[0]);
                        sum[1] = __fmaf_rn(x.y, s[held][q], sum[1]);
                        sum[2] = __fmaf_rn(x.z, s[held][q], sum[2]);
                        sum[3] = __fmaf_rn(x.w, s[held][q], sum[3]);
                    }
                }
            }
            if (u + BUFFERS < UNITS)
                load_unit(buffer[u % BUFFERS], u + BUFFERS, a, work, first);
            else if (more)
                load_unit(buffer[u % BUFFERS], u + BUFFERS - UNITS, a, next, next_first);
        }
        if (LOAD_ROWS == 2) {
#pragma unroll
            for (int q = 0; q < STATES; ++q)
#pragma unroll
                for (int i = 0; i < SUMS; ++i)
                    chunk.sum[q][i] = __fadd_rn(chunk.sum[q][i],
                                                __shfl_xor_sync(~0u, chunk.sum[q][i], 16));
        }
        fold(state, chunk);
        if (ends) {
            emit(state);
            clear(state);
        }
        if (!more) break;
        work = next;
        first = next_first;
    }
}
