/* prepare_sm80.cu: raw q, k, g, beta of one 16-token tile and value head -> its image
 * (tile_image.h).
 *
 *     G = cumulative gate, log2, from the tile's start
 *     Kd = k^ 2^G   Qd = q^ 2^G   Kr = k^ 2^(G_C - G)
 *     A[t,s] = b_t sum_d k_t k_s 2^(G_t - G_s), s < t
 *     P[t,s] = sum_d q_t k_s 2^(G_t - G_s), s <= t
 *     T = (I + A)^-1 by forward substitution                   W = -T b Kd
 *
 * A and P are products of (k 2^(G+r)) and (k 2^-(G+r)) with a whole number r per channel that
 * centres the exponents, in tf32. A tile too deep for that (softplus gates) takes the exact sum
 * over pairs. One block of 128 threads per image; launched by launch_sm80.c; trusts every size in
 * its arguments.
 */
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile_map.cuh"
#include "flash_kda.h"

#include <cuda_fp16.h>

#define LOG2E       1.4426950408889634f
#define DEPTH_LIMIT 100.0f /* largest |G + r| of the factored form: 2^100 leaves room for |k| */

enum { THREADS = 128, PAIRS = TILE_K / 2, HALF_TOKENS = TILE_TOKENS / 2, ROW = TILE_K + 4 };

struct shared {
    float kd[TILE_TOKENS][ROW];         /* k^ 2^(G+r), tf32; deep tiles: k^ */
    float qd[TILE_TOKENS][ROW];         /* q^ 2^(G+r), tf32; deep tiles: q^ */
    float ki[TILE_TOKENS][ROW];         /* k^ 2^-(G+r); deep tiles: G */
    float to_decayed[TILE_K];           /* kd * this = Kd: 2^-r */
    float to_remaining[TILE_K];         /* ki * this = Kr: 2^(G_C+r); deep tiles: G_C */
    float half_total[2][TILE_K];        /* G over tokens 0..7 and over 8..15 */
    float norm[4][16];                  /* per warp: sums of k^2 and q^2 of its 8 tokens */
    float inverse_norm[2][TILE_TOKENS]; /* of k, of q */
    float beta[TILE_TOKENS];
    float a[TILE_TOKENS][20];     /* strictly lower triangle of A */
    uint32_t tb[TILE_TOKENS][12]; /* T b, fp16 pairs */
};

