// The depth transformer's own kernels: attention over the steps of one tick, and choosing.
//
// Its products are those of `linear.cu`. Keys and values of all steps stay where the QKV products
// put them, (step, B, 3 D) per layer, and are read from there.

#include "linear_types.cuh"

constexpr int MOST_STEPS = 16;
constexpr int FEW_STEPS = 8;  // that all fit in registers

struct AttendParams {
    u64 qkv;  // (steps, B, 3 D) Element: of one layer
    u64 y;    // (B, D) Element
    u32 batch;
    u32 features;  // D
    u32 heads;
    u32 step;  // this one; steps 0..step are seen
    float scale;
    u32 reserved;
};

// Sums over the steps seen, for any width of a head: rows are read as they are needed.
__device__ __forceinline__ void attend_wide(const AttendParams& p, const Element* own,
                                            const Element* query, Element* y, u32 width,
                                            u32 lane) {
    u64 stride = (u64)p.batch * 3 * p.features;
    float scores[MOST_STEPS], most = __uint_as_float(0xff800000u);
#pragma unroll
    for (int k = 0; k < MOST_STEPS; k++) {
        if (k > p.step) break;
        const Element* key = own + p.features + k * stride;
        float score = 0;
        for (u32 i = lane; i < width; i += LANES)
            score = fmaf(widened(query[i]), widened(key[i]), score);
        for (int half = 16; half; half /= 2) score += __shfl_xor_sync(~0u, score, half);
        scores[k] = score * p.scale;
        most = fmaxf(most, scores[k]);
    }
    float weights = 0;
#pragma unroll
    for (int k = 0; k < MOST_STEPS; k++) {
        if (k > p.step) break;
        scores[k] = expf(scores[k] - most);
        weights += scores[k];
    }
    for (u32 i = lane; i < width; i += LANES) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < MOST_STEPS; k++) {
            if (k > p.step) break;
            sum = fmaf(scores[k], widened((own + 2 * p.features + k * stride)[i]), sum);
        }
        y[i] = narrowed(p.step ? sum / weights : widened((own + 2 * p.features)[i]));
    }
}

// The same for heads of up to 64 and up to 8 steps: everything is read before anything is summed.
__device__ __forceinline__ void attend_narrow(const AttendParams& p, const Element* own,
                                              const Element* query, Element* y, u32 width,
                                              u32 lane) {
    u64 stride = (u64)p.batch * 3 * p.features;
    float q[2], keys[FEW_STEPS][2], values[FEW_STEPS][2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        u32 i = lane + j * LANES;
        q[j] = i < width ? widened(query[i]) : 0.0f;
#pragma unroll
        for (int k = 0; k < FEW_STEPS; k++) {
            bool is_seen = i < width && k <= p.step;
            const Element* at = own + p.features + k * stride + i;
            keys[k][j] = is_seen ? widened(at[0]) : 0.0f;
            values[k][j] = is_seen ? widened(at[p.features]) : 0.0f;
        }
    }
    float scores[FEW_STEPS], most = __uint_as_float(0xff800000u), weights = 0;
#pragma unroll
    for (int k = 0; k < FEW_STEPS; k++) {
        float score = fmaf(q[1], keys[k][1], fmaf(q[0], keys[k][0], 0.0f));
        for (int half = 16; half; half /= 2) score += __shfl_xor_sync(~0u, score, half);
        scores[k] = score * p.scale;
        if (k <= p.step) most = fmaxf(most, scores[k]);
    }
#pragma unroll
    for (int k = 0; k < FEW_STEPS; k++) {
        scores[k] = expf(scores[k] - most);
        if (k <= p.step) weights += scores[k];
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < FEW_STEPS; k++)
            if (k <= p.step) sum = fmaf(scores[k], values[k][j], sum);
        u32 i = lane + j * LANES;
        if (i < width) y[i] = narrowed(p.step ? sum / weights : values[0][j]);
    }
}

// grid (B * heads / WARPS). A warp per session and head.
extern "C" __global__ void __launch_bounds__(THREADS) depth_attend(AttendParams p) {
    let_others_start();
    wait_for_others();
    u32 unit = blockIdx.x * WARPS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (unit >= p.batch * p.heads) return;
    u32 b = unit / p.heads, head = unit % p.heads, width = p.features / p.heads;
    const Element* own = (const Element*)p.qkv + (u64)b * 3 * p.features + head * width;
    const Element* query = own + (u64)p.step * p.batch * 3 * p.features;
    Element* y = (Element*)p.y + (u64)b * p.features + head * width;
    if (width <= 2 * LANES && p.step < FEW_STEPS)
        attend_narrow(p, own, query, y, width, lane);
    else
        attend_wide(p, own, query, y, width, lane);
}

