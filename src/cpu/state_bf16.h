/* state_bf16.h: the states of a task's heads while a sequence runs, and the exact walk of a deep
 * chunk.
 *
 * The state is fp32, turned and cut into blocks of 16 value channels, [V / 16][K][16]: value
 * channels of one parity out of 32, as in vec_bf16.h. Beside it lies its bf16 shadow, two key
 * channels to a word, [V / 16][K / 2][16][2]: the right operand of tile and dot products.
 *
 * One panel of two blocks (24 KB with K 128) takes several chunks in a row, so that it stays in
 * the first-level cache; what streams past it are the chunks' operands.
 */
#ifndef FKDA_STATE_BF16_H
#define FKDA_STATE_BF16_H

#include "cpu/prepare_bf16.h"

enum { GROUP = 8 }; /* chunks prepared at once: 144 KB of operands with K 128 */

/* What the tiles fetch while they are on a panel, a few lines at each step: a line takes hundreds
 * of cycles, and the processor stalls when more than a dozen are under way. */
struct panel_fetch {
    struct rows q, k; /* four tokens of the group after this one */
    struct rows out;  /* to be written by the next chunk on a panel */
};

/* A thread's memory, carved from the task's scratch. */
struct work {
    struct head *heads; /* of the task */
    float *states;      /* one image for each */
    uint16_t *shadows;
    struct head *head; /* the one whose turn it is, and its state: see select_head() */
    float *state;      /* [V / 16][K][16] */
    uint16_t *shadow;  /* [V / 16][K / 2][16][2] */
    struct draft *draft;
    struct chunk *chunks;      /* [GROUP] */
    float *pk;                 /* [2 blocks][16 tokens][16]: kd S^T */
    float *out;                /* the same memory, later: 2^8 times the outputs */
    void *u;                   /* [2 blocks] of U_BYTES, in the form the products want */
    float *ring;               /* tiles on their way from a product to the state */
    int64_t v_begin, blocks;   /* value channels v_begin + 32 (i / 2) + 2 lane + i % 2 in block i */
    int64_t next_head, next_t; /* where the group after this one begins */
    struct panel_fetch ahead;
    bool stream; /* outputs are stored past the caches */
};

enum { BLOCK = CHUNK * 16, U_BYTES = 2048, RING_BYTES = 2 * BLOCK * 4, PAGE_BYTES = 4096 };

static size_t work_bytes(int64_t K, int64_t V, int64_t heads)
{
    return sizeof(struct draft) + GROUP * sizeof(struct chunk) + RING_BYTES +
           2 * (BLOCK * sizeof(float) + U_BYTES) +
           (size_t)heads * (sizeof(struct head) + (size_t)(V * K) * 6) + 9 * PAGE_BYTES;
}

static void *carve(char **next, size_t bytes)
{
    *next += (PAGE_BYTES - (uintptr_t)*next % PAGE_BYTES) % PAGE_BYTES;
    void *here = *next;
    *next += bytes;
    return here;
}

static void work_begin(struct work *work, const struct fkda_cpu_task *task)
{
    size_t image = (size_t)task->plan->K * (size_t)task->v_count;
    size_t heads = (size_t)task->head_count;
    char *next = (char *)task->scratch;
    work->chunks = (struct chunk *)carve(&next, GROUP * sizeof(struct chunk));
    work->draft = (struct draft *)carve(&next, sizeof(struct draft));
    work->states = (float *)carve(&next, heads * image * 4);
    work->shadows = (uint16_t *)carve(&next, heads * image * 2);
    work->ring = (float *)carve(&next, RING_BYTES);
    work->pk = (float *)carve(&next, 2 * BLOCK * sizeof(float));
    work->out = work->pk;
    work->u = carve(&next, 2 * U_BYTES);
    work->heads = (struct head *)carve(&next, heads * sizeof(struct head));
    work->v_begin = task->v_begin;
    work->blocks = task->v_count / 16;
}

static void select_head(struct work *work, const struct fkda_cpu_task *task, int64_t i)
{
    const int64_t image = task->plan->K * task->v_count;
    work->head = &work->heads[i];
    work->state = work->states + i * image;
    work->shadow = work->shadows + i * image;
}

BF16_INLINE int64_t block_channel(const struct work *work, int64_t block, int64_t lane)
{
    return work->v_begin + block / 2 * 32 + 2 * lane + block % 2;
}

static void refresh_shadow(struct work *work, int64_t begin, int64_t end)
{
    int64_t K = work->head->plan->K;
    for (int64_t i = begin * K; i < end * K; i += 2)
        _mm512_store_si512(work->shadow + i * 16,
                           pack_round(_mm512_load_ps(work->state + i * 16),
                                      _mm512_load_ps(work->state + i * 16 + 16)));
}

/* Absent or padding: zero. */
static void state_load(struct work *work, const struct fkda_state_view *view, int64_t slot)
{
    const struct fkda_plan *plan = work->head->plan;
    int64_t K = plan->K;
    for (int64_t block = 0; block < work->blocks; block++) {
        for (int64_t k = 0; k < K; k += 16) {
            vf rows[16];
            for (int64_t i = 0; i < 16; i++) {
                const void *row = fkda_state_row(plan, view, slot, work->head->index,
                                                 block_channel(work, block, i));
                if (!row)
                    rows[i] = _mm512_setzero_ps();
                else if (view->dtype == FKDA_BF16)
                    rows[i] = vf_load_bf16((const uint16_t *)row + k);
                else
                    rows[i] = quiet_nan(vf_loadu((const float *)row + k));
            }
            vf_transpose(rows);
            for (int i = 0; i < 16; i++)
                _mm512_store_ps(work->state + ((block * K + k + i) * 16), rows[i]);
        }
    }
    refresh_shadow(work, 0, work->blocks);
}

