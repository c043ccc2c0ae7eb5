// Built-in stages and housekeeping of a tick: noise, and rows of state that move or begin anew.
//
// A row table lists the buffers of the arena's whole range: where slot 0 of a region lies, where
// its next value lies (0: updated in place), bytes per slot, and the value every element begins
// with, repeated to 8 bytes. Buffers are aligned to 256 bytes; rows only to their element.

typedef unsigned int u32;
typedef unsigned long long u64;

struct Row {
    u64 current;
    u64 next;
    u64 bytes;
    u64 fill;
};

struct RowsParams {
    u64 table;  // Row[regions], one per blockIdx.x
    u64 first;  // slot; for rows_back the number of slots
    u64 second;
};

struct NoiseParams {
    u64 seed;   // int64 (B,)
    u64 frame;  // int64 (B,)
    u64 out;    // float (B, rows, candidates)
    u32 batch;
    u32 rows;
    u32 candidates;
    u32 reserved;
};

// Copies count bytes with this row's blocks, in the widest unit both addresses allow.
__device__ void copy_bytes(u64 target, u64 source, u64 count) {
    u64 at = (u64)blockIdx.y * blockDim.x + threadIdx.x;
    u64 step = (u64)gridDim.y * blockDim.x;
    u64 all = target | source | count;
    if ((all & 15) == 0) {
        for (; at < count / 16; at += step) ((uint4*)target)[at] = ((const uint4*)source)[at];
    } else if ((all & 3) == 0) {
        for (; at < count / 4; at += step) ((u32*)target)[at] = ((const u32*)source)[at];
    } else {
        for (; at < count; at += step) ((char*)target)[at] = ((const char*)source)[at];
    }
}

// What the tick left in the second buffers becomes the state of slots 0..first-1.
extern "C" __global__ void rows_back(RowsParams p) {
    Row row = ((const Row*)p.table)[blockIdx.x];
    copy_bytes(row.current, row.next, row.bytes * p.first);
}

// Slot `second` takes over the state of slot `first`.
extern "C" __global__ void rows_move(RowsParams p) {
    Row row = ((const Row*)p.table)[blockIdx.x];
    copy_bytes(row.current + p.second * row.bytes, row.current + p.first * row.bytes, row.bytes);
}

// Slot `first` begins anew.
extern "C" __global__ void rows_reset(RowsParams p) {
    Row row = ((const Row*)p.table)[blockIdx.x];
    u64 target = row.current + p.first * row.bytes;
    u64 at = (u64)blockIdx.y * blockDim.x + threadIdx.x;
    u64 step = (u64)gridDim.y * blockDim.x;
    if (((target | row.bytes) & 3) == 0) {
        for (; at < row.bytes / 4; at += step)
            ((u32*)target)[at] = (u32)(row.fill >> ((at & 1) * 32));
    } else {
        for (; at < row.bytes; at += step)
            ((unsigned char*)target)[at] = (unsigned char)(row.fill >> ((at & 7) * 8));
    }
}

// engines/noise.py says what this computes; the words are the same, the logarithms logf's.
extern "C" __global__ void gumbel_noise(NoiseParams p) {
    u32 blocks = (p.candidates + 3) / 4;
    u32 index = blockIdx.x * blockDim.x + threadIdx.x;
    u32 batch = index / (p.rows * blocks);
    if (batch >= p.batch) return;
    u32 block = index % (p.rows * blocks);
    u64 seed = ((const u64*)p.seed)[batch], frame = ((const u64*)p.frame)[batch];
    u32 c0 = block, c1 = (u32)frame, c2 = (u32)(frame >> 32), c3 = 0;
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
    for (int turn = 0; turn < 10; ++turn) {
        u32 high0 = __umulhi(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
        u32 high1 = __umulhi(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    u32 words[4] = {c0, c1, c2, c3};
    u32 row = block / blocks, first = block % blocks * 4;
    float* out = (float*)p.out + ((u64)batch * p.rows + row) * p.candidates;
    for (int i = 0; i < 4 && first + i < p.candidates; ++i) {
        float uniform = ((float)(words[i] >> 9) + 0.5f) * 0x1p-23f;
        out[first + i] = -logf(-logf(uniform));
    }
}

struct SpreadParams {
    u64 target;
    u64 words;  // of 4 bytes
    u32 each;   // values a word: 1 float, 2 bfloat16, 4 codes of an 8-bit ring
    u32 seed;
};

// Values spread over -1..1, so that a bench does not read zeros.
extern "C" __global__ void spread_values(SpreadParams p) {
    u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; at < p.words; at += (u64)gridDim.x * blockDim.x) {
        u32 h = (u32)at * 0x9E3779B9u ^ p.seed ^ (u32)(at >> 32);
        h = (h ^ h >> 16) * 0x85EBCA6Bu;
        h = (h ^ h >> 13) * 0xC2B2AE35u;
        h ^= h >> 16;
        // Exponents of 2^-4 .. 2^-1, any sign and mantissa.
        u32 low = (h & 0x807Fu) | (0x3D80u + ((h >> 7 & 3u) << 7));
        u32 high = (h >> 16 & 0x807Fu) | (0x3D80u + ((h >> 23 & 3u) << 7));
        u32 halves = high << 16 | low, single = high << 16 | (h & 0xFFFFu);
        // Without bit 6 no byte is a NaN of e4m3.
        ((u32*)p.target)[at] = p.each == 4 ? h & 0xBFBFBFBFu : p.each == 2 ? halves : single;
    }
}
