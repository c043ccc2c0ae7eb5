// Attention of up to 4 query rows over ring rows, on tensor cores: bfloat16, e4m3 and int8 rings.
//
// Decides: which lane loads which bytes, and the order in which a chunk of 64 rows is summed.
// Does not know about segments, slots or who else runs.
//
// One warp, no shared memory for the ring. With lane = 4 * g + c and mma.m16n8k16:
//   scores   A = 16 ring rows x 16 of D (straight from 16-byte loads: the D index is permuted the
//            same way in A and in the query), B = queries, C[row g, g + 8][query c, as hi and lo]
//   values   A = 16 of D x 16 ring rows (two rows' bytes interleaved with prmt), B = probabilities
//            (C transposed with movmatrix), C[d][query c, as hi and lo]
// A query and a probability take two of the eight columns, x = hi + lo: the columns are there
// anyway, and rounding q and p to 16 bits is where library kernels lose most.

constexpr bool IS_BF16 = RING_CACHE == CACHE_BF16;
constexpr int CHUNK_ROWS = 64;
constexpr int STATES = 1;       // query rows per lane
constexpr int SUMS = D / 8;     // of D per lane and query row
constexpr int SPAN_BYTES = HEAD_BYTES < 128 ? HEAD_BYTES : 128;   // of one row, per unit
constexpr int SPANS = HEAD_BYTES / SPAN_BYTES;                    // units per 16 rows: 1 or 2
constexpr int UNIT_ROWS = 2048 / SPAN_BYTES;                      // a unit is 2 KiB: 16 registers
constexpr int UNIT_TILES = UNIT_ROWS / 16;
constexpr int HALF_UNITS = CHUNK_ROWS / UNIT_ROWS * SPANS;        // of K, and as many of V
constexpr int UNITS = 2 * HALF_UNITS;

using State = Partial<STATES, SUMS>;

// A warp's shared memory: the query operand, then the state. Both wait there while the other half
// of a chunk has the registers; a lane reads back only what it wrote.
constexpr int QUERY_WORDS = D / 8;  // per lane: D / 16 operands of two registers
constexpr int WARP_FLOATS = LANES * (QUERY_WORDS + SUMS + 2);
static_assert(LANES * QUERY_WORDS >= 4 * D, "rotated queries lie there first");

struct Query {
    u32 b[D / 16][2];
};

__device__ __forceinline__ bool lane_holds(int lane, int queries) { return lane % 4 < queries; }
__device__ __forceinline__ int lane_query(int lane, int) { return lane % 4; }
__device__ __forceinline__ int held_lanes(int queries) { return 8 * queries; }
__device__ __forceinline__ int held_index(int lane, int queries) {
    return lane / 4 * queries + lane % 4;
}

// D index of the first of two neighbouring sums, 2 * pair and 2 * pair + 1.
__device__ __forceinline__ int sum_index(int lane, int pair) {
    int g = lane / 4;
    if (IS_BF16) return pair / 4 * 64 + 8 * g + pair % 4 * 2;
    return SUMS * g + 2 * pair;
}