static __device__ __forceinline__ float bf16_low(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

static __device__ __forceinline__ float bf16_high(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

/* Two neighbouring bf16 channels of a row that is only 2-byte aligned. */
static __device__ __forceinline__ uint32_t load_bf16_pair(const uint16_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 16;
}

/* 2^x is exact where x is a whole number in the normal range. */
static __device__ __forceinline__ float exp2_integer(float x)
{
    return __int_as_float(((int)x + 127) << 23);
}

/* A decay that leaves nothing of any fp32 is as deep as any: the sum over a tile keeps its digits
 * for the tokens that come after. A NaN stays. */
static __device__ __forceinline__ float no_deeper(float x)
{
    return x < -256.0f ? -256.0f : x;
}

/* log2 decay of one token and channel; `gate` is a literal. */
static __device__ __forceinline__ float gate_log2(int gate, float raw, float bias, float exp_a,
                                                  float lower_bound_log2)
{
    if (gate == FKDA_GATE_ACTIVATED)
        return no_deeper(raw * LOG2E);
    const float x = raw + bias;
    if (gate == FKDA_GATE_BOUNDED)
        return lower_bound_log2 *
               rcp_approx(1.0f + ex2_approx(exp_a * x)); /* exp_a holds -log2(e) */
    /* softplus(x) log2(e) = log2(1 + 2^y); tiny 2^y by the first terms of the series */
    const float y = x * LOG2E, e = ex2_approx(y);
    return no_deeper(-exp_a * (y > 24.0f   ? y
                               : e < 1e-3f ? e * LOG2E * (1.0f - 0.5f * e)
                                           : lg2_approx(1.0f + e)));
}

/* One step of the reduction below: 2 width values become width. `width` is a literal. */
static __device__ __forceinline__ void reduce_step(float v[16], int width, int lane)
{
    const bool upper = lane & (2 * width);
#pragma unroll
    for (int i = 0; i < width; i++) {
        const float sent = upper ? v[i] : v[i + width];
        const float kept = upper ? v[i + width] : v[i];
        v[i] = kept + __shfl_xor_sync(~0u, sent, 2 * width);
    }
}

/* Sums each of 16 values over the warp; afterwards v[0] of lane l is the sum of value l / 2. */
static __device__ __forceinline__ void reduce_16(float v[16], int lane)
{
    reduce_step(v, 8, lane);
    reduce_step(v, 4, lane);
    reduce_step(v, 2, lane);
    reduce_step(v, 1, lane);
    v[0] += __shfl_xor_sync(~0u, v[0], 1);
}

/* A and P from the factors: warps 0, 1 compute 8 columns of A each, warps 2, 3 of P. */
static __device__ __forceinline__ void tile_products(const struct shared *s, int warp, int lane,
                                                     float d[4])
{
    const int g = lane / 4, t = lane % 4, column = 8 * (warp & 1) + g;
    const float(*left)[ROW] = warp < 2 ? s->kd : s->qd;
#pragma unroll
    for (int c = 0; c < TILE_K; c += 8) {
        const uint32_t a[4] = {__float_as_uint(left[g][c + t]), __float_as_uint(left[g + 8][c + t]),
                               __float_as_uint(left[g][c + t + 4]),
                               __float_as_uint(left[g + 8][c + t + 4])};
        mma_m16n8k8_tf32(d, a, cvt_rna_tf32(s->ki[column][c + t]),
                         cvt_rna_tf32(s->ki[column][c + t + 4]));
    }
}

/* The same sums without factors, for a tile whose decay no factor can hold. */
static __device__ __forceinline__ void tile_products_deep(const struct shared *s, int warp,
                                                          int lane, float d[4])
{
    const int g = lane / 4, t = lane % 4;
    const float(*left)[ROW] = warp < 2 ? s->kd : s->qd;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = g + 8 * (i / 2), column = 8 * (warp & 1) + 2 * t + i % 2;
        float sum = 0.0f;
        if (column <= row)
#pragma unroll 1
            for (int c = 0; c < TILE_K; c++)
                sum +=
                    left[row][c] * s->kd[column][c] * ex2_approx(s->ki[row][c] - s->ki[column][c]);
        d[i] = sum;
    }
}

/* Kd or Qd of one token, channels c and c + 1. */
static __device__ __forceinline__ float2 decayed_pair(const struct shared *s,
                                                      const float (*rows)[ROW], int token, int c,
                                                      bool deep)
{
    const float2 x = *(const float2 *)&rows[token][c];
    if (deep) {
        const float2 G = *(const float2 *)&s->ki[token][c];
        return make_float2(x.x * ex2_approx(G.x), x.y * ex2_approx(G.y));
    }
    const float2 f = *(const float2 *)&s->to_decayed[c];
    return make_float2(x.x * f.x, x.y * f.y);
}

static __device__ __forceinline__ float decayed(const struct shared *s, const float (*rows)[ROW],
                                                int token, int c, bool deep)
{
    return rows[token][c] * (deep ? ex2_approx(s->ki[token][c]) : s->to_decayed[c]);
}

static __device__ __forceinline__ float remaining(const struct shared *s, int token, int c,
                                                  bool deep)
{
    return deep ? s->kd[token][c] * ex2_approx(s->to_remaining[c] - s->ki[token][c])
                : s->ki[token][c] * s->to_remaining[c];
}

/* Fragments of Qd for one step of 16 channels. */
static __device__ __forceinline__ uint4 fragment_q(const struct shared *s, int step, int lane,
                                                   bool deep)
{
    const int g = lane / 4, c = 16 * step + 2 * (lane % 4);
    const float2 x = decayed_pair(s, s->qd, g, c, deep), y = decayed_pair(s, s->qd, g, c + 8, deep);
    const float2 z = decayed_pair(s, s->qd, g + 8, c, deep),
                 w = decayed_pair(s, s->qd, g + 8, c + 8, deep);
    return make_uint4(cvt_rn_f16x2(x.x, x.y), cvt_rn_f16x2(y.x, y.y), cvt_rn_f16x2(z.x, z.y),
                      cvt_rn_f16x2(w.x, w.y));
}

/* Two values as fp16 and what fp16 left of them. */
static __device__ __forceinline__ void split_f16x2(float x, float y, uint32_t *high, uint32_t *low)
{
    *high = cvt_rn_f16x2(x, y);
    const float2 back = __half22float2(*(const __half2 *)high);
    *low = cvt_rn_f16x2(x - back.x, y - back.y);
}

/* Fragments of Kr for two groups of 8 channels, in two fp16 terms. */
static __device__ __forceinline__ void fragment_k(const struct shared *s, int pair, int lane,
                                                  bool deep, uint4 *high, uint4 *low)
{
    const int t2 = 2 * (lane % 4), c = 16 * pair + lane / 4;
    split_f16x2(remaining(s, t2, c, deep), remaining(s, t2 + 1, c, deep), &high->x, &low->x);
    split_f16x2(remaining(s, t2 + 8, c, deep), remaining(s, t2 + 9, c, deep), &high->y, &low->y);
    split_f16x2(remaining(s, t2, c + 8, deep), remaining(s, t2 + 1, c + 8, deep), &high->z,
                &low->z);
    split_f16x2(remaining(s, t2 + 8, c + 8, deep), remaining(s, t2 + 9, c + 8, deep), &high->w,
                &low->w);
}

/* Column j = lane of T = (I + A)^-1, times b_j: x_t = e_t - sum_{s<t} A[t,s] x_s. Lanes 0..15. */
static __device__ __forceinline__ void solve_column(struct shared *s, int j)
{
    float x[TILE_TOKENS];
#pragma unroll
    for (int t = 0; t < TILE_TOKENS; t++) {
        float row[TILE_TOKENS];
#pragma unroll
        for (int i = 0; i < t; i += 4)
            *(float4 *)&row[i] = *(const float4 *)&s->a[t][i];
        float sum[2] = {t == j ? 1.0f : 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < t; i++)
            sum[i % 2] -= row[i] * x[i];
        x[t] = sum[0] + sum[1];
    }
    const float b = s->beta[j];
#pragma unroll
    for (int t = 0; t < TILE_TOKENS; t++) {
        const float other = __shfl_down_sync(0xffffu, x[t] * b, 1);
        if (j % 2 == 0)
            s->tb[t][j / 2] = cvt_rn_f16x2(x[t] * b, other);
    }
}

/* Fragments of -T b Kd for one step of 16 channels: the accumulators of a 16 x 16 product are, lane
 * by lane, the B fragments that the recurrence wants. */
static __device__ __forceinline__ uint4 fragment_w(const struct shared *s, const uint32_t tb[4],
                                                   int step, int lane, bool deep)
{
    const int t2 = 2 * (lane % 4);
    float d[2][4] = {{0}};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int c = 16 * step + 8 * half + lane / 4;
        mma_m16n8k16_f16(
            d[half], tb,
            cvt_rn_f16x2(decayed(s, s->kd, t2, c, deep), decayed(s, s->kd, t2 + 1, c, deep)),
            cvt_rn_f16x2(decayed(s, s->kd, t2 + 8, c, deep), decayed(s, s->kd, t2 + 9, c, deep)));
    }
    uint4 f;
    f.x = cvt_rn_f16x2(-d[0][0], -d[0][1]);
    f.y = cvt_rn_f16x2(-d[1][0], -d[1][1]);
    f.z = cvt_rn_f16x2(-d[0][2], -d[0][3]);
    f.w = cvt_rn_f16x2(-d[1][2], -d[1][3]);
    return f;
}

