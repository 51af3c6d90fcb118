/* prepare.inc.h: from the rows of q, k, g, beta to the coefficients of four tokens at a time.
 *
 * With a_t = 2^(g_t) the decay of token t of a group, and k, q as they come (not yet normalised):
 *
 *     Kd_t = k_t a_0 .. a_t     Qd_t = q_t a_0 .. a_t     D = a_0 a_1 a_2 a_3
 *     Kr_t = k_t a_(t+1) .. a_3
 *     A_ts = sum_d k_t k_s a_(s+1) .. a_t   (s < t)       P_ts likewise with q_t (s <= t)
 *
 * Every factor is a product of decays, never a quotient, so no gate is too deep: a channel that has
 * decayed to nothing is 0, not an overflow. The norms and the scale are numbers per token; they are
 * applied to what the products yield (solve_group), which is less work than to the rows.
 *
 * Layout: slot [K / 16][COEF_ROWS][16], so that a pass over channels reads with one pointer. A slot
 * holds Kr and D of the group before and Kd, Qd of its own group: what one pass needs. */
#ifndef FKDA_PREPARE_INC_H
#define FKDA_PREPARE_INC_H

enum {
    GROUP = 4,       /* tokens that one pass over the state takes */
    COEF_BLOCK = 16, /* channels */
    COEF_ROWS = 13,
    ROW_KR = 0, /* rows 0 .. 3 */
    ROW_D = 4,
    ROW_KD = 5,    /* rows 5 .. 8 */
    ROW_QD = 9,    /* rows 9 .. 12 */
    TRIANGLE = 16, /* six A_ts, then ten P_ts */
    CHUNK = FKDA_CHUNK_TOKENS,
    CHUNK_GROUPS = CHUNK / GROUP,
    MAX_K = 256,
    VECS_EACH = VF_LANES == 16 ? EACH / GROUP : 1 /* as many chains as the registers hold */
};

#define TRIANGLE_A(t, s) ((t) * ((t)-1) / 2 + (s))
#define TRIANGLE_P(t, s) (6 + (t) * ((t) + 1) / 2 + (s))

static const float zero_row[MAX_K]; /* stands for absent tokens and for an absent bias */

/* How g becomes a base-2 logarithm of the decay, for one head. */
struct gate_constants {
    fkda_gate kind;
    const float *bias; /* [K], any alignment */
    /* bounded: outer / (1 + 2^(inner (g + bias))), inverse = 1 / outer;
     * softplus, activated: outer */
    float inner, outer, inverse;
};

/* Up to CHUNK tokens of one head, ready for the passes. */
struct chunk {
    float *slots;               /* [CHUNK_GROUPS + 1][K / 16][COEF_ROWS][16] */
    float *triangles;           /* [CHUNK_GROUPS][TRIANGLE] */
    float *b;                   /* [CHUNK]: b k_factor */
    float *q_factor, *k_factor; /* [CHUNK]: what makes q^ scale and k^ of a raw row */
    float *squares;             /* [2][CHUNK][VF_LANES]: of k, then of q; a sum in each lane */
};

struct group_rows {
    const void *q[GROUP], *k[GROUP], *g[GROUP];
    int64_t count; /* tokens that exist; those past the end are rows of 0 and do not decay */
};

static inline struct gate_constants gate_of_head(const struct fkda_plan *plan, int64_t head)
{
    struct gate_constants gate = {.kind = plan->gate, .bias = zero_row, .outer = LOG2E};
    if (plan->gate == FKDA_GATE_ACTIVATED)
        return gate;
    float factor = fkda_gate_factor(plan, head);
    if (plan->dt_bias)
        gate.bias = plan->dt_bias + head * plan->dt_bias_stride_h;
    gate.inner = -factor * LOG2E;
    gate.outer = plan->gate == FKDA_GATE_BOUNDED ? plan->lower_bound * LOG2E : gate.inner;
    gate.inverse = gate.outer < -0x1p-60f ? 1 / gate.outer : -0x1p60f; /* the decay is 1 */
    return gate;
}

