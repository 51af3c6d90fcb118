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

/* The warp's 16 channels of out, whose lanes hold tokens of one channel, become rows of bf16 or
 * fp16 in v's place. */
static __device__ __forceinline__ void turn_rows(char *rows, const float o[16], int warp, int lane,
                                                 int f16)
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
}

/* The two pieces that a lane stores: of row_of_lane() and of the token 16 further on. */
static __device__ __forceinline__ void load_rows(uint4 x[2], const char *rows, int warp, int lane)
{
    const int token = row_of_lane(lane);
    x[0] = *(const uint4 *)(rows + swizzled(token, 2 * warp + lane % 2));
    x[1] = *(const uint4 *)(rows + swizzled(token + 16, 2 * warp + lane % 2));
}

/* The accumulators of a chunk's output without their last bytes: two bytes each in x[0] and x[1],
 * the third in x[2]. */
static __device__ __forceinline__ void pack_forced(uint4 x[3], const float o[16])
{
    uint32_t high[8], third[4];
#pragma unroll
    for (int j = 0; j < 8; j++)
        high[j] = __byte_perm(__float_as_uint(o[2 * j]), __float_as_uint(o[2 * j + 1]), 0x7632);
#pragma unroll
    for (int j = 0; j < 4; j++)
        third[j] = __byte_perm(
            __byte_perm(__float_as_uint(o[4 * j]), __float_as_uint(o[4 * j + 1]), 0x51),
            __byte_perm(__float_as_uint(o[4 * j + 2]), __float_as_uint(o[4 * j + 3]), 0x51),
            0x5410);
    x[0] = make_uint4(high[0], high[1], high[2], high[3]);
    x[1] = make_uint4(high[4], high[5], high[6], high[7]);
    x[2] = make_uint4(third[0], third[1], third[2], third[3]);
}

/* The inverse; a last byte is taken to be as the third. */
static __device__ __forceinline__ void unpack_forced(float o[16], const uint4 x[3])
{
    const uint32_t high[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
    const uint32_t third[4] = {x[2].x, x[2].y, x[2].z, x[2].w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        o[4 * j] = __uint_as_float(__byte_perm(high[2 * j], third[j], 0x1044));
        o[4 * j + 1] = __uint_as_float(__byte_perm(high[2 * j], third[j], 0x3255));
        o[4 * j + 2] = __uint_as_float(__byte_perm(high[2 * j + 1], third[j], 0x1066));
        o[4 * j + 3] = __uint_as_float(__byte_perm(high[2 * j + 1], third[j], 0x3277));
    }
}

/* Exponent of the power of two that brings this magnitude just below 2^15; of one that is not
 * finite, some power. */
static __device__ __forceinline__ int exponent_to_fit(uint32_t magnitude)
{
    return magnitude ? min(14 - ((int)(magnitude >> 23) - 127), 120) : 0;
}

/* The largest of four magnitudes. */
static __device__ __forceinline__ float max_magnitude(float a, float b, float c, float d)
{
    return fmaxf(fmaxf(fabsf(a), fabsf(b)), fmaxf(fabsf(c), fabsf(d)));
}

/* The warp's 16 rows lose f and get the power of two that makes the most of fp16: its exponent. */
static __device__ __forceinline__ int fit_response(float o[16], const int f[2])
{
    float m[2], up[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float *const x = o + 2 * r;
        m[r] = exp2_int(-f[r]) * fmaxf(max_magnitude(x[0], x[1], x[4], x[5]),
                                       max_magnitude(x[8], x[9], x[12], x[13]));
    }
    const uint32_t most = __reduce_max_sync(~0u, __float_as_uint(fmaxf(m[0], m[1])));
    const int exponent = exponent_to_fit(most);
#pragma unroll
    for (int r = 0; r < 2; r++)
        up[r] = exp2_int(max(min(exponent - f[r], 126), -126));
#pragma unroll
    for (int j = 0; j < 16; j++)
        o[j] *= up[j % 4 / 2];
    return exponent;
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

/* Whether f is to be chosen anew before a chunk with these values: every RESCALE_CHUNKS chunks
 * (`due`), between them only when a value is too large for it. In that time |S| grows less than |v|
 * would if its rows had target's bound (see TARGET_LOG2). The same in all lanes. */
static __device__ __forceinline__ int needs_scale(const struct walker *x, const uint32_t v[4][2],
                                                  int due, int target)
{
    const int e0 = (int)(max_values(v, 0) >> 7) - 127, e1 = (int)(max_values(v, 1) >> 7) - 127;
    return __any_sync(~0u, due | e0 + x->f[0] > target | e1 + x->f[1] > target);
}

/* Chooses it. */
static __device__ __forceinline__ void choose_scale(struct walker *x, const uint32_t v[4][2],
                                                    int target)
{
    const float value_max[2] = {bf16_low(max_values(v, 0)), bf16_low(max_values(v, 1))};
    rescale(x, value_max, target - HEADROOM);
}

#endif
