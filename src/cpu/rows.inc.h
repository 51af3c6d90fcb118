/* rows.inc.h: token by token on the rows of the [V, K] image: decode, and tails of a few tokens.
 *
 *     pk = s . (a k)   pq = s . (a q)   u = b (v - pk)   out = pq + u (k . q)   s <- a s + u k
 *
 * a = 2^g is the decay. Rows are independent; ROWS of them go together, so that one reduction gives
 * all their products, and a row is read from memory once and written once. */
#ifndef FKDA_ROWS_INC_H
#define FKDA_ROWS_INC_H

enum {
    ROWS = VF_LANES / 2,
    TOKEN_ROWS = 4 /* per token: a, k, a k, a q, each [K] */
};

/* Up to CHUNK tokens of one head, ready for the rows. */
struct token_rows {
    float *channels; /* [CHUNK][TOKEN_ROWS][K] */
    float *b, *kq;   /* [CHUNK] */
    float *q_factor, *k_factor;
};

FKDA_BODY vf load_any(const void *row, fkda_dtype dtype, int64_t d)
{
    return load_channels(row, dtype == FKDA_BF16, d);
}

static void prepare_token(const struct fkda_plan *plan, const struct fkda_sequence *seq,
                          const struct gate_constants *gate, int64_t head, int64_t t0, int64_t i,
                          const struct token_rows *tokens)
{
    int64_t key_head = head / plan->heads_per_key, K = plan->K;
    const void *q_row = fkda_row(&plan->q, seq, t0 + i, key_head, 0);
    const void *k_row = fkda_row(&plan->k, seq, t0 + i, key_head, 0);
    const void *g_row = fkda_row(&plan->g, seq, t0 + i, head, 0);
    float *channels = tokens->channels + i * TOKEN_ROWS * K;
    vf kq[VF_LANES];
    for (int j = 0; j < VF_LANES; j++)
        kq[j] = vf_zero();
    for (int64_t d = 0; d < K; d += VF_LANES) {
        vf g = load_any(g_row, plan->g.dtype, d);
        if (gate->kind == FKDA_GATE_BOUNDED)
            g = gate_log2(gate, FKDA_GATE_BOUNDED, g, d);
        else if (gate->kind == FKDA_GATE_SOFTPLUS)
            g = gate_log2(gate, FKDA_GATE_SOFTPLUS, g, d);
        else
            g = gate_log2(gate, FKDA_GATE_ACTIVATED, g, d);
        vf a = vm_exp2(g);
        vf k = vf_mul(load_any(k_row, plan->k.dtype, d), vf_set1(tokens->k_factor[i]));
        vf q = vf_mul(load_any(q_row, plan->q.dtype, d), vf_set1(tokens->q_factor[i]));
        vf_store(channels + d, a);
        vf_store(channels + K + d, k);
        vf_store(channels + 2 * K + d, vf_mul(a, k));
        vf_store(channels + 3 * K + d, vf_mul(a, q));
        kq[0] = vf_fma(k, q, kq[0]);
    }
    float sums[VF_LANES];
    vf_storeu(sums, vf_sum_rows(kq));
    tokens->kq[i] = sums[0];
}

static void prepare_tokens(const struct fkda_plan *plan, const struct fkda_sequence *seq,
                           int64_t head, int64_t t0, int64_t count, const struct token_rows *tokens)
{
    int64_t key_head = head / plan->heads_per_key;
    struct gate_constants gate = gate_of_head(plan, head);
    norm_factors(plan, &plan->q, seq, key_head, t0, count, plan->scale, tokens->q_factor);
    norm_factors(plan, &plan->k, seq, key_head, t0, count, 1.0f, tokens->k_factor);
    prepare_beta(plan, seq, head, t0, count, tokens->b);
    for (int64_t i = 0; i < count; i++)
        prepare_token(plan, seq, &gate, head, t0, i, tokens);
}

