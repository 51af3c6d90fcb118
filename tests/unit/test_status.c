/* test_status.c: names of status codes, versions, and the reason buffer. */
#include <stdio.h>
#include <string.h>

#include "core/plan.h"
#include "problem.h"

static void test_names(void **state)
{
    (void)state;
    assert_string_equal(fkda_status_name(FKDA_OK), "FKDA_OK");
    assert_string_equal(fkda_status_name(FKDA_ERROR_INVALID_ARGUMENT),
                        "FKDA_ERROR_INVALID_ARGUMENT");
    assert_string_equal(fkda_status_name(FKDA_ERROR_UNSUPPORTED), "FKDA_ERROR_UNSUPPORTED");
    assert_string_equal(fkda_status_name(FKDA_ERROR_WORKSPACE), "FKDA_ERROR_WORKSPACE");
    assert_string_equal(fkda_status_name(FKDA_ERROR_OUT_OF_MEMORY), "FKDA_ERROR_OUT_OF_MEMORY");
    assert_string_equal(fkda_status_name(FKDA_ERROR_DEVICE), "FKDA_ERROR_DEVICE");
    assert_string_equal(fkda_status_name(FKDA_ERROR_INTERNAL), "FKDA_ERROR_INTERNAL");
    assert_string_equal(fkda_status_name((fkda_status)99), "FKDA_ERROR_UNKNOWN");
}

/* Callers compare numbers across versions: they never change. */
static void test_codes_are_pinned(void **state)
{
    (void)state;
    assert_int_equal(FKDA_OK, 0);
    assert_int_equal(FKDA_ERROR_INVALID_ARGUMENT, 1);
    assert_int_equal(FKDA_ERROR_UNSUPPORTED, 2);
    assert_int_equal(FKDA_ERROR_WORKSPACE, 3);
    assert_int_equal(FKDA_ERROR_OUT_OF_MEMORY, 4);
    assert_int_equal(FKDA_ERROR_DEVICE, 5);
    assert_int_equal(FKDA_ERROR_INTERNAL, 6);
}

static void test_version(void **state)
{
    (void)state;
    char joined[32];
    snprintf(joined, sizeof joined, "%d.%d.%d", FKDA_VERSION_MAJOR, FKDA_VERSION_MINOR,
             FKDA_VERSION_PATCH);
    assert_string_equal(joined, FKDA_VERSION_STRING);
    assert_string_equal(fkda_version(), FKDA_VERSION_STRING);
    assert_string_equal(fkda_version(), FKDA_TEST_PROJECT_VERSION); /* CMake's */
}

static void test_fail_fits_the_buffer(void **state)
{
    (void)state;
    char text[8];
    memset(text, 'x', sizeof text);
    struct fkda_reason reason = {text, 5};
    assert_int_equal(fkda_fail(reason, FKDA_ERROR_DEVICE, "%s: %d", "abcdef", 1),
                     FKDA_ERROR_DEVICE);
    assert_memory_equal(text, "abcd\0xxx", 8);
    assert_int_equal(fkda_fail((struct fkda_reason){text, 0}, FKDA_ERROR_INTERNAL, "zzz"),
                     FKDA_ERROR_INTERNAL);
    assert_memory_equal(text, "abcd\0xxx", 8);
    assert_int_equal(fkda_fail((struct fkda_reason){NULL, 0}, FKDA_ERROR_WORKSPACE, "zzz"),
                     FKDA_ERROR_WORKSPACE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_codes_are_pinned),
        cmocka_unit_test(test_version),
        cmocka_unit_test(test_fail_fits_the_buffer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
