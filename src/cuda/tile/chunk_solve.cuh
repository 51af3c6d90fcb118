/* chunk_solve.cuh: T b of a chunk from A, by one warp. */
#ifndef FKDA_TILE_CHUNK_SOLVE_CUH
#define FKDA_TILE_CHUNK_SOLVE_CUH

#include "cuda/tile/chunk.cuh"

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

/* D = A B, both in two fp16 terms: all but the product of the rests. Three sums, which do not wait
 * for one another. */
static __device__ __forceinline__ void multiply_terms(float d[4], const uint32_t a[4],
                                                      const uint32_t a_rest[4], const uint32_t b[2],
                                                      const uint32_t b_rest[2])
{
    float x[4] = {0}, y[4] = {0}, z[4] = {0};
    mma_m16n8k16_f16(x, a, b[0], b[1]);
    mma_m16n8k16_f16(y, a, b_rest[0], b_rest[1]);
    mma_m16n8k16_f16(z, a_rest, b[0], b[1]);
#pragma unroll
    for (int i = 0; i < 4; i++)
        d[i] = x[i] + (y[i] + z[i]);
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
        float x[8], row[8][8];
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
            x[i] = (i == lane % 8 ? 1.0f : 0.0f) - sum;
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
        float y[4], z[4];
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const int row = 16 * tile + 8 + g;
            const float2 pair = *(const float2 *)&shop->a[row][16 * tile + 2 * t];
            split_f16x2(pair.x, pair.y, &left[3 * tile], &left_rest[3 * tile]);
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
    float y[2][4], z[2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = 16 + g + 8 * (i % 2);
        const float2 pair = *(const float2 *)&shop->a[row][2 * t + 8 * (i / 2)];
        split_f16x2(pair.x, pair.y, &left[i], &left_rest[i]);
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

#endif
