/* join_sm90.cu: what the state that enters a segment adds to its output, in a split forward.
 *
 *     out_t = (what the segment makes of a zero state)_t + scale S response_t
 *
 * The segment's own part is there in two bf16 terms, out and `rest`. S f and the responses are fp16,
 * f a power of two for each value channel; sums are fp32. A block takes a share of a segment of one
 * value head, 16 tokens a warp and turn: tokens are the rows of the left operand, value channels the
 * columns of the right one. Inner indices may come in any order, so a lane loads 8 of them at once;
 * and columns 2t, 2t + 1 of two tiles of 8 are the channels 4t .. 4t + 3 of 16, which lie together.
 * For a split forward, so on sm_90 only; launched by launch_sm90.c.
 */
#include "cuda/forward_sm90.h"
#include "cuda/ptx/global_access.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/bf16.cuh"
#include "cuda/tile/state_steps.cuh"

enum {
    WARPS = JOIN_THREADS / 32,
    PIECE = 8,           /* fp16 items of 16 bytes */
    LARGEST_LOG2 = 14,   /* of S f */
    BLOCKS = TILE_K / 16 /* of value channels */
};

struct join_shared {
    uint16_t s[TILE_K][TILE_K]; /* S f, fp16; odd rows have their pieces 4 further on (xor) */
    float up[TILE_K];           /* scale / f */
};

/* What a block has to do. */
struct share {
    const float *entry;
    const uint16_t *response, *rest; /* of its first token */
    uint16_t *out;
    int tokens; /* 0: nothing */
};

static __device__ __forceinline__ struct share find_share(const struct fkda_join_args *a)
{
    struct share x = {0};
    const struct fkda_segments *g = &a->segments;
    const unsigned pair = blockIdx.x / (unsigned)a->shares, share = blockIdx.x % (unsigned)a->shares;
    const int64_t index = pair / (unsigned)a->HV, h = pair % (unsigned)a->HV;
    const int tokens = SEGMENT_CHUNK_TOKENS * g->chunks;
    const int64_t n = sequence_of_piece(&a->sequences, index, tokens, g->per_sequence);
    const int64_t slot = a->state_indices.data ? load_index(&a->state_indices, n) : n;
    const struct sequence seq = sequence_at(&a->sequences, n);
    const int64_t segment =
        (index - piece_base(&a->sequences, n, tokens, g->per_sequence)) * tokens;
    const int64_t first = segment + (int64_t)a->share_tokens * share;
    int64_t end = segment + tokens;
    end = end < seq.length ? end : seq.length;
    end = end < first + a->share_tokens ? end : first + a->share_tokens;
    if (segment <= 0 || first >= end || slot < 0 || slot >= a->num_slots)
        return x; /* a first segment's output is whole */
    const int64_t token = seq.begin + first;
    const int64_t row = ((seq.batch * a->sequences.T + token) * a->HV + h) * TILE_K;
    x.entry = g->entry + (index * a->HV + h) * TILE_K * TILE_K;
    x.response = g->response + row;
    x.rest = g->rest + row;
    x.out = (uint16_t *)a->out.data + seq.batch * a->out.stride_b + token * a->out.stride_t +
            h * a->out.stride_h;
    x.tokens = (int)(end - first);
    return x;
}

/* A warp takes every WARPS-th row of S; a lane, four of its items. */
static __device__ __forceinline__ void load_entry(struct join_shared *s, const float *entry,
                                                  float scale)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 8
    for (int row = warp; row < TILE_K; row += WARPS) {
        const float4 x = *(const float4 *)(entry + row * TILE_K + 4 * lane);
        const float m = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
        const int e = (int)(__reduce_max_sync(~0u, __float_as_uint(m)) >> 23) - 127;
        const int wanted = LARGEST_LOG2 - e, f = wanted > 120 ? 120 : wanted;
        const float down = exp2_int(f);
        *(uint2 *)&s->s[row][4 * lane ^ row % 2 * 4 * PIECE] = make_uint2(
            cvt_rn_f16x2(down * x.x, down * x.y), cvt_rn_f16x2(down * x.z, down * x.w));
        if (lane == 0)
            s->up[row] = scale * exp2_int(-f);
    }
}

static __device__ __forceinline__ float add_rest(float x, float high, float rest)
{
    /* where `high` is infinite the rest is not a number */
    return x + (high + (fabsf(rest) < INFINITY ? rest : 0.0f));
}

/* 16 tokens from `first` on, of which `count` exist; the lane's are g and g + 8. */
static __device__ __forceinline__ void join_tokens(const struct fkda_join_args *a,
                                                   const struct join_shared *s,
                                                   const struct share *x, int first)
{
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int64_t step = TILE_K * a->HV;
    int64_t row[2];
    uint4 response[2][4]; /* [token][32 inner indices] */
    uint2 high[BLOCKS][2], rest[BLOCKS][2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        row[r] = min(first + g + 8 * r, x->tokens - 1);
#pragma unroll
        for (int i = 0; i < 4; i++)
            response[r][i] =
                ld_global_stream_u32x4(x->response + row[r] * step + 4 * PIECE * i + PIECE * t);
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            high[i][r] = *(const uint2 *)(x->out + row[r] * a->out.stride_t + 16 * i + 4 * t);
            rest[i][r] = ld_global_stream_u32x2(x->rest + row[r] * step + 16 * i + 4 * t);
        }
    }
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        float d[2][4] = {{0}}; /* [two of the four channels][token] */
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int channel = 16 * i + 4 * (g / 2) + g % 2 + 2 * half;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4 b =
                    *(const uint4 *)&s->s[channel][(4 * j + t ^ channel % 2 * 4) * PIECE];
                const uint32_t low[4] = {response[0][j].x, response[1][j].x, response[0][j].y,
                                         response[1][j].y};
                const uint32_t top[4] = {response[0][j].z, response[1][j].z, response[0][j].w,
                                         response[1][j].w};
                mma_m16n8k16_f16(d[half], low, b.x, b.y);
                mma_m16n8k16_f16(d[half], top, b.z, b.w);
            }
        }
        const float4 up = *(const float4 *)&s->up[16 * i + 4 * t];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint2 y = high[i][r], z = rest[i][r];
            const float o0 = add_rest(up.x * d[0][2 * r], bf16_low(y.x), bf16_low(z.x));
            const float o1 = add_rest(up.y * d[0][2 * r + 1], bf16_high(y.x), bf16_high(z.x));
            const float o2 = add_rest(up.z * d[1][2 * r], bf16_low(y.y), bf16_low(z.y));
            const float o3 = add_rest(up.w * d[1][2 * r + 1], bf16_high(y.y), bf16_high(z.y));
            if (first + g + 8 * r < x->tokens)
                *(uint2 *)(x->out + row[r] * a->out.stride_t + 16 * i + 4 * t) =
                    make_uint2(cvt_rn_bf16x2(o0, o1), cvt_rn_bf16x2(o2, o3));
        }
    }
}

extern "C" __global__ void __launch_bounds__(JOIN_THREADS, 3)
    fkda_join_sm90(const __grid_constant__ struct fkda_join_args a)
{
    __shared__ struct join_shared s;
    const struct share x = find_share(&a);
    if (x.tokens == 0)
        return;
    load_entry(&s, x.entry, a.scale);
    __syncthreads(); /* S is there */
    for (int first = 16 * (threadIdx.x / 32); first < x.tokens; first += 16 * WARPS)
        join_tokens(&a, &s, &x, first);
}
