/* join_sm90.cu: what the state that enters a segment adds to its output, in a split forward.
 *
 *     out_t = forced_t + scale S response_t
 *
 * forced is what the segment makes of a zero state, response_t what it makes of each row of the
 * identity (segments.h). A block takes some chunks of a segment of one value head; a warp has 16
 * value channels of them, whose rows of S stay in its registers. Operands are fp16 times powers of
 * two: of S one for a channel and 16 columns, of responses one for a chunk and 16 rows. So 16 inner
 * indices are a product of their own, in fp32, and those products are added up in fp32.
 * For a split forward, so on sm_90 only; launched by launch_sm90.c.
 */
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/tile/chunk_state.cuh"
#include "cuda/tile/segment_map.cuh"

enum { PLACES = 4 /* of chunks in shared memory */ };

struct join_shared {
    char response[PLACES][RESPONSE_BYTES];
    char forced[PLACES][FORCED_BYTES];
    int32_t exponent[PLACES][EXPONENTS];
    char out[2][CHUNK][128]; /* as struct chunk has it */
    uint64_t full[PLACES];   /* the images are there */
};
static_assert(sizeof(struct join_shared) <= JOIN_SHARED_BYTES, "the host asks for this much");

/* What a block has to do. */
struct share {
    const char *response, *forced; /* of its first chunk */
    const int32_t *exponent;
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
    const int64_t h = image % (unsigned)a->HV, tokens = CHUNK * (int64_t)g->chunks;
    const struct later_segment segment = find_later_segment(&a->sequences, g, image, a->HV);
    const int64_t n = segment.n;
    const int64_t slot = a->state_indices.data ? load_index(&a->state_indices, n) : n;
    const struct sequence seq = sequence_at(&a->sequences, n);
    const int64_t left = seq.length - segment.begin, length = left < tokens ? left : tokens;
    const int64_t first = CHUNK * first_chunk, token = seq.begin + segment.begin + first;
    const int64_t most = CHUNK * a->share_chunks;
    if (segment.begin < 0 || first >= length || slot < 0 || slot >= a->num_slots)
        return x; /* the output of a first segment is whole */
    const int64_t chunk = image * g->chunks + first_chunk;
    x.response = g->response + chunk * RESPONSE_BYTES;
    x.forced = g->forced + chunk * FORCED_BYTES;
    x.exponent = g->exponent + chunk * EXPONENTS;
    x.entry = g->entry + image * TILE_K * TILE_K;
    x.out = (uint16_t *)a->out.data + seq.batch * a->out.stride_b + token * a->out.stride_t +
            h * a->out.stride_h;
    x.tokens = (int)(length - first < most ? length - first : most);
    return x;
}

static __device__ __forceinline__ void fetch_images(struct join_shared *s, const struct share *x,
                                                    int chunk)
{
    const int place = chunk % PLACES;
    mbarrier_arrive_expect(&s->full[place],
                           RESPONSE_BYTES + FORCED_BYTES + sizeof s->exponent[place]);
    bulk_copy(s->response[place], x->response + chunk * (int64_t)RESPONSE_BYTES, RESPONSE_BYTES,
              &s->full[place]);
    bulk_copy(s->forced[place], x->forced + chunk * (int64_t)FORCED_BYTES, FORCED_BYTES,
              &s->full[place]);
    bulk_copy(s->exponent[place], x->exponent + chunk * (int64_t)EXPONENTS,
              sizeof s->exponent[place], &s->full[place]);
}

/* A warp's rows of S as left operands. Bytes of exponents: the powers of the lane's rows g and
 * g + 8, four steps (16 columns each) in a word. */
struct entry {
    uint32_t s[STEPS][4];
    uint32_t exponents[2][STEPS / 4];
};

static __device__ __forceinline__ uint32_t quad_max(uint32_t x)
{
    x = max(x, __shfl_xor_sync(~0u, x, 1));
    return max(x, __shfl_xor_sync(~0u, x, 2));
}

static __device__ __forceinline__ void load_entry(struct entry *e, const struct share *x)
{
    const int lane = threadIdx.x % 32;
    struct walker w;
    load_state(&w, x->entry, 1, 16 * (threadIdx.x / 32) + lane / 4, lane % 4);
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const float *const left = &w.s[2 * step][2 * r], *right = &w.s[2 * step + 1][2 * r];
            const float m = max_magnitude(left[0], left[1], right[0], right[1]);
            const int exponent = exponent_to_fit(quad_max(__float_as_uint(m)));
            const float up = exp2_int(exponent);
            e->s[step][r] = cvt_rn_f16x2(up * left[0], up * left[1]);
            e->s[step][2 + r] = cvt_rn_f16x2(up * right[0], up * right[1]);
            const uint32_t byte = (uint32_t)(exponent & 0xff) << 8 * (step % 4);
            e->exponents[r][step / 4] = step % 4 ? e->exponents[r][step / 4] | byte : byte;
        }
}

