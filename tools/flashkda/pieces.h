/* pieces.h: one long call as several short ones, so that progress can be shown.
 *
 * Calls cut at multiples of 16 tokens with the fp32 state handed over give the same bits as one
 * call; that is a promise of the library which the program's tests hold it to.
 */
#ifndef FLASHKDA_PIECES_H
#define FLASHKDA_PIECES_H

#include "flash_kda.h"

typedef fkda_status fkda_call_function(const fkda_args *args, char *reason, size_t reason_bytes);

struct piece_options {
    int64_t tokens; /* rows of each call; a multiple of 16. 0: one call */
    void (*advance)(void *context, int64_t num_tokens); /* after each call; may be NULL */
    void *context;
};

/* Calls fkda_forward or fkda_reference on pieces of args. final_state must be present (fp32, or
 * float64 for the reference); checkpoints and state_indices must be absent. */
fkda_status fkda_call_in_pieces(fkda_call_function *call, const fkda_args *args,
                                const struct piece_options *options, char *reason,
                                size_t reason_bytes);

/* A call on the first tokens of the first sequence, so that the threads run and the kernel's code
 * is in memory when something is timed. The outputs of args stay as they are. */
void fkda_warm_up(const fkda_args *args);

/* Key head h of args and its value heads, as views: H becomes 1. */
fkda_args fkda_slice_head(const fkda_args *args, int64_t h);

#endif /* FLASHKDA_PIECES_H */
