/* decode_sm80.cu: a few tokens of every sequence by the recurrence itself, state in place.
 *
 *     a = exp g    p = s . (a k)    u = b (v - p)    out = s . (a q) + u (k . q)    s <- a s + u k
 *
 * The state is read once and written once; nothing else counts. A warp owns DECODE_ROWS value rows
 * s of one (sequence, value head) and keeps them in registers over the tokens: lane l holds
 * channels 4l .. 4l + 3 of every row, so that a row is one access of the warp, and all rows are on
 * their way before anything is computed. A block is DECODE_WARPS warps of one head: each prepares one of the
 * next tokens (gate, norms) in shared memory, then all apply them to their rows. Rows are
 * independent, so that how they are spread over warps and blocks changes no bit. Launched by
 * launch_decode.c; trusts every size in its arguments.
 */
#include "cuda/decode_args.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/global_access.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/select.cuh"
#include "cuda/tile/bf16.cuh"
#include "cuda/tile_map.cuh"
#include "flash_kda.h"

enum {
    EACH = 4, /* channels of a row that a lane holds */
    BLOCK_ROWS = DECODE_ROWS * DECODE_WARPS,
    VALUES = (BLOCK_ROWS + 31) / 32, /* of a token, that a lane loads */
    SUMS = 2 * DECODE_ROWS,          /* of a token: p and s . (a q) of every row */
    SUM_LANES = 32 / SUMS            /* neighbours that hold the same sum after reduce() */
};

/* A token, ready for the rows. One warp writes it, all warps of the block read it. */
struct token {
    float keep[TILE_K], change[TILE_K], k[TILE_K], ak[TILE_K], aq[TILE_K];
    float v[32 * VALUES];
    float kq, b;
    int64_t slot; /* that the state after this token is written to; -1: none */
};

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

static __device__ __forceinline__ struct place find_place(const struct fkda_decode_args *a)
{
    struct place w;
    const int chain = divide((int)blockIdx.x, a->by_slices);
    w.row = ((int)blockIdx.x - chain * a->slices) * BLOCK_ROWS;
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
    if (plain)
        return (struct accesses){1, DECODE_BF16, DECODE_BF16, DECODE_BF16, DECODE_F32, 0, 0, 0, 1};
    return (struct accesses){
        0,           a->q_access,    a->k_access,   a->g_access,  a->dt_bias_access,
        a->v_is_f32, a->beta_is_f32, a->out_is_f32, a->wide_state};
}

/* What a lane needs of the token that its warp prepares, as loaded. */
struct raw_token {
    struct raw_channels q, k, g;
    uint32_t v[VALUES], beta;
    int64_t slot;
};

static __device__ __forceinline__ struct raw_token
load_token(const struct fkda_decode_args *a, struct accesses by, const struct place *w, int t)
{
    struct raw_token x;
    const int hk = divide(w->h, a->by_heads_per_key);
    x.q = load_channels(row_at(&a->q, by.q & DECODE_F32, by.plain, w, t, hk), by.q);
    x.k = load_channels(row_at(&a->k, by.k & DECODE_F32, by.plain, w, t, hk), by.k);
    x.g = load_channels(row_at(&a->g, by.g & DECODE_F32, by.plain, w, t, w->h), by.g);
    const void *const v = row_at(&a->v, by.v_is_f32, by.plain, w, t, w->h);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
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
        factor = expf(fminf(A_log, a->gate == FKDA_GATE_BOUNDED ? 60.0f : 88.0f));
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

static __device__ __forceinline__ void prepare(const struct fkda_decode_args *a, struct accesses by,
                                               const struct place *w, const struct raw_token *raw,
                                               struct token *x)
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
    const float factor_q = a->qk_l2norm ? a->scale * inverse_sqrt(qq + 1e-6f) : a->scale;
    const float factor_k = a->qk_l2norm ? inverse_sqrt(kk + 1e-6f) : 1.0f;
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
    for (int i = 0; i < VALUES; i++)
        x->v[32 * i + lane_id()] = expand_element(raw->v[i], by.v_is_f32);
    if (lane_id() == 0) {
        const float beta = expand_element(raw->beta, by.beta_is_f32);
        const float b = a->beta_sigmoid ? sigmoid(beta) : beta;
        x->b = a->allow_neg_eigval ? 2.0f * b : b;
        x->kq = kq * factor_q * factor_k;
        x->slot = raw->slot;
    }
}

/* ---- Rows ------------------------------------------------------------------------------------ */

