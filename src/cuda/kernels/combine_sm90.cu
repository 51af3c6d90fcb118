/* combine_sm90.cu: entry states of the segments of a split forward.
 *
 *     entry_0 = S_0      entry_{i+1} = entry_i M_i + B_i = entry_i (M_i - E) + entry_i E + B_i
 *
 * E has ones where the diagonal of M_i is above one half and zeros elsewhere. A block carries 8 or
 * 16 value channels (rows of S) of one (sequence, value head) through all segments. The M_i pass
 * through a ring of places in shared memory, which a copy warp keeps full; it also makes M - E of M
 * before it announces it. Each other warp owns 16 columns of the product.
 * Products are three tf32 ones: the range of fp32, so that no scale is needed, and 21 bits. The
 * tensor core cuts off what it cannot hold. Because of E that costs a share of the change only:
 * what M keeps is kept exactly, and the error does not grow with the segments. Where M forgets, E
 * is zero, and a large state leaves nothing behind.
 * For sm_90 (bulk copies); launched by launch_combine.c. Trusts every size in combine_args.h.
 */
#include "cuda/combine_args.h"
#include "cuda/ptx/bulk_copy.cuh"
#include "cuda/ptx/global_access.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/tf32.cuh"
#include "cuda/tile/bf16.cuh"
#include "cuda/tile/transition.cuh"
#include "cuda/tile_map.cuh"

enum {
    MOST_TILES = 2,       /* of 8 rows of S */
    PREFETCH_SEGMENTS = 5 /* to L2; 3 of them are in the ring or on their way */
};
/* The share of a product that the cut-off bits take on average: 5 2^-23. */
#define UNBIAS 1.0000006f

struct shared {
    float m[COMBINE_PLACES][COMBINE_IMAGE_ITEMS]; /* M_i - E: place i % PLACES */
    float rows[2][8 * MOST_TILES][TILE_K];        /* entry_i: i % 2 */
    float kept[COMBINE_PLACES][TILE_K];           /* the diagonal of E */
    /* M is there: the copies; M - E is there: the copy warp; the other warps have left the place */
    uint64_t full[COMBINE_PLACES], ready[COMBINE_PLACES], used[COMBINE_PLACES];
};
static_assert(sizeof(struct shared) <= COMBINE_SHARED_BYTES, "");

/* Products are S' transposed: 16 columns of M are the rows of the left operand, 8 rows of S the
 * columns of the right one. The order of the reduction and of the 16 columns is free, and such that
 * registers hold what loads bring. Lane (g, t) = (lane / 4, lane % 4) has in a step of 16
 *     of M  rows 4t .. 4t + 3, columns 2g and 2g + 1 of its warp's 16: two pieces (transition.cuh)
 *     of S  row g of each tile, columns 4t .. 4t + 3
 *     of the result  rows 2t and 2t + 1 of each tile, columns 2g and 2g + 1 of its warp's 16
 * Rows of S lie in pieces of 4 columns, permuted (piece_of()). */
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

/* Where a piece of a row of S lies in it: neither the eight lanes that load four pieces of two rows
 * nor the sixteen that store two pieces of four rows meet in a bank. */
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
        for (int r = 0; r < 2; r++) {
            const int piece = piece_of(2 * t + r, 4 * warp + g / 2);
            *(float2 *)&rows[8 * tile + 2 * t + r][4 * piece + g % 2 * 2] = s->x[tile][r];
        }
}

/* What a lane loads for a step. */
struct operands {
    float4 m[2]; /* rows 4t, 4t + 1 and the next two */
    float4 s[MOST_TILES];
};

/* m: where the lane's first piece lies. */
static __device__ __forceinline__ void load_columns(struct operands *x, const float *m, int step)
{
#pragma unroll
    for (int i = 0; i < 2; i++)
        x->m[i] = *(const float4 *)(m + (8 * step + i) * 2 * TILE_K);
}

static __device__ __forceinline__ void load_rows(struct operands *x, const float rows[][TILE_K],
                                                 int step, int tiles)
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < tiles; tile++)
        x->s[tile] = *(const float4 *)&rows[8 * tile + g][4 * piece_of(g, 4 * step + t)];
}

/* high high, high low and low high: sums of their own, so that products wait less for each other.
 * [tile]{ column 2g: row 2t, 2t + 1; column 2g + 1 } */
struct sums {
    float d[3][MOST_TILES][4];
};

