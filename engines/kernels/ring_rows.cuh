// Rows of a ring: where they lie, how elements are stored, and how the new ones get there.
//
// Decides: the parameter block (its twin is RingParams in ring_attention.py: change both), the
// stored form of one element, the rotation of q and k, and which rows a query may see.
// Does not know how attention is computed or how the work is spread over blocks.
//
// Compiled with these macros (ring_attention.py sets them):
//   RING_CACHE     0 bfloat16, 1 float8 e4m3, 2 int8, 3 float32 (then inputs and output are float32 too)
//   RING_HEAD_DIM  64 or 128
//   RING_STEP_ROWS rows written and queries asked per step, 1..4
//   RING_QUERIES   float32 only: query rows held by one warp, 1..4
//   RING_SEGMENT_ROWS, RING_WIDE_BUFFERS, RING_WIDE_WARPS, RING_NARROW_WARPS
//                  see RingTuning in ring_attention.py

#define CACHE_BF16 0
#define CACHE_E4M3 1
#define CACHE_INT8 2
#define CACHE_FP32 3

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

constexpr int D = RING_HEAD_DIM;
constexpr int STEP_ROWS = RING_STEP_ROWS;
constexpr int ELEMENT_BYTES = RING_CACHE == CACHE_FP32 ? 4 : RING_CACHE == CACHE_BF16 ? 2 : 1;
constexpr int IO_BYTES = RING_CACHE == CACHE_FP32 ? 4 : 2;
constexpr int HEAD_BYTES = D * ELEMENT_BYTES;

constexpr int LANES = 32;
constexpr int SEGMENT_ROWS = RING_SEGMENT_ROWS;  // rows folded before a partial leaves the SM
constexpr int PAGE_ROWS = 256;                   // a segment never straddles two pages
static_assert(PAGE_ROWS % SEGMENT_ROWS == 0, "a segment must lie in one page");

// Units (2 KiB of ring rows, 16 registers) that a warp keeps under way, of the ``units`` of a chunk.
// Narrow ones share a multiprocessor with more warps, and have only the one chunk to read.
template <bool NARROW>
__device__ constexpr int buffers(int units) {
    return NARROW ? units / 2 : RING_WIDE_BUFFERS < units ? RING_WIDE_BUFFERS : units;
}

struct RingParams {
    const void* q;
    const void* k_new;
    const void* v_new;
    void* out;
    void* k_cache;
    void* v_cache;
    const float* k_scale;
    const float* v_scale;
    const float* rope_frequency;
    const long long* positions;
    const int* slots;
    const int* page_table;
    float* partials;
    u32* arrivals;
    long long slot_stride_bytes;
    long long piece_gap_bytes;
    int row_stride_bytes;
    int q_stride;
    int k_stride;
    int v_stride;
    int out_stride;
    int batch;
    int segments_per_warp;
    int query_heads;
    int kv_heads;
    int capacity;
    int segments;
    int pages_per_slot;
    int query_groups;
    int write_rows;
    int piece_shift;
    float score_scale;
};
static_assert(sizeof(RingParams) == 192, "RingParams in ring_attention.py must match");

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What a session's clock says about its ring, after this step's rows are in.
struct RingClock {
    u32 position;  // rows written before this step; 2^32 frames are ten years at 12.5 Hz
    int start;     // ring row of the first new row
    int valid;     // rows that hold something
};

__device__ __forceinline__ RingClock ring_clock(const RingParams& a, int b) {
    RingClock clock;
    clock.position = (u32)a.positions[b];
    clock.start = (int)(clock.position % (u32)a.capacity);
    u64 written = (u64)clock.position + (u64)STEP_ROWS;
    clock.valid = written < (u64)a.capacity ? (int)written : a.capacity;
    return clock;
}

// All of the step's rows are in the ring before anyone attends (upstream Mimi's order), so the
// earlier of two queries must not see the later row, nor the row that one evicted.
__device__ __forceinline__ bool is_future_row(int row, int query, const RingClock& clock,
                                              const RingParams& a) {
    int age = row - clock.start;
    if (age < 0) age += a.capacity;
    return age < STEP_ROWS && age > query;
}

