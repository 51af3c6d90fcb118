/* validate.c: checks a call and turns it into a plan. See checks.h for the files of validation.
 *
 *     options -> each tensor by itself -> shapes against each other -> views -> contents -> overlap
 */
#include <float.h>
#include <math.h>
#include <string.h>

#include "core/checks.h"

#define FLAGS_KNOWN ((uint32_t)(FKDA_QK_L2NORM | FKDA_BETA_SIGMOID | FKDA_ALLOW_NEG_EIGVAL))

#define MIN_HEAD_SIZE 16
#define MAX_HEAD_SIZE 256

/* ---- Options --------------------------------------------------------------------------------- */

_Static_assert(FKDA_ISA_COUNT == 6, "check_enums says from 0 to 5");
static fkda_status check_enums(const fkda_args *args, struct fkda_reason reason)
{
    const struct {
        const char *name, *wanted;
        int32_t value, count;
    } fields[] = {
        {"gate", "0 (bounded), 1 (softplus) or 2 (activated)", args->gate, 3},
        {"device", "0 (CPU) or 1 (CUDA)", args->device, 2},
        {"isa", "a value of enum fkda_isa from 0 to 5", args->isa, FKDA_ISA_COUNT},
        {"precision", "0 (default), 1 (fp32) or 2 (bf16)", args->precision, 3},
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (fields[i].value < 0 || fields[i].value >= fields[i].count)
            return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT, "%s: %d, wanted %s",
                             fields[i].name, (int)fields[i].value, fields[i].wanted);
    return FKDA_OK;
}

static fkda_status check_numbers(const fkda_args *args, struct fkda_reason reason)
{
    if (args->num_threads < 0 || args->num_threads > FKDA_MAX_THREADS)
        return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "num_threads: %d, wanted from 0 (automatic) to %d", (int)args->num_threads,
                         FKDA_MAX_THREADS);
    /* Subnormal ones would count as 0 (cpu_backend.c). */
    if (!isfinite((float)args->scale) || fabsf((float)args->scale) < FLT_MIN)
        return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "scale: %g, wanted a finite float32 other than 0 (usually 1 / sqrt(K))",
                         args->scale);
    if (args->gate == FKDA_GATE_BOUNDED && !(args->lower_bound >= -5 && args->lower_bound <= 0))
        return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "lower_bound: %.17g, wanted from -5 to 0 (bounded gate)",
                         args->lower_bound);
    return FKDA_OK;
}

static fkda_status check_options(const fkda_args *args, struct fkda_reason reason)
{
    if (!args)
        return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT, "args: NULL, wanted a fkda_args");
    if (args->version != FKDA_ARGS_VERSION)
        return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "version: %u, wanted %u (fkda_args_init sets it)", args->version,
                         FKDA_ARGS_VERSION);
    if (args->flags & ~FLAGS_KNOWN)
        return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "flags: 0x%x, wanted no bit outside 0x%x", args->flags, FLAGS_KNOWN);
    fkda_status status = check_enums(args, reason);
    if (status == FKDA_OK)
        status = check_numbers(args, reason);
    return status;
}

/* Sizes and strides are checked before, since a wrong one is wrong on any device. */
static fkda_status check_device(const struct fkda_check *check)
{
    if (check->args->device == FKDA_CPU || check->call != FKDA_CALL_REFERENCE)
        return FKDA_OK;
    return fkda_fail(check->reason, FKDA_ERROR_UNSUPPORTED,
                     "device: cuda, fkda_reference has no CUDA kernels, wanted cpu");
}

/* ---- Shapes ---------------------------------------------------------------------------------- */

/* The tensor's shape against the one that follows from `whose` tensor; absent tensors pass. */
static fkda_status want_shape(const struct fkda_check *check, enum fkda_argument which, int ndim,
                              const int64_t *shape, const char *whose)
{
    const fkda_tensor *tensor = check->tensor[which];
    if (!tensor)
        return FKDA_OK;
    if (tensor->ndim == ndim && memcmp(tensor->shape, shape, (size_t)ndim * sizeof *shape) == 0)
        return FKDA_OK;
    return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT, "%s: shape %s, wanted %s (%s)",
                     fkda_argument_name(which), fkda_format_shape(tensor->ndim, tensor->shape).text,
                     fkda_format_shape(ndim, shape).text, whose);
}

