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
 */
#include "cuda/ptx/global_access.cuh"
#include "cuda/tile/chunk_factors.cuh"
#include "cuda/tile/chunk_solve.cuh"
#include "cuda/tile/chunk_state.cuh"

/* ---- prepare warpgroups --------------------------------------------------------------------- */

/* One thread starts the copies of a chunk's q, k, g. */
static __device__ __forceinline__ void fetch_raw(const struct fkda_forward_sm90_args *a,
                                                 struct shared *s, struct cursor at, int chunk,
                                                 enum pass pass)
{
    struct raw *raw = &s->raw[chunk % RING];
    uint64_t *barrier = &s->raw_full[chunk % RING];
    const struct head *w = &s->heads[at.item];
    const int hk = w->h / a->prepare.heads_per_key;
    const int row = (int)w->seq.begin + (chunk - at.begin) * CHUNK, batch = (int)w->seq.batch;
    mbarrier_arrive_expect(barrier, sizeof(struct raw) / 3 * (pass == SUMMARIES ? 2 : 3));
#pragma unroll
    for (int half = 0; half < 2; half++) {
        tensor_copy_4d(raw->rows[half][0], &a->k, HALF_K * half, hk, row, batch, barrier);
        if (pass != SUMMARIES)
            tensor_copy_4d(raw->rows[half][CHUNK], &a->q, HALF_K * half, hk, row, batch, barrier);
        tensor_copy_4d(raw->rows[half][2 * CHUNK], &a->g, HALF_K * half, w->h, row, batch, barrier);
    }
}

/* One thread starts the copy of a chunk's v. */
static __device__ __forceinline__ void fetch_values(const struct fkda_forward_sm90_args *a,
                                                    struct shared *s, struct cursor at, int chunk)
{
    uint64_t *barrier = &s->full[chunk % RING];
    const struct head *w = &s->heads[at.item];
    const int row = (int)w->seq.begin + (chunk - at.begin) * CHUNK, batch = (int)w->seq.batch;
    mbarrier_arrive_expect(barrier, sizeof s->chunks[0].v);
#pragma unroll
    for (int half = 0; half < 2; half++)
        tensor_copy_4d(s->chunks[chunk % RING].v[half][0], &a->v, HALF_K * half, w->h, row, batch,
                       barrier);
}

/* Brings rows of a chunk to what norms and gates can read: none past the end of the sequence. */
static __device__ __forceinline__ void await_raw(struct shared *s, struct cursor at, int chunk,
                                                 int barrier, int thread)
{
    const int count = tokens_of_chunk(s->heads[at.item].length, chunk - at.begin);
    /* a wait by parity tells neighbouring phases apart only: the other preparer has had the chunk
     * that was in this place before */
    if (chunk >= RING)
        mbarrier_wait(&s->full[chunk % RING], chunk / RING % 2 ^ 1);
    mbarrier_wait(&s->raw_full[chunk % RING], chunk / RING % 2);
    if (seldom(count < CHUNK)) {
        clear_tail(&s->raw[chunk % RING], count, thread);
        fence_proxy_async();
        named_barrier_sync(barrier, ROLE_THREADS); /* the zeros are there */
    }
}

/* The thread's channel of a head's dt_bias, whose load is not waited for. */
static __device__ __forceinline__ float load_bias(const struct fkda_prepare_args *p,
                                                  const struct head *w, int thread)
{
    return p->dt_bias ? p->dt_bias[w->h * p->dt_bias_stride_h + thread] : 0.0f;
}

