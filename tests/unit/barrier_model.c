/* barrier_model.c: the searches of barrier_model.h. */
#include "barrier_model.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SLOT_BITS = 23 };

struct agent *add_agent(struct model *m)
{
    assert_true(m->count < MOST_AGENTS);
    return &m->agents[m->count++];
}

int add_barrier(struct model *m, int arrivals)
{
    assert_true(m->barriers < MOST_BARRIERS);
    m->arrivals[m->barriers] = arrivals;
    return m->barriers++;
}

void add_step(struct agent *a, enum step_kind kind, int at, int n)
{
    assert_true(a->count < MOST_STEPS);
    a->steps[a->count++] = (struct step){kind, at, n};
}

bool is_clean(struct findings found)
{
    return !found.early && !found.late && !found.misplaced && !found.deadlocks && !found.races;
}

void print_findings(struct findings found)
{
    print_message("%ld early, %ld late, %ld misplaced, %ld deadlocks, %ld races\n", found.early,
                  found.late, found.misplaced, found.deadlocks, found.races);
}

static void *allocate(size_t count, size_t bytes)
{
    void *memory = calloc(count, bytes);
    assert_non_null(memory);
    return memory;
}

static bool arrives(enum step_kind kind)
{
    return kind == ARRIVE || kind == JOIN;
}

static bool touches(enum step_kind kind)
{
    return kind == READ || kind == WRITE;
}

/* ---- Every state: where each agent is, in a few bits each ------------------------------------ */

struct layout {
    int shift[MOST_AGENTS + 1];
};

static struct layout find_layout(const struct model *m)
{
    struct layout l = {{0}};
    for (int i = 0; i < m->count; i++) {
        int bits = 0;
        while (m->agents[i].count >> bits)
            bits++;
        l.shift[i + 1] = l.shift[i] + bits;
        assert_true(l.shift[i + 1] < 64);
    }
    return l;
}

static int position(const struct layout *l, uint64_t state, int agent)
{
    const int bits = l->shift[agent + 1] - l->shift[agent];
    return (int)(state >> l->shift[agent] & (((uint64_t)1 << bits) - 1));
}

static void count_arrivals(const struct model *m, const struct layout *l, uint64_t state,
                           int counts[MOST_BARRIERS])
{
    memset(counts, 0, (size_t)m->barriers * sizeof counts[0]);
    for (int i = 0; i < m->count; i++)
        for (int at = 0, end = position(l, state, i); at < end; at++) {
            const struct step *step = &m->agents[i].steps[at];
            if (arrives(step->kind))
                counts[step->at]++;
        }
}

