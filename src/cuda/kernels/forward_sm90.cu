/* forward_sm90.cu: the whole forward of one (sequence, value head) in one block, for Hopper; of
 * several short ones, one after the other.
 *
 *     q, k, v, g --copy engine--> raw ring --prepare--> ring of chunks --state--> out
 *
 * A chunk has 32 tokens, two tiles of 16, and G is the cumulative gate (log2) counted from its
 * middle M, so that both tiles stay within the exponents of bf16: G >= 0 before M, G <= 0 past it.
 *     A, P  from k 2^G, q 2^G and k 2^-G, one product of 64 x 32, bf16 unless little decays
 *     Kd = k^ 2^(G - G_0)   Qd = q^ 2^(G - G_0)   Kr = k^ 2^(G_C - G)      at most 1: fp16
 *     T = (I + A)^-1: diagonal blocks of 8 by substitution, then T21 = -T22 A21 T11 twice
 * Two prepare warpgroups make chunks in turn. Two state warpgroups hold S [128, 128] in fp32
 * accumulators, 64 value channels each, make T, and walk S (x' is the transpose of x):
 *     R' = V' - S Kd'    U' = R' (T b)'    O' = S Qd' + U' P'    S <- S diag(2^(G_C - G_0)) + U' Kr
 * Bounded gate, bf16 inputs that the copy engine can read, K = V = 128; launched by launch_sm90.c.
 * tests/unit/test_forward_barriers.c has a model of the waits and arrivals here: keep it so.
 */
#include "cuda/ptx/global_access.cuh"
#include "cuda/tile/chunk_factors.cuh"
#include "cuda/tile/chunk_solve.cuh"
#include "cuda/tile/chunk_state.cuh"

/* ---- prepare warpgroups --------------------------------------------------------------------- */

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

/* Whether a warp fetches raw rows: one for each tensor does. */
static __device__ __forceinline__ bool fetches_raw(int warp)
{
    return warp == MAP_K || warp == MAP_G || warp == MAP_Q;
}

static __device__ __forceinline__ void fetch_raw(const struct fkda_forward_sm90_args *a,
                                                 struct shared *s, struct source x, int chunk,
                                                 int place, int warp)
{
    fetch(&a->maps[warp], s->raw[place].rows[0][CHUNK * warp], RAW_HALF, &s->raw_full[place], x,
          warp == MAP_G ? x.h : x.hk, chunk);
}

/* v, by one warp. */
static __device__ __forceinline__ void fetch_values(const struct fkda_forward_sm90_args *a,
                                                    struct shared *s, struct source x,
                                                    struct spot at, int warp)
{
    if (warp == MAP_V)
        fetch(&a->maps[MAP_V], s->chunks[at.place].v[0][0], CHUNK * 128, &s->full[at.place], x, x.h,
              at.chunk);
}