// One warp's share: some rows of one segment, for one group of up to 4 query rows of one KV head.
struct Work {
    int b, head;
    int first_query, queries;  // of STEP_ROWS * query_heads / kv_heads
    int slot, segment;
    int begin;                 // ring row where the segment begins; rows count from there
    int rows;                  // valid rows in the segment
    long long offset;          // bytes into k_cache and v_cache of this head of row ``begin``
    float* shared;             // WARP_FLOATS of shared memory, this warp's
};

// What is known of a softmax over some rows: maximum (of scores in powers of two), sum, weighted
// values. Q query rows, N sums each.
template <int Q, int N>
struct Partial {
    float m[Q], l[Q], sum[Q][N];
};

template <int Q, int N>
__device__ __forceinline__ void clear(Partial<Q, N>& x) {
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        x.m[q] = -infinity();
        x.l[q] = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) x.sum[q][i] = 0.0f;
    }
}

// Rounding is spelled out: the same two partials fold to the same bits wherever they meet.
template <int Q, int N>
__device__ __forceinline__ void fold(Partial<Q, N>& into, const Partial<Q, N>& part) {
#pragma unroll
    for (int q = 0; q < Q; ++q) {
        float m = fmaxf(into.m[q], part.m[q]);
        float shift = m == -infinity() ? 0.0f : m;
        float x = exp2_approx(__fsub_rn(into.m[q], shift));
        float y = exp2_approx(__fsub_rn(part.m[q], shift));
        into.m[q] = m;
        into.l[q] = __fmaf_rn(into.l[q], x, __fmul_rn(part.l[q], y));
#pragma unroll
        for (int i = 0; i < N; ++i)
            into.sum[q][i] = __fmaf_rn(into.sum[q][i], x, __fmul_rn(part.sum[q][i], y));
    }
}

// Byte offset in k_cache and v_cache of head 0 of ring row ``row`` of one slot.
__device__ __forceinline__ long long row_offset(const RingParams& a, int slot, int row) {
    if (a.page_table != nullptr) {
        int page = a.page_table[(long long)slot * a.pages_per_slot + row / PAGE_ROWS];
        return ((long long)page * PAGE_ROWS + row % PAGE_ROWS) * a.row_stride_bytes;
    }
    return (long long)slot * a.slot_stride_bytes + (long long)row * a.row_stride_bytes +
           (row >> a.piece_shift) * a.piece_gap_bytes;
}

// What lies between row ``begin`` of a segment and its chunk at ``first`` beside the rows: the
// pieces of other rings. Pieces hold whole chunks, so within a chunk rows follow each other.
__device__ __forceinline__ long long chunk_gap(const RingParams& a, int first) {
    return (first >> a.piece_shift) * a.piece_gap_bytes;
}

// Point ``work`` at another segment of the same session and head.
__device__ __forceinline__ void move_work(Work& work, const RingParams& a, const RingClock& clock,
                                          int segment) {
    work.segment = segment;
    work.begin = segment * SEGMENT_ROWS;
    work.rows = min(SEGMENT_ROWS, clock.valid - work.begin);
    work.offset = row_offset(a, work.slot, work.begin) + work.head * HEAD_BYTES;
}

__device__ __forceinline__ float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float2 load_pair(const void* base, long long element) {
    if (IO_BYTES == 4) return *(const float2*)((const float*)base + element);
    u32 bits = *(const u32*)((const u16*)base + element);
    return make_float2(bf16_to_float(bits & 0xffffu), __uint_as_float(bits & 0xffff0000u));
}

// Interleaved rotation, trigonometry in float32; the frequencies are a table so that every
// executor multiplies the position by the same bits.
__device__ __forceinline__ float2 rotate(float2 x, u32 position, float frequency) {
    float sine, cosine;
    sincosf(__fmul_rn((float)position, frequency), &sine, &cosine);
    return make_float2(__fsub_rn(__fmul_rn(x.x, cosine), __fmul_rn(x.y, sine)),
                       __fadd_rn(__fmul_rn(x.x, sine), __fmul_rn(x.y, cosine)));
}

// Round to nearest even, saturate at 448; written out because hardware has it only from sm_89 on.
__device__ __forceinline__ u32 float_to_e4m3(float x) {
    u32 bits = __float_as_uint(x);
    u32 sign = (bits >> 24) & 0x80u;
    float size = fabsf(x);
    if (!(size <= 448.0f)) return sign | (size != size ? 0x7fu : 0x7eu);
    if (size < 0.015625f) return sign | (u32)rintf(size * 512.0f);
    u32 rounded = (bits & 0x7fffffffu) + 0x7ffffu + ((bits >> 20) & 1u);
    return sign | ((rounded >> 20) - (120u << 3));
}

