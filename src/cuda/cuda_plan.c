/* cuda_plan.c: what the CUDA kernels take, in their own terms; see cuda_plan.h. */
#include "cuda/cuda_plan.h"

#include <string.h>

#include "cuda/cuda_views.h"

#define LOG2E 1.4426950408889634

#define IMAGE_ALIGNMENT 128
#define MAX_TOKENS      (INT32_MAX - TILE_TOKENS) /* 32-bit counters in a sequence */
#define MAX_BLOCKS      INT32_MAX                 /* of a grid */
#define MAX_WARPS       8                         /* of a block: 16 value channels each */

/* |S| and |v| are scaled below 2^(this + 1), so that a chunk's growth still fits fp16: with b in
 * (0, 1) up to 12.6 times, with a doubled b more. */
#define TARGET_LOG2         11
#define TARGET_LOG2_DOUBLED 7

/* ---- What is taken --------------------------------------------------------------------------- */

static fkda_status check_float_dtypes(const struct fkda_plan *plan, struct fkda_reason reason)
{
    const struct {
        const char *name;
        fkda_dtype dtype;
    } views[] = {
        {"q", plan->q.dtype},
        {"k", plan->k.dtype},
        {"v", plan->v.dtype},
        {"out", plan->out.dtype},
    };
    for (size_t i = 0; i < sizeof views / sizeof views[0]; i++)
        if (views[i].dtype != FKDA_BF16)
            return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                             "%s: dtype %s, wanted bfloat16 on CUDA", views[i].name,
                             fkda_dtype_name(views[i].dtype));
    return FKDA_OK;
}

/* Offsets inside a tile are 32-bit where whole rows are loaded. */
static fkda_status check_token_strides(const struct fkda_plan *plan, struct fkda_reason reason)
{
    const struct {
        const char *name;
        const struct fkda_view *view;
    } views[] = {{"q", &plan->q}, {"k", &plan->k}, {"g", &plan->g}};
    for (size_t i = 0; i < sizeof views / sizeof views[0]; i++) {
        const struct fkda_view *view = views[i].view;
        int64_t limit = INT32_MAX / TILE_TOKENS / (int64_t)fkda_dtype_bytes(view->dtype);
        if (view->stride_t > limit)
            return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                             "%s: stride %lld of dimension 1, wanted at most %lld on CUDA",
                             views[i].name, (long long)view->stride_t, (long long)limit);
    }
    return FKDA_OK;
}

/* States move in pairs of elements. */
static fkda_status check_state_alignment(const struct fkda_plan *plan, struct fkda_reason reason)
{
    const struct {
        const char *name;
        const struct fkda_state_view *view;
    } states[] = {
        {"initial_state", &plan->initial_state},
        {"final_state", &plan->final_state},
        {"checkpoint_state", &plan->checkpoint_state},
    };
    for (size_t i = 0; i < sizeof states / sizeof states[0]; i++) {
        const struct fkda_state_view *view = states[i].view;
        const int pair_bytes = 2 * (int)fkda_dtype_bytes(view->dtype);
        if (!view->data)
            continue;
        if ((uintptr_t)view->data % (uintptr_t)pair_bytes)
            return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                             "%s: data at %p, wanted a multiple of %d bytes on CUDA",
                             states[i].name, view->data, pair_bytes);
        if (view->stride_slot % 2 || view->stride_h % 2)
            return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                             "%s: strides %lld, %lld of dimensions 0, 1, wanted even ones on CUDA",
                             states[i].name, (long long)view->stride_slot,
                             (long long)view->stride_h);
    }
    return FKDA_OK;
}

static fkda_status check_sizes(const struct fkda_plan *plan, struct fkda_reason reason)
{
    if (plan->K != TILE_K)
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED, "q: head size K = %lld, wanted %d on CUDA",
                         (long long)plan->K, TILE_K);
    if (plan->T > MAX_TOKENS)
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                         "q: T = %lld tokens, wanted at most %d on CUDA", (long long)plan->T,
                         MAX_TOKENS);
    int64_t most = MAX_BLOCKS / (plan->V / 16); /* with the most slices there are */
    if (plan->HV > most || plan->N > most / plan->HV)
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                         "%s: %lld sequences of %lld value heads, wanted a product of at most %lld "
                         "on CUDA",
                         plan->varlen ? "cu_seqlens" : "q", (long long)plan->N, (long long)plan->HV,
                         (long long)most);
    return FKDA_OK;
}

static fkda_status check_supported(const struct fkda_plan *plan, struct fkda_reason reason)
{
    fkda_status status = check_float_dtypes(plan, reason);
    if (status == FKDA_OK)
        status = check_sizes(plan, reason);
    if (status == FKDA_OK)
        status = check_token_strides(plan, reason);
    if (status == FKDA_OK)
        status = check_state_alignment(plan, reason);
    return status;
}

/* ---- Images ---------------------------------------------------------------------------------- */

