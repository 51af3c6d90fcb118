/* combine_sm90.cu: the states that enter the segments of a split forward, and the final states.
 *
 *     entry_1 = B_0      entry_{i+1} = entry_i M_i + B_i = entry_i (M_i - E) + entry_i E + B_i
 *
 * E has ones where the diagonal of M_i is above one half and zeros elsewhere. A block carries 8 or
 * 16 value channels (rows of S) of one (sequence, value head) through all segments. Each warp owns
 * 16 columns of the product: it keeps its columns of M_i in registers, and as soon as some rows of
 * them have been multiplied, those of M_{i+1} are on their way there. Only the rows of S pass
 * through shared memory, once a segment.
 * Products are three tf32 ones: the range of fp32, so that no scale is needed, and 21 bits. The
 * tensor core cuts off what it cannot hold. Because of E that costs a share of the change only:
 * what M keeps is kept exactly, and the error does not grow with the segments. Where M forgets, E
 * is zero, and a large state leaves nothing behind.
 * For sm_90 (wgmma); launched by launch_combine.c. Trusts every size in combine_args.h.
 */
#include "cuda/combine_args.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/global_access.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tf32.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/segment_map.cuh"
#include "cuda/tile/transition.cuh"

enum {
    MOST_TILES = 2, /* of 8 rows of S */
    STEPS_8 = TILE_K / 8,
    BATCHES = COMBINE_WARPS, /* of steps: a warp's 16 columns have their diagonal in one */
    BATCH = STEPS_8 / BATCHES,
    PREFETCH_SEGMENTS = 3, /* to L2 */
    /* Rows of S, the right operand: [step][k % 2][high or low part][tile][8 rows]{ 4 of k }, in
     * words; the last four keep the stores of two steps apart in the banks. */
    GROUP_WORDS = 8 * 4
};
/* The share of a product that the cut-off bits take on average: 5 2^-23. */
#define UNBIAS 1.0000006f

/* Products are S' transposed: 16 columns of M are a warp's rows of the left operand, the rows of S
 * the columns of the right one. The order of the reduction and of the 16 columns is free, and such
 * that registers hold what loads bring. Lane (g, t) = (lane / 4, lane % 4) has
 *     of M  in a step: rows 2t and 2t + 1 of its 8, columns 2g and 2g + 1 of its warp's 16: a piece
 *           (transition.cuh)
 *     of the result  rows 2t and 2t + 1 of each tile of 8, columns 2g and 2g + 1 of its warp's 16
 */
struct part {
    float2 x[MOST_TILES][2]; /* the lane's part of a result or of an image: [tile][row 2t or + 1] */
};

/* Where the block and its lanes work. */
struct place {
    int64_t n, slot;
    int h, row;   /* first of the block's rows */
    int64_t part; /* in an image: the lane's part, row 2t of tile 0 */
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

static __device__ __forceinline__ void store_final(const struct fkda_cuda_states *states,
                                                   const struct place *p, const struct part *s,
                                                   int tiles)
{
    const int64_t at = p->slot * states->stride_slot + p->h * states->stride_h + p->part;
    if (states->is_f32) {
        store_part((float *)states->data + at, s, tiles);
        return;
    }
#pragma unroll
    for (int tile = 0; tile < tiles; tile++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *(uint32_t *)((uint16_t *)states->data + at + (8 * tile + r) * TILE_K) =
                cvt_rn_bf16x2(s->x[tile][r].x, s->x[tile][r].y);
}

static __device__ __forceinline__ int step_words(int tiles)
{
    return 2 * 2 * tiles * GROUP_WORDS + 4;
}

static __device__ __forceinline__ void publish(uint32_t *rows, const struct part *s, int tiles)
{
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    uint32_t *const to = rows + (2 * warp + g / 4) * step_words(tiles) + 2 * t * 4 + g % 4;
#pragma unroll
    for (int tile = 0; tile < tiles; tile++)
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint32_t high, low, *const at = to + (2 * k * tiles + tile) * GROUP_WORDS + 4 * r;
                split_tf32(k ? s->x[tile][r].y : s->x[tile][r].x, &high, &low);
                at[0] = high;
                at[tiles * GROUP_WORDS] = low;
            }
    fence_proxy_async();
}

/* The lane's share of M, and of a batch of M - E in parts. */
struct columns {
    float4 piece[STEPS_8];
};
struct batch {
    uint32_t high[BATCH][4], low[BATCH][4];
};

/* m: the lane's first piece. */
static __device__ __forceinline__ void load_batch(struct columns *x, const float *m, int batch)
{
#pragma unroll
    for (int i = BATCH * batch; i < BATCH * (batch + 1); i++) {
        const uint4 piece = ld_global_stream_u32x4(m + i * TRANSITION_STEP);
        x->piece[i] = make_float4(__uint_as_float(piece.x), __uint_as_float(piece.y),
                                  __uint_as_float(piece.z), __uint_as_float(piece.w));
    }
}

/* M becomes M - E, whose diagonal the warp's columns have in one batch. e: of columns 2g and 2g + 1
 * in the lane that has their diagonal. */
static __device__ __forceinline__ void subtract_kept(struct columns *x, int batch, float2 *e)
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        float4 *const piece = &x->piece[BATCH * batch + i];
        if (g == 4 * i + t) {
            *e = make_float2(piece->x > 0.5f ? 1.0f : 0.0f, piece->w > 0.5f ? 1.0f : 0.0f);
            piece->x -= e->x;
            piece->w -= e->y;
        }
    }
}

