/* combine_sm90.cu: entry states of the segments of a split forward.
 *
 *     entry_0 = S_0      entry_{i+1} = entry_i M_i + B_i = entry_i (M_i - E) + entry_i E + B_i
 *
 * E has ones where the diagonal of M_i is above one half and zeros elsewhere. A block carries 8 or
 * 16 value channels (rows of S) of one (sequence, value head) through all segments. The M_i pass
 * through a ring of places in shared memory, which a copy warp keeps full; it also makes M - E of M
 * before it announces it. Two warpgroups multiply, each warp 16 columns of the product; columns of
 * M_{i+1} take the registers of those of M_i as soon as these are used up.
 * Products are three tf32 ones: the range of fp32, so that no scale is needed, and 21 bits. The
 * tensor core cuts off what it cannot hold. Because of E that costs a share of the change only:
 * what M keeps is kept exactly, and the error does not grow with the segments. Where M forgets, E
 * is zero, and a large state leaves nothing behind.
 * For sm_90 (wgmma, bulk copies); launched by launch_combine.c. Trusts every size in
 * combine_args.h.
 */
#include "cuda/combine_args.h"
#include "cuda/ptx/bulk_copy.cuh"
#include "cuda/ptx/global_access.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tf32.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/bf16.cuh"
#include "cuda/tile/transition.cuh"
#include "cuda/tile_map.cuh"

enum {
    MOST_TILES = 2, /* of 8 rows of S */
    STEPS_8 = TILE_K / 8,
    BATCHES = 8, /* of steps: columns of M come to registers in so many parts */
    BATCH = STEPS_8 / BATCHES,
    PREFETCH_SEGMENTS = 5, /* to L2; 3 of them are in the ring or on their way */
    /* Rows of S, the right operand: [step][k % 2][high or low part][tile][8 rows]{ 4 of k }, in
     * words; the last four keep the stores of two steps apart in the banks. */
    GROUP_WORDS = 8 * 4,
    MOST_STEP_WORDS = 2 * 2 * MOST_TILES * GROUP_WORDS + 4
};
/* The share of a product that the cut-off bits take on average: 5 2^-23. */
#define UNBIAS 1.0000006f

struct shared {
    float m[COMBINE_PLACES][COMBINE_IMAGE_ITEMS]; /* M_i - E: place i % PLACES */
    uint32_t rows[2][STEPS_8 * MOST_STEP_WORDS];  /* entry_i: i % 2 */
    float kept[COMBINE_PLACES][TILE_K];           /* the diagonal of E */
    /* M is there: the copies; M - E is there: the copy warp; the other warps have left the place */
    uint64_t full[COMBINE_PLACES], ready[COMBINE_PLACES], used[COMBINE_PLACES];
};
static_assert(sizeof(struct shared) <= COMBINE_SHARED_BYTES, "");

/* Products are S' transposed: 16 columns of M are a warp's rows of the left operand, the rows of S
 * the columns of the right one. The order of the reduction and of the 16 columns is free, and such
 * that registers hold what loads bring. Lane (g, t) = (lane / 4, lane % 4) has
 *     of M  for steps 2j and 2j + 1 of the reduction: rows 16j + 4t, + 1 and 16j + 4t + 2, + 3,
 *           columns 2g and 2g + 1 of its warp's 16: a piece each (transition.cuh)
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

static __device__ __forceinline__ int step_words(int tiles)
{
    return 2 * 2 * tiles * GROUP_WORDS + 4;
}

static __device__ __forceinline__ void publish(uint32_t *rows, const struct part *s, int tiles)
{
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    uint32_t *const to = rows + (2 * warp + g % 2) * step_words(tiles) + 2 * t * 4 + g / 2;
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

/* The lane's share of M - E. */
struct columns {
    uint32_t high[STEPS_8][4], low[STEPS_8][4];
};

/* m: where the lane's first piece lies. High and low parts are not apart yet. */
static __device__ __forceinline__ void load_batch(struct columns *x, const float *m, int batch)
{
#pragma unroll
    for (int i = BATCH * batch; i < BATCH * (batch + 1); i++) {
        const uint4 piece = *(const uint4 *)(m + (i / 2 * 8 + i % 2) * 2 * TILE_K);
        x->high[i][0] = piece.x;
        x->high[i][1] = piece.y;
        x->high[i][2] = piece.z;
        x->high[i][3] = piece.w;
    }
}

/* The batch is in these registers here. */
static __device__ __forceinline__ void pin_batch(struct columns *x, int batch)
{
    wgmma_pin_u32(x->high[BATCH * batch], 4 * BATCH);
    wgmma_pin_u32(x->low[BATCH * batch], 4 * BATCH);
}

