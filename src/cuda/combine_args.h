/* combine_args.h: what the host and the combine kernel of a split forward share. Plain C.
 *
 * What a segment does to a state of row vectors is S <- S M + B. Images are [128, 128] fp32; which
 * segment has which is in segments.h.
 */
#ifndef FKDA_CUDA_COMBINE_ARGS_H
#define FKDA_CUDA_COMBINE_ARGS_H

#include "cuda/segments.h"
#include "cuda/tile_image.h"

enum { COMBINE_WARPS = 8, COMBINE_IMAGE_ITEMS = TILE_K * TILE_K };

struct fkda_combine_args {
    /* transition: M; of a first segment, and of a last one without final_state, not read. entry:
     * in, B, of a first segment the state behind it; out, the state that enters; of a first
     * segment nothing */
    struct fkda_segments segments;
    struct fkda_cuda_sequences sequences;
    struct fkda_cuda_states final_state;  /* written for sequences of two segments or more */
    struct fkda_cuda_index state_indices; /* [N]; absent: slot n for sequence n */
    int64_t num_slots;                    /* of the pool; sequences of others are left alone */
    int32_t HV;
    int32_t rows; /* value channels that one block carries: 8 or 16 */
};

#endif
