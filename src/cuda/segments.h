/* segments.h: where a split forward keeps what it knows of its segments. Plain C. */
#ifndef FKDA_CUDA_SEGMENTS_H
#define FKDA_CUDA_SEGMENTS_H

#include <stdint.h>

enum { MOST_BLOCK_ITEMS = 8 /* sequences or segments that one block takes after another */ };

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

#endif