__device__ __forceinline__ u32 word(const uint4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

__device__ __forceinline__ u32 pack_half(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float2 unpack_half(u32 bits) {
    float2 x;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(x.x), "=f"(x.y)
        : "r"(bits));
    return x;
}

__device__ __forceinline__ u32 pack(float low, float high) {
    return IS_BF16 ? pack_bf16(low, high) : pack_half(low, high);
}

__device__ __forceinline__ float2 unpack(u32 bits) {
    if (!IS_BF16) return unpack_half(bits);
    return make_float2(bf16_to_float(bits & 0xffffu), __uint_as_float(bits & 0xffff0000u));
}

__device__ __forceinline__ void mma(float c[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (IS_BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 transpose(u32 x) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// Four stored bytes, in memory order, as two half pairs. Exact.
__device__ __forceinline__ void widen(u32 bytes, u32& low, u32& high) {
    if (RING_CACHE == CACHE_INT8) {
        // 0x6400 + u is the half 1024 + u; the sign bit flipped makes u = x + 128.
        u32 shifted = bytes ^ 0x80808080u;
        low = __byte_perm(shifted, 0x64646464u, 0x4140);
        high = __byte_perm(shifted, 0x64646464u, 0x4342);
        asm("sub.f16x2 %0, %0, %1;" : "+r"(low) : "r"(0x64806480u));
        asm("sub.f16x2 %0, %0, %1;" : "+r"(high) : "r"(0x64806480u));
        return;
    }
#if __CUDA_ARCH__ >= 890
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; "
        "cvt.rn.f16x2.e4m3x2 %1, h;}"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
#else
    // The exponent is 8 too small when e4m3's fields are moved to a half's; subnormals included.
    // NaN (0x7f) is read as 480 here: stored rows hold none, because storing saturates.
    u32 l = __byte_perm(bytes, 0, 0x1404), h = __byte_perm(bytes, 0, 0x3424);
    low = (l & 0x80008000u) | ((l >> 1) & 0x3f803f80u);
    high = (h & 0x80008000u) | ((h >> 1) & 0x3f803f80u);
    asm("mul.f16x2 %0, %0, %1;" : "+r"(low) : "r"(0x5c005c00u));
    asm("mul.f16x2 %0, %0, %1;" : "+r"(high) : "r"(0x5c005c00u));
#endif
}

// Turn the rotated queries in shared memory into this lane's registers of the query operand, in
// the same place: column n = 2 * query + part, part 0 the rounded value and part 1 what rounding
// lost.
__device__ __forceinline__ void split_queries(float* shared) {
    int lane = threadIdx.x % LANES, g = lane / 4, c = lane % 4;
    Query query;
#pragma unroll
    for (int f = 0; f < D / 16; ++f) {
        int d = IS_BF16 ? f / 2 * 32 + 8 * c + f % 2 * 4 : f / 4 * 64 + 16 * c + f % 4 * 4;
        float4 x = *(const float4*)(shared + g / 2 * D + d);
        u32 b0 = pack(x.x, x.y), b1 = pack(x.z, x.w);
        float2 h0 = unpack(b0), h1 = unpack(b1);
        u32 rest0 = pack(__fsub_rn(x.x, h0.x), __fsub_rn(x.y, h0.y));
        u32 rest1 = pack(__fsub_rn(x.z, h1.x), __fsub_rn(x.w, h1.y));
        query.b[f][0] = g % 2 == 0 ? b0 : rest0;
        query.b[f][1] = g % 2 == 0 ? b1 : rest1;
    }
    __syncwarp();
#pragma unroll
    for (int f = 0; f < D / 16; f += 2)
        ((uint4*)shared)[f / 2 * LANES + lane] = make_uint4(
            query.b[f][0], query.b[f][1], query.b[f + 1][0], query.b[f + 1][1]);
    __syncwarp();
}

__device__ __forceinline__ u32 shared_address(const float* shared) {
    return (u32)__cvta_generic_to_shared(shared);
}

// Volatile, so that the compiler does not keep the operand in registers from chunk to chunk.
__device__ __forceinline__ void recall_query(Query& query, const float* shared) {
    u32 at = shared_address(shared) + threadIdx.x % LANES * 16;
#pragma unroll
    for (int f = 0; f < D / 16; f += 2)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(query.b[f][0]), "=r"(query.b[f][1]), "=r"(query.b[f + 1][0]),
                       "=r"(query.b[f + 1][1])
                     : "r"(at + f / 2 * LANES * 16));
}

__device__ __forceinline__ void keep_state(const State& state, float* shared) {
    float* at = shared + LANES * QUERY_WORDS + threadIdx.x % LANES * 4;
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
        *(float4*)(at + i * LANES) = make_float4(state.sum[0][i], state.sum[0][i + 1],
                                                 state.sum[0][i + 2], state.sum[0][i + 3]);
    at = shared + LANES * (QUERY_WORDS + SUMS) + threadIdx.x % LANES * 2;
    *(float2*)at = make_float2(state.m[0], state.l[0]);
}

__device__ __forceinline__ void recall_state(State& state, const float* shared) {
    u32 at = shared_address(shared + LANES * QUERY_WORDS) + threadIdx.x % LANES * 16;
#pragma unroll
    for (int i = 0; i < SUMS; i += 4)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(state.sum[0][i]), "=f"(state.sum[0][i + 1]),
                       "=f"(state.sum[0][i + 2]), "=f"(state.sum[0][i + 3])
                     : "r"(at + i * LANES * 4)
                     : "memory");
    at = shared_address(shared + LANES * (QUERY_WORDS + SUMS)) + threadIdx.x % LANES * 8;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(state.m[0]), "=f"(state.l[0])
                 : "r"(at)
                 : "memory");
}

struct Unit {
    uint4 x[4];
};

// Rows past the last valid one are read as the last valid one and masked later: what lies
// beyond may be anything, or not be there at all.
__device__ __forceinline__ const char* row_at(const char* base, int row, int rows, int stride) {
    return base + (long long)min(row, rows - 1) * stride;
}

__device__ __forceinline__ void load_unit(Unit& unit, int u, const RingParams& a,
                                          const Work& work, int first) {
    int lane = threadIdx.x % LANES, g = lane / 4, c = lane % 4;
    int rows = work.rows, stride = a.row_stride_bytes;
    long long offset_bytes = work.offset + chunk_gap(a, first);
    const char* k = (const char*)a.k_cache + offset_bytes;
    const char* v = (const char*)a.v_cache + offset_bytes;
    if (u < HALF_UNITS) {
        int row = first + u / SPANS * UNIT_ROWS, offset = u % SPANS * SPAN_BYTES;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int part = SPAN_BYTES == 128 ? offset + i / 2 * 64 : 0;
            int tile = SPAN_BYTES == 128 ? 0 : i / 2 * 16;
            const char* from = row_at(k, row + tile + g + i % 2 * 8, rows, stride);
            unit.x[i] = load_ring16(from + part + 16 * c);
        }
        return;
    }
    u -= HALF_UNITS;
    int row = first + u / SPANS * UNIT_ROWS, offset = u % SPANS * SPAN_BYTES;
    if (SPAN_BYTES == 128) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const char* from = row_at(v, row + i / 2 * 8 + 2 * c + i % 2, rows, stride);
            unit.x[i] = load_ring16(from + offset + 16 * g);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int pair = row + i / 2 * 16 + i % 2 * 8 + 2 * c;
            uint2 x = load_ring8(row_at(v, pair, rows, stride) + 8 * g);
            uint2 y = load_ring8(row_at(v, pair + 1, rows, stride) + 8 * g);
            unit.x[i] = make_uint4(x.x, x.y, y.x, y.y);
        }
    }
}