/* Brings rows of a chunk to what norms and gates can read: none past the end of the sequence. */
static __device__ __forceinline__ void await_raw(struct shared *s, struct source x, struct spot at,
                                                 int barrier, int thread)
{
    const int count = count_tokens(x, at.chunk);
    /* a wait by parity tells neighbouring phases apart only: the other preparer has had the chunk
     * that was in this place before */
    if (at.chunk >= RING)
        mbarrier_wait(&s->raw_empty[at.place], at.phase ^ 1);
    mbarrier_wait(&s->raw_full[at.place], at.phase);
    if (seldom(count < CHUNK)) {
        clear_tail(&s->raw[at.place], count, thread);
        fence_proxy_async();
        named_barrier_sync(barrier, ROLE_THREADS); /* the zeros are there */
    }
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

static __device__ __forceinline__ void prepare_chunks(const struct fkda_forward_sm90_args *a,
                                                      struct shared *s)
{
    const int total = shared_by_lanes(s->total), self = rederive(threadIdx.x % ROLE_THREADS);
    const int preparer = shared_by_lanes(threadIdx.x / ROLE_THREADS - 2);
    const int role = shared_by_lanes(threadIdx.x / 32 % 4); /* the warp's number in its group */
    const int barrier = 1 + preparer;                       /* the warpgroup's */
    const bool fetches = fetches_raw(role);
    struct workshop *const shop = &s->workshops[preparer];
    struct source x = {-1, 0, 0, 0, 0, 0, 0}, later = x; /* of this chunk; of the one to fetch */
    struct spot at = {preparer, preparer, 0}, before = at;
    int begins = 1;    /* a head's chunks, with this one */
    float bias = 0.0f; /* of that head */
    uint32_t raw_beta = 0;
    if (at.chunk < total) {
        const int thread = rederive(self);
        float norms[32];
        for (int i = preparer; fetches && i < RING && i < total; i += PREPARERS) {
            later = find_source(s, later, i);
            fetch_raw(a, s, later, i, i, role);
        }
        x = find_source(s, x, at.chunk);
        bias = load_bias(&a->prepare, x.h, thread);
        raw_beta = load_chunk_beta(&a->prepare, x, at.chunk, thread / 32, thread % 32);
        await_raw(s, x, at, barrier, thread);
        wgmma_pin_f32(norms, 32);
        wgmma_fence();
        start_norms(norms, &s->raw[at.place]);
        wgmma_wait(0);
        wgmma_pin_f32(norms, 32);
        finish_norms(shop->inverse, norms, thread / 32, thread % 32);
    }
    __syncwarp();
    if (!a->prepare.qk_l2norm && self % 32 < 16) /* the warp's own rows */
        shop->inverse[16 * (self / 32) + self % 16] = 1.0f;
    while (at.chunk < total) {
        const int thread = rederive(self), warp = thread / 32, lane = thread % 32;
        struct raw *raw = &s->raw[at.place];
        struct chunk *out = &s->chunks[at.place];
        if (seldom(begins)) {
            shop->offset[thread] = s->heads[x.item].slope * bias;
            named_barrier_sync(barrier, ROLE_THREADS); /* offsets are there */
        }
        const int count = count_tokens(x, at.chunk);
        int narrow;
        {
            const int piece = 16 * (lane % 16 / 2) + 8 * (lane % 2);
            float G[8][4], sums[4];
            sum_gates(G, sums, shop->offset, raw->rows[lane / 16][2 * CHUNK + 8 * warp], piece,
                      s->heads[x.item].slope, a->prepare.lower_bound_log2, count, warp, lane);
            *(float4 *)&shop->totals[warp][4 * lane] =
                make_float4(sums[0], sums[1], sums[2], sums[3]);
            if (at.chunk >= RING) /* the state warps have left the place */
                mbarrier_wait(&s->empty[at.place], at.phase ^ 1);
            named_barrier_sync(barrier, ROLE_THREADS); /* totals and norms are there */
            fetch_values(a, s, x, at, role);
            narrow = make_factors(raw, out, shop, G, rederive(thread), a->prepare.qk_l2norm);
        }
        fence_proxy_async();
        named_barrier_sync(barrier, ROLE_THREADS); /* factors are there; totals, norms used up */

        float d[16], norms[32];
        if (narrow)
            start_products(d, raw, 1);
        else
            start_products(d, raw, 0);
        const struct spot next = further(at, PREPARERS);
        const int more = next.chunk < total && a->prepare.qk_l2norm;
        if (next.chunk < total) {
            begins = next.chunk >= x.end;
            x = find_source(s, x, next.chunk);
            if (seldom(begins))
                bias = load_bias(&a->prepare, x.h, thread);
            await_raw(s, x, next, barrier, thread);
        }
        wgmma_pin_f32(norms, 32);
        wgmma_fence();
        /* also where nobody wants them: under a condition they would wait for A and P */
        start_norms(norms, &s->raw[next.chunk < total ? next.place : at.place]);
        wgmma_wait(1);
        wgmma_pin_f32(d, 16);
        mbarrier_arrive_warp(&s->raw_empty[at.place], lane);
        const float beta = lane < count ? beta_of(&a->prepare, raw_beta) : 0.0f;
        if (next.chunk < total)
            raw_beta = load_chunk_beta(&a->prepare, x, next.chunk, warp, lane);
        if (at.chunk >= PREPARERS) /* the chunk's before, whose T is made: the workshop is free */
            /* a phase that is told by its parity: what `empty` has announced this turn comes after
             * the T that was in that place earlier */
            mbarrier_wait(&s->solved[before.place], before.phase);
        if (warp == 0)
            shop->beta[lane] = beta;
        store_products(d, shop, out, beta, role, lane);
        fence_proxy_async();
        mbarrier_arrive_warp(&s->full[at.place], lane);
        if (fetches && at.chunk + RING < total) {
            /* the raw place is left. A warp that does not fetch must not wait here: nothing would
             * keep this phase from being followed by two more before it looks */
            mbarrier_wait(&s->raw_empty[at.place], at.phase);
            later = find_source(s, later, at.chunk + RING);
            fetch_raw(a, s, later, at.chunk + RING, at.place, role);
        }
        wgmma_wait(0);
        wgmma_pin_f32(norms, 32);
        if (more)
            finish_norms(shop->inverse, norms, warp, lane);
        before = at;
        at = next;
    }
}

/* ---- state warpgroups ----------------------------------------------------------------------- */

/* The state warp that makes a chunk's T: in turn, and in both warpgroups alike. */
static __device__ __forceinline__ int solver_of_chunk(unsigned chunk)
{
    return (int)(chunk % 2 * 4 + chunk / 2 % 4);
}

/* Waits for a chunk; one of the state warps makes its T b. */
static __device__ __forceinline__ void begin_chunk(struct shared *s, struct spot at, int warp,
                                                   int lane)
{
    mbarrier_wait(&s->full[at.place], at.phase);
    if (seldom(warp == solver_of_chunk(at.chunk))) {
        solve(&s->workshops[(unsigned)at.chunk % PREPARERS], &s->chunks[at.place], lane);
        fence_proxy_async();
        mbarrier_arrive_warp(&s->solved[at.place], lane);
    }
    __syncwarp(); /* or else the compiler takes what follows for divergent */
}

/* A turn. first: the chunk's first token, of the item's. */
static __device__ __forceinline__ void walk_chunk(const struct fkda_forward_sm90_args *a,
                                                  struct shared *s, const struct head *w,
                                                  struct walker *x, struct spot at, int first,
                                                  int self, enum pass pass)
{
    const struct fkda_recurrence_args *r = &a->recurrence;
    const int thread = rederive(self);
    const int group = thread / ROLE_THREADS, warp = thread / 32 % 4;
    const int lane = thread % 32, t = lane % 4;
    struct chunk *chunk = &s->chunks[at.place];
    const int count = min((int)CHUNK, w->length - first);
    uint32_t v[4][2];
    const enum rows rows_are = pass == WHOLE ? OUT : (enum rows)shared_by_lanes(w->rows);
    load_values(v, chunk->v[group][0], warp, rows_are == RESPONSE ? 0 : count, lane);
    choose_scale(x, v, first % (CHUNK * RESCALE_CHUNKS) == 0 || !a->prepare.qk_l2norm,
                 r->target_log2 - 1);

    /* S f as an operand; then S takes the chunk's decay */
    uint32_t sf[STEPS][4];
    const float *decay = chunk->decay + 2 * t;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        float *left = x->s[2 * step], *right = x->s[2 * step + 1];
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
    float o[16], u[16];
    wgmma_pin_u32(&sf[0][0], 4 * STEPS);
    wgmma_pin_f32(u, 16);
    wgmma_pin_f32(o, 16);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; step++) /* descriptors count in 16 bytes */
        wgmma_m64n32k16(u, sf[step], kd + CHUNK_HALF / 16 * (step / 4) + 2 * (step % 4), step > 0);
    wgmma_commit();
#pragma unroll
    for (int step = 0; step < STEPS; step++) /* Qd: 32 rows on; runs while R' is made */
        wgmma_m64n32k16(o, sf[step], kd + 256 + CHUNK_HALF / 16 * (step / 4) + 2 * (step % 4),
                        step > 0);
    wgmma_commit();
    wgmma_wait(1);
    wgmma_pin_f32(u, 16);
    const float f[2] = {exp2_int(x->f[0]), exp2_int(x->f[1])};
    uint32_t uf[2][4]; /* R' */
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            uf[j / 2][2 * (j % 2) + h] =
                cvt_rn_f16x2(bf16_low(v[j][h]) * f[h] - u[4 * j + 2 * h],
                             bf16_high(v[j][h]) * f[h] - u[4 * j + 2 * h + 1]);
    mbarrier_wait(&s->solved[at.place], at.phase);
    const uint64_t p = wgmma_descriptor(shared_address(chunk->p), 128, 512, WGMMA_SWIZZLE_NONE);
    const uint64_t tb = wgmma_descriptor(shared_address(chunk->tb), 128, 256, WGMMA_SWIZZLE_NONE);
    const int block = sizeof chunk->tb[0] / 16; /* descriptors count in 16 bytes */
    float y[2][8];                              /* U' of the first 16 tokens; of the last */
    wgmma_wait(0);
    wgmma_pin_f32(o, 16);
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
    wgmma_pin_f32(o, 16);
    wgmma_pin_f32(&x->s[0][0], 4 * GROUPS);
    wgmma_fence();
    wgmma_m64n32k16(o, uh[0], p, 1);
    wgmma_m64n32k16(o, uh[1], p + 16, 1);
    wgmma_commit();
#pragma unroll
    for (int step = 0; step < 2; step++) {
        wgmma_m64n128k16(&x->s[0][0], uh[step], kr + 128 * step, 1);
        wgmma_m64n128k16(&x->s[0][0], uh[step], kr + 256 + 128 * step, 1); /* the rest */
    }
    wgmma_commit();
    wgmma_wait(1);
    wgmma_pin_f32(o, 16);
    uint4 rows[3];
    int exponent = 0;
    if (pass == SEGMENTS && rows_are == RESPONSE) { /* join scales it */
        exponent = fit_response(o, x->f);
        turn_rows(rows, chunk->v[group][0], o, warp, lane, 1);
    } else {
        const float down[2] = {r->scale * exp2_int(-x->f[0]), r->scale * exp2_int(-x->f[1])};
#pragma unroll
        for (int j = 0; j < 16; j++)
            o[j] *= down[j % 4 / 2];
        if (pass == SEGMENTS && rows_are == FORCED)
            pack_forced(rows, o);
        else
            turn_rows(rows, chunk->v[group][0], o, warp, lane, 0);
    }
    fence_proxy_async(); /* v's place is the copy engine's next */
    wgmma_wait(0);
    wgmma_pin_f32(&x->s[0][0], 4 * GROUPS);
    mbarrier_arrive_warp(&s->empty[at.place], lane);
    const int token = row_of_lane(lane), piece = 8 * group + 2 * warp + lane % 2;
    if (pass == SEGMENTS && rows_are == FORCED) {
        char *const to = w->images + first / CHUNK * (int64_t)FORCED_BYTES + 16 * thread;
#pragma unroll
        for (int i = 0; i < 3; i++)
            st_global_u32x4(to + FORCED_BYTES / 3 * i, rows[i]);
    } else if (pass == SEGMENTS && rows_are == RESPONSE) {
        char *const to = w->images + first / CHUNK * (int64_t)RESPONSE_BYTES;
        st_global_u32x4(to + response_at(token, piece), rows[0]);
        st_global_u32x4(to + response_at(token + 16, piece), rows[1]);
        if (lane == 0)
            w->exponent[first / CHUNK * EXPONENTS + 4 * group + warp] = exponent;
        __syncwarp(); /* one lane was alone */
    } else {
        uint16_t *const out = w->out + (first + token) * r->out.stride_t + 8 * piece;
        if (token < count)
            st_global_u32x4(out, rows[0]);
        if (token + 16 < count)
            st_global_u32x4(out + 16 * r->out.stride_t, rows[1]);
    }
}