constexpr int CHOOSERS = 1024;
constexpr int MOST_CANDIDATES = 1024;
constexpr u32 HELD = 32;  // keys of a thread: 32,768 tokens; those beyond are read again and again
constexpr int MOST_STREAMS = 64;

struct ChooseParams {
    u64 logits;       // (B, N) float
    u64 noise;        // (B, R, K) float; row `row` of it
    u64 temperature;  // (B,) float
    u64 top_k;        // (B,) int64
    u64 chosen;       // (B, 1 + steps) int64; column `row` is written
    u64 table;        // (N + 1, D) Element: embedding of what was chosen; 0 after the last step
    u64 add;          // (B, add_stride) Element: the next step's input but for that row
    u64 y;            // (B, D) Element: their sum
    // After the last step: the delay ring, and the frame that is now complete.
    u64 tokens;  // (B, S, R) int64
    u64 moved;   // (B, S, R) int64
    u64 offset;  // (B,) int64; counts this tick already
    u64 text;    // (B,) int64
    u64 codes;   // (B, steps) int64
    u64 valid;   // (B,) bool
    u32 count;   // N
    u32 candidates;
    u32 noise_rows;
    u32 noise_width;
    u32 row;
    u32 columns;  // 1 + steps
    u32 features;
    u32 add_stride;
    u32 streams;
    u32 ring_rows;
    int max_delay;
    int text_padding;
    u32 passes;  // of 8 bits that can differ in a logit
    u32 reserved;
    int delays[MOST_STREAMS];
};