/* 2^-exponent of the powers in row g + 8 r of S and in a step of responses, down to fp32's least.
 * What is more than 2^126 belongs to products that fp32 does not hold. */
static __device__ __forceinline__ float power_down(const struct entry *e, int response, int step,
                                                   int r)
{
    const int own = (int)(e->exponents[r][step / 4] << (24 - 8 * (step % 4))) >> 24;
    const int exponent = max(own + response, -126), half = exponent / 2;
    return exp2_int(-half) * exp2_int(half - exponent);
}

/* o' = S response', without scale */
static __device__ __forceinline__ void multiply(float o[16], const struct entry *e,
                                                const struct join_shared *s, int place)
{
    const int lane = threadIdx.x % 32;
    const char *rows = s->response[place];
#pragma unroll
    for (int i = 0; i < 16; i++)
        o[i] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int response = s->exponent[place][step];
        float d[16], down[2];
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            uint32_t b[4];
            ldmatrix_x4(
                b, rows + response_at(8 * (j + lane / 16) + lane % 8, 2 * step + lane / 8 % 2));
            mma_m16n8k16_f16_new(d + 4 * j, e->s[step], b[0], b[1]);
            mma_m16n8k16_f16_new(d + 4 * j + 4, e->s[step], b[2], b[3]);
        }
        down[0] = power_down(e, response, step, 0);
        down[1] = power_down(e, response, step, 1);
#pragma unroll
        for (int i = 0; i < 16; i++)
            o[i] = fmaf(down[i % 4 / 2], d[i], o[i]);
    }
}

static __device__ __forceinline__ void join_chunks(const struct fkda_join_args *a,
                                                   struct join_shared *s, const struct share *x)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
    const int chunks = (x->tokens + CHUNK - 1) / CHUNK, token = row_of_lane(lane);
    uint16_t *out = x->out + token * a->out.stride_t + 16 * warp + 8 * (lane % 2);
    struct entry entry;
    load_entry(&entry, x);
    for (int i = 0; i < chunks; i++) {
        const int place = i % PLACES;
        float o[16], f[16];
        uint4 rows[3];
        mbarrier_wait(&s->full[place], i / PLACES % 2);
        multiply(o, &entry, s, place);
#pragma unroll
        for (int j = 0; j < 3; j++)
            rows[j] = *(const uint4 *)(s->forced[place] + FORCED_BYTES / 3 * j + 16 * threadIdx.x);
        unpack_forced(f, rows);
#pragma unroll
        for (int j = 0; j < 16; j++)
            o[j] = fmaf(a->scale, o[j], f[j]);
        turn_rows(s->out[group][0], o, warp % 4, lane, 0);
        load_rows(rows, s->out[group][0], warp % 4, lane);
        if (CHUNK * i + token < x->tokens)
            st_global_u32x4(out, rows[0]);
        if (CHUNK * i + token + 16 < x->tokens)
            st_global_u32x4(out + 16 * a->out.stride_t, rows[1]);
        out += CHUNK * a->out.stride_t;
        __syncthreads(); /* all warps have read the images, and their rows of out */
        if (threadIdx.x == 0 && i + PLACES < chunks)
            fetch_images(s, x, i + PLACES);
    }
}

extern "C" __global__ void __launch_bounds__(JOIN_THREADS, 2)
    fkda_join_sm90(const __grid_constant__ struct fkda_join_args a)
{
    extern __shared__ __align__(128) char memory[];
    struct join_shared *const s = (struct join_shared *)memory;
    const struct share x = find_share(&a);
    griddepcontrol_wait(); /* also for nothing to do: a later kernel waits for this one */
    if (x.tokens == 0)
        return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < PLACES; i++)
            mbarrier_init(&s->full[i], 1);
        mbarrier_init_fence();
        for (int i = 0; i < PLACES && CHUNK * i < x.tokens; i++)
            fetch_images(s, &x, i);
    }
    __syncthreads(); /* the barriers are there */
    join_chunks(&a, s, &x);
}