/* Takes the state of an item through its chunks, from `at` on. Returns what comes after them. */
static __device__ __forceinline__ struct spot walk_state(const struct fkda_forward_sm90_args *a,
                                                         struct shared *s, const struct head *w,
                                                         struct spot at, enum pass pass)
{
    struct walker x;
    {
        const int thread = rederive(threadIdx.x);
        const int row = 16 * (thread / 32) + thread % 32 / 4, t = thread % 4;
        load_state(&x, w->entry, w->entry_is_f32, row, t);
        if (pass == SEGMENTS && w->rows == RESPONSE)
            set_identity(&x, row, t);
        __syncwarp();
    }
    const int chunks = shared_by_lanes(w->chunks), self = rederive(threadIdx.x);
    const int warp = shared_by_lanes(threadIdx.x / 32);
    for (int i = 0; i < chunks; i++) {
        begin_chunk(s, at, warp, rederive(self) % 32);
        walk_chunk(a, s, w, &x, at, CHUNK * i, self, pass);
        at = further(at, 1);
    }
    const int thread = rederive(threadIdx.x);
    const int row = 16 * (thread / 32) + thread % 32 / 4, t = thread % 4;
    if (w->exit && pass == SEGMENTS && w->rows == RESPONSE)
        store_transition(&x, (float *)w->exit, row, t);
    else if (w->exit)
        store_state(&x, w->exit, w->exit_is_f32, row, t);
    __syncwarp();
    return at;
}