static fkda_status check_head_size(const struct fkda_check *check, enum fkda_argument which,
                                   const char *letter)
{
    int64_t size = check->tensor[which]->shape[3];
    if (size >= MIN_HEAD_SIZE && size <= MAX_HEAD_SIZE && size % 16 == 0)
        return FKDA_OK;
    return fkda_fail(check->reason, FKDA_ERROR_UNSUPPORTED,
                     "%s: head size %s = %lld, wanted a multiple of 16 from %d to %d",
                     fkda_argument_name(which), letter, (long long)size, MIN_HEAD_SIZE,
                     MAX_HEAD_SIZE);
}

static fkda_status check_heads(const struct fkda_check *check, const struct fkda_plan *plan)
{
    if (plan->H < 1)
        return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "q: H = %lld heads, wanted at least 1", (long long)plan->H);
    if (plan->HV < 1 || plan->HV % plan->H)
        return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "v: HV = %lld heads, wanted a multiple of %lld (q's)", (long long)plan->HV,
                         (long long)plan->H);
    fkda_status status = check_head_size(check, FKDA_ARG_Q, "K");
    return status == FKDA_OK ? check_head_size(check, FKDA_ARG_V, "V") : status;
}

static fkda_status check_inputs(const struct fkda_check *check, const struct fkda_plan *plan)
{
    const int64_t key[] = {plan->B, plan->T, plan->H, plan->K};
    const int64_t value[] = {plan->B, plan->T, plan->HV, plan->V};
    const int64_t gate[] = {plan->B, plan->T, plan->HV, plan->K};
    const int64_t bias_flat[] = {plan->HV * plan->K};
    const fkda_tensor *bias = check->tensor[FKDA_ARG_DT_BIAS];
    int bias_ndim = bias && bias->ndim == 1 ? 1 : 2;

    fkda_status status = want_shape(check, FKDA_ARG_K, 4, key, "q's");
    if (status == FKDA_OK)
        status = want_shape(check, FKDA_ARG_V, 4, value, "B, T of q");
    if (status == FKDA_OK)
        status = check_heads(check, plan);
    if (status == FKDA_OK)
        status = want_shape(check, FKDA_ARG_G, 4, gate, "B, T, K of q, HV of v");
    if (status == FKDA_OK)
        status = want_shape(check, FKDA_ARG_BETA, 3, gate, "B, T of q, HV of v");
    if (status == FKDA_OK)
        status = want_shape(check, FKDA_ARG_A_LOG, 1, gate + 2, "HV of v");
    if (status == FKDA_OK)
        status = want_shape(check, FKDA_ARG_DT_BIAS, bias_ndim,
                            bias_ndim == 1 ? bias_flat : gate + 2, "HV of v, K of q");
    if (status == FKDA_OK)
        status = want_shape(check, FKDA_ARG_OUT, 4, value, "v's");
    if (status != FKDA_OK || plan->gate != FKDA_GATE_ACTIVATED)
        return status;
    for (int i = FKDA_ARG_A_LOG; i <= FKDA_ARG_DT_BIAS; i++)
        if (check->tensor[i])
            return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "%s: present, wanted absent (the gate is activated already)",
                             fkda_argument_name((enum fkda_argument)i));
    return FKDA_OK;
}