/* One thread's raw inputs: channels 2p, 2p + 1 of tokens 8 half .. 8 half + 7. Past the end q and k
 * are zero, and g is anything. */
struct raw_tile {
    uint32_t q[HALF_TOKENS], k[HALF_TOKENS];
    float2 g[HALF_TOKENS];
};

/* Rows past the end are read from the last row there is, and dropped: no branch splits the loads.
 * */
static __device__ __forceinline__ void load_rows(uint32_t rows[HALF_TOKENS],
                                                 const struct fkda_cuda_view *view, int64_t offset,
                                                 int count, int wide)
{
    const char *p = (const char *)view->data + 2 * offset;
    const uint32_t step = 2 * (uint32_t)view->stride_t;
    if (wide) {
#pragma unroll
        for (int i = 0; i < HALF_TOKENS; i++)
            rows[i] = *(const uint32_t *)(p + (size_t)(step * (uint32_t)max(0, min(i, count - 1))));
    } else {
#pragma unroll
        for (int i = 0; i < HALF_TOKENS; i++)
            rows[i] = load_bf16_pair(
                (const uint16_t *)(p + (size_t)(step * (uint32_t)max(0, min(i, count - 1)))));
    }
}

static __device__ __forceinline__ void load_raw(struct raw_tile *raw,
                                                const struct fkda_prepare_args *a,
                                                struct sequence seq, int64_t row, int count, int h,
                                                int c)
{
    const int hk = h / a->heads_per_key;
    const int64_t g_at = seq.batch * a->g.stride_b + row * a->g.stride_t + h * a->g.stride_h + c;
    load_rows(raw->k, &a->k,
              seq.batch * a->k.stride_b + row * a->k.stride_t + hk * a->k.stride_h + c, count,
              a->wide_loads);
    load_rows(raw->q, &a->q,
              seq.batch * a->q.stride_b + row * a->q.stride_t + hk * a->q.stride_h + c, count,
              a->wide_loads);
#pragma unroll
    for (int i = 0; i < HALF_TOKENS; i++) {
        raw->q[i] = i < count ? raw->q[i] : 0;
        raw->k[i] = i < count ? raw->k[i] : 0;
    }
    if (a->g_is_f32) {
        const float *g = (const float *)a->g.data + g_at;
#pragma unroll
        for (int i = 0; i < HALF_TOKENS; i++) {
            const float *row_g =
                g + (size_t)((uint32_t)a->g.stride_t * (uint32_t)max(0, min(i, count - 1)));
            raw->g[i] = make_float2(row_g[0], row_g[1]);
        }
    } else {
        uint32_t g[HALF_TOKENS];
        load_rows(g, &a->g, g_at, count, a->wide_loads);
#pragma unroll
        for (int i = 0; i < HALF_TOKENS; i++)
            raw->g[i] = make_float2(bf16_low(g[i]), bf16_high(g[i]));
    }
}

