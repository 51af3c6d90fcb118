/* segments.h: where a split forward keeps what it knows of its segments. Plain C. */
#ifndef FKDA_CUDA_SEGMENTS_H
#define FKDA_CUDA_SEGMENTS_H

#include <stdint.h>

enum {
    SEGMENT_CHUNK_TOKENS = 32,
    MOST_BLOCK_ITEMS = 8 /* sequences that one block takes after another */
};

/* A sequence is cut into a first segment of `first` chunks and others of `chunks`, so that few
 * heads fill the device. Those others are walked twice, and meanwhile the first one can be longer:
 * lead = first / chunks times, rounded down. Numbers count pieces of `chunks` chunks: the first
 * segment of sequence n has the numbers base(n) .. base(n) + lead - 1, the others one each from
 * there on, where base is n per_sequence, or for varlen cu_seqlens[n] / (32 chunks) + n. Images are
 * there for `slots` numbers from lead - 1 on, so that base(n) is the slot of a first segment: those
 * of states, fp32 [slots][HV][V, 128], for each segment; those of outputs, [slots][HV][chunks], for
 * each chunk of the segments but the first:
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
    int32_t pairs;  /* two blocks for each segment or whole sequence (pairs_sm90.cu) */
    int32_t first, lead;
    int64_t per_sequence; /* dense: numbers of a sequence */
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