__device__ __forceinline__ void score_unit(float scores[CHUNK_ROWS / 16][4], int u,
                                           const Unit& unit, const Query& query) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
        float* c = scores[SPAN_BYTES == 128 ? u / SPANS : u * UNIT_TILES + x];
        const uint4 &low = unit.x[2 * x], &high = unit.x[2 * x + 1];
        if (IS_BF16) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32* b = query.b[(u % SPANS * 2 + x) * 2 + i];
                mma(c, word(low, 2 * i), word(high, 2 * i), word(low, 2 * i + 1),
                    word(high, 2 * i + 1), b[0], b[1]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32* b = query.b[SPAN_BYTES == 128 ? x * 4 + i : i];
                u32 a0, a1, a2, a3;
                widen(word(low, i), a0, a2);
                widen(word(high, i), a1, a3);
                mma(c, a0, a1, a2, a3, b[0], b[1]);
            }
        }
    }
}

__device__ __forceinline__ void value_unit(float sums[SUMS / 2][4], int u, const Unit& unit,
                                           const u32 p[CHUNK_ROWS / 16][2]) {
    int tile = u / SPANS * UNIT_TILES;
    if (IS_BF16) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 r0 = word(unit.x[0], j), r1 = word(unit.x[1], j);
            u32 r2 = word(unit.x[2], j), r3 = word(unit.x[3], j);
            mma(sums[u % SPANS * 4 + j], __byte_perm(r0, r1, 0x5410), __byte_perm(r0, r1, 0x7632),
                __byte_perm(r2, r3, 0x5410), __byte_perm(r2, r3, 0x7632), p[tile][0], p[tile][1]);
        }
        return;
    }
#pragma unroll
    for (int x = 0; x < UNIT_TILES; ++x) {
#pragma unroll
        for (int j = 0; j < SUMS / 2; ++j) {
            u32 r0, r1, r2, r3;
            if (SPAN_BYTES == 128) {
                r0 = word(unit.x[0], j / 2), r1 = word(unit.x[1], j / 2);
                r2 = word(unit.x[2], j / 2), r3 = word(unit.x[3], j / 2);
            } else {
                r0 = word(unit.x[2 * x], j / 2), r1 = word(unit.x[2 * x], 2 + j / 2);
                r2 = word(unit.x[2 * x + 1], j / 2), r3 = word(unit.x[2 * x + 1], 2 + j / 2);
            }
            u32 order = j % 2 == 0 ? 0x5140 : 0x7362;
            u32 a0, a1, a2, a3;
            widen(__byte_perm(r0, r1, order), a0, a1);
            widen(__byte_perm(r2, r3, order), a2, a3);
            mma(sums[j], a0, a1, a2, a3, p[tile + x][0], p[tile + x][1]);
        }
    }
}

