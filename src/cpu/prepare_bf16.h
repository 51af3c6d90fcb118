/* prepare_bf16.h: a chunk of 16 tokens becomes the operands of its products.
 *
 * With G the running sum of log2 decays from the start of the chunk, and 2^8 a reference that keeps
 * both factors inside the range of bf16 for every bounded gate (2^-115 to 1):
 *
 *     kd = 2^8 k^ 2^G      qd = 2^8 scale q^ 2^G      ki = 2^8 k^ 2^-G      kr = k^ 2^(G_C - G)
 *
 * kd and qd are rounded to bf16 where they meet the state. Where they meet ki (A and P), and where
 * u and kr write the state, two bf16 terms or fp32 keep 16 bits or more: an error that is written
 * into a state that hardly decays is never read again along some directions, and piles up there.
 * A chunk whose sums leave the range is walked token by token instead (state_bf16.h).
 */
#ifndef FKDA_PREPARE_BF16_H
#define FKDA_PREPARE_BF16_H

#include "cpu/vec_bf16.h"

enum { CHUNK = FKDA_CHUNK_TOKENS, MAX_K = 256, REFERENCE_LOG2 = 8 };
#define REFERENCE      256.0f
#define MAX_DEPTH_LOG2 118.0f /* 2^(8 + 118) |k^| is finite; a bounded gate reaches 115.4 */
#define LOG2_E         1.44269504f

/* Operands of one chunk. [K] means the first K of MAX_K; rows lie K apart. */
struct chunk {
    union {                                /* first: at phase 0 of 4 KB (state_bf16.h) */
        uint16_t kr_split[MAX_K * 32];     /* [K][16 tokens, then 16 remainders] */
        float kr[MAX_K / 32 * CHUNK * 32]; /* [K / 32][16][16 even, 16 odd channels] */
    };
    _Alignas(64) uint16_t kd[CHUNK * MAX_K]; /* [16][K] */
    uint16_t qd[CHUNK * MAX_K];              /* [16][K] */
    float decay[MAX_K];                      /* 2^(G_C) */
    float a[CHUNK * CHUNK];                  /* [t][s], b_t A[t][s], 0 where s >= t */
    union {
        uint16_t p_split[CHUNK * 32]; /* [t][16 s, then 16 remainders], of 2^8 P */
        float p[CHUNK * CHUNK];
    };
    float b[CHUNK], b_pk[CHUNK]; /* b; b 2^-8: what a product with kd is scaled by */
    int64_t begin, tokens;       /* in the sequence; 1 to 16 tokens, the rest zero */
    bool walk;                   /* token by token instead: walk_panel */
};

/* What only the preparation of a chunk needs. */
struct draft {
    union {
        struct { /* for tiles: what kd and qd lost by rounding, and ki in two terms */
            _Alignas(64) uint16_t kd_rest[CHUNK * MAX_K], qd_rest[CHUNK * MAX_K]; /* [16][K] */
            uint16_t ki[CHUNK * MAX_K], ki_rest[CHUNK * MAX_K]; /* [K / 2][16 tokens][2] */
        };
        struct { /* for vectors: [K / 32][16][16 even, 16 odd channels] */
            float kd32[CHUNK * MAX_K], qd32[CHUNK * MAX_K], ki32[CHUNK * MAX_K];
        };
    };
    float a_raw[CHUNK * CHUNK], p_raw[CHUNK * CHUNK]; /* kd ki^T, qd ki^T */
    float k_factor[CHUNK], q_factor[CHUNK]; /* of the rows: 2^8 / norm, 2^8 scale / norm */
};

/* What stays the same along a sequence for one head. */
struct head {
    const struct fkda_plan *plan;
    struct fkda_sequence seq;
    int64_t index, key_index; /* value head, and the query/key head it reads */
    float gate_factor;        /* of the sum's terms: lower_bound log2 e, or -exp(A_log) */
    float gate_scale;         /* of g_raw: the exponent is gate_scale (g_raw + dt_bias) in log2 */
    _Alignas(64) float gate_offset[MAX_K]; /* gate_scale dt_bias, in pairs: 16 even, 16 odd */
};

/* Where token t's row of a tensor lies, and the bytes from one token to the next. */
struct rows {
    const char *first;
    int64_t stride_bytes;
    fkda_dtype dtype;
};