/* Whether an agent can take its next step; notes what should never be. */
static bool can_step(const struct model *m, const struct step *step,
                     const int counts[MOST_BARRIERS], struct findings *found)
{
    if (step->kind == JOIN || touches(step->kind))
        return true;
    const int phase = counts[step->at] / m->arrivals[step->at]; /* the one under way */
    if (step->kind == GATHER)
        return phase > step->n;
    if (step->kind == ARRIVE) {
        found->misplaced += phase != step->n;
        return true;
    }
    const bool passes = phase % 2 != step->n % 2;
    found->early += passes && phase < step->n;
    if (step->kind == LOOK)
        return true;
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

struct findings search_states(const struct model *m)
{
    struct findings found = {0};
    struct visited v = {.slots = allocate((size_t)1 << SLOT_BITS, sizeof(uint64_t)),
                        .queue = allocate(MOST_STATES, sizeof(uint64_t))};
    const struct layout l = find_layout(m);
    visit(&v, 0);
    for (size_t next = 0; next < v.count; next++) {
        const uint64_t state = v.queue[next];
        int counts[MOST_BARRIERS], moves = 0, left = 0;
        count_arrivals(m, &l, state, counts);
        for (int i = 0; i < m->count; i++) {
            const struct agent *agent = &m->agents[i];
            const int at = position(&l, state, i);
            if (at == agent->count)
                continue;
            left++;
            if (can_step(m, &agent->steps[at], counts, &found)) {
                moves++;
                visit(&v, state + ((uint64_t)1 << l.shift[i]));
            }
        }
        found.deadlocks += left > 0 && moves == 0;
    }
    found.states = (long)v.count;
    free(v.slots);
    free(v.queue);
    return found;
}

/* ---- What must come before a step: a clock, how many steps of each agent --------------------- */

struct phase {
    int arrived;
    int16_t *clock; /* what comes before its end */
};

struct orders {
    const struct model *m;
    struct phase *phases;         /* [barriers][MOST_PHASES] */
    int16_t *clocks[MOST_AGENTS]; /* before each step of the agent, and after the last */
    int taken[MOST_AGENTS];       /* steps */
};

static const struct phase *find_phase(const struct orders *o, int barrier, int n)
{
    assert_true(n < MOST_PHASES);
    return &o->phases[barrier * MOST_PHASES + n];
}

static bool is_complete(const struct orders *o, int barrier, int n)
{
    for (; n >= 0; n--)
        if (find_phase(o, barrier, n)->arrived < o->m->arrivals[barrier])
            return false;
    return true;
}

/* What comes before the agent's step `at`, the agent's own steps with it. */
static int16_t *clock_before(const struct orders *o, int agent, int at)
{
    return o->clocks[agent] + at * o->m->count;
}

static void join_clocks(int16_t *to, const int16_t *from, int count)
{
    for (int i = 0; i < count; i++)
        if (to[i] < from[i])
            to[i] = from[i];
}

static bool comes_before(const int16_t *x, const int16_t *y, int count)
{
    for (int i = 0; i < count; i++)
        if (x[i] > y[i])
            return false;
    return true;
}

static void take_step(struct orders *o, int agent)
{
    const int at = o->taken[agent]++, count = o->m->count;
    const struct step *step = &o->m->agents[agent].steps[at];
    int16_t *after = clock_before(o, agent, at + 1);
    memcpy(after, clock_before(o, agent, at), (size_t)count * sizeof after[0]);
    after[agent] = (int16_t)(at + 1);
    if (touches(step->kind) || step->kind == LOOK)
        return;
    struct phase *phase = &o->phases[step->at * MOST_PHASES + step->n];
    if (arrives(step->kind)) {
        phase->arrived++;
        join_clocks(phase->clock, after, count);
    } else {
        join_clocks(after, phase->clock, count);
    }
}

/* Takes steps until none is left that can be taken. Which ones first makes no difference. */
static void take_all_steps(struct orders *o)
{
    for (bool moved = true; moved;) {
        moved = false;
        for (int i = 0; i < o->m->count; i++) {
            const struct agent *agent = &o->m->agents[i];
            while (o->taken[i] < agent->count) {
                const struct step *step = &agent->steps[o->taken[i]];
                if ((step->kind == WAIT || step->kind == GATHER) &&
                    !is_complete(o, step->at, step->n))
                    break;
                take_step(o, i);
                moved = true;
            }
        }
    }
}

/* A step at a barrier, which was taken. */
static void check_step(const struct orders *o, int agent, int at, struct findings *found)
{
    const struct step *step = &o->m->agents[agent].steps[at];
    const int count = o->m->count, arrivals = o->m->arrivals[step->at];
    /* whether the phase before is sure to be complete */
    bool sure = true;
    if (step->n > 0) {
        const struct phase *last = find_phase(o, step->at, step->n - 1);
        sure = last->arrived >= arrivals &&
               comes_before(last->clock, clock_before(o, agent, at), count);
    }
    if (arrives(step->kind)) {
        found->misplaced += !sure || find_phase(o, step->at, step->n)->arrived > arrivals;
        return;
    }
    found->early += !sure && step->kind != GATHER;
    if (step->kind == WAIT) {
        const struct phase *next = find_phase(o, step->at, step->n + 1);
        found->late += next->arrived >= arrivals && next->clock[agent] <= at;
    }
}

struct access {
    int agent, at;
    struct step step;
};

static long count_races(const struct orders *o, const struct access *accesses, int count)
{
    long races = 0;
    for (int i = 0; i < count; i++)
        for (int j = i + 1; j < count; j++) {
            const struct access *x = &accesses[i], *y = &accesses[j];
            if ((x->step.kind == READ && y->step.kind == READ) || x->agent == y->agent ||
                x->step.at >= y->step.at + y->step.n || y->step.at >= x->step.at + x->step.n)
                continue;
            races += clock_before(o, y->agent, y->at)[x->agent] <= x->at &&
                     clock_before(o, x->agent, x->at)[y->agent] <= y->at;
        }
    return races;
}

struct findings check_orders(const struct model *m)
{
    struct findings found = {0};
    const size_t agents = (size_t)m->count, phases = (size_t)m->barriers * MOST_PHASES;
    struct orders o = {.m = m, .phases = allocate(phases, sizeof o.phases[0])};
    int16_t *ends = allocate(phases * agents, sizeof ends[0]);
    size_t steps = 0, accesses = 0;
    for (size_t i = 0; i < phases; i++)
        o.phases[i].clock = ends + i * agents;
    for (int i = 0; i < m->count; i++) {
        o.clocks[i] = allocate((size_t)(m->agents[i].count + 1) * agents, sizeof o.clocks[i][0]);
        steps += (size_t)m->agents[i].count;
    }
    take_all_steps(&o);
    struct access *list = allocate(steps + 1, sizeof list[0]);
    for (int i = 0; i < m->count; i++) {
        found.states += o.taken[i];
        found.deadlocks += o.taken[i] < m->agents[i].count; /* agents that are left */
        for (int at = 0; at < o.taken[i]; at++) {
            const struct step *step = &m->agents[i].steps[at];
            if (touches(step->kind))
                list[accesses++] = (struct access){i, at, *step};
            else
                check_step(&o, i, at, &found);
        }
    }
    found.races = count_races(&o, list, (int)accesses);
    for (int i = 0; i < m->count; i++)
        free(o.clocks[i]);
    free(list);
    free(ends);
    free(o.phases);
    return found;
}
