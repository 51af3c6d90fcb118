/* pairs_sm90.cu: the forward where chains are fewer than multiprocessors, for Hopper: two blocks, a
 * cluster, share the preparation of their chunks.
 *
 *     block 0: chunks 0, 2, 4, ... --prepare--> ring of chunks of both blocks --state--> out
 *     block 1: chunks 1, 3, 5, ... --prepare--> ring of chunks of both blocks --state--> out
 *
 * A chunk is made as in forward_sm90.cu, and goes to the other block by a bulk copy from shared to
 * shared memory. Both blocks walk all of them: of a whole sequence or a first segment each has one
 * half of the value channels; of a later segment one walks from a zero state (FORCED), the other
 * from the identity (RESPONSE), see segments.h.
 * tests/unit/test_pair_barriers.c has a model of the waits and arrivals here: keep it so.
 */
#include "cuda/ptx/cluster.cuh"
#include "cuda/tile/chunk_factors.cuh"
#include "cuda/tile/chunk_items.cuh"
#include "cuda/tile/chunk_solve.cuh"
#include "cuda/tile/chunk_walk.cuh"
#include "cuda/tile/segment_map.cuh"

enum {
    PLACES = 4,    /* chunk c is in place c % PLACES of both blocks; block c % 2 makes it */
    SOLVER = MAP_V /* the prepare warp that makes T and sends chunks: it fetches no raw rows */
};
static_assert(PLACES == 2 * PREPARERS, "a prepare warpgroup has a place of its own");

struct pair_shared {
    struct raw raw[PREPARERS];
    struct chunk chunks[PLACES];
    struct values v[3]; /* see values_place() and rows_place() */
    struct workshop workshops[PREPARERS];
    float offset[TILE_K]; /* slope * dt_bias */
    struct head head;
    /* of prepare warpgroups: raw rows are there; the state warps of both blocks have left its
     * place. Of places: Kd, Qd, Kr and decay are there; P and T b are. Of state warpgroups: v is
     * there; it is in registers */
    uint64_t raw_full[PREPARERS], empty[PREPARERS], full[PLACES], solved[PLACES], v_full[2],
        v_empty[2];
};
static_assert(sizeof(struct pair_shared) <= FORWARD_SM90_SHARED_BYTES,
              "the host asks for this much");

/* The first and the second part of a chunk, which are sent apart. */
enum {
    ROWS_BYTES = sizeof(((struct chunk *)0)->rows) + sizeof(((struct chunk *)0)->decay),
    PRODUCTS_BYTES = sizeof(struct chunk) - ROWS_BYTES
};

/* Warps of state warpgroups that walk, in a block. */
static __device__ __forceinline__ int count_walkers(const struct head *w)
{
    return w->rows == OUT ? 4 : 8;
}

/* ---- prepare warpgroups --------------------------------------------------------------------- */

static __device__ __forceinline__ void fetch_raw(const struct fkda_forward_sm90_args *a,
                                                 struct pair_shared *s, struct source x, int chunk,
                                                 int preparer, int warp)
{
    if (warp != SOLVER)
        fetch(&a->maps[warp], s->raw[preparer].rows[0][CHUNK * warp], RAW_HALF,
              &s->raw_full[preparer], x, warp == MAP_G ? x.h : x.hk, chunk);
}

/* Sends part of a chunk to the other block, by one lane. */
static __device__ __forceinline__ void send(const void *part, uint32_t bytes, uint64_t *barrier,
                                            int rank)
{
    if (elect_one()) {
        const uint32_t arrived = cluster_address(barrier, rank ^ 1);
        cluster_arrive_expect(arrived, bytes);
        cluster_copy(cluster_address(part, rank ^ 1), part, bytes, arrived);
    }
    __syncwarp(); /* one lane was alone */
}

