/* prepare_sm80.cu: raw q, k, g, beta of one 16-token tile and value head -> its image
 * (tile_image.h).
 *
 *     G = cumulative gate, log2, from the tile's start
 *     Kd = k^ 2^G   Qd = q^ 2^G   Kr = k^ 2^(G_C - G)
 *     A[t,s] = b_t sum_d k_t k_s 2^(G_t - G_s), s < t
 *     P[t,s] = sum_d q_t k_s 2^(G_t - G_s), s <= t
 *     T = (I + A)^-1 by forward substitution                   W = -T b Kd
 *
 * One warp makes one image, and its registers hold the tile the way mma accumulators lie: lane (g,
 * t) owns tokens g and g + 8 of channels 8 j + 2t, + 1. That one layout is at once the left operand
 * (tokens as rows), the right operand (tokens as columns) and the result of every product here, so
 * the factors never pass through shared memory. The cumulative sum is a product too, with a
 * triangle of ones.
 *
 * Bounded gates (|G| <= 116): A and P from k 2^G and k 2^-G in tf32. Other gates: exact for any
 * depth by halving; the pairs that straddle the middle of a block of 2, 4, 8 or 16 tokens take
 * their decay from there, so that no factor exceeds the largest true decay. Launched by
 * launch_sm80.c; trusts every size in its arguments.
 */
#include "cuda/tile/prepare_steps.cuh"

struct solve {
    float a[TILE_TOKENS][20];     /* strictly lower triangle of A */
    uint32_t tb[TILE_TOKENS][12]; /* T b, fp16 pairs */
};

/* Per warp. The solve takes the raw gate's place once the warp has left it, Kd that of raw k. */
struct shared {
    /* bf16 rows; the 16-byte pieces of a row are permuted, see piece() */
    char k[TILE_TOKENS * ROW_BYTES];
    char q[TILE_TOKENS * ROW_BYTES];
    union {
        char g[TILE_TOKENS * ROW_BYTES];
        struct solve solve;
    };
    float beta[TILE_TOKENS];
};

/* Brings 16 rows of 128 bf16 channels; rows past the end become zero. */
static __device__ __forceinline__ void copy_rows(char *to, const uint16_t *from, int64_t stride_t,
                                                 int count, int lane, int aligned)
{
    const int c = lane % 16;
#pragma unroll
    for (int i = 0; i < TILE_TOKENS; i += 2) {
        const int row = i + lane / 16;
        char *at = to + piece(row, c);
        const uint16_t *p = from + (int)stride_t * row + 8 * c;
        if (row >= count) {
            *(uint4 *)at = make_uint4(0, 0, 0, 0);
        } else if (aligned) {
            cp_async_16(at, p);
        } else {
#pragma unroll 1
            for (int j = 0; j < 8; j++)
                ((uint16_t *)at)[j] = p[j];
        }
    }
}

/* Raw gates of 8 channels as a right operand. */
static __device__ __forceinline__ void load_gate_f32(float raw[4], const float *g, int64_t stride_t,
                                                     int t, int count)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int token = 2 * t + i % 2 + 8 * (i / 2);
        raw[i] = token < count ? g[stride_t * token] : 0.0f;
    }
}

/* dt_bias of this lane's channels of one step. */
static __device__ __forceinline__ float2 load_bias(const float *bias, int step)
{
    return bias ? make_float2(bias[16 * step], bias[16 * step + 8]) : make_float2(0.0f, 0.0f);
}

