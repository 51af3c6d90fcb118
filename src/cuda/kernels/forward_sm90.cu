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
#include "cuda/tile/chunk_factors.cuh"
#include "cuda/tile/chunk_items.cuh"
#include "cuda/tile/chunk_solve.cuh"
#include "cuda/tile/chunk_walk.cuh"

struct shared {
    struct raw raw[RING];
    struct chunk chunks[RING];
    struct values v[RING][2]; /* [half of V] */
    struct workshop workshops[PREPARERS];
    float offset[PREPARERS][TILE_K]; /* slope * dt_bias of the head that each is at */
    struct head heads[MOST_BLOCK_ITEMS];
    int total; /* chunks of all of them: they are counted through */
    /* of raw places: the copies are there; A and P are made. Of chunks: prepared, and v is there;
     * T is made; the state warps are done */
    uint64_t raw_full[RING], raw_empty[RING], full[RING], solved[RING], empty[RING];
};
static_assert(sizeof(struct shared) <= FORWARD_SM90_SHARED_BYTES, "the host asks for this much");

/* One of the block's chunks, and which use of which place of the rings it is, by parity. The same
 * in all lanes, as what follows. */
struct spot {
    int chunk, place, phase;
};

/* `chunks` further on, at most RING. */
static __device__ __forceinline__ struct spot further(struct spot x, int chunks)
{
    x.chunk += chunks;
    x.place += chunks;
    if (x.place >= RING) {
        x.place -= RING;
        x.phase ^= 1;
    }
    return x;
}

/* Moves on to `chunk`, which is one of the block's. */
static __device__ __forceinline__ struct source find_source(const struct shared *s, struct source x,
                                                            int chunk)
{
    while (seldom(chunk >= x.end)) {
        const struct head *w = &s->heads[++x.item];
        const int begun = shared_by_lanes(w->begun);
        x.end = begun + shared_by_lanes(w->chunks);
        x.row = shared_by_lanes((int)w->seq.begin) - CHUNK * begun;
        x.tokens = shared_by_lanes(w->length) + CHUNK * begun;
        x.batch = shared_by_lanes((int)w->seq.batch);
        x.h = shared_by_lanes(w->h);
        x.hk = shared_by_lanes(w->hk);
    }
    return x;
}

/* ---- prepare warpgroups --------------------------------------------------------------------- */

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
        fetch(&a->maps[MAP_V], s->v[at.place][0].rows[0], sizeof s->v[0][0], &s->full[at.place], x,
              x.h, at.chunk);
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
            s->offset[preparer][thread] = s->heads[x.item].slope * bias;
            named_barrier_sync(barrier, ROLE_THREADS); /* offsets are there */
        }
        const int count = count_tokens(x, at.chunk);
        int narrow;
        {
            const int piece = 16 * (lane % 16 / 2) + 8 * (lane % 2);
            float G[8][4], sums[4];
            sum_gates(G, sums, s->offset[preparer], raw->rows[lane / 16][2 * CHUNK + 8 * warp],
                      piece, s->heads[x.item].slope, a->prepare.lower_bound_log2, count, warp,
                      lane);
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
                                                  int self)
{
    const struct fkda_recurrence_args *r = &a->recurrence;
    const int thread = rederive(self);
    const int group = thread / ROLE_THREADS, warp = thread / 32 % 4, lane = thread % 32;
    struct chunk *chunk = &s->chunks[at.place];
    char *const v = s->v[at.place][group].rows[0];
    const int count = min((int)CHUNK, w->length - first);
    struct turn turn;
    uint32_t values[4][2];
    uint4 rows[2];
    load_values(values, v, warp, count, lane);
    const int due = first % (CHUNK * RESCALE_CHUNKS) == 0 || !a->prepare.qk_l2norm;
    if (seldom(needs_scale(x, values, due, r->target_log2 - 1)))
        choose_scale(x, values, r->target_log2 - 1);
    read_state(&turn, x, chunk, lane);
    update_state(&turn, x, values, chunk, &s->solved[at.place], at.phase, 0);
    await_output(&turn);
    scale_output(turn.o, x, r->scale);
    turn_rows(v, turn.o, warp, lane, 0);
    load_rows(rows, v, warp, lane);
    fence_proxy_async(); /* v's place is the copy engine's next */
    end_turn(x);
    mbarrier_arrive_warp(&s->empty[at.place], lane);
    store_out(w->out + first * r->out.stride_t, r->out.stride_t, rows, count,
              8 * group + 2 * warp + lane % 2, lane);
}

/* Takes the state of an item through its chunks, from `at` on. Returns what comes after them. */
static __device__ __forceinline__ struct spot walk_state(const struct fkda_forward_sm90_args *a,
                                                         struct shared *s, const struct head *w,
                                                         struct spot at)
{
    struct walker x;
    {
        const int thread = rederive(threadIdx.x);
        const int row = 16 * (thread / 32) + thread % 32 / 4, t = thread % 4;
        load_state(&x, w->entry, w->entry_is_f32, row, t);
        __syncwarp();
    }
    const int chunks = shared_by_lanes(w->chunks), self = rederive(threadIdx.x);
    const int warp = shared_by_lanes(threadIdx.x / 32);
    for (int i = 0; i < chunks; i++) {
        begin_chunk(s, at, warp, rederive(self) % 32);
        walk_chunk(a, s, w, &x, at, CHUNK * i, self);
        at = further(at, 1);
    }
    const int thread = rederive(threadIdx.x);
    const int row = 16 * (thread / 32) + thread % 32 / 4, t = thread % 4;
    if (w->exit)
        store_state(&x, w->exit, w->exit_is_f32, row, t);
    __syncwarp();
    return at;
}

static __device__ __forceinline__ void walk_states(const struct fkda_forward_sm90_args *a,
                                                   struct shared *s)
{
    struct spot at = {0, 0, 0};
    for (int item = 0; item < a->items_per_block; item++) {
        const struct head *const w = &s->heads[item];
        if (__any_sync(~0u, w->chunks > 0 || w->exit))
            at = walk_state(a, s, w, at);
    }
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
 * be much longer than the others. */
static __device__ __forceinline__ void find_items(const struct fkda_forward_sm90_args *a,
                                                  const struct order *order, struct head *w)
{
    const unsigned HV = (unsigned)a->recurrence.HV;
    const int64_t item = blockIdx.x + (int64_t)threadIdx.x * gridDim.x;
    if (item < a->items) {
        const int n = (int)((unsigned)item / HV);
        find_sequence(a, w, a->longest_first ? order->sequence[n] : n, (int)((unsigned)item % HV));
    }
}

static __device__ __forceinline__ void forward(const struct fkda_forward_sm90_args *a,
                                               struct shared *s)
{
    const int items = a->items_per_block;
    struct order *const order = (struct order *)s->raw; /* until the first copy */
    if (a->longest_first)
        order_sequences(&a->recurrence.sequences, order);
    if (threadIdx.x < 32) {
        struct head w = {{0}};
        find_items(a, order, &w);
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
    for (int i = 0; i < RING; i++)
        clear_triangles(&s->chunks[i]);
    for (int i = 0; i < PREPARERS; i++)
        clear_workshop(&s->workshops[i]);
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
        walk_states(a, s);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fkda_forward_sm90(const __grid_constant__ struct fkda_forward_sm90_args a)
{
    extern __shared__ __align__(1024) char memory[];
    forward(&a, (struct shared *)memory);
}
