/* test_pair_barriers.c: the barriers of pairs_sm90.cu, and what its warps touch in shared memory.
 *
 * Both blocks of a cluster are in one model, since each makes half of the chunks and waits for the
 * other's. A whole or first segment: one state warpgroup of each block walks, and a warp of the
 * other fetches v. A later segment: all walk, block 0 FORCED, which fetches v, block 1 RESPONSE.
 *
 * Blocks as they are go through check_orders(), with their copies as agents of their own and with
 * the accesses that barriers are to keep apart. Blocks of few warps, whose copies complete with
 * their start, go through search_states(). Fences are not modelled: barriers order all before them.
 *
 * This is a model: whoever changes a wait, an arrival or a count there changes it here too. */
#include <string.h>

#include "barrier_model.h"

enum { PLACES = 4, PREPARERS = 2, WARPS = 4, TENSORS = 3, BLOCKS = 2, GROUPS = 2 };

/* Barriers of a block: of prepare warpgroups, of places, of state warpgroups; named ones of prepare
 * warpgroups; of all its warps. */
enum {
    RAW_FULL = 0,
    EMPTY = RAW_FULL + PREPARERS,
    FULL = EMPTY + PREPARERS,
    SOLVED = FULL + PLACES,
    V_FULL = SOLVED + PLACES,
    V_EMPTY = V_FULL + 2,
    NAMED = V_EMPTY + 2,
    BEGUN = NAMED + PREPARERS,
    ENDED,
    LEFT,
    BARRIERS
};

/* Objects in shared memory of a block. RAW: rows that a warp turns into factors, then those that it
 * may clear past the end, of each tensor. An object of four is one for each warp that writes it. */
enum {
    RAW_OBJECTS = 2 * WARPS * TENSORS,
    RAW = 0, /* [PREPARERS] */
    INVERSE = 0,
    TOTALS = INVERSE + WARPS,
    ROWS_OF_A = TOTALS + WARPS,
    BETA = ROWS_OF_A + 2,
    SHOP_OBJECTS,
    SHOP = RAW + PREPARERS * RAW_OBJECTS, /* [PREPARERS] */
    ROWS = 0,                             /* and decay behind them */
    ROWS_OBJECTS = WARPS + 1,
    PRODUCTS = ROWS + ROWS_OBJECTS, /* P of two warps, T b */
    PRODUCTS_OBJECTS = 3,
    CHUNK_OBJECTS = ROWS_OBJECTS + PRODUCTS_OBJECTS,
    CHUNKS = SHOP + PREPARERS * SHOP_OBJECTS, /* [PLACES] */
    VALUES = CHUNKS + PLACES * CHUNK_OBJECTS, /* [3][WARPS] */
    MBARRIERS = VALUES + 3 * WARPS,           /* which the other block arrives at */
    OBJECTS
};

enum rows { OUT, FORCED, RESPONSE };

/* Ways to break the kernel: first those that mislead waits and arrivals themselves, then those that
 * only let accesses meet. */
enum breakage {
    SOUND,
    NO_WAIT_FOR_RAW,
    NO_WAIT_FOR_EMPTY,
    NO_WAIT_FOR_FULL,
    NO_WAIT_FOR_SOLVED,
    NO_WAIT_FOR_V,
    NO_WAIT_FOR_V_EMPTY,
    EMPTY_OF_ONE_BLOCK,
    EMPTY_AT_HOME,
    FULL_OF_ALL_WARPS,
    WATCHES_CHUNKS,
    NO_BARRIER_OF_TAIL,
    NO_BARRIER_OF_TOTALS,
    NO_BARRIER_OF_FACTORS,
    NO_BARRIER_OF_PRODUCTS,
    SENDS_ROWS_UNGATHERED,
    SENDS_PRODUCTS_UNSOLVED,
    FETCHES_RAW_UNGATHERED,
    LEAVES_CHUNK_UNREAD,
    TURNS_ROWS_IN_V,
    BEGINS_AT_ONCE,
    LEAVES_AT_ONCE,
    BREAKAGES,
    FIRST_RACE = NO_BARRIER_OF_TAIL
};

