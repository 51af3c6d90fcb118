/* chunk_walk.cuh: a chunk's turn of a state warpgroup, which holds 64 rows of S in accumulators.
 *
 *     R' = V' - S Kd'    U' = R' (T b)'    O' = S Qd' + U' P'    S <- S diag(2^(G_C - G_0)) + U' Kr
 *
 * (x' is the transpose of x), in steps: read_state, update_state, await_output, end_turn.
 */
#ifndef FKDA_TILE_CHUNK_WALK_CUH
#define FKDA_TILE_CHUNK_WALK_CUH

#include "cuda/tile/chunk_state.cuh"

/* What a thread carries through a turn: S Kd' and O' of the warp's 16 channels. One for each turn:
 * what is left undefined must not stay alive around a loop. */
struct turn {
    float u[16], o[16];
};

/* Starts S Kd' and S Qd', while S takes the chunk's decay. The scale has been chosen. */
static __device__ __forceinline__ void read_state(struct turn *x, struct walker *w,
                                                  const struct chunk *chunk, int lane)
{
    uint32_t sf[STEPS][4]; /* S f as an operand */
    const float *decay = chunk->decay + 2 * (lane % 4);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        float *left = w->s[2 * step], *right = w->s[2 * step + 1];
        const float2 d = *(const float2 *)(decay + 16 * step);
        const float2 e = *(const float2 *)(decay + 16 * step + 8);
        sf[step][0] = cvt_rn_f16x2(left[0], left[1]);
        sf[step][1] = cvt_rn_f16x2(left[2], left[3]);
        sf[step][2] = cvt_rn_f16x2(right[0], right[1]);
        sf[step][3] = cvt_rn_f16x2(right[2], right[3]);
        left[0] *= d.x;
        left[1] *= d.y;
        left[2] *= d.x;
        left[3] *= d.y;
        right[0] *= e.x;
        right[1] *= e.y;
        right[2] *= e.x;
        right[3] *= e.y;
    }
    const uint64_t kd = wgmma_descriptor(shared_address(chunk->rows), 0, 1024, WGMMA_SWIZZLE_128);
    wgmma_pin_u32(&sf[0][0], 4 * STEPS);
    wgmma_pin_f32(x->u, 16);
    wgmma_pin_f32(x->o, 16);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; step++) /* descriptors count in 16 bytes */
        wgmma_m64n32k16(x->u, sf[step], kd + CHUNK_HALF / 16 * (step / 4) + 2 * (step % 4),
                        step > 0);
    wgmma_commit();
#pragma unroll
    for (int step = 0; step < STEPS; step++) /* Qd: 32 rows on; runs while R' is made */
        wgmma_m64n32k16(x->o, sf[step], kd + 256 + CHUNK_HALF / 16 * (step / 4) + 2 * (step % 4),
                        step > 0);
    wgmma_commit();
}

/* R' and U', then starts what is left of O' and S <- S + U' Kr. Waits for T b by `solved`, unless
 * it is known to be there. */
static __device__ __forceinline__ void update_state(struct turn *x, struct walker *w,
                                                    const uint32_t v[4][2],
                                                    const struct chunk *chunk, uint64_t *solved,
                                                    int phase, int is_solved)
{
    wgmma_wait(1);
    wgmma_pin_f32(x->u, 16);
    const float f[2] = {exp2_int(w->f[0]), exp2_int(w->f[1])};
    uint32_t uf[2][4]; /* R' */
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            uf[j / 2][2 * (j % 2) + h] =
                cvt_rn_f16x2(bf16_low(v[j][h]) * f[h] - x->u[4 * j + 2 * h],
                             bf16_high(v[j][h]) * f[h] - x->u[4 * j + 2 * h + 1]);
    mbarrier_finish(is_solved, solved, phase);
    const uint64_t p = wgmma_descriptor(shared_address(chunk->p), 128, 512, WGMMA_SWIZZLE_NONE);
    const uint64_t tb = wgmma_descriptor(shared_address(chunk->tb), 128, 256, WGMMA_SWIZZLE_NONE);
    const int block = sizeof chunk->tb[0] / 16; /* descriptors count in 16 bytes */
    float y[2][8];                              /* U' of the first 16 tokens; of the last */
    wgmma_wait(0);
    wgmma_pin_f32(x->o, 16);
    wgmma_pin_u32(&uf[0][0], 8);
    wgmma_pin_f32(&y[0][0], 16);
    wgmma_fence();
    wgmma_m64n16k16_mn(y[0], uf[0], tb, 0);
    wgmma_m64n16k16_mn(y[1], uf[0], tb + block, 0);
    wgmma_m64n16k16_mn(y[1], uf[1], tb + 2 * block, 1);
    wgmma_m64n16k16_mn(y[0], uf[0], tb + 3 * block, 1); /* the rests */
    wgmma_m64n16k16_mn(y[1], uf[1], tb + 4 * block, 1);
    wgmma_commit();
    wgmma_wait(0);
    wgmma_pin_f32(&y[0][0], 16);
    uint32_t uh[2][4];
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            uh[j / 2][2 * (j % 2) + h] =
                cvt_rn_f16x2(y[j / 2][4 * (j % 2) + 2 * h], y[j / 2][4 * (j % 2) + 2 * h + 1]);
    const uint64_t kr = wgmma_descriptor(shared_address(chunk->rows[0][2 * CHUNK]), CHUNK_HALF,
                                         1024, WGMMA_SWIZZLE_128);
    wgmma_pin_u32(&uh[0][0], 8);
    wgmma_pin_f32(x->o, 16);
    wgmma_pin_f32(&w->s[0][0], 4 * GROUPS);
    wgmma_fence();
    wgmma_m64n32k16(x->o, uh[0], p, 1);
    wgmma_m64n32k16(x->o, uh[1], p + 16, 1);
    wgmma_commit();
#pragma unroll
    for (int step = 0; step < 2; step++) {
        wgmma_m64n128k16(&w->s[0][0], uh[step], kr + 128 * step, 1);
        wgmma_m64n128k16(&w->s[0][0], uh[step], kr + 256 + 128 * step, 1); /* the rest */
    }
    wgmma_commit();
}

/* O' f is in x->o. */
static __device__ __forceinline__ void await_output(struct turn *x)
{
    wgmma_wait(1);
    wgmma_pin_f32(x->o, 16);
}

/* O = scale O' without f. */
static __device__ __forceinline__ void scale_output(float o[16], const struct walker *w,
                                                    float scale)
{
    const float down[2] = {scale * exp2_int(-w->f[0]), scale * exp2_int(-w->f[1])};
#pragma unroll
    for (int j = 0; j < 16; j++)
        o[j] *= down[j % 4 / 2];
}

/* S is whole, and nothing reads the chunk any more. */
static __device__ __forceinline__ void end_turn(struct walker *w)
{
    wgmma_wait(0);
    wgmma_pin_f32(&w->s[0][0], 4 * GROUPS);
}

/* Rows of out from turn_rows(): those of the chunk's first `count` tokens. out: of token 0. */
static __device__ __forceinline__ void store_out(uint16_t *out, int64_t stride, const uint4 rows[2],
                                                 int count, int piece, int lane)
{
    const int token = row_of_lane(lane);
    uint16_t *const to = out + token * stride + 8 * piece;
    if (token < count)
        st_global_u32x4(to, rows[0]);
    if (token + 16 < count)
        st_global_u32x4(to + 16 * stride, rows[1]);
}

#endif