/* N, and the tensors that have one entry for each sequence or slot. */
static fkda_status check_states(const struct fkda_check *check, struct fkda_plan *plan)
{
    const fkda_tensor *cu = check->tensor[FKDA_ARG_CU_SEQLENS];
    const fkda_tensor *indices = check->tensor[FKDA_ARG_STATE_INDICES];
    const fkda_tensor *state = check->tensor[FKDA_ARG_FINAL_STATE];
    plan->N = cu ? cu->shape[0] - 1 : plan->B;
    plan->varlen = cu;
    if (cu && plan->B != 1)
        return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "cu_seqlens: present with B = %lld, wanted B = 1", (long long)plan->B);
    if (plan->N < 0)
        return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "cu_seqlens: shape [0], wanted [N + 1]");
    /* Sequences without tokens cost no memory, but work: its amount is computed. */
    int64_t product;
    if (__builtin_mul_overflow(plan->N, plan->HV * plan->V, &product) ||
        __builtin_mul_overflow(plan->N, plan->T, &product))
        return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "cu_seqlens: N = %lld, wanted N HV V and N T to fit 64 bits",
                         (long long)plan->N);

    int64_t columns = indices && indices->ndim == 2 ? indices->shape[1] : 1;
    const int64_t rows[] = {plan->N, columns};
    fkda_status status = want_shape(check, FKDA_ARG_STATE_INDICES, indices ? indices->ndim : 1,
                                    rows, cu ? "N of cu_seqlens" : "B of q");
    if (status != FKDA_OK)
        return status;

    if (!state)
        state = check->tensor[FKDA_ARG_INITIAL_STATE];
    const int64_t image[] = {indices && state ? state->shape[0] : plan->N, plan->HV, plan->V,
                             plan->K};
    const char *whose = indices ? "slots, HV, V of v, K of q" : "N, HV, V of v, K of q";
    plan->num_slots = state ? image[0] : INT64_MAX;
    status = want_shape(check, FKDA_ARG_INITIAL_STATE, 4, image, whose);
    if (status == FKDA_OK)
        status = want_shape(check, FKDA_ARG_FINAL_STATE, 4, image, whose);
    return status;
}

static fkda_status check_checkpoint_shapes(const struct fkda_check *check, struct fkda_plan *plan)
{
    const fkda_tensor *state = check->tensor[FKDA_ARG_CHECKPOINT_STATE];
    const fkda_tensor *indptr = check->tensor[FKDA_ARG_CHECKPOINT_INDPTR];
    const fkda_tensor *offsets = check->tensor[FKDA_ARG_CHECKPOINT_OFFSETS];
    if (!state && !indptr && !offsets)
        return FKDA_OK;
    if (!state || !offsets)
        return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "%s: absent, wanted with the other checkpoint tensors",
                         state ? "checkpoint_offsets" : "checkpoint_state");
    const int64_t image[] = {state->shape[0], plan->HV, plan->V, plan->K};
    const int64_t entries[] = {plan->N + 1};
    fkda_status status =
        want_shape(check, FKDA_ARG_CHECKPOINT_STATE, 4, image, "M, HV, V of v, K of q");
    if (status == FKDA_OK)
        status = want_shape(check, FKDA_ARG_CHECKPOINT_OFFSETS, 1, image, "M of checkpoint_state");
    if (status == FKDA_OK)
        status = want_shape(check, FKDA_ARG_CHECKPOINT_INDPTR, 1, entries, "N + 1");
    plan->num_checkpoints = image[0];
    if (status != FKDA_OK || indptr)
        return status;
    if (plan->N == 0 ? image[0] != 0 : image[0] % plan->N != 0)
        return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "checkpoint_state: M = %lld, wanted a multiple of N = %lld (or "
                         "checkpoint_indptr)",
                         (long long)image[0], (long long)plan->N);
    plan->checkpoints_per_sequence = plan->N ? image[0] / plan->N : 0;
    return FKDA_OK;
}