static const char *const names[BREAKAGES] = {
    "sound",
    "no wait for raw rows",
    "no wait for empty",
    "no wait for full",
    "no wait for solved",
    "no wait for v_full",
    "no wait for v_empty",
    "empty counts the state warps of one block",
    "state warps arrive at empty of their own block",
    "full counts all prepare warps in the other block",
    "who fetches v waits for chunks that do not wait for it",
    "no named barrier after the tail's zeros",
    "no named barrier after totals",
    "no named barrier after factors",
    "no named barrier after products",
    "rows are sent before the barrier",
    "products are sent before T",
    "raw rows are fetched before the barrier",
    "state warps leave a chunk while they read it",
    "rows of out are turned in v's place",
    "no cluster_sync() at the start",
    "no cluster_sync() at the end",
};

struct shape {
    bool whole;                     /* or a later segment */
    int preparers;                  /* prepare warpgroups of a block; it has twice as many places */
    int prepare_warps, state_warps; /* of a warpgroup */
    int total;                      /* chunks */
    bool detailed; /* blocks as they are: with copies, accesses, looks, beginning and end */
    bool tail;     /* the last chunk is not full */
    enum breakage broken;
};

struct pair {
    struct model m;
    struct shape x;
};

/* A warp. */
struct post {
    struct pair *p;
    struct agent *a;
    int block, group, warp;
    enum rows kind;
    int gathered; /* phases of its named barrier */
};

/* Places of chunks, and after how many a place is used again. */
static int count_places(const struct post *w)
{
    return 2 * w->p->x.preparers;
}

static int barrier_of(int block, int barrier)
{
    return BARRIERS * block + barrier;
}

static bool is_broken(const struct post *w, enum breakage how)
{
    return w->p->x.broken == how;
}

static void step(const struct post *w, enum step_kind kind, int barrier, int phase)
{
    add_step(w->a, kind, barrier_of(w->block, barrier), phase);
}

/* Only a model with details has this. */
static void look(const struct post *w, int barrier, int phase)
{
    if (w->p->x.detailed)
        step(w, LOOK, barrier, phase);
}

static void touch_in(const struct post *w, int block, enum step_kind kind, int object, int count)
{
    if (w->p->x.detailed)
        add_step(w->a, kind, OBJECTS * block + object, count);
}

static void touch(const struct post *w, enum step_kind kind, int object, int count)
{
    touch_in(w, w->block, kind, object, count);
}

/* An arrival in the other block. */
static void arrive_there(const struct post *w, int block, int barrier, int phase)
{
    touch_in(w, block, READ, MBARRIERS, 1);
    add_step(w->a, ARRIVE, barrier_of(block, barrier), phase);
}

/* A copy that the warp starts, as an agent that comes after what the warp did. */
static struct post start_copy(const struct post *w)
{
    struct post copy = *w;
    const int started = add_barrier(&w->p->m, 1);
    copy.a = add_agent(&w->p->m);
    add_step(w->a, JOIN, started, 0);
    add_step(copy.a, GATHER, started, 0);
    return copy;
}

/* ---- prepare warpgroups --------------------------------------------------------------------- */

static bool is_solver(const struct post *w)
{
    return w->warp == w->p->x.prepare_warps - 1;
}

static void gather(struct post *w, enum breakage unless)
{
    if (w->p->x.prepare_warps == 1 || is_broken(w, unless))
        return;
    step(w, JOIN, NAMED + w->group, w->gathered);
    step(w, GATHER, NAMED + w->group, w->gathered);
    w->gathered++;
}

static void fetch_raw(const struct post *w, int phase)
{
    if (is_solver(w) && w->p->x.prepare_warps > 1)
        return;
    step(w, ARRIVE, RAW_FULL + w->group, phase);
    if (w->p->x.detailed) {
        const struct post copy = start_copy(w);
        for (int i = 0; i < 2 * WARPS; i++)
            touch(&copy, WRITE, RAW + RAW_OBJECTS * w->group + TENSORS * i + w->warp, 1);
        step(&copy, ARRIVE, RAW_FULL + w->group, phase);
    }
}

static void send(const struct post *w, int object, int count, int barrier, int phase)
{
    const int there = w->block ^ 1;
    if (!is_solver(w))
        return;
    arrive_there(w, there, barrier, phase);
    if (w->p->x.detailed) {
        const struct post copy = start_copy(w);
        touch(&copy, READ, object, count);
        touch_in(&copy, there, WRITE, object, count);
        arrive_there(&copy, there, barrier, phase);
    }
}

