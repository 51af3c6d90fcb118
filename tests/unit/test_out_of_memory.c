/* test_out_of_memory.c: every allocation of the library fails once: an error, nothing written, and
 * nothing leaks (under a leak checker). The linker sends the library's malloc, calloc and
 * aligned_alloc here (--wrap). */
#include <stdlib.h>
#include <string.h>

#include "problem.h"

static int allocations;  /* since the last reset */
static int failing = -1; /* this one fails; -1: none */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_aligned_alloc(size_t alignment, size_t bytes);

static bool fails(void)
{
    return allocations++ == failing;
}

void *__wrap_malloc(size_t bytes)
{
    return fails() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return fails() ? NULL : __real_calloc(count, bytes);
}

void *__wrap_aligned_alloc(size_t alignment, size_t bytes)
{
    return fails() ? NULL : __real_aligned_alloc(alignment, bytes);
}

/* Counts the call's allocations, then fails each of them in turn. */
static void fail_each(struct problem *p, problem_call call, int at_least)
{
    char reason[FKDA_REASON_BYTES];
    p->args.report = NULL;
    failing = -1;
    allocations = 0;
    assert_int_equal(call(&p->args, reason, sizeof reason), FKDA_OK);
    int count = allocations;
    assert_true(count >= at_least);
    problem_poison(p);
    for (int i = 0; i < count; i++) {
        allocations = 0;
        failing = i;
        fkda_status status = call(&p->args, reason, sizeof reason);
        failing = -1;
        assert_int_equal(status, FKDA_ERROR_OUT_OF_MEMORY);
        assert_non_null(strstr(reason, "no memory for "));
        problem_assert_untouched(p);
    }
}

static void test_forward(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 20, .H = 3});
    fail_each(&p, fkda_forward, 1);
    problem_free(&p);
}

static void test_decode(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 2, .H = 3});
    p.args.initial_state = (fkda_tensor){.data = NULL};
    fail_each(&p, fkda_decode, 1);
    problem_free(&p);
}

static void test_reference(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 20, .H = 3});
    fail_each(&p, fkda_reference, 1);
    problem_free(&p);
}

/* Large pools need a set on the heap as well. */
static void test_large_pool(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.B = 2, .T = 2, .N = 40000});
    p.args.initial_state = (fkda_tensor){.data = NULL};
    p.args.state_indices = INDICES(&p, FKDA_I32, 39999, 0);
    fail_each(&p, fkda_forward, 2);
    problem_free(&p);
}

/* With a workspace from the caller the library allocates nothing. */
static void test_own_workspace(void **state)
{
    (void)state;
    struct problem p;
    size_t bytes = 0;
    problem_init(&p, (struct problem_sizes){.B = 2, .T = 20, .H = 3, .N = 4});
    p.args.state_indices = INDICES(&p, FKDA_I32, 3, 0);
    assert_int_equal(fkda_workspace_bytes(&p.args, &bytes, NULL, 0), FKDA_OK);
    p.args.workspace = problem_input(&p, bytes);
    p.args.workspace_bytes = bytes;
    allocations = 0;
    assert_int_equal(fkda_forward(&p.args, NULL, 0), FKDA_OK);
    assert_int_equal(allocations, 0);
    problem_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),       cmocka_unit_test(test_decode),
        cmocka_unit_test(test_reference),     cmocka_unit_test(test_large_pool),
        cmocka_unit_test(test_own_workspace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
