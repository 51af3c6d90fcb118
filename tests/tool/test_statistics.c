/* test_statistics.c: tools/flashkda/statistics.c. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "statistics.h"

static void test_ratio(void **state)
{
    (void)state;
    double wanted[] = {3, 4, 0, 12}, got[] = {3, 4, 0, 12};
    const int64_t shape[] = {1, 2, 2};
    fkda_tensor x = fkda_tensor_contiguous(got, FKDA_F64, 3, shape);
    fkda_tensor y = fkda_tensor_contiguous(wanted, FKDA_F64, 3, shape);
    struct error_sums sums = {0, 0, 0};
    fkda_add_errors(&sums, &x, &y, -1);
    assert_true(fkda_error_ratio(&sums) == 0 && sums.largest == 0);

    got[1] = 4.5;
    got[3] = 13; /* row 1: left out by rows = 1 */
    sums = (struct error_sums){0, 0, 0};
    fkda_add_errors(&sums, &x, &y, 1);
    assert_true(fabs(fkda_error_ratio(&sums) - 0.1) < 1e-15);
    assert_true(sums.largest == 0.5);

    struct error_sums all = {0, 0, 0};
    fkda_add_errors(&all, &x, &y, -1);
    assert_true(fabs(fkda_error_ratio(&all) - sqrt(1.25) / 13) < 1e-15);
    fkda_merge_errors(&sums, &all);
    assert_true(sums.largest == 1 && sums.error == 1.5);
}

/* Neither a NaN nor an error against a zero reference may look like a small number. */
static void test_ratio_of_nonsense(void **state)
{
    (void)state;
    double values[] = {1, NAN, 2}, zeros[] = {0, 0, 0}, ones[] = {1, 1, 1};
    const int64_t shape[] = {1, 3};
    fkda_tensor bad = fkda_tensor_contiguous(values, FKDA_F64, 2, shape);
    fkda_tensor zero = fkda_tensor_contiguous(zeros, FKDA_F64, 2, shape);
    fkda_tensor one = fkda_tensor_contiguous(ones, FKDA_F64, 2, shape);
    struct error_sums sums = {0, 0, 0};
    fkda_add_errors(&sums, &bad, &one, -1);
    assert_true(isnan(fkda_error_ratio(&sums)) && isnan(sums.largest));
    sums = (struct error_sums){0, 0, 0};
    fkda_add_errors(&sums, &one, &bad, -1);
    assert_true(isnan(fkda_error_ratio(&sums)));
    sums = (struct error_sums){0, 0, 0};
    fkda_add_errors(&sums, &one, &zero, -1);
    assert_true(isinf(fkda_error_ratio(&sums)));
    sums = (struct error_sums){0, 0, 0};
    fkda_add_errors(&sums, &zero, &zero, -1);
    assert_true(fkda_error_ratio(&sums) == 0);
}

static void test_load_element(void **state)
{
    (void)state;
    uint16_t halves[] = {0x3F80, 0xC040, 0x7F80};
    const int64_t shape[] = {3};
    fkda_tensor tensor = fkda_tensor_contiguous(halves, FKDA_BF16, 1, shape);
    assert_true(fkda_load_element(&tensor, 0) == 1);
    assert_true(fkda_load_element(&tensor, 1) == -3);
    assert_true(isinf(fkda_load_element(&tensor, 2)));
}

static void test_quantile(void **state)
{
    (void)state;
    double values[] = {5, 1, 4, 2, 3};
    fkda_sort_values(values, 5);
    assert_true(fkda_quantile(values, 5, 0) == 1 && fkda_quantile(values, 5, 1) == 5);
    assert_true(fkda_quantile(values, 5, 0.5) == 3);
    assert_true(fabs(fkda_quantile(values, 5, 0.1) - 1.4) < 1e-12);
    assert_true(fkda_quantile(values, 1, 0.9) == 1);
    assert_true(fkda_quantile(NULL, 0, 0.5) == 0);
}

/* Two heads, two channels, three tokens, with gates whose value is known. */
static void test_decay(void **state)
{
    (void)state;
    float g[12] = {0}, beta[6] = {0}, A_log[] = {0, 0}, dt_bias[] = {0, 0, 0, 100};
    const int64_t g_shape[] = {1, 3, 2, 2}, beta_shape[] = {1, 3, 2}, heads[] = {2};
    const int64_t bias_shape[] = {2, 2};
    fkda_args args;
    fkda_args_init(&args);
    args.g = fkda_tensor_contiguous(g, FKDA_F32, 4, g_shape);
    args.beta = fkda_tensor_contiguous(beta, FKDA_F32, 3, beta_shape);
    struct decay_statistics decay;
    assert_int_equal(fkda_measure_decay(&args, &decay), FKDA_OK);
    assert_int_equal(decay.count, 12);
    assert_true(decay.mean == -2.5 && decay.p01 == -2.5 && decay.beta_mean == 0.5);
    assert_int_equal(decay.bins[25], 12); /* log10(2.5) = 0.398: bin (0.398 + 6) / 0.25 */

    args.A_log = fkda_tensor_contiguous(A_log, FKDA_F32, 1, heads);
    args.dt_bias = fkda_tensor_contiguous(dt_bias, FKDA_F32, 2, bias_shape);
    assert_int_equal(fkda_measure_decay(&args, &decay), FKDA_OK);
    assert_true(fabs(decay.p01 + 5) < 1e-12); /* head 1, channel 1 */
    assert_true(fabs(decay.mean + (3 * 2.5 + 5) / 4) < 1e-12);
    assert_int_equal(decay.bins[26], 3);

    args.gate = FKDA_GATE_SOFTPLUS;
    assert_int_equal(fkda_measure_decay(&args, &decay), FKDA_OK);
    assert_true(fabs(decay.p99 + log(2)) < 1e-12 && fabs(decay.p01 + 100) < 1e-9);
    assert_int_equal(decay.bins[FKDA_DECAY_BINS - 1], 3);

    args.gate = FKDA_GATE_ACTIVATED;
    args.flags = 0;
    assert_int_equal(fkda_measure_decay(&args, &decay), FKDA_OK);
    assert_true(decay.mean == 0 && decay.beta_mean == 0);
    assert_int_equal(decay.bins[0], 12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ratio),        cmocka_unit_test(test_ratio_of_nonsense),
        cmocka_unit_test(test_load_element), cmocka_unit_test(test_quantile),
        cmocka_unit_test(test_decay),
    };
    return cmocka_run_group_tests_name("statistics", tests, NULL, NULL);
}