/* Value row `row` of head h in a slot. */
static __device__ __forceinline__ char *state_rows(const struct fkda_decode_args *a, int h, int row,
                                                   int64_t slot, int is_f32)
{
    const int64_t at = slot * a->state.stride_slot + h * a->state.stride_h + row * TILE_K;
    return (char *)a->state.data + at * (is_f32 ? 4 : 2);
}

static __device__ __forceinline__ void load_rows(float s[DECODE_ROWS][EACH], const char *rows,
                                                 int is_f32, int wide)
{
    struct raw_channels raw[DECODE_ROWS];
    const int row_bytes = TILE_K * (is_f32 ? 4 : 2), lane_bytes = EACH * (is_f32 ? 4 : 2);
    if (wide) {
        rows += lane_bytes * lane_id();
#pragma unroll
        for (int r = 0; r < DECODE_ROWS; r++) {
            if (is_f32) {
                const uint4 x = ld_global_stream_u32x4(rows + r * row_bytes);
                raw[r] = (struct raw_channels){{x.x, x.y, x.z, x.w}};
            } else {
                const uint2 x = ld_global_stream_u32x2(rows + r * row_bytes);
                raw[r] = (struct raw_channels){{x.x, x.y}};
            }
        }
    } else {
#pragma unroll
        for (int r = 0; r < DECODE_ROWS; r++)
            raw[r] = load_channels(rows + r * row_bytes,
                                   is_f32 ? DECODE_F32_NARROW : DECODE_BF16_NARROW);
    }
#pragma unroll
    for (int r = 0; r < DECODE_ROWS; r++)
        expand(s[r], raw[r], is_f32 ? DECODE_F32 : DECODE_BF16);
}

static __device__ __forceinline__ void store_rows(const float s[DECODE_ROWS][EACH], char *rows,
                                                  int is_f32, int wide)
{
    const int row_bytes = TILE_K * (is_f32 ? 4 : 2), lane_bytes = EACH * (is_f32 ? 4 : 2);
    rows += lane_bytes * lane_id();
#pragma unroll
    for (int r = 0; r < DECODE_ROWS; r++) {
        char *const p = rows + r * row_bytes;
        const uint2 halves =
            make_uint2(cvt_rn_bf16x2(s[r][0], s[r][1]), cvt_rn_bf16x2(s[r][2], s[r][3]));
        if (is_f32 && wide) {
            *(float4 *)p = make_float4(s[r][0], s[r][1], s[r][2], s[r][3]);
        } else if (wide) {
            *(uint2 *)p = halves;
        } else {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (is_f32)
                    ((float *)p)[i] = s[r][i];
                else
                    ((uint16_t *)p)[i] = (uint16_t)((i < 2 ? halves.x : halves.y) >> 16 * (i % 2));
            }
        }
    }
}

/* Sums of x over the lanes, all at once: each step halves what a lane still has to add, and lane l
 * ends with sum l / SUM_LANES. SUMS shuffles, where one sum after another would take 5 SUMS. */
static __device__ __forceinline__ float reduce(float x[SUMS])
{
#pragma unroll
    for (int lanes = 16; lanes >= 1; lanes /= 2) {
        const int count = SUMS * lanes / 32; /* sums left after this step */
        const int upper = lane_id() & lanes;
#pragma unroll
        for (int i = 0; i < count; i++) {
            const float own = select_f32(upper, x[count + i], x[i]);
            const float other = select_f32(upper, x[i], x[count + i]);
            x[i] = own + __shfl_xor_sync(~0u, other, lanes);
        }
        if (count == 0)
            x[0] += __shfl_xor_sync(~0u, x[0], lanes);
    }
    return x[0];
}

static __device__ __forceinline__ void load_lane(float x[EACH], const float row[TILE_K])
{
    const float4 four = *(const float4 *)(row + EACH * lane_id());
    x[0] = four.x;
    x[1] = four.y;
    x[2] = four.z;
    x[3] = four.w;
}

/* Applies one token to the warp's rows; `v` are its values of these rows. -> the output of row
 * (lane % 16) / SUM_LANES, in the lanes of the upper half. */
