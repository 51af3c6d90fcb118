/* forward_sm90.h: what the host and the fused Hopper kernel share. Plain C. */
#ifndef FKDA_CUDA_FORWARD_SM90_H
#define FKDA_CUDA_FORWARD_SM90_H

#include <cuda.h>

#include "cuda/segments.h"
#include "cuda/tile_image.h"

enum {
    FORWARD_SM90_THREADS = 512,
    FORWARD_SM90_SHARED_BYTES = 227 * 1024,
    ORDERED_SEQUENCES = 128 /* at most */
};

/* Tensors that the copy engine reads. */
enum { MAP_K, MAP_Q, MAP_G, MAP_V, MAPS };

struct fkda_forward_sm90_args {
    CUtensorMap maps[MAPS]; /* [B, T, H, 128] bf16; boxes of 32 tokens and 64 channels */
    struct fkda_prepare_args prepare;
    struct fkda_recurrence_args recurrence;
    struct fkda_segments segments;
    int64_t items;       /* (sequence, head) pairs; of a split, images behind them */
    int items_per_block; /* <= MOST_BLOCK_ITEMS */
    int longest_first;   /* whole sequences are taken by their length: <= ORDERED_SEQUENCES */
};

enum { JOIN_THREADS = 256, JOIN_SHARED_BYTES = 90 * 1024 /* two blocks an SM */ };

/* The images of a segment are `shares` blocks of join_sm90.cu. */
struct fkda_join_args {
    struct fkda_segments segments;
    struct fkda_cuda_view out; /* [B, T, HV, 128] bf16, written */
    struct fkda_cuda_sequences sequences;
    struct fkda_cuda_index state_indices; /* [N]; absent: slot n for sequence n */
    int64_t num_slots;                    /* of the pool; sequences of others are left alone */
    float scale;
    int32_t HV, shares, share_chunks;
};

#endif