/* Up to the factors. */
static void make_factors(struct post *w, int place, int phase, bool tail)
{
    const int raw = RAW + RAW_OBJECTS * w->group, shop = SHOP + SHOP_OBJECTS * w->group;
    const int turned = raw + TENSORS * w->warp, out = CHUNKS + CHUNK_OBJECTS * place;
    const int cleared = raw + TENSORS * WARPS;
    if (!is_broken(w, NO_WAIT_FOR_RAW))
        step(w, WAIT, RAW_FULL + w->group, phase);
    if (tail) {
        touch(w, WRITE, cleared + TENSORS * w->warp, TENSORS);
        gather(w, NO_BARRIER_OF_TAIL);
    }
    touch(w, READ, raw, RAW_OBJECTS); /* norms */
    touch(w, WRITE, shop + INVERSE + w->warp, 1);
    touch(w, READ, turned, TENSORS); /* gates */
    touch(w, READ, cleared, TENSORS * WARPS);
    touch(w, WRITE, shop + TOTALS + w->warp, 1);
    if (phase > 0 && !is_broken(w, NO_WAIT_FOR_EMPTY))
        step(w, WAIT, EMPTY + w->group, phase - 1);
    gather(w, NO_BARRIER_OF_TOTALS);
    touch(w, READ, shop + INVERSE, WARPS);
    touch(w, READ, shop + TOTALS, WARPS);
    touch(w, READ, cleared, TENSORS * WARPS);
    touch(w, WRITE, turned, TENSORS);
    touch(w, WRITE, out + ROWS + w->warp, 1);
    if (w->warp == 0)
        touch(w, WRITE, out + ROWS + WARPS, 1);
}

/* A, P and T b; starts the copies for the next turn. */
static void make_products(struct post *w, int place, int phase, bool more)
{
    const int raw = RAW + RAW_OBJECTS * w->group, shop = SHOP + SHOP_OBJECTS * w->group;
    const int products = CHUNKS + CHUNK_OBJECTS * place + PRODUCTS;
    touch(w, READ, raw, RAW_OBJECTS);
    if (more && is_broken(w, FETCHES_RAW_UNGATHERED))
        fetch_raw(w, phase + 1);
    touch(w, READ, raw, RAW_OBJECTS); /* products are read until they are waited for */
    if (w->warp == 0)
        touch(w, WRITE, shop + BETA, 1);
    if (w->warp < 2)
        touch(w, WRITE, shop + ROWS_OF_A + w->warp, 1);
    else
        touch(w, WRITE, products + w->warp - 2, 1);
    gather(w, NO_BARRIER_OF_PRODUCTS);
    if (more && !is_broken(w, FETCHES_RAW_UNGATHERED))
        fetch_raw(w, phase + 1);
    if (is_broken(w, SENDS_PRODUCTS_UNSOLVED))
        send(w, products, PRODUCTS_OBJECTS, SOLVED + place, phase);
    if (is_solver(w)) {
        touch(w, READ, shop + ROWS_OF_A, 2);
        touch(w, READ, shop + BETA, 1);
        touch(w, WRITE, products + 2, 1);
        step(w, ARRIVE, SOLVED + place, phase);
    }
    if (!is_broken(w, SENDS_PRODUCTS_UNSOLVED))
        send(w, products, PRODUCTS_OBJECTS, SOLVED + place, phase);
}

/* prepare_chunks(). */
static void prepare(struct post *w)
{
    const int total = w->p->x.total, places = count_places(w), first = w->block + 2 * w->group;
    if (first < total)
        fetch_raw(w, 0);
    for (int chunk = first; chunk < total; chunk += places) {
        const int place = chunk % places, phase = chunk / places;
        const int rows = CHUNKS + CHUNK_OBJECTS * place + ROWS;
        make_factors(w, place, phase, w->p->x.tail && chunk + 1 == total);
        step(w, ARRIVE, FULL + place, phase);
        if (is_broken(w, SENDS_ROWS_UNGATHERED))
            send(w, rows, ROWS_OBJECTS, FULL + place, phase);
        gather(w, NO_BARRIER_OF_FACTORS);
        if (!is_broken(w, SENDS_ROWS_UNGATHERED))
            send(w, rows, ROWS_OBJECTS, FULL + place, phase);
        make_products(w, place, phase, chunk + places < total);
    }
}

/* ---- state warpgroups ----------------------------------------------------------------------- */

static int values_place(const struct post *w, int chunk)
{
    return w->kind == OUT ? chunk % 2 : w->group;
}

static int values_phase(const struct post *w, int chunk)
{
    return w->kind == OUT ? chunk / 2 : chunk;
}