static __device__ __forceinline__ void pin_batch(struct batch *x)
{
    wgmma_pin_u32(x->high[0], 4 * BATCH);
    wgmma_pin_u32(x->low[0], 4 * BATCH);
}

static __device__ __forceinline__ void split_batch(struct batch *to, const struct columns *x,
                                                   int batch)
{
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const float4 piece = x->piece[BATCH * batch + i];
        split_tf32(piece.x, &to->high[i][0], &to->low[i][0]);
        split_tf32(piece.y, &to->high[i][1], &to->low[i][1]);
        split_tf32(piece.z, &to->high[i][2], &to->low[i][2]);
        split_tf32(piece.w, &to->high[i][3], &to->low[i][3]);
    }
    pin_batch(to);
}

/* The columns' high parts times both parts of S, [part][tile], and their low parts times its high
 * parts, [tile]; each { column 2g: row 2t, 2t + 1; column 2g + 1 } */
struct sums {
    float both[2 * MOST_TILES * 4], low[MOST_TILES * 4];
};

/* Queues the products of one batch; rows: what belongs to its first step. */
static __device__ __forceinline__ void multiply_batch(struct sums *sums, const struct batch *x,
                                                      uint64_t rows, int accumulate, int tiles)
{
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        const uint64_t step = rows + i * step_words(tiles) / 4; /* counted in 16 bytes */
        if (tiles == 2) {
            wgmma_m64n32k8_tf32(sums->both, x->high[i], step, accumulate || i > 0);
            wgmma_m64n16k8_tf32(sums->low, x->low[i], step, accumulate || i > 0);
        } else {
            wgmma_m64n16k8_tf32(sums->both, x->high[i], step, accumulate || i > 0);
            wgmma_m64n8k8_tf32(sums->low, x->low[i], step, accumulate || i > 0);
        }
    }
    wgmma_commit();
}

/* Multiplies by the columns, and sends for those of the next M, at `next`. A batch is taken apart
 * while the two before are multiplied. Returns the diagonal of E in columns 2g and 2g + 1. */
static __device__ __forceinline__ float2 multiply(struct sums *sums, struct columns *x,
                                                  const uint32_t *rows, const float *next,
                                                  int tiles)
{
    const int lane = threadIdx.x % 32, g = lane / 4;
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); /* known to be uniform */
    const int group_bytes = GROUP_WORDS * sizeof *rows;
    const uint64_t right = wgmma_descriptor(shared_address(rows), 2 * tiles * group_bytes,
                                            group_bytes, WGMMA_SWIZZLE_NONE);
    struct batch parts[BATCHES];
    float2 e = {0.0f, 0.0f};
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++) {
        if (batch == warp)
            subtract_kept(x, batch, &e);
        split_batch(&parts[batch], x, batch);
        load_batch(x, next, batch);
        multiply_batch(sums, &parts[batch], right + BATCH * batch * step_words(tiles) / 4,
                       batch > 0, tiles);
        if (batch >= 2) {
            wgmma_wait(2);
            pin_batch(&parts[batch - 2]); /* until now they were in use */
        }
    }
    wgmma_wait(0);
    pin_batch(&parts[BATCHES - 2]);
    pin_batch(&parts[BATCHES - 1]);
    wgmma_pin_f32(sums->both, 8 * tiles);
    wgmma_pin_f32(sums->low, 4 * tiles);
    const int from = 4 * g + g % 4;
    return make_float2(__shfl_sync(0xffffffffu, e.x, from), __shfl_sync(0xffffffffu, e.y, from));
}

static __device__ __forceinline__ float finish_item(float s, float kept, float b,
                                                    const struct sums *sums, int at, int tiles)
{
    const float sum = sums->both[at] + (sums->both[4 * tiles + at] + sums->low[at]);
    return fmaf(UNBIAS, sum, fmaf(kept, s, b));
}

/* s <- (the sums) + s E + b */
static __device__ __forceinline__ void finish(struct part *s, const struct sums *sums, float2 kept,
                                              const struct part *b, int tiles)
{
#pragma unroll
    for (int tile = 0; tile < tiles; tile++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float2 *x = &s->x[tile][r];
            const float2 add = b->x[tile][r];
            x->x = finish_item(x->x, kept.x, add.x, sums, 4 * tile + r, tiles);
            x->y = finish_item(x->y, kept.y, add.y, sums, 4 * tile + 2 + r, tiles);
        }
}