static __device__ __forceinline__ void prepare_chunks(const struct fkda_forward_sm90_args *a,
                                                      struct shared *s, enum pass pass)
{
    const int total = s->total;
    struct cursor at = {-1, 0, 0};
    /* the same in all lanes, and so that the compiler sees it */
    int chunk = __shfl_sync(~0u, threadIdx.x / ROLE_THREADS - 2, 0);
    {
        float *const inverse = s->workshops[chunk].inverse;
        const int thread = threadIdx.x % ROLE_THREADS;
        if (chunk < total) {
            float norms[32];
            await_raw(s, find_chunk(s, at, chunk), chunk, 1 + chunk, thread);
            wgmma_pin_f32(norms, 32);
            wgmma_fence();
            start_norms(norms, &s->raw[chunk]);
            wgmma_wait(0);
            wgmma_pin_f32(norms, 32);
            finish_norms(inverse, norms, thread / 32, thread % 32);
        }
        __syncwarp();
        if (!a->prepare.qk_l2norm && thread % 32 < 16) /* the warp's own rows */
            inverse[16 * (thread / 32) + thread % 16] = 1.0f;
    }
    const int self = rederive(threadIdx.x % ROLE_THREADS);
    float bias = 0.0f; /* of the head whose chunks begin */
    if (chunk < total)
        bias = load_bias(&a->prepare, &s->heads[find_chunk(s, at, chunk).item], self);
    for (; chunk < total; chunk += PREPARERS) {
        const int thread = rederive(self), warp = thread / 32, lane = thread % 32;
        const int barrier = chunk % PREPARERS + 1; /* of this warpgroup */
        struct workshop *const shop = &s->workshops[chunk % PREPARERS];
        const int place = chunk % RING;
        struct raw *raw = &s->raw[place];
        struct chunk *out = &s->chunks[place];
        if (seldom(chunk >= at.end)) {
            at = find_chunk(s, at, chunk);
            shop->offset[thread] = s->heads[at.item].slope * bias;
            named_barrier_sync(barrier, ROLE_THREADS); /* offsets are there */
        }
        const struct head *const w = &s->heads[at.item];
        const int first = CHUNK * (chunk - at.begin);
        const int count = min((int)CHUNK, w->length - first);
        int narrow;
        float beta = 0.0f;
        if (warp < 2 && lane < count) /* used much later */
            beta = load_raw_beta(&a->prepare, w->seq, w->seq.begin + first + lane, w->h);
        {
            const int piece = 16 * (lane % 16 / 2) + 8 * (lane % 2);
            float G[8][4], sums[4];
            sum_gates(G, sums, shop->offset, raw->rows[lane / 16][2 * CHUNK + 8 * warp], piece,
                      w->slope, a->prepare.lower_bound_log2, count, warp, lane);
            *(float4 *)&shop->totals[warp][4 * lane] =
                make_float4(sums[0], sums[1], sums[2], sums[3]);
            if (chunk >= RING) /* the state warps have left the place */
                mbarrier_wait(&s->empty[place], chunk / RING % 2 ^ 1);
            if (thread == 2 * 32) /* of a warp that has no beta to load */
                fetch_values(a, s, at, chunk);
            named_barrier_sync(barrier, ROLE_THREADS); /* totals and norms are there */
            narrow = make_factors(raw, out, shop, G, rederive(thread), a->prepare.qk_l2norm, pass);
        }
        fence_proxy_async();
        named_barrier_sync(barrier, ROLE_THREADS); /* factors are there; totals, norms used up */

        float d[16], norms[32];
        if (narrow)
            start_products(d, raw, 1);
        else
            start_products(d, raw, 0);
        const int next = chunk + PREPARERS;
        const int more = next < total && a->prepare.qk_l2norm;
        if (next < total) {
            const struct cursor there = find_chunk(s, at, next);
            if (seldom(next >= at.end))
                bias = load_bias(&a->prepare, &s->heads[there.item], thread);
            await_raw(s, there, next, barrier, thread);
        }
        wgmma_pin_f32(norms, 32);
        wgmma_fence();
        /* also where nobody wants them: under a condition they would wait for A and P */
        start_norms(norms, &s->raw[(next < total ? next : chunk) % RING]);
        wgmma_wait(1);
        wgmma_pin_f32(d, 16);
        beta = lane < count ? beta_of(&a->prepare, beta) : 0.0f;
        if (chunk >= PREPARERS) { /* the last chunk's T is made: the workshop is free */
            /* a phase that is told by its parity: what `empty` has announced this turn comes after
             * the T that was in last's place before it */
            const int last = chunk - PREPARERS;
            mbarrier_wait(&s->solved[last % RING], last / RING % 2);
        }
        if (warp == 0)
            shop->beta[lane] = beta;
        store_products(d, shop, out, beta, warp, lane, pass);
        fence_proxy_async();
        mbarrier_arrive_warp(&s->full[place], lane);
        if (warp == 3 && chunk + RING < total) {
            mbarrier_wait(&s->full[place], chunk / RING % 2); /* all have left the raw place */
            if (lane == 0)
                fetch_raw(a, s, find_chunk(s, at, chunk + RING), chunk + RING, pass);
            __syncwarp(); /* one lane was alone */
        }
        wgmma_wait(0);
        wgmma_pin_f32(norms, 32);
        if (more)
            finish_norms(shop->inverse, norms, warp, lane);
    }
}