/* Walks the channels, 16 a step: all but T, W and what depends on them. Kd replaces raw k. */
static __device__ __forceinline__ void walk_channels(struct tile *x,
                                                     const struct fkda_prepare_args *a,
                                                     struct shared *s, int gate, const float *g_f32,
                                                     const float *bias, struct head_gate head,
                                                     int count, int lane, char *image)
{
    const int g = lane / 4, t = lane % 4;
    /* a triangle of ones, in gate units: rows g and g + 8, columns 2t, 2t + 1 and 2t + 8, 2t + 9 */
    const float unit = 1.0f / GATE_UNIT;
    const uint32_t corner = cvt_rn_f16x2(2 * t <= g ? unit : 0.0f, 2 * t + 1 <= g ? unit : 0.0f);
    const uint32_t ones[4] = {corner, cvt_rn_f16x2(unit, unit), 0, corner};
    float2 next_bias = load_bias(bias, 0);
#pragma unroll 1 /* unrolled, the loop would leave the instruction cache */
    for (int step = 0; step < STEPS; step++) {
        const int at = piece(lane % 16, 2 * step + lane / 16);
        const float offset[2] = {head.slope * next_bias.x, head.slope * next_bias.y};
        next_bias = load_bias(bias, step + 1 < STEPS ? step + 1 : step);
        uint32_t k[4], q[4], raw[4] = {0};
        ldmatrix_x4(k, s->k + at);
        ldmatrix_x4(q, s->q + at);
        if (!a->g_is_f32)
            ldmatrix_x4_trans(raw, s->g + at);
        struct operands out[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float G[4], gate_raw[4] = {bf16_low(raw[2 * half]), bf16_high(raw[2 * half]),
                                       bf16_low(raw[2 * half + 1]), bf16_high(raw[2 * half + 1])};
            if (a->g_is_f32)
                load_gate_f32(gate_raw, g_f32 + 16 * step + 8 * half, a->g.stride_t, t, count);
            cumulate(G, gate, head, offset[half], gate_raw, ones, t, count);
            out[half] = add_channels(x, gate, G, k + 2 * half, q + 2 * half, lane);
        }
        __syncwarp(); /* every lane has read this step's raw k */
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int j = 2 * step + half;
            if (g == 0)
                *(float2 *)(image + IMAGE_D + 4 * (8 * j + 2 * t)) =
                    make_float2(out[half].decay[0], out[half].decay[1]);
#pragma unroll
            for (int block = 0; block < 2; block++) {
                *(uint32_t *)(s->k + piece(g + 8 * block, j) + 4 * t) = out[half].kd[block];
                *(uint32_t *)(image + IMAGE_K + 256 * j + 128 * block + 4 * lane) =
                    out[half].kr[block];
                *(uint32_t *)(image + IMAGE_L + 256 * j + 128 * block + 4 * lane) =
                    out[half].kr_rest[block];
            }
        }
        *(uint4 *)(image + IMAGE_Q + 512 * step + 16 * lane) =
            make_uint4(out[0].qd[0], out[1].qd[0], out[0].qd[1], out[1].qd[1]);
    }
}

/* T, P and W of the finished sums. */
static __device__ __forceinline__ void finish(const struct tile *x, struct shared *s, int lane,
                                              char *image)
{
    const int g = lane / 4, t = lane % 4;
    const float b[2] = {TF32_UNBIAS * s->beta[g], TF32_UNBIAS * s->beta[g + 8]};
    uint32_t p[2][2]; /* [token block of t][of s] */
    __syncwarp();     /* every lane has left the raw gate, whose place A takes */
#pragma unroll
    for (int block = 0; block < 2; block++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = g + 8 * r, column = 8 * block + 2 * t;
            const float *a = &x->a[block][2 * r], *y = &x->p[block][2 * r];
            *(float2 *)&s->solve.a[row][column] = make_float2(b[r] * a[0], b[r] * a[1]);
            p[r][block] = cvt_rn_f16x2(column <= row ? TF32_UNBIAS * y[0] : 0.0f,
                                       column + 1 <= row ? TF32_UNBIAS * y[1] : 0.0f);
        }
    *(uint4 *)(image + IMAGE_P + 16 * lane) = make_uint4(p[0][0], p[0][1], p[1][0], p[1][1]);
    __syncwarp(); /* A: written by all lanes, read by lanes 0..15 */
    if (lane < TILE_TOKENS)
        solve_column(s->solve.tb, s->solve.a, s->beta, lane);
    __syncwarp(); /* T b: written by lanes 0..15, read by all */
    const uint32_t tb[4] = {s->solve.tb[g][t], s->solve.tb[g + 8][t], s->solve.tb[g][t + 4],
                            s->solve.tb[g + 8][t + 4]};
    *(uint4 *)(image + IMAGE_T + 16 * lane) = make_uint4(tb[0], tb[2], tb[1], tb[3]);
    /* the accumulators of T b Kd are, lane by lane, the fragments that the recurrence wants */
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        float w[2][4] = {{0}};
        uint32_t kd[4]; /* rows are tokens: [channel group][token block] */
        ldmatrix_x4_trans(kd, s->k + piece(lane % 16, 2 * step + lane / 16));
        mma_m16n8k16_f16(w[0], tb, kd[0], kd[1]);
        mma_m16n8k16_f16(w[1], tb, kd[2], kd[3]);
        *(uint4 *)(image + IMAGE_W + 512 * step + 16 * lane) =
            make_uint4(cvt_rn_f16x2(-w[0][0], -w[0][1]), cvt_rn_f16x2(-w[1][0], -w[1][1]),
                       cvt_rn_f16x2(-w[0][2], -w[0][3]), cvt_rn_f16x2(-w[1][2], -w[1][3]));
    }
}