/* b of one token. */
static __device__ __forceinline__ float load_beta(const struct fkda_prepare_args *a,
                                                  struct sequence seq, int64_t row, int h)
{
    const int64_t at = seq.batch * a->beta.stride_b + row * a->beta.stride_t + h * a->beta.stride_h;
    const float raw = a->beta_is_f32 ? ((const float *)a->beta.data)[at]
                                     : bf16_low(((const uint16_t *)a->beta.data)[at]);
    const float b = a->beta_sigmoid ? rcp_approx(1.0f + ex2_approx(-LOG2E * raw)) : raw;
    return a->allow_neg_eigval ? 2.0f * b : b;
}

/* Loads, normalises and decays: fills kd, qd, ki, the factors, beta and the image's D. Returns
 * whether the tile is deep (the same for every thread; never for a bounded gate, |G| <= 116). */
static __device__ __forceinline__ bool load_tile(const struct fkda_prepare_args *a,
                                                 struct shared *s, int gate, struct sequence seq,
                                                 int64_t first_token, int h, float *image_d)
{
    const int p = threadIdx.x % PAIRS, half = threadIdx.x / PAIRS, warp = threadIdx.x / 32,
              lane = threadIdx.x % 32, c = 2 * p;
    const int tokens = (int)min((int64_t)TILE_TOKENS, seq.length - first_token);
    const int count = tokens - HALF_TOKENS * half;
    struct raw_tile raw;
    load_raw(&raw, a, seq, seq.begin + first_token + (count > 0 ? HALF_TOKENS * half : 0), count, h,
             c);
    if (threadIdx.x < TILE_TOKENS)
        s->beta[threadIdx.x] = (int)threadIdx.x < tokens
                                   ? load_beta(a, seq, seq.begin + first_token + threadIdx.x, h)
                                   : 0.0f;

    float exp_a = a->A_log ? ex2_approx(LOG2E * a->A_log[h * a->A_log_stride]) : 1.0f;
    if (gate == FKDA_GATE_BOUNDED)
        exp_a *= -LOG2E;
    float2 bias = make_float2(0.0f, 0.0f);
    if (a->dt_bias) {
        const float *row = a->dt_bias + h * a->dt_bias_stride_h;
        bias = make_float2(row[c], row[c + 1]);
    }
    float sums[16];
    float2 G[HALF_TOKENS], total = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < HALF_TOKENS; i++) {
        const float x = gate_log2(gate, raw.g[i].x, bias.x, exp_a, a->lower_bound_log2);
        const float y = gate_log2(gate, raw.g[i].y, bias.y, exp_a, a->lower_bound_log2);
        total.x += i < count ? x : 0.0f;
        total.y += i < count ? y : 0.0f;
        G[i] = total;
        const float k0 = bf16_low(raw.k[i]), k1 = bf16_high(raw.k[i]);
        const float q0 = bf16_low(raw.q[i]), q1 = bf16_high(raw.q[i]);
        sums[i] = k0 * k0 + k1 * k1;
        sums[i + 8] = q0 * q0 + q1 * q1;
    }
    reduce_16(sums, lane);
    if (lane % 2 == 0)
        s->norm[warp][lane / 2] = sums[0];
    *(float2 *)&s->half_total[half][c] = total;
    /* sums and totals of both halves: written by all, read by all */
    __syncthreads();
    if (threadIdx.x < 2 * TILE_TOKENS) {
        const int token = threadIdx.x % TILE_TOKENS, of_q = threadIdx.x / TILE_TOKENS;
        const int w = token / HALF_TOKENS * 2, i = token % HALF_TOKENS + 8 * of_q;
        s->inverse_norm[of_q][token] =
            a->qk_l2norm ? rsqrt_approx(s->norm[w][i] + s->norm[w + 1][i] + 1e-6f) : 1.0f;
    }
    const float2 first = *(const float2 *)&s->half_total[0][c],
                 second = *(const float2 *)&s->half_total[1][c];
    const float2 end = make_float2(first.x + second.x, first.y + second.y);
    const float2 r = make_float2(rintf(-0.5f * fminf(fmaxf(end.x, -250.0f), 250.0f)),
                                 rintf(-0.5f * fminf(fmaxf(end.y, -250.0f), 250.0f)));
    if (half == 1)
