/* tile_map.cuh: sequences, tiles and image numbers, all read on the device.
 *
 * Sequence n owns the images from tile_base(n) on. Dense: n ceil(T / 16). Varlen: cu[n] / 16 + n,
 * which needs no scan over sequences and never collides, since ceil(len / 16) <= len / 16 + 1.
 * cu_seqlens is clamped to [0, T], so that a wrong one can give wrong numbers but never an address
 * outside the caller's memory.
 */
#ifndef FKDA_TILE_MAP_CUH
#define FKDA_TILE_MAP_CUH

#include "cuda/tile_image.h"

enum { STEPS = TILE_K / 16 }; /* products over the key channels take 16 at a time */

static __device__ __forceinline__ int64_t load_index(const struct fkda_cuda_index *index, int64_t i)
{
    return index->is_int64 ? ((const int64_t *)index->data)[i * index->stride]
                           : (int64_t)((const int32_t *)index->data)[i * index->stride];
}

static __device__ __forceinline__ int64_t cu_at(const struct fkda_cuda_sequences *s, int64_t n)
{
    const int64_t cu = load_index(&s->cu_seqlens, n);
    return cu < 0 ? 0 : cu > s->T ? s->T : cu;
}

/* Sequences cut into pieces of so many tokens: the number of sequence n's first piece. */
static __device__ __forceinline__ int64_t piece_base(const struct fkda_cuda_sequences *s, int64_t n,
                                                     int tokens, int64_t per_sequence)
{
    /* T is below 2^31; a 64-bit division would take a hundred instructions */
    return s->cu_seqlens.data ? (unsigned)cu_at(s, n) / (unsigned)tokens + n : n * per_sequence;
}

static __device__ __forceinline__ int64_t tile_base(const struct fkda_cuda_sequences *s, int64_t n)
{
    return piece_base(s, n, TILE_TOKENS, s->tiles_per_sequence);
}

struct sequence {
    int64_t batch, begin;
    int64_t length;
};

static __device__ __forceinline__ struct sequence sequence_at(const struct fkda_cuda_sequences *s,
                                                              int64_t n)
{
    struct sequence seq = {n, 0, s->T};
    if (s->cu_seqlens.data) {
        seq.batch = 0;
        seq.begin = cu_at(s, n);
        seq.length = cu_at(s, n + 1) - seq.begin;
        if (seq.length < 0)
            seq.length = 0;
    }
    return seq;
}

/* The sequence that owns a piece: the last n with piece_base(n) <= piece; N >= 1. A warp searches
 * 32 candidates a step, so 1024 sequences take two loads. All lanes return the same n. */
static __device__ __forceinline__ int64_t sequence_of_piece(const struct fkda_cuda_sequences *s,
                                                            int64_t piece, int tokens,
                                                            int64_t per_sequence)
{
    if (!s->cu_seqlens.data)
        return (unsigned)piece / (unsigned)per_sequence; /* both below 2^31 */
    const int lane = threadIdx.x % 32;
    int64_t low = 0, high = s->N; /* piece_base(low) <= piece; the answer is below high */
    while (high - low > 1) {
        const int64_t step = (high - low + 31) / 32;
        const int64_t n = low + lane * step;
        const unsigned below =
            __ballot_sync(~0u, n < high && piece_base(s, n, tokens, per_sequence) <= piece);
        const int last = below ? 31 - __clz((int)below) : 0;
        low += last * step;
        if (low + step < high)
            high = low + step;
    }
    return low;
}

static __device__ __forceinline__ int64_t sequence_of_tile(const struct fkda_cuda_sequences *s,
                                                           int64_t tile)
{
    return sequence_of_piece(s, tile, TILE_TOKENS, s->tiles_per_sequence);
}

#endif
