/* decode_plan.c: what the decode kernels take, in their own terms; see decode_plan.h. */
#include "cuda/decode_plan.h"

#include "cuda/cuda_views.h"

/* Blocks of the slab kernels from which on the bytes in flight decide, not the latency: about four
 * for each multiprocessor of a large device. */
enum { FEWEST_SLABS = 512 };

/* ---- What is taken --------------------------------------------------------------------------- */

static int64_t slices_of(const struct fkda_plan *plan, int64_t rows)
{
    return (plan->V + rows - 1) / rows;
}

static fkda_status check_supported(const struct fkda_plan *plan, struct fkda_reason reason)
{
    const int64_t most = INT32_MAX / slices_of(plan, DECODE_ROWS); /* blocks of a grid */
    if (plan->K != TILE_K)
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED, "q: head size K = %lld, wanted %d on CUDA",
                         (long long)plan->K, TILE_K);
    if (plan->T > INT32_MAX)
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                         "q: T = %lld tokens, wanted at most %d on CUDA", (long long)plan->T,
                         INT32_MAX);
    if (plan->HV > most || plan->N > most / plan->HV)
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                         "%s: %lld sequences of %lld value heads, wanted a product of at most %lld "
                         "on CUDA",
                         plan->varlen ? "cu_seqlens" : "q", (long long)plan->N, (long long)plan->HV,
                         (long long)most);
    return FKDA_OK;
}

/* ---- Arguments ------------------------------------------------------------------------------- */

/* For x < 2^31 and 2^(l - 1) < d <= 2^l: with m = floor(2^(31 + l) / d) + 1 the product x m / 2^(31
 * + l) is above x / d by less than 1 / d, so that its floor is that of x / d. */
static struct fkda_divisor divisor_of(int64_t d)
{
    uint32_t l = 0;
    while ((int64_t)1 << l < d)
        l++;
    if (l == 0)
        return (struct fkda_divisor){0, 0};
    return (struct fkda_divisor){(uint32_t)(((uint64_t)1 << (31 + l)) / (uint64_t)d + 1), l - 1};
}

/* enum fkda_decode_access of rows of which a lane takes four channels. */
static int32_t access_of(const struct fkda_view *view)
{
    const bool is_f32 = view->dtype == FKDA_F32;
    const bool wide = fkda_cuda_rows_aligned(view, 4 * (int64_t)fkda_dtype_bytes(view->dtype));
    return wide ? (is_f32 ? DECODE_F32 : DECODE_BF16)
                : (is_f32 ? DECODE_F32_NARROW : DECODE_BF16_NARROW);
}

static int32_t access_of_bias(const struct fkda_plan *plan)
{
    const bool wide = (uintptr_t)plan->dt_bias % 16 == 0 && plan->dt_bias_stride_h % 4 == 0;
    return wide ? DECODE_F32 : DECODE_F32_NARROW;
}

static bool is_wide(const struct fkda_state_view *state)
{
    const int64_t item = (int64_t)fkda_dtype_bytes(state->dtype);
    return (uintptr_t)state->data % 16 == 0 && state->stride_slot * item % 16 == 0 &&
           state->stride_h * item % 16 == 0;
}

static bool is_plain(const struct fkda_plan *plan, const struct fkda_decode_args *args)
{
    const struct fkda_view *const views[] = {&plan->q, &plan->k,    &plan->v,
                                             &plan->g, &plan->beta, &plan->out};
    for (size_t i = 0; i < sizeof views / sizeof views[0]; i++)
        if (views[i]->dtype != FKDA_BF16 || views[i]->stride_b > INT32_MAX ||
            views[i]->stride_t > INT32_MAX || views[i]->stride_h > INT32_MAX)
            return false;
    return args->q_access == DECODE_BF16 && args->k_access == DECODE_BF16 &&
           args->g_access == DECODE_BF16 && args->dt_bias_access == DECODE_F32 && args->wide_state;
}

fkda_status fkda_cuda_plan_decode(const struct fkda_plan *plan, struct fkda_decode_args *args,
                                  struct fkda_reason reason)
{
    const fkda_status status = check_supported(plan, reason);
    if (status != FKDA_OK)
        return status;
    const int64_t columns = plan->state_indices_columns;
    *args = (struct fkda_decode_args){
        .q = fkda_cuda_view_of(&plan->q),
        .k = fkda_cuda_view_of(&plan->k),
        .v = fkda_cuda_view_of(&plan->v),
        .g = fkda_cuda_view_of(&plan->g),
        .beta = fkda_cuda_view_of(&plan->beta),
        .out = fkda_cuda_view_of(&plan->out),
        .A_log = plan->A_log,
        .dt_bias = plan->dt_bias,
        .A_log_stride = plan->A_log_stride,
        .dt_bias_stride_h = plan->dt_bias_stride_h,
        .sequences = fkda_cuda_sequences_of(plan),
        .state = fkda_cuda_states_of(&plan->final_state),
        .num_slots = plan->num_slots,
        .state_indices = fkda_cuda_index_of(&plan->state_indices),
        .state_indices_stride_t = plan->state_indices_stride_t,
        .state_indices_columns = (int32_t)(columns < INT32_MAX ? columns : INT32_MAX),
        .num_accepted_tokens = fkda_cuda_index_of(&plan->num_accepted_tokens),
        .scale = plan->scale,
        .lower_bound = plan->lower_bound,
        .HV = (int32_t)plan->HV,
        .V = (int32_t)plan->V,
        .gate = plan->gate,
        .qk_l2norm = plan->qk_l2norm,
        .beta_sigmoid = plan->beta_sigmoid,
        .allow_neg_eigval = plan->allow_neg_eigval,
        .by_HV = divisor_of(plan->HV),
        .by_heads_per_key = divisor_of(plan->heads_per_key),
        .q_access = access_of(&plan->q),
        .k_access = access_of(&plan->k),
        .g_access = access_of(&plan->g),
        .dt_bias_access = access_of_bias(plan),
        .v_is_f32 = plan->v.dtype == FKDA_F32,
        .beta_is_f32 = plan->beta.dtype == FKDA_F32,
        .out_is_f32 = plan->out.dtype == FKDA_F32,
        .wide_state = is_wide(&plan->final_state),
    };
    args->token_slots = (int32_t)(plan->T < DECODE_MOST_TOKENS ? plan->T : DECODE_MOST_TOKENS);
    if (args->num_accepted_tokens.data)
        args->columns_to_write = args->state_indices_columns;
    args->plain = is_plain(plan, args);
    const int64_t slabs =
        slices_of(plan, args->state.is_f32 ? DECODE_SLAB_ROWS_F32 : DECODE_SLAB_ROWS_BF16);
    args->slab = args->plain && plan->N * plan->HV * slabs >= FEWEST_SLABS;
    args->slices = (int32_t)(args->slab ? slabs : slices_of(plan, DECODE_ROWS));
    args->by_slices = divisor_of(args->slices);
    return FKDA_OK;
}