FKDA_BODY vf load_channels(const void *row, bool is_bf16, int64_t d)
{
    return is_bf16 ? vf_load_bf16((const uint16_t *)row + d) : vf_loadu((const float *)row + d);
}

FKDA_BODY vf gate_log2(const struct gate_constants *gate, fkda_gate kind, vf g, int64_t d)
{
    vf outer = vf_set1(gate->outer);
    if (kind == FKDA_GATE_ACTIVATED)
        return vf_mul(outer, g);
    vf x = vf_add(g, vf_loadu(gate->bias + d));
    if (kind == FKDA_GATE_SOFTPLUS)
        return vf_mul(outer, vm_softplus(x));
    return vf_mul(outer, vm_sigmoid_exp2(vf_mul(x, vf_set1(gate->inner))));
}

/* factors[t] = factor / |row t|, or factor itself without norm. */
static void norm_factors(const struct fkda_plan *plan, const struct fkda_view *view,
                         const struct fkda_sequence *seq, int64_t key_head, int64_t t0,
                         int64_t count, float factor, float *factors)
{
    bool is_bf16 = view->dtype == FKDA_BF16;
    for (int64_t base = 0; base < CHUNK; base += VF_LANES) {
        if (!plan->qk_l2norm) {
            vf_storeu(factors + base, vf_set1(factor));
            continue;
        }
        vf rows[VF_LANES];
        for (int64_t i = 0; i < VF_LANES; i++) {
            rows[i] = vf_zero();
            if (base + i >= count)
                continue;
            const void *row = fkda_row(view, seq, t0 + base + i, key_head, 0);
            vf even = vf_zero(), odd = vf_zero();
            for (int64_t d = 0; d < plan->K; d += COEF_BLOCK) {
                for (int64_t j = d; j < d + COEF_BLOCK; j += VF_LANES) {
                    vf x = load_channels(row, is_bf16, j);
                    even = vf_fma(x, x, even);
                    vf swap = even;
                    even = odd;
                    odd = swap;
                }
            }
            rows[i] = vf_add(even, odd);
        }
        vf sum = vf_add(vf_sum_rows(rows), vf_set1((float)FKDA_NORM_EPSILON));
        vf_storeu(factors + base, vf_div(vf_set1(factor), vf_sqrt(sum)));
    }
}

static void prepare_beta(const struct fkda_plan *plan, const struct fkda_sequence *seq,
                         int64_t head, int64_t t0, int64_t count, float *b)
{
    const char *row = fkda_row(&plan->beta, seq, t0, head, 0);
    int64_t step = plan->beta.stride_t * (int64_t)fkda_element_bytes(plan->beta.dtype);
    for (int64_t t = 0; t < CHUNK; t++)
        b[t] = t < count ? fkda_load_element(row + t * step, plan->beta.dtype, 0) : 0.0f;
    vf doubled = vf_set1(plan->allow_neg_eigval ? 2.0f : 1.0f);
    for (int64_t t = 0; t < CHUNK; t += VF_LANES) {
        vf x = vf_loadu(b + t);
        if (plan->beta_sigmoid)
            x = vm_sigmoid_exp2(vf_mul(x, vf_set1(-LOG2E)));
        vf_storeu(b + t, vf_mul(doubled, x));
    }
}

/* ---- One group ------------------------------------------------------------------------------- */