static __device__ __forceinline__ void walk_states(const struct fkda_forward_sm90_args *a,
                                                   struct shared *s, enum pass pass)
{
    struct spot at = {0, 0, 0};
    for (int item = 0; item < a->items_per_block; item++) {
        const struct head *const w = &s->heads[item];
        if (__any_sync(~0u, w->chunks > 0 || w->exit))
            at = walk_state(a, s, w, at, pass);
    }
}

/* Padding: zero rows, no state. */
static __device__ __forceinline__ void clear_output(const struct fkda_recurrence_args *r,
                                                    const struct head *w)
{
    for (int64_t i = threadIdx.x; i < 16 * (int64_t)w->length; i += THREADS)
        *(uint4 *)(w->out + i / 16 * r->out.stride_t + 8 * (i % 16)) = make_uint4(0, 0, 0, 0);
}

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

/* Cuts a sequence off behind its first segment, unless that is all there is. */
static __device__ __forceinline__ void find_first_segment(const struct fkda_forward_sm90_args *a,
                                                          struct head *w, int64_t n)
{
    const struct fkda_segments *g = &a->segments;
    const int64_t tokens = (int64_t)CHUNK * g->chunks;
    if (w->padding || w->length <= tokens * g->lead)
        return;
    const int64_t index = piece_base(&a->recurrence.sequences, n, (int)tokens, g->per_sequence);
    w->length = (int)tokens * g->lead;
    w->chunks = g->chunks * g->lead;
    w->exit = g->entry + (index * a->recurrence.HV + w->h) * TILE_K * TILE_K;
    w->exit_is_f32 = 1;
}