__device__ __forceinline__ u32 float_to_int8(float x) {
    return (u32)(int)fminf(fmaxf(rintf(x), -127.0f), 127.0f) & 0xffu;
}

// Store elements 2 * pair and 2 * pair + 1 of one head of one row.
__device__ __forceinline__ void store_pair(char* head, int pair, float2 x, float scale) {
    if (RING_CACHE == CACHE_FP32) {
        ((float2*)head)[pair] = x;
    } else if (RING_CACHE == CACHE_BF16) {
        ((u32*)head)[pair] = pack_bf16(x.x, x.y);
    } else {
        float low = __fdiv_rn(x.x, scale), high = __fdiv_rn(x.y, scale);
        u32 bits = RING_CACHE == CACHE_E4M3 ? float_to_e4m3(low) | float_to_e4m3(high) << 8
                                            : float_to_int8(low) | float_to_int8(high) << 8;
        ((u16*)head)[pair] = (u16)bits;
    }
}

// One warp stores those of the step's rows that fall into ring rows [begin, end).
__device__ __forceinline__ void write_new_rows(const RingParams& a, const RingClock& clock,
                                               const Work& work, int begin, int end) {
    int lane = threadIdx.x % LANES;
    bool scaled = RING_CACHE == CACHE_E4M3 || RING_CACHE == CACHE_INT8;
#pragma unroll 1
    for (int p = 0; p < STEP_ROWS; ++p) {
        int row = clock.start + p;
        if (row >= a.capacity) row -= a.capacity;
        if (row < begin || row >= end) continue;
        float k_scale = scaled ? a.k_scale[work.head] : 1.0f;
        float v_scale = scaled ? a.v_scale[work.head] : 1.0f;
        long long source = (long long)work.b * STEP_ROWS + p;
        long long target = row_offset(a, work.slot, row) + work.head * HEAD_BYTES;
#pragma unroll 1
        for (int pair = lane; pair < D / 2; pair += LANES) {
            float2 key = load_pair(a.k_new, source * a.k_stride + work.head * D + 2 * pair);
            float2 value = load_pair(a.v_new, source * a.v_stride + work.head * D + 2 * pair);
            if (a.rope_frequency != nullptr)
                key = rotate(key, clock.position + (u32)p, a.rope_frequency[pair]);
            store_pair((char*)a.k_cache + target, pair, key, k_scale);
            store_pair((char*)a.v_cache + target, pair, value, v_scale);
        }
    }
    __syncwarp();  // the warp reads these rows next
}

// Rotated query rows of the work's group, float32, into its shared memory; absent ones are zero.
// Query row r of a head is position r / G, query head kv_head * G + r % G.
__device__ __forceinline__ void load_queries(const RingParams& a, const RingClock& clock,
                                             const Work& work) {
    int lane = threadIdx.x % LANES;
    int group = a.query_heads / a.kv_heads;
#pragma unroll 1
    for (int r = 0; r < 4; ++r) {
        int query = work.first_query + r;
        bool present = query < work.queries;
        int p = present ? query / group : 0;
        int query_head = work.head * group + (present ? query % group : 0);
        long long source = ((long long)work.b * STEP_ROWS + p) * a.q_stride + query_head * D;
        for (int pair = lane; pair < D / 2; pair += LANES) {
            float2 x = make_float2(0.0f, 0.0f);
            if (present) {
                x = load_pair(a.q, source + 2 * pair);
                if (a.rope_frequency != nullptr)
                    x = rotate(x, clock.position + (u32)p, a.rope_frequency[pair]);
            }
            ((float2*)(work.shared + r * D))[pair] = x;
        }
    }
    __syncwarp();
}

// 16 bytes of the ring: read once per tick, so kept out of L1.
__device__ __forceinline__ uint4 load_ring16(const char* address) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(address)
                 : "memory");
    return x;
}

__device__ __forceinline__ uint2 load_ring8(const char* address) {
    uint2 x;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(address)
                 : "memory");
    return x;
}
