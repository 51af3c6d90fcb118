/* join_sm90.cu: what the state that enters a segment adds to its output, in a split forward.
 *
 *     out_t = forced_t + scale S response_t
 *
 * forced is what the segment makes of a zero state, response_t what it makes of each row of the
 * identity (segments.h). S f and the responses are fp16, f a power of two for each value channel,
 * and sums are fp32, as where the fused kernel multiplies S by Qd. A block takes some chunks of a
 * segment of one value head; a warp has 16 value channels of them, whose rows of S stay in its
 * registers. For a split forward, so on sm_90 only; launched by launch_sm90.c.
 */
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/tile/chunk_state.cuh"

enum {
    PLACES = 4,      /* of responses in shared memory */
    TARGET_LOG2 = 11 /* |S| f is below twice 2^this */
};

struct join_shared {
    char response[PLACES][RESPONSE_BYTES];
    char out[2][CHUNK][128]; /* as struct chunk has it */
    uint64_t full[PLACES];   /* the responses are there */
};

/* What a block has to do. */
struct share {
    const char *response, *forced; /* of its first chunk */
    const float *entry;
    uint16_t *out;
    int tokens; /* 0: nothing */
};

static __device__ __forceinline__ struct share find_share(const struct fkda_join_args *a)
{
    struct share x = {0};
    const struct fkda_segments *g = &a->segments;
    const int64_t image = blockIdx.x / (unsigned)a->shares; /* the number of the segment's */
    const int first_chunk = (int)(blockIdx.x % (unsigned)a->shares) * a->share_chunks;
    const int64_t piece = image / (unsigned)a->HV + g->lead - 1, h = image % (unsigned)a->HV;
    const int tokens = CHUNK * g->chunks;
    const int64_t n = sequence_of_piece(&a->sequences, piece, tokens, g->per_sequence);
    const int64_t slot = a->state_indices.data ? load_index(&a->state_indices, n) : n;
    const struct sequence seq = sequence_at(&a->sequences, n);
    const int64_t segment =
        (piece - piece_base(&a->sequences, n, tokens, g->per_sequence)) * tokens;
    const int64_t left = seq.length - segment, length = left < tokens ? left : tokens;
    const int64_t first = CHUNK * first_chunk, token = seq.begin + segment + first;
    const int64_t most = CHUNK * a->share_chunks;
    if (segment < (int64_t)tokens * g->lead || first >= length || slot < 0 || slot >= a->num_slots)
        return x; /* the output of a first segment is whole */
    const int64_t chunk = image * g->chunks + first_chunk;
    x.response = g->response + chunk * RESPONSE_BYTES;
    x.forced = g->forced + chunk * FORCED_BYTES;
    x.entry = g->entry + image * TILE_K * TILE_K;
    x.out = (uint16_t *)a->out.data + seq.batch * a->out.stride_b + token * a->out.stride_t +
            h * a->out.stride_h;
    x.tokens = (int)(length - first < most ? length - first : most);
    return x;
}

static __device__ __forceinline__ void fetch_response(struct join_shared *s, const struct share *x,
                                                      int chunk)
{
    uint64_t *const full = &s->full[chunk % PLACES];
    mbarrier_arrive_expect(full, RESPONSE_BYTES);
    bulk_copy(s->response[chunk % PLACES], x->response + chunk * (int64_t)RESPONSE_BYTES,
              RESPONSE_BYTES, full);
}

static __device__ __forceinline__ void load_forced(uint4 to[3], const struct share *x, int chunk)
{
#pragma unroll
    for (int i = 0; i < 3; i++)
        to[i] = ld_global_stream_u32x4(x->forced + chunk * (int64_t)FORCED_BYTES +
                                       FORCED_BYTES / 3 * i + 16 * threadIdx.x);
}

/* The warp's rows of S as left operands, and scale / f of the lane's two. */
static __device__ __forceinline__ void load_entry(uint32_t sf[STEPS][4], float up[2],
                                                  const struct share *x, float scale)
{
    const int lane = threadIdx.x % 32;
    const float no_values[2] = {0.0f, 0.0f};
    struct walker w;
    load_state(&w, x->entry, 1, 16 * (threadIdx.x / 32) + lane / 4, lane % 4);
    rescale(&w, no_values, TARGET_LOG2);
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *const pair = &w.s[2 * step + i / 2][2 * (i % 2)];
            sf[step][i] = cvt_rn_f16x2(pair[0], pair[1]);
        }
    up[0] = scale * exp2_int(-w.f[0]);
    up[1] = scale * exp2_int(-w.f[1]);
}

/* o' = S response' */
static __device__ __forceinline__ void multiply(float o[16], const uint32_t sf[STEPS][4],
                                                const char *response)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 16; i++)
        o[i] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; step += 2)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t b[4];
            ldmatrix_x4(b, response + response_at(8 * j + lane % 8, 2 * step + lane / 8));
            mma_m16n8k16_f16(o + 4 * j, sf[step], b[0], b[1]);
            mma_m16n8k16_f16(o + 4 * j, sf[step + 1], b[2], b[3]);
        }
}

static __device__ __forceinline__ void join_chunks(const struct fkda_join_args *a,
                                                   struct join_shared *s, const struct share *x)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
    const int chunks = (x->tokens + CHUNK - 1) / CHUNK, token = row_of_lane(lane);
    uint16_t *out = x->out + token * a->out.stride_t + 16 * warp + 8 * (lane % 2);
    uint32_t sf[STEPS][4];
    uint4 forced[3], next[3];
    float up[2];
    load_entry(sf, up, x, a->scale);
    load_forced(next, x, 0);
    for (int i = 0; i < chunks; i++) {
        float o[16], f[16];
#pragma unroll
        for (int j = 0; j < 3; j++)
            forced[j] = next[j];
        if (i + 1 < chunks)
            load_forced(next, x, i + 1);
        mbarrier_wait(&s->full[i % PLACES], i / PLACES % 2);
        multiply(o, sf, s->response[i % PLACES]);
        unpack_forced(f, forced);
#pragma unroll
        for (int j = 0; j < 16; j++)
            o[j] = fmaf(up[j % 4 / 2], o[j], f[j]);
        uint4 rows[2];
        turn_rows(rows, s->out[group][0], o, warp % 4, lane, 0);
        if (CHUNK * i + token < x->tokens)
            st_global_u32x4(out, rows[0]);
        if (CHUNK * i + token + 16 < x->tokens)
            st_global_u32x4(out + 16 * a->out.stride_t, rows[1]);
        out += CHUNK * a->out.stride_t;
        __syncthreads(); /* all warps have read the responses, and their rows of out */
        if (threadIdx.x == 0 && i + PLACES < chunks)
            fetch_response(s, x, i + PLACES);
    }
}

extern "C" __global__ void __launch_bounds__(JOIN_THREADS, 2)
    fkda_join_sm90(const __grid_constant__ struct fkda_join_args a)
{
    __shared__ __align__(128) struct join_shared s;
    const struct share x = find_share(&a);
    griddepcontrol_wait(); /* also for nothing to do: a later kernel waits for this one */
    if (x.tokens == 0)
        return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < PLACES; i++)
            mbarrier_init(&s.full[i], 1);
        mbarrier_init_fence();
        for (int i = 0; i < PLACES && CHUNK * i < x.tokens; i++)
            fetch_response(&s, &x, i);
    }
    __syncthreads(); /* the barriers are there */
    join_chunks(&a, &s, &x);
}