/* A later segment; `image`: the number of its images. All lanes of a warp come here together. */
static __device__ __forceinline__ void find_segment(const struct fkda_forward_sm90_args *a,
                                                    struct head *w, int64_t image, enum rows rows)
{
    const struct fkda_recurrence_args *r = &a->recurrence;
    const struct fkda_segments *g = &a->segments;
    const int64_t tokens = (int64_t)CHUNK * g->chunks;
    const int64_t piece = image / (unsigned)r->HV + g->lead - 1;
    const int64_t n = sequence_of_piece(&r->sequences, piece, (int)tokens, g->per_sequence);
    const int64_t first =
        (piece - piece_base(&r->sequences, n, (int)tokens, g->per_sequence)) * tokens;
    struct head whole = {{0}};
    find_sequence(a, &whole, n, (int)(image % (unsigned)r->HV));
    const int64_t left = whole.length - first;
    if (whole.padding || first < tokens * g->lead || left <= 0)
        return; /* nothing to do, no such segment, or part of the first */
    w->h = whole.h;
    w->seq = whole.seq;
    w->seq.begin += first;
    w->length = (int)(left < tokens ? left : tokens);
    w->chunks = (w->length + CHUNK - 1) / CHUNK;
    w->rows = rows;
    if (left > tokens || r->final_state.data)
        w->exit = (rows == RESPONSE ? g->transition : g->entry) + image * TILE_K * TILE_K;
    w->exit_is_f32 = 1;
    w->images = rows == RESPONSE ? g->response + image * g->chunks * RESPONSE_BYTES
                                 : g->forced + image * g->chunks * FORCED_BYTES;
    w->exponent = g->exponent + image * g->chunks * EXPONENTS;
}

/* Ragged sequences by length: blocks begin in the order of their numbers, and a long one must not
 * begin last. */
struct order {
    int length[ORDERED_SEQUENCES], sequence[ORDERED_SEQUENCES]; /* by number; by rank */
};

static __device__ __forceinline__ void order_sequences(const struct fkda_cuda_sequences *sequences,
                                                       struct order *order)
{
    const int n = threadIdx.x, N = sequences->N;
    if (n < N)
        order->length[n] = (int)sequence_at(sequences, n).length;
    __syncthreads(); /* lengths are there */
    if (n < N) {
        const int mine = order->length[n];
        int rank = 0;
        for (int i = 0; i < N; i++)
            rank += order->length[i] > mine || (order->length[i] == mine && i < n);
        order->sequence[rank] = n;
    }
    __syncthreads(); /* so is the order */
}

/* Finds the items of a block, a lane each: heads of one sequence in different blocks, since it may
 * be much longer than the others. Of segments a block has one: first segments, which are the
 * longest, then the later ones in one role, then in the other. Numbers that are no segment, which
 * cost the launch of a block, come last in either where there is one sequence. */
