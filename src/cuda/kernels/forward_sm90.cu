/* forward_sm90.cu: the whole forward of one (sequence, value head) in one block, for Hopper.
 *
 *     q, k, v, g --copy engine--> raw ring --prepare--> ring of chunks --state--> out
 *
 * A chunk has 32 tokens, two tiles of 16, and G is the cumulative gate (log2) counted from its
 * middle M, so that both tiles stay within the exponents of bf16: G >= 0 before M, G <= 0 past it.
 *     A, P  from k 2^G, q 2^G and k 2^-G, one product of 64 x 32 in bf16
 *     Kd = k^ 2^(G - G_0)   Qd = q^ 2^(G - G_0)   Kr = k^ 2^(G_C - G)      at most 1: fp16
 *     T = (I + A)^-1: the two diagonal tiles by substitution, T21 = -T22 A21 T11
 * Two prepare warpgroups make chunks in turn. Two state warpgroups hold S [128, 128] in fp32
 * accumulators, 64 value channels each, and walk it (x' is the transpose of x):
 *     R' = V' - S Kd'    U' = R' (T b)'    O' = S Qd' + U' P'    S <- S diag(2^(G_C - G_0)) + U' Kr
 * Bounded gate, bf16 inputs that the copy engine can read, K = V = 128; launched by launch_sm90.c.
 */
#include "cuda/forward_sm90.h"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/prepare_steps.cuh"
#include "cuda/tile/state_steps.cuh"

enum {
    CHUNK = 32,
    HALF_K = 64, /* channels in a row of 128 bytes */
    ROLE_THREADS = 128,
    THREADS = FORWARD_SM90_THREADS,
    PREPARERS = 2,
    RESCALE_CHUNKS = 4,
    NARROW_LOG2 = 10,
    HEADROOM = 3, /* log2 of how much larger values may become before f changes between them */
    RING = 3,     /* of raw stages and of chunks: chunk c is in place c % RING of both */
    A_PITCH = 40, /* pitches that keep the solve warp's accesses free of bank conflicts */
    T_PITCH = 24
};
/* 256 (168 + 88) = 65536, all there are */
#define STATE_REGISTERS   168
#define PREPARE_REGISTERS 88

/* Raw q, k, g of a chunk as the copy engine brings them: rows of 64 channels, whose 16-byte pieces
 * are permuted (swizzled()). The factors of A and P take their place: k 2^G, q 2^G, k 2^-G. */
struct raw {
    char kq[2][2 * CHUNK][128]; /* [half of K][k rows, then q rows] */
    char g[2][CHUNK][128];
};

/* What the state warpgroups read of a chunk, as wgmma wants it. */
struct chunk {
    char kq[2][2 * CHUNK][128]; /* [half of K][Kd rows, then Qd rows] fp16, swizzled */
    char kr[2][2][CHUNK][128];  /* [Kr, its rest][half of K] fp16, swizzled */
    char p[2048];               /* P: fp16, see corner() */
    float decay[TILE_K];        /* 2^(G_C - G_0) */
    char tb[2048];              /* T b, as P */
    char unused[512];
    char v[2][CHUNK][128]; /* [half of V] bf16, swizzled; out takes its place */
};
static_assert(sizeof(struct raw) % 1024 == 0 && sizeof(struct chunk) % 1024 == 0,
              "the pattern of swizzled rows starts at multiples of 1024 bytes");

/* What a prepare warpgroup works in. */
struct workshop {
    float totals[4][TILE_K];  /* gates of 8 tokens each, log2 */
    float inverse[2 * CHUNK]; /* 1 / |k|, then 1 / |q| */
    /* for the warp that solves, while the others begin the next chunk */
    float a[CHUNK][A_PITCH];    /* A / b; then 16 fp16: see t_rest() */
    uint16_t t[CHUNK][T_PITCH]; /* T's diagonal tiles, one below the other, fp16 */
    float beta[CHUNK];
};

/* What a launch does; a literal in each kernel. */
enum pass {
    WHOLE,     /* sequences from their initial to their final states */
    SUMMARIES, /* segments from zero with their v, and from the identity without: no q, no output */
    SEGMENTS   /* segments from the states that enter them */
};

/* What the block works on: a sequence or a segment of one, and a head. */
struct head {
    struct sequence seq;
    uint16_t *out;
    const void *entry; /* state image; NULL: see from_identity */
    void *exit;        /* NULL: not wanted */
    int h, length, chunks;
    int entry_is_f32, exit_is_f32;
    int from_identity; /* the state starts as 1, and v counts as 0 */
};

struct shared {
    struct raw raw[RING];
    struct chunk chunks[RING];
    struct workshop workshops[PREPARERS];
    float offset[TILE_K]; /* slope * dt_bias */
    struct head head;
    uint64_t raw_full[RING], full[RING], solved[RING], empty[RING];
};
static_assert(sizeof(struct shared) <= FORWARD_SM90_SHARED_BYTES, "the host asks for this much");

/* Byte offset of the 16-byte piece c of a row of 128 bytes. */
static __device__ __forceinline__ int swizzled(int row, int c)
{
    return 128 * row + 16 * (c ^ row % 8);
}

/* Byte offset of element (row, column) of a 32 x 32 right operand: tiles of 8 x 8, 128 bytes each. */
static __device__ __forceinline__ int corner(int row, int column)
{
    return 512 * (row / 8) + 128 * (column / 8) + 16 * (row % 8) + 2 * (column % 8);
}

static __device__ __forceinline__ int tokens_of_chunk(int length, int chunk)
{
    return min((int)CHUNK, length - chunk * CHUNK);
}

/* x, of which the compiler knows nothing: what follows from it is computed where it is used, not
 * kept in registers around the loop. */
