/* portable.c: plain C kernels, token by token in fp32 on a [v_count, K] state:
 *     S <- S diag(exp g);   u = b (v - S k^);   S <- S + u k^T;   out = scale S q^
 */
#include <math.h>

#include "core/bf16.h"
#include "cpu/cpu_backend.h"

struct row {
    float q[256], k[256], decay[256]; /* [K] */
    float b;
};

static float load(const void *data, fkda_dtype dtype, int64_t i)
{
    return dtype == FKDA_BF16 ? fkda_bf16_to_float(((const uint16_t *)data)[i])
                              : ((const float *)data)[i];
}

static void store(void *data, fkda_dtype dtype, int64_t i, float value)
{
    if (dtype == FKDA_BF16)
        ((uint16_t *)data)[i] = fkda_bf16_from_float(value);
    else
        ((float *)data)[i] = value;
}

static int64_t at(const struct fkda_view *view, const struct fkda_sequence *seq, int64_t t,
                  int64_t head)
{
    return seq->batch * view->stride_b + (seq->begin + t) * view->stride_t + head * view->stride_h;
}

static float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

static float gate(const struct fkda_plan *plan, int64_t head, int64_t i, float g_raw)
{
    if (plan->gate == FKDA_GATE_ACTIVATED)
        return g_raw;
    float factor = plan->A_log ? expf(plan->A_log[head * plan->A_log_stride]) : 1.0f;
    float x = g_raw + (plan->dt_bias ? plan->dt_bias[head * plan->dt_bias_stride_h + i] : 0.0f);
    if (plan->gate == FKDA_GATE_SOFTPLUS)
        return -factor * (x > 0 ? x + log1pf(expf(-x)) : log1pf(expf(x)));
    return plan->lower_bound * sigmoid(factor * x);
}

static void normalise(float *x, int64_t count)
{
    float sum = 1e-6f;
    for (int64_t i = 0; i < count; i++)
        sum += x[i] * x[i];
    float factor = 1.0f / sqrtf(sum);
    for (int64_t i = 0; i < count; i++)
        x[i] *= factor;
}

static void load_row(const struct fkda_plan *plan, const struct fkda_sequence *seq, int64_t t,
                     int64_t head, struct row *row)
{
    int64_t key_head = head / plan->heads_per_key;
    int64_t q = at(&plan->q, seq, t, key_head), k = at(&plan->k, seq, t, key_head);
    int64_t g = at(&plan->g, seq, t, head);
    for (int64_t i = 0; i < plan->K; i++) {
        row->q[i] = load(plan->q.data, plan->q.dtype, q + i);
        row->k[i] = load(plan->k.data, plan->k.dtype, k + i);
        row->decay[i] = expf(gate(plan, head, i, load(plan->g.data, plan->g.dtype, g + i)));
    }
    if (plan->qk_l2norm) {
        normalise(row->q, plan->K);
        normalise(row->k, plan->K);
    }
    row->b = load(plan->beta.data, plan->beta.dtype, at(&plan->beta, seq, t, head));
    if (plan->beta_sigmoid)
        row->b = sigmoid(row->b);
    if (plan->allow_neg_eigval)
        row->b *= 2.0f;
}

static void step(const struct fkda_cpu_task *task, const struct fkda_sequence *seq, int64_t t,
                 int64_t head, const struct row *x)
{
    const struct fkda_plan *plan = task->plan;
    float *S = task->scratch;
    int64_t v = at(&plan->v, seq, t, head), out = at(&plan->out, seq, t, head);
    for (int64_t j = task->v_begin; j < task->v_begin + task->v_count; j++, S += plan->K) {
        float predicted = 0, o = 0;
        for (int64_t i = 0; i < plan->K; i++) {
            S[i] *= x->decay[i];
            predicted += S[i] * x->k[i];
        }
        float u = x->b * (load(plan->v.data, plan->v.dtype, v + j) - predicted);
        for (int64_t i = 0; i < plan->K; i++) {
            S[i] += u * x->k[i];
            o += S[i] * x->q[i];
        }
        store(plan->out.data, plan->out.dtype, out + j, plan->scale * o);
    }
}

static void load_state(const struct fkda_cpu_task *task, const struct fkda_state_view *view,
                       int64_t slot, int64_t head)
{
    float *S = task->scratch;
    int64_t K = task->plan->K;
    int64_t image = slot * view->stride_slot + head * view->stride_h + task->v_begin * K;
    for (int64_t i = 0; i < task->v_count * K; i++)
        S[i] = view->data ? load(view->data, view->dtype, image + i) : 0.0f;
}

static void store_state(const struct fkda_cpu_task *task, const struct fkda_state_view *view,
                        int64_t slot, int64_t head)
{
    const float *S = task->scratch;
    int64_t K = task->plan->K;
    int64_t image = slot * view->stride_slot + head * view->stride_h + task->v_begin * K;
    for (int64_t i = 0; i < task->v_count * K && view->data && slot >= 0; i++)
        store(view->data, view->dtype, image + i, S[i]);
}

static void zero_out(const struct fkda_cpu_task *task, const struct fkda_sequence *seq,
                     int64_t head)
{
    const struct fkda_view *out = &task->plan->out;
    for (int64_t t = 0; t < seq->length; t++)
        for (int64_t j = task->v_begin; j < task->v_begin + task->v_count; j++)
            store(out->data, out->dtype, at(out, seq, t, head) + j, 0.0f);
}

static void walk(const struct fkda_cpu_task *task, int64_t head, bool decode)
{
    const struct fkda_plan *plan = task->plan;
    struct fkda_sequence seq = fkda_plan_sequence(plan, task->n);
    if (seq.slot < 0) {
        zero_out(task, &seq, head);
        return;
    }
    bool every = decode && plan->num_accepted_tokens.data;
    int64_t m, last;
    fkda_plan_checkpoints(plan, task->n, &m, &last);
    load_state(task, decode ? &plan->final_state : &plan->initial_state, seq.slot, head);
    for (int64_t t = 0; t <= seq.length; t++) {
        for (; m < last && fkda_index_at(plan->checkpoint_offsets, m) <= t; m++)
            if (fkda_index_at(plan->checkpoint_offsets, m) == t)
                store_state(task, &plan->checkpoint_state, m, head);
        if (t == seq.length)
            break;
        struct row row;
        load_row(plan, &seq, t, head, &row);
        step(task, &seq, t, head, &row);
        if (every)
            store_state(task, &plan->final_state, fkda_plan_write_slot(plan, task->n, t), head);
    }
    if (!every)
        store_state(task, &plan->final_state, seq.slot, head);
}

static void portable_prefill(const struct fkda_cpu_task *task)
{
    for (int64_t i = 0; i < task->head_count; i++)
        walk(task, task->head_begin + i, false);
}

static void portable_decode(const struct fkda_cpu_task *task)
{
    for (int64_t i = 0; i < task->head_count; i++)
        walk(task, task->head_begin + i, true);
}

static size_t portable_scratch_bytes(const struct fkda_plan *plan)
{
    return (size_t)(plan->V * plan->K) * sizeof(float);
}

static bool portable_usable(void)
{
    return true;
}

extern const struct fkda_cpu_kernels fkda_cpu_kernels_portable;
const struct fkda_cpu_kernels fkda_cpu_kernels_portable = {
    .isa = FKDA_ISA_PORTABLE,
    .name = "portable",
    .usable = portable_usable,
    .prefill_fp32 = portable_prefill,
    .decode = portable_decode,
    .scratch_bytes = portable_scratch_bytes,
    .v_multiple = 1,
    .prefill_heads = 1,
};