/* decay [GROUP][K] <- a_t for `vecs` vectors of channels from d on. */
FKDA_BODY void decay_channels(const struct group_rows *rows, const struct gate_constants *gate,
                              fkda_gate kind, bool is_bf16, int64_t K, int64_t d, int vecs,
                              float *decay)
{
    vf x[EACH];
    const int count = vecs * GROUP;
    FKDA_EACH(i, count)
    x[i] = load_channels(rows->g[i % GROUP], is_bf16, d + i / GROUP * VF_LANES);
    if (kind == FKDA_GATE_BOUNDED) {
        vf inner = vf_set1(gate->inner), bias[EACH];
        FKDA_EACH(j, vecs)
        bias[j] = vf_mul(inner, vf_loadu(gate->bias + d + j * VF_LANES));
        FKDA_EACH(i, count)
        x[i] = vf_fma(x[i], inner, bias[i / GROUP]);
        vm_decay_each(x, vf_set1(gate->inverse), count);
    } else {
        FKDA_EACH(i, count)
        x[i] = gate_log2(gate, kind, x[i], d + i / GROUP * VF_LANES);
        vm_exp2_each(x, count);
    }
    FKDA_EACH(i, count)
    vf_store(decay + i % GROUP * K + d + i / GROUP * VF_LANES, x[i]);
}

/* Fetches for writing where `channels` channels of a group, from d on, will go: the passes have
 * driven it out of the first-level cache, and stores that miss it would drain one by one. */
FKDA_BODY void fetch_slots(float *own, int64_t K, int64_t d, int64_t channels)
{
    if (d % COEF_BLOCK != 0)
        return;
    for (int64_t c = d; c < d + channels; c += COEF_BLOCK) {
        for (int r = ROW_KD; r < COEF_ROWS; r++)
            __builtin_prefetch(own + c * COEF_ROWS + r * COEF_BLOCK, 1, 3);
        for (int r = ROW_KR; r < ROW_KD; r++)
            __builtin_prefetch(own + (K + c) * COEF_ROWS + r * COEF_BLOCK, 1, 3);
    }
}

FKDA_BODY void group_decays(const struct group_rows *rows, const struct gate_constants *gate,
                            fkda_gate kind, bool is_bf16, int64_t K, float *own, float *decay)
{
    const int64_t step = VECS_EACH * VF_LANES;
    int64_t d = 0;
    for (; d + step <= K; d += step) {
        fetch_slots(own, K, d, step); /* between computations, which leave time for it */
        decay_channels(rows, gate, kind, is_bf16, K, d, VECS_EACH, decay);
    }
    for (; d < K; d += VF_LANES) {
        fetch_slots(own, K, d, VF_LANES);
        decay_channels(rows, gate, kind, is_bf16, K, d, 1, decay);
    }
    for (int64_t i = rows->count; i < GROUP; i++)
        for (d = 0; d < K; d += VF_LANES)
            vf_store(decay + i * K + d, vf_set1(1.0f));
}

/* Sums over channels, one per lane: the triangle, and the squares of k and q. */
struct group_sums {
    vf triangle[TRIANGLE], k2[GROUP], q2[GROUP];
};

/* One vector of channels, from d on: rows of `own` and `next`, and the sums. */
FKDA_BODY void group_channels(const struct group_rows *rows, bool is_bf16, int64_t K, int64_t d,
                              const float *decay, float *own, float *next, struct group_sums *sum)
{
    vf reach[GROUP]; /* reach[s] = k_s a_(s+1) .. a_t */
    vf product = vf_load(decay + d);
#pragma GCC unroll 4
    for (int t = 0; t < GROUP; t++) {
        vf a = vf_load(decay + t * K + d);
        if (t > 0)
            product = vf_mul(product, a);
        vf k = load_channels(rows->k[t], is_bf16, d), q = load_channels(rows->q[t], is_bf16, d);
        vf_store(own + (ROW_KD + t) * COEF_BLOCK, vf_mul(k, product));
        vf_store(own + (ROW_QD + t) * COEF_BLOCK, vf_mul(q, product));
        for (int s = 0; s < t; s++) {
            reach[s] = vf_mul(reach[s], a);
            vf *a_ts = &sum->triangle[TRIANGLE_A(t, s)], *p_ts = &sum->triangle[TRIANGLE_P(t, s)];
            *a_ts = vf_fma(k, reach[s], *a_ts);
            *p_ts = vf_fma(q, reach[s], *p_ts);
        }
        reach[t] = k;
        vf *p_tt = &sum->triangle[TRIANGLE_P(t, t)];
        *p_tt = vf_fma(q, k, *p_tt);
        sum->k2[t] = vf_fma(k, k, sum->k2[t]);
        sum->q2[t] = vf_fma(q, q, sum->q2[t]);
    }
#pragma GCC unroll 4
    for (int t = 0; t < GROUP; t++)
        vf_store(next + (ROW_KR + t) * COEF_BLOCK, reach[t]);
    vf_store(next + ROW_D * COEF_BLOCK, product);
}