static __device__ __forceinline__ int rederive(int x)
{
    int y;
    asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* ---- prepare warpgroups --------------------------------------------------------------------- */

/* One thread starts the copies of a chunk's q, k, g. */
static __device__ __forceinline__ void fetch_raw(const struct fkda_forward_sm90_args *a,
                                                 struct shared *s, int chunk, enum pass pass)
{
    struct raw *raw = &s->raw[chunk % RING];
    uint64_t *barrier = &s->raw_full[chunk % RING];
    const int hk = s->head.h / a->prepare.heads_per_key;
    const int row = (int)s->head.seq.begin + chunk * CHUNK, batch = (int)s->head.seq.batch;
    mbarrier_arrive_expect(barrier,
                           sizeof(struct raw) - (pass == SUMMARIES ? sizeof raw->kq / 2 : 0));
#pragma unroll
    for (int half = 0; half < 2; half++) {
        tensor_copy_4d(raw->kq[half][0], &a->k, HALF_K * half, hk, row, batch, barrier);
        if (pass != SUMMARIES)
            tensor_copy_4d(raw->kq[half][CHUNK], &a->q, HALF_K * half, hk, row, batch, barrier);
        tensor_copy_4d(raw->g[half][0], &a->g, HALF_K * half, s->head.h, row, batch, barrier);
    }
}

/* One thread starts the copy of a chunk's v. */
static __device__ __forceinline__ void fetch_values(const struct fkda_forward_sm90_args *a,
                                                    struct shared *s, int chunk)
{
    uint64_t *barrier = &s->full[chunk % RING];
    const int row = (int)s->head.seq.begin + chunk * CHUNK, batch = (int)s->head.seq.batch;
    mbarrier_arrive_expect(barrier, sizeof s->chunks[0].v);
#pragma unroll
    for (int half = 0; half < 2; half++)
        tensor_copy_4d(s->chunks[chunk % RING].v[half][0], &a->v, HALF_K * half, s->head.h, row,
                       batch, barrier);
}

/* Raw rows past the end of the sequence become zero. The warpgroup's threads share them. */
static __device__ __forceinline__ void clear_tail(struct raw *raw, int count, int thread)
{
    for (int i = thread; i < (CHUNK - count) * 48; i += ROLE_THREADS) {
        const int row = count + i / 48, part = i / 8 % 6, at = 16 * (i % 8);
        char *rows = part < 4 ? raw->kq[part / 2][part % 2 * CHUNK] : raw->g[part - 4][0];
        *(uint4 *)(rows + 128 * row + at) = make_uint4(0, 0, 0, 0);
    }
}

/* Starts the rows' products with themselves. */
static __device__ __forceinline__ void start_norms(float d[32], const struct raw *raw)
{
    const uint64_t rows = wgmma_descriptor(shared_address(raw->kq), 0, 1024, WGMMA_SWIZZLE_128);
#pragma unroll
    for (int step = 0; step < STEPS; step++) { /* descriptors count in 16 bytes */
        const uint64_t at = rows + 512 * (step / 4) + 2 * (step % 4);
        wgmma_m64n64k16_bf16(d, at, at, step > 0);
    }
    wgmma_commit();
}

/* 1 / |row| of the warp's 16 rows of k and q: the diagonal of those products. */
static __device__ __forceinline__ void finish_norms(float inverse[2 * CHUNK], const float d[32],
                                                    int warp, int lane)
{
    const int g = lane / 4;
    float x[2][2]; /* [row g, row g + 8][even, odd column] of the warp's own blocks */
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = 6 * r + i;
            x[r][i] = warp < 2 ? warp == 0 ? d[j] : d[8 + j] : warp == 2 ? d[16 + j] : d[24 + j];
        }
    if (lane % 4 == g / 2) {
        inverse[16 * warp + g] = rsqrt_approx((g % 2 ? x[0][1] : x[0][0]) + 1e-6f);
        inverse[16 * warp + g + 8] = rsqrt_approx((g % 2 ? x[1][1] : x[1][0]) + 1e-6f);
    }
}

/* Four channels of one row, bf16. */
static __device__ __forceinline__ void unpack(float x[4], uint2 raw)
{
    x[0] = bf16_low(raw.x);
    x[1] = bf16_high(raw.x);
    x[2] = bf16_low(raw.y);
    x[3] = bf16_high(raw.y);
}

static __device__ __forceinline__ uint2 pack_bf16(const float x[4])
{
    return make_uint2(cvt_rn_bf16x2(x[0], x[1]), cvt_rn_bf16x2(x[2], x[3]));
}

static __device__ __forceinline__ uint2 pack_f16(const float x[4])
{
    return make_uint2(cvt_rn_f16x2(x[0], x[1]), cvt_rn_f16x2(x[2], x[3]));
}

/* Gates of the warp's 8 tokens and the lane's 4 channels, summed away from the chunk's middle: in
 * the warps before it G of token i, less those of the warps between, is -(sum of i + 1 .. 7), else
 * the sum of 0 .. i. Returns the sum of all 8. */
static __device__ __forceinline__ void sum_gates(float G[8][4], float total[4],
                                                 const struct shared *s, const char *rows,
                                                 int piece, float slope, float bound, int count,
                                                 int warp, int lane)
{
    const float4 offset = *(const float4 *)&s->offset[4 * lane];
    const float o[4] = {offset.x, offset.y, offset.z, offset.w};
#pragma unroll
    for (int d = 0; d < 4; d++)
        total[d] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float raw[4];
        unpack(raw, *(const uint2 *)(rows + (piece ^ 16 * i) + 128 * i));
        const float scale = 8 * warp + i < count ? bound : 0.0f; /* no gate past the end */
#pragma unroll
        for (int d = 0; d < 4; d++) {
            total[d] += scale * rcp_approx(1.0f + ex2_approx(slope * raw[d] + o[d]));
            G[i][d] = total[d];
        }
    }
}

static __device__ __forceinline__ void load4(float x[4], const float *from)
{
    const float4 y = *(const float4 *)from;
    x[0] = y.x;
    x[1] = y.y;
    x[2] = y.z;
    x[3] = y.w;
}

