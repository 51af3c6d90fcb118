/* prepare_steps.cuh: the steps from raw q, k, g, beta of a 16-token tile to its operands, on
 * registers.
 *
 * Lane (g, t) = (lane / 4, lane % 4) of a warp owns tokens g and g + 8 of channels 8 j + 2t, + 1:
 * the way mma accumulators lie. That one layout is at once the left operand (tokens as rows), the
 * right operand (tokens as columns) and the result of every product here, so that factors never
 * pass through shared memory. The cumulative sum is a product too, with a triangle of ones.
 */
#ifndef FKDA_TILE_PREPARE_STEPS_CUH
#define FKDA_TILE_PREPARE_STEPS_CUH

#include "core/constants.h"
#include "cuda/ptx/async_copy.cuh"
#include "cuda/ptx/global_access.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/bf16.cuh"
#include "cuda/tile_map.cuh"
#include "flash_kda.h"

#include <cuda_fp16.h>

#define LOG2E 1.4426950408889634f
/* Gates are summed in units of 2^-6: their second fp16 term stays normal. */
#define GATE_UNIT  64.0f
#define GATE_LIMIT 160.0f /* 2^-160 is zero in fp32: a deeper token changes nothing */
/* A_log counts up to here, where it has long saturated: infinity times a gate that is zero, or
 * minus infinity beside it, would be a NaN. exp(60) leaves room for raw gates and biases up to
 * 1e12; GATE_UNIT exp(84) is the largest that fp32 holds. */
#define MOST_A_LOG_BOUNDED  60.0f
#define MOST_A_LOG_SOFTPLUS 84.0f
/* The tensor core drops the low bits of tf32 operands: 0.72 2^-11 too small each on average. */
#define TF32_UNBIAS 1.000704f

enum { ROW_BYTES = 2 * TILE_K };

/* Byte offset of piece c (8 channels) of a row: eight rows of one piece lie in different banks. */
static __device__ __forceinline__ int piece(int row, int c)
{
    return ROW_BYTES * row + 16 * (c ^ row % 8);
}

/* Raw beta of one token, the bits of its type: making a number of them would wait for the load. */
static __device__ __forceinline__ uint32_t load_raw_beta(const struct fkda_prepare_args *a,
                                                         int64_t batch, int64_t row, int h)
{
    const int64_t at = batch * a->beta.stride_b + row * a->beta.stride_t + h * a->beta.stride_h;
    return a->beta_is_f32 ? ld_global_u32((const float *)a->beta.data + at)
                          : ld_global_u16((const uint16_t *)a->beta.data + at);
}

/* b from those bits. */
static __device__ __forceinline__ float beta_of(const struct fkda_prepare_args *a, uint32_t bits)
{
    const float raw = a->beta_is_f32 ? __uint_as_float(bits) : bf16_low(bits);
    const float b = a->beta_sigmoid ? rcp_approx(1.0f + ex2_approx(-LOG2E * raw)) : raw;
    return a->allow_neg_eigval ? 2.0f * b : b;
}

/* Gate of a head as it is used here: y = scale f(slope raw + offset), in gate units; offset = slope
 * bias. */
struct head_gate {
    float slope, scale;
};

static __device__ __forceinline__ struct head_gate load_gate(const struct fkda_prepare_args *a,
                                                             int gate, int h)
{
    const float most = gate == FKDA_GATE_BOUNDED ? MOST_A_LOG_BOUNDED : MOST_A_LOG_SOFTPLUS;
    const float A_log = a->A_log ? a->A_log[h * a->A_log_stride] : 0.0f;
    const float exp_a = ex2_approx(LOG2E * (A_log > most ? most : A_log)); /* a NaN has to stay */
    struct head_gate out = {LOG2E * GATE_UNIT, 1.0f};
    if (gate == FKDA_GATE_BOUNDED) {
        out.slope = -LOG2E * exp_a;
        out.scale = GATE_UNIT * a->lower_bound_log2;
    } else if (gate == FKDA_GATE_SOFTPLUS) {
        out.slope = LOG2E;
        out.scale = -GATE_UNIT * exp_a;
    }
    return out;
}

/* `gate` is a literal. */
static __device__ __forceinline__ float gate_value(int gate, struct head_gate c, float raw,
                                                   float offset)
{
    const float x = c.slope * raw + offset;
    if (gate == FKDA_GATE_BOUNDED)
        return c.scale * rcp_approx(1.0f + ex2_approx(x));
    float y = x;
    if (gate == FKDA_GATE_SOFTPLUS) {
        /* softplus in units of ln 2: log2(1 + 2^x); tiny 2^x by the first terms of the series */
        const float e = ex2_approx(x);
        y = c.scale * (x > 24.0f   ? x
                       : e < 1e-3f ? e * LOG2E * (1.0f - 0.5f * e)
                                   : lg2_approx(1.0f + e));
    }
    /* no fminf: a NaN has to stay */
    const float limit = GATE_UNIT * GATE_LIMIT;
    return y < -limit ? -limit : y > limit ? limit : y;
}