/* squares: of the group's first token in chunk->squares. */
FKDA_BODY void group_body(const struct group_rows *rows, const struct gate_constants *gate,
                          fkda_gate kind, bool is_bf16, int64_t K, float *own, float *triangle,
                          float *squares)
{
    float decay[GROUP * MAX_K] __attribute__((aligned(64)));
    float *next = own + COEF_ROWS * K;
    group_decays(rows, gate, kind, is_bf16, K, own, decay);
    struct group_sums sum;
#pragma GCC unroll 16
    for (int i = 0; i < TRIANGLE; i++)
        sum.triangle[i] = vf_zero();
#pragma GCC unroll 4
    for (int t = 0; t < GROUP; t++)
        sum.k2[t] = sum.q2[t] = vf_zero();
    for (int64_t c = 0; c < K; c += COEF_BLOCK)
        for (int64_t i = 0; i < COEF_BLOCK; i += VF_LANES)
            group_channels(rows, is_bf16, K, c + i, decay, own + c * COEF_ROWS + i,
                           next + c * COEF_ROWS + i, &sum);
    for (int i = 0; i < TRIANGLE; i += VF_LANES)
        vf_store(triangle + i, vf_sum_rows(sum.triangle + i));
    for (int t = 0; t < GROUP; t++) {
        vf_store(squares + t * VF_LANES, sum.k2[t]);
        vf_store(squares + (CHUNK + t) * VF_LANES, sum.q2[t]);
    }
}

#define GROUP_VARIANT(name, kind, is_bf16)                                                        \
    static void name(const struct group_rows *rows, const struct gate_constants *gate, int64_t K, \
                     float *own, float *triangle, float *squares)                                 \
    {                                                                                             \
        group_body(rows, gate, kind, is_bf16, K, own, triangle, squares);                         \
    }
GROUP_VARIANT(group_bounded_bf16, FKDA_GATE_BOUNDED, true)
GROUP_VARIANT(group_bounded_f32, FKDA_GATE_BOUNDED, false)
GROUP_VARIANT(group_softplus_bf16, FKDA_GATE_SOFTPLUS, true)
GROUP_VARIANT(group_softplus_f32, FKDA_GATE_SOFTPLUS, false)
GROUP_VARIANT(group_activated_bf16, FKDA_GATE_ACTIVATED, true)
GROUP_VARIANT(group_activated_f32, FKDA_GATE_ACTIVATED, false)
#undef GROUP_VARIANT

typedef void (*group_function)(const struct group_rows *rows, const struct gate_constants *gate,
                               int64_t K, float *own, float *triangle, float *squares);

static group_function group_for(fkda_gate kind, bool is_bf16)
{
    static const group_function variants[3][2] = {
        [FKDA_GATE_BOUNDED] = {group_bounded_f32, group_bounded_bf16},
        [FKDA_GATE_SOFTPLUS] = {group_softplus_f32, group_softplus_bf16},
        [FKDA_GATE_ACTIVATED] = {group_activated_f32, group_activated_bf16},
    };
    return variants[kind][is_bf16];
}

/* ---- One chunk ------------------------------------------------------------------------------- */

/* A row as float32: itself, or converted into `room` [K]. */
static const void *row_as_f32(const struct fkda_view *view, const void *row, int64_t K, float *room)
{
    if (view->dtype == FKDA_F32)
        return row;
    for (int64_t d = 0; d < K; d += VF_LANES)
        vf_storeu(room + d, vf_load_bf16((const uint16_t *)row + d));
    return room;
}

