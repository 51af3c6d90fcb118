/* tile_image.h: what the prepare kernel leaves for the recurrence, one image per 16-token tile and
 * value head, and the arguments of both kernels. Plain C: the host includes it too.
 *
 * An image holds the tile's operands in the order in which one warp's lanes load them as mma
 * fragments (mma.cuh: g = lane / 4, t = lane % 4), so that a 16-byte load per lane brings four
 * registers and no bank is hit twice. Type and bytes at the right:
 *
 *     W  -T b Kd  8 steps of 16 channels: [step][lane]{ n0.b0, n0.b1, n1.b0, n1.b1 }    fp16 4096
 *     Q   Qd      the same order                                                        fp16 4096
 *     K   Kr      16 groups of 8 channels: [group][token block][8 tokens][8 channels]   fp16 4096
 *     L   Kr - K  the same order: what fp16 left of Kr                                  fp16 4096
 *     T   T b     [lane]{ n0.b0, n0.b1, n1.b0, n1.b1 }                                  fp16  512
 *     P           the same order                                                        fp16  512
 *     D   2^G_C   [128]                                                                 fp32  512
 *
 * Kr needs its second term: what a key writes beside itself no later token reads and corrects, so
 * the rounding of equal keys under slow decay would add up over thousands of tiles.
 *
 * n0, n1: the tile's tokens 0..7 and 8..15 as columns; b0, b1: rows 2t.. and 2t+8.. of the step.
 */
#ifndef FKDA_TILE_IMAGE_H
#define FKDA_TILE_IMAGE_H

#include <stdint.h>

enum {
    TILE_TOKENS = 16,
    TILE_K = 128,
    IMAGE_W = 0,
    IMAGE_Q = 4096,
    IMAGE_K = 8192,
    IMAGE_L = 12288,
    IMAGE_T = 16384,
    IMAGE_P = 16896,
    IMAGE_D = 17408,
    IMAGE_BYTES = 17920
};

/* Launch shapes, which the host and the kernels must agree on. */
enum {
    PREPARE_WARPS = 2, /* of a block, an image each */
    STAGES = 4,        /* of the recurrence's ring */
    VALUE_BYTES = 512  /* v of one tile and warp in a stage, behind the image */
};

/* Element (b, t, h, c) at data + (b stride_b + t stride_t + h stride_h + c) elements. */
struct fkda_cuda_view {
    const void *data;
    int64_t stride_b, stride_t, stride_h;
};

/* A vector of int32 or int64 in device memory; the stride counts elements. data NULL: absent. */
struct fkda_cuda_index {
    const void *data;
    int64_t stride;
    int32_t is_int64;
};

/* A state pool [slots, HV, V, 128], each [V, 128] image contiguous and its rows aligned to a pair
 * of elements. data NULL: absent. */
struct fkda_cuda_states {
    void *data;
    int64_t stride_slot, stride_h; /* elements */
    int32_t is_f32;                /* else bf16 */
};

/* Where sequences lie; see tile_map.cuh. */
struct fkda_cuda_sequences {
    struct fkda_cuda_index cu_seqlens; /* [N + 1]; absent: N = B sequences of T tokens */
    int32_t N;
    int64_t T;
    int64_t tiles_per_sequence; /* dense: ceil(T / 16) */
};

struct fkda_prepare_args {
    struct fkda_cuda_view q, k; /* [B, T, H, 128] bf16 */
    struct fkda_cuda_view g;    /* [B, T, HV, 128] bf16 or fp32 */
    struct fkda_cuda_view beta; /* [B, T, HV] bf16 or fp32 */
    const float *A_log;         /* [HV] or NULL */
    const float *dt_bias;       /* [HV, 128] or NULL */
    int64_t A_log_stride, dt_bias_stride_h;
    struct fkda_cuda_sequences sequences;
    char *images; /* [tiles][HV] IMAGE_BYTES each */
    int64_t tiles;
    float lower_bound_log2; /* lower_bound * log2(e) */
    int32_t HV, heads_per_key;
    int32_t gate; /* enum fkda_gate */
    int32_t qk_l2norm, beta_sigmoid, allow_neg_eigval;
    int32_t g_is_f32, beta_is_f32, aligned_rows; /* q, k and a bf16 g: rows 16-byte aligned */
};

struct fkda_recurrence_args {
    const char *images;
    struct fkda_cuda_view v;   /* [B, T, HV, V] bf16 */
    struct fkda_cuda_view out; /* [B, T, HV, V] bf16, written */
    struct fkda_cuda_sequences sequences;
    struct fkda_cuda_states initial_state, final_state; /* may be the same memory */
    struct fkda_cuda_index state_indices;               /* [N]; absent: slot n for sequence n */
    int64_t num_slots;                                  /* of the pools; others are padding */
    struct fkda_cuda_states checkpoint_state;           /* [M, HV, V, 128] */
    struct fkda_cuda_index checkpoint_offsets;          /* [M] */
    struct fkda_cuda_index checkpoint_indptr;           /* [N + 1]; absent: M / N each */
    int64_t num_checkpoints, checkpoints_per_sequence;  /* M; M / N */
    float scale;
    int32_t HV, V, slices; /* slices: blocks that share a head's value channels */
    int32_t target_log2;   /* |S|, |v| are scaled below 2^(this + 1) */
    int32_t aligned_v;     /* v rows are 16-byte aligned */
    int32_t wide_out;      /* out rows are 4-byte aligned */
};

#endif