#pragma unroll
        for (int i = 0; i < HALF_TOKENS; i++) {
            G[i].x += first.x;
            G[i].y += first.y;
        }
    bool deep = false;
    if (gate == FKDA_GATE_BOUNDED) {
        /* inverse norms: written by warp 0, read by all */
        __syncthreads();
    } else {
        float span = 0.0f;
#pragma unroll
        for (int i = 0; i < HALF_TOKENS; i++)
            span = fmaxf(span, fmaxf(fabsf(G[i].x + r.x), fabsf(G[i].y + r.y)));
        /* the same, and one answer for the block */
        deep = __syncthreads_or(span > DEPTH_LIMIT);
    }
#pragma unroll
    for (int i = 0; i < HALF_TOKENS; i++) {
        const int token = HALF_TOKENS * half + i;
        const float k_scale = s->inverse_norm[0][token], q_scale = s->inverse_norm[1][token];
        const float k0 = bf16_low(raw.k[i]) * k_scale, k1 = bf16_high(raw.k[i]) * k_scale;
        const float q0 = bf16_low(raw.q[i]) * q_scale, q1 = bf16_high(raw.q[i]) * q_scale;
        if (deep) {
            *(float2 *)&s->kd[token][c] = make_float2(k0, k1);
            *(float2 *)&s->qd[token][c] = make_float2(q0, q1);
            *(float2 *)&s->ki[token][c] = G[i];
        } else {
            const float x = G[i].x + r.x, y = G[i].y + r.y;
            const float up0 = ex2_approx(x), up1 = ex2_approx(y);
            *(uint2 *)&s->kd[token][c] = make_uint2(cvt_rna_tf32(k0 * up0), cvt_rna_tf32(k1 * up1));
            *(uint2 *)&s->qd[token][c] = make_uint2(cvt_rna_tf32(q0 * up0), cvt_rna_tf32(q1 * up1));
            *(float2 *)&s->ki[token][c] = make_float2(k0 * ex2_approx(-x), k1 * ex2_approx(-y));
        }
    }
    if (half == 0) {
        *(float2 *)&s->to_decayed[c] = make_float2(exp2_integer(-r.x), exp2_integer(-r.y));
        *(float2 *)&s->to_remaining[c] =
            deep ? end : make_float2(ex2_approx(end.x + r.x), ex2_approx(end.y + r.y));
        *(float2 *)&image_d[c] = make_float2(ex2_approx(end.x), ex2_approx(end.y));
    }
    return deep;
}

