/* segments.h: where a split forward keeps what it knows of its segments. Plain C. */
#ifndef FKDA_CUDA_SEGMENTS_H
#define FKDA_CUDA_SEGMENTS_H

#include <stdint.h>

enum {
    SEGMENT_CHUNK_TOKENS = 32,
    MOST_BLOCK_ITEMS = 8 /* sequences that one block takes after another */
};

/* Sequences cut into pieces of `chunks` chunks from their start, so that few heads fill the device.
 * The first `lead` pieces are one segment, the others one each: each of those is walked twice, and
 * meanwhile the first one can be longer. Piece i of sequence n has number base(n) + i, where base
 * is n per_sequence, or for varlen cu_seqlens[n] / (32 chunks) + n. Images are there for `slots`
 * pieces from number lead - 1 on: those of states, fp32 [slots][HV][V, 128], for the last piece of
 * a segment; those of outputs, [slots][HV][chunks], for each chunk of the segments but the first:
 *
 *     response  [32 tokens][128 rows of the identity] fp16, each 16 rows times a power of two that
 *               they share; the 16-byte pieces of a token permuted by token % 8, so that ldmatrix
 *               meets no bank twice
 *     exponent  of those eight powers, int32
 *     forced    fp32 without their last 8 bits, FORCED_BYTES: what the thread of the state
 *               warpgroups has in its accumulators, [3][256 threads]{ 16 bytes }: see pack_forced()
 */
struct fkda_segments {
    int32_t chunks; /* 0: sequences are whole */
    int32_t lead;
    int64_t per_sequence; /* dense: ceil(T / (32 chunks)) */
    int64_t slots;
    float *entry;      /* where a segment takes a zero state; then the state that enters it. Of a
                          first segment: where it takes the initial state */
    float *transition; /* where a segment takes the identity, in the order of transition.cuh */
    char *response;    /* out of the identity, without scale */
    char *forced;      /* out of a zero state */
    int32_t *exponent;
};

enum {
    RESPONSE_BYTES = 32 * 128 * 2,
    FORCED_BYTES = 32 * 128 * 3,
    EXPONENTS = 8 /* of a chunk */
};

#endif