/* Two values as fp16 and what fp16 left of them. */
static __device__ __forceinline__ void split_f16x2(float x, float y, uint32_t *high, uint32_t *low)
{
    *high = cvt_rn_f16x2(x, y);
    const float2 back = __half22float2(*(const __half2 *)high);
    *low = cvt_rn_f16x2(x - back.x, y - back.y);
}

/* G of 8 channels: raw gates come as a right operand (rows are tokens: b0 2t, 2t + 1; b1 2t + 8, 2t
 * + 9; column g is channel 8 j + g), G leaves in the common layout. */
static __device__ __forceinline__ void cumulate(float G[4], int gate, struct head_gate c,
                                                float offset, const float raw[4],
                                                const uint32_t ones[4], int t, int count)
{
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float value = gate_value(gate, c, raw[i], offset);
        y[i] = 2 * t + i % 2 + 8 * (i / 2) < count ? value : 0.0f;
        G[i] = 0.0f;
    }
    uint32_t high[2], low[2];
    split_f16x2(y[0], y[1], &high[0], &low[0]);
    split_f16x2(y[2], y[3], &high[1], &low[1]);
    mma_m16n8k16_f16(G, ones, high[0], high[1]);
    mma_m16n8k16_f16(G, ones, low[0], low[1]);
}

/* What one warp carries along the channels. */
struct tile {
    float a[2][4], p[2][4];           /* [token block of s]: rows g, g + 8; columns 2t, 2t + 1 */
    float inverse_k[2], inverse_q[2]; /* of tokens g, g + 8 */
};

/* 1 / |row| of tokens g and g + 8: the diagonal of the rows' product with themselves. */
static __device__ __forceinline__ void inverse_norms(float out[2], const char *rows, int lane)
{
    const int g = lane / 4;
    float d[2][4] = {{0}};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        uint32_t x[4];
        ldmatrix_x4(x, rows + piece(lane % 16, 2 * step + lane / 16));
        mma_m16n8k16_bf16(d[0], x, x[0], x[2]);
        mma_m16n8k16_bf16(d[1], x, x[1], x[3]);
    }
    const int owner = lane & ~3 | g / 2;
    const float epsilon = (float)FKDA_NORM_EPSILON;
    out[0] = rsqrt_approx(__shfl_sync(~0u, g % 2 ? d[0][1] : d[0][0], owner) + epsilon);
    out[1] = rsqrt_approx(__shfl_sync(~0u, g % 2 ? d[1][3] : d[1][2], owner) + epsilon);
}

/* d += (rows of left) (rows of right)' over 8 channels, for both token blocks of the right side. */
static __device__ __forceinline__ void multiply_tf32(float d[2][4], const float left[4],
                                                     const float right[4])
{
    const uint32_t a[4] = {__float_as_uint(left[0]), __float_as_uint(left[2]),
                           __float_as_uint(left[1]), __float_as_uint(left[3])};
    mma_m16n8k8_tf32(d[0], a, __float_as_uint(right[0]), __float_as_uint(right[1]));
    mma_m16n8k8_tf32(d[1], a, __float_as_uint(right[2]), __float_as_uint(right[3]));
}

/* G at the last token before the middle of the block of 2 size tokens that holds this lane's
 * tokens. */
static __device__ __forceinline__ void middle_of_block(float out[4], const float G[4], int size,
                                                       int lane)
{
    const int g = lane / 4, t = lane % 4;
    const int from = 4 * (size == 8 ? 7 : (g & ~(2 * size - 1)) + size - 1) + t;
#pragma unroll
    for (int i = 0; i < 4; i++)
        out[i] = __shfl_sync(~0u, size == 8 ? G[i % 2] : G[i], from);
}

/* Whether pair (row, column) straddles the middle of a block of 2 size tokens. */
static __device__ __forceinline__ bool straddles(int row, int column, int size)
{
    return row / size == column / size + 1 && row / (2 * size) == column / (2 * size);
}

