/* test_forward_barriers.c: the barriers of the fused Hopper forward, every interleaving of them.
 *
 * A wait by parity tells neighbouring phases apart only. So each wait of forward_sm90.cu rests on
 * the others: whoever waits must be needed for the phase after the next, or it may look too late;
 * and a phase must not be asked for before the one before it is certain. A run on a device does not
 * show it, since the windows are a few instructions wide. Here the warps' waits and arrivals are
 * listed in their order, and a search visits every state that the warps can be in together.
 *
 * This is a model: whoever changes a wait, an arrival or a count there changes it here too. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "problem.h"

enum {
    RING = 3,
    PREPARERS = 2,
    MOST_AGENTS = 8,
    MOST_STEPS = 160,
    SLOT_BITS = 21,
    MOST_STATES = 1 << 20
};

/* Barriers of a place of a ring, and the named barriers of the two prepare warpgroups. */
enum {
    RAW_FULL = 0,
    RAW_EMPTY = RAW_FULL + RING,
    FULL = RAW_EMPTY + RING,
    SOLVED = FULL + RING,
    EMPTY = SOLVED + RING,
    NAMED = EMPTY + RING,
    BARRIERS = NAMED + PREPARERS
};

enum kind {
    ARRIVE, /* at an mbarrier, in phase `n` of it */
    WAIT,   /* for phase `n`, by its parity */
    JOIN,   /* arrive at a named barrier */
    GATHER  /* until `n` warps have joined it */
};

struct step {
    enum kind kind;
    int barrier, n;
};

struct agent {
    struct step steps[MOST_STEPS];
    int count;
};

/* Prepare warps: one starts the copies of raw rows, one those of v, one none (as a kernel without q
 * would have one). A copy completes with its start: later it only holds up others. */
enum role { FETCHES_RAW, FETCHES_VALUES, FETCHES_NOTHING };

struct model {
    struct agent agents[MOST_AGENTS];
    int count;
    int arrivals[BARRIERS]; /* of a phase */
};

struct findings {
    long states, early, late, misplaced, deadlocks;
};

static void add(struct agent *a, enum kind kind, int barrier, int n)
{
    assert_true(a->count < MOST_STEPS);
    a->steps[a->count++] = (struct step){kind, barrier, n};
}

static void await_raw(struct agent *a, int chunk)
{
    if (chunk >= RING)
        add(a, WAIT, RAW_EMPTY + chunk % RING, chunk / RING - 1);
    add(a, WAIT, RAW_FULL + chunk % RING, chunk / RING);
}

static void named_barrier(struct agent *a, int preparer, int warps, int *joined)
{
    add(a, JOIN, NAMED + preparer, 0);
    *joined += warps;
    add(a, GATHER, NAMED + preparer, *joined);
}

/* prepare_chunks(), a warp of it. everyone_waits: before the copies of raw rows are started, also
 * those warps that start none. */
static void prepare(struct agent *a, int preparer, enum role role, int warps, int total,
                    bool everyone_waits)
{
    int joined = 0;
    if (preparer < total) {
        for (int i = preparer; i < RING && i < total && role == FETCHES_RAW; i += PREPARERS)
            add(a, ARRIVE, RAW_FULL + i % RING, 0);
        await_raw(a, preparer);
    }
    for (int chunk = preparer; chunk < total; chunk += PREPARERS) {
        const int place = chunk % RING, phase = chunk / RING, before = chunk - PREPARERS;
        if (chunk >= RING)
            add(a, WAIT, EMPTY + place, phase - 1);
        named_barrier(a, preparer, warps, &joined);
        if (role == FETCHES_VALUES)
            add(a, ARRIVE, FULL + place, phase);
        named_barrier(a, preparer, warps, &joined);
        if (chunk + PREPARERS < total)
            await_raw(a, chunk + PREPARERS);
        add(a, ARRIVE, RAW_EMPTY + place, phase);
        if (before >= 0)
            add(a, WAIT, SOLVED + before % RING, before / RING);
        add(a, ARRIVE, FULL + place, phase);
        if (chunk + RING < total && (role == FETCHES_RAW || everyone_waits)) {
            add(a, WAIT, RAW_EMPTY + place, phase);
            if (role == FETCHES_RAW)
                add(a, ARRIVE, RAW_FULL + place, phase + 1);
        }
    }
}

/* begin_chunk() and walk_chunk(): one of the state warps makes a chunk's T. */
static void walk(struct agent *a, int warp, int warps, int total)
{
    for (int chunk = 0; chunk < total; chunk++) {
        const int place = chunk % RING, phase = chunk / RING;
        add(a, WAIT, FULL + place, phase);
        if (chunk % warps == warp)
            add(a, ARRIVE, SOLVED + place, phase);
        add(a, WAIT, SOLVED + place, phase);
        add(a, ARRIVE, EMPTY + place, phase);
    }
}

static void build(struct model *m, int prepare_warps, int state_warps, int total,
                  bool everyone_waits)
{
    memset(m, 0, sizeof *m);
    for (int place = 0; place < RING; place++) {
        m->arrivals[RAW_FULL + place] = 1;
        m->arrivals[RAW_EMPTY + place] = prepare_warps;
        m->arrivals[FULL + place] = prepare_warps + 1;
        m->arrivals[SOLVED + place] = 1;
        m->arrivals[EMPTY + place] = state_warps;
    }
    for (int preparer = 0; preparer < PREPARERS; preparer++)
        for (int warp = 0; warp < prepare_warps; warp++)
            prepare(&m->agents[m->count++], preparer, (enum role)warp, prepare_warps, total,
                    everyone_waits);
    for (int warp = 0; warp < state_warps; warp++)
        walk(&m->agents[m->count++], warp, state_warps, total);
}

