/* combine_args.h: what the host and the combine kernel of a split forward share. Plain C.
 *
 * A sequence is cut from its start into segments of the same number of tokens, the last one
 * shorter, an empty sequence being one empty segment. What a segment does to a state of row vectors
 * is S <- S M + B. An image is a [128, 128] fp32 matrix; segment i of sequence n owns the images
 * [segment_base(n) + i][HV] of both arrays. Dense: segment_base(n) = n segments_per_sequence;
 * varlen: cu[n] / segment_tokens + n, which needs no scan and never collides (tile_map.cuh).
 */
#ifndef FKDA_CUDA_COMBINE_ARGS_H
#define FKDA_CUDA_COMBINE_ARGS_H

#include "cuda/tile_image.h"

enum { COMBINE_WARPS = 8, COMBINE_IMAGE_ITEMS = TILE_K * TILE_K };

struct fkda_combine_args {
    /* M [slots][HV] images, in the order of transition.cuh; of a first segment, and of a last one
     * without final_state, not read */
    const float *transition;
    /* [slots][HV][128][128]; in: B, of a first segment the state behind it; out: entry state, of a
     * first segment nothing */
    float *entry;
    struct fkda_cuda_sequences sequences;
    struct fkda_cuda_states final_state;   /* written for sequences of two segments or more */
    struct fkda_cuda_index state_indices;  /* [N]; absent: slot n for sequence n */
    int64_t num_slots;                     /* of the pool; sequences of others are left alone */
    int64_t segment_tokens;
    int64_t segments_per_sequence; /* dense: max(1, ceil(T / segment_tokens)) */
    int32_t HV;
    int32_t rows; /* value channels that one block carries: 8 or 16 */
};

#endif