// Scores of one chunk -> its maximum, its sum, and the probabilities as the value operand.
__device__ __forceinline__ void soften(State& chunk, u32 p[CHUNK_ROWS / 16][2],
                                       const float scores[CHUNK_ROWS / 16][4], int first,
                                       const Work& work, int position, const RingClock& clock,
                                       const RingParams& a, float scale) {
    int g = threadIdx.x % LANES / 4;
    float s[CHUNK_ROWS / 16][2];
    float m = -infinity();
#pragma unroll
    for (int t = 0; t < CHUNK_ROWS / 16; ++t)
#pragma unroll
        for (int y = 0; y < 2; ++y) {
            int row = first + 16 * t + 8 * y + g;
            float x = __fmul_rn(__fadd_rn(scores[t][2 * y], scores[t][2 * y + 1]), scale);
            bool hidden = row >= work.rows;
            if (STEP_ROWS > 1) hidden |= is_future_row(work.begin + row, position, clock, a);
            s[t][y] = hidden ? -infinity() : x;
            m = fmaxf(m, s[t][y]);
        }
#pragma unroll
    for (int step = 4; step < LANES; step *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, step));
    float shift = m == -infinity() ? 0.0f : m, l = 0.0f;
#pragma unroll
    for (int t = 0; t < CHUNK_ROWS / 16; ++t)
#pragma unroll
        for (int y = 0; y < 2; ++y) {
            float x = exp2_approx(__fsub_rn(s[t][y], shift));
            l = __fadd_rn(l, x);
            float high = unpack(pack(x, 0.0f)).x;
            p[t][y] = transpose(pack(x, __fsub_rn(x, high)));
        }
#pragma unroll
    for (int step = 4; step < LANES; step *= 2) l = __fadd_rn(l, __shfl_xor_sync(~0u, l, step));
    chunk.m[0] = m;
    chunk.l[0] = l;
}

// Attend over whole segments from ``work``'s up to ``segment_end``, ring rows in order, and call
// ``emit(state)`` after each; or, NARROW, over the one chunk at ``first``. ``work`` moves along.
template <bool NARROW, class Emit>
__device__ __forceinline__ void attend(const RingParams& a, const RingClock& clock, Work& work,
                                       int first, int segment_end, Emit emit) {
    float scale = a.score_scale;
    if (RING_CACHE != CACHE_BF16) scale = __fmul_rn(scale, a.k_scale[work.head]);
    constexpr int BUFFERS = buffers<NARROW>(UNITS);
    static_assert(UNITS % BUFFERS == 0, "unit u of every chunk must lie in buffer u % BUFFERS");
    Unit buffer[BUFFERS];
#pragma unroll
    for (int u = 0; u < BUFFERS; ++u) load_unit(buffer[u], u, a, work, first);
    load_queries(a, clock, work);  // while the first units are under way
    split_queries(work.shared);
    int position = (work.first_query + (int)(threadIdx.x % 4)) / (a.query_heads / a.kv_heads);

    State state;
    clear(state);
    if (!NARROW) keep_state(state, work.shared);
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
        float scores[CHUNK_ROWS / 16][4] = {}, sums[SUMS / 2][4] = {};
        u32 p[CHUNK_ROWS / 16][2];
        State chunk;
        Query query;
        recall_query(query, work.shared);
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if (u == HALF_UNITS) soften(chunk, p, scores, first, work, position, clock, a, scale);
            if (u < HALF_UNITS)
                score_unit(scores, u, buffer[u % BUFFERS], query);
            else
                value_unit(sums, u - HALF_UNITS, buffer[u % BUFFERS], p);
            if (u + BUFFERS < UNITS)
                load_unit(buffer[u % BUFFERS], u + BUFFERS, a, work, first);
            else if (more)
                load_unit(buffer[u % BUFFERS], u + BUFFERS - UNITS, a, next, next_first);
        }
#pragma unroll
        for (int pair = 0; pair < SUMS / 2; ++pair) {
            chunk.sum[0][2 * pair] = __fadd_rn(sums[pair][0], sums[pair][1]);
            chunk.sum[0][2 * pair + 1] = __fadd_rn(sums[pair][2], sums[pair][3]);
        }
        if (!NARROW) recall_state(state, work.shared);
        fold(state, chunk);
        if (ends) {
            emit(state);
            clear(state);
        }
        if (!more) break;
        keep_state(state, work.shared);
        work = next;
        first = next_first;
    }
}