/* The lane's 4 channels of the warp's 8 tokens: raw rows become the factors of A and P, fp16 if
 * `narrow`, else bf16; Kd, Qd, Kr go to the chunk. before: 2^(M - G_0); after: 2^(G_C - M).
 * `narrow` is a literal. */
static __device__ __forceinline__ void make_rows(struct raw *raw, struct chunk *out,
                                                 const struct workshop *shop, const float G[8][4],
                                                 const float before[4], const float after[4],
                                                 int thread, int narrow, enum pass pass)
{
    const int warp = thread / 32, lane = thread % 32;
    const float *const inverse = shop->inverse + 8 * warp;
    const bool with_q = pass != SUMMARIES;
    const int half = lane / 16, piece = 16 * (lane % 16 / 2) + 8 * (lane % 2);
    char *const raw_k = raw->kq[half][8 * warp], *const raw_g = raw->g[half][8 * warp];
    char *const chunk_k = out->kq[half][8 * warp], *const chunk_r = out->kr[0][half][8 * warp];
    /* loads stay one token ahead of the stores, past which the compiler does not move them */
    uint2 next_k = *(const uint2 *)(raw_k + piece);
    uint2 next_q = make_uint2(0, 0);
    if (with_q)
        next_q = *(const uint2 *)(raw_k + piece + 128 * CHUNK);
    float next_inverse_k = inverse[0], next_inverse_q = inverse[CHUNK];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int at = (piece ^ 16 * i) + 128 * i;
        const float inverse_k = next_inverse_k, inverse_q = next_inverse_q;
        float k[4], q[4], kd[4], qd[4], ki[4], rest[4];
        unpack(k, next_k);
        unpack(q, next_q);
        if (i < 7) {
            const int next = (piece ^ 16 * (i + 1)) + 128 * (i + 1);
            next_k = *(const uint2 *)(raw_k + next);
            if (with_q)
                next_q = *(const uint2 *)(raw_k + next + 128 * CHUNK);
            next_inverse_k = inverse[i + 1];
            next_inverse_q = inverse[CHUNK + i + 1];
        }
#pragma unroll
        for (int d = 0; d < 4; d++) {
            const float up = ex2_approx(G[i][d]), down = ex2_approx(-G[i][d]);
            k[d] *= inverse_k;
            kd[d] = k[d] * up;
            ki[d] = k[d] * down;
            qd[d] = q[d] * inverse_q * up;
        }
        *(uint2 *)(raw_k + at) = narrow ? pack_f16(kd) : pack_bf16(kd);
        if (with_q)
            *(uint2 *)(raw_k + at + 128 * CHUNK) = narrow ? pack_f16(qd) : pack_bf16(qd);
        *(uint2 *)(raw_g + at) = narrow ? pack_f16(ki) : pack_bf16(ki);
#pragma unroll
        for (int d = 0; d < 4; d++) {
            kd[d] *= before[d];
            qd[d] *= before[d];
            ki[d] *= after[d];
            const float high = __uint_as_float(__float_as_uint(ki[d]) & 0xffffe000u);
            rest[d] = ki[d] - high;
            ki[d] = high;
        }
        *(uint2 *)(chunk_k + at) = pack_f16(kd);
        if (with_q)
            *(uint2 *)(chunk_k + at + 128 * CHUNK) = pack_f16(qd);
        *(uint2 *)(chunk_r + at) = pack_f16(ki);
        *(uint2 *)(chunk_r + at + sizeof out->kr[0]) = pack_f16(rest);
    }
}

/* All factors of a chunk and its decay. Returns whether those of A and P are fp16, which is more
 * accurate and holds where no channel decays by more than 2^-NARROW_LOG2 in either tile. */
static __device__ __forceinline__ int make_factors(struct raw *raw, struct chunk *out,
                                                   const struct workshop *shop, float G[8][4],
                                                   int thread, int normed, enum pass pass)
{
    const int warp = thread / 32, lane = thread % 32;
    float before[4], after[4], least = 0.0f;
    {
        float total[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            load4(total[i], &shop->totals[i][4 * lane]);
#pragma unroll
        for (int d = 0; d < 4; d++) {
            /* G of the warps between this one and M */
            const float shift = warp == 0   ? -total[0][d] - total[1][d]
                                : warp == 1 ? -total[1][d]
                                : warp == 2 ? 0.0f
                                            : total[2][d];
            const float to_middle = total[0][d] + total[1][d], past = total[2][d] + total[3][d];
            least = fminf(least, fminf(to_middle, past));
            before[d] = ex2_approx(to_middle);
            after[d] = ex2_approx(past);
#pragma unroll
            for (int i = 0; i < 8; i++)
                G[i][d] += shift;
        }
    }
    if (warp == 0)
        *(float4 *)&out->decay[4 * lane] = make_float4(before[0] * after[0], before[1] * after[1],
                                                       before[2] * after[2], before[3] * after[3]);
    const int narrow = normed && __all_sync(~0u, least >= -NARROW_LOG2);
    if (narrow)
        make_rows(raw, out, shop, G, before, after, rederive(thread), 1, pass);
    else
        make_rows(raw, out, shop, G, before, after, rederive(thread), 0, pass);
    return narrow;
}

/* Starts A and P, whose factors are fp16 if `narrow`, a literal, else bf16. */
static __device__ __forceinline__ void start_products(float d[16], const struct raw *raw,
                                                      int narrow)
{
    const uint64_t left = wgmma_descriptor(shared_address(raw->kq), 0, 1024, WGMMA_SWIZZLE_128);
    const uint64_t right = wgmma_descriptor(shared_address(raw->g), 0, 1024, WGMMA_SWIZZLE_128);
    wgmma_pin_f32(d, 16);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; step++) { /* descriptors count in 16 bytes */
        const uint64_t x = left + 512 * (step / 4) + 2 * (step % 4);
        const uint64_t y = right + 256 * (step / 4) + 2 * (step % 4);
        if (narrow)
            wgmma_m64n32k16_f16(d, x, y, step > 0);
        else
            wgmma_m64n32k16_bf16(d, x, y, step > 0);
    }
    wgmma_commit();
}

