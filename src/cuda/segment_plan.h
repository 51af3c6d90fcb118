/* segment_plan.h: how a forward with fewer chains than SMs is split along its sequences. Plain C
 * without the CUDA runtime.
 *
 *     segments  of every segment: its output and what becomes of its state, the first one of a
 *               sequence from the initial state, the others from zero; of these also their
 *               transition M, and the output of each row of the identity
 *     combine   the state that enters every segment, and the final state (combine_args.h)
 *     join      what that state adds to the output of every segment but the first
 *
 * A choice depends on the sizes of the call and on the device alone, never on device memory, so
 * that a call gives the same bits whatever its sequences hold.
 */
#ifndef FKDA_CUDA_SEGMENT_PLAN_H
#define FKDA_CUDA_SEGMENT_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "cuda/segments.h"

enum {
    LEAST_PIECE_CHUNKS = 8,
    MOST_ROUNDS = 2, /* pieces of all sequences and heads, for each SM */
    MOST_SMS = 144   /* of compute capability 9.0 */
};

/* Times of a block on an SM of its own, or of a pair of blocks on two, in microseconds. */
struct fkda_segment_costs {
    double chunk_us;   /* 32 tokens, by a block */
    double pair_us;    /* by a pair, of a whole sequence or a first segment */
    double later_us;   /* by a pair, of a later segment */
    double start_us;   /* until its first chunk */
    double item_us;    /* from the last chunk of a sequence to the first of the next */
    double combine_us; /* one segment in the combine step */
    double join_us;    /* 32 tokens of a head in the join step */
    double launch_us;  /* one more kernel */
    double worthwhile; /* split only below this share of the time of no split */
};

/* What an H200 takes. */
extern const struct fkda_segment_costs fkda_segment_costs_sm90;

/* How sequences are cut (segments.h). chunks 0: they are not. */
struct fkda_cut {
    int32_t chunks, first; /* of later segments; of first ones, at least as many */
};

/* T: tokens of all N sequences together, which are taken to be of the same length. */
struct fkda_cut fkda_cuda_choose_cut(int64_t T, int64_t N, int64_t HV, int num_sms,
                                     const struct fkda_segment_costs *costs);

/* Predicted time of a call. */
double fkda_cuda_predict_sm90_us(int64_t T, int64_t N, int64_t HV, int num_sms, struct fkda_cut cut,
                                 const struct fkda_segment_costs *costs);

/* Whether every chain finds two SMs. */
int fkda_cuda_has_pairs(int64_t chains, int num_sms);

/* How many sequences of so many tokens on average, of one head each, a block takes one after the
 * other, at most MOST_BLOCK_ITEMS: more than one where they are short and many, so that
 * the next is prepared while the state of the last one is stored. */
int fkda_cuda_choose_items(int64_t items, int64_t tokens, int num_sms,
                           const struct fkda_segment_costs *costs);

/* Predicted time of the two portable kernels, for comparison. */
double fkda_cuda_predict_sm80_us(int64_t T, int64_t N, int64_t HV, int num_sms);

/* Slots and layout for that cut; T: dense, tokens of a sequence; varlen, of all. */
struct fkda_segments fkda_cuda_plan_segments(int64_t T, int64_t N, int varlen, struct fkda_cut cut);

/* Bytes of all arrays, and where they begin in a workspace of at least so many (256-byte aligned
 * inside it). */
size_t fkda_cuda_segment_bytes(const struct fkda_segments *segments, int64_t HV);
void fkda_cuda_place_segments(struct fkda_segments *segments, int64_t HV, void *workspace);

/* What is enough for any cut that fkda_cuda_choose_cut may choose, also of fewer tokens and
 * sequences; T as for fkda_cuda_plan_segments. */
size_t fkda_cuda_most_segment_bytes(int64_t T, int64_t N, int64_t HV, int varlen);

/* Value channels that a block of the combine step carries: few where every block still finds an SM
 * of its own, although all read the whole of M. */
int fkda_cuda_choose_combine_rows(int64_t chains, int num_sms);

/* Blocks that share a segment of so many chunks in the join step, of so many segments and heads. */
int fkda_cuda_choose_join_shares(int64_t segments, int64_t chunks, int num_sms);

#endif