static int rows_place(const struct post *w)
{
    if (is_broken(w, TURNS_ROWS_IN_V))
        return 0;
    return w->kind == OUT ? 2 : w->group;
}

static void fetch_values(const struct post *w, int chunk)
{
    const int place = values_place(w, chunk), phase = values_phase(w, chunk);
    step(w, ARRIVE, V_FULL + place, phase);
    if (w->p->x.detailed) {
        const struct post copy = start_copy(w);
        touch(&copy, WRITE, VALUES + WARPS * place, WARPS);
        step(&copy, ARRIVE, V_FULL + place, phase);
    }
}

/* Waits until v of an earlier chunk is in registers. */
static void await_v_empty(const struct post *w, int chunk)
{
    if (!is_broken(w, NO_WAIT_FOR_V_EMPTY))
        step(w, WAIT, V_EMPTY + values_place(w, chunk), values_phase(w, chunk));
}

static void fetch_all_values(const struct post *w)
{
    const int places = count_places(w);
    for (int i = 0; i < w->p->x.total; i++) {
        if (i >= 2)
            await_v_empty(w, i - 2);
        fetch_values(w, i);
        if (i > 0 && is_broken(w, WATCHES_CHUNKS))
            step(w, WAIT, FULL + (i - 1) % places, (i - 1) / places);
    }
}

static void load_values(const struct post *w, int chunk)
{
    const int place = values_place(w, chunk);
    if (!is_broken(w, NO_WAIT_FOR_V))
        step(w, WAIT, V_FULL + place, values_phase(w, chunk));
    touch(w, READ, VALUES + WARPS * place + w->warp, 1);
}

static void leave_values(const struct post *w, int chunk)
{
    step(w, ARRIVE, V_EMPTY + values_place(w, chunk), values_phase(w, chunk));
}

static void leave_chunk(const struct post *w, int chunk)
{
    const int block = is_broken(w, EMPTY_AT_HOME) ? w->block : chunk % 2;
    arrive_there(w, block, EMPTY + chunk / 2 % w->p->x.preparers, chunk / count_places(w));
}

/* A turn of walk_states(). */
static void walk_chunk(const struct post *w, int at)
{
    const int places = count_places(w), place = at % places, phase = at / places, next = at + 1;
    const int chunk = CHUNKS + CHUNK_OBJECTS * place;
    const int staging = VALUES + WARPS * rows_place(w) + w->warp;
    const bool takes_values = w->kind != RESPONSE && next < w->p->x.total;
    if (!is_broken(w, NO_WAIT_FOR_FULL))
        step(w, WAIT, FULL + place, phase);
    touch(w, READ, chunk + ROWS, ROWS_OBJECTS);
    look(w, SOLVED + place, phase);
    if (w->kind != FORCED && at > 0)
        touch(w, READ, staging, 1);
    if (!is_broken(w, NO_WAIT_FOR_SOLVED))
        step(w, WAIT, SOLVED + place, phase);
    touch(w, READ, chunk + PRODUCTS, PRODUCTS_OBJECTS);
    if (next < w->p->x.total)
        look(w, FULL + next % places, next / places);
    if (takes_values)
        load_values(w, next);
    if (w->kind != FORCED)
        touch(w, WRITE, staging, 1);
    if (takes_values)
        leave_values(w, next);
    if (is_broken(w, LEAVES_CHUNK_UNREAD))
        leave_chunk(w, at);
    touch(w, READ, chunk, CHUNK_OBJECTS); /* products read it until they are waited for */
    if (!is_broken(w, LEAVES_CHUNK_UNREAD))
        leave_chunk(w, at);
    if (w->kind == FORCED && w->warp == 0 && at + 2 < w->p->x.total) {
        await_v_empty(w, next);
        fetch_values(w, at + 2);
    }
}

/* walk_states(). */
static void walk(const struct post *w)
{
    const int total = w->p->x.total;
    if (w->kind == OUT && w->group == 1) {
        if (w->warp == 0)
            fetch_all_values(w);
        return;
    }
    if (w->kind == FORCED && w->warp == 0 && total > 0)
        fetch_values(w, 0);
    if (w->kind != RESPONSE && total > 0) {
        load_values(w, 0);
        leave_values(w, 0);
    }
    if (w->kind == FORCED && w->warp == 0 && total > 1) {
        await_v_empty(w, 0);
        fetch_values(w, 1);
    }
    for (int at = 0; at < total; at++)
        walk_chunk(w, at);
    if (w->kind != FORCED && total > 0)
        touch(w, READ, VALUES + WARPS * rows_place(w) + w->warp, 1);
}