BF16_INLINE struct rows rows_of(const struct head *head, const struct fkda_view *view, int64_t t,
                                int64_t index)
{
    return (struct rows){(const char *)fkda_row(view, &head->seq, t, index, 0),
                         view->stride_t * (int64_t)fkda_element_bytes(view->dtype), view->dtype};
}

static void head_begin(struct head *head, const struct fkda_plan *plan, int64_t n, int64_t index)
{
    head->plan = plan;
    head->seq = fkda_plan_sequence(plan, n);
    head->index = index;
    head->key_index = index / plan->heads_per_key;
    float a = fkda_gate_factor(plan, index);
    if (plan->gate == FKDA_GATE_BOUNDED) {
        head->gate_factor = plan->lower_bound * LOG2_E;
        head->gate_scale = -a * LOG2_E;
    } else {
        head->gate_factor = plan->gate == FKDA_GATE_SOFTPLUS ? -a : 1.0f;
        head->gate_scale = LOG2_E;
    }
    for (int64_t i = 0; i < plan->K; i++) {
        int64_t place = i / 32 * 32 + i % 2 * 16 + i % 32 / 2;
        float bias = plan->dt_bias ? plan->dt_bias[index * plan->dt_bias_stride_h + i] : 0.0f;
        head->gate_offset[place] = head->gate_scale * bias;
    }
}

/* Adds the log2 decay of one token to the running sum. */
BF16_INLINE vf gate_add(vf sum, vf g_raw, vf scale, vf offset, vf factor, fkda_gate gate)
{
    vf x = _mm512_fmadd_ps(g_raw, scale, offset);
    if (gate == FKDA_GATE_BOUNDED) {
        vf e = _mm512_add_ps(exp2_short(x), _mm512_set1_ps(1.0f));
        return _mm512_fmadd_ps(factor, _mm512_rcp14_ps(e), sum);
    }
    if (gate == FKDA_GATE_SOFTPLUS)
        x = log2_1p_exp2(x);
    return _mm512_fmadd_ps(factor, x, sum);
}

BF16_INLINE vf sum_of_squares(const char *row, fkda_dtype dtype, int64_t K)
{
    vf sum = _mm512_setzero_ps();
    for (int64_t c = 0; c < K; c += 32) {
        if (dtype == FKDA_BF16) {
            __m512bh x = (__m512bh)_mm512_loadu_si512((const uint16_t *)(const void *)row + c);
            sum = _mm512_dpbf16_ps(sum, x, x);
        } else {
            struct pair x = pair_load(row, dtype, c);
            sum = _mm512_fmadd_ps(x.even, x.even, sum);
            sum = _mm512_fmadd_ps(x.odd, x.odd, sum);
        }
    }
    return sum;
}

/* The sums of squares of 16 rows; rows past `tokens` count as zero. */
BF16_INLINE vf row_squares(struct rows rows, int64_t tokens, int64_t K)
{
    vf sums[CHUNK];
    for (int64_t t = 0; t < CHUNK; t++)
        sums[t] = t < tokens ? sum_of_squares(rows.first + t * rows.stride_bytes, rows.dtype, K)
                             : _mm512_setzero_ps();
    return vf_sum_rows(sums);
}

/* Factors of the rows of q and k, and b. Sets `walk` where a norm leaves the range of the fast
 * factors: overflowed squares, or keys and queries that come without a norm and are far from 1. */
BF16_INLINE void prepare_rows(struct chunk *chunk, struct draft *draft, const struct head *head,
                              struct rows q, struct rows k, int64_t K)
{
    const struct fkda_plan *plan = head->plan;
    vf qq = row_squares(q, chunk->tokens, K), kk = row_squares(k, chunk->tokens, K);
    vf q_factor = _mm512_set1_ps(REFERENCE * plan->scale), k_factor = _mm512_set1_ps(REFERENCE);
    __mmask16 outside;
    if (plan->qk_l2norm) {
        const vf epsilon = _mm512_set1_ps((float)FKDA_NORM_EPSILON), limit = _mm512_set1_ps(1e37f);
        q_factor = _mm512_div_ps(q_factor, _mm512_sqrt_ps(_mm512_add_ps(qq, epsilon)));
        k_factor = _mm512_div_ps(k_factor, _mm512_sqrt_ps(_mm512_add_ps(kk, epsilon)));
        outside = _mm512_cmp_ps_mask(_mm512_max_ps(qq, kk), limit, _CMP_GE_OQ);
    } else {
        const vf low = _mm512_set1_ps(0x1p-32f);
        __mmask16 zero = _mm512_cmp_ps_mask(qq, _mm512_setzero_ps(), _CMP_EQ_OQ);
        outside = _mm512_cmp_ps_mask(kk, _mm512_set1_ps(0x1p8f), _CMP_GE_OQ) |
                  _mm512_cmp_ps_mask(qq, _mm512_set1_ps(0x1p40f), _CMP_GE_OQ);
        outside |= _mm512_mask_cmp_ps_mask(_mm512_knot(zero), qq, low, _CMP_LT_OQ);
        zero = _mm512_cmp_ps_mask(kk, _mm512_setzero_ps(), _CMP_EQ_OQ);
        outside |= _mm512_mask_cmp_ps_mask(_mm512_knot(zero), kk, low, _CMP_LT_OQ);
    }
    chunk->walk = outside != 0;
    _mm512_store_ps(draft->q_factor, q_factor);
    _mm512_store_ps(draft->k_factor, k_factor);

