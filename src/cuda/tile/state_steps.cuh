/* state_steps.cuh: the state of one warp, 16 value channels, in accumulator registers: loading,
 * storing, scaling, checkpoints. Shared by every kernel that walks a state.
 *
 * S and v enter the recurrence linearly, so every value channel carries a power of two f, chosen
 * from the entering state and the tile's values alone, with |S| f, |v| f < 2^(target + 1): products
 * see S f and v f in fp16, the accumulators hold S f exactly, and f leaves with the output.
 */
#ifndef FKDA_TILE_STATE_STEPS_CUH
#define FKDA_TILE_STATE_STEPS_CUH

#include "cuda/ptx/global_access.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/bf16.cuh"
#include "cuda/tile_map.cuh"

enum { GROUPS = TILE_K / 8, F_STEP = 4 };

/* 2^e for -126 <= e <= 127 */
static __device__ __forceinline__ float exp2_int(int e)
{
    return __int_as_float((e + 127) << 23);
}

/* The lane's part of one value channel pair (rows g and g + 8 of the warp's 16). */
struct walker {
    float s[GROUPS][4]; /* S f: channels 8 j + 2t, + 1 of row g, then of row g + 8 */
    int f[2];           /* log2 of each row's scale */
};

static __device__ __forceinline__ void load_state(struct walker *w, const void *image, int is_f32,
                                                  int row, int t)
{
    w->f[0] = w->f[1] = 0;
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int64_t at = (int64_t)(row + 8 * r) * TILE_K + 8 * j + 2 * t;
            float2 x = make_float2(0.0f, 0.0f);
            if (image && is_f32) {
                x = ld_global_f32x2((const float *)image + at);
            } else if (image) {
                const uint32_t pair = ld_global_u32((const uint16_t *)image + at);
                x = make_float2(bf16_low(pair), bf16_high(pair));
            }
            w->s[j][2 * r] = x.x;
            w->s[j][2 * r + 1] = x.y;
        }
}

/* x 2^-e, in two steps since 2^-e alone may leave the range of fp32. */
static __device__ __forceinline__ float scale_down(float x, int e)
{
    return x * exp2_int(-(e / 2)) * exp2_int(-(e - e / 2));
}

static __device__ __forceinline__ void store_state(const struct walker *w, void *image, int is_f32,
                                                   int row, int t)
{
    __builtin_assume(__isGlobal(image));
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int64_t at = (int64_t)(row + 8 * r) * TILE_K + 8 * j + 2 * t;
            const float x = scale_down(w->s[j][2 * r], w->f[r]);
            const float y = scale_down(w->s[j][2 * r + 1], w->f[r]);
            if (is_f32)
                *(float2 *)((float *)image + at) = make_float2(x, y);
            else
                *(uint32_t *)((uint16_t *)image + at) = cvt_rn_bf16x2(x, y);
        }
}

/* Exponent of the largest magnitude of a row held by a quad (four lanes), of state and values. */
static __device__ __forceinline__ int quad_exponent(float state_max, int f, float value_max)
{
    /* floor(log2 x) from the exponent field; a zero or denormal gives -127, infinity 128 */
    int e = (__float_as_int(state_max) >> 23) - 127 - f;
    const int ev = (__float_as_int(value_max) >> 23) - 127;
    e = e > ev ? e : ev;
    int other = __shfl_xor_sync(~0u, e, 1);
    e = e > other ? e : other;
    other = __shfl_xor_sync(~0u, e, 2);
    return e > other ? e : other;
}

/* Chooses each row's f for a tile, of whose values this lane has seen value_max, and brings S to
 * it; both steps are exact. f is a multiple of F_STEP, so that it changes rarely; the 2^-25 of the
 * row's maximum that fp16 still resolves leaves room. */
static __device__ __forceinline__ void rescale(struct walker *w, const float value_max[2],
                                               int target)
{
    float m[2][4] = {{0}}; /* four partial maxima a row: a short chain */
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            m[r][j % 4] =
                fmaxf(m[r][j % 4], fmaxf(fabsf(w->s[j][2 * r]), fabsf(w->s[j][2 * r + 1])));
    int f[2], step[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float of_state = fmaxf(fmaxf(m[r][0], m[r][1]), fmaxf(m[r][2], m[r][3]));
        const int wanted = (target - quad_exponent(of_state, w->f[r], value_max[r])) & -F_STEP;
        f[r] = wanted < -120 ? -120 : wanted > 120 ? 120 : wanted;
        step[r] = f[r] - w->f[r];
        w->f[r] = f[r];
    }
    if (__any_sync(~0u, step[0] | step[1])) {
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                w->s[j][i] = scale_down(w->s[j][i], -step[i / 2]);
    }
}

static __device__ __forceinline__ int tokens_of_tile(int length, int tile)
{
    return min((int)TILE_TOKENS, length - tile * TILE_TOKENS);
}

static __device__ __forceinline__ void *state_image(const struct fkda_cuda_states *states,
                                                    int64_t slot, int h)
{
    const int64_t at = slot * states->stride_slot + h * states->stride_h;
    return states->data ? (char *)states->data + at * (states->is_f32 ? 4 : 2) : (void *)0;
}

/* The checkpoints of one sequence, in ascending order of offset; one that is out of order, no
 * multiple of 16 or beyond the end is passed over. */
struct checkpoints {
    int64_t next, last;
    int offset; /* tokens at which `next` is due; -1: none left */
    int length; /* of the sequence */
};

static __device__ __forceinline__ void next_checkpoint(const struct fkda_recurrence_args *a,
                                                       struct checkpoints *c, int after)
{
    for (c->offset = -1; c->next < c->last; c->next++) {
        const int64_t offset = load_index(&a->checkpoint_offsets, c->next);
        if (offset >= after && offset % TILE_TOKENS == 0 && offset <= c->length) {
            c->offset = (int)offset;
            return;
        }
    }
}

static __device__ __forceinline__ struct checkpoints
first_checkpoint(const struct fkda_recurrence_args *a, int64_t n, int length)
{
    struct checkpoints c = {0, 0, -1, length};
    if (!a->checkpoint_state.data)
        return c;
    if (a->checkpoint_indptr.data) {
        c.next = load_index(&a->checkpoint_indptr, n);
        c.last = load_index(&a->checkpoint_indptr, n + 1);
        c.next = c.next < 0 ? 0 : c.next;
        c.last = c.last > a->num_checkpoints ? a->num_checkpoints : c.last;
    } else {
        c.next = n * a->checkpoints_per_sequence;
        c.last = c.next + a->checkpoints_per_sequence;
    }
    next_checkpoint(a, &c, 0);
    return c;
}

/* Writes every checkpoint that is due after `tokens` tokens. */
static __device__ __forceinline__ void store_checkpoints(const struct fkda_recurrence_args *a,
                                                         struct checkpoints *due,
                                                         const struct walker *w, int tokens, int h,
                                                         int row, int t)
{
    while (due->offset == tokens) {
        store_state(w, state_image(&a->checkpoint_state, due->next, h), a->checkpoint_state.is_f32,
                    row, t);
        due->next++;
        next_checkpoint(a, due, tokens);
    }
}

#endif
