/* chunk_factors.cuh: from raw q, k, g of a chunk to its factors and to A and P, by a warpgroup.
 *
 * In the elementwise steps warp w has tokens 8 w .. 8 w + 7 and lane l channels 4 l .. 4 l + 3.
 */
#ifndef FKDA_TILE_CHUNK_FACTORS_CUH
#define FKDA_TILE_CHUNK_FACTORS_CUH

#include "cuda/tile/chunk.cuh"

/* Raw rows past the end of the sequence become zero. The warpgroup's threads share them. */
static __device__ __forceinline__ void clear_tail(struct raw *raw, int count, int thread)
{
    for (int i = thread; i < (CHUNK - count) * 48; i += ROLE_THREADS) {
        const int row = count + i / 48, part = i / 8 % 6, at = 16 * (i % 8);
        char *rows = raw->rows[part / 3][part % 3 * CHUNK];
        *(uint4 *)(rows + 128 * row + at) = make_uint4(0, 0, 0, 0);
    }
}

/* Starts the rows' products with themselves. */
static __device__ __forceinline__ void start_norms(float d[32], const struct raw *raw)
{
    const uint64_t rows = wgmma_descriptor(shared_address(raw->rows), 0, 1024, WGMMA_SWIZZLE_128);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const uint64_t at = wgmma_ahead(rows, RAW_HALF / 16 * (step / 4) + 2 * (step % 4));
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
            x[r][i] =
                warp < 2 ? (warp == 0 ? d[j] : d[8 + j]) : (warp == 2 ? d[16 + j] : d[24 + j]);
        }
    if (lane % 4 == g / 2) {
        inverse[16 * warp + g] = rsqrt_approx((g % 2 ? x[0][1] : x[0][0]) + 1e-6f);
        inverse[16 * warp + g + 8] = rsqrt_approx((g % 2 ? x[1][1] : x[1][0]) + 1e-6f);
    }
}

/* Gates of the warp's 8 tokens and the lane's 4 channels, summed up: G of token i is that of
 * tokens 0 .. i, until make_factors() counts it from the middle. total: the sum of all 8. */
static __device__ __forceinline__ void sum_gates(float G[8][4], float total[4],
                                                 const float *offsets, const char *rows, int piece,
                                                 float slope, float bound, int count, int warp,
                                                 int lane)
{
    const float4 offset = *(const float4 *)&offsets[4 * lane];
    const float o[4] = {offset.x, offset.y, offset.z, offset.w};
#pragma unroll
    for (int d = 0; d < 4; d++)
        total[d] = 0.0f;
        /* twice four tokens, as in make_rows() */
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
        float next[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float raw[4];
            unpack(raw, *(const uint2 *)(rows + (piece ^ 16 * i) + 128 * i));
            /* no gate past the end */
            const float scale = 8 * warp + 4 * turn + i < count ? bound : 0.0f;
#pragma unroll
            for (int d = 0; d < 4; d++) {
                total[d] += scale * rcp_approx(1.0f + ex2_approx(slope * raw[d] + o[d]));
                next[i][d] = total[d];
            }
        }
        piece ^= 64;
        rows += 512;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (turn > 0)
                G[i / 4][i % 4] = G[i / 4 + 4][i % 4];
            G[i / 4 + 4][i % 4] = next[i / 4][i % 4];
        }
    }
}

/* The lane's 4 channels of the warp's 8 tokens: raw rows become the factors of A and P, fp16 if
 * `narrow`, else bf16; Kd, Qd, Kr go to the chunk. before: 2^(M - G_0); after: 2^(G_C - M).
 * `narrow` is a literal. */
static __device__ __forceinline__ void make_rows(struct raw *raw, struct chunk *out,
                                                 const struct workshop *shop, float G[8][4],
                                                 const float before[4], const float after[4],
                                                 int thread, int narrow)
{
    const int warp = thread / 32, lane = thread % 32;
    const float *inverse = shop->inverse + 8 * warp;
    enum { Q = 128 * CHUNK, G_ROWS = 2 * Q, KR = 2 * Q, REST = 3 * Q }; /* after those of k */
    const int half = lane / 16;
    int piece = 16 * (lane % 16 / 2) + 8 * (lane % 2);
    char *from = raw->rows[0][8 * warp] + RAW_HALF * half;
    char *to = out->rows[0][8 * warp] + CHUNK_HALF * half;
    /* loads stay one token ahead of the stores, past which the compiler does not move them */
    uint2 next_k = *(const uint2 *)(from + piece);
    uint2 next_q = *(const uint2 *)(from + piece + Q);
    /* twice four tokens: the code of eight does not fit the instruction cache */
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
        float inverses_k[4], inverses_q[4];
        load4(inverses_k, inverse);
        load4(inverses_q, inverse + CHUNK);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = (piece ^ 16 * i) + 128 * i;
            const float inverse_k = inverses_k[i], inverse_q = inverses_q[i];
            float k[4], q[4], kd[4], qd[4], ki[4], rest[4];
            unpack(k, next_k);
            unpack(q, next_q);
            if (i < 3 || turn == 0) {
                const int next = (piece ^ 16 * (i + 1)) + 128 * (i + 1);
                next_k = *(const uint2 *)(from + next);
                next_q = *(const uint2 *)(from + next + Q);
            }
#pragma unroll
            for (int d = 0; d < 4; d++) {
                const float up = ex2_approx(G[i][d]), down = ex2_approx(-G[i][d]);
                k[d] *= inverse_k;
                kd[d] = k[d] * up;
                ki[d] = k[d] * down;
                qd[d] = q[d] * inverse_q * up;
            }
            *(uint2 *)(from + at) = narrow ? pack_f16(kd) : pack_bf16(kd);
            *(uint2 *)(from + at + Q) = narrow ? pack_f16(qd) : pack_bf16(qd);
            *(uint2 *)(from + at + G_ROWS) = narrow ? pack_f16(ki) : pack_bf16(ki);
#pragma unroll
            for (int d = 0; d < 4; d++) {
                kd[d] *= before[d];
                qd[d] *= before[d];
                ki[d] *= after[d];
                const float high = __uint_as_float(__float_as_uint(ki[d]) & 0xffffe000u);
                rest[d] = ki[d] - high;
                ki[d] = high;
            }
            *(uint2 *)(to + at) = pack_f16(kd);
            *(uint2 *)(to + at + Q) = pack_f16(qd);
            *(uint2 *)(to + at + KR) = pack_f16(ki);
            *(uint2 *)(to + at + REST) = pack_f16(rest);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int d = 0; d < 4; d++)
                G[i][d] = G[i + 4][d];
        piece ^= 64;
        from += 512;
        to += 512;
        inverse += 4;
    }
}

