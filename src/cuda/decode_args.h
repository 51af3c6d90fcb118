/* decode_args.h: what the decode kernels take. Plain C: the host includes it too. */
#ifndef FKDA_DECODE_ARGS_H
#define FKDA_DECODE_ARGS_H

#include "cuda/tile_image.h"

/* Launch shape, which the host and the kernels must agree on. */
enum {
    DECODE_WARPS = 4,               /* of a block, and tokens that it prepares at a time */
    DECODE_ROWS = 8 * DECODE_WARPS, /* value channels of a block */
    DECODE_SLAB_BYTES = 32768,      /* of a state, where it passes through shared memory: */
    DECODE_SLAB_ROWS_F32 = 64,      /* so many value channels of a block */
    DECODE_SLAB_ROWS_BF16 = 128,
    DECODE_TOKEN_BYTES = 5 * 128 * 4 + 16, /* of a prepared token there, without its values */
    DECODE_MOST_TOKENS = 16
};

/* How four neighbouring channels are loaded: at once where every row is aligned for that, else
 * element by element. Bit 0: float32. */
enum fkda_decode_access {
    DECODE_BF16 = 0,
    DECODE_F32 = 1,
    DECODE_BF16_NARROW = 2,
    DECODE_F32_NARROW = 3
};

/* x / d for 0 <= x < 2^31 as (x multiplier) >> (32 + shift); multiplier 0: d is 1. */
struct fkda_divisor {
    uint32_t multiplier, shift;
};

struct fkda_decode_args {
    struct fkda_cuda_view q, k; /* [B, T, H, 128] */
    struct fkda_cuda_view v;    /* [B, T, HV, V] */
    struct fkda_cuda_view g;    /* [B, T, HV, 128] */
    struct fkda_cuda_view beta; /* [B, T, HV] */
    struct fkda_cuda_view out;  /* [B, T, HV, V], written */
    const float *A_log;         /* [HV] or NULL */
    const float *dt_bias;       /* [HV, 128] or NULL */
    int64_t A_log_stride, dt_bias_stride_h;
    struct fkda_cuda_sequences sequences;

    struct fkda_cuda_states state;        /* [slots, HV, V, 128], read and written */
    int64_t num_slots;                    /* others are padding */
    struct fkda_cuda_index state_indices; /* [N], or [N, columns] with num_accepted_tokens */
    int64_t state_indices_stride_t;
    struct fkda_cuda_index num_accepted_tokens; /* [N] or absent */
    int32_t state_indices_columns;
    int32_t columns_to_write; /* with num_accepted_tokens the same; else 0: after the last token */

    int32_t slab;        /* through shared memory: enough heads, a plain call */
    int32_t token_slots; /* of shared memory then: no sequence has more tokens */

    float scale, lower_bound;
    int32_t HV, V, slices; /* slices: blocks that share a head's value channels */
    int32_t gate;          /* enum fkda_gate */
    int32_t qk_l2norm, beta_sigmoid, allow_neg_eigval;
    struct fkda_divisor by_slices, by_HV, by_heads_per_key;

    /* Every input and out bfloat16, four channels of q, k, g, dt_bias and the state in one access,
     * element strides below 2^31: kernels of their own. The fields below are for the others. */
    int32_t plain;
    int32_t q_access, k_access, g_access, dt_bias_access; /* enum fkda_decode_access */
    int32_t v_is_f32, beta_is_f32, out_is_f32;
    int32_t wide_state;
};

#endif
