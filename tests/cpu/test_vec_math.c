/* Elementary functions of one kernel set against libm in double, over the whole range.
 * Compiled once per set, with VEC_HEADER and VEC_FEATURE given. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/bf16.h"
#include "cpu/kernel_sets.h"
#include VEC_HEADER
#include "cpu/vec_math.inc.h"

#define NOT_USABLE 77 /* ctest's code for "skipped" */

typedef vf (*vector_function)(vf);
typedef double (*exact_function)(double);

static vf apply_exp2(vf x)
{
    return vm_exp2(x);
}

static vf apply_sigmoid(vf y)
{
    return vm_sigmoid_exp2(y);
}

static vf apply_softplus(vf x)
{
    return vm_softplus(x);
}

/* The decay of a bounded gate with lower bound -5. */
#define DECAY_INVERSE (-1 / (5 * LOG2E))

static vf apply_decay(vf y)
{
    vf each[EACH] = {y};
    vm_decay_each(each, vf_set1(DECAY_INVERSE), 1);
    return each[0];
}

static double exact_decay(double y)
{
    return exp2(1 / ((double)DECAY_INVERSE * (1 + exp2(y))));
}

static double exact_sigmoid(double y)
{
    return 1 / (1 + exp2(y));
}

static double exact_softplus(double x)
{
    return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
}

static float one(vector_function f, float x)
{
    float lanes[VF_LANES];
    vf_storeu(lanes, f(vf_set1(x)));
    return lanes[VF_LANES - 1];
}

/* Largest error in units of the last place of the exact result, over about a million floats. */
static double worst_ulp(vector_function f, exact_function exact, float low, float high)
{
    double worst = 0;
    const int steps = 1 << 20;
    for (int i = 0; i < steps; i += VF_LANES) {
        float x[VF_LANES], y[VF_LANES];
        for (int j = 0; j < VF_LANES; j++)
            x[j] = low + (high - low) * (float)(i + j) / (float)steps;
        vf_storeu(y, f(vf_loadu(x)));
        for (int j = 0; j < VF_LANES; j++) {
            double e = exact((double)x[j]), unit = ldexp(1, ilogb(e) - 23);
            double error = fabs((double)y[j] - e) / unit;
            worst = error > worst ? error : worst;
        }
    }
    print_message("worst %.3f ulp on [%g, %g]\n", worst, (double)low, (double)high);
    return worst;
}

static void exp2_is_accurate(void **unused)
{
    (void)unused;
    assert_true(worst_ulp(apply_exp2, exp2, -125.0f, 127.0f) <= 1.2);
    assert_true(worst_ulp(apply_exp2, exp2, -8.0f, 0.0f) <= 1.2);
    assert_true(worst_ulp(apply_exp2, exp2, -0.01f, 0.0f) <= 0.6);
}

/* A decay near 1 is raised to the power of thousands of tokens: its error must not lean one way. */
static void exp2_near_one_is_not_biased(void **unused)
{
    (void)unused;
    double sum = 0;
    const int count = 100000;
    for (int i = 1; i <= count; i++) {
        float x = -0.02f * (float)i / (float)count;
        sum += ((double)one(apply_exp2, x) - exp2((double)x)) / ldexp(1, -24);
    }
    assert_true(fabs(sum / count) < 0.02);
}

static void sigmoid_is_accurate(void **unused)
{
    (void)unused;
    assert_true(worst_ulp(apply_sigmoid, exact_sigmoid, -30.0f, 30.0f) <= 2.5);
    assert_true(worst_ulp(apply_sigmoid, exact_sigmoid, -120.0f, 120.0f) <= 2.5);
}

/* The rounding of the logarithm, 5 log2(e) at most, shows where the decay is deep. */
static void decay_is_accurate(void **unused)
{
    (void)unused;
    assert_true(worst_ulp(apply_decay, exact_decay, -64.0f, 0.0f) <= 8.0);
    assert_true(worst_ulp(apply_decay, exact_decay, 0.0f, 4.0f) <= 7.0);
    assert_true(worst_ulp(apply_decay, exact_decay, 4.0f, 70.0f) <= 1.6);
}

/* e^-|x| carries the rounding of x log2(e), up to |x| ulp; softplus does where it is small. */
static void softplus_is_accurate(void **unused)
{
    (void)unused;
    assert_true(worst_ulp(apply_softplus, exact_softplus, -2.0f, 80.0f) <= 4.0);
    assert_true(worst_ulp(apply_softplus, exact_softplus, -20.0f, -2.0f) <= 20.0);
    assert_true(worst_ulp(apply_softplus, exact_softplus, -80.0f, -20.0f) <= 80.0);
}