static __device__ __forceinline__ void prepare_chunks(const struct fkda_forward_sm90_args *a,
                                                      struct pair_shared *s, int rank)
{
    const struct head *const w = &s->head;
    const int total = shared_by_lanes(w->chunks), self = rederive(threadIdx.x % ROLE_THREADS);
    const int preparer = shared_by_lanes(threadIdx.x / ROLE_THREADS - 2);
    const int role = shared_by_lanes(threadIdx.x / 32 % 4); /* the warp's number in its group */
    const int barrier = 1 + preparer;                       /* the warpgroup's */
    const int first = rank + 2 * preparer;                  /* its chunks are those of a place */
    const struct source x = {0,
                             total,
                             shared_by_lanes((int)w->seq.begin),
                             shared_by_lanes(w->length),
                             shared_by_lanes((int)w->seq.batch),
                             shared_by_lanes(w->h),
                             shared_by_lanes(w->hk)};
    uint32_t raw_beta = 0;
    if (first < total) {
        const int thread = rederive(self);
        fetch_raw(a, s, x, first, preparer, role);
        raw_beta = load_chunk_beta(&a->prepare, x, first, thread / 32, thread % 32);
        if (!a->prepare.qk_l2norm && self % 32 < 16) /* the warp's own rows */
            s->workshops[preparer].inverse[16 * (self / 32) + self % 16] = 1.0f;
    }
    for (int chunk = first, phase = 0; chunk < total; chunk += PLACES, phase ^= 1) {
        const int thread = rederive(self), warp = thread / 32, lane = thread % 32;
        const int count = count_tokens(x, chunk);
        /* always the same, but then they would stay in registers */
        const int place = chunk % PLACES, preparer = place / 2;
        struct workshop *const shop = &s->workshops[preparer];
        struct raw *const raw = &s->raw[preparer];
        struct chunk *const out = &s->chunks[place];
        int narrow;
        mbarrier_wait(&s->raw_full[preparer], phase);
        if (seldom(count < CHUNK)) {
            clear_tail(raw, count, thread);
            fence_proxy_async();
            named_barrier_sync(barrier, ROLE_THREADS); /* the zeros are there */
        }
        if (a->prepare.qk_l2norm) {
            float norms[32];
            wgmma_pin_f32(norms, 32);
            wgmma_fence();
            start_norms(norms, raw);
            wgmma_wait(0);
            wgmma_pin_f32(norms, 32);
            finish_norms(shop->inverse, norms, warp, lane);
        }
        {
            const int piece = 16 * (lane % 16 / 2) + 8 * (lane % 2);
            float G[8][4], sums[4];
            sum_gates(G, sums, s->offset, raw->rows[lane / 16][2 * CHUNK + 8 * warp], piece,
                      w->slope, a->prepare.lower_bound_log2, count, warp, lane);
            *(float4 *)&shop->totals[warp][4 * lane] =
                make_float4(sums[0], sums[1], sums[2], sums[3]);
            if (chunk >= PLACES)
                mbarrier_wait(&s->empty[preparer], phase ^ 1);
            named_barrier_sync(barrier, ROLE_THREADS); /* totals and norms are there */
            narrow = make_factors(raw, out, shop, G, rederive(thread), a->prepare.qk_l2norm);
        }
        fence_proxy_async();
        mbarrier_arrive_warp(&s->full[place], lane);
        named_barrier_sync(barrier, ROLE_THREADS); /* factors are there; totals, norms used up */
        if (role == SOLVER)
            send(out, ROWS_BYTES, &s->full[place], rank);

        float d[16];
        if (narrow)
            start_products(d, raw, 1);
        else
            start_products(d, raw, 0);
        const float beta = lane < count ? beta_of(&a->prepare, raw_beta) : 0.0f;
        if (chunk + PLACES < total)
            raw_beta = load_chunk_beta(&a->prepare, x, chunk + PLACES, warp, lane);
        wgmma_wait(0);
        wgmma_pin_f32(d, 16);
        if (warp == 0)
            shop->beta[lane] = beta;
        store_products(d, shop, out, beta, role, lane);
        fence_proxy_async();
        named_barrier_sync(barrier, ROLE_THREADS); /* A, P and b are there, raw rows are not read */
        if (chunk + PLACES < total)
            fetch_raw(a, s, x, chunk + PLACES, preparer, role);
        if (role == SOLVER) {
            solve(shop, out, lane);
            fence_proxy_async();
            mbarrier_arrive_warp(&s->solved[place], lane);
            send(out->p, PRODUCTS_BYTES, &s->solved[place], rank);
        }
    }
}

/* ---- state warpgroups ----------------------------------------------------------------------- */

/* What is the same in all turns of a state warp. */
struct post {
    int chunks, length;
    int group, warp, half; /* its warpgroup, its number in there, the half of the value channels */
    enum rows kind;
};

/* Where v of a chunk lies until it is in registers, one half of the value channels, and which use
 * of that place it is, by parity. */
static __device__ __forceinline__ int values_place(const struct post *p, int chunk)
{
    return p->kind == OUT ? chunk % 2 : p->group;
}

static __device__ __forceinline__ int values_phase(const struct post *p, int chunk)
{
    return p->kind == OUT ? chunk / 2 % 2 : chunk % 2;
}