/* Accumulators of [Kd; Qd] Ki': warps 0, 1 hold A's rows, warps 2, 3 P's. */
static __device__ __forceinline__ void store_products(const float d[16], struct workshop *shop,
                                                      struct chunk *out, int warp, int lane,
                                                      enum pass pass)
{
    const int g = lane / 4, t = lane % 4, row = 16 * (warp % 2) + g;
    if (warp < 2) {
        float *const to = &shop->a[row][2 * t];
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                *(float2 *)(to + 8 * A_PITCH * r + 8 * j) =
                    make_float2(d[4 * j + 2 * r], d[4 * j + 2 * r + 1]);
    } else if (pass != SUMMARIES) {
        char *const to = out->p + corner(row, 2 * t);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int past = row + 8 * r - 8 * j - 2 * t; /* row less column */
                *(uint32_t *)(to + corner(8 * r, 8 * j)) = cvt_rn_f16x2(
                    past >= 0 ? d[4 * j + 2 * r] : 0.0f, past >= 1 ? d[4 * j + 2 * r + 1] : 0.0f);
            }
    }
}

/* Places of T's diagonal tiles, one below the other, in two fp16 terms: the second lies behind the
 * rows of A. */
static __device__ __forceinline__ uint16_t *t_high(struct workshop *shop, int row, int column)
{
    return &shop->t[row][column];
}

static __device__ __forceinline__ uint16_t *t_rest(struct workshop *shop, int row, int column)
{
    return (uint16_t *)&shop->a[row][CHUNK] + column;
}

/* D += A B, both in two fp16 terms: all but the product of the rests. */
static __device__ __forceinline__ void multiply_terms(float d[4], const uint32_t a[4],
                                                      const uint32_t a_rest[4], const uint32_t b[2],
                                                      const uint32_t b_rest[2])
{
    mma_m16n8k16_f16(d, a, b[0], b[1]);
    mma_m16n8k16_f16(d, a, b_rest[0], b_rest[1]);
    mma_m16n8k16_f16(d, a_rest, b[0], b[1]);
}

/* The result of one product as the right operand of the next. */
static __device__ __forceinline__ void turn_product(uint32_t b[2], uint32_t b_rest[2],
                                                    const float d[4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t high, rest;
        split_f16x2(d[2 * i], d[2 * i + 1], &high, &rest);
        b[i] = movmatrix_trans(high);
        b_rest[i] = movmatrix_trans(rest);
    }
}

/* T b of a chunk, by one warp. T's diagonal blocks of 8 x 8 come from substitution in fp32, one
 * column a lane: x_t = e_t - sum_{s<t} A[t,s] x_s. Blocks below join two sides that are known:
 * T21 = -T22 (A21 T11), for 8 x 8 in both tiles at once, then for 16 x 16. With equal keys most of
 * A21 T11 cancels, so that one fp16 term would not do. */
static __device__ __forceinline__ void solve(struct workshop *shop, struct chunk *out, int lane)
{
    const int g = lane / 4, t = lane % 4;
    {
        const int first = lane & ~7;
        const float *const a = &shop->a[first][first];
        const float own = shop->beta[lane];
        float x[8], b[8], row[8][8];
        load4(b, &shop->beta[first]);
        load4(b + 4, &shop->beta[first + 4]);
#pragma unroll
        for (int i = 1; i < 8; i++) {
            load4(row[i], a + A_PITCH * i);
            if (i > 4)
                load4(row[i] + 4, a + A_PITCH * i + 4);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < i; j++)
                sum += row[i][j] * x[j];
            x[i] = (i == lane % 8 ? 1.0f : 0.0f) - b[i] * sum;
        }
        uint16_t *const high = t_high(shop, first, lane % 16);
        uint16_t *const rest = t_rest(shop, first, lane % 16);
        char *const tb = out->tb + corner(first, lane);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const __half h = __float2half_rn(x[i]);
            *(__half *)&high[T_PITCH * i] = h;
            *(__half *)&rest[2 * A_PITCH * i] = __float2half_rn(x[i] - __half2float(h));
            *(__half *)(tb + corner(i, 0)) = __float2half_rn(own * x[i]);
        }
    }
    __syncwarp(); /* the blocks of 8 are whole */
    {
        /* rows and columns 0..7 of the product belong to the first tile, 8..15 to the second */
        uint32_t left[4] = {0}, left_rest[4] = {0}, right[2], right_rest[2];
        float y[4] = {0}, z[4] = {0};
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const int row = 16 * tile + 8 + g;
            const float2 pair = *(const float2 *)&shop->a[row][16 * tile + 2 * t];
            const float b = shop->beta[row];
            split_f16x2(b * pair.x, b * pair.y, &left[3 * tile], &left_rest[3 * tile]);
        }
        const int from = 16 * (lane / 8 % 2) + lane % 8;
        ldmatrix_x2_trans(right, t_high(shop, from, 0));
        ldmatrix_x2_trans(right_rest, t_rest(shop, from, 0));
        multiply_terms(y, left, left_rest, right, right_rest);
        turn_product(right, right_rest, y);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            left[3 * tile] = *(const uint32_t *)t_high(shop, 16 * tile + 8 + g, 8 + 2 * t);
            left_rest[3 * tile] = *(const uint32_t *)t_rest(shop, 16 * tile + 8 + g, 8 + 2 * t);
        }
        multiply_terms(z, left, left_rest, right, right_rest);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const int row = 16 * tile + 8 + g;
            const float2 b = *(const float2 *)&shop->beta[16 * tile + 2 * t];
            const float low = -z[2 * tile], high = -z[2 * tile + 1];
            split_f16x2(low, high, (uint32_t *)t_high(shop, row, 2 * t),
                        (uint32_t *)t_rest(shop, row, 2 * t));
            *(uint32_t *)(out->tb + corner(row, 16 * tile + 2 * t)) =
                cvt_rn_f16x2(b.x * low, b.y * high);
        }
    }
    __syncwarp(); /* the tiles of 16 are whole */
    uint32_t left[4], left_rest[4], right[4], right_rest[4];
    float y[2][4] = {{0}}, z[2][4] = {{0}};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = 16 + g + 8 * (i % 2);
        const float2 pair = *(const float2 *)&shop->a[row][2 * t + 8 * (i / 2)];
        const float b = shop->beta[row];
        split_f16x2(b * pair.x, b * pair.y, &left[i], &left_rest[i]);
    }
    ldmatrix_x4_trans(right, t_high(shop, lane % 16, 8 * (lane / 16)));
    ldmatrix_x4_trans(right_rest, t_rest(shop, lane % 16, 8 * (lane / 16)));