static void state_store(const struct work *work, const struct fkda_state_view *view, int64_t slot)
{
    const struct fkda_plan *plan = work->head->plan;
    int64_t K = plan->K;
    if (!view->data || slot < 0)
        return;
    for (int64_t block = 0; block < work->blocks; block++) {
        for (int64_t k = 0; k < K; k += 16) {
            vf rows[16];
            for (int i = 0; i < 16; i++)
                rows[i] = _mm512_load_ps(work->state + ((block * K + k + i) * 16));
            vf_transpose(rows);
            for (int64_t i = 0; i < 16; i++) {
                void *row = fkda_state_row(plan, view, slot, work->head->index,
                                           block_channel(work, block, i));
                if (view->dtype == FKDA_BF16)
                    vf_store_bf16((uint16_t *)row + k, rows[i]);
                else
                    vf_storeu((float *)row + k, rows[i]);
            }
        }
    }
}

/* One token's decay and its row of q and k, normalised, in natural order. */
struct token {
    _Alignas(64) float decay[MAX_K], k[MAX_K], q[MAX_K];
};

/* 1 / sqrt(sum x^2 + epsilon) in float64: squares of fp32 values neither overflow nor vanish
 * there. */
static float exact_factor(const void *row, fkda_dtype dtype, int64_t K)
{
    double sum = FKDA_NORM_EPSILON;
    for (int64_t i = 0; i < K; i++) {
        double x = (double)fkda_load_element(row, dtype, i);
        sum += x * x;
    }
    return (float)(1.0 / sqrt(sum));
}

static void load_token(struct token *token, const struct head *head, int64_t t)
{
    const struct fkda_plan *plan = head->plan;
    const void *q = fkda_row(&plan->q, &head->seq, t, head->key_index, 0);
    const void *k = fkda_row(&plan->k, &head->seq, t, head->key_index, 0);
    const void *g = fkda_row(&plan->g, &head->seq, t, head->index, 0);
    vf q_factor = _mm512_set1_ps(plan->scale), k_factor = _mm512_set1_ps(1.0f);
    if (plan->qk_l2norm) {
        q_factor = _mm512_set1_ps(plan->scale * exact_factor(q, plan->q.dtype, plan->K));
        k_factor = _mm512_set1_ps(exact_factor(k, plan->k.dtype, plan->K));
    }
    const vf scale = _mm512_set1_ps(head->gate_scale), factor = _mm512_set1_ps(head->gate_factor);
    for (int64_t c = 0; c < plan->K; c += 32) {
        struct pair x = pair_load(g, plan->g.dtype, c), none = pair_zero();
        x.even = exp2_full(gate_add(none.even, x.even, scale, _mm512_load_ps(head->gate_offset + c),
                                    factor, plan->gate));
        x.odd = exp2_full(gate_add(none.odd, x.odd, scale,
                                   _mm512_load_ps(head->gate_offset + c + 16), factor, plan->gate));
        pair_store_f32(token->decay + c, x);
        x = pair_load(k, plan->k.dtype, c);
        x = (struct pair){_mm512_mul_ps(x.even, k_factor), _mm512_mul_ps(x.odd, k_factor)};
        pair_store_f32(token->k + c, x);
        x = pair_load(q, plan->q.dtype, c);
        x = (struct pair){_mm512_mul_ps(x.even, q_factor), _mm512_mul_ps(x.odd, q_factor)};
        pair_store_f32(token->q + c, x);
    }
}

/* A chunk that the factors do not suit, on one panel: the recurrence itself, in fp32.
 * Leaves 2^8 times the outputs where the products would. */
static void walk_panel(struct work *work, const struct chunk *chunk, int64_t panel)
{
    const struct head *head = work->head;
    const struct fkda_plan *plan = head->plan;
    int64_t K = plan->K;
    struct token token;
    for (int64_t t = 0; t < chunk->tokens; t++) {
        load_token(&token, head, chunk->begin + t);
        struct pair v = pair_load(fkda_row(&plan->v, &head->seq, chunk->begin + t, head->index, 0),
                                  plan->v.dtype, work->v_begin + panel * 32);
        for (int64_t i = 0; i < 2; i++) {
            float *state = work->state + (2 * panel + i) * K * 16;
            vf pk = _mm512_setzero_ps(), o = _mm512_setzero_ps();
            for (int64_t k = 0; k < K; k++) {
                vf s =
                    _mm512_mul_ps(_mm512_load_ps(state + k * 16), _mm512_set1_ps(token.decay[k]));
                _mm512_store_ps(state + k * 16, s);
                pk = _mm512_fmadd_ps(s, _mm512_set1_ps(token.k[k]), pk);
            }
            vf u =
                _mm512_mul_ps(_mm512_set1_ps(chunk->b[t]), _mm512_sub_ps(i ? v.odd : v.even, pk));
            for (int64_t k = 0; k < K; k++) {
                vf s = _mm512_load_ps(state + k * 16);
                s = _mm512_fmadd_ps(u, _mm512_set1_ps(token.k[k]), s);
                _mm512_store_ps(state + k * 16, s);
                o = _mm512_fmadd_ps(s, _mm512_set1_ps(token.q[k]), o);
            }
            _mm512_store_ps(work->out + i * BLOCK + t * 16,
                            _mm512_mul_ps(o, _mm512_set1_ps(REFERENCE)));
        }
    }
    refresh_shadow(work, 2 * panel, 2 * panel + 2);
}

#endif /* FKDA_STATE_BF16_H */