    _Alignas(64) float beta[CHUNK] = {0};
    for (int64_t t = 0; t < chunk->tokens; t++)
        beta[t] = fkda_load_element(fkda_row(&plan->beta, &head->seq, chunk->begin + t, 0, 0),
                                    plan->beta.dtype, head->index * plan->beta.stride_h);
    vf b = _mm512_load_ps(beta);
    if (plan->beta_sigmoid) {
        vf e = exp2_full(_mm512_mul_ps(b, _mm512_set1_ps(-LOG2_E)));
        b = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
    }
    if (plan->allow_neg_eigval)
        b = _mm512_add_ps(b, b);
    b = _mm512_maskz_mov_ps((__mmask16)((1u << chunk->tokens) - 1), b);
    _mm512_store_ps(chunk->b, b);
    _mm512_store_ps(chunk->b_pk, _mm512_mul_ps(b, _mm512_set1_ps(1.0f / REFERENCE)));
}

/* kr of 16 channels (`parity` of a pair) from ki: two tokens to a word, channel by channel. */
BF16_INLINE void store_kr_split(uint16_t *kr, const vf ki[CHUNK], vf factor, int64_t channel,
                                int parity)
{
    vf rows[CHUNK];
    for (int j = 0; j < CHUNK / 2; j++) {
        vf first = _mm512_mul_ps(ki[2 * j], factor), second = _mm512_mul_ps(ki[2 * j + 1], factor);
        rows[j] = float_of(pack_cut(first, second));
        rows[CHUNK / 2 + j] = float_of(pack_rest(first, second));
    }
    vf_transpose(rows);
    for (int i = 0; i < 16; i++)
        _mm512_store_ps((void *)(kr + (channel + 2 * i + parity) * 32), rows[i]);
}

/* What a chunk's preparation fetches. The rows lie apart by a whole token of all heads, which no
 * hardware prefetcher follows. An address past the end is harmless. */
struct chunk_fetch {
    struct rows q, k, g; /* of the chunk that is prepared next */
    struct rows v;       /* of this one: its panels come after the group's preparation */
    int64_t v_count;     /* channels of v that this task reads */
};

BF16_INLINE void fetch_row(struct rows rows, int64_t t, int64_t channel)
{
    int64_t at = t * rows.stride_bytes + channel * (int64_t)fkda_element_bytes(rows.dtype);
    _mm_prefetch(rows.first + at, _MM_HINT_T1);
}

/* A row of kd or qd, channels c to c + 31 of token t: rounded, and what A and P are made of. */
BF16_INLINE void store_row(uint16_t *rounded, uint16_t *rest, float *exact, struct pair x,
                           int64_t t, int64_t c, int64_t K, bool split)
{
    if (split) {
        __m512i lost;
        _mm512_store_si512(rounded + t * K + c, pack_round_rest(x.even, x.odd, &lost));
        _mm512_store_si512(rest + t * K + c, lost);
    } else {
        _mm512_store_si512(rounded + t * K + c, pack_round(x.even, x.odd));
        _mm512_store_ps(exact + (c / 32 * CHUNK + t) * 32, x.even);
        _mm512_store_ps(exact + (c / 32 * CHUNK + t) * 32 + 16, x.odd);
    }
}

BF16_INLINE struct pair pair_mul(struct pair x, struct pair y)
{
    return (struct pair){_mm512_mul_ps(x.even, y.even), _mm512_mul_ps(x.odd, y.odd)};
}