static fkda_status size_images(const struct fkda_plan *plan, struct fkda_cuda_work *work,
                               struct fkda_reason reason)
{
    const int64_t per_sequence = (plan->T + TILE_TOKENS - 1) / TILE_TOKENS;
    int64_t tiles = 0, images = 0, bytes = 0;
    bool overflow = false;
    if (plan->T > 0 && plan->N > 0) {
        if (plan->varlen)
            tiles = plan->T / TILE_TOKENS + plan->N;
        else
            overflow = __builtin_mul_overflow(plan->B, per_sequence, &tiles);
    }
    overflow = overflow || __builtin_mul_overflow(tiles, plan->HV, &images);
    overflow = overflow || __builtin_mul_overflow(images, (int64_t)IMAGE_BYTES, &bytes);
    if (overflow || images > MAX_BLOCKS)
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                         "q: B = %lld, T = %lld with %lld value heads, wanted at most %d tiles of "
                         "%d tokens on CUDA",
                         (long long)plan->B, (long long)plan->T, (long long)plan->HV, MAX_BLOCKS,
                         TILE_TOKENS);
    work->tiles = tiles;
    work->workspace_bytes = bytes ? (size_t)bytes + IMAGE_ALIGNMENT - 1 : 0;
    return FKDA_OK;
}

void fkda_cuda_place_images(struct fkda_cuda_work *work, void *workspace)
{
    uintptr_t at = (uintptr_t)workspace;
    char *images = (char *)workspace + (IMAGE_ALIGNMENT - at % IMAGE_ALIGNMENT) % IMAGE_ALIGNMENT;
    work->prepare.images = images;
    work->recurrence.images = images;
}

/* Measured on 132 SMs with V = 128: four slices while every chain may have an SM of its own, above
 * that two. Another V takes the next number that leaves 1, 2, 4 or 8 warps a block. */
int fkda_cuda_choose_slices(int64_t V, int64_t chains, int num_sms)
{
    const int groups = (int)(V / 16);
    int slices = chains <= num_sms ? 4 : 2;
    for (; slices < groups; slices++) {
        const int warps = groups / slices;
        if (groups % slices == 0 && warps <= MAX_WARPS && (warps & (warps - 1)) == 0)
            return slices;
    }
    return groups; /* one warp each */
}

/* ---- Arguments ------------------------------------------------------------------------------- */

static struct fkda_prepare_args prepare_args_of(const struct fkda_plan *plan)
{
    return (struct fkda_prepare_args){
        .q = fkda_cuda_view_of(&plan->q),
        .k = fkda_cuda_view_of(&plan->k),
        .g = fkda_cuda_view_of(&plan->g),
        .beta = fkda_cuda_view_of(&plan->beta),
        .A_log = plan->A_log,
        .dt_bias = plan->dt_bias,
        .A_log_stride = plan->A_log_stride,
        .dt_bias_stride_h = plan->dt_bias_stride_h,
        .sequences = fkda_cuda_sequences_of(plan),
        .lower_bound_log2 = (float)(plan->lower_bound * LOG2E),
        .HV = (int32_t)plan->HV,
        .heads_per_key = (int32_t)plan->heads_per_key,
        .gate = plan->gate,
        .qk_l2norm = plan->qk_l2norm,
        .beta_sigmoid = plan->beta_sigmoid,
        .allow_neg_eigval = plan->allow_neg_eigval,
        .g_is_f32 = plan->g.dtype == FKDA_F32,
        .beta_is_f32 = plan->beta.dtype == FKDA_F32,
        .aligned_rows = fkda_cuda_rows_aligned(&plan->q, 16) &&
                        fkda_cuda_rows_aligned(&plan->k, 16) &&
                        (plan->g.dtype == FKDA_F32 || fkda_cuda_rows_aligned(&plan->g, 16)),
    };
}

static struct fkda_recurrence_args recurrence_args_of(const struct fkda_plan *plan)
{
    return (struct fkda_recurrence_args){
        .v = fkda_cuda_view_of(&plan->v),
        .out = fkda_cuda_view_of(&plan->out),
        .sequences = fkda_cuda_sequences_of(plan),
        .initial_state = fkda_cuda_states_of(&plan->initial_state),
        .final_state = fkda_cuda_states_of(&plan->final_state),
        .state_indices = fkda_cuda_index_of(&plan->state_indices),
        .num_slots = plan->num_slots,
        .checkpoint_state = fkda_cuda_states_of(&plan->checkpoint_state),
        .checkpoint_offsets = fkda_cuda_index_of(&plan->checkpoint_offsets),
        .checkpoint_indptr = fkda_cuda_index_of(&plan->checkpoint_indptr),
        .num_checkpoints = plan->num_checkpoints,
        .checkpoints_per_sequence = plan->checkpoints_per_sequence,
        .scale = plan->scale,
        .HV = (int32_t)plan->HV,
        .V = (int32_t)plan->V,
        /* b that comes as a factor may be as large as a doubled one */
        .target_log2 =
            plan->allow_neg_eigval || !plan->beta_sigmoid ? TARGET_LOG2_DOUBLED : TARGET_LOG2,
        .aligned_v = fkda_cuda_rows_aligned(&plan->v, 16),
        .wide_out = fkda_cuda_rows_aligned(&plan->out, 4),
    };
}

fkda_status fkda_cuda_plan_forward(const struct fkda_plan *plan, struct fkda_cuda_work *work,
                                   struct fkda_reason reason)
{
    memset(work, 0, sizeof *work);
    fkda_status status = check_supported(plan, reason);
    if (status == FKDA_OK)
        status = size_images(plan, work, reason);
    if (status != FKDA_OK)
        return status;
    work->prepare = prepare_args_of(plan);
    work->prepare.tiles = work->tiles;
    work->recurrence = recurrence_args_of(plan);
    return FKDA_OK;
}