/* ---- blocks --------------------------------------------------------------------------------- */

static void set_arrivals(struct pair *p, int block)
{
    const struct shape *x = &p->x;
    int *const arrivals = &p->m.arrivals[barrier_of(block, 0)];
    const int copies = x->detailed ? 2 : 1; /* a copy arrives after who starts it */
    const int fetchers = x->prepare_warps > 1 ? x->prepare_warps - 1 : 1;
    const int walkers = x->state_warps * (x->whole ? 1 : GROUPS);
    for (int i = 0; i < 2; i++) {
        arrivals[RAW_FULL + i] = copies * fetchers;
        arrivals[EMPTY + i] = x->broken == EMPTY_OF_ONE_BLOCK ? walkers : BLOCKS * walkers;
        arrivals[V_FULL + i] = copies;
        arrivals[V_EMPTY + i] = x->state_warps;
        arrivals[NAMED + i] = x->prepare_warps;
    }
    for (int i = 0; i < PLACES; i++) {
        const bool own = i % 2 == block;
        arrivals[FULL + i] = own || x->broken == FULL_OF_ALL_WARPS ? x->prepare_warps : copies;
        arrivals[SOLVED + i] = own ? 1 : copies;
    }
    arrivals[BEGUN] = arrivals[LEFT] = 1;
    arrivals[ENDED] = x->preparers * x->prepare_warps + GROUPS * x->state_warps;
}

static void begin(const struct post *w)
{
    for (int block = 0; block < BLOCKS; block++)
        if (w->p->x.detailed && (block == w->block || !is_broken(w, BEGINS_AT_ONCE)))
            add_step(w->a, GATHER, barrier_of(block, BEGUN), 0);
}

static void end(const struct post *w)
{
    if (w->p->x.detailed)
        step(w, JOIN, ENDED, 0);
}

/* A block's shared memory: before its warps may use it, and after it is gone. */
static void add_memory(struct pair *p, int block)
{
    const struct post w = {.p = p, .a = add_agent(&p->m), .block = block};
    touch(&w, WRITE, 0, OBJECTS);
    step(&w, JOIN, BEGUN, 0);
    for (int i = 0; i < BLOCKS; i++)
        if (i == block || !is_broken(&w, LEAVES_AT_ONCE))
            add_step(w.a, GATHER, barrier_of(i, ENDED), 0);
    touch(&w, WRITE, 0, OBJECTS);
    step(&w, JOIN, LEFT, 0);
}

static void build(struct pair *p, const struct shape *x)
{
    memset(p, 0, sizeof *p);
    p->x = *x;
    p->m.barriers = BLOCKS * BARRIERS;
    for (int block = 0; block < BLOCKS; block++) {
        struct post w = {.p = p, .block = block};
        w.kind = x->whole ? OUT : block == 0 ? FORCED : RESPONSE;
        set_arrivals(p, block);
        for (w.group = 0; w.group < x->preparers; w.group++)
            for (w.warp = 0; w.warp < x->prepare_warps; w.warp++) {
                w.a = add_agent(&p->m);
                w.gathered = 0;
                begin(&w);
                prepare(&w);
                end(&w);
            }
        for (w.group = 0; w.group < GROUPS; w.group++)
            for (w.warp = 0; w.warp < x->state_warps; w.warp++) {
                w.a = add_agent(&p->m);
                begin(&w);
                walk(&w);
                end(&w);
            }
        if (x->detailed)
            add_memory(p, block);
    }
}

static struct findings judge(const struct shape *x, bool by_search)
{
    static struct pair p;
    build(&p, x);
    const struct findings found = by_search ? search_states(&p.m) : check_orders(&p.m);
    print_message("%s, %s, %d chunks%s, %d x %d + %d warps, %ld %s: ", names[x->broken],
                  x->whole ? "whole" : "segment", x->total, x->tail ? " with a tail" : "",
                  x->preparers, x->prepare_warps, x->state_warps, found.states,
                  by_search ? "states" : "steps");
    print_findings(found);
    return found;
}

/* A pair of blocks as they are. */
static struct findings judge_whole_blocks(enum breakage broken, bool whole, int total, bool tail)
{
    const struct shape x = {.whole = whole,
                            .preparers = PREPARERS,
                            .prepare_warps = WARPS,
                            .state_warps = WARPS,
                            .total = total,
                            .detailed = true,
                            .tail = tail,
                            .broken = broken};
    return judge(&x, false);
}