#pragma unroll
    for (int n = 0; n < 2; n++)
        multiply_terms(y[n], left, left_rest, right + 2 * n, right_rest + 2 * n);
    ldmatrix_x4(left, t_high(shop, 16 + lane % 16, 8 * (lane / 16)));
    ldmatrix_x4(left_rest, t_rest(shop, 16 + lane % 16, 8 * (lane / 16)));
    char *const tb = out->tb + corner(16 + g, 2 * t);
#pragma unroll
    for (int n = 0; n < 2; n++) {
        turn_product(right, right_rest, y[n]);
        multiply_terms(z[n], left, left_rest, right, right_rest);
        const float2 b = *(const float2 *)&shop->beta[8 * n + 2 * t];
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(uint32_t *)(tb + corner(8 * r, 8 * n)) =
                cvt_rn_f16x2(-b.x * z[n][2 * r], -b.y * z[n][2 * r + 1]);
    }
}

/* Raw beta of one token of the sequence; zero past its end. The load is not waited for. */
static __device__ __forceinline__ float load_raw_beta(const struct fkda_prepare_args *a,
                                                      const struct head *w, int token)
{
    const int64_t at = w->seq.batch * a->beta.stride_b + (w->seq.begin + token) * a->beta.stride_t +
                       w->h * a->beta.stride_h;
    if (token >= w->length)
        return 0.0f;
    return a->beta_is_f32 ? ((const float *)a->beta.data)[at]
                          : __uint_as_float((uint32_t)((const uint16_t *)a->beta.data)[at] << 16);
}

static __device__ __forceinline__ float beta_of(const struct fkda_prepare_args *a, float raw)
{
    const float b = a->beta_sigmoid ? rcp_approx(1.0f + ex2_approx(-LOG2E * raw)) : raw;
    return a->allow_neg_eigval ? 2.0f * b : b;
}

/* Brings rows of a chunk to what norms and gates can read: none past the end of the sequence. */
static __device__ __forceinline__ void await_raw(struct shared *s, int chunk, int barrier,
                                                 int thread)
{
    const int count = tokens_of_chunk(s->head.length, chunk);
    mbarrier_wait(&s->raw_full[chunk % RING], chunk / RING % 2);
    if (count < CHUNK) {
        clear_tail(&s->raw[chunk % RING], count, thread);
        fence_proxy_async();
        named_barrier_sync(barrier, ROLE_THREADS); /* the zeros are there */
    }
}

static __device__ __forceinline__ void prepare_chunks(const struct fkda_forward_sm90_args *a,
                                                      struct shared *s, enum pass pass)
{
    const struct head *w = &s->head;
    const float slope = load_gate(&a->prepare, FKDA_GATE_BOUNDED, w->h).slope;
    int chunk = (threadIdx.x - 2 * ROLE_THREADS) / ROLE_THREADS;
    {
        float *const inverse = s->workshops[chunk].inverse;
        const int thread = threadIdx.x % ROLE_THREADS;
        if (chunk < w->chunks) {
            float norms[32];
            await_raw(s, chunk, 1 + chunk, thread);
            wgmma_pin_f32(norms, 32);
            wgmma_fence();
            start_norms(norms, &s->raw[chunk]);
            wgmma_wait(0);
            wgmma_pin_f32(norms, 32);
            finish_norms(inverse, norms, thread / 32, thread % 32);
        }
        __syncwarp();
        if (!a->prepare.qk_l2norm && thread % 32 < 16) /* the warp's own rows */
            inverse[16 * (thread / 32) + thread % 16] = 1.0f;
    }
    const int self = rederive(threadIdx.x - 2 * ROLE_THREADS);
    for (; chunk < w->chunks; chunk += PREPARERS) {
        const int all = rederive(self), thread = all % ROLE_THREADS;
        const int warp = thread / 32, lane = thread % 32;
        const int barrier = all / ROLE_THREADS + 1; /* of this warpgroup */
        struct workshop *const shop = &s->workshops[barrier - 1];
        const int place = chunk % RING, turn = chunk / PREPARERS;
        struct raw *raw = &s->raw[place];
        struct chunk *out = &s->chunks[place];
        const int count = tokens_of_chunk(w->length, chunk), solver = turn % 4;
        int narrow;
        float beta = 0.0f;
        if (warp == solver)
            beta = load_raw_beta(&a->prepare, w, CHUNK * chunk + lane);
        {
            const int piece = 16 * (lane % 16 / 2) + 8 * (lane % 2);
            float G[8][4], total[4];
            sum_gates(G, total, s, raw->g[lane / 16][8 * warp], piece, slope,
                      a->prepare.lower_bound_log2, count, warp, lane);
            *(float4 *)&shop->totals[warp][4 * lane] =
                make_float4(total[0], total[1], total[2], total[3]);
            if (chunk >= RING) /* the state warps have left the place */
                mbarrier_wait(&s->empty[place], chunk / RING % 2 ^ 1);
            if (thread == 0)
                fetch_values(a, s, chunk);
            named_barrier_sync(barrier, ROLE_THREADS); /* totals and norms are there */
            narrow = make_factors(raw, out, shop, G, rederive(thread), a->prepare.qk_l2norm, pass);
        }
        fence_proxy_async();
        named_barrier_sync(barrier, ROLE_THREADS); /* factors are there; totals, norms used up */

        float d[16], norms[32];
        if (narrow)
            start_products(d, raw, 1);
        else
            start_products(d, raw, 0);
        const int next = chunk + PREPARERS;
        const int more = next < w->chunks && a->prepare.qk_l2norm;
        if (next < w->chunks)
            await_raw(s, next, barrier, thread);
        wgmma_pin_f32(norms, 32);
        wgmma_fence();
        start_norms(norms, &s->raw[(more ? next : chunk) % RING]);
        wgmma_wait(1);
        wgmma_pin_f32(d, 16);
        store_products(d, shop, out, warp, lane, pass);
        fence_proxy_async();
        __syncwarp(); /* every lane's stores are fenced: lane 0 may announce them */
        if (lane == 0)
            mbarrier_arrive(&s->full[place]);
        named_barrier_sync(barrier, ROLE_THREADS); /* A is there; the raw place is free */
        if (warp == solver) {
            shop->beta[lane] = lane < count ? beta_of(&a->prepare, beta) : 0.0f;
            __syncwarp(); /* b is there */
            solve(shop, out, lane);
            fence_proxy_async();
            __syncwarp();
            if (lane == 0)
                mbarrier_arrive(&s->solved[place]);
        } else if (warp == (solver ^ 1) && lane == 0 && chunk + RING < w->chunks) {
            fetch_raw(a, s, chunk + RING, pass);
        }
        wgmma_wait(0);
        wgmma_pin_f32(norms, 32);
        if (more)
            finish_norms(shop->inverse, norms, warp, lane);
    }
}

