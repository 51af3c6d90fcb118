/* plan.h: what a call is, after validation. Backends trust every field.
 *
 * validate.c checks the caller's fkda_args and fills a struct fkda_plan; backends (src/cpu,
 * src/cuda) read only the plan. The index tensors of a CUDA call are in device memory: nothing
 * reads them here. Letters as in flash_kda.h.
 */
#ifndef FKDA_PLAN_H
#define FKDA_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "flash_kda.h"

/* A validated [N or 1, T, heads, channels] tensor. Element (b, t, h, c) is at
 * data + (b stride_b + t stride_t + h stride_h + c) elements. */
struct fkda_view {
    void *data;
    fkda_dtype dtype;
    int64_t stride_b, stride_t, stride_h;
};

/* A validated state tensor [slots, HV, V, K]; each [V, K] image contiguous. data NULL: absent. */
struct fkda_state_view {
    void *data;
    fkda_dtype dtype;
    int64_t stride_slot, stride_h;
};

/* An integer vector that may be int32 or int64. data NULL: absent. */
struct fkda_index_view {
    const void *data;
    fkda_dtype dtype;
    int64_t stride;
};

static inline int64_t fkda_index_at(struct fkda_index_view view, int64_t i)
{
    return view.dtype == FKDA_I32 ? ((const int32_t *)view.data)[i * view.stride]
                                  : ((const int64_t *)view.data)[i * view.stride];
}

struct fkda_plan {
    int64_t B, T, H, HV, K, V, N;
    int64_t heads_per_key;       /* HV / H: value head h reads q, k head h / heads_per_key */
    int64_t num_tokens;          /* tokens that belong to a sequence, summed over sequences;
                                    -1: only the device knows */
    int64_t max_sequence_tokens; /* fkda_workspace_bytes, CUDA: T, the most it can be */
    int64_t num_slots;           /* of the state pools; INT64_MAX without states */
    int64_t num_checkpoints;     /* M */
    bool varlen;                 /* cu_seqlens is present */
    fkda_device device;

    struct fkda_view q, k, v, g, out;
    struct fkda_view beta; /* no channels: stride_h steps from head to head */
    const float *A_log;    /* [HV], stride A_log_stride; NULL: factor 1 */
    int64_t A_log_stride;
    const float *dt_bias; /* element (h, k) at h dt_bias_stride_h + k; NULL: 0 */
    int64_t dt_bias_stride_h;
    struct fkda_state_view initial_state, final_state, checkpoint_state;
    struct fkda_index_view cu_seqlens, state_indices, checkpoint_offsets, checkpoint_indptr;
    int64_t checkpoints_per_sequence; /* M / N, where checkpoint_indptr is absent */

    /* fkda_decode: slot of (n, t) is state_indices[n stride + t state_indices_stride_t] when
     * num_accepted_tokens is present; final_state is the pool. */
    struct fkda_index_view num_accepted_tokens;
    int64_t state_indices_stride_t;
    int64_t state_indices_columns; /* T of [N, T]; 1 of [N] */

    fkda_gate gate;
    bool qk_l2norm, beta_sigmoid, allow_neg_eigval;
    float scale, lower_bound;

    /* validate.c leaves the caller's wish here (0: none); api.c resolves it. */
    fkda_isa isa;             /* resolved: never AUTO */
    fkda_precision precision; /* resolved: FP32 or BF16 */
    int num_threads;          /* resolved: >= 1 */
};

/* Where sequence n lies. Its token t is at batch row `batch`, token row `begin + t`. */
struct fkda_sequence {
    int64_t batch, begin, length;
    int64_t slot; /* of the state it starts from: n itself, or state_indices[n], or with
                     num_accepted_tokens state_indices[n, accepted - 1]; -1: padding */
};

/* Slot that the state after token t of sequence n is written to; -1: not written. Without
 * num_accepted_tokens it is the sequence's one slot, written after its last token. */
static inline int64_t fkda_plan_write_slot(const struct fkda_plan *plan, int64_t n, int64_t t)
{
    if (!plan->state_indices.data)
        return n;
    struct fkda_index_view row = plan->state_indices;
    int64_t offset = n * row.stride;
    if (plan->num_accepted_tokens.data)
        offset += t * plan->state_indices_stride_t;
    row.stride = 1;
    return fkda_index_at(row, offset);
}

static inline int64_t fkda_plan_read_slot(const struct fkda_plan *plan, int64_t n)
{
    int64_t accepted = 1;
    if (plan->num_accepted_tokens.data)
        accepted = fkda_index_at(plan->num_accepted_tokens, n);
    return accepted < 1 ? -1 : fkda_plan_write_slot(plan, n, accepted - 1);
}

static inline struct fkda_sequence fkda_plan_sequence(const struct fkda_plan *plan, int64_t n)
{
    struct fkda_sequence seq = {.batch = n, .begin = 0, .length = plan->T, .slot = n};
    if (plan->cu_seqlens.data) {
        seq.batch = 0;
        seq.begin = fkda_index_at(plan->cu_seqlens, n);
        seq.length = fkda_index_at(plan->cu_seqlens, n + 1) - seq.begin;
    }
    seq.slot = fkda_plan_read_slot(plan, n);
    return seq;
}

/* Checkpoints *first up to *last (exclusive) of checkpoint_offsets belong to sequence n. */
static inline void fkda_plan_checkpoints(const struct fkda_plan *plan, int64_t n, int64_t *first,
                                         int64_t *last)
{
    if (!plan->checkpoint_state.data) {
        *first = *last = 0;
    } else if (plan->checkpoint_indptr.data) {
        *first = fkda_index_at(plan->checkpoint_indptr, n);
        *last = fkda_index_at(plan->checkpoint_indptr, n + 1);
    } else {
        *first = n * plan->checkpoints_per_sequence;
        *last = *first + plan->checkpoints_per_sequence;
    }
}

/* The caller's buffer for the reason of an error; bytes may be 0. */
struct fkda_reason {
    char *text;
    size_t bytes;
};

/* Writes the reason and returns `status`, so that checks read `return fkda_fail(...)`. */
fkda_status fkda_fail(struct fkda_reason reason, fkda_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

enum fkda_call { FKDA_CALL_FORWARD, FKDA_CALL_DECODE, FKDA_CALL_REFERENCE, FKDA_CALL_WORKSPACE };

/* validate.c: checks every field of args for that call and fills the plan, or fails. */
fkda_status fkda_validate(const fkda_args *args, enum fkda_call call, struct fkda_plan *plan,
                          struct fkda_reason reason);

#endif /* FKDA_PLAN_H */
