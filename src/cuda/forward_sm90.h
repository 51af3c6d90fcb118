/* forward_sm90.h: what the host and the fused Hopper kernel share. Plain C. */
#ifndef FKDA_CUDA_FORWARD_SM90_H
#define FKDA_CUDA_FORWARD_SM90_H

#include <cuda.h>

#include "cuda/segments.h"
#include "cuda/tile_image.h"

enum { FORWARD_SM90_THREADS = 512, FORWARD_SM90_SHARED_BYTES = 227 * 1024 };

/* Sequences cut into segments of `chunks` chunks from their start, so that few heads fill the
 * device. Segment i of sequence n has slot base(n) + i, where base is n per_sequence, or for varlen
 * cu_seqlens[n] / (32 chunks) + n. Images are fp32 [slots][HV][V, 128]. */
struct fkda_segments {
    int32_t chunks;       /* a multiple of 4; 0: sequences are whole */
    int64_t per_sequence; /* dense: ceil(T / (32 chunks)) */
    int64_t slots;
    float *entry;      /* what a segment adds to a zero state, then the state that enters it */
    float *transition; /* where a segment takes the identity */
};

struct fkda_forward_sm90_args {
    CUtensorMap q, k, v, g; /* [B, T, H, 128] bf16; boxes of 32 tokens and 64 channels */
    struct fkda_prepare_args prepare;
    struct fkda_recurrence_args recurrence;
    struct fkda_segments segments;
};

#endif
