/* combine_sm90.cu: entry states of the segments of a split forward.
 *
 *     entry_0 = S_0      entry_{i+1} = entry_i M_i + B_i = entry_i (M_i - E) + entry_i E + B_i
 *
 * E has ones where the diagonal of M_i is above one half and zeros elsewhere. A block carries 16 or
 * 32 value channels (rows of S) of one (sequence, value head) through all segments. Each warp owns
 * 16 columns of the product: it keeps its columns of M_i in registers, and as soon as 16 rows of
 * them are used up, those of M_{i+1} are on their way there. Only the rows of S pass through shared
 * memory, once a segment.
 * Products are three tf32 ones: the range of fp32, so that no scale is needed, and 21 bits. The
 * tensor core cuts off what it cannot hold. Because of E that costs a share of the change only:
 * what M keeps is kept exactly, and the error does not grow with the segments. Where M forgets, E
 * is zero, and a large state leaves nothing behind.
 * Any GPU from sm_80 on; launched by launch_combine.c. Trusts every size in combine_args.h.
 */
#include "cuda/combine_args.h"
#include "cuda/ptx/global_access.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tf32.cuh"
#include "cuda/tile/bf16.cuh"
#include "cuda/tile_map.cuh"

enum {
    THREADS = 32 * COMBINE_WARPS,
    MOST_TILES = 4,       /* of 8 rows of S */
    PREFETCH_SEGMENTS = 3 /* to L2 */
};
/* The share of a product that the cut-off bits take on average: 5 2^-23. */
#define UNBIAS 1.0000006f

/* Products are S' transposed: 16 columns of M are the rows of the left operand, 8 rows of S the
 * columns of the right one. The order of the reduction and of the 16 columns is free, and such that
 * registers hold what loads bring. Lane (g, t) = (lane / 4, lane % 4) has in a step
 *     of M  rows 4t .. 4t + 3, columns 2g and 2g + 1 of its warp's 16
 *     of S  row g of each tile, columns 4t .. 4t + 3
 *     of the result  rows 2t and 2t + 1 of each tile, columns 2g and 2g + 1 of its warp's 16
 * S in shared memory: [row][128] in pieces of 4 columns, permuted (piece_of()). */
struct part {
    float2 x[MOST_TILES][2]; /* the lane's part of a result or of an image: [tile][row 2t or + 1] */
};

/* Where the block and its lanes work. */
struct place {
    int64_t n, slot;
    int h, row;    /* first of the block's rows */
    int64_t part;  /* in an image: the lane's part, row 2t of tile 0 */
    int64_t lanes; /* in M: the lane's row 4t and column 2g */
};

static __device__ __forceinline__ struct place find_place(const struct fkda_combine_args *a,
                                                          int tiles)
{
    struct place p;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const unsigned slabs = TILE_K / 8 / tiles, chain = blockIdx.x / slabs;
    p.n = chain / (unsigned)a->HV;
    p.h = (int)(chain % (unsigned)a->HV);
    p.row = 8 * tiles * (int)(blockIdx.x % slabs);
    p.slot = a->state_indices.data ? load_index(&a->state_indices, p.n) : p.n;
    p.part = (p.row + 2 * t) * TILE_K + 16 * warp + 2 * g;
    p.lanes = 4 * t * TILE_K + 16 * warp + 2 * g;
    return p;
}