// Larger floats have larger keys; -0 and 0 are equal.
__device__ __forceinline__ u32 key_of(float x) {
    u32 bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float of_key(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The digit in which the `left`-th largest entry lies, how many entries lie above that digit, and
// how many in it. All CHOOSERS threads call it; histogram is complete after the barrier in here.
__device__ __forceinline__ void find_digit(const u32* histogram, u32* scan, u32 left, u32* digit,
                                           u32* above, u32* in) {
    u32 me = threadIdx.x;
    __syncthreads();
    u32 mine = 0, sum = 0, lane = me % LANES;
    if (me < 256) {  // 8 warps; thread `me` looks at digit 255 - me
        sum = mine = histogram[255 - me];
        for (int step = 1; step < LANES; step *= 2) {
            u32 other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == LANES - 1) scan[me / LANES] = sum;
    }
    __syncthreads();
    if (me < 256) {
        for (int w = 0; w < me / LANES; w++) sum += scan[w];
        if (sum >= left && sum - mine < left) {
            *digit = 255 - me;
            *above = sum - mine;
            *in = mine;
        }
    }
    __syncthreads();
}

// visit(id, key) for this thread's share: ids threadIdx.x + j * CHOOSERS.
template <class Visit>
__device__ __forceinline__ void for_all(const u32 (&keys)[HELD], const float* logits, u32 count,
                                        Visit visit) {
    u32 me = threadIdx.x;
#pragma unroll
    for (u32 j = 0; j < HELD; j++)
        if (me + j * CHOOSERS < count) visit(me + j * CHOOSERS, keys[j]);
    for (u32 i = me + HELD * CHOOSERS; i < count; i += CHOOSERS) visit(i, key_of(logits[i]));
}

// grid (B). Candidates are the largest logits, ties in order of their ids. Each has noise of its
// rank; the largest logit / temperature + noise is chosen, the lower rank of two that are equal.
extern "C" __global__ void __launch_bounds__(CHOOSERS) depth_choose(ChooseParams p) {
    __shared__ u32 histogram[256];
    __shared__ u32 scan[LANES];
    __shared__ u64 found[MOST_CANDIDATES];
    __shared__ u32 bound, above, tied, more, taken;
    __shared__ u64 best[LANES];
    __shared__ i64 choice;
    let_others_start();
    wait_for_others();
    u32 b = blockIdx.x, me = threadIdx.x;
    const float* logits = (const float*)p.logits + (u64)b * p.count;
    float temperature = ((const float*)p.temperature)[b];
    i64 asked = ((const i64*)p.top_k)[b];
    bool is_greedy = temperature <= 0;
    u32 limit = asked > 0 && asked < p.candidates ? (u32)asked : p.candidates;
    if (is_greedy) limit = 1;

    // Keys that fit stay in registers, all read at once.
    u32 keys[HELD];
#pragma unroll
    for (u32 j = 0; j < HELD; j++) {
        u32 i = me + j * CHOOSERS;
        if (i < p.count) keys[j] = key_of(logits[i]);
    }

    // The key of the last candidate, eight bits at a time: `prefix` are those known so far. Bits
    // below the last pass are the same in all keys of one sign, and left out of comparisons.
    u32 prefix = 0, left = limit, known = 0xffffffffu << (32 - 8 * p.passes);
    for (u32 pass = 0; pass < p.passes; pass++) {
        u32 shift = 24 - 8 * pass, before = pass ? 0xffffffffu << (shift + 8) : 0;
        if (me < 256) histogram[me] = 0;
        __syncthreads();
        for_all(keys, logits, p.count, [&](u32, u32 key) {
            if ((key & before) == prefix) atomicAdd(&histogram[key >> shift & 255], 1);
        });
        find_digit(histogram, scan, left, &bound, &above, &tied);
        prefix |= bound << shift;
        left -= above;
        __syncthreads();
    }

    // Of more keys that are equal to it than are wanted, those of the lowest ids: the same again,
    // of what an id lacks to the largest there can be.
    u32 last = 0, wanted = left;
    if (tied > left)
        for (u32 pass = 0; pass < 4; pass++) {
            u32 shift = 24 - 8 * pass, before = pass ? 0xffffffffu << (shift + 8) : 0;
            if (me < 256) histogram[me] = 0;
            __syncthreads();
            for_all(keys, logits, p.count, [&](u32 i, u32 key) {
                u32 lack = 0xffffffffu - i;
                if ((key & known) == prefix && (lack & before) == last)
                    atomicAdd(&histogram[lack >> shift & 255], 1);
            });
            find_digit(histogram, scan, wanted, &bound, &above, &more);
            last |= bound << shift;
            wanted -= above;
            __syncthreads();
        }
    if (me == 0) taken = 0;
    __syncthreads();
    for_all(keys, logits, p.count, [&](u32 i, u32 key) {
        u32 leading = key & known, lack = 0xffffffffu - i;
        if (leading > prefix || (leading == prefix && lack >= last))
            found[atomicAdd(&taken, 1)] = (u64)key << 32 | lack;
    });
    __syncthreads();

    // A candidate's rank is the number of larger ones; entries differ, as their ids do.
    const float* noise = (const float*)p.noise + ((u64)b * p.noise_rows + p.row) * p.noise_width;
    u64 mine = 0;
    i64 id = 0;
    if (me < limit) {
        u64 entry = found[me];
        u32 larger = 0;
        for (u32 k = 0; k < limit; k++) larger += found[k] > entry;
        float heat = is_greedy ? 1.0f : temperature;
        float score = __fadd_rn(__fdiv_rn(of_key((u32)(entry >> 32)), heat), noise[larger]);
        mine = (u64)key_of(score) << 32 | (0xffffffffu - larger);
        id = 0xffffffffu - (u32)entry;
    }
    u64 most = mine;
    for (int half = 16; half; half /= 2) {
        u64 other = __shfl_xor_sync(~0u, most, half);
        most = other > most ? other : most;
    }
    if (me % LANES == 0) best[me / LANES] = most;
    __syncthreads();
    most = best[0];
    for (int w = 1; w < LANES; w++) most = best[w] > most ? best[w] : most;
    if (me < limit && mine == most) choice = id;
    __syncthreads();

    i64* chosen = (i64*)p.chosen + (u64)b * p.columns;
    if (me == 0) chosen[p.row] = choice;
    if (p.table) {
        const Element* row = (const Element*)p.table + (u64)choice * p.features;
        const Element* add = (const Element*)p.add + (u64)b * p.add_stride;
        Element* y = (Element*)p.y + (u64)b * p.features;
        for (u32 i = me; i < p.features; i += CHOOSERS)
            y[i] = narrowed(widened(add[i]) + widened(row[i]));
        return;
    }

    // Column `after` of the ring gets what was chosen; the frame whose slowest stream is known
    // now is read at its delays. Until there is one: padding, zeros, not valid.
    __syncthreads();
    i64 after = ((const i64*)p.offset)[b];
    const i64* tokens = (const i64*)p.tokens + (u64)b * p.streams * p.ring_rows;
    i64* moved = (i64*)p.moved + (u64)b * p.streams * p.ring_rows;
    u32 now = after % p.ring_rows;
    for (u32 i = me; i < p.streams * p.ring_rows; i += CHOOSERS) {
        u32 stream = i / p.ring_rows;
        moved[i] = i % p.ring_rows == now && stream < p.columns ? chosen[stream] : tokens[i];
    }
    bool is_valid = after > p.max_delay;
    if (me < p.columns) {
        i64 position = after + p.delays[me] - p.max_delay;
        u32 at = position < 0 ? 0 : position % p.ring_rows;
        i64 token = at == now ? chosen[me] : tokens[me * p.ring_rows + at];
        if (!is_valid) token = me ? 0 : p.text_padding;
        if (me) ((i64*)p.codes)[(u64)b * (p.columns - 1) + me - 1] = token;
        else ((i64*)p.text)[b] = token;
    }
    if (me == 0) ((u8*)p.valid)[b] = is_valid;
}