/* ---- state warpgroups ----------------------------------------------------------------------- */

/* The state warp that makes a chunk's T: in turn, and in both warpgroups alike. */
static __device__ __forceinline__ int solver_of_chunk(int chunk)
{
    return chunk % 2 * 4 + chunk / 2 % 4;
}

/* Waits for a chunk; one of the state warps makes its T b. */
static __device__ __forceinline__ void begin_chunk(struct shared *s, int chunk, int thread)
{
    const int place = chunk % RING, lane = thread % 32;
    mbarrier_wait(&s->full[place], chunk / RING % 2);
    if (seldom(__any_sync(~0u, thread / 32 == solver_of_chunk(chunk)))) {
        solve(&s->workshops[chunk % PREPARERS], &s->chunks[place], lane);
        fence_proxy_async();
        mbarrier_arrive_warp(&s->solved[place], lane);
    }
    __syncwarp(); /* or else the compiler takes what follows for divergent */
}

/* A turn: chunk i of the block. */
static __device__ __forceinline__ void walk_chunk(const struct fkda_forward_sm90_args *a,
                                                  struct shared *s, const struct head *w,
                                                  struct walker *x, int i, int self, enum pass pass)
{
    const struct fkda_recurrence_args *r = &a->recurrence;
    const int place = i % RING;
    const int thread = rederive(self);
    const int group = thread / ROLE_THREADS, warp = thread / 32 % 4;
    const int lane = thread % 32, t = lane % 4;
    struct chunk *chunk = &s->chunks[place];
    const int first = CHUNK * (i - w->begun), count = min((int)CHUNK, w->length - first);
    uint32_t v[4][2];
    load_values(v, chunk->v[group][0], warp, pass == SUMMARIES && w->from_identity ? 0 : count,
                lane);
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
    if (pass != SUMMARIES) { /* runs while R' is made */
#pragma unroll
        for (int step = 0; step < STEPS; step++) /* Qd: 32 rows on */
            wgmma_m64n32k16(o, sf[step], kd + 256 + CHUNK_HALF / 16 * (step / 4) + 2 * (step % 4),
                            step > 0);
        wgmma_commit();
        wgmma_wait(1);
    } else {
        wgmma_wait(0);
    }
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
    mbarrier_wait(&s->solved[place], i / RING % 2);
    const uint64_t tb = wgmma_descriptor(shared_address(chunk->tb), 128, 512, WGMMA_SWIZZLE_NONE);
    const uint64_t p = wgmma_descriptor(shared_address(chunk->p), 128, 512, WGMMA_SWIZZLE_NONE);
    wgmma_wait(0);
    wgmma_pin_f32(o, 16);
    wgmma_pin_u32(&uf[0][0], 8);
    wgmma_pin_f32(u, 16);
    wgmma_fence();
    wgmma_m64n32k16(u, uf[0], tb, 0);
    wgmma_m64n32k16(u, uf[1], tb + 16, 1);
    wgmma_commit();
    wgmma_wait(0);
    wgmma_pin_f32(u, 16);
    uint32_t uh[2][4];
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            uh[j / 2][2 * (j % 2) + h] = cvt_rn_f16x2(u[4 * j + 2 * h], u[4 * j + 2 * h + 1]);
    const uint64_t kr = wgmma_descriptor(shared_address(chunk->rows[0][2 * CHUNK]), CHUNK_HALF,
                                         1024, WGMMA_SWIZZLE_128);
    wgmma_pin_u32(&uh[0][0], 8);
    wgmma_pin_f32(o, 16);
    wgmma_pin_f32(&x->s[0][0], 4 * GROUPS);
    wgmma_fence();
    if (pass != SUMMARIES) {
        wgmma_m64n32k16(o, uh[0], p, 1);
        wgmma_m64n32k16(o, uh[1], p + 16, 1);
        wgmma_commit();
    }
#pragma unroll
    for (int step = 0; step < 2; step++) {
        wgmma_m64n128k16(&x->s[0][0], uh[step], kr + 128 * step, 1);
        wgmma_m64n128k16(&x->s[0][0], uh[step], kr + 256 + 128 * step, 1); /* the rest */
    }
    wgmma_commit();
    uint4 rows[2];
    if (pass != SUMMARIES) {
        wgmma_wait(1);
        wgmma_pin_f32(o, 16);
        const float down[2] = {r->scale * exp2_int(-x->f[0]), r->scale * exp2_int(-x->f[1])};
#pragma unroll
        for (int j = 0; j < 16; j++)
            o[j] *= down[j % 4 / 2];
        turn_rows(rows, chunk->v[group][0], o, warp, lane);
    }
    fence_proxy_async(); /* v's place is the copy engine's next */
    wgmma_wait(0);
    wgmma_pin_f32(&x->s[0][0], 4 * GROUPS);
    mbarrier_arrive_warp(&s->empty[place], lane);
    if (pass != SUMMARIES) {
        const int token = row_of_lane(lane);
        uint16_t *const out = w->out + (first + token) * r->out.stride_t + HALF_K * group +
                              16 * warp + 8 * (lane % 2);
        if (token < count)
            st_global_u32x4(out, rows[0]);
        if (token + 16 < count)
            st_global_u32x4(out + 16 * r->out.stride_t, rows[1]);
    }
}

