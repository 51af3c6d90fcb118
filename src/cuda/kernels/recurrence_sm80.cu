/* recurrence_sm80.cu: walks the state of every (sequence, value head) over its tile images.
 *
 *     U' = V' (T b)' - S (T b Kd)'      O' = S Qd' + U' P'      S <- S diag(2^G_C) + U' Kr
 *
 * A warp owns 16 value channels: S [16, 128] stays in its accumulators in fp32, and nothing is
 * passed between warps, which only share the images that cp.async brings through a ring in shared
 * memory. Operands of the products are fp16. S and v enter linearly, so every value channel carries
 * a power of two f, chosen from the entering state and the tile's values alone, with |S| f, |v| f <
 * 2^(target + 1): the products see S f and v f, the accumulators hold S f exactly, and f leaves
 * with the output. Launched by launch_sm80.c after prepare_sm80.cu; one block per (sequence, head,
 * slice of channels).
 */
#include "cuda/ptx/async_copy.cuh"
#include "cuda/tile/state_steps.cuh"

/* v of one tile and warp in the ring: [16 tokens][16 channels] bf16 in 16-byte pieces, placed so
 * that the eight rows of one ldmatrix tile lie in different banks. */
static __device__ __forceinline__ int value_offset(int token, int half)
{
    return 32 * token + 16 * (half ^ (token >> 2 & 1));
}

/* Lane l brings piece l % 2 of token l / 2; zeros past the end of the sequence. */
static __device__ __forceinline__ void copy_values(char *stage, const uint16_t *v, int64_t stride_t,
                                                   int count, int lane, int aligned)
{
    const int token = lane / 2, half = lane % 2;
    char *to = stage + value_offset(token, half);
    const uint16_t *from = v + token * stride_t + 8 * half;
    if (token >= count) {
        *(uint4 *)to = make_uint4(0, 0, 0, 0);
    } else if (aligned) {
        cp_async_16(to, from);
    } else {
#pragma unroll 1
        for (int i = 0; i < 8; i++)
            ((uint16_t *)to)[i] = from[i];
    }
}

/* out of one tile: o[token block] has rows (channels) g, g + 8 and columns (tokens) 2t, 2t + 1. */
static __device__ __forceinline__ void store_output(uint16_t *out, int64_t stride_t, float o[2][4],
                                                    int count, int lane, int wide)
{
#pragma unroll
    for (int block = 0; block < 2; block++) {
        const int token = 8 * block + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t pair =
                movmatrix_trans(cvt_rn_bf16x2(o[block][2 * half], o[block][2 * half + 1]));
            if (token < count) {
                uint16_t *p = out + token * stride_t + 8 * half + 2 * (lane % 4);
                if (wide) {
                    *(uint32_t *)p = pair;
                } else {
                    p[0] = (uint16_t)pair;
                    p[1] = (uint16_t)(pair >> 16);
                }
            }
        }
    }
}

/* One tile: image and values in shared memory; output accumulators (scaled by f) out. */
static __device__ __forceinline__ void walk_tile(struct walker *w, const char *image,
                                                 const char *values, float o[2][4], int lane,
                                                 int target)
{
    /* v' as an A operand: a[2 token block + channel block], rows are channels */
    uint32_t raw[4];
    ldmatrix_x4_trans(raw, values + value_offset(8 * (lane / 16) + lane % 8, lane / 8 % 2));
    float v[4][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i][0] = bf16_low(raw[i]);
        v[i][1] = bf16_high(raw[i]);
    }
    const float value_max[2] = {
        fmaxf(fmaxf(fabsf(v[0][0]), fabsf(v[0][1])), fmaxf(fabsf(v[2][0]), fabsf(v[2][1]))),
        fmaxf(fmaxf(fabsf(v[1][0]), fabsf(v[1][1])), fmaxf(fabsf(v[3][0]), fabsf(v[3][1]))),
    };
    rescale(w, value_max, target);
    const float f0 = exp2_int(w->f[0]), f1 = exp2_int(w->f[1]);
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float f = i % 2 ? f1 : f0;
        a[i] = cvt_rn_f16x2(v[i][0] * f, v[i][1] * f);
    }
    float u[2][4] = {{0}}, u2[2][4] = {{0}}; /* two chains of products, half as long */
    const uint4 tb = *(const uint4 *)(image + IMAGE_T + 16 * lane);
    mma_m16n8k16_f16(u[0], a, tb.x, tb.y);
    mma_m16n8k16_f16(u[1], a, tb.z, tb.w);
