/* decode_token.cuh: where a block of decode works, and a token made ready for the rows of the
 * state: slots, loads in any layout, gate, norms. Steps of the decode kernels. */
#ifndef FKDA_DECODE_TOKEN_CUH
#define FKDA_DECODE_TOKEN_CUH

#include "core/constants.h"
#include "cuda/decode_args.h"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/bf16.cuh"
#include "cuda/tile_map.cuh"
#include "flash_kda.h"

enum {
    EACH = 4,       /* neighbouring channels of a token that a lane prepares */
    MOST_VALUES = 4 /* of a token, that a lane loads: up to 128 rows */
};

/* A token, ready for the rows. One warp writes it, all warps of the block read it. */
struct token {
    float keep[TILE_K], change[TILE_K], k[TILE_K], ak[TILE_K], aq[TILE_K];
    float kq, b;
    int64_t slot; /* that the state after this token is written to; -1: none */
};

static_assert(sizeof(struct token) == DECODE_TOKEN_BYTES,
              "the host asks for too much or too little shared memory");

static __device__ __forceinline__ int lane_id(void)
{
    return (int)threadIdx.x % 32;
}

static __device__ __forceinline__ int warp_id(void)
{
    return (int)threadIdx.x / 32;
}

static __device__ __forceinline__ int divide(int x, struct fkda_divisor by)
{
    return by.multiplier ? (int)(__umulhi((unsigned)x, by.multiplier) >> by.shift) : x;
}

/* ---- Where a warp works ---------------------------------------------------------------------- */

struct place {
    int n, h, row;            /* sequence, value head, first value row of the block */
    int batch, begin, length; /* of the sequence */
};

/* Of a block of so many rows. */
static __device__ __forceinline__ struct place find_place(const struct fkda_decode_args *a,
                                                          int block_rows)
{
    struct place w;
    const int chain = divide((int)blockIdx.x, a->by_slices);
    w.row = ((int)blockIdx.x - chain * a->slices) * block_rows;
    w.n = divide(chain, a->by_HV);
    w.h = chain - w.n * a->HV;
    const struct sequence seq = sequence_at(&a->sequences, w.n);
    w.batch = (int)seq.batch;
    w.begin = (int)seq.begin;
    w.length = (int)seq.length;
    return w;
}

/* The slot that the state after token t is written to. */
static __device__ __forceinline__ int64_t slot_of_token(const struct fkda_decode_args *a,
                                                        const struct place *w, int64_t t)
{
    struct fkda_cuda_index row = a->state_indices;
    const int64_t at = w->n * row.stride + t * a->state_indices_stride_t;
    row.stride = 1;
    return load_index(&row, at);
}

/* The slot that the state is read from; -1: padding. */
static __device__ __forceinline__ int64_t slot_to_read(const struct fkda_decode_args *a,
                                                       const struct place *w)
{
    if (!a->state_indices.data)
        return w->n;
    int64_t accepted = 1;
    if (a->num_accepted_tokens.data) {
        accepted = load_index(&a->num_accepted_tokens, w->n);
        if (accepted < 1 || accepted > a->state_indices_columns)
            return -1;
    }
    return slot_of_token(a, w, accepted - 1);
}

/* Row (token t of the sequence, head). `plain`: strides fit 32 bits. */
static __device__ __forceinline__ void *row_at(const struct fkda_cuda_view *view, int is_f32,
                                               int plain, const struct place *w, int t, int head)
{
    int64_t at;
    if (plain)
        at = (int64_t)w->batch * (int)view->stride_b +
             (int64_t)(w->begin + t) * (int)view->stride_t + (int64_t)head * (int)view->stride_h;
    else
        at = w->batch * view->stride_b + (w->begin + t) * view->stride_t + head * view->stride_h;
    return (char *)view->data + at * (is_f32 ? 4 : 2);
}

/* ---- Loads ----------------------------------------------------------------------------------- */

/* Channels as they were loaded: bf16 pairs in x[0], x[1], or four floats. Converted only where they
 * are used, so that no load waits for another. */
struct raw_channels {
    uint32_t x[EACH];
};

/* This lane's channels of a row. */
static __device__ __forceinline__ struct raw_channels load_channels(const void *row, int access)
{
    struct raw_channels out = {{0}};
    const uint16_t *const half = (const uint16_t *)row + EACH * lane_id();
    const uint32_t *const word = (const uint32_t *)row + EACH * lane_id();
    if (access == DECODE_BF16) {
        const uint2 x = *(const uint2 *)half;
        out.x[0] = x.x;
        out.x[1] = x.y;
    } else if (access == DECODE_F32) {
        const uint4 x = *(const uint4 *)word;
        out.x[0] = x.x;
        out.x[1] = x.y;
        out.x[2] = x.z;
        out.x[3] = x.w;
    } else if (access == DECODE_BF16_NARROW) {
        out.x[0] = half[0] | (uint32_t)half[1] << 16;
        out.x[1] = half[2] | (uint32_t)half[3] << 16;
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++)
            out.x[i] = word[i];
    }
    return out;
}