/* ---- state warpgroups ----------------------------------------------------------------------- */

/* v of a chunk, the warp's 16 channels as rows: v[j] has tokens 8 j + 2t, + 1 of row g, then of
 * row g + 8. */
static __device__ __forceinline__ void load_values(uint32_t v[4][2], const char *rows, int warp,
                                                   int count, int lane)
{
    const int t = lane % 4;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        uint32_t x[4];
        const int token = 8 * (j + lane / 16) + lane % 8;
        ldmatrix_x4_trans(x, rows + swizzled(token, 2 * warp + lane / 8 % 2));
        v[j][0] = x[0];
        v[j][1] = x[1];
        v[j + 1][0] = x[2];
        v[j + 1][1] = x[3];
    }
    if (count < CHUNK) /* other tokens are another sequence's */
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int token = 8 * j + 2 * t;
            const uint32_t live =
                (token < count ? 0xffffu : 0u) | (token + 1 < count ? 0xffff0000u : 0u);
            v[j][0] &= live;
            v[j][1] &= live;
        }
}

/* Largest magnitude of each row's values, as bf16. Magnitudes compare as integers. */
static __device__ __forceinline__ uint32_t max_values(const uint32_t v[4][2], int r)
{
    uint32_t m = v[0][r] & 0x7fff7fffu;
#pragma unroll
    for (int j = 1; j < 4; j++)
        m = __vmaxu2(m, v[j][r] & 0x7fff7fffu);
    return max(m >> 16, m & 0xffffu);
}

/* The token, of 16, that a lane stores two pieces of: every eight lanes meet every bank once. */
static __device__ __forceinline__ int row_of_lane(int lane)
{
    return 2 * (lane / 2 % 4) + lane / 8 % 2 + lane / 16 * 8;
}

/* The warp's 16 channels of out, whose lanes hold tokens of one channel, become rows in v's place. */
static __device__ __forceinline__ void turn_rows(uint4 x[2], char *rows, const float o[16],
                                                 int warp, int lane)
{
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        uint32_t y[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            y[i] = cvt_rn_bf16x2(o[4 * j + 2 * i], o[4 * j + 2 * i + 1]);
        const int token = 8 * (j + lane / 16) + lane % 8;
        stmatrix_x4_trans(rows + swizzled(token, 2 * warp + lane / 8 % 2), y);
    }
    __syncwarp(); /* the rows are there */
    const int token = row_of_lane(lane);
    x[0] = *(const uint4 *)(rows + swizzled(token, 2 * warp + lane % 2));
    x[1] = *(const uint4 *)(rows + swizzled(token + 16, 2 * warp + lane % 2));
}

static __device__ __forceinline__ void set_identity(struct walker *x, int row, int t)
{
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            x->s[j][i] = row + 8 * (i / 2) == 8 * j + 2 * t + i % 2 ? 1.0f : 0.0f;
}

/* Every RESCALE_CHUNKS chunks f is chosen anew; between them only when a value is too large for it.
 * In that time |S| grows less than |v| would if its rows had target's bound (see TARGET_LOG2). */
static __device__ __forceinline__ void choose_scale(struct walker *x, const uint32_t v[4][2],
                                                    int due, int target)
{
    const uint32_t m[2] = {max_values(v, 0), max_values(v, 1)};
    const int e0 = (int)(m[0] >> 7) - 127, e1 = (int)(m[1] >> 7) - 127;
    if (__any_sync(~0u, due | e0 + x->f[0] > target | e1 + x->f[1] > target)) {
        const float value_max[2] = {bf16_low(m[0]), bf16_low(m[1])};
        rescale(x, value_max, target - HEADROOM);
    }
}

