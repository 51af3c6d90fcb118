/* reference.c: the operator as flash_kda.h states it, in float64, one token after the other.
 *
 *     S <- S diag(exp g);   u = b (v - S k^);   S <- S + u k^T;   out = scale S q^
 *
 * Nothing here is fast; everything else is measured against it. Edge cases it defines: a sequence
 * of length 0 ends in its initial state (or 0); the tokens of a padding sequence (slot -1) get out
 * = 0, and neither its states nor its checkpoints are written; rows of no sequence stay untouched.
 */
#include "ref/reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/bf16.h"
#include "core/constants.h"

static double load(const void *data, fkda_dtype dtype, int64_t i)
{
    switch (dtype) {
    case FKDA_BF16:
        return (double)fkda_bf16_to_float(((const uint16_t *)data)[i]);
    case FKDA_F32:
        return (double)((const float *)data)[i];
    default:
        return ((const double *)data)[i];
    }
}

/* Rounds once, to the dtype of the tensor. */
static void store(void *data, fkda_dtype dtype, int64_t i, double value)
{
    switch (dtype) {
    case FKDA_BF16:
        ((uint16_t *)data)[i] = fkda_bf16_from_double(value);
        break;
    case FKDA_F32:
        ((float *)data)[i] = (float)value;
        break;
    default:
        ((double *)data)[i] = value;
        break;
    }
}

static double sigmoid(double x)
{
    return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x));
}

static double softplus(double x)
{
    return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
}

/* One token of one value head. */
struct token {
    double q[256], k[256], decay[256]; /* [K]: normalised where asked for; exp of the gate */
    double b;
};

static int64_t at(const struct fkda_view *view, const struct fkda_sequence *seq, int64_t t,
                  int64_t head)
{
    return seq->batch * view->stride_b + (seq->begin + t) * view->stride_t + head * view->stride_h;
}

/* Natural logarithm of the decay of channel i of a value head. */
static double gate(const struct fkda_plan *plan, int64_t head, int64_t i, double g_raw)
{
    if (plan->gate == FKDA_GATE_ACTIVATED)
        return g_raw;
    double factor = plan->A_log ? exp((double)plan->A_log[head * plan->A_log_stride]) : 1;
    double x = g_raw;
    if (plan->dt_bias)
        x += (double)plan->dt_bias[head * plan->dt_bias_stride_h + i];
    if (plan->gate == FKDA_GATE_SOFTPLUS)
        return -factor * softplus(x);
    return (double)plan->lower_bound * sigmoid(factor * x);
}

static void normalise(double *x, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += x[i] * x[i];
    double norm = sqrt(sum + FKDA_NORM_EPSILON);
    for (int64_t i = 0; i < count; i++)
        x[i] /= norm;
}

static void load_token(const struct fkda_plan *plan, const struct fkda_sequence *seq, int64_t t,
                       int64_t head, struct token *token)
{
    int64_t key_head = head / plan->heads_per_key;
    int64_t q = at(&plan->q, seq, t, key_head), k = at(&plan->k, seq, t, key_head);
    int64_t g = at(&plan->g, seq, t, head);
    for (int64_t i = 0; i < plan->K; i++) {
        token->q[i] = load(plan->q.data, plan->q.dtype, q + i);
        token->k[i] = load(plan->k.data, plan->k.dtype, k + i);
        token->decay[i] = exp(gate(plan, head, i, load(plan->g.data, plan->g.dtype, g + i)));
    }
    if (plan->qk_l2norm) {
        normalise(token->q, plan->K);
        normalise(token->k, plan->K);
    }
    token->b = load(plan->beta.data, plan->beta.dtype, at(&plan->beta, seq, t, head));
    if (plan->beta_sigmoid)
        token->b = sigmoid(token->b);
    if (plan->allow_neg_eigval)
        token->b *= 2;
}

/* The recurrence of one token: updates S [V, K], writes the token's row of out. */
static void step(const struct fkda_plan *plan, const struct token *token, double *S,
                 const struct fkda_sequence *seq, int64_t t, int64_t head)
{
    int64_t v = at(&plan->v, seq, t, head), out = at(&plan->out, seq, t, head);
    for (int64_t j = 0; j < plan->V; j++) {
        double *row = S + j * plan->K;
        double predicted = 0, o = 0;
        for (int64_t i = 0; i < plan->K; i++) {
            row[i] *= token->decay[i];
            predicted += row[i] * token->k[i];
        }
        double u = token->b * (load(plan->v.data, plan->v.dtype, v + j) - predicted);
        for (int64_t i = 0; i < plan->K; i++) {
            row[i] += u * token->k[i];
            o += row[i] * token->q[i];
        }
        store(plan->out.data, plan->out.dtype, out + j, (double)plan->scale * o);
    }
}

static void load_state(const struct fkda_plan *plan, const struct fkda_state_view *view,
                       int64_t slot, int64_t head, double *S)
{
    int64_t image = slot * view->stride_slot + head * view->stride_h;
    for (int64_t i = 0; i < plan->V * plan->K; i++)
        S[i] = view->data ? load(view->data, view->dtype, image + i) : 0;
}

static void store_state(const struct fkda_plan *plan, const struct fkda_state_view *view,
                        int64_t slot, int64_t head, const double *S)
{
    int64_t image = slot * view->stride_slot + head * view->stride_h;
    for (int64_t i = 0; i < plan->V * plan->K && view->data; i++)
        store(view->data, view->dtype, image + i, S[i]);
}

static void zero_out(const struct fkda_plan *plan, const struct fkda_sequence *seq, int64_t head)
{
    for (int64_t t = 0; t < seq->length; t++)
        for (int64_t j = 0; j < plan->V; j++)
            store(plan->out.data, plan->out.dtype, at(&plan->out, seq, t, head) + j, 0);
}

/* One sequence and value head; checkpoint m holds the state before token checkpoint_offsets[m]. */
static void walk(const struct fkda_plan *plan, int64_t n, int64_t head, double *S)
{
    struct fkda_sequence seq = fkda_plan_sequence(plan, n);
    if (seq.slot < 0) {
        zero_out(plan, &seq, head);
        return;
    }
    int64_t first, last;
    fkda_plan_checkpoints(plan, n, &first, &last);
    load_state(plan, &plan->initial_state, seq.slot, head, S);
    for (int64_t t = 0; t <= seq.length; t++) {
        for (int64_t m = first; m < last; m++)
            if (fkda_index_at(plan->checkpoint_offsets, m) == t)
                store_state(plan, &plan->checkpoint_state, m, head, S);
        if (t == seq.length)
            break;
        struct token token;
        load_token(plan, &seq, t, head, &token);
        step(plan, &token, S, &seq, t, head);
    }
    store_state(plan, &plan->final_state, seq.slot, head, S);
}

fkda_status fkda_reference_forward(const struct fkda_plan *plan, struct fkda_reason reason)
{
    size_t bytes = (size_t)(plan->V * plan->K) * sizeof(double);
    double *S = malloc(bytes);
    if (!S)
        return fkda_fail(reason, FKDA_ERROR_OUT_OF_MEMORY, "no memory for a state of %zu bytes",
                         bytes);
    for (int64_t n = 0; n < plan->N; n++)
        for (int64_t head = 0; head < plan->HV; head++)
            walk(plan, n, head, S);
    free(S);
    return FKDA_OK;
}
