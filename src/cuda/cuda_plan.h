/* cuda_plan.h: a plan becomes the arguments of the CUDA kernels. Plain C without the CUDA runtime,
 * so that it is built, and tested, everywhere.
 *
 *     workspace  [ up to 127 bytes of alignment | images [tiles][HV], IMAGE_BYTES each ]
 *
 * tiles: varlen T / 16 + N, dense B ceil(T / 16); tile_map.cuh says which image is whose.
 */
#ifndef FKDA_CUDA_PLAN_H
#define FKDA_CUDA_PLAN_H

#include "core/plan.h"
#include "cuda/tile_image.h"

struct fkda_cuda_work {
    struct fkda_prepare_args prepare;
    struct fkda_recurrence_args recurrence;
    int64_t tiles;          /* images per value head; 0: nothing to prepare */
    size_t workspace_bytes; /* 0: none needed */
};

/* Fills everything but the workspace and the slices, or says which argument CUDA does not take. */
fkda_status fkda_cuda_plan_forward(const struct fkda_plan *plan, struct fkda_cuda_work *work,
                                   struct fkda_reason reason);

/* workspace: at least work->workspace_bytes, any alignment. */
void fkda_cuda_place_images(struct fkda_cuda_work *work, void *workspace);

/* How many blocks share a head's value channels on a card with so many SMs. */
int fkda_cuda_choose_slices(int64_t V, int64_t chains, int num_sms);

#endif