/* Where the rows of a chunk are turned, unless they are FORCED. */
static __device__ __forceinline__ int rows_place(const struct post *p)
{
    return p->kind == OUT ? 2 : p->group;
}

/* v of a chunk, by one warp. */
static __device__ __forceinline__ void fetch_values(const struct fkda_forward_sm90_args *a,
                                                    struct pair_shared *s, const struct head *w,
                                                    const struct post *p, int chunk)
{
    const int place = values_place(p, chunk), first = HALF_K * p->half;
    const int row = (int)w->seq.begin + CHUNK * chunk;
    if (elect_one()) {
        mbarrier_arrive_expect(&s->v_full[place], sizeof s->v[place]);
        tensor_copy_4d(s->v[place].rows, &a->maps[MAP_V], first, w->h, row, (int)w->seq.batch,
                       &s->v_full[place]);
        if (chunk + PLACES < p->chunks)
            tensor_prefetch_4d(&a->maps[MAP_V], first, w->h, row + CHUNK * PLACES,
                               (int)w->seq.batch);
    }
    __syncwarp(); /* one lane was alone */
}

/* All of a whole segment, whose second state warpgroup has nothing else to do. */
static __device__ __forceinline__ void fetch_all_values(const struct fkda_forward_sm90_args *a,
                                                        struct pair_shared *s, const struct head *w,
                                                        const struct post *p)
{
    for (int i = 0; i < p->chunks; i++) {
        if (i >= 2)
            mbarrier_wait(&s->v_empty[i % 2], values_phase(p, i) ^ 1);
        fetch_values(a, s, w, p, i);
    }
}

/* Where a thread stores its rows of the first chunk, 16 bytes each: rows of out, or parts of an
 * image of the segment (segments.h). */
static __device__ __forceinline__ char *first_target(const struct fkda_forward_sm90_args *a,
                                                     const struct head *w, const struct post *p,
                                                     int thread)
{
    const int lane = thread % 32, piece = 8 * p->half + 2 * p->warp + lane % 2;
    if (p->kind == FORCED)
        return w->images + 16 * thread;
    if (p->kind == RESPONSE)
        return w->images + response_at(row_of_lane(lane), piece);
    return (char *)(w->out + row_of_lane(lane) * a->recurrence.out.stride_t + 8 * piece);
}

/* Stores a chunk's rows that have been turned, of the first `live` tokens. Returns where those of
 * the next chunk go. */
static __device__ __forceinline__ char *store_rows(const struct fkda_forward_sm90_args *a,
                                                   const struct post *p, char *to, const char *from,
                                                   int live, int lane)
{
    const int64_t gap =
        16 * (p->kind == OUT ? a->recurrence.out.stride_t * (int64_t)sizeof(uint16_t) : 2 * TILE_K);
    uint4 rows[2];
    load_rows(rows, from, p->warp, lane);
    if (row_of_lane(lane) < live)
        st_global_u32x4(to, rows[0]);
    if (row_of_lane(lane) + 16 < live)
        st_global_u32x4(to + gap, rows[1]);
    __syncwarp(); /* lanes were alone */
    return to + 2 * gap;
}