static __device__ __forceinline__ void walk_state(const struct fkda_forward_sm90_args *a,
                                                  struct shared *s, enum pass pass)
{
    const struct fkda_recurrence_args *r = &a->recurrence;
    const struct head *w = &s->head;
    struct walker x;
    {
        const int row = 16 * (threadIdx.x / 32) + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        load_state(&x, w->entry, w->entry_is_f32, row, t);
        if (pass == SUMMARIES && w->from_identity)
            set_identity(&x, row, t);
    }
    const int chunks = w->chunks, length = w->length, self = rederive(threadIdx.x);
    for (int i = 0; i < chunks; i++) {
        const int place = i % RING;
        const int thread = rederive(self);
        const int group = thread / ROLE_THREADS, warp = thread / 32 % 4;
        const int lane = thread % 32, t = lane % 4;
        struct chunk *chunk = &s->chunks[place];
        const int count = tokens_of_chunk(length, i);
        mbarrier_wait(&s->full[place], i / RING % 2);
        uint32_t v[4][2];
        load_values(v, chunk->v[group][0], warp, pass == SUMMARIES && w->from_identity ? 0 : count,
                    lane);
        choose_scale(&x, v, i % RESCALE_CHUNKS == 0 || !a->prepare.qk_l2norm, r->target_log2 - 1);

        /* S f as an operand; then S takes the chunk's decay */
        uint32_t sf[STEPS][4];
        const float *decay = chunk->decay + 2 * t;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            float *left = x.s[2 * step], *right = x.s[2 * step + 1];
            const float2 d = *(const float2 *)(decay + 16 * step);
            const float2 e = *(const float2 *)(decay + 16 * step + 8);
            sf[step][0] = cvt_rn_f16x2(left[0], left[1]);
            sf[step][1] = cvt_rn_f16x2(left[2], left[3]);
            sf[step][2] = cvt_rn_f16x2(right[0], right[1]);
            sf[step][3] = cvt_rn_f16x2(right[2], right[3]);
            left[0] *= d.x;
            left[1] *= d.y;
            left[2] *= d.x;
            left[3] *= d.y;
            right[0] *= e.x;
            right[1] *= e.y;
            right[2] *= e.x;
            right[3] *= e.y;
        }
        const uint64_t kd = wgmma_descriptor(shared_address(chunk->kq), 0, 1024, WGMMA_SWIZZLE_128);
        float o[16], u[16];
        wgmma_pin_u32(&sf[0][0], 4 * STEPS);
        wgmma_pin_f32(u, 16);
        wgmma_pin_f32(o, 16);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; step++) /* descriptors count in 16 bytes */
            wgmma_m64n32k16(u, sf[step], kd + 512 * (step / 4) + 2 * (step % 4), step > 0);
        wgmma_commit();
        if (pass != SUMMARIES) { /* runs while R' is made */
#pragma unroll
            for (int step = 0; step < STEPS; step++) /* Qd: 32 rows on */
                wgmma_m64n32k16(o, sf[step], kd + 256 + 512 * (step / 4) + 2 * (step % 4),
                                step > 0);
            wgmma_commit();
            wgmma_wait(1);
        } else {
            wgmma_wait(0);
        }
        wgmma_pin_f32(u, 16);
        const float f[2] = {exp2_int(x.f[0]), exp2_int(x.f[1])};
        uint32_t uf[2][4]; /* R' */
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                uf[j / 2][2 * (j % 2) + h] =
                    cvt_rn_f16x2(bf16_low(v[j][h]) * f[h] - u[4 * j + 2 * h],
                                 bf16_high(v[j][h]) * f[h] - u[4 * j + 2 * h + 1]);
        mbarrier_wait(&s->solved[place], i / RING % 2);
        const uint64_t tb =
            wgmma_descriptor(shared_address(chunk->tb), 128, 512, WGMMA_SWIZZLE_NONE);
        const uint64_t p = wgmma_descriptor(shared_address(chunk->p), 128, 512, WGMMA_SWIZZLE_NONE);
        wgmma_wait(0);
        wgmma_pin_f32(o, 16);
        wgmma_pin_u32(&uf[0][0], 8);
        wgmma_pin_f32(u, 16);
        wgmma_fence();
        wgmma_m64n32k16(u, uf[0], tb, 0);
        wgmma_m64n32k16(u, uf[1], tb + 16, 1);
        wgmma_commit();
        wgmma_wait(0);
        wgmma_pin_f32(u, 16);
        uint32_t uh[2][4];
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                uh[j / 2][2 * (j % 2) + h] = cvt_rn_f16x2(u[4 * j + 2 * h], u[4 * j + 2 * h + 1]);
        const uint64_t kr =
            wgmma_descriptor(shared_address(chunk->kr), 4096, 1024, WGMMA_SWIZZLE_128);
        wgmma_pin_u32(&uh[0][0], 8);
        wgmma_pin_f32(o, 16);
        wgmma_pin_f32(&x.s[0][0], 4 * GROUPS);
        wgmma_fence();
        if (pass != SUMMARIES) {
            wgmma_m64n32k16(o, uh[0], p, 1);
            wgmma_m64n32k16(o, uh[1], p + 16, 1);
            wgmma_commit();
        }
#pragma unroll
        for (int step = 0; step < 2; step++) {
            wgmma_m64n128k16(&x.s[0][0], uh[step], kr + 128 * step, 1);
            wgmma_m64n128k16(&x.s[0][0], uh[step], kr + 512 + 128 * step, 1); /* the rest */
        }
        wgmma_commit();
        uint4 rows[2];
        if (pass != SUMMARIES) {
            wgmma_wait(1);
            wgmma_pin_f32(o, 16);
            const float down[2] = {r->scale * exp2_int(-x.f[0]), r->scale * exp2_int(-x.f[1])};
#pragma unroll
            for (int j = 0; j < 16; j++)
                o[j] *= down[j % 4 / 2];
            turn_rows(rows, chunk->v[group][0], o, warp, lane);
        }
        fence_proxy_async(); /* v's place is the copy engine's next */
        wgmma_wait(0);
        wgmma_pin_f32(&x.s[0][0], 4 * GROUPS);
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(&s->empty[place]); /* 8 arrivals: every state warp */
        if (pass != SUMMARIES) {
            const int token = row_of_lane(lane);
            uint16_t *const out = w->out + (CHUNK * i + token) * r->out.stride_t + HALF_K * group +
                                  16 * warp + 8 * (lane % 2);
            if (token < count)
                *(uint4 *)out = rows[0];
            if (token + 16 < count)
                *(uint4 *)(out + 16 * r->out.stride_t) = rows[1];
        }
    }
    if (w->exit)
        store_state(&x, w->exit, w->exit_is_f32, 16 * (threadIdx.x / 32) + threadIdx.x % 32 / 4,
                    threadIdx.x % 4);
}

