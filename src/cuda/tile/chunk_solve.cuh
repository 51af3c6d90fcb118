/* chunk_solve.cuh: T b of a chunk from A, by one warp. */
#ifndef FKDA_TILE_CHUNK_SOLVE_CUH
#define FKDA_TILE_CHUNK_SOLVE_CUH

#include "cuda/tile/chunk.cuh"

/* Places of T's diagonal tiles in two fp16 terms, transposed: a column of T, then the row in its
 * tile. The second terms lie behind the rows of A. */
static __device__ __forceinline__ uint16_t *t_high(struct workshop *shop, int column, int row)
{
    return &shop->t[column][row];
}

static __device__ __forceinline__ uint16_t *t_rest(struct workshop *shop, int column, int row)
{
    return (uint16_t *)&shop->a[column][CHUNK] + row;
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

/* Eight neighbours in two terms, 16 bytes each. */
static __device__ __forceinline__ void store_column(void *high, void *rest, const float x[8])
{
    uint32_t h[4], r[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        split_f16x2(x[2 * i], x[2 * i + 1], &h[i], &r[i]);
    *(uint4 *)high = make_uint4(h[0], h[1], h[2], h[3]);
    *(uint4 *)rest = make_uint4(r[0], r[1], r[2], r[3]);
}

/* Two neighbours of a row of A, as an operand in two terms. */
static __device__ __forceinline__ void load_pair(uint32_t *high, uint32_t *rest, const float *from)
{
    const float2 pair = *(const float2 *)from;
    split_f16x2(pair.x, pair.y, high, rest);
}

/* Two neighbours of a column of T b, in a diagonal block. */
static __device__ __forceinline__ void store_tb(struct chunk *out, int row, int column, float even,
                                                float odd)
{
    const int at = tb_at(row, column), tile = row / 16;
    split_f16x2(even, odd, (uint32_t *)(out->tb[2 * tile] + at),
                (uint32_t *)(out->tb_rest[tile] + at));
}

/* T b of a chunk, by one warp, which makes T' (x' is the transpose of x): then every result lies as
 * the left operand of the next product. T's diagonal blocks of 8 x 8 come from substitution in
 * fp32, one column a lane: x_t = e_t - sum_{s<t} A[t,s] x_s. Blocks below join two sides that are
 * known: T21' = -(T11' A21') T22', for 8 x 8 in both tiles at once, then for 16 x 16. With equal
 * keys most of A21 T11 cancels, and of T b times R too, so that one fp16 term would not do. */
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
            x[i] = i == lane % 8 ? 1.0f : 0.0f;
#pragma unroll
            for (int j = 0; j < i; j++)
                x[i] -= row[i][j] * x[j];
        }
        store_column(t_high(shop, lane, first % 16), t_rest(shop, lane, first % 16), x);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] *= own;
        const int at = tb_at(first, lane), tile = lane / 16;
        store_column(out->tb[2 * tile] + at, out->tb_rest[tile] + at, x);
    }
    __syncwarp(); /* the blocks of 8 are whole */
    {
        /* rows 0..7 of the products belong to the first tile, 8..15 to the second */
        uint32_t left[4] = {0}, left_rest[4] = {0}, right[2], right_rest[2];
        float y[4], z[4];
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const int at = 16 * tile;
            left[3 * tile] = *(const uint32_t *)t_high(shop, at + g, 2 * t);
            left_rest[3 * tile] = *(const uint32_t *)t_rest(shop, at + g, 2 * t);
            load_pair(&right[tile], &right_rest[tile], &shop->a[at + 8 + g][at + 2 * t]);
        }
        multiply_terms(y, left, left_rest, right, right_rest);
#pragma unroll
        for (int tile = 0; tile < 2; tile++)
            split_f16x2(y[2 * tile], y[2 * tile + 1], &left[3 * tile], &left_rest[3 * tile]);
        const int from = 16 * (lane / 8 % 2) + 8 + lane % 8;
        ldmatrix_x2_trans(right, t_high(shop, from, 8));
        ldmatrix_x2_trans(right_rest, t_rest(shop, from, 8));
        multiply_terms(z, left, left_rest, right, right_rest);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            const int column = 16 * tile + g;
            const float b = shop->beta[column], low = -z[2 * tile], high = -z[2 * tile + 1];
            split_f16x2(low, high, (uint32_t *)t_high(shop, column, 8 + 2 * t),
                        (uint32_t *)t_rest(shop, column, 8 + 2 * t));
            store_tb(out, 16 * tile + 8 + 2 * t, column, b * low, b * high);
        }
    }
    __syncwarp(); /* the tiles of 16 are whole */
    uint32_t left[4], left_rest[4], right[2][2], right_rest[2][2];
    float y[2][4];
    ldmatrix_x4(left, t_high(shop, lane % 16, 8 * (lane / 16)));
    ldmatrix_x4(left_rest, t_rest(shop, lane % 16, 8 * (lane / 16)));
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            load_pair(&right[n][i], &right_rest[n][i], &shop->a[16 + 8 * n + g][2 * t + 8 * i]);
        multiply_terms(y[n], left, left_rest, right[n], right_rest[n]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        split_f16x2(y[i / 2][2 * (i % 2)], y[i / 2][2 * (i % 2) + 1], &left[i], &left_rest[i]);
    ldmatrix_x4_trans(&right[0][0], t_high(shop, 16 + lane % 16, 8 * (lane / 16)));
    ldmatrix_x4_trans(&right_rest[0][0], t_rest(shop, 16 + lane % 16, 8 * (lane / 16)));
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float z[4];
        multiply_terms(z, left, left_rest, right[n], right_rest[n]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float b = -shop->beta[8 * r + g];
            *(uint32_t *)(out->tb[1] + tb_at(8 * n + 2 * t, 8 * r + g)) =
                cvt_rn_f16x2(b * z[2 * r], b * z[2 * r + 1]);
        }
    }
}

#endif