/* ---- The search: a state is where every warp is, a byte each --------------------------------- */

static int position(uint64_t state, int agent)
{
    return (int)(state >> 8 * agent & 0xff);
}

static void count_arrivals(const struct model *m, uint64_t state, int counts[BARRIERS])
{
    memset(counts, 0, BARRIERS * sizeof counts[0]);
    for (int i = 0; i < m->count; i++)
        for (int at = 0; at < position(state, i); at++) {
            const struct step *step = &m->agents[i].steps[at];
            counts[step->barrier] += step->kind == ARRIVE || step->kind == JOIN;
        }
}

/* Whether a warp can take its next step; notes what should never be. */
static bool can_step(const struct model *m, const struct step *step, const int counts[BARRIERS],
                     struct findings *found)
{
    if (step->kind == JOIN)
        return true;
    if (step->kind == GATHER)
        return counts[step->barrier] >= step->n;
    const int phase = counts[step->barrier] / m->arrivals[step->barrier]; /* the one under way */
    if (step->kind == ARRIVE) {
        found->misplaced += phase != step->n;
        return true;
    }
    const bool passes = phase % 2 != step->n % 2;
    found->early += passes && phase < step->n;
    found->late += !passes && phase > step->n;
    return passes;
}

struct visited {
    uint64_t *slots; /* a state's value plus one; 0: free */
    uint64_t *queue;
    size_t count;
};

static void visit(struct visited *v, uint64_t state)
{
    size_t at = (size_t)(state * 0x9e3779b97f4a7c15u >> (64 - SLOT_BITS));
    for (; v->slots[at]; at = (at + 1) % ((size_t)1 << SLOT_BITS))
        if (v->slots[at] == state + 1)
            return;
    assert_true(v->count < MOST_STATES);
    v->slots[at] = state + 1;
    v->queue[v->count++] = state;
}

static struct findings explore(const struct model *m)
{
    struct findings found = {0};
    struct visited v = {.slots = calloc((size_t)1 << SLOT_BITS, sizeof(uint64_t)),
                        .queue = malloc(MOST_STATES * sizeof(uint64_t))};
    assert_non_null(v.slots);
    assert_non_null(v.queue);
    visit(&v, 0);
    for (size_t next = 0; next < v.count; next++) {
        const uint64_t state = v.queue[next];
        int counts[BARRIERS], moves = 0, left = 0;
        count_arrivals(m, state, counts);
        for (int i = 0; i < m->count; i++) {
            const struct agent *agent = &m->agents[i];
            const int at = position(state, i);
            if (at == agent->count)
                continue;
            left++;
            if (can_step(m, &agent->steps[at], counts, &found)) {
                moves++;
                visit(&v, state + ((uint64_t)1 << 8 * i));
            }
        }
        found.deadlocks += left > 0 && moves == 0;
    }
    found.states = (long)v.count;
    free(v.slots);
    free(v.queue);
    return found;
}

static struct findings explore_blocks_of(int total, int prepare_warps, int state_warps,
                                         bool everyone_waits)
{
    struct model m;
    build(&m, prepare_warps, state_warps, total, everyone_waits);
    const struct findings found = explore(&m);
    print_message("%d chunks, %d + %d warps: %ld states, %ld early, %ld late, %ld misplaced, "
                  "%ld deadlocks\n",
                  total, prepare_warps, state_warps, found.states, found.early, found.late,
                  found.misplaced, found.deadlocks);
    return found;
}

static void check_clean(int total, int prepare_warps, int state_warps)
{
    const struct findings found = explore_blocks_of(total, prepare_warps, state_warps, false);
    assert_int_equal(found.early, 0);
    assert_int_equal(found.late, 0);
    assert_int_equal(found.misplaced, 0);
    assert_int_equal(found.deadlocks, 0);
    assert_true(found.states > 1);
}

static void test_every_interleaving_comes_to_its_end(void **state)
{
    (void)state;
    for (int total = 1; total <= 9; total++)
        check_clean(total, 2, 1);
    for (int total = 1; total <= 6; total++)
        check_clean(total, 2, 2);
}

static void test_a_warp_that_fetches_nothing(void **state)
{
    (void)state;
    for (int total = 1; total <= 6; total++)
        check_clean(total, 3, 1);
}

/* The kernel once did so. A warp that starts no copy holds up nobody, so it may look at the phase
 * only after two more have begun. */
static void test_the_model_finds_a_wait_that_nobody_waits_for(void **state)
{
    (void)state;
    for (int total = 1; total <= 3; total++)
        assert_int_equal(explore_blocks_of(total, 2, 1, true).late, 0);
    for (int total = 4; total <= 6; total++) {
        const struct findings found = explore_blocks_of(total, 2, 1, true);
        assert_true(found.late > 0);
        assert_true(found.deadlocks > 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_interleaving_comes_to_its_end),
        cmocka_unit_test(test_a_warp_that_fetches_nothing),
        cmocka_unit_test(test_the_model_finds_a_wait_that_nobody_waits_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