static __device__ __forceinline__ void walk_states(const struct fkda_forward_sm90_args *a,
                                                   struct pair_shared *s, int rank)
{
    const struct head *const w = &s->head;
    const int self = rederive(threadIdx.x), group = shared_by_lanes(threadIdx.x / ROLE_THREADS);
    enum rows kind = (enum rows)shared_by_lanes(w->rows);
    const struct post p = {shared_by_lanes(w->chunks),
                           shared_by_lanes(w->length),
                           group,
                           shared_by_lanes(threadIdx.x / 32 % 4),
                           kind == OUT ? rank : group,
                           kind};
    if (!__any_sync(~0u, p.chunks > 0 || w->exit))
        return;
    if (kind == OUT && group == 1) {
        if (p.warp == 0)
            fetch_all_values(a, s, w, &p);
        return;
    }
    if (kind == FORCED && p.warp == 0 && p.chunks > 0)
        fetch_values(a, s, w, &p, 0);
    struct walker x;
    {
        const int thread = rederive(self);
        const int row = HALF_K * p.half + 16 * p.warp + thread % 32 / 4, t = thread % 4;
        load_state(&x, w->entry, w->entry_is_f32, row, t);
        if (kind == RESPONSE)
            set_identity(&x, row, t);
        __syncwarp();
    }
    uint32_t v[4][2] = {{0}};
    char *to = first_target(a, w, &p, rederive(self));
    char *const staging = s->v[rows_place(&p)].rows[0];
    const int target = a->recurrence.target_log2 - 1;
    int has_chunk = 0, needs = 1;
    if (kind != RESPONSE && p.chunks > 0) {
        const int lane = rederive(self) % 32, from = values_place(&p, 0);
        mbarrier_wait(&s->v_full[from], 0);
        load_values(v, s->v[from].rows[0], p.warp, p.length, lane);
        mbarrier_arrive_warp(&s->v_empty[from], lane);
    }
    if (kind == FORCED && p.warp == 0 && p.chunks > 1) {
        mbarrier_wait(&s->v_empty[group], 0);
        fetch_values(a, s, w, &p, 1);
    }
    for (int at = 0; at < p.chunks; at++) {
        const int thread = rederive(self), lane = thread % 32;
        const int place = at % PLACES, phase = at / PLACES % 2;
        const int next = at + 1, more = next < p.chunks;
        const struct chunk *chunk = &s->chunks[place];
        struct turn turn;
        mbarrier_finish(has_chunk, &s->full[place], phase);
        if (seldom(needs))
            choose_scale(&x, v, target);
        read_state(&turn, &x, chunk, lane);
        const int is_solved = mbarrier_test(&s->solved[place], phase);
        if (kind != FORCED && at > 0)
            to = store_rows(a, &p, to, staging, kind == OUT ? p.length - CHUNK * (at - 1) : CHUNK,
                            lane);
        update_state(&turn, &x, v, chunk, &s->solved[place], phase, is_solved);
        has_chunk = more && mbarrier_test(&s->full[next % PLACES], next / PLACES % 2);
        const int from = values_place(&p, next);
        if (kind != RESPONSE && more) {
            mbarrier_wait(&s->v_full[from], values_phase(&p, next));
            load_values(v, s->v[from].rows[0], p.warp, p.length - CHUNK * next, lane);
        }
        await_output(&turn);
        uint4 rows[3];
        int exponent = 0;
        if (kind == RESPONSE) { /* join scales it */
            exponent = fit_response(turn.o, x.f);
            turn_rows(staging, turn.o, p.warp, lane, 1);
        } else {
            scale_output(turn.o, &x, a->recurrence.scale);
            if (kind == FORCED)
                pack_forced(rows, turn.o);
            else
                turn_rows(staging, turn.o, p.warp, lane, 0);
        }
        needs = needs_scale(&x, v, next % RESCALE_CHUNKS == 0 || !a->prepare.qk_l2norm, target);
        if (kind != RESPONSE && more)
            mbarrier_arrive_warp(&s->v_empty[from], lane);
        /* loaded anew: of a register that outlives the loop the compiler does not know that its
         * lanes are the same, and then that the warp stays together */
        const enum rows again = (enum rows)shared_by_lanes(w->rows);
        end_turn(&x);
        __syncwarp();
        if (lane == 0)
            cluster_arrive(cluster_address(&s->empty[at / 2 % PREPARERS], at % 2));
        __syncwarp(); /* one lane was alone */
        if (kind == FORCED && p.warp == 0 && at + 2 < p.chunks) {
            mbarrier_wait(&s->v_empty[group], next % 2);
            fetch_values(a, s, w, &p, at + 2);
        }
        if (kind == FORCED) {
#pragma unroll
            for (int i = 0; i < 3; i++)
                st_global_u32x4(to + FORCED_BYTES / 3 * i, rows[i]);
            to += FORCED_BYTES;
        }
        if (kind == RESPONSE && lane == 0)
            w->exponent[at * EXPONENTS + 4 * group + p.warp] = exponent;
        __syncwarp(); /* one lane was alone */
        kind = again;
    }
    if (kind != FORCED && p.chunks > 0)
        store_rows(a, &p, to, staging, kind == OUT ? p.length - CHUNK * (p.chunks - 1) : (int)CHUNK,
                   rederive(self) % 32);
    const int thread = rederive(self);
    const int row = HALF_K * p.half + 16 * p.warp + thread % 32 / 4, t = thread % 4;
    if (w->exit && kind == RESPONSE)
        store_transition(&x, (float *)w->exit, row, t);
    else if (w->exit)
        store_state(&x, w->exit, w->exit_is_f32, row, t);
    __syncwarp();
}

/* ---- items ---------------------------------------------------------------------------------- */

