/* barrier_model.h: warps that wait for each other at barriers, and what can go wrong in any order.
 *
 * A model lists the steps of each warp. Two ways to judge it:
 *
 *     search_states()  visits every state that the warps can be in together, with waits by parity
 *                      as they are. For few warps and steps.
 *     check_orders()   asks of each step what must come before it. As long as a wait ends with the
 *                      phase that it is for, no step takes from others what they can do. So what a
 *                      barrier has counted when a warp looks is between what must have come first
 *                      and all that can come without that warp, and no search is needed to know
 *                      either. For blocks as they are; it also finds accesses that nothing orders.
 *
 * A model is clean to both or to neither, as far as barriers go. Of others check_orders() sees the
 * first faults, not what follows from them: numbers differ. */
#ifndef FKDA_TEST_BARRIER_MODEL_H
#define FKDA_TEST_BARRIER_MODEL_H

#include "problem.h"

enum {
    MOST_AGENTS = 192,
    MOST_STEPS = 1024, /* of an agent */
    MOST_BARRIERS = 224,
    MOST_PHASES = 32, /* of a barrier */
    MOST_STATES = 1 << 22
};

enum step_kind {
    ARRIVE, /* at an mbarrier, in phase `n` of it */
    WAIT,   /* for phase `n`, by its parity */
    LOOK,   /* whether phase `n` is complete, by its parity; waits for nothing */
    JOIN,   /* arrive at a named barrier, in phase `n` of it */
    GATHER, /* until phase `n` of it is complete */
    READ,   /* `n` neighbouring objects in shared memory */
    WRITE
};

struct step {
    enum step_kind kind;
    int at; /* the barrier; the first object */
    int n;
};

/* A warp, or a copy under way. */
struct agent {
    struct step steps[MOST_STEPS];
    int count;
};

struct model {
    struct agent agents[MOST_AGENTS];
    int count;
    int barriers;
    int arrivals[MOST_BARRIERS]; /* of a phase */
};

/* early: a wait may end before its phase. late: a warp may look at a phase when two more are under
 * way or complete. misplaced: an arrival may count in another phase, or is one too many. races:
 * pairs of accesses to an object, one of them a write, that nothing orders. */
struct findings {
    long states; /* or steps that were taken */
    long early, late, misplaced, deadlocks, races;
};

struct agent *add_agent(struct model *m);
int add_barrier(struct model *m, int arrivals);
void add_step(struct agent *a, enum step_kind kind, int at, int n);

struct findings search_states(const struct model *m);
struct findings check_orders(const struct model *m);
bool is_clean(struct findings found);
void print_findings(struct findings found);

#endif /* FKDA_TEST_BARRIER_MODEL_H */