#pragma unroll
    for (int i = 0; i < 4; i++)
        o[0][i] = o[1][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const float *left = w->s[2 * step], *right = w->s[2 * step + 1];
        const uint32_t s[4] = {cvt_rn_f16x2(left[0], left[1]), cvt_rn_f16x2(left[2], left[3]),
                               cvt_rn_f16x2(right[0], right[1]), cvt_rn_f16x2(right[2], right[3])};
        const uint4 wf = *(const uint4 *)(image + IMAGE_W + 512 * step + 16 * lane);
        mma_m16n8k16_f16(step % 2 ? u2[0] : u[0], s, wf.x, wf.y);
        mma_m16n8k16_f16(step % 2 ? u2[1] : u[1], s, wf.z, wf.w);
        const uint4 qf = *(const uint4 *)(image + IMAGE_Q + 512 * step + 16 * lane);
        mma_m16n8k16_f16(o[0], s, qf.x, qf.y);
        mma_m16n8k16_f16(o[1], s, qf.z, qf.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u[0][i] += u2[0][i];
        u[1][i] += u2[1][i];
    }
    const uint32_t uf[4] = {cvt_rn_f16x2(u[0][0], u[0][1]), cvt_rn_f16x2(u[0][2], u[0][3]),
                            cvt_rn_f16x2(u[1][0], u[1][1]), cvt_rn_f16x2(u[1][2], u[1][3])};
    const uint4 pf = *(const uint4 *)(image + IMAGE_P + 16 * lane);
    mma_m16n8k16_f16(o[0], uf, pf.x, pf.y);
    mma_m16n8k16_f16(o[1], uf, pf.z, pf.w);
    const float *decay = (const float *)(image + IMAGE_D) + 2 * (lane % 4);
#pragma unroll
    for (int pair = 0; pair < GROUPS / 2; pair++) {
        uint32_t kr[4], rest[4]; /* [channel group][token block] */
        ldmatrix_x4_trans(kr, image + IMAGE_K + 512 * pair + 16 * lane);
        ldmatrix_x4_trans(rest, image + IMAGE_L + 512 * pair + 16 * lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *s = w->s[2 * pair + half];
            const float2 d = *(const float2 *)(decay + 16 * pair + 8 * half);
            s[0] *= d.x;
            s[1] *= d.y;
            s[2] *= d.x;
            s[3] *= d.y;
            mma_m16n8k16_f16(s, uf, kr[2 * half], kr[2 * half + 1]);
            mma_m16n8k16_f16(s, uf, rest[2 * half], rest[2 * half + 1]);
        }
    }
}

/* `threads` is a literal, so that every offset below is an immediate. */
static __device__ __forceinline__ void copy_image(char *stage, const char *image, int threads)
{
    stage += 16 * threadIdx.x;
    image += 16 * threadIdx.x;
#pragma unroll
    for (int i = 0; i < IMAGE_BYTES; i += 16 * threads)
        if (i + 16 * threads <= IMAGE_BYTES || i + 16 * (int)threadIdx.x < IMAGE_BYTES)
            cp_async_16(stage + i, image + i);
}

/* Where block `blockIdx.x` works. */
struct chain {
    int64_t n;
    int h, row; /* the lane's first value channel is row; the second row + 8 */
    int64_t slot;
    struct sequence seq;
};

static __device__ __forceinline__ struct chain find_chain(const struct fkda_recurrence_args *a,
                                                          int warps)
{
    struct chain c;
    const unsigned block = blockIdx.x, slices = (unsigned)a->slices, HV = (unsigned)a->HV;
    c.n = block / slices / HV;
    c.h = (int)(block / slices % HV);
    c.row = 16 * ((int)(block % slices) * warps + (int)threadIdx.x / 32);
    c.slot = a->state_indices.data ? load_index(&a->state_indices, c.n) : c.n;
    c.seq = sequence_at(&a->sequences, c.n);
    return c;
}

