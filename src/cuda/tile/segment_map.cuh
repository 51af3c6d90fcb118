/* segment_map.cuh: where the segments of a split sequence are; see segments.h. */
#ifndef FKDA_TILE_SEGMENT_MAP_CUH
#define FKDA_TILE_SEGMENT_MAP_CUH

#include "cuda/segments.h"
#include "cuda/tile_map.cuh"

/* Number of the first piece of sequence n. */
static __device__ __forceinline__ int64_t first_piece(const struct fkda_cuda_sequences *s,
                                                      const struct fkda_segments *g, int64_t n)
{
    return piece_base(s, n, SEGMENT_CHUNK_TOKENS * g->chunks, g->per_sequence);
}

/* A later segment: its sequence, and its first token there; -1 for a number that belongs to a first
 * segment. Segments past the end of the sequence have a number, too. */
struct later_segment {
    int64_t n, begin;
};

/* image: the number of the segment's images, which the heads share out. By a warp together. */
static __device__ __forceinline__ struct later_segment
find_later_segment(const struct fkda_cuda_sequences *s, const struct fkda_segments *g,
                   int64_t image, int32_t HV)
{
    const int tokens = SEGMENT_CHUNK_TOKENS * g->chunks;
    const int64_t piece = image / (unsigned)HV + g->lead - 1;
    struct later_segment x = {sequence_of_piece(s, piece, tokens, g->per_sequence), -1};
    const int64_t later = piece - first_piece(s, g, x.n) - g->lead;
    if (later >= 0)
        x.begin = SEGMENT_CHUNK_TOKENS * (int64_t)g->first + later * tokens;
    return x;
}

#endif
