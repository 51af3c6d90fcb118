/* chunk_items.cuh: what blocks of the fused Hopper kernels work on, and copies that bring it. */
#ifndef FKDA_TILE_CHUNK_ITEMS_CUH
#define FKDA_TILE_CHUNK_ITEMS_CUH

#include "cuda/tile/chunk.cuh"
#include "cuda/tile/state_steps.cuh"

/* A whole sequence. Without chunks and exit there is nothing to do but, maybe, padding. */
static __device__ __forceinline__ void find_sequence(const struct fkda_forward_sm90_args *a,
                                                     struct head *w, int64_t n, int h)
{
    const struct fkda_recurrence_args *r = &a->recurrence;
    const int64_t slot = r->state_indices.data ? load_index(&r->state_indices, n) : n;
    w->h = h;
    w->seq = sequence_at(&r->sequences, n);
    w->length = (int)w->seq.length;
    w->out = (uint16_t *)r->out.data + w->seq.batch * r->out.stride_b +
             w->seq.begin * r->out.stride_t + h * r->out.stride_h;
    if (slot < 0 || slot >= r->num_slots) {
        w->padding = 1;
        return;
    }
    w->chunks = (w->length + CHUNK - 1) / CHUNK;
    w->entry = state_image(&r->initial_state, slot, h);
    w->entry_is_f32 = r->initial_state.is_f32;
    w->exit = state_image(&r->final_state, slot, h);
    w->exit_is_f32 = r->final_state.is_f32;
}

/* Padding: zero rows, no state. */
static __device__ __forceinline__ void clear_output(const struct fkda_recurrence_args *r,
                                                    const struct head *w)
{
    for (int64_t i = threadIdx.x; i < 16 * (int64_t)w->length; i += THREADS)
        *(uint4 *)(w->out + i / 16 * r->out.stride_t + 8 * (i % 16)) = make_uint4(0, 0, 0, 0);
    __syncwarp(); /* lanes left the loop apart */
}

/* Starts the copies of a chunk's rows of one tensor, both halves of its channels. */
static __device__ __forceinline__ void fetch(const CUtensorMap *map, char *rows, int half_bytes,
                                             uint64_t *barrier, struct source x, int h, int chunk)
{
    if (elect_one()) {
        mbarrier_arrive_expect(barrier, 2 * CHUNK * 128);
#pragma unroll
        for (int half = 0; half < 2; half++)
            tensor_copy_4d(rows + half_bytes * half, map, HALF_K * half, h, x.row + CHUNK * chunk,
                           x.batch, barrier);
    }
    __syncwarp(); /* one lane was alone */
}

/* The thread's channel of a head's dt_bias, whose load is not waited for. */
static __device__ __forceinline__ float load_bias(const struct fkda_prepare_args *p, int h,
                                                  int thread)
{
    return p->dt_bias ? p->dt_bias[h * p->dt_bias_stride_h + thread] : 0.0f;
}

/* Raw beta of the lane's token of a chunk, in the two warps that have rows of A. It is loaded a
 * turn before its use. */
static __device__ __forceinline__ uint32_t load_chunk_beta(const struct fkda_prepare_args *p,
                                                           struct source x, int chunk, int warp,
                                                           int lane)
{
    return warp < 2 && lane < count_tokens(x, chunk)
               ? load_raw_beta(p, x.batch, x.row + CHUNK * chunk + lane, x.h)
               : 0;
}

/* What is above the diagonals of P and T stays zero. By all threads of a block. */
static __device__ __forceinline__ void clear_triangles(struct chunk *chunk)
{
    for (int i = threadIdx.x; i < (int)(sizeof(struct chunk) - offsetof(struct chunk, p)) / 16;
         i += THREADS)
        ((uint4 *)chunk->p)[i] = make_uint4(0, 0, 0, 0);
}

static __device__ __forceinline__ void clear_workshop(struct workshop *shop)
{
    for (int i = threadIdx.x; i < (int)sizeof shop->t / 16; i += THREADS)
        ((uint4 *)shop->t)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < CHUNK) { /* see t_rest() */
        float *const rest = &shop->a[threadIdx.x][CHUNK];
        *(float4 *)rest = *(float4 *)(rest + 4) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

#endif