/* Everything after the tile is in shared memory. `deep` is a literal at each call. */
static __device__ __forceinline__ void build_image(struct shared *s, char *image, bool deep)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float d[4] = {0};
    if (deep)
        tile_products_deep(s, warp, lane, d);
    else
        tile_products(s, warp, lane, d);
    const int column = 8 * (warp & 1) + 2 * t;
    if (warp < 2) {
        const float b0 = s->beta[g], b1 = s->beta[g + 8];
        s->a[g][column] = b0 * d[0];
        s->a[g][column + 1] = b0 * d[1];
        s->a[g + 8][column] = b1 * d[2];
        s->a[g + 8][column + 1] = b1 * d[3];
    } else {
        uint32_t *p = (uint32_t *)(image + IMAGE_P) + 4 * lane + (warp & 1);
        p[0] = cvt_rn_f16x2(column <= g ? d[0] : 0.0f, column + 1 <= g ? d[1] : 0.0f);
        p[2] = cvt_rn_f16x2(column <= g + 8 ? d[2] : 0.0f, column + 1 <= g + 8 ? d[3] : 0.0f);
    }
    /* A: written by warps 0 and 1, read by warp 0 */
    __syncthreads();
    if (warp == 0) {
        if (lane < TILE_TOKENS)
            solve_column(s, lane);
    } else {
        for (int i = warp - 1; i < 16; i += 3) {
            if (i < 8) {
                *(uint4 *)(image + IMAGE_Q + 512 * i + 16 * lane) = fragment_q(s, i, lane, deep);
            } else {
                uint4 high, low;
                fragment_k(s, i - 8, lane, deep, &high, &low);
                *(uint4 *)(image + IMAGE_K + 512 * (i - 8) + 16 * lane) = high;
                *(uint4 *)(image + IMAGE_L + 512 * (i - 8) + 16 * lane) = low;
            }
        }
    }
    /* T b: written by warp 0, read by all */
    __syncthreads();
    const uint32_t tb[4] = {s->tb[g][t], s->tb[g + 8][t], s->tb[g][t + 4], s->tb[g + 8][t + 4]};
    if (warp == 0)
        *(uint4 *)(image + IMAGE_T + 16 * lane) = make_uint4(tb[0], tb[2], tb[1], tb[3]);
#pragma unroll
    for (int i = 0; i < 2; i++)
        *(uint4 *)(image + IMAGE_W + 512 * (2 * warp + i) + 16 * lane) =
            fragment_w(s, tb, 2 * warp + i, lane, deep);
}

/* Kept out of line: rare, and its registers would count against the common path. */
static __device__ __noinline__ void build_deep_image(struct shared *s, char *image)
{
    build_image(s, image, true);
}

static __device__ __forceinline__ void prepare(const struct fkda_prepare_args *a, struct shared *s,
                                               int gate)
{
    const int64_t tile = blockIdx.x / (unsigned)a->HV;
    const int h = (int)(blockIdx.x % (unsigned)a->HV);
    const int64_t n = sequence_of_tile(&a->sequences, tile);
    const struct sequence seq = sequence_at(&a->sequences, n);
    const int64_t first_token = (tile - tile_base(&a->sequences, n)) * TILE_TOKENS;
    if (first_token < 0 || first_token >= seq.length)
        return;
    char *image = a->images + (tile * a->HV + h) * (int64_t)IMAGE_BYTES;
    const bool deep = load_tile(a, s, gate, seq, first_token, h, (float *)(image + IMAGE_D));
    /* kd, qd, ki, factors and beta: written by all, read by all */
    __syncthreads();
    if (deep)
        build_deep_image(s, image);
    else
        build_image(s, image, false);
}

#define DEFINE_PREPARE(name, gate)                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 6)                           \
        fkda_prepare_##name##_sm80(const __grid_constant__ struct fkda_prepare_args a) \
    {                                                                                  \
        __shared__ struct shared s;                                                    \
        prepare(&a, &s, gate);                                                         \
    }

DEFINE_PREPARE(bounded, FKDA_GATE_BOUNDED)
DEFINE_PREPARE(softplus, FKDA_GATE_SOFTPLUS)
DEFINE_PREPARE(activated, FKDA_GATE_ACTIVATED)
