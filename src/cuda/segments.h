/* segments.h: where a split forward keeps what it knows of its segments. Plain C. */
#ifndef FKDA_CUDA_SEGMENTS_H
#define FKDA_CUDA_SEGMENTS_H

#include <stdint.h>

enum {
    SEGMENT_CHUNK_TOKENS = 32,
    MOST_BLOCK_ITEMS = 8 /* sequences that one block takes after another */
};

/* Sequences cut into segments of `chunks` chunks from their start, so that few heads fill the
 * device. Segment i of sequence n has slot base(n) + i, where base is n per_sequence, or for varlen
 * cu_seqlens[n] / (32 chunks) + n. Images are fp32 [slots][HV][V, 128]. Rows are 128 items for each
 * token and value head, [B][T][HV]; those of first segments are not used. */
struct fkda_segments {
    int32_t chunks;       /* 0: sequences are whole */
    int64_t per_sequence; /* dense: ceil(T / (32 chunks)) */
    int64_t slots;
    int64_t tokens;     /* of all sequences */
    float *entry;       /* where a segment takes a zero state; then the state that enters it. Of a
                           first segment: where it takes the initial state */
    float *transition;  /* where a segment takes the identity, in the order of transition.cuh */
    uint16_t *response; /* rows, fp16: out of the identity */
    uint16_t *rest;     /* rows, bf16: what is left of out, itself bf16, from a zero state */
};

#endif