static __device__ __forceinline__ void expand(float to[EACH], struct raw_channels from, int access)
{
    const bool is_f32 = access & DECODE_F32;
    to[0] = is_f32 ? __uint_as_float(from.x[0]) : bf16_low(from.x[0]);
    to[1] = is_f32 ? __uint_as_float(from.x[1]) : bf16_high(from.x[0]);
    to[2] = is_f32 ? __uint_as_float(from.x[2]) : bf16_low(from.x[1]);
    to[3] = is_f32 ? __uint_as_float(from.x[3]) : bf16_high(from.x[1]);
}

static __device__ __forceinline__ uint32_t load_element(const void *row, int i, int is_f32)
{
    return is_f32 ? ((const uint32_t *)row)[i] : ((const uint16_t *)row)[i];
}

static __device__ __forceinline__ float expand_element(uint32_t raw, int is_f32)
{
    return __uint_as_float(is_f32 ? raw : raw << 16);
}

/* How the tensors are accessed; literals where the call is plain. */
struct accesses {
    int plain, q, k, g, dt_bias, v_is_f32, beta_is_f32, out_is_f32, wide_state;
};

static __device__ __forceinline__ struct accesses accesses_of(const struct fkda_decode_args *a,
                                                              int plain)
{
    if (plain) {
        const struct accesses literals = {
            1, DECODE_BF16, DECODE_BF16, DECODE_BF16, DECODE_F32, 0, 0, 0, 1};
        return literals;
    }
    const struct accesses given = {
        0,           a->q_access,    a->k_access,   a->g_access,  a->dt_bias_access,
        a->v_is_f32, a->beta_is_f32, a->out_is_f32, a->wide_state};
    return given;
}

/* What a lane needs of the token that its warp prepares, as loaded. */
struct raw_token {
    struct raw_channels q, k, g;
    uint32_t v[MOST_VALUES], beta;
    int64_t slot;
};

/* `values`: of 32 rows each, of the block. */
static __device__ __forceinline__ struct raw_token load_token(const struct fkda_decode_args *a,
                                                              struct accesses by,
                                                              const struct place *w, int t,
                                                              int values)
{
    struct raw_token x;
    const int hk = divide(w->h, a->by_heads_per_key);
    x.q = load_channels(row_at(&a->q, by.q & DECODE_F32, by.plain, w, t, hk), by.q);
    x.k = load_channels(row_at(&a->k, by.k & DECODE_F32, by.plain, w, t, hk), by.k);
    x.g = load_channels(row_at(&a->g, by.g & DECODE_F32, by.plain, w, t, w->h), by.g);
    const void *const v = row_at(&a->v, by.v_is_f32, by.plain, w, t, w->h);
#pragma unroll
    for (int i = 0; i < values; i++) {
        const int row = w->row + 32 * i + lane_id();
        x.v[i] = row < a->V ? load_element(v, row, by.v_is_f32) : 0;
    }
    x.beta =
        load_element(row_at(&a->beta, by.beta_is_f32, by.plain, w, t, w->h), 0, by.beta_is_f32);
    x.slot = t < a->columns_to_write ? slot_of_token(a, w, t) : -1;
    return x;
}

/* ---- Gate and norms -------------------------------------------------------------------------- */

static __device__ __forceinline__ float sigmoid(float x)
{
    return __fdividef(1.0f, 1.0f + expf(-x));
}

/* Natural-log decays of the lane's channels, in place of the raw gates. exp(A_log) is kept where
 * neither it nor its product with an input is infinite: infinity times a channel without decay
 * would be a NaN. */
static __device__ __forceinline__ void activate(float g[EACH], const struct fkda_decode_args *a,
                                                struct accesses by, int h)
{
    if (a->gate == FKDA_GATE_ACTIVATED)
        return;
    float factor = 1.0f, bias[EACH] = {0};
    if (a->dt_bias)
        expand(bias, load_channels(a->dt_bias + h * a->dt_bias_stride_h, by.dt_bias), DECODE_F32);
    if (a->A_log) {
        const float A_log = a->A_log[h * a->A_log_stride];
        const float most = a->gate == FKDA_GATE_BOUNDED ? 60.0f : 88.0f;
        factor = expf(A_log > most ? most : A_log); /* no fminf: a NaN has to stay */
    }
    if (a->gate == FKDA_GATE_BOUNDED) {
#pragma unroll
        for (int i = 0; i < EACH; i++)
            g[i] = a->lower_bound * sigmoid(factor * (g[i] + bias[i]));
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const float x = g[i] + bias[i];
            g[i] = -factor * (x > 20.0f ? x : log1pf(expf(x)));
        }
    }
}