static __device__ __forceinline__ void split_batch(struct columns *x, int batch)
{
#pragma unroll
    for (int i = BATCH * batch; i < BATCH * (batch + 1); i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            split_tf32(__uint_as_float(x->high[i][j]), &x->high[i][j], &x->low[i][j]);
    pin_batch(x, batch);
}

/* The columns' high parts times both parts of S, [part][tile], and their low parts times its high
 * parts, [tile]; each { column 2g: row 2t, 2t + 1; column 2g + 1 } */
struct sums {
    float both[2 * MOST_TILES * 4], low[MOST_TILES * 4];
};

/* The products of one batch. */
static __device__ __forceinline__ void multiply_batch(struct sums *sums, const struct columns *x,
                                                      uint64_t rows, int batch, int tiles)
{
    wgmma_fence();
#pragma unroll
    for (int i = BATCH * batch; i < BATCH * (batch + 1); i++) {
        const uint64_t step = rows + i * step_words(tiles) / 4; /* counted in 16 bytes */
        if (tiles == 2) {
            wgmma_m64n32k8_tf32(sums->both, x->high[i], step, i > 0);
            wgmma_m64n16k8_tf32(sums->low, x->low[i], step, i > 0);
        } else {
            wgmma_m64n16k8_tf32(sums->both, x->high[i], step, i > 0);
            wgmma_m64n8k8_tf32(sums->low, x->low[i], step, i > 0);
        }
    }
    wgmma_commit();
}

/* Once all but PENDING batches have been multiplied, the last of these is loaded anew. */
#define LOAD_BEHIND(x, m, batch, PENDING) \
    do {                                  \
        wgmma_wait(PENDING);              \
        pin_batch(x, batch);              \
        load_batch(x, m, batch);          \
    } while (0)

/* Multiplies by the columns, and loads those of the next M, at `next`, once it is ready. A batch is
 * taken apart while those before are multiplied. */
static __device__ __forceinline__ void multiply(struct sums *sums, struct columns *x,
                                                const uint32_t *rows, const float *next,
                                                uint64_t *ready, int parity, int tiles)
{
    const int group_bytes = GROUP_WORDS * sizeof *rows;
    const uint64_t right = wgmma_descriptor(shared_address(rows), 2 * tiles * group_bytes,
                                            group_bytes, WGMMA_SWIZZLE_NONE);
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++) {
        split_batch(x, batch);
        multiply_batch(sums, x, right, batch, tiles);
        if (batch == 1)
            mbarrier_wait(ready, parity);
        if (batch >= 2)
            LOAD_BEHIND(x, next, batch - 2, 2);
    }
    LOAD_BEHIND(x, next, BATCHES - 2, 1);
    LOAD_BEHIND(x, next, BATCHES - 1, 0);
    wgmma_pin_f32(sums->both, 8 * tiles);
    wgmma_pin_f32(sums->low, 4 * tiles);
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

/* The whole warp: M is in registers. */
static __device__ __forceinline__ void leave(struct shared *shared, int place)
{
    __syncwarp(); /* every lane's part */
    if (threadIdx.x % 32 == 0)
        mbarrier_arrive(&shared->used[place]);
}

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
    if (i < c->end && c->begin == 1) {
        store_part(entry, &s, tiles);
        s = b;
        i++;
        entry += c->image_step;
        if (i < c->end)
            load_part(&b, entry, tiles);
    }
    if (i == c->end) {
        store_part(entry, &s, tiles);
        return;
    }

    const int column = 16 * warp + 2 * g, first = transition_offset(4 * t, column);
    int place = 0, parity = 0;
    struct columns columns;
    struct sums sums;
    publish(shared->rows[i % 2], &s, tiles);
    mbarrier_wait(&shared->ready[0], 0);
#pragma unroll
    for (int batch = 0; batch < BATCHES; batch++)
        load_batch(&columns, shared->m[0] + first, batch);
    float2 kept = *(const float2 *)&shared->kept[0][column];
    leave(shared, 0);
    for (; i < c->end; i++) {
        const bool more = i + 1 < c->end;
        /* every warp's part of entry_i is in shared memory; and all warps have left entry_{i-1},
         * whose place entry_{i+1} takes */
        named_barrier_sync(1, 32 * COMBINE_WARPS);
        store_part(entry, &s, tiles); /* the fence of publish() would wait for it */
        entry += c->image_step;
        struct part next_b = b;
        if (more) {
            load_part(&next_b, entry, tiles);
            place = place + 1 == COMBINE_PLACES ? 0 : place + 1;
            parity ^= place == 0;
        } /* else the same M once more, for nothing */
        multiply(&sums, &columns, shared->rows[i % 2], shared->m[place] + first,
                 &shared->ready[place], parity, tiles);
        const float2 next_kept = *(const float2 *)&shared->kept[place][column];
        finish(&s, &sums, kept, &b, tiles);
        publish(shared->rows[(i + 1) % 2], &s, tiles);
        if (more)
            leave(shared, place);
        b = next_b;
        kept = next_kept;
    }
    store_part(entry, &s, tiles);
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
    if (threadIdx.x / 32 < COMBINE_WARPS) {
        setmaxnreg_inc(232);
        walk(a, shared, &c, &p, tiles);
    } else {
        setmaxnreg_dec(40);
        if (threadIdx.x / 32 == COMBINE_WARPS)
            copy_images(shared, &c, &p, tiles);
    }
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
