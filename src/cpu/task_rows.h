/* task_rows.h: where the rows of a task lie in the caller's tensors. */
#ifndef FKDA_TASK_ROWS_H
#define FKDA_TASK_ROWS_H

#include <math.h>

#include "core/bf16.h"
#include "core/constants.h"
#include "cpu/cpu_backend.h"

/* Neighbouring heads that a task takes at most: their states stay in the second-level cache. */
static inline int64_t fkda_heads_per_task(const struct fkda_plan *plan, int64_t most)
{
    int64_t fit = (512 << 10) / (plan->K * plan->V * (int64_t)sizeof(float));
    int64_t heads = fit < 1 ? 1 : fit < most ? fit : most;
    return heads < plan->HV ? heads : plan->HV;
}

/* exp(A_log) of a head, kept finite after its product with log2 e: infinity times a channel without
 * decay, or times a token that is not there, would be a NaN. The bounded gate multiplies it by g
 * and by dt_bias and adds these: it is kept below where both could be infinite. It has long
 * saturated. */
static inline float fkda_gate_factor(const struct fkda_plan *plan, int64_t head)
{
    if (!plan->A_log)
        return 1.0f;
    float A_log = plan->A_log[head * plan->A_log_stride];
    float most = plan->gate == FKDA_GATE_BOUNDED ? 60.0f : 88.0f;
    return expf(A_log > most ? most : A_log);
}

static inline size_t fkda_element_bytes(fkda_dtype dtype)
{
    return dtype == FKDA_BF16 ? 2 : 4;
}

/* Element (token t of the sequence, head, channel) of an input or output. */
static inline void *fkda_row(const struct fkda_view *view, const struct fkda_sequence *seq,
                             int64_t t, int64_t head, int64_t channel)
{
    int64_t at = seq->batch * view->stride_b + (seq->begin + t) * view->stride_t +
                 head * view->stride_h + channel;
    return (char *)view->data + at * (int64_t)fkda_element_bytes(view->dtype);
}

/* Row v of a state image, NULL where the state is absent or the slot is padding. */
static inline void *fkda_state_row(const struct fkda_plan *plan, const struct fkda_state_view *view,
                                   int64_t slot, int64_t head, int64_t v)
{
    if (!view->data || slot < 0)
        return NULL;
    int64_t at = slot * view->stride_slot + head * view->stride_h + v * plan->K;
    return (char *)view->data + at * (int64_t)fkda_element_bytes(view->dtype);
}

static inline float fkda_load_element(const void *row, fkda_dtype dtype, int64_t i)
{
    return dtype == FKDA_BF16 ? fkda_bf16_to_float(((const uint16_t *)row)[i])
                              : ((const float *)row)[i];
}

static inline void fkda_store_element(void *row, fkda_dtype dtype, int64_t i, float value)
{
    if (dtype == FKDA_BF16)
        ((uint16_t *)row)[i] = fkda_bf16_from_float(value);
    else
        ((float *)row)[i] = value;
}

#endif /* FKDA_TASK_ROWS_H */
