/* cuda_views.h: parts of a plan in the kernels' own terms. */
#ifndef FKDA_CUDA_VIEWS_H
#define FKDA_CUDA_VIEWS_H

#include "core/plan.h"
#include "cuda/tile_image.h"

static inline struct fkda_cuda_view fkda_cuda_view_of(const struct fkda_view *view)
{
    return (struct fkda_cuda_view){view->data, view->stride_b, view->stride_t, view->stride_h};
}

static inline struct fkda_cuda_index fkda_cuda_index_of(const struct fkda_index_view *index)
{
    return (struct fkda_cuda_index){index->data, index->stride, index->dtype == FKDA_I64};
}

static inline struct fkda_cuda_states fkda_cuda_states_of(const struct fkda_state_view *view)
{
    return (struct fkda_cuda_states){view->data, view->stride_slot, view->stride_h,
                                     view->dtype == FKDA_F32};
}

static inline struct fkda_cuda_sequences fkda_cuda_sequences_of(const struct fkda_plan *plan)
{
    return (struct fkda_cuda_sequences){
        .cu_seqlens = fkda_cuda_index_of(&plan->cu_seqlens),
        .N = (int32_t)plan->N,
        .T = plan->T,
        .tiles_per_sequence = (plan->T + TILE_TOKENS - 1) / TILE_TOKENS,
    };
}

/* Does every row begin at a multiple of so many bytes? */
static inline bool fkda_cuda_rows_aligned(const struct fkda_view *view, int64_t bytes)
{
    const int64_t item = (int64_t)fkda_dtype_bytes(view->dtype);
    return (uintptr_t)view->data % (uintptr_t)bytes == 0 && view->stride_b * item % bytes == 0 &&
           view->stride_t * item % bytes == 0 && view->stride_h * item % bytes == 0;
}

#endif
