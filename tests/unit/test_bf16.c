/* test_bf16.c: conversions against their definition: the nearest bfloat16, ties to the even one. */
#include <math.h>
#include <string.h>

#include "core/bf16.h"
#include "problem.h"

/* From the definition alone: of the two neighbours of |x| the nearer, else the even one. The
 * neighbour after the largest finite number counts as 2^128, as in IEEE 754. */
static uint16_t nearest(double x)
{
    uint16_t sign = signbit(x) ? 0x8000 : 0, low = 0, high = 0x7f80;
    x = fabs(x);
    if (isinf(x))
        return sign | 0x7f80;
    while (high - low > 1) { /* bf16 order is the order of its bits */
        uint16_t middle = (uint16_t)((low + high) / 2);
        if ((double)fkda_bf16_to_float(middle) <= x)
            low = middle;
        else
            high = middle;
    }
    double below = (double)fkda_bf16_to_float(low);
    double above = high == 0x7f80 ? 0x1p128 : (double)fkda_bf16_to_float(high);
    double down = x - below, up = above - x;
    if (down == up)
        return sign | (low % 2 ? high : low);
    return sign | (down < up ? low : high);
}

static float float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static void test_every_bf16_survives(void **state)
{
    (void)state;
    for (uint32_t h = 0; h <= 0xffff; h++) {
        float f = fkda_bf16_to_float((uint16_t)h);
        if (isnan(f)) {
            assert_true(isnan(fkda_bf16_to_float(fkda_bf16_from_float(f))));
            assert_int_equal(fkda_bf16_from_float(f) & 0xff80, h & 0xff80);
        } else {
            assert_int_equal(fkda_bf16_from_float(f), h);
            assert_int_equal(fkda_bf16_from_double((double)f), h);
        }
    }
}

/* Around every bf16: the tie, and one float or double to each side of it. */
static void test_ties_and_their_neighbours(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x7f80; h += 1) {
        uint32_t tie = h << 16 | 0x8000;
        for (int i = -1; i <= 1; i++) {
            float f = float_of(tie + (uint32_t)i);
            assert_int_equal(fkda_bf16_from_float(f), nearest((double)f));
            assert_int_equal(fkda_bf16_from_float(-f), nearest(-(double)f));
        }
        double exact = (double)float_of(tie);
        const double near_tie[] = {nextafter(exact, 0), exact, nextafter(exact, INFINITY)};
        for (int i = 0; i < 3; i++) { /* through float these would all look like the tie */
            assert_int_equal(fkda_bf16_from_double(near_tie[i]), nearest(near_tie[i]));
            assert_int_equal(fkda_bf16_from_double(-near_tie[i]), nearest(-near_tie[i]));
        }
    }
}

static void test_random_doubles(void **state)
{
    (void)state;
    uint64_t seed = 5;
    for (int i = 0; i < 200000; i++) {
        double x = ldexp(problem_uniform(&seed), (int)(problem_uniform(&seed) * 150));
        assert_int_equal(fkda_bf16_from_double(x), nearest(x));
        assert_int_equal(fkda_bf16_from_float((float)x), nearest((double)(float)x));
    }
}

static void test_special_values(void **state)
{
    (void)state;
    assert_int_equal(fkda_bf16_from_float(INFINITY), 0x7f80);
    assert_int_equal(fkda_bf16_from_double(-INFINITY), 0xff80);
    assert_int_equal(fkda_bf16_from_double(1e300), 0x7f80); /* as float32 rounds it */
    assert_int_equal(fkda_bf16_from_double(0x1.fep127), 0x7f7f);
    assert_int_equal(fkda_bf16_from_double(-0.0), 0x8000);
    assert_int_equal(fkda_bf16_from_double(5e-324), 0);
    assert_int_equal(fkda_bf16_from_double(-5e-324), 0x8000);
    /* A NaN whose payload lies in the lost half must not become an infinity. */
    assert_int_equal(fkda_bf16_from_bits(0x7f800001), 0x7fc0);
    assert_int_equal(fkda_bf16_from_bits(0xffffffff), 0xffff);
    assert_true(isnan(fkda_bf16_to_float(fkda_bf16_from_double((double)NAN))));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_bf16_survives),
        cmocka_unit_test(test_ties_and_their_neighbours),
        cmocka_unit_test(test_random_doubles),
        cmocka_unit_test(test_special_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