/* Takes the state of an item through its chunks. */
static __device__ __forceinline__ void walk_state(const struct fkda_forward_sm90_args *a,
                                                  struct shared *s, const struct head *w,
                                                  enum pass pass)
{
    struct walker x;
    {
        const int thread = rederive(threadIdx.x);
        const int row = 16 * (thread / 32) + thread % 32 / 4, t = thread % 4;
        load_state(&x, w->entry, w->entry_is_f32, row, t);
        if (pass == SUMMARIES && w->from_identity)
            set_identity(&x, row, t);
        __syncwarp();
    }
    /* the same in all lanes, and so that the compiler sees it */
    int i = __shfl_sync(~0u, w->begun, 0);
    const int end = i + __shfl_sync(~0u, w->chunks, 0), self = rederive(threadIdx.x);
    for (; i < end; i++) {
        begin_chunk(s, i, rederive(self));
        walk_chunk(a, s, w, &x, i, self, pass);
    }
    const int thread = rederive(threadIdx.x);
    const int row = 16 * (thread / 32) + thread % 32 / 4, t = thread % 4;
    if (pass == SUMMARIES && w->from_identity)
        store_transition(&x, (float *)w->exit, row, t);
    else if (w->exit)
        store_state(&x, w->exit, w->exit_is_f32, row, t);
    __syncwarp();
}

static __device__ __forceinline__ void walk_states(const struct fkda_forward_sm90_args *a,
                                                   struct shared *s, enum pass pass)
{
    for (int item = 0; item < a->items_per_block; item++) {
        const struct head *const w = &s->heads[item];
        if (__any_sync(~0u, w->chunks > 0 || w->exit))
            walk_state(a, s, w, pass);
    }
}

/* Padding: zero rows, no state. */
static __device__ __forceinline__ void clear_output(const struct fkda_recurrence_args *r,
                                                    const struct head *w)
{
    for (int64_t i = threadIdx.x; i < 16 * (int64_t)w->length; i += THREADS)
        *(uint4 *)(w->out + i / 16 * r->out.stride_t + 8 * (i % 16)) = make_uint4(0, 0, 0, 0);
}

