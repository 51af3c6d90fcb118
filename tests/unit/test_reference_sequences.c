/* test_reference_sequences.c: the definition over several sequences: lengths, pool slots, padding,
 * checkpoints, state in place; each sequence against the same tokens run alone. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "problem.h"

#define K 16
#define V 16

/* Runs tokens [begin, begin + length) of p's one batch alone, from `initial` (or zero). */
static void run_alone(struct problem *p, struct problem *alone, int64_t begin, int64_t length,
                      const fkda_tensor *initial, int64_t slot)
{
    problem_init(alone, (struct problem_sizes){.T = length, .H = p->H});
    fkda_tensor *from[] = {&p->args.q, &p->args.k, &p->args.v, &p->args.g, &p->args.beta};
    fkda_tensor *to[] = {&alone->args.q, &alone->args.k, &alone->args.v, &alone->args.g,
                         &alone->args.beta};
    for (int i = 0; i < 5; i++)
        memcpy(to[i]->data, (float *)from[i]->data + begin * from[i]->stride[1],
               (size_t)(length * from[i]->stride[1]) * sizeof(float));
    alone->args.A_log = p->args.A_log;
    alone->args.dt_bias = p->args.dt_bias;
    int64_t elements = problem_elements(&alone->args.initial_state);
    if (initial && initial->data)
        memcpy(alone->args.initial_state.data, (float *)initial->data + slot * elements,
               (size_t)elements * sizeof(float));
    else
        alone->args.initial_state = (fkda_tensor){.data = NULL};
    problem_run(alone, fkda_reference);
}

static void assert_same(const fkda_tensor *a, int64_t a_begin, const fkda_tensor *b,
                        int64_t b_begin, int64_t count)
{
    assert_memory_equal((float *)a->data + a_begin, (float *)b->data + b_begin,
                        (size_t)count * sizeof(float));
}

static void assert_poison(const fkda_tensor *tensor, int64_t begin, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        assert_int_equal(((const uint32_t *)tensor->data)[begin + i], UINT32_MAX);
}

/* Cases 3, 28, 30: empty sequences, a padding slot, rows past cu[N]; pool slots out of order. */
static void test_pool_padding_and_empty_sequences(void **state)
{
    (void)state;
    enum { T = 64, H = 2, IMAGE = H * V * K, ROW = H * V };
    static const int64_t cu[] = {0, 0, 17, 20, 48, 48}, slots[] = {3, 0, -1, 5, 1};
    for (int with_initial = 0; with_initial < 2; with_initial++) {
        struct problem p, alone;
        problem_init(&p, (struct problem_sizes){.T = T, .H = H, .N = 6});
        p.args.cu_seqlens = problem_indices(&p, FKDA_I32, 6, cu);
        p.args.state_indices = problem_indices(&p, FKDA_I64, 5, slots);
        if (!with_initial)
            p.args.initial_state = (fkda_tensor){.data = NULL};
        problem_run(&p, fkda_reference);
        for (int n = 0; n < 5; n++) {
            int64_t begin = cu[n], length = cu[n + 1] - cu[n];
            if (slots[n] < 0) {
                for (int64_t i = begin * ROW; i < (begin + length) * ROW; i++)
                    assert_true(((const float *)p.args.out.data)[i] == 0);
                continue;
            }
            run_alone(&p, &alone, begin, length, &p.args.initial_state, slots[n]);
            assert_same(&p.args.out, begin * ROW, &alone.args.out, 0, length * ROW);
            assert_same(&p.args.final_state, slots[n] * IMAGE, &alone.args.final_state, 0, IMAGE);
            if (length == 0) {
                for (int64_t i = 0; i < IMAGE; i++)
                    assert_true(problem_get(&p.args.final_state, slots[n] * IMAGE + i) ==
                                (with_initial
                                     ? problem_get(&p.args.initial_state, slots[n] * IMAGE + i)
                                     : 0));
            }
            problem_free(&alone);
        }
        assert_poison(&p.args.out, 48 * ROW, (T - 48) * ROW);
        assert_poison(&p.args.final_state, 2 * IMAGE, IMAGE); /* slots of no sequence */
        assert_poison(&p.args.final_state, 4 * IMAGE, IMAGE);
        problem_free(&p);
    }
}