static __device__ __forceinline__ void prepare(const struct fkda_prepare_args *a, struct shared *s,
                                               int gate)
{
    const int lane = threadIdx.x % 32;
    const int64_t work = (int64_t)blockIdx.x * PREPARE_WARPS + threadIdx.x / 32;
    const int64_t tile = work / a->HV;
    const int h = (int)(work % a->HV);
    if (tile >= a->tiles)
        return;
    const int64_t n = sequence_of_tile(&a->sequences, tile);
    const struct sequence seq = sequence_at(&a->sequences, n);
    const int64_t first_token = (tile - tile_base(&a->sequences, n)) * TILE_TOKENS;
    if (first_token < 0 || first_token >= seq.length)
        return;
    const int64_t row = seq.begin + first_token;
    const int count = (int)min((int64_t)TILE_TOKENS, seq.length - first_token);
    const int hk = h / a->heads_per_key;
    copy_rows(s->k,
              (const uint16_t *)a->k.data + seq.batch * a->k.stride_b + row * a->k.stride_t +
                  hk * a->k.stride_h,
              a->k.stride_t, count, lane, a->aligned_rows);
    copy_rows(s->q,
              (const uint16_t *)a->q.data + seq.batch * a->q.stride_b + row * a->q.stride_t +
                  hk * a->q.stride_h,
              a->q.stride_t, count, lane, a->aligned_rows);
    cp_async_commit();
    if (!a->g_is_f32)
        copy_rows(s->g,
                  (const uint16_t *)a->g.data + seq.batch * a->g.stride_b + row * a->g.stride_t +
                      h * a->g.stride_h,
                  a->g.stride_t, count, lane, a->aligned_rows);
    cp_async_commit();
    const struct head_gate head = load_gate(a, gate, h);
    const float *bias =
        a->dt_bias ? a->dt_bias + h * a->dt_bias_stride_h + lane / 4 : (const float *)0;
    if (lane < TILE_TOKENS)
        s->beta[lane] =
            lane < count ? beta_of(a, load_raw_beta(a, seq.batch, row + lane, h)) : 0.0f;
    struct tile x = {{{0}}};
    x.inverse_k[0] = x.inverse_k[1] = x.inverse_q[0] = x.inverse_q[1] = 1.0f;
    cp_async_wait(1);
    __syncwarp(); /* k and q have arrived for every lane */
    if (a->qk_l2norm) {
        inverse_norms(x.inverse_k, s->k, lane);
        inverse_norms(x.inverse_q, s->q, lane);
    }
    cp_async_wait(0);
    __syncwarp(); /* g has arrived for every lane */
    char *image = a->images + (tile * a->HV + h) * (int64_t)IMAGE_BYTES;
    walk_channels(&x, a, s, gate,
                  (const float *)a->g.data + seq.batch * a->g.stride_b + row * a->g.stride_t +
                      h * a->g.stride_h + lane / 4,
                  bias, head, count, lane, image);
    finish(&x, s, lane, image);
}

/* `blocks` per multiprocessor bounds the registers: 112 a thread, or 168 for the halving's live
 * values. Compute capability 12 has shared memory for three blocks only: there more registers cost
 * nothing, and nvcc 12.9 would spill some. */
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 1200
#define HALVING_BLOCKS 4
#else
#define HALVING_BLOCKS 6
#endif
#define DEFINE_PREPARE(name, gate, blocks)                                             \
    extern "C" __global__ void __launch_bounds__(32 * PREPARE_WARPS, blocks)           \
        fkda_prepare_##name##_sm80(const __grid_constant__ struct fkda_prepare_args a) \
    {                                                                                  \
        __shared__ __align__(128) struct shared s[PREPARE_WARPS];                      \
        prepare(&a, &s[threadIdx.x / 32], gate);                                       \
    }

DEFINE_PREPARE(bounded, FKDA_GATE_BOUNDED, 9)
DEFINE_PREPARE(softplus, FKDA_GATE_SOFTPLUS, HALVING_BLOCKS)
DEFINE_PREPARE(activated, FKDA_GATE_ACTIVATED, HALVING_BLOCKS)