/* Products of ROWS rows s [ROWS, K] with a k and a q: products[0 .. ROWS) and [ROWS .. 2 ROWS). */
static inline void row_products(const float *s, const float *channels, int64_t K, float *products)
{
    vf sum[2 * ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < 2 * ROWS; r++)
        sum[r] = vf_zero();
    for (int64_t d = 0; d < K; d += VF_LANES) {
        vf ak = vf_load(channels + 2 * K + d), aq = vf_load(channels + 3 * K + d);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            vf x = vf_loadu(s + r * K + d);
            __builtin_prefetch(s + (r + ROWS) * K + d, 0, 3);
            sum[r] = vf_fma(x, ak, sum[r]);
            sum[ROWS + r] = vf_fma(x, aq, sum[ROWS + r]);
        }
    }
    vf_storeu(products, vf_sum_rows(sum));
}

/* to <- a from + u k, ROWS rows; `from` and `to` may be the same. */
static inline void row_update(const float *from, float *to, const float *channels, int64_t K,
                              const float *u)
{
    for (int64_t d = 0; d < K; d += VF_LANES) {
        vf a = vf_load(channels + d), k = vf_load(channels + K + d);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            vf x = vf_mul(vf_set1(u[r]), k);
            vf_storeu(to + r * K + d, vf_fma(vf_loadu(from + r * K + d), a, x));
        }
    }
}

/* One walk over some rows of one head. */
struct row_walk {
    const struct fkda_plan *plan;
    const struct fkda_sequence *seq;
    int64_t n, head, t0, count;
    const struct token_rows *tokens;
    float *work;      /* [ROWS, K] */
    bool every_state; /* decode of draft tokens: each token's state goes to its own slot */
};

/* Where the rows from v on are stored after token i; NULL: nowhere. */
static void *row_target(const struct row_walk *walk, int64_t i, int64_t v)
{
    const struct fkda_plan *plan = walk->plan;
    if (walk->every_state)
        return fkda_state_row(plan, &plan->final_state, fkda_plan_write_slot(plan, walk->n, i),
                              walk->head, v);
    if (i != walk->count - 1)
        return NULL;
    return fkda_state_row(plan, &plan->final_state, walk->seq->slot, walk->head, v);
}

static void convert_rows(const struct row_walk *walk, const void *from, fkda_dtype from_dtype,
                         void *to, fkda_dtype to_dtype)
{
    for (int64_t i = 0; i < ROWS * walk->plan->K; i += VF_LANES) {
        vf x = from ? load_any(from, from_dtype, i) : vf_zero();
        if (to_dtype == FKDA_BF16)
            vf_store_bf16((uint16_t *)to + i, x);
        else
            vf_storeu((float *)to + i, x);
    }
}

/* ROWS rows from value channel v on; source NULL: zeros. */
static void walk_rows(const struct row_walk *walk, const void *source, fkda_dtype dtype, int64_t v)
{
    const struct fkda_plan *plan = walk->plan;
    int64_t K = plan->K;
    const float *from = walk->work;
    if (source && dtype == FKDA_F32)
        from = source;
    else
        convert_rows(walk, source, dtype, walk->work, FKDA_F32);
    for (int64_t i = 0; i < walk->count; i++) {
        const float *channels = walk->tokens->channels + i * TOKEN_ROWS * K;
        void *target = row_target(walk, i, v);
        bool direct = target && plan->final_state.dtype == FKDA_F32;
        float *to = direct ? target : walk->work;
        float products[2 * ROWS], u[ROWS];
        row_products(from, channels, K, products);
        const void *v_row = fkda_row(&plan->v, walk->seq, walk->t0 + i, walk->head, v);
        void *out_row = fkda_row(&plan->out, walk->seq, walk->t0 + i, walk->head, v);
        for (int r = 0; r < ROWS; r++) {
            u[r] = walk->tokens->b[i] * (fkda_load_element(v_row, plan->v.dtype, r) - products[r]);
            fkda_store_element(out_row, plan->out.dtype, r,
                               products[ROWS + r] + u[r] * walk->tokens->kq[i]);
        }
        row_update(from, to, channels, K, u);
        if (target && !direct)
            convert_rows(walk, walk->work, FKDA_F32, target, FKDA_BF16);
        from = to;
    }
}

#endif /* FKDA_ROWS_INC_H */