static __device__ __forceinline__ float step(float s[DECODE_ROWS][EACH], const struct token *x,
                                             const float *v)
{
    float sums[SUMS], ak[EACH], aq[EACH], keep[EACH], change[EACH], k[EACH];
    load_lane(ak, x->ak);
    load_lane(aq, x->aq);
#pragma unroll
    for (int r = 0; r < DECODE_ROWS; r++) {
        sums[r] = s[r][0] * ak[0];
        sums[DECODE_ROWS + r] = s[r][0] * aq[0];
#pragma unroll
        for (int i = 1; i < EACH; i++) {
            sums[r] = fmaf(s[r][i], ak[i], sums[r]);
            sums[DECODE_ROWS + r] = fmaf(s[r][i], aq[i], sums[DECODE_ROWS + r]);
        }
    }
    const float sum = reduce(sums); /* p of this lane's row; in the upper half s . (a q) of it */
    const float value = v[lane_id() % 16 / SUM_LANES];
    const float u = __shfl_sync(~0u, x->b * (value - sum), lane_id() % 16);
    load_lane(keep, x->keep);
    load_lane(change, x->change);
    load_lane(k, x->k);
#pragma unroll
    for (int r = 0; r < DECODE_ROWS; r++) {
        const float u_r = __shfl_sync(~0u, u, r * SUM_LANES);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            s[r][i] = fmaf(keep[i], s[r][i], fmaf(change[i], s[r][i], u_r * k[i]));
    }
    return fmaf(u, x->kq, sum);
}

/* The warp's outputs of a token: in the lanes of the upper half, SUM_LANES of them the same. */
static __device__ __forceinline__ void store_output(const struct fkda_decode_args *a,
                                                    struct accesses by, const struct place *w,
                                                    int t, int row, float out)
{
    if (lane_id() < 16 || lane_id() % SUM_LANES)
        return;
    row += lane_id() % 16 / SUM_LANES;
    void *const to = row_at(&a->out, by.out_is_f32, by.plain, w, t, w->h);
    if (by.out_is_f32)
        ((float *)to)[row] = out;
    else
        ((uint16_t *)to)[row] = (uint16_t)cvt_rn_bf16x2(out, 0.0f);
}

/* ---- Body ------------------------------------------------------------------------------------ */

static __device__ __forceinline__ void
decode(const struct fkda_decode_args *a, struct token tokens[DECODE_WARPS], int is_f32, int plain)
{
    const struct accesses by = accesses_of(a, plain);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const struct place w = find_place(a);
    const int row = w.row + DECODE_ROWS * warp_id();
    const bool has_rows = row < a->V; /* the last block of a head may have fewer */
    const int64_t slot = slot_to_read(a, &w);
    struct raw_token raw;
    if (warp_id() < w.length)
        raw = load_token(a, by, &w, warp_id());
    if (slot < 0 || slot >= a->num_slots) {
#pragma unroll 1
        for (int t = 0; t < w.length && has_rows; t++)
            store_output(a, by, &w, t, row, 0.0f);
        return;
    }
    float s[DECODE_ROWS][EACH] = {{0}};
    if (has_rows && w.length > 0)
        load_rows(s, state_rows(a, w.h, row, slot, is_f32), is_f32, by.wide_state);
#pragma unroll 1
    for (int t0 = 0; t0 < w.length; t0 += DECODE_WARPS) {
        if (t0 > 0) {
            __syncthreads(); /* every warp has left the tokens before, whose places these take */
            if (t0 + warp_id() < w.length)
                raw = load_token(a, by, &w, t0 + warp_id());
        }
        if (t0 + warp_id() < w.length)
            prepare(a, by, &w, &raw, &tokens[warp_id()]);
        __syncthreads(); /* the tokens are ready for every warp */
#pragma unroll 1
        for (int i = 0; i < DECODE_WARPS && t0 + i < w.length && has_rows; i++) {
            const struct token *const x = &tokens[i];
            store_output(a, by, &w, t0 + i, row, step(s, x, x->v + DECODE_ROWS * warp_id()));
            if (x->slot >= 0 && x->slot < a->num_slots)
                store_rows(s, state_rows(a, w.h, row, x->slot, is_f32), is_f32, by.wide_state);
        }
    }
    if (!a->columns_to_write && has_rows && w.length > 0)
        store_rows(s, state_rows(a, w.h, row, slot, is_f32), is_f32, by.wide_state);
}

/* By the dtype of the state, and whether the call is plain. */
#define DEFINE_DECODE(name, is_f32, plain)                                           \
    extern "C" __global__ void __launch_bounds__(32 * DECODE_WARPS, 5)               \
        fkda_decode_##name##_sm80(const __grid_constant__ struct fkda_decode_args a) \
    {                                                                                \
        __shared__ __align__(16) struct token tokens[DECODE_WARPS];                  \
        decode(&a, tokens, is_f32, plain);                                           \
    }

DEFINE_DECODE(f32, 1, 1)
DEFINE_DECODE(bf16, 0, 1)
DEFINE_DECODE(f32_any, 1, 0)
DEFINE_DECODE(bf16_any, 0, 0)