/* Adds the products of one step. */
static __device__ __forceinline__ void multiply_step(struct sums *sums, const struct operands *x,
                                                     int tiles)
{
#pragma unroll
    for (int i = 0; i < 2; i++) { /* a product reduces 8: two of each lane's four */
        uint32_t high[4], low[4], s_high[MOST_TILES][2], s_low[MOST_TILES][2];
        split_tf32(x->m[i].x, &high[0], &low[0]);
        split_tf32(x->m[i].y, &high[1], &low[1]);
        split_tf32(x->m[i].z, &high[2], &low[2]);
        split_tf32(x->m[i].w, &high[3], &low[3]);
#pragma unroll
        for (int tile = 0; tile < tiles; tile++) {
            const float4 s = x->s[tile];
            split_tf32(i ? s.z : s.x, &s_high[tile][0], &s_low[tile][0]);
            split_tf32(i ? s.w : s.y, &s_high[tile][1], &s_low[tile][1]);
        }
#pragma unroll
        for (int which = 0; which < 3; which++)
#pragma unroll
            for (int tile = 0; tile < tiles; tile++) {
                const uint32_t *right = which == 2 ? s_low[tile] : s_high[tile];
                mma_m16n8k8_tf32(sums->d[which][tile], which == 1 ? low : high, right[0], right[1]);
            }
    }
}

static __device__ __forceinline__ float finish_item(float s, float kept, float b,
                                                    const struct sums *sums, int tile, int at)
{
    const float sum = sums->d[0][tile][at] + (sums->d[1][tile][at] + sums->d[2][tile][at]);
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
            x->x = finish_item(x->x, kept.x, add.x, sums, tile, r);
            x->y = finish_item(x->y, kept.y, add.y, sums, tile, 2 + r);
        }
}

/* What a block has to do. */
struct chain {
    int begin, end; /* the segments whose M it takes */
    int64_t image_step;
    const float *transition; /* M of segment 0 */
    float *entry;            /* B of segment 0, then entry_0 */
};

static __device__ __forceinline__ struct chain find_chain(const struct fkda_combine_args *a,
                                                          const struct place *p)
{
    struct chain c;
    const int64_t length = sequence_at(&a->sequences, p->n).length;
    const int64_t first =
        piece_base(&a->sequences, p->n, (int)a->segment_tokens, a->segments_per_sequence) * a->HV +
        p->h;
    c.end = length > 0 ? (int)((length - 1) / a->segment_tokens) : 0;
    c.begin = a->initial_state.data ? 0 : 1; /* entry_1 = B_0 */
    c.image_step = (int64_t)a->HV * COMBINE_IMAGE_ITEMS;
    c.transition = a->transition + first * COMBINE_IMAGE_ITEMS;
    c.entry = a->entry + first * COMBINE_IMAGE_ITEMS;
    return c;
}

/* ---- the copy warp -------------------------------------------------------------------------- */

/* Fetches M_i. One thread. */
static __device__ __forceinline__ void fetch(struct shared *s, const struct chain *c, int i)
{
    const int place = (i - c->begin) % COMBINE_PLACES;
    mbarrier_arrive_expect(&s->full[place], sizeof s->m[place]);
    bulk_copy(s->m[place], c->transition + i * c->image_step, sizeof s->m[place], &s->full[place]);
}

/* M becomes M - E. The whole warp. */
static __device__ __forceinline__ void subtract_kept(float *m, float *kept, int lane)
{
#pragma unroll
    for (int i = 0; i < TILE_K / 32; i++) {
        const int row = 32 * i + lane;
        float *const diagonal = m + transition_offset(row, row);
        const float x = *diagonal, e = x > 0.5f ? 1.0f : 0.0f;
        *diagonal = x - e;
        kept[row] = e;
    }
}

static __device__ __forceinline__ void copy_images(struct shared *s, const struct chain *c,
                                                   const struct place *p, int tiles)
{
    const int lane = threadIdx.x % 32;
    const int64_t ahead = PREFETCH_SEGMENTS * c->image_step + p->row * TILE_K;
    const uint32_t share = 8 * tiles * TILE_K * sizeof(float); /* the blocks of a head share M */
    for (int i = c->begin; i < c->end && i < c->begin + COMBINE_PLACES; i++)
        if (lane == 0)
            fetch(s, c, i);
    for (int i = c->begin; i < c->end; i++) {
        const int turn = i - c->begin, place = turn % COMBINE_PLACES;
        if (i + PREFETCH_SEGMENTS < c->end && lane == 0) {
            bulk_prefetch_l2(c->transition + i * c->image_step + ahead, share);
            bulk_prefetch_l2(c->entry + i * c->image_step + ahead, share);
        }
        mbarrier_wait(&s->full[place], turn / COMBINE_PLACES % 2);
        subtract_kept(s->m[place], s->kept[place], lane);
        fence_proxy_async(); /* the diagonal is stored before the copy engine takes the place */
        __syncwarp();        /* by every lane */
        if (lane == 0)
            mbarrier_arrive(&s->ready[place]);
        const int before = turn - 1; /* its place is free soon, M_i is being used */
        if (before < 0 || i - 1 + COMBINE_PLACES >= c->end)
            continue;
        mbarrier_wait(&s->used[before % COMBINE_PLACES], before / COMBINE_PLACES % 2);
        if (lane == 0)
            fetch(s, c, i - 1 + COMBINE_PLACES);
        __syncwarp(); /* one lane was alone */
    }
}