static __device__ __forceinline__ void load_part(struct part *p, const float *from, int tiles)
{
#pragma unroll
    for (int tile = 0; tile < tiles; tile++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            p->x[tile][r] = *(const float2 *)(from + (8 * tile + r) * TILE_K);
}

static __device__ __forceinline__ void store_part(float *to, const struct part *p, int tiles)
{
#pragma unroll
    for (int tile = 0; tile < tiles; tile++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(float2 *)(to + (8 * tile + r) * TILE_K) = p->x[tile][r];
}

/* The lane's part of S_0. */
static __device__ __forceinline__ void load_initial(struct part *s,
                                                    const struct fkda_cuda_states *states,
                                                    const struct place *p, int tiles)
{
    const int64_t at = p->slot * states->stride_slot + p->h * states->stride_h + p->part;
    if (states->data && states->is_f32) {
        load_part(s, (const float *)states->data + at, tiles);
        return;
    }
#pragma unroll
    for (int tile = 0; tile < tiles; tile++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            uint32_t pair = 0;
            if (states->data)
                pair = *(const uint32_t *)((const uint16_t *)states->data + at +
                                           (8 * tile + r) * TILE_K);
            s->x[tile][r] = make_float2(bf16_low(pair), bf16_high(pair));
        }
}

/* Where a piece of a row lies in it: neither the eight lanes that load four pieces of two rows nor
 * the sixteen that store two pieces of four rows meet in a bank. */
static __device__ __forceinline__ int piece_of(int row, int piece)
{
    return piece ^ (row / 2 % 4 * 2 ^ row % 2 * 4);
}

static __device__ __forceinline__ void publish(float rows[][TILE_K], const struct part *s,
                                               int tiles)
{
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < tiles; tile++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(float2 *)&rows[8 * tile + 2 * t + r]
                            [4 * piece_of(2 * t + r, 4 * warp + g / 2) + g % 2 * 2] = s->x[tile][r];
}

/* The j-th step of a warp. The first one holds the diagonal, E needs no other. */
static __device__ __forceinline__ int step_of(int j)
{
    return (int)(threadIdx.x / 32 + j) % STEPS;
}

/* The lane's part of M: [j-th step][row 4t + i of the step]. */
struct columns {
    float2 m[STEPS][4];
};

static __device__ __forceinline__ void load_step(struct columns *columns, const float *from, int j)
{
    from += 16 * TILE_K * step_of(j);
#pragma unroll
    for (int i = 0; i < 4; i++)
        columns->m[j][i] = load_once_f32x2(from + i * TILE_K);
}

/* A branch that is never taken, which the compiler cannot know: loads stay on their side of it.
 * Left alone, it moves all of them to the end of the loop, from where they arrive too late. */
static __device__ __forceinline__ void keep_loads_here(const struct fkda_combine_args *a, int j)
{
    if (a->HV == -1 - j)
        __trap();
}

/* E of columns 2g and 2g + 1. */
struct kept {
    bool left, right;
};

/* Makes M - E of M. m: what the lane holds of M in the first step, where the diagonal runs through
 * rows 4t, 4t + 1 and columns 2g, 2g + 1 if g = 2t, rows 4t + 2, 4t + 3 if g = 2t + 1. */
static __device__ __forceinline__ struct kept subtract_kept(float2 m[4], int lane)
{
    const int g = lane / 4, t = lane % 4, owner = lane - t + g / 2;
    const float left = __shfl_sync(~0u, g % 2 ? m[2].x : m[0].x, owner);
    const float right = __shfl_sync(~0u, g % 2 ? m[3].y : m[1].y, owner);
    const struct kept kept = {left > 0.5f, right > 0.5f};
    if (lane == owner) {
        const float x = kept.left ? 1.0f : 0.0f, y = kept.right ? 1.0f : 0.0f;
        m[0].x -= g % 2 ? 0.0f : x;
        m[1].y -= g % 2 ? 0.0f : y;
        m[2].x -= g % 2 ? x : 0.0f;
        m[3].y -= g % 2 ? y : 0.0f;
    }
    return kept;
}

/* The lane's part of S in a step: row g of every tile. rows: from row g of tile 0 on. */
static __device__ __forceinline__ void load_rows(float4 s[MOST_TILES], const float rows[][TILE_K],
                                                 int j, int tiles)
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < tiles; tile++)
        s[tile] = *(const float4 *)&rows[8 * tile][4 * piece_of(g, 4 * step_of(j) + t)];
}

/* high high, high low and low high: sums of their own, so that products wait less for each other.
 * [tile]{ column 2g: row 2t, 2t + 1; column 2g + 1: the same rows } */
struct sums {
    float d[3][MOST_TILES][4];
};

/* Adds the products of one step; m holds rows of M - E, s the lane's four columns of every tile. */
static __device__ __forceinline__ void multiply_step(struct sums *sums, const float2 m[4],
                                                     const float4 s[MOST_TILES], int tiles)
{
#pragma unroll
    for (int half = 0; half < 2; half++) { /* a product reduces 8: two of each lane's four */
        const float2 *const rows = m + 2 * half;
        const float left[4] = {rows[0].x, rows[0].y, rows[1].x, rows[1].y};
        uint32_t high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            split_tf32(left[i], &high[i], &low[i]);
#pragma unroll
        for (int tile = 0; tile < tiles; tile++) {
            const float right[2] = {half ? s[tile].z : s[tile].x, half ? s[tile].w : s[tile].y};
            uint32_t s_high[2], s_low[2];
#pragma unroll
            for (int i = 0; i < 2; i++)
                split_tf32(right[i], &s_high[i], &s_low[i]);
            mma_m16n8k8_tf32(sums->d[0][tile], high, s_high[0], s_high[1]);
            mma_m16n8k8_tf32(sums->d[1][tile], low, s_high[0], s_high[1]);
            mma_m16n8k8_tf32(sums->d[2][tile], high, s_low[0], s_low[1]);
        }
    }
}