/* Adds the part of A and P over 8 channels by halving. */
static __device__ __forceinline__ void add_by_halving(struct tile *x, const float k[4],
                                                      const float q[4], const float G[4], int lane)
{
    const int g = lane / 4, t = lane % 4;
    float diagonal[2][4] = {{0}};
    multiply_tf32(diagonal, q, k);
#pragma unroll
    for (int block = 0; block < 2; block++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            x->p[block][i] +=
                g + 8 * (i / 2) == 8 * block + 2 * t + i % 2 ? diagonal[block][i] : 0.0f;
#pragma unroll
    for (int size = 1; size <= 8; size *= 2) {
        float middle[4], kd[4], qd[4], a[2][4] = {{0}}, p[2][4] = {{0}};
        middle_of_block(middle, G, size, lane);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            /* tokens past the middle decay from it, tokens before decay towards it */
            const bool past = (g + 8 * (i / 2)) & size;
            const float e = ex2_approx(past ? G[i] - middle[i] : middle[i] - G[i]);
            kd[i] = k[i] * e;
            qd[i] = q[i] * e;
        }
        multiply_tf32(a, kd, kd);
        multiply_tf32(p, qd, kd);
#pragma unroll
        for (int block = 0; block < 2; block++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool here = straddles(g + 8 * (i / 2), 8 * block + 2 * t + i % 2, size);
                x->a[block][i] += here ? a[block][i] : 0.0f;
                x->p[block][i] += here ? p[block][i] : 0.0f;
            }
    }
}

/* What 8 channels give besides A and P: fp16 pairs of tokens g and g + 8. */
struct operands {
    uint32_t kd[2], qd[2], kr[2], kr_rest[2];
    float decay[2];
};

/* 8 channels, whose raw k and q are pairs of tokens g and g + 8: adds to A and P. */
static __device__ __forceinline__ struct operands add_channels(struct tile *x, int gate,
                                                               const float G[4],
                                                               const uint32_t raw_k[2],
                                                               const uint32_t raw_q[2], int lane)
{
    struct operands out;
    const int last = 28 + lane % 4; /* holds token 15 of the same channels */
    const float end[2] = {__shfl_sync(~0u, G[2], last), __shfl_sync(~0u, G[3], last)};
    out.decay[0] = ex2_approx(end[0]);
    out.decay[1] = ex2_approx(end[1]);
    float k[4], q[4], kd[4], qd[4], kr[4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        k[2 * i] = bf16_low(raw_k[i]) * x->inverse_k[i];
        k[2 * i + 1] = bf16_high(raw_k[i]) * x->inverse_k[i];
        q[2 * i] = bf16_low(raw_q[i]) * x->inverse_q[i];
        q[2 * i + 1] = bf16_high(raw_q[i]) * x->inverse_q[i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float up = ex2_approx(G[i]);
        kd[i] = k[i] * up;
        qd[i] = q[i] * up;
    }
    if (gate == FKDA_GATE_BOUNDED) {
        float ki[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ki[i] = k[i] * ex2_approx(-G[i]);
            kr[i] = ki[i] * out.decay[i % 2];
        }
        multiply_tf32(x->a, kd, ki);
        multiply_tf32(x->p, qd, ki);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            kr[i] = k[i] * ex2_approx(end[i % 2] - G[i]);
        add_by_halving(x, k, q, G, lane);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        out.kd[i] = cvt_rn_f16x2(kd[2 * i], kd[2 * i + 1]);
        out.qd[i] = cvt_rn_f16x2(qd[2 * i], qd[2 * i + 1]);
        split_f16x2(kr[2 * i], kr[2 * i + 1], &out.kr[i], &out.kr_rest[i]);
    }
    return out;
}

/* Column j = lane of T = (I + A)^-1, times b_j: x_t = e_t - sum_{s<t} A[t,s] x_s. Lanes 0..15. */
static __device__ __forceinline__ void
solve_column(uint32_t tb[TILE_TOKENS][12], const float a[TILE_TOKENS][20], const float *beta, int j)
{
    float x[TILE_TOKENS];
#pragma unroll
    for (int t = 0; t < TILE_TOKENS; t++) {
        float row[TILE_TOKENS];
#pragma unroll
        for (int i = 0; i < t; i += 4)
            *(float4 *)&row[i] = *(const float4 *)&a[t][i];
        float sum[2] = {t == j ? 1.0f : 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < t; i++)
            sum[i % 2] -= row[i] * x[i];
        x[t] = sum[0] + sum[1];
    }
    const float b = beta[j];
#pragma unroll
    for (int t = 0; t < TILE_TOKENS; t++) {
        const float other = __shfl_down_sync(0xffffu, x[t] * b, 1);
        if (j % 2 == 0)
            tb[t][j / 2] = cvt_rn_f16x2(x[t] * b, other);
    }
}

#endif
