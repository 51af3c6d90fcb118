/* test_threads.c: several threads call the library at once on shared inputs and outputs of their
 * own; each gets what it gets alone. Runs under ThreadSanitizer as well.
 *
 * No call is made before the threads start: the one-time choice of kernels is part of the race. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "problem.h"

enum { THREADS = 8, CALLS = 12, T = 21, H = 2, ROWS = T * H * 16, IMAGE = H * 16 * 16 };

struct worker {
    const struct problem *shared;
    pthread_t thread;
    float out[ROWS], state[IMAGE];
    fkda_status status;
    char reason[FKDA_REASON_BYTES];
};

static pthread_barrier_t start;

static void *work(void *argument)
{
    struct worker *w = argument;
    fkda_args args = w->shared->args;
    fkda_info info;
    args.num_threads = 1;
    args.out.data = w->out;
    args.final_state.data = w->state;
    pthread_barrier_wait(&start);
    for (int i = 0; i < CALLS && w->status == FKDA_OK; i++) {
        memset(w->out, 0xff, sizeof w->out);
        w->status = fkda_forward(&args, w->reason, sizeof w->reason);
        if (w->status == FKDA_OK)
            w->status = fkda_get_info(&info, w->reason, sizeof w->reason);
        /* An error on one thread must not show on another. */
        fkda_args wrong = args;
        char other[FKDA_REASON_BYTES];
        wrong.scale = 0;
        if (fkda_forward(&wrong, other, sizeof other) != FKDA_ERROR_INVALID_ARGUMENT)
            w->status = FKDA_ERROR_INTERNAL;
    }
    return NULL;
}

static void test_calls_at_once(void **state)
{
    (void)state;
    static struct worker workers[THREADS];
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = T, .H = H});
    assert_int_equal(pthread_barrier_init(&start, NULL, THREADS), 0);
    for (int i = 0; i < THREADS; i++) {
        workers[i].shared = &p;
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
    pthread_barrier_destroy(&start);
    p.args.num_threads = 1;
    problem_run(&p, fkda_forward);
    for (int i = 0; i < THREADS; i++) {
        if (workers[i].status != FKDA_OK)
            fail_msg("thread %d: %s", i, workers[i].reason);
        assert_memory_equal(workers[i].out, p.args.out.data, sizeof workers[i].out);
        assert_memory_equal(workers[i].state, p.args.final_state.data, sizeof workers[i].state);
    }
    problem_free(&p);
}

int main(void)
{
    unsetenv("FLASH_KDA_CPU_ISA");
    unsetenv("FLASH_KDA_PRECISION");
    unsetenv("FLASH_KDA_NUM_THREADS");
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_calls_at_once)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