/* What only one of the calls takes. */
static fkda_status check_call(const struct fkda_check *check, const struct fkda_plan *plan)
{
    static const enum fkda_argument not_in_decode[] = {
        FKDA_ARG_INITIAL_STATE, FKDA_ARG_CHECKPOINT_STATE, FKDA_ARG_CHECKPOINT_OFFSETS,
        FKDA_ARG_CHECKPOINT_INDPTR};
    const fkda_tensor *indices = check->tensor[FKDA_ARG_STATE_INDICES];
    const fkda_tensor *accepted = check->tensor[FKDA_ARG_NUM_ACCEPTED_TOKENS];
    struct fkda_reason reason = check->reason;
    if (check->call != FKDA_CALL_DECODE) {
        if (accepted)
            return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "num_accepted_tokens: present, wanted absent (fkda_decode only)");
        if (indices && indices->ndim != 1)
            return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "state_indices: 2 dimensions, wanted 1: [N]");
        return FKDA_OK;
    }
    for (size_t i = 0; i < sizeof not_in_decode / sizeof not_in_decode[0]; i++)
        if (check->tensor[not_in_decode[i]])
            return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "%s: present, wanted absent (fkda_decode updates final_state)",
                             fkda_argument_name(not_in_decode[i]));
    if (!check->tensor[FKDA_ARG_FINAL_STATE])
        return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "final_state: absent, wanted the state that fkda_decode updates");
    if (!check->tensor[FKDA_ARG_CU_SEQLENS] && (plan->T < 1 || plan->T > FKDA_MAX_DECODE_TOKENS))
        return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "q: T = %lld tokens, wanted from 1 to %d in fkda_decode",
                         (long long)plan->T, FKDA_MAX_DECODE_TOKENS);
    if (!accepted && indices && indices->ndim == 2)
        return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "state_indices: 2 dimensions, wanted 1 without num_accepted_tokens");
    if (accepted && !(indices && indices->ndim == 2))
        return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "num_accepted_tokens: present, wanted together with state_indices [N, T]");
    const int64_t rows[] = {plan->N};
    return want_shape(check, FKDA_ARG_NUM_ACCEPTED_TOKENS, 1, rows, "N");
}

/* ---- Plan ------------------------------------------------------------------------------------ */

/* A dimension that is never stepped along may carry any stride; the plan's is 0. */
static int64_t step(const fkda_tensor *tensor, int dimension)
{
    return tensor->shape[dimension] > 1 ? tensor->stride[dimension] : 0;
}

static void *data_of(const struct fkda_check *check, const fkda_tensor *tensor)
{
    return tensor && check->call != FKDA_CALL_WORKSPACE ? tensor->data : NULL;
}

static struct fkda_view view(const struct fkda_check *check, enum fkda_argument which)
{
    const fkda_tensor *tensor = check->tensor[which];
    return (struct fkda_view){.data = data_of(check, tensor),
                              .dtype = (fkda_dtype)tensor->dtype,
                              .stride_b = step(tensor, 0),
                              .stride_t = step(tensor, 1),
                              .stride_h = step(tensor, 2)};
}

static struct fkda_state_view state_view(const struct fkda_check *check, enum fkda_argument which)
{
    const fkda_tensor *tensor = check->tensor[which];
    if (!tensor)
        return (struct fkda_state_view){.data = NULL};
    return (struct fkda_state_view){.data = data_of(check, tensor),
                                    .dtype = (fkda_dtype)tensor->dtype,
                                    .stride_slot = step(tensor, 0),
                                    .stride_h = step(tensor, 1)};
}

static struct fkda_index_view index_view(const struct fkda_check *check, enum fkda_argument which)
{
    const fkda_tensor *tensor = check->tensor[which];
    if (!tensor)
        return (struct fkda_index_view){.data = NULL};
    return (struct fkda_index_view){.data = data_of(check, tensor),
                                    .dtype = (fkda_dtype)tensor->dtype,
                                    .stride = step(tensor, 0)};
}

static void fill_options(const fkda_args *args, struct fkda_plan *plan)
{
    plan->gate = (fkda_gate)args->gate;
    plan->device = (fkda_device)args->device;
    plan->qk_l2norm = args->flags & FKDA_QK_L2NORM;
    plan->beta_sigmoid = args->flags & FKDA_BETA_SIGMOID;
    plan->allow_neg_eigval = args->flags & FKDA_ALLOW_NEG_EIGVAL;
    plan->scale = (float)args->scale;
    plan->lower_bound = args->gate == FKDA_GATE_BOUNDED ? (float)args->lower_bound : 0.0f;
    plan->isa = (fkda_isa)args->isa;
    plan->precision = (fkda_precision)args->precision;
    plan->num_threads = args->num_threads;
}