/* Cuts a sequence off behind its first segment, unless that is all there is. */
static __device__ __forceinline__ void find_first_segment(const struct fkda_forward_sm90_args *a,
                                                          struct head *w, int64_t n)
{
    const struct fkda_segments *g = &a->segments;
    const int64_t image = first_piece(&a->recurrence.sequences, g, n) * a->recurrence.HV + w->h;
    if (w->padding || w->length <= CHUNK * (int64_t)g->first)
        return;
    w->length = CHUNK * g->first;
    w->chunks = g->first;
    w->exit = g->entry + image * TILE_K * TILE_K;
    w->exit_is_f32 = 1;
}

/* A later segment; `image`: the number of its images. All lanes of a warp come here together. */
static __device__ __forceinline__ void find_segment(const struct fkda_forward_sm90_args *a,
                                                    struct head *w, int64_t image, enum rows rows)
{
    const struct fkda_recurrence_args *r = &a->recurrence;
    const struct fkda_segments *g = &a->segments;
    const int64_t tokens = (int64_t)CHUNK * g->chunks;
    const struct later_segment segment = find_later_segment(&r->sequences, g, image, r->HV);
    struct head whole = {{0}};
    find_sequence(a, &whole, segment.n, (int)(image % (unsigned)r->HV));
    const int64_t left = whole.length - segment.begin;
    if (whole.padding || segment.begin < 0 || left <= 0)
        return; /* nothing to do, no such segment, or part of the first */
    w->h = whole.h;
    w->seq = whole.seq;
    w->seq.begin += segment.begin;
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

/* Finds the item of a cluster: first segments, which are the longest, begin first. Numbers that are
 * no segment, which cost the launch of two blocks, come last where there is one sequence. */
static __device__ __forceinline__ void find_item(const struct fkda_forward_sm90_args *a,
                                                 struct head *w, int rank)
{
    const int HV = a->recurrence.HV;
    const int64_t chains = (int64_t)a->recurrence.sequences.N * HV, item = blockIdx.x / 2;
    if (item < chains) {
        const int n = (int)((unsigned)item / (unsigned)HV);
        find_sequence(a, w, n, (int)((unsigned)item % (unsigned)HV));
        if (a->segments.chunks)
            find_first_segment(a, w, n);
    } else {
        find_segment(a, w, a->items - 1 - item, rank == 0 ? FORCED : RESPONSE);
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    fkda_pairs_sm90(const __grid_constant__ struct fkda_forward_sm90_args a)
{
    extern __shared__ __align__(1024) char memory[];
    struct pair_shared *const s = (struct pair_shared *)memory;
    const int rank = shared_by_lanes(cluster_rank());
    if (threadIdx.x < 32) {
        struct head w = {{0}};
        find_item(&a, &w, rank);
        if (threadIdx.x == 0) {
            w.hk = w.h / a.prepare.heads_per_key;
            w.slope = load_gate(&a.prepare, FKDA_GATE_BOUNDED, w.h).slope;
            s->head = w;
            for (int i = 0; i < PREPARERS; i++) {
                mbarrier_init(&s->raw_full[i], 3); /* who starts their copies */
                mbarrier_init(&s->empty[i], 2 * count_walkers(&w));
                mbarrier_init(&s->v_full[i], 1);
                mbarrier_init(&s->v_empty[i], 4 * WARP_ARRIVALS);
            }
            for (int i = 0; i < PLACES; i++) { /* the other block's: one who sends */
                mbarrier_init(&s->full[i], i % 2 == rank ? 4 * WARP_ARRIVALS : 1);
                mbarrier_init(&s->solved[i], i % 2 == rank ? WARP_ARRIVALS : 1);
            }
            mbarrier_init_fence();
        }
        __syncwarp();
    }
    for (int i = 0; i < PLACES; i++)
        clear_triangles(&s->chunks[i]);
    for (int i = 0; i < PREPARERS; i++)
        clear_workshop(&s->workshops[i]);
    fence_proxy_async();
    __syncthreads(); /* the head is there */
    if (threadIdx.x < TILE_K)
        s->offset[threadIdx.x] = s->head.slope * load_bias(&a.prepare, s->head.h, threadIdx.x);
    cluster_sync(); /* offsets, zeros and barriers are there, in both blocks */
    if (s->head.padding && rank == 0)
        clear_output(&a.recurrence, &s->head);
    if (threadIdx.x >= 2 * ROLE_THREADS) {
        setmaxnreg_dec(PREPARE_REGISTERS);
        prepare_chunks(&a, s, rank);
    } else {
        setmaxnreg_inc(STATE_REGISTERS);
        walk_states(&a, s, rank);
    }
    cluster_sync(); /* nobody leaves while the other block sends to it */
}
