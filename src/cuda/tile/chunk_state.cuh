/* chunk_state.cuh: values into a state warp and outputs out of it, and the scale of its rows. A
 * warp has 16 value channels. */
#ifndef FKDA_TILE_CHUNK_STATE_CUH
#define FKDA_TILE_CHUNK_STATE_CUH

#include "cuda/tile/chunk.cuh"
#include "cuda/tile/state_steps.cuh"
#include "cuda/tile/transition.cuh"

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
    if (seldom(count < CHUNK)) /* other tokens are another sequence's */
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

/* The warp's 16 channels of out, whose lanes hold tokens of one channel, become rows of bf16 or fp16
 * in v's place. */
static __device__ __forceinline__ void turn_rows(uint4 x[2], char *rows, const float o[16],
                                                 int warp, int lane, int f16)
{
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        uint32_t y[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            y[i] = f16 ? cvt_rn_f16x2(o[4 * j + 2 * i], o[4 * j + 2 * i + 1])
                       : cvt_rn_bf16x2(o[4 * j + 2 * i], o[4 * j + 2 * i + 1]);
        const int token = 8 * (j + lane / 16) + lane % 8;
        stmatrix_x4_trans(rows + swizzled(token, 2 * warp + lane / 8 % 2), y);
    }
    __syncwarp(); /* the rows are there */
    const int token = row_of_lane(lane);
    x[0] = *(const uint4 *)(rows + swizzled(token, 2 * warp + lane % 2));
    x[1] = *(const uint4 *)(rows + swizzled(token + 16, 2 * warp + lane % 2));
}

/* What bf16 leaves of o. */
static __device__ __forceinline__ void take_bf16(float o[16])
{
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
        const uint32_t pair = cvt_rn_bf16x2(o[j], o[j + 1]);
        o[j] -= bf16_low(pair);
        o[j + 1] -= bf16_high(pair);
    }
}

static __device__ __forceinline__ void set_identity(struct walker *x, int row, int t)
{
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            x->s[j][i] = row + 8 * (i / 2) == 8 * j + 2 * t + i % 2 ? 1.0f : 0.0f;
}

/* Stores the state as an image of M. */
static __device__ __forceinline__ void store_transition(const struct walker *x, float *image,
                                                        int row, int t)
{
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(float2 *)(image + transition_offset(row + 8 * r, 8 * j + 2 * t)) = make_float2(
                scale_down(x->s[j][2 * r], x->f[r]), scale_down(x->s[j][2 * r + 1], x->f[r]));
}

/* Every RESCALE_CHUNKS chunks f is chosen anew; between them only when a value is too large for it.
 * In that time |S| grows less than |v| would if its rows had target's bound (see TARGET_LOG2). */
static __device__ __forceinline__ void choose_scale(struct walker *x, const uint32_t v[4][2],
                                                    int due, int target)
{
    const uint32_t m[2] = {max_values(v, 0), max_values(v, 1)};
    const int e0 = (int)(m[0] >> 7) - 127, e1 = (int)(m[1] >> 7) - 127;
    if (seldom(__any_sync(~0u, due | e0 + x->f[0] > target | e1 + x->f[1] > target))) {
        const float value_max[2] = {bf16_low(m[0]), bf16_low(m[1])};
        rescale(x, value_max, target - HEADROOM);
    }
}

#endif