static void ends_of_the_range(void **unused)
{
    (void)unused;
    assert_true(one(apply_exp2, 0.0f) == 1.0f);
    assert_true(one(apply_exp2, -INFINITY) == 0.0f);
    assert_true(one(apply_exp2, -1e30f) == 0.0f);
    assert_true(one(apply_exp2, INFINITY) == INFINITY);
    assert_true(one(apply_exp2, 1e30f) == INFINITY);
    assert_true(isnan(one(apply_exp2, NAN)));
    assert_true(one(apply_sigmoid, -INFINITY) == 1.0f);
    assert_true(one(apply_sigmoid, INFINITY) < 2e-38f);
    assert_true(isnan(one(apply_sigmoid, NAN)));
    assert_true(one(apply_decay, INFINITY) == 1.0f);
    assert_true(fabs((double)one(apply_decay, -INFINITY) - exp(-5)) < 1e-8);
    assert_true(isnan(one(apply_decay, NAN)));
    assert_true(one(apply_softplus, -INFINITY) == 0.0f);
    assert_true(one(apply_softplus, INFINITY) == INFINITY);
    assert_true(isnan(one(apply_softplus, NAN)));
    float payload; /* a NaN whose bits could be mistaken for an exponent */
    uint32_t bits = 0x7f800001u;
    memcpy(&payload, &bits, sizeof payload);
    assert_true(isnan(one(apply_exp2, payload)));
    assert_true(isnan(one(apply_sigmoid, payload)));
}

/* Every bfloat16, and every float whose rounding is a tie or next to one, against bf16.h. */
static void bf16_conversions(void **unused)
{
    (void)unused;
    static const uint32_t lower[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    for (uint32_t h = 0; h < 0x10000; h++) {
        for (size_t i = 0; i < sizeof lower / sizeof lower[0]; i++) {
            uint32_t bits = h << 16 | lower[i];
            float x, back[VF_LANES];
            memcpy(&x, &bits, sizeof x);
            uint16_t expected = fkda_bf16_from_bits(bits), got[2 * VF_LANES];
            memset(back, 0, sizeof back);
            memcpy(&back[VF_LANES - 1], &x, sizeof x);
            vf v = vf_loadu(back);
            vf_store_bf16(got, v);
            assert_int_equal(got[VF_LANES - 1], expected);
            vf_store_bf16_pair(got, vf_zero(), v);
            assert_int_equal(got[2 * VF_LANES - 1], expected);
        }
        uint16_t all[VF_LANES];
        uint32_t bits;
        float wide[VF_LANES];
        for (int j = 0; j < VF_LANES; j++)
            all[j] = (uint16_t)h;
        vf_storeu(wide, vf_load_bf16(all));
        memcpy(&bits, &wide[0], sizeof bits);
        assert_int_equal(bits, h << 16);
    }
}

static void transpose_and_sums(void **unused)
{
    (void)unused;
    vf rows[VF_LANES];
    float sums[VF_LANES], lanes[VF_LANES];
    for (int i = 0; i < VF_LANES; i++) {
        for (int j = 0; j < VF_LANES; j++)
            lanes[j] = (float)(100 * i + j);
        rows[i] = vf_loadu(lanes);
    }
    vf_storeu(sums, vf_sum_rows(rows));
    vf_transpose(rows);
    for (int i = 0; i < VF_LANES; i++) {
        assert_true(sums[i] == (float)(100 * i * VF_LANES + VF_LANES * (VF_LANES - 1) / 2));
        vf_storeu(lanes, rows[i]);
        for (int j = 0; j < VF_LANES; j++)
            assert_true(lanes[j] == (float)(100 * j + i));
    }
}

int main(void)
{
    const uint32_t needed = VEC_FEATURE;
    if ((fkda_cpu_features() & needed) != needed) {
        printf("this processor cannot run %s\n", VEC_HEADER);
        return NOT_USABLE;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp2_is_accurate),    cmocka_unit_test(exp2_near_one_is_not_biased),
        cmocka_unit_test(sigmoid_is_accurate), cmocka_unit_test(softplus_is_accurate),
        cmocka_unit_test(decay_is_accurate),   cmocka_unit_test(ends_of_the_range),
        cmocka_unit_test(bf16_conversions),    cmocka_unit_test(transpose_and_sums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