/* factors[t] = factor / sqrt(sum of squares + epsilon), or factor itself without norm. */
static void factors_of(const struct fkda_plan *plan, const float *squares, float factor,
                       float *factors)
{
    for (int64_t base = 0; base < CHUNK; base += VF_LANES) {
        vf rows[VF_LANES];
        for (int64_t i = 0; i < VF_LANES; i++)
            rows[i] = vf_load(squares + (base + i) * VF_LANES);
        vf sum = vf_add(vf_sum_rows(rows), vf_set1((float)FKDA_NORM_EPSILON));
        vf scaled = vf_div(vf_set1(factor), vf_sqrt(sum));
        vf_store(factors + base, plan->qk_l2norm ? scaled : vf_set1(factor));
    }
}

/* Rows of one head in one tensor: the first token's, and how far it is to the next. */
struct row_steps {
    const char *first;
    int64_t bytes;
};

static struct row_steps steps_of(const struct fkda_view *view, const struct fkda_sequence *seq,
                                 int64_t t, int64_t head)
{
    return (struct row_steps){.first = fkda_row(view, seq, t, head, 0),
                              .bytes = view->stride_t * (int64_t)fkda_element_bytes(view->dtype)};
}

/* Tokens t0 .. t0 + count - 1 of one head: fills every field of the chunk. */
static void prepare_chunk(const struct fkda_plan *plan, const struct fkda_sequence *seq,
                          const struct gate_constants *gate, int64_t head, int64_t t0,
                          int64_t count, const struct chunk *chunk)
{
    const int64_t key_head = head / plan->heads_per_key, K = plan->K;
    const bool all_bf16 =
        plan->q.dtype == FKDA_BF16 && plan->k.dtype == FKDA_BF16 && plan->g.dtype == FKDA_BF16;
    const struct row_steps q = steps_of(&plan->q, seq, t0, key_head);
    const struct row_steps k = steps_of(&plan->k, seq, t0, key_head);
    const struct row_steps g = steps_of(&plan->g, seq, t0, head);
    group_function group = group_for(gate->kind, all_bf16);
    float room[3 * GROUP][MAX_K]; /* rows that must be converted, where not all are bfloat16 */
    prepare_beta(plan, seq, head, t0, count, chunk->b); /* a long chain: others run beside it */
    if (count <= CHUNK - GROUP)
        memset(chunk->squares, 0, 2 * CHUNK * VF_LANES * sizeof(float));
    for (int64_t first = 0; first < count; first += GROUP) {
        struct group_rows rows = {.count = count - first};
        for (int64_t i = 0; i < GROUP; i++) {
            int64_t t = first + i;
            rows.q[i] = t < count ? q.first + t * q.bytes : (const char *)zero_row;
            rows.k[i] = t < count ? k.first + t * k.bytes : (const char *)zero_row;
            rows.g[i] = t < count ? g.first + t * g.bytes : (const char *)zero_row;
            if (all_bf16 || t >= count)
                continue;
            rows.q[i] = row_as_f32(&plan->q, rows.q[i], K, room[3 * i]);
            rows.k[i] = row_as_f32(&plan->k, rows.k[i], K, room[3 * i + 1]);
            rows.g[i] = row_as_f32(&plan->g, rows.g[i], K, room[3 * i + 2]);
        }
        group(&rows, gate, K, chunk->slots + first / GROUP * COEF_ROWS * K,
              chunk->triangles + first / GROUP * TRIANGLE, chunk->squares + first * VF_LANES);
    }
    factors_of(plan, chunk->squares, 1.0f, chunk->k_factor);
    factors_of(plan, chunk->squares + CHUNK * VF_LANES, plan->scale, chunk->q_factor);
    for (int64_t t = 0; t < CHUNK; t += VF_LANES)
        vf_store(chunk->b + t, vf_mul(vf_load(chunk->b + t), vf_load(chunk->k_factor + t)));
}

#endif /* FKDA_PREPARE_INC_H */