BF16_INLINE struct pair pair_scale(struct pair x, float factor)
{
    vf f = _mm512_set1_ps(factor);
    return pair_mul(x, (struct pair){f, f});
}

/* ki and kr of channels c to c + 31, from ki in registers or the nearest cache. */
BF16_INLINE void store_inverse(struct chunk *chunk, struct draft *draft, const vf even[CHUNK],
                               const vf odd[CHUNK], struct pair decay, int64_t c, bool split)
{
    const struct pair factor = pair_scale(decay, 1.0f / REFERENCE);
    if (!split) {
        for (int64_t t = 0; t < CHUNK; t++) {
            int64_t at = (c / 32 * CHUNK + t) * 32;
            _mm512_store_ps(draft->ki32 + at, even[t]);
            _mm512_store_ps(draft->ki32 + at + 16, odd[t]);
            _mm512_store_ps(chunk->kr + at, _mm512_mul_ps(even[t], factor.even));
            _mm512_store_ps(chunk->kr + at + 16, _mm512_mul_ps(odd[t], factor.odd));
        }
        return;
    }
    vf main[CHUNK], rest[CHUNK];
    for (int t = 0; t < CHUNK; t++) {
        main[t] = float_of(pack_cut(even[t], odd[t]));
        rest[t] = float_of(pack_rest(even[t], odd[t]));
    }
    vf_transpose(main);
    for (int i = 0; i < 16; i++)
        _mm512_store_ps((void *)(draft->ki + (c / 2 + i) * 32), main[i]);
    vf_transpose(rest);
    for (int i = 0; i < 16; i++)
        _mm512_store_ps((void *)(draft->ki_rest + (c / 2 + i) * 32), rest[i]);
    store_kr_split(chunk->kr_split, even, factor.even, c, 0);
    store_kr_split(chunk->kr_split, odd, factor.odd, c, 1);
}

/* Channels c to c + 31 of all operands. `split`: in two bf16 terms, for tile products, whose panels
 * fetch q and k. */
BF16_INLINE void prepare_block(struct chunk *chunk, struct draft *draft, const struct head *head,
                               struct rows q, struct rows k, struct rows g,
                               const struct chunk_fetch *ahead, int64_t c, int64_t K,
                               fkda_gate gate, bool split)
{
    const bool fetch_v = c < ahead->v_count;
    vf ki_even[CHUNK], ki_odd[CHUNK];
    const vf scale = _mm512_set1_ps(head->gate_scale), factor = _mm512_set1_ps(head->gate_factor);
    const vf offset_even = _mm512_load_ps(head->gate_offset + c);
    const vf offset_odd = _mm512_load_ps(head->gate_offset + c + 16);
    struct pair sum = pair_zero(), low = pair_zero(), high = pair_zero();
    for (int64_t t = 0; t < CHUNK; t++) {
        if (t >= chunk->tokens) {
            ki_even[t] = ki_odd[t] = _mm512_setzero_ps();
            store_row(chunk->kd, draft->kd_rest, draft->kd32, pair_zero(), t, c, K, split);
            store_row(chunk->qd, draft->qd_rest, draft->qd32, pair_zero(), t, c, K, split);
            continue;
        }
        if (!split) {
            fetch_row(ahead->q, t, c);
            fetch_row(ahead->k, t, c);
        }
        fetch_row(ahead->g, t, c);
        if (fetch_v)
            fetch_row(ahead->v, t, c);
        struct pair x = pair_load(g.first + t * g.stride_bytes, g.dtype, c);
        sum.even = gate_add(sum.even, x.even, scale, offset_even, factor, gate);
        sum.odd = gate_add(sum.odd, x.odd, scale, offset_odd, factor, gate);
        if (gate != FKDA_GATE_BOUNDED) {
            low.even = _mm512_min_ps(sum.even, low.even);
            low.odd = _mm512_min_ps(sum.odd, low.odd);
            high.even = _mm512_max_ps(sum.even, high.even);
            high.odd = _mm512_max_ps(sum.odd, high.odd);
        }
        struct pair up, down;
        exp2_both(sum.even, &up.even, &down.even);
        exp2_both(sum.odd, &up.odd, &down.odd);

        x = pair_scale(pair_load(k.first + t * k.stride_bytes, k.dtype, c), draft->k_factor[t]);
        store_row(chunk->kd, draft->kd_rest, draft->kd32, pair_mul(x, up), t, c, K, split);
        x = pair_mul(x, down);
        ki_even[t] = x.even;
        ki_odd[t] = x.odd;
        x = pair_scale(pair_load(q.first + t * q.stride_bytes, q.dtype, c), draft->q_factor[t]);
        store_row(chunk->qd, draft->qd_rest, draft->qd32, pair_mul(x, up), t, c, K, split);
    }
    if (gate != FKDA_GATE_BOUNDED) {
        vf deepest = _mm512_min_ps(low.even, low.odd), highest = _mm512_max_ps(high.even, high.odd);
        const vf limit = _mm512_set1_ps(MAX_DEPTH_LOG2);
        chunk->walk |= _mm512_cmp_ps_mask(_mm512_sub_ps(highest, deepest), limit, _CMP_GT_OQ) != 0;
    }
    struct pair decay = {exp2_full(sum.even), exp2_full(sum.odd)};
    pair_store_f32(chunk->decay + c, decay);
    store_inverse(chunk, draft, ki_even, ki_odd, decay, c, split);
}