/* Padding: zero rows, no state. */
static __device__ __forceinline__ void clear_output(const struct fkda_recurrence_args *r,
                                                    const struct head *w)
{
    for (int64_t i = threadIdx.x; i < 16 * (int64_t)w->length; i += THREADS)
        *(uint4 *)(w->out + i / 16 * r->out.stride_t + 8 * (i % 16)) = make_uint4(0, 0, 0, 0);
}

/* Finds the block's work. Returns false if there is none; padding gets its zero rows here. */
static __device__ __forceinline__ bool find_work(const struct fkda_forward_sm90_args *a,
                                                 struct head *w, enum pass pass)
{
    const struct fkda_recurrence_args *r = &a->recurrence;
    const struct fkda_segments *g = &a->segments;
    const unsigned block = pass == SUMMARIES ? blockIdx.x / 2 : blockIdx.x;
    const int64_t index = block / (unsigned)r->HV; /* of the sequence, or the segment's slot */
    const int64_t tokens = (int64_t)CHUNK * g->chunks;
    const int64_t n = pass == WHOLE
                          ? index
                          : sequence_of_piece(&r->sequences, index, (int)tokens, g->per_sequence);
    const int64_t slot = r->state_indices.data ? load_index(&r->state_indices, n) : n;
    int64_t first = 0; /* token of the sequence */
    w->h = (int)(block % (unsigned)r->HV);
    w->seq = sequence_at(&r->sequences, n);
    int64_t length = w->seq.length;
    if (pass != WHOLE) {
        first = (index - piece_base(&r->sequences, n, (int)tokens, g->per_sequence)) * tokens;
        if (first > 0 && first >= length)
            return false;
        length -= first;
        length = length > tokens ? tokens : length;
    }
    const bool last = first + length == w->seq.length;
    w->seq.begin += first;
    w->length = (int)length;
    w->chunks = (w->length + CHUNK - 1) / CHUNK;
    w->out = (uint16_t *)r->out.data + w->seq.batch * r->out.stride_b +
             w->seq.begin * r->out.stride_t + w->h * r->out.stride_h;
    w->from_identity = 0;
    w->entry_is_f32 = w->exit_is_f32 = 1;
    const int64_t image = (index * r->HV + w->h) * TILE_K * TILE_K;
    if (slot < 0 || slot >= r->num_slots) {
        if (pass != SUMMARIES)
            clear_output(r, w);
        return false;
    }
    if (pass == SUMMARIES) { /* the last segment's are not needed, nor what takes a zero state */
        w->from_identity = blockIdx.x % 2;
        w->entry = (const void *)0;
        w->exit = (w->from_identity ? g->transition : g->entry) + image;
        return !last && !(w->from_identity && first == 0 && !r->initial_state.data);
    }
    w->entry = g->entry + image;
    if (pass == WHOLE) {
        w->entry = state_image(&r->initial_state, slot, w->h);
        w->entry_is_f32 = r->initial_state.is_f32;
    }
    w->exit = last ? state_image(&r->final_state, slot, w->h) : (void *)0;
    w->exit_is_f32 = r->final_state.is_f32;
    return true;
}

static __device__ __forceinline__ void forward(const struct fkda_forward_sm90_args *a,
                                               struct shared *s, enum pass pass)
{
    struct head w;
    if (!find_work(a, &w, pass))
        return;
    if (threadIdx.x < TILE_K) {
        const float slope = load_gate(&a->prepare, FKDA_GATE_BOUNDED, w.h).slope;
        const float *bias = a->prepare.dt_bias;
        s->offset[threadIdx.x] =
            bias ? slope * bias[w.h * a->prepare.dt_bias_stride_h + threadIdx.x] : 0.0f;
    }
    if (threadIdx.x == 0) {
        s->head = w;
        for (int i = 0; i < RING; i++) {
            mbarrier_init(&s->raw_full[i], 1); /* the thread that starts the copies */
            mbarrier_init(&s->full[i], 5);     /* 4 prepare warps, and the copy of v */
            mbarrier_init(&s->solved[i], 1);   /* the prepare warp that made T */
            mbarrier_init(&s->empty[i], 8);    /* the state warps */
        }
        mbarrier_init_fence();
        for (int i = 0; i < RING && i < w.chunks; i++)
            fetch_raw(a, s, i, pass);
    }
    /* what is above T's diagonal stays zero */
    for (int i = threadIdx.x; i < (int)sizeof s->chunks[0].tb / 16; i += THREADS)
#pragma unroll
        for (int j = 0; j < RING; j++)
            ((uint4 *)s->chunks[j].tb)[i] = make_uint4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < (int)sizeof s->workshops[0].t / 16; i += THREADS)
#pragma unroll
        for (int j = 0; j < PREPARERS; j++)
            ((uint4 *)s->workshops[j].t)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < PREPARERS * CHUNK) {
        float *const rest = &s->workshops[threadIdx.x / CHUNK].a[threadIdx.x % CHUNK][CHUNK];
        *(float4 *)rest = *(float4 *)(rest + 4) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    fence_proxy_async();
    __syncthreads(); /* offsets, head, zeros and barriers are there */
    if (threadIdx.x >= 2 * ROLE_THREADS) {
        setmaxnreg_dec(PREPARE_REGISTERS);
        prepare_chunks(a, s, pass);
    } else {
        setmaxnreg_inc(STATE_REGISTERS);
        walk_state(a, s, pass);
    }
}

#define DEFINE_FORWARD(name, pass)                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                        \
        fkda_##name##_sm90(const __grid_constant__ struct fkda_forward_sm90_args a) \
    {                                                                               \
        extern __shared__ __align__(1024) char memory[];                            \
        forward(&a, (struct shared *)memory, pass);                                 \
    }

DEFINE_FORWARD(forward, WHOLE)
DEFINE_FORWARD(summaries, SUMMARIES)
DEFINE_FORWARD(segments, SEGMENTS)