/* All factors of a chunk and its decay. Returns whether those of A and P are fp16, which is more
 * accurate and holds where no channel decays by more than 2^-NARROW_LOG2 in either tile. */
static __device__ __forceinline__ int make_factors(struct raw *raw, struct chunk *out,
                                                   const struct workshop *shop, float G[8][4],
                                                   int thread, int normed)
{
    const int warp = thread / 32, lane = thread % 32;
    float before[4], after[4], least = 0.0f;
    const float from_0 = warp == 0 ? -1.0f : 0.0f, from_1 = warp <= 1 ? -1.0f : 0.0f;
    const float from_2 = warp == 3 ? 1.0f : 0.0f;
    {
        float total[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            load4(total[i], &shop->totals[i][4 * lane]);
#pragma unroll
        for (int d = 0; d < 4; d++) {
            /* G of the warps between this one and M */
            const float shift = from_0 * total[0][d] + from_1 * total[1][d] + from_2 * total[2][d];
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
    /* the same in all four warps, whose product it is: each has seen every channel's totals */
    const int narrow = normed && __all_sync(~0u, least >= -NARROW_LOG2);
    if (narrow)
        make_rows(raw, out, shop, G, before, after, rederive(thread), 1);
    else
        make_rows(raw, out, shop, G, before, after, rederive(thread), 0);
    return narrow;
}

/* Starts A and P, whose factors are fp16 if `narrow`, a literal, else bf16. */
static __device__ __forceinline__ void start_products(float d[16], const struct raw *raw,
                                                      int narrow)
{
    const uint64_t left = wgmma_descriptor(shared_address(raw->rows), 0, 1024, WGMMA_SWIZZLE_128);
    wgmma_pin_f32(d, 16);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const uint64_t x = wgmma_ahead(left, RAW_HALF / 16 * (step / 4) + 2 * (step % 4));
        const uint64_t y = wgmma_ahead(x, 2 * CHUNK * 128 / 16);
        if (narrow)
            wgmma_m64n32k16_f16(d, x, y, step > 0);
        else
            wgmma_m64n32k16_bf16(d, x, y, step > 0);
    }
    wgmma_commit();
}

/* A block of 8 x 8 of P; on the diagonal, what lies above it counts as 0. */
static __device__ __forceinline__ void store_p(char *p, int row, int column, float even, float odd,
                                               int diagonal, int lane)
{
    const int past = lane / 4 - 2 * (lane % 4);
    if (diagonal) {
        even = past >= 0 ? even : 0.0f;
        odd = past >= 1 ? odd : 0.0f;
    }
    *(uint32_t *)(p + p_at(row + lane / 4, column + 2 * (lane % 4))) = cvt_rn_f16x2(even, odd);
}

/* Accumulators of [Kd; Qd] Ki': warps 0, 1 hold A's rows, which b scales; warps 2, 3 hold P's. Of P
 * the blocks of 8 x 8 from the diagonal down; the others stay zero. */
static __device__ __forceinline__ void store_products(const float d[16], struct workshop *shop,
                                                      struct chunk *out, float beta, int warp,
                                                      int lane)
{
    const int g = lane / 4, t = lane % 4;
    if (warp < 2) {
        const int row = 16 * warp + g;
        float *const to = &shop->a[row][2 * t];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float b = __shfl_sync(~0u, beta, row + 8 * r);
#pragma unroll
            for (int j = 0; j < 4; j++)
                *(float2 *)(to + 8 * A_PITCH * r + 8 * j) =
                    make_float2(b * d[4 * j + 2 * r], b * d[4 * j + 2 * r + 1]);
        }
    } else if (warp == 2) {
        store_p(out->p, 0, 0, d[0], d[1], 1, lane);
        store_p(out->p, 8, 0, d[2], d[3], 0, lane);
        store_p(out->p, 8, 8, d[6], d[7], 1, lane);
    } else {
#pragma unroll
        for (int j = 0; j < 3; j++) {
            store_p(out->p, 16, 8 * j, d[4 * j], d[4 * j + 1], j == 2, lane);
            store_p(out->p, 24, 8 * j, d[4 * j + 2], d[4 * j + 3], 0, lane);
        }
        store_p(out->p, 24, 24, d[14], d[15], 1, lane);
    }
}

#endif