static __device__ __forceinline__ void find_items(const struct fkda_forward_sm90_args *a,
                                                  const struct order *order, struct head *w,
                                                  enum pass pass)
{
    const struct fkda_recurrence_args *r = &a->recurrence;
    const int64_t whole = pass == WHOLE ? a->items : (int64_t)r->sequences.N * r->HV;
    const int64_t item = blockIdx.x + (pass == WHOLE ? (int64_t)threadIdx.x * gridDim.x : 0);
    if (item < whole) {
        int n = (int)((unsigned)item / (unsigned)r->HV);
        if (a->longest_first)
            n = order->sequence[n];
        find_sequence(a, w, n, (int)((unsigned)item % (unsigned)r->HV));
        if (pass == SEGMENTS)
            find_first_segment(a, w, n);
    } else if (pass == SEGMENTS) {
        const int64_t later = a->items - 1 - item, images = (a->items - whole) / 2;
        find_segment(a, w, later % images, later >= images ? FORCED : RESPONSE);
    }
}

static __device__ __forceinline__ void forward(const struct fkda_forward_sm90_args *a,
                                               struct shared *s, enum pass pass)
{
    const int items = a->items_per_block;
    struct order *const order = (struct order *)s->raw; /* until the first copy */
    if (pass == WHOLE && a->longest_first)
        order_sequences(&a->recurrence.sequences, order);
    if (threadIdx.x < 32) {
        struct head w = {{0}};
        find_items(a, order, &w, pass);
        if ((int)threadIdx.x < items) {
            w.hk = w.h / a->prepare.heads_per_key;
            w.slope = load_gate(&a->prepare, FKDA_GATE_BOUNDED, w.h).slope;
            s->heads[threadIdx.x] = w;
        }
        __syncwarp(); /* heads are there */
        if (threadIdx.x == 0) {
            int total = 0;
            for (int i = 0; i < items; i++) {
                s->heads[i].begun = total;
                total += s->heads[i].chunks;
            }
            s->total = total;
            for (int i = 0; i < RING; i++) {
                /* who starts their copies; the prepare warps */
                mbarrier_init(&s->raw_full[i], 3);
                mbarrier_init(&s->raw_empty[i], 4 * WARP_ARRIVALS);
                mbarrier_init(&s->full[i], 4 * WARP_ARRIVALS + 1); /* prepare warps; copy of v */
                mbarrier_init(&s->solved[i], WARP_ARRIVALS);       /* the warp that made T */
                mbarrier_init(&s->empty[i], 8 * WARP_ARRIVALS);    /* the state warps */
            }
            mbarrier_init_fence();
        }
    }
    /* what is above the diagonals of P and T stays zero */
    for (int i = threadIdx.x;
         i < (int)(offsetof(struct chunk, decay) - offsetof(struct chunk, p)) / 16; i += THREADS)
#pragma unroll
        for (int j = 0; j < RING; j++)
            ((uint4 *)s->chunks[j].p)[i] = make_uint4(0, 0, 0, 0);
    for (int i = threadIdx.x; i < (int)sizeof s->workshops[0].t / 16; i += THREADS)
#pragma unroll
        for (int j = 0; j < PREPARERS; j++)
            ((uint4 *)s->workshops[j].t)[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < PREPARERS * CHUNK) {
        float *const rest = &s->workshops[threadIdx.x / CHUNK].a[threadIdx.x % CHUNK][CHUNK];
        *(float4 *)rest = *(float4 *)(rest + 4) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    fence_proxy_async();
    __syncthreads(); /* heads, zeros and barriers are there */
    for (int item = 0; item < items; item++)
        if (s->heads[item].padding)
            clear_output(&a->recurrence, &s->heads[item]);
    if (threadIdx.x >= 2 * ROLE_THREADS) {
        setmaxnreg_dec(PREPARE_REGISTERS);
        prepare_chunks(a, s);
    } else {
        setmaxnreg_inc(STATE_REGISTERS);
        walk_states(a, s, pass);
    }
}

#define DEFINE_FORWARD(name, pass)                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                        \
        fkda_##name##_sm90(const __grid_constant__ struct fkda_forward_sm90_args a) \
    {                                                                               \
        extern __shared__ __align__(1024) char memory[];                            \
        forward(&a, (struct shared *)memory, pass);                                 \
    }

DEFINE_FORWARD(forward, WHOLE)
DEFINE_FORWARD(segments, SEGMENTS)