/* All operands but the products among them, of chunk->tokens tokens from chunk->begin on. */
BF16_INLINE void prepare_chunk(struct chunk *chunk, struct draft *draft, const struct head *head,
                               const struct chunk_fetch *ahead, int64_t K, bool bf16_rows,
                               fkda_gate gate, bool split)
{
    const struct fkda_plan *plan = head->plan;
    struct rows q = rows_of(head, &plan->q, chunk->begin, head->key_index);
    struct rows k = rows_of(head, &plan->k, chunk->begin, head->key_index);
    struct rows g = rows_of(head, &plan->g, chunk->begin, head->index);
    if (bf16_rows)
        q.dtype = k.dtype = g.dtype = FKDA_BF16;
    prepare_rows(chunk, draft, head, q, k, K);
    for (int64_t c = 0; c < K; c += 32)
        prepare_block(chunk, draft, head, q, k, g, ahead, c, K, gate, split);
}

/* Tiles keep 17 bits of kr. That is enough unless nearly the same key is written again and again
 * and nothing decays: then the same error is, too (measured: 2 % of the state after 16384 tokens
 * with one key). So a chunk most of whose pairs of keys agree to 5 % is walked in fp32. */
BF16_INLINE bool keys_agree(const struct draft *draft)
{
    const vf limit = _mm512_set1_ps(0.95f * REFERENCE * REFERENCE);
    int pairs = 0;
    for (int t = 1; t < CHUNK; t++) {
        vf row = _mm512_abs_ps(_mm512_load_ps(draft->a_raw + t * CHUNK));
        __mmask16 before = (__mmask16)((1u << t) - 1);
        pairs += __builtin_popcount(_mm512_mask_cmp_ps_mask(before, row, limit, _CMP_GT_OQ));
    }
    return pairs > CHUNK * (CHUNK - 1) / 4;
}

/* From the raw products: A (times b, strictly lower) and 2^8 P (lower). */
BF16_INLINE void finish_pairs(struct chunk *chunk, const struct draft *draft, bool split)
{
    const vf p_factor = _mm512_set1_ps(1.0f / REFERENCE);
    if (split && keys_agree(draft))
        chunk->walk = true;
    for (int t = 0; t < CHUNK; t++) {
        vf a_factor = _mm512_set1_ps(chunk->b_pk[t] * (1.0f / REFERENCE));
        __mmask16 before = (__mmask16)((1u << t) - 1), upto = (__mmask16)((2u << t) - 1);
        _mm512_store_ps(
            chunk->a + t * CHUNK,
            _mm512_maskz_mul_ps(before, _mm512_load_ps(draft->a_raw + t * CHUNK), a_factor));
        vf p = _mm512_maskz_mul_ps(upto, _mm512_load_ps(draft->p_raw + t * CHUNK), p_factor);
        if (split) {
            __m256i main = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits_of(p), 16));
            vf rest = _mm512_sub_ps(p, upper_half(p));
            __m256i tail = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits_of(rest), 16));
            _mm256_store_si256((__m256i *)(void *)(chunk->p_split + t * 32), main);
            _mm256_store_si256((__m256i *)(void *)(chunk->p_split + t * 32 + 16), tail);
        } else {
            _mm512_store_ps(chunk->p + t * CHUNK, p);
        }
    }
}

#endif /* FKDA_PREPARE_BF16_H */
