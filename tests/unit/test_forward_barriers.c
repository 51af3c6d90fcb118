/* test_forward_barriers.c: the barriers of the fused Hopper forward, every interleaving of them.
 *
 * A wait by parity tells neighbouring phases apart only. So each wait of forward_sm90.cu rests on
 * the others: whoever waits must be needed for the phase after the next, or it may look too late;
 * and a phase must not be asked for before the one before it is certain. A run on a device does not
 * show it, since the windows are a few instructions wide. Here the warps' waits and arrivals are
 * listed in their order, and a search visits every state that the warps can be in together.
 *
 * This is a model: whoever changes a wait, an arrival or a count there changes it here too. */
#include <string.h>

#include "barrier_model.h"

enum { RING = 3, PREPARERS = 2 };

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

/* Prepare warps: one starts the copies of raw rows, one those of v, one none (as a kernel without q
 * would have one). A copy completes with its start: later it only holds up others. */
enum role { FETCHES_RAW, FETCHES_VALUES, FETCHES_NOTHING };

static void await_raw(struct agent *a, int chunk)
{
    if (chunk >= RING)
        add_step(a, WAIT, RAW_EMPTY + chunk % RING, chunk / RING - 1);
    add_step(a, WAIT, RAW_FULL + chunk % RING, chunk / RING);
}

static void named_barrier(struct agent *a, int preparer, int *phase)
{
    add_step(a, JOIN, NAMED + preparer, *phase);
    add_step(a, GATHER, NAMED + preparer, *phase);
    ++*phase;
}

/* prepare_chunks(), a warp of it. everyone_waits: before the copies of raw rows are started, also
 * those warps that start none. */
static void prepare(struct agent *a, int preparer, enum role role, int total, bool everyone_waits)
{
    int gathered = 0;
    if (preparer < total) {
        for (int i = preparer; i < RING && i < total && role == FETCHES_RAW; i += PREPARERS)
            add_step(a, ARRIVE, RAW_FULL + i % RING, 0);
        await_raw(a, preparer);
    }
    for (int chunk = preparer; chunk < total; chunk += PREPARERS) {
        const int place = chunk % RING, phase = chunk / RING, before = chunk - PREPARERS;
        if (chunk >= RING)
            add_step(a, WAIT, EMPTY + place, phase - 1);
        named_barrier(a, preparer, &gathered);
        if (role == FETCHES_VALUES)
            add_step(a, ARRIVE, FULL + place, phase);
        named_barrier(a, preparer, &gathered);
        if (chunk + PREPARERS < total)
            await_raw(a, chunk + PREPARERS);
        add_step(a, ARRIVE, RAW_EMPTY + place, phase);
        if (before >= 0)
            add_step(a, WAIT, SOLVED + before % RING, before / RING);
        add_step(a, ARRIVE, FULL + place, phase);
        if (chunk + RING < total && (role == FETCHES_RAW || everyone_waits)) {
            add_step(a, WAIT, RAW_EMPTY + place, phase);
            if (role == FETCHES_RAW)
                add_step(a, ARRIVE, RAW_FULL + place, phase + 1);
        }
    }
}

/* begin_chunk() and walk_chunk(): one of the state warps makes a chunk's T. */
static void walk(struct agent *a, int warp, int warps, int total)
{
    for (int chunk = 0; chunk < total; chunk++) {
        const int place = chunk % RING, phase = chunk / RING;
        add_step(a, WAIT, FULL + place, phase);
        if (chunk % warps == warp)
            add_step(a, ARRIVE, SOLVED + place, phase);
        add_step(a, WAIT, SOLVED + place, phase);
        add_step(a, ARRIVE, EMPTY + place, phase);
    }
}

static void build(struct model *m, int prepare_warps, int state_warps, int total,
                  bool everyone_waits)
{
    memset(m, 0, sizeof *m);
    m->barriers = BARRIERS;
    for (int place = 0; place < RING; place++) {
        m->arrivals[RAW_FULL + place] = 1;
        m->arrivals[RAW_EMPTY + place] = prepare_warps;
        m->arrivals[FULL + place] = prepare_warps + 1;
        m->arrivals[SOLVED + place] = 1;
        m->arrivals[EMPTY + place] = state_warps;
    }
    for (int preparer = 0; preparer < PREPARERS; preparer++) {
        m->arrivals[NAMED + preparer] = prepare_warps;
        for (int warp = 0; warp < prepare_warps; warp++)
            prepare(add_agent(m), preparer, (enum role)warp, total, everyone_waits);
    }
    for (int warp = 0; warp < state_warps; warp++)
        walk(add_agent(m), warp, state_warps, total);
}

static struct findings explore_blocks_of(int total, int prepare_warps, int state_warps,
                                         bool everyone_waits)
{
    static struct model m;
    build(&m, prepare_warps, state_warps, total, everyone_waits);
    const struct findings found = search_states(&m);
    print_message("%d chunks, %d + %d warps, %ld states: ", total, prepare_warps, state_warps,
                  found.states);
    print_findings(found);
    /* the other way to judge it knows the same */
    assert_int_equal(is_clean(check_orders(&m)), is_clean(found));
    return found;
}

static void check_clean(int total, int prepare_warps, int state_warps)
{
    const struct findings found = explore_blocks_of(total, prepare_warps, state_warps, false);
    assert_true(is_clean(found));
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