static void fill_views(const struct fkda_check *check, struct fkda_plan *plan)
{
    plan->q = view(check, FKDA_ARG_Q);
    plan->k = view(check, FKDA_ARG_K);
    plan->v = view(check, FKDA_ARG_V);
    plan->g = view(check, FKDA_ARG_G);
    plan->beta = view(check, FKDA_ARG_BETA);
    plan->out = view(check, FKDA_ARG_OUT);
    const fkda_tensor *A_log = check->tensor[FKDA_ARG_A_LOG];
    plan->A_log = data_of(check, A_log);
    plan->A_log_stride = A_log ? step(A_log, 0) : 0;
    const fkda_tensor *bias = check->tensor[FKDA_ARG_DT_BIAS];
    plan->dt_bias = data_of(check, bias);
    if (bias)
        plan->dt_bias_stride_h = bias->ndim == 1 ? plan->K : step(bias, 0);

    plan->initial_state = state_view(check, FKDA_ARG_INITIAL_STATE);
    plan->final_state = state_view(check, FKDA_ARG_FINAL_STATE);
    plan->checkpoint_state = state_view(check, FKDA_ARG_CHECKPOINT_STATE);
    plan->cu_seqlens = index_view(check, FKDA_ARG_CU_SEQLENS);
    plan->state_indices = index_view(check, FKDA_ARG_STATE_INDICES);
    plan->checkpoint_offsets = index_view(check, FKDA_ARG_CHECKPOINT_OFFSETS);
    plan->checkpoint_indptr = index_view(check, FKDA_ARG_CHECKPOINT_INDPTR);
    plan->num_accepted_tokens = index_view(check, FKDA_ARG_NUM_ACCEPTED_TOKENS);
    const fkda_tensor *indices = check->tensor[FKDA_ARG_STATE_INDICES];
    plan->state_indices_stride_t = indices && indices->ndim == 2 ? step(indices, 1) : 0;
    plan->state_indices_columns = indices && indices->ndim == 2 ? indices->shape[1] : 1;
}

static fkda_status check_shapes(const struct fkda_check *check, struct fkda_plan *plan)
{
    const fkda_tensor *q = check->tensor[FKDA_ARG_Q], *v = check->tensor[FKDA_ARG_V];
    plan->B = q->shape[0];
    plan->T = q->shape[1];
    plan->H = q->shape[2];
    plan->K = q->shape[3];
    plan->HV = v->shape[2];
    plan->V = v->shape[3];
    fkda_status status = check_inputs(check, plan);
    if (status == FKDA_OK)
        status = check_states(check, plan);
    if (status == FKDA_OK)
        status = check_checkpoint_shapes(check, plan);
    if (status == FKDA_OK)
        status = check_call(check, plan);
    plan->heads_per_key = status == FKDA_OK ? plan->HV / plan->H : 0;
    return status;
}

fkda_status fkda_validate(const fkda_args *args, enum fkda_call call, struct fkda_plan *plan,
                          struct fkda_reason reason)
{
    struct fkda_check check = {.args = args, .call = call, .reason = reason};
    memset(plan, 0, sizeof *plan);
    fkda_status status = check_options(args, reason);
    if (status == FKDA_OK)
        status = fkda_check_tensors(&check);
    if (status != FKDA_OK)
        return status;
    fill_options(args, plan);
    status = check_shapes(&check, plan);
    if (status == FKDA_OK)
        status = check_device(&check);
    if (status != FKDA_OK)
        return status;
    fill_views(&check, plan);
    status = fkda_check_sequences(&check, plan);
    if (status == FKDA_OK)
        status = fkda_check_overlap(&check);
    /* No token to read, no state to write: nothing to do, for however many sequences. */
    if (call != FKDA_CALL_WORKSPACE && plan->device == FKDA_CPU && plan->num_tokens == 0 &&
        !plan->final_state.data && !plan->checkpoint_state.data)
        plan->N = 0;
    return status;
}