/* s <- (the sums) + s E + b */
static __device__ __forceinline__ void finish(struct part *s, const struct sums *sums,
                                              struct kept kept, const struct part *b, int tiles)
{
#pragma unroll
    for (int tile = 0; tile < tiles; tile++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float2 *x = &s->x[tile][r];
            const float2 add = b->x[tile][r];
            const float(*d)[MOST_TILES][4] = sums->d;
            const float left = d[0][tile][r] + (d[1][tile][r] + d[2][tile][r]);
            const float right = d[0][tile][2 + r] + (d[1][tile][2 + r] + d[2][tile][2 + r]);
            x->x = (kept.left ? x->x + add.x : add.x) + UNBIAS * left;
            x->y = (kept.right ? x->y + add.y : add.y) + UNBIAS * right;
        }
}

/* The block's share of a segment's images, which its neighbours read too. */
static __device__ __forceinline__ void prefetch_share(const float *transition, const float *entry,
                                                      int row, int tiles)
{
    const int lines = 8 * tiles * TILE_K / 32, i = threadIdx.x; /* of 32 items: 128 bytes */
    if (i < 2 * lines)
        prefetch_l2((i < lines ? transition : entry) + row * TILE_K + 32 * (i % lines));
}

static __device__ __forceinline__ void walk(const struct fkda_combine_args *a,
                                            float shared[][TILE_K], int tiles)
{
    const struct place p = find_place(a, tiles);
    if (p.slot < 0 || p.slot >= a->num_slots)
        return; /* padding: nobody reads its states */
    const int lane = threadIdx.x % 32;
    const int64_t length = sequence_at(&a->sequences, p.n).length;
    const int last = length > 0 ? (int)((length - 1) / a->segment_tokens) : 0;
    const int64_t image_step = (int64_t)a->HV * COMBINE_IMAGE_ITEMS;
    const int64_t first =
        (piece_base(&a->sequences, p.n, (int)a->segment_tokens, a->segments_per_sequence) * a->HV +
         p.h) *
        COMBINE_IMAGE_ITEMS;
    const float *transition = a->transition + first; /* M_i */
    float *entry = a->entry + first;                 /* B_i, then entry_i */

    /* A place in `entry` is read before it is written, both times by the same thread. */
    int i = 0;
    struct part s, b;
    load_initial(&s, &a->initial_state, &p, tiles);
    if (i < last)
        load_part(&b, entry + p.part, tiles);
    store_part(entry + p.part, &s, tiles);
    if (i < last && !a->initial_state.data) { /* entry_1 = B_0 */
        s = b;
        i++;
        transition += image_step;
        entry += image_step;
        if (i < last)
            load_part(&b, entry + p.part, tiles);
        store_part(entry + p.part, &s, tiles);
    }
    if (i == last)
        return;

    struct columns columns;
#pragma unroll
    for (int j = 0; j < STEPS; j++)
        load_step(&columns, transition + p.lanes, j);
    publish(shared + i % 2 * 8 * tiles, &s, tiles);
    for (; i < last; i++) {
        const struct kept kept = subtract_kept(columns.m[0], lane);
        /* every warp's part of entry_i is in shared memory; and all warps have left entry_{i-1},
         * whose place entry_{i+1} takes */
        __syncthreads();
        const float(*rows)[TILE_K] = shared + (i % 2 * 8 * tiles + lane / 4);
        transition += image_step;
        entry += image_step;
        if (i + PREFETCH_SEGMENTS < last)
            prefetch_share(transition + (PREFETCH_SEGMENTS - 1) * image_step,
                           entry + (PREFETCH_SEGMENTS - 1) * image_step, p.row, tiles);
        struct part next_b = b;
        if (i + 1 < last)
            load_part(&next_b, entry + p.part, tiles);

        struct sums sums = {{{{0}}}};
        float4 s_step[2][MOST_TILES];
        load_rows(s_step[0], rows, 0, tiles);
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            if (j + 1 < STEPS)
                load_rows(s_step[(j + 1) % 2], rows, j + 1, tiles);
            multiply_step(&sums, columns.m[j], s_step[j % 2], tiles);
            if (i + 1 < last)
                load_step(&columns, transition + p.lanes, j);
            keep_loads_here(a, j);
        }
        finish(&s, &sums, kept, &b, tiles);
        publish(shared + (i + 1) % 2 * 8 * tiles, &s, tiles);
        store_part(entry + p.part, &s, tiles);
        b = next_b;
    }
}

/* By rows of S that a block carries. */
#define DEFINE_COMBINE(rows)                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                           \
        fkda_combine_##rows##_sm90(const __grid_constant__ struct fkda_combine_args a) \
    {                                                                                  \
        __shared__ __align__(16) float shared[2 * rows][TILE_K]; /* entry_i: i % 2 */  \
        walk(&a, shared, rows / 8);                                                    \
    }

DEFINE_COMBINE(16)
DEFINE_COMBINE(32)