/* ---- the other warps ------------------------------------------------------------------------ */

static __device__ __forceinline__ void walk(const struct fkda_combine_args *a,
                                            struct shared *shared, const struct chain *c,
                                            const struct place *p, int tiles)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    /* A place in `entry` is read before it is written, both times by the same thread. */
    float *entry = c->entry + p->part;
    int i = 0;
    struct part s, b;
    load_initial(&s, &a->initial_state, p, tiles);
    if (i < c->end)
        load_part(&b, entry, tiles);
    store_part(entry, &s, tiles);
    if (i < c->end && c->begin == 1) {
        s = b;
        i++;
        entry += c->image_step;
        if (i < c->end)
            load_part(&b, entry, tiles);
        store_part(entry, &s, tiles);
    }
    if (i == c->end)
        return;

    const int column = 16 * warp + 2 * g, first = transition_offset(4 * t, column);
    int place = 0, parity = 0;
    publish(shared->rows[i % 2], &s, tiles);
    for (; i < c->end; i++) {
        const float *m = shared->m[place] + first;
        const float(*rows)[TILE_K] = shared->rows[i % 2];
        struct operands x[2];
        mbarrier_wait(&shared->ready[place], parity);
        load_columns(&x[0], m, 0);
        const float2 kept = *(const float2 *)&shared->kept[place][column];
        /* every warp's part of entry_i is in shared memory; and all warps have left entry_{i-1},
         * whose place entry_{i+1} takes */
        named_barrier_sync(1, 32 * COMBINE_WARPS);
        entry += c->image_step;
        struct part next_b = b;
        if (i + 1 < c->end)
            load_part(&next_b, entry, tiles);

        struct sums sums = {{{{0}}}};
        load_rows(&x[0], rows, 0, tiles);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            if (step + 1 < STEPS) {
                load_rows(&x[(step + 1) % 2], rows, step + 1, tiles);
                load_columns(&x[(step + 1) % 2], m, step + 1);
            }
            multiply_step(&sums, &x[step % 2], tiles);
        }
        __syncwarp(); /* every lane has loaded its last columns */
        if (lane == 0)
            mbarrier_arrive(&shared->used[place]);
        finish(&s, &sums, kept, &b, tiles);
        publish(shared->rows[(i + 1) % 2], &s, tiles);
        store_part(entry, &s, tiles);
        b = next_b;
        place = place + 1 == COMBINE_PLACES ? 0 : place + 1;
        parity ^= place == 0;
    }
}

static __device__ __forceinline__ void combine(const struct fkda_combine_args *a, int tiles)
{
    extern __shared__ __align__(128) char memory[];
    struct shared *const shared = (struct shared *)memory;
    const struct place p = find_place(a, tiles);
    if (p.slot < 0 || p.slot >= a->num_slots)
        return; /* padding: nobody reads its states */
    const struct chain c = find_chain(a, &p);
    if (threadIdx.x == 0) {
        for (int i = 0; i < COMBINE_PLACES; i++) {
            mbarrier_init(&shared->full[i], 1);             /* and the bytes */
            mbarrier_init(&shared->ready[i], 1);            /* the copy warp */
            mbarrier_init(&shared->used[i], COMBINE_WARPS); /* the others */
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x / 32 == COMBINE_WARPS)
        copy_images(shared, &c, &p, tiles);
    else
        walk(a, shared, &c, &p, tiles);
}

/* By rows of S that a block carries. */
#define DEFINE_COMBINE(rows)                                                           \
    extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, 1)                   \
        fkda_combine_##rows##_sm90(const __grid_constant__ struct fkda_combine_args a) \
    {                                                                                  \
        combine(&a, rows / 8);                                                         \
    }

DEFINE_COMBINE(8)
DEFINE_COMBINE(16)