/* Finds an item. Without chunks and exit there is nothing to do but, maybe, padding. */
static __device__ __forceinline__ void find_item(const struct fkda_forward_sm90_args *a,
                                                 struct head *w, int64_t item, enum pass pass)
{
    const struct fkda_recurrence_args *r = &a->recurrence;
    const struct fkda_segments *g = &a->segments;
    const unsigned pair = (unsigned)(pass == SUMMARIES ? item / 2 : item);
    const int64_t index = pair / (unsigned)r->HV; /* of the sequence, or the segment's slot */
    const int64_t tokens = (int64_t)CHUNK * g->chunks;
    const int64_t n = pass == WHOLE
                          ? index
                          : sequence_of_piece(&r->sequences, index, (int)tokens, g->per_sequence);
    const int64_t slot = r->state_indices.data ? load_index(&r->state_indices, n) : n;
    int64_t first = 0; /* token of the sequence */
    w->h = (int)(pair % (unsigned)r->HV);
    w->seq = sequence_at(&r->sequences, n);
    int64_t length = w->seq.length;
    if (pass != WHOLE) {
        first = (index - piece_base(&r->sequences, n, (int)tokens, g->per_sequence)) * tokens;
        if (first < 0 || (first > 0 && first >= length))
            return;
        length -= first;
        length = length > tokens ? tokens : length;
    }
    const bool last = first + length == w->seq.length;
    w->seq.begin += first;
    w->length = (int)length;
    w->out = (uint16_t *)r->out.data + w->seq.batch * r->out.stride_b +
             w->seq.begin * r->out.stride_t + w->h * r->out.stride_h;
    w->entry_is_f32 = w->exit_is_f32 = 1;
    const int64_t image = (index * r->HV + w->h) * TILE_K * TILE_K;
    if (slot < 0 || slot >= r->num_slots) {
        w->padding = 1;
        return;
    }
    if (pass == SUMMARIES) { /* the last segment's are not needed, nor what takes a zero state */
        w->from_identity = (int)(item % 2);
        if (last || (w->from_identity && first == 0 && !r->initial_state.data))
            return;
        w->exit = (w->from_identity ? g->transition : g->entry) + image;
        w->chunks = (w->length + CHUNK - 1) / CHUNK;
        return;
    }
    w->chunks = (w->length + CHUNK - 1) / CHUNK;
    w->entry = g->entry + image;
    if (pass == WHOLE) {
        w->entry = state_image(&r->initial_state, slot, w->h);
        w->entry_is_f32 = r->initial_state.is_f32;
    }
    w->exit = last ? state_image(&r->final_state, slot, w->h) : (void *)0;
    w->exit_is_f32 = r->final_state.is_f32;
}

static __device__ __forceinline__ void forward(const struct fkda_forward_sm90_args *a,
                                               struct shared *s, enum pass pass)
{
    const int items = a->items_per_block;
    if (threadIdx.x < 32) {
        struct head w = {{0}};
        /* Whole sequences: a lane each, heads of one sequence in different blocks, since it may be
         * much longer than the others. A segment, of which a block has one, is found by all lanes
         * together: sequence_of_piece() is theirs. */
        const int64_t item = blockIdx.x + (pass == WHOLE ? (int64_t)threadIdx.x * gridDim.x : 0);
        if (item < a->items)
            find_item(a, &w, item, pass);
        if ((int)threadIdx.x < items) {
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
                mbarrier_init(&s->raw_full[i], 1); /* the thread that starts the copies */
                mbarrier_init(&s->full[i], 4 * WARP_ARRIVALS + 1); /* prepare warps; copy of v */
                mbarrier_init(&s->solved[i], WARP_ARRIVALS);       /* the warp that made T */
                mbarrier_init(&s->empty[i], 8 * WARP_ARRIVALS);    /* the state warps */
            }
            mbarrier_init_fence();
            struct cursor at = {-1, 0, 0};
            for (int i = 0; i < RING && i < total; i++) {
                at = find_chunk(s, at, i);
                fetch_raw(a, s, at, i, pass);
            }
        }
    }
    /* what is above T's diagonal stays zero */
    for (int i = threadIdx.x; i < (int)sizeof s->chunks[0].tb / 16; i += THREADS)
#pragma unroll
        for (int j = 0; j < RING; j++)
            ((uint4 *)s->chunks[j].tb)[i] = make_uint4(0, 0, 0, 0);
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
    if (pass != SUMMARIES)
        for (int item = 0; item < items; item++)
            if (s->heads[item].padding)
                clear_output(&a->recurrence, &s->heads[item]);
    if (threadIdx.x >= 2 * ROLE_THREADS) {
        setmaxnreg_dec(PREPARE_REGISTERS);
        prepare_chunks(a, s, pass);
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
DEFINE_FORWARD(summaries, SUMMARIES)
DEFINE_FORWARD(segments, SEGMENTS)