/* A pair of blocks of few warps, in both ways, which know the same. */
static struct findings judge_small_blocks(enum breakage broken, bool whole, int total,
                                          int preparers, int prepare_warps, int state_warps)
{
    const struct shape x = {.whole = whole,
                            .preparers = preparers,
                            .prepare_warps = prepare_warps,
                            .state_warps = state_warps,
                            .total = total,
                            .broken = broken};
    const struct findings found = judge(&x, true);
    assert_int_equal(is_clean(judge(&x, false)), is_clean(found));
    return found;
}

static void check_small_blocks(bool whole, int most, int preparers, int prepare_warps,
                               int state_warps)
{
    for (int total = 0; total <= most; total++)
        assert_true(is_clean(
            judge_small_blocks(SOUND, whole, total, preparers, prepare_warps, state_warps)));
}

static void test_no_order_is_wrong(void **state)
{
    (void)state;
    for (int total = 0; total <= 13; total++)
        for (int i = 0; i < 4; i++) {
            const struct findings found = judge_whole_blocks(SOUND, i % 2, total, i / 2);
            assert_true(is_clean(found));
            assert_true(found.states > 0);
        }
}

/* One preparer, two places: few states, so that a place can be used often. */
static void test_every_interleaving_comes_to_its_end(void **state)
{
    (void)state;
    check_small_blocks(true, 9, 1, 1, 1);
    check_small_blocks(false, 9, 1, 1, 1);
    check_small_blocks(true, 4, 1, 2, 1);
    check_small_blocks(false, 3, 1, 2, 1);
    check_small_blocks(true, 3, 1, 1, 2);
}

static void test_every_interleaving_of_two_preparers(void **state)
{
    (void)state;
    check_small_blocks(true, 5, 2, 1, 1);
    check_small_blocks(false, 3, 2, 1, 1);
    check_small_blocks(true, 2, 2, 2, 1);
}

static bool applies(enum breakage broken, bool whole)
{
    return broken != WATCHES_CHUNKS || whole;
}

static void test_the_model_finds_what_is_broken(void **state)
{
    (void)state;
    for (enum breakage i = SOUND + 1; i < BREAKAGES; i++)
        for (int whole = 0; whole <= 1; whole++) {
            if (!applies(i, whole))
                continue;
            const struct findings found = judge_whole_blocks(i, whole, 9, true);
            if (i < FIRST_RACE)
                assert_true(found.early + found.late + found.misplaced + found.deadlocks > 0);
            else
                assert_true(found.races > 0);
        }
}

/* Until a place is used again nobody needs to have left it. */
static void test_the_model_finds_it_only_where_it_matters(void **state)
{
    (void)state;
    for (int total = 0; total <= 6; total++) {
        assert_int_equal(is_clean(judge_whole_blocks(NO_WAIT_FOR_EMPTY, true, total, false)),
                         total <= PLACES);
        assert_int_equal(is_clean(judge_whole_blocks(NO_WAIT_FOR_V_EMPTY, true, total, false)),
                         total <= 2);
        assert_int_equal(is_clean(judge_whole_blocks(NO_BARRIER_OF_TAIL, true, total, false)),
                         true);
    }
}

static void test_the_search_finds_the_same(void **state)
{
    (void)state;
    for (enum breakage i = SOUND + 1; i < FIRST_RACE; i++)
        for (int whole = 0; whole <= 1; whole++) {
            const struct findings found = judge_small_blocks(i, whole, 4, 1, 1, 1);
            if (i == NO_WAIT_FOR_EMPTY || i == EMPTY_OF_ONE_BLOCK || i == EMPTY_AT_HOME ||
                (whole && (i == NO_WAIT_FOR_V || i == NO_WAIT_FOR_V_EMPTY || i == WATCHES_CHUNKS)))
                assert_false(is_clean(found));
        }
    assert_false(is_clean(judge_small_blocks(FULL_OF_ALL_WARPS, true, 2, 1, 2, 1)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_order_is_wrong),
        cmocka_unit_test(test_every_interleaving_comes_to_its_end),
        cmocka_unit_test(test_every_interleaving_of_two_preparers),
        cmocka_unit_test(test_the_model_finds_what_is_broken),
        cmocka_unit_test(test_the_model_finds_it_only_where_it_matters),
        cmocka_unit_test(test_the_search_finds_the_same),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