static __device__ __forceinline__ void walk(const struct fkda_recurrence_args *a, char *ring,
                                            int warps)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const struct chain chain = find_chain(a, warps);
    const int length = (int)chain.seq.length, tiles = (length + TILE_TOKENS - 1) / TILE_TOKENS;
    const int h = chain.h, row = chain.row + lane / 4, t = lane % 4;
    const int64_t out_step = TILE_TOKENS * a->out.stride_t, v_step = TILE_TOKENS * a->v.stride_t;
    uint16_t *out = (uint16_t *)a->out.data + chain.seq.batch * a->out.stride_b +
                    chain.seq.begin * a->out.stride_t + h * a->out.stride_h + chain.row;
    if (chain.slot < 0 || chain.slot >= a->num_slots) { /* padding: zero output, no state */
        float zero[2][4] = {{0}};
        for (int i = 0; i < tiles; i++, out += out_step)
            store_output(out, a->out.stride_t, zero, tokens_of_tile(length, i), lane, a->wide_out);
        return;
    }
    const uint16_t *v = (const uint16_t *)a->v.data + chain.seq.batch * a->v.stride_b +
                        chain.seq.begin * a->v.stride_t + h * a->v.stride_h + chain.row;
    const int64_t image_step = (int64_t)a->HV * IMAGE_BYTES;
    const char *image =
        a->images + (tile_base(&a->sequences, chain.n) * a->HV + h) * (int64_t)IMAGE_BYTES;

    /* a stage: the image, then each warp's values */
    const int stage_bytes = IMAGE_BYTES + VALUE_BYTES * warps;
    char *const values = ring + IMAGE_BYTES + VALUE_BYTES * warp;
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < tiles) {
            copy_image(ring + i * stage_bytes, image, 32 * warps);
            copy_values(values + i * stage_bytes, v, a->v.stride_t, tokens_of_tile(length, i), lane,
                        a->aligned_v);
        }
        cp_async_commit();
        image += image_step;
        v += v_step;
    }
    struct walker w;
    load_state(&w, state_image(&a->initial_state, chain.slot, h), a->initial_state.is_f32, row, t);
    struct checkpoints due = first_checkpoint(a, chain.n, length);

    int stage = 0, ahead_stage = (STAGES - 1) * stage_bytes; /* byte offsets in the ring */
    for (int i = 0; i < tiles; i++) {
        store_checkpoints(a, &due, &w, i * TILE_TOKENS, h, row, t);
        cp_async_wait(STAGES - 2);
        /* image i has arrived for every thread; and every warp has left image i - 1, whose place
         * the next copy takes */
        __syncthreads();
        if (i + STAGES - 1 < tiles) {
            copy_image(ring + ahead_stage, image, 32 * warps);
            copy_values(values + ahead_stage, v, a->v.stride_t,
                        tokens_of_tile(length, i + STAGES - 1), lane, a->aligned_v);
        }
        cp_async_commit();

        float o[2][4];
        walk_tile(&w, ring + stage, values + stage, o, lane, a->target_log2);
        const float down[2] = {a->scale * exp2_int(-w.f[0]), a->scale * exp2_int(-w.f[1])};
#pragma unroll
        for (int j = 0; j < 8; j++)
            o[j / 4][j % 4] *= down[j % 4 / 2];
        store_output(out, a->out.stride_t, o, tokens_of_tile(length, i), lane, a->wide_out);

        image += image_step;
        v += v_step;
        out += out_step;
        stage = stage == (STAGES - 1) * stage_bytes ? 0 : stage + stage_bytes;
        ahead_stage = ahead_stage == (STAGES - 1) * stage_bytes ? 0 : ahead_stage + stage_bytes;
    }
    if (length % TILE_TOKENS == 0)
        store_checkpoints(a, &due, &w, length, h, row, t);
    if (a->final_state.data)
        store_state(&w, state_image(&a->final_state, chain.slot, h), a->final_state.is_f32, row, t);
}

/* By warps in a block: 16 value channels each. */
#define DEFINE_RECURRENCE(warps)                                                              \
    extern "C" __global__ void __launch_bounds__(32 * warps, 8 / warps)                       \
        fkda_recurrence_##warps##_sm80(const __grid_constant__ struct fkda_recurrence_args a) \
    {                                                                                         \
        extern __shared__ __align__(16) char ring[]; /* STAGES stages */                      \
        walk(&a, ring, warps);                                                                \
    }

DEFINE_RECURRENCE(1)
DEFINE_RECURRENCE(2)
DEFINE_RECURRENCE(4)
DEFINE_RECURRENCE(8)