/* What a block has to do: nothing for a sequence of one segment. */
struct chain {
    int segments, end; /* all; those from the first to the last whose M is taken */
    int64_t image_step;
    const float *transition; /* M of the first segment */
    float *entry;            /* B of the first segment */
};

static __device__ __forceinline__ struct chain find_chain(const struct fkda_combine_args *a,
                                                          const struct place *p)
{
    struct chain c;
    const struct fkda_segments *g = &a->segments;
    const int tokens = SEGMENT_CHUNK_TOKENS * g->chunks;
    const int64_t later =
        sequence_at(&a->sequences, p->n).length - SEGMENT_CHUNK_TOKENS * (int64_t)g->first;
    const int64_t image = first_piece(&a->sequences, g, p->n) * a->HV + p->h;
    c.segments = later > 0 ? (int)((later + tokens - 1) / tokens) + 1 : 1;
    c.end = a->final_state.data ? c.segments : c.segments - 1;
    c.image_step = (int64_t)a->HV * COMBINE_IMAGE_ITEMS;
    c.transition = g->transition + image * COMBINE_IMAGE_ITEMS;
    c.entry = g->entry + image * COMBINE_IMAGE_ITEMS;
    return c;
}

/* Asks for the block's share of M of a segment, and for the part of B that it reads. */
static __device__ __forceinline__ void prefetch(const struct chain *c, const struct place *p,
                                                int segment, int tiles)
{
    const int64_t at = segment * c->image_step + p->row * TILE_K;
    const uint32_t bytes = 8 * tiles * TILE_K * sizeof(float);
    prefetch_block_l2(c->transition + at, bytes);
    prefetch_block_l2(c->entry + at, bytes);
}

static __device__ __forceinline__ void walk(const struct fkda_combine_args *a, uint32_t *shared,
                                            const struct chain *c, const struct place *p, int tiles)
{
    /* A place in `entry` is read before it is written, both times by the same thread. */
    struct part s, b;
    int i = 1;
    load_part(&s, c->entry + p->part, tiles);
    float *entry = c->entry + c->image_step + p->part;
    if (c->end <= 1) {
        store_part(entry, &s, tiles);
        return;
    }
    load_part(&b, entry, tiles);

    const float *m = c->transition + i * c->image_step +
                     transition_offset(2 * (threadIdx.x % 4), 2 * (threadIdx.x / 4));
    struct columns columns;
    struct sums sums;
    publish(shared + i % 2 * STEPS_8 * step_words(tiles), &s, tiles);
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++)
        load_batch(&columns, m, batch);
    for (int ahead = i + 1; ahead < i + PREFETCH_SEGMENTS && ahead < c->end; ahead++)
        if (threadIdx.x == 0)
            prefetch(c, p, ahead, tiles);
    for (; i < c->end; i++) {
        const bool more = i + 1 < c->end;
        /* every warp's part of entry_i is in shared memory; and all warps have left entry_{i-1},
         * whose place entry_{i+1} takes */
        __syncthreads();
        store_part(entry, &s, tiles); /* the fence of publish() would wait for it */
        entry += c->image_step;
        struct part next_b = b;
        if (more) {
            load_part(&next_b, entry, tiles);
            m += c->image_step;
        } /* else the same M once more, for nothing */
        if (threadIdx.x == 0 && i + PREFETCH_SEGMENTS < c->end)
            prefetch(c, p, i + PREFETCH_SEGMENTS, tiles);
        const float2 kept =
            multiply(&sums, &columns, shared + i % 2 * STEPS_8 * step_words(tiles), m, tiles);
        finish(&s, &sums, kept, &b, tiles);
        publish(shared + (i + 1) % 2 * STEPS_8 * step_words(tiles), &s, tiles);
        b = next_b;
    }
    if (c->end == c->segments)
        store_final(&a->final_state, p, &s, tiles);
    else
        store_part(entry, &s, tiles);
}

/* By rows of S that a block carries. */
#define DEFINE_COMBINE(rows)                                                                       \
    extern "C" __global__ void __launch_bounds__(32 * COMBINE_WARPS, 1)                            \
        fkda_combine_##rows##_sm90(const __grid_constant__ struct fkda_combine_args a)             \
    {                                                                                              \
        __shared__ __align__(128) uint32_t shared[2 * STEPS_8 * (4 * rows / 8 * GROUP_WORDS + 4)]; \
        const struct place p = find_place(&a, rows / 8);                                           \
        griddepcontrol_wait();                                                                     \
        griddepcontrol_launch_dependents(); /* join, by then all segments are walked */            \
        if (p.slot < 0 || p.slot >= a.num_slots)                                                   \
            return; /* padding: nobody reads its states */                                         \
        const struct chain c = find_chain(&a, &p);                                                 \
        if (c.segments > 1)                                                                        \
            walk(&a, shared, &c, &p, rows / 8);                                                    \
    }

DEFINE_COMBINE(8)
DEFINE_COMBINE(16)