/* Case 47. Checkpoints of a padding sequence, and skipped ones, are not written. */
static void test_checkpoints(void **state)
{
    (void)state;
    enum { T = 80, H = 2, IMAGE = H * V * K };
    struct problem p, alone;
    problem_init(&p, (struct problem_sizes){.T = T, .H = H, .N = 3});
    p.args.cu_seqlens = INDICES(&p, FKDA_I64, 0, 20, 40, 80);
    p.args.state_indices = INDICES(&p, FKDA_I64, 2, -1, 0);
    const int64_t shape[] = {7, H, V, K};
    p.args.checkpoint_state = problem_poisoned(&p, FKDA_F32, 4, shape);
    p.args.checkpoint_offsets = INDICES(&p, FKDA_I32, 0, 16, 16, -1, 16, 32, 0);
    p.args.checkpoint_indptr = INDICES(&p, FKDA_I32, 0, 2, 3, 6);
    problem_run(&p, fkda_reference);
    static const struct {
        int64_t begin, length, slot; /* slot -1: not written */
    } wanted[] = {{0, 0, 2},   {0, 16, 2},  {0, 0, -1}, {0, 0, -1},
                  {40, 16, 0}, {40, 32, 0}, {0, 0, -1}};
    for (int m = 0; m < 7; m++) {
        if (wanted[m].slot < 0) {
            assert_poison(&p.args.checkpoint_state, m * IMAGE, IMAGE);
            continue;
        }
        run_alone(&p, &alone, wanted[m].begin, wanted[m].length, &p.args.initial_state,
                  wanted[m].slot);
        assert_same(&p.args.checkpoint_state, m * IMAGE, &alone.args.final_state, 0, IMAGE);
        problem_free(&alone);
    }
    problem_free(&p);
}

/* M / N checkpoints for each sequence where there is no indptr. */
static void test_checkpoints_without_indptr(void **state)
{
    (void)state;
    enum { T = 48, IMAGE = V * K };
    struct problem p, alone;
    problem_init(&p, (struct problem_sizes){.T = T, .N = 2});
    p.args.cu_seqlens = INDICES(&p, FKDA_I64, 0, 16, 48);
    const int64_t shape[] = {4, 1, V, K};
    p.args.checkpoint_state = problem_poisoned(&p, FKDA_F32, 4, shape);
    p.args.checkpoint_offsets = INDICES(&p, FKDA_I64, -1, 16, 16, 32);
    problem_run(&p, fkda_reference);
    assert_poison(&p.args.checkpoint_state, 0, IMAGE);
    static const int64_t begin[] = {0, 0, 16, 16}, length[] = {0, 16, 16, 32};
    for (int m = 1; m < 4; m++) {
        run_alone(&p, &alone, begin[m], length[m], &p.args.initial_state, m / 2);
        assert_same(&p.args.checkpoint_state, m * IMAGE, &alone.args.final_state, 0, IMAGE);
        problem_free(&alone);
    }
    problem_free(&p);
}

/* Case 29: in place equals two buffers, also with an empty sequence between. */
static void test_in_place(void **state)
{
    (void)state;
    enum { IMAGES = 3 * 2 * V * K };
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 30, .H = 2, .N = 3});
    p.args.cu_seqlens = INDICES(&p, FKDA_I32, 0, 13, 13, 30);
    problem_run(&p, fkda_reference);
    float wanted[IMAGES];
    memcpy(wanted, p.args.final_state.data, sizeof wanted);
    memcpy(p.args.final_state.data, p.args.initial_state.data, sizeof wanted);
    p.args.initial_state = p.args.final_state;
    problem_run(&p, fkda_reference);
    assert_memory_equal(p.args.final_state.data, wanted, sizeof wanted);
    problem_free(&p);
}

/* Case 2: what is NaN in one sequence, or past the last one, stays there. */
static void test_a_neighbours_nan(void **state)
{
    (void)state;
    enum { T = 64, ROW = V };
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = T, .N = 3});
    p.args.cu_seqlens = INDICES(&p, FKDA_I32, 0, 17, 40, 48);
    problem_run(&p, fkda_reference);
    float out[T * ROW], states[3 * V * K];
    memcpy(out, p.args.out.data, sizeof out);
    memcpy(states, p.args.final_state.data, sizeof states);
    fkda_tensor *inputs[] = {&p.args.q, &p.args.k, &p.args.v, &p.args.g, &p.args.beta};
    for (int i = 0; i < 5; i++) {
        int64_t row = inputs[i]->stride[1];
        for (int64_t j = 17 * row; j < T * row; j++)
            if (j < 40 * row || j >= 48 * row)
                ((float *)inputs[i]->data)[j] = NAN;
    }
    problem_poison(&p);
    problem_run(&p, fkda_reference);
    assert_memory_equal(p.args.out.data, out, sizeof(float) * 17 * ROW);
    assert_memory_equal((float *)p.args.out.data + 40 * ROW, out + 40 * ROW,
                        sizeof(float) * 8 * ROW);
    assert_memory_equal(p.args.final_state.data, states, sizeof(float) * V * K);
    assert_memory_equal((float *)p.args.final_state.data + 2 * V * K, states + 2 * V * K,
                        sizeof(float) * V * K);
    assert_true(isnan(((float *)p.args.out.data)[17 * ROW]));
    problem_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pool_padding_and_empty_sequences),
        cmocka_unit_test(test_checkpoints),
        cmocka_unit_test(test_checkpoints_without_indptr),
        cmocka_unit_test(test_in_place),
        cmocka_unit_test(test_a_neighbours_nan),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
