// The temporal transformer's own small kernel: what was said, as the first layer's input.
//
// Everything else of a gated layer is a product (`linear.cu`) or ring attention.

#include "linear_types.cuh"

constexpr int MOST_STREAMS = 64;

struct EmbedParams {
    u64 codes;     // (B, user's) int64: what the caller said
    u64 tokens;    // (B, S, R) int64: the delay ring
    u64 offset;    // (B,) int64
    u64 moved;     // (B, S, R) int64: the ring with `codes` written into it
    u64 y;         // (B, C) Element
    u64 tables;    // u64[S]: embedding of each stream, text first
    u32 streams;
    u32 own;       // streams before the caller's
    u32 rows;      // R
    u32 features;  // C
    int text_initial;
    int initial;
    int delays[MOST_STREAMS];
};

// Element j of 16 bytes.
__device__ __forceinline__ float element_of(const uint4& x, u32 j) {
#if LINEAR_ELEMENT == 0
    return __uint_as_float(word(x, j));
#else
    return widened((Element)(word(x, j / 2) >> (j % 2 * 16)));
#endif
}

// grid (B). Writes the caller's codes at offset + delay, reads position `offset` of every stream
// (its initial id where offset <= delay), and sums the rows of those ids: streams 1, 2, ..., then
// text, rounded after every addition. Id -1 is zero; an id that no table has is taken as -1.
extern "C" __global__ void __launch_bounds__(THREADS) gated_embed(EmbedParams p) {
    __shared__ i64 ids[MOST_STREAMS];
    let_others_start();
    wait_for_others();
    u32 b = blockIdx.x;
    i64 offset = ((const i64*)p.offset)[b];
    const i64* codes = (const i64*)p.codes + (u64)b * (p.streams - p.own);
    u64 ring = (u64)b * p.streams * p.rows;
    const i64* tokens = (const i64*)p.tokens + ring;
    i64* moved = (i64*)p.moved + ring;
    for (u32 i = threadIdx.x; i < p.streams * p.rows; i += THREADS) {
        u32 stream = i / p.rows, row = i % p.rows;
        i64 id = tokens[i];
        if (stream >= p.own && row == (offset + p.delays[stream]) % p.rows)
            id = codes[stream - p.own];
        moved[i] = id;
        if (row == offset % p.rows) {
            i64 initial = stream ? p.initial : p.text_initial;
            i64 read = offset <= p.delays[stream] ? initial : id;
            ids[stream] = read < 0 || read > initial ? -1 : read;
        }
    }
    __syncthreads();
    const u64* tables = (const u64*)p.tables;
    Element* y = (Element*)p.y + (u64)b * p.features;
    // Eight rows are read before the first is added: read one by one they took 125 us.
    constexpr u32 UNIT = 16 / sizeof(Element), AT_ONCE = 8;
    if (p.features % UNIT == 0 && p.y % 16 == 0) {
        for (u32 i = threadIdx.x * UNIT; i < p.features; i += THREADS * UNIT) {
            float sums[UNIT];
            for (u32 first = 1; first <= p.streams; first += AT_ONCE) {
                uint4 rows[AT_ONCE];
#pragma unroll
                for (u32 k = 0; k < AT_ONCE; k++) {
                    u32 stream = (first + k) % p.streams;
                    rows[k] = make_uint4(0, 0, 0, 0);
                    if (first + k <= p.streams && ids[stream] >= 0)
                        rows[k] = load_row((const Element*)tables[stream] +
                                           (u64)ids[stream] * p.features + i);
                }
#pragma unroll
                for (u32 k = 0; k < AT_ONCE; k++) {
                    if (first + k > p.streams) break;
#pragma unroll
                    for (u32 j = 0; j < UNIT; j++) {
                        float value = element_of(rows[k], j);
                        sums[j] = first + k == 1 ? value : rounded(sums[j] + value);
                    }
                }
            }
#pragma unroll
            for (u32 j = 0; j < UNIT; j++) y[i + j] = narrowed(sums[j]);
        }
        return;
    }
    for (u32 i = threadIdx.x; i < p.features; i += THREADS) {
        float sum = 0;
        for (u32 k = 1; k <= p.streams; k++) {
            u32 stream = k % p.streams;
            i64 id = ids[stream];
            float value =
                id < 0 ? 0.0f
                       : widened(((const Element*)tables[stream])[(u64)id * p.features + i]);
            sum = k == 1 ? value : rounded(sum + value);
        }
        y[i] = narrowed(sum);
    }
}

struct CountParams {
    u64 counter;  // (B,) int64
    u64 moved;    // (B,) int64
    u32 batch;
    u32 reserved;
};

// grid (B / THREADS). The tick is counted.
extern "C" __global__ void __launch_bounds__(THREADS) count_ticks(CountParams p) {
    let_others_start();
    wait_for_others();
    u32 b = blockIdx.x * THREADS + threadIdx.x;
    if (b < p.batch) ((i64*)p.moved)[b] = ((const i64*)p.counter)[b] + 1;
}