/* A decay a = keep + change. Near one keep is 1, and change = a - 1 has all its digits; else keep
 * is 0. s <- a s + u k, computed as keep s + (change s + u k), then rounds the state once, and a
 * slow gate keeps its value over thousands of tokens, which a rounded a would not. */
struct decay {
    float keep, change, a;
};

static __device__ __forceinline__ struct decay exp_decay(float g)
{
    struct decay d;
    g = g < -104.0f ? -104.0f : g > 89.0f ? 89.0f : g; /* 0 and infinity in fp32; a NaN stays */
    const bool near = fabsf(g) < 0.6931f;
    const float n = near ? 0.0f : rintf(1.44269504f * g);
    const float r = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, g)); /* g - n ln 2 */
    /* expm1(r) / r - 1 over r: least relative error for |r| < 0.6935, 1.3e-9 */
    float y = 2.47811440e-5f;
    y = fmaf(y, r, 2.00957744e-4f);
    y = fmaf(y, r, 1.38904271e-3f);
    y = fmaf(y, r, 8.33262876e-3f);
    y = fmaf(y, r, 4.16666195e-2f);
    y = fmaf(y, r, 1.66666716e-1f);
    y = fmaf(y, r, 0.5f);
    y = fmaf(y, r * r, r);
    d.a = ex2_approx(n) * (1.0f + y);
    d.keep = near ? 1.0f : 0.0f;
    d.change = near ? y : d.a;
    return d;
}

static __device__ __forceinline__ float sum_over_lanes(float x)
{
#pragma unroll
    for (int lanes = 16; lanes >= 1; lanes /= 2)
        x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

/* 1 / sqrt(x), with a Newton step: the instruction is two units in the last place off. */
static __device__ __forceinline__ float inverse_sqrt(float x)
{
    const float y = rsqrt_approx(x);
    return fmaf(0.5f * y, fmaf(-x * y, y, 1.0f), y);
}

static __device__ __forceinline__ void store_lane(float row[TILE_K], const float x[EACH])
{
    *(float4 *)(row + EACH * lane_id()) = make_float4(x[0], x[1], x[2], x[3]);
}

static __device__ __forceinline__ void prepare_token(const struct fkda_decode_args *a,
                                                     struct accesses by, const struct place *w,
                                                     const struct raw_token *raw, struct token *x,
                                                     float *v, int values)
{
    float q[EACH], k[EACH], g[EACH], qq = 0.0f, kk = 0.0f, kq = 0.0f;
    expand(g, raw->g, by.g);
    activate(g, a, by, w->h);
    expand(q, raw->q, by.q);
    expand(k, raw->k, by.k);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        qq = fmaf(q[i], q[i], qq);
        kk = fmaf(k[i], k[i], kk);
        kq = fmaf(k[i], q[i], kq);
    }
    qq = sum_over_lanes(qq);
    kk = sum_over_lanes(kk);
    kq = sum_over_lanes(kq);
    const float epsilon = (float)FKDA_NORM_EPSILON;
    const float factor_q = a->qk_l2norm ? a->scale * inverse_sqrt(qq + epsilon) : a->scale;
    const float factor_k = a->qk_l2norm ? inverse_sqrt(kk + epsilon) : 1.0f;
    float keep[EACH], change[EACH], ak[EACH], aq[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const struct decay d = exp_decay(g[i]);
        keep[i] = d.keep;
        change[i] = d.change;
        k[i] *= factor_k;
        ak[i] = d.a * k[i];
        aq[i] = d.a * (q[i] * factor_q);
    }
    store_lane(x->keep, keep);
    store_lane(x->change, change);
    store_lane(x->k, k);
    store_lane(x->ak, ak);
    store_lane(x->aq, aq);
#pragma unroll
    for (int i = 0; i < values; i++)
        v[32 * i + lane_id()] = expand_element(raw->v[i], by.v_is_f32);
    if (lane_id() == 0) {
        const float beta = expand_element(raw->beta, by.beta_is_f32);
        const float b = a->beta_sigmoid ? sigmoid(beta) : beta;
        x->b = a->allow_neg_eigval ? 2.0f * b : b;
        x->kq = kq * factor_q * factor_k;
        x->slot = raw->slot;
    }
}

#endif
