/* test_options.c: environment variables: which values are right, and that a field beats them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/checks.h"
#include "problem.h"

static const char *const names[] = {"FLASH_KDA_CPU_ISA", "FLASH_KDA_PRECISION",
                                    "FLASH_KDA_NUM_THREADS"};

static int clear_environment(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++)
        unsetenv(names[i]);
    unsetenv("FLASH_KDA_CUDA_PATH");
    return 0;
}

struct resolved {
    fkda_status status;
    fkda_isa isa;
    fkda_precision precision;
    int num_threads;
    char reason[FKDA_REASON_BYTES];
};

static struct resolved resolve(int32_t isa, int32_t precision, int32_t num_threads)
{
    fkda_args args;
    struct resolved r = {.reason = ""};
    fkda_args_init(&args);
    args.isa = isa;
    args.precision = precision;
    args.num_threads = num_threads;
    r.status = fkda_resolve_environment(&args, &r.isa, &r.precision, &r.num_threads,
                                        (struct fkda_reason){r.reason, sizeof r.reason});
    return r;
}

static void test_defaults(void **state)
{
    (void)state;
    for (int empty = 0; empty < 2; empty++) {
        for (int i = 0; i < 3 && empty; i++)
            setenv(names[i], "", 1); /* counts as unset */
        struct resolved r = resolve(0, 0, 0);
        assert_int_equal(r.status, FKDA_OK);
        assert_int_equal(r.isa, FKDA_ISA_AUTO);
        assert_int_equal(r.precision, FKDA_PRECISION_DEFAULT);
        assert_in_range(r.num_threads, 1, FKDA_MAX_THREADS);
    }
}

static void test_right_values(void **state)
{
    (void)state;
    for (int i = 0; i < FKDA_ISA_COUNT; i++) {
        setenv(names[0], fkda_isa_name((fkda_isa)i), 1);
        assert_int_equal(resolve(0, 0, 0).isa, i);
    }
    setenv(names[1], "bf16", 1);
    assert_int_equal(resolve(0, 0, 0).precision, FKDA_PRECISION_BF16);
    setenv(names[1], "fp32", 1);
    assert_int_equal(resolve(0, 0, 0).precision, FKDA_PRECISION_FP32);
    static const struct {
        const char *text;
        int number;
    } threads[] = {{"1", 1}, {"7", 7}, {"007", 7}, {"1024", 1024}};
    for (int i = 0; i < 4; i++) {
        setenv(names[2], threads[i].text, 1);
        assert_int_equal(resolve(0, 0, 0).num_threads, threads[i].number);
    }
}

static void test_wrong_values(void **state)
{
    (void)state;
    static const struct {
        int name;
        const char *value, *wanted;
    } cases[] = {
        {0, "AVX2", "wanted auto, portable, avx2, avx512, avx512_bf16 or amx_bf16"},
        {0, "invalid", "wanted auto"},
        {0, "avx", "wanted auto"},
        {0, "avx2 ", "wanted auto"},
        {1, "half", "wanted fp32 or bf16"},
        {1, "default", "wanted fp32 or bf16"},
        {2, "0", "wanted a number from 1 to 1024"},
        {2, "-1", "wanted a number"},
        {2, "1025", "wanted a number"},
        {2, "two", "wanted a number"},
        {2, "2x", "wanted a number"},
        {2, " 2", "wanted a number"},
        {2, "4294967298", "wanted a number"},
        {2, "99999999999999999999999999999999999999", "wanted a number"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        clear_environment(NULL);
        setenv(names[cases[i].name], cases[i].value, 1);
        struct resolved r = resolve(0, 0, 0);
        char begins[128];
        snprintf(begins, sizeof begins, "%s: '%s', %s", names[cases[i].name], cases[i].value,
                 cases[i].wanted);
        assert_int_equal(r.status, FKDA_ERROR_INVALID_ARGUMENT);
        assert_memory_equal(r.reason, begins, strlen(begins));
    }
}

/* Not even a wrong value is looked at where the caller has chosen. */
static void test_a_field_beats_the_environment(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++)
        setenv(names[i], "nonsense", 1);
    struct resolved r = resolve(FKDA_ISA_PORTABLE, FKDA_PRECISION_FP32, 3);
    assert_int_equal(r.status, FKDA_OK);
    assert_int_equal(r.isa, FKDA_ISA_PORTABLE);
    assert_int_equal(r.precision, FKDA_PRECISION_FP32);
    assert_int_equal(r.num_threads, 3);
}

/* A very long value is cut, so that the reason still says what is wanted. */
static void test_long_value(void **state)
{
    (void)state;
    char value[2000];
    memset(value, 'a', sizeof value);
    value[sizeof value - 1] = '\0';
    for (int i = 0; i < 3; i++) {
        clear_environment(NULL);
        setenv(names[i], value, 1);
        struct resolved r = resolve(0, 0, 0);
        assert_int_equal(r.status, FKDA_ERROR_INVALID_ARGUMENT);
        assert_non_null(strstr(r.reason, "', wanted "));
        assert_true(strlen(r.reason) + 1 < sizeof r.reason);
    }
}

static const char cuda_path[] = "FLASH_KDA_CUDA_PATH";

static void test_cuda_path(void **state)
{
    (void)state;
    static const char *const right[] = {"auto", "sm80", "sm90", "sm90-forward"};
    static const char *const wrong[] = {"SM90", "sm_90", "90", "sm90 ", "portable"};
    char reason[FKDA_REASON_BYTES] = "";
    struct fkda_reason where = {reason, sizeof reason};
    enum fkda_cuda_path path = FKDA_CUDA_PATH_SM90;
    assert_int_equal(fkda_read_cuda_path(&path, where), FKDA_OK);
    assert_int_equal(path, FKDA_CUDA_PATH_AUTO);
    for (int i = 0; i < 4; i++) {
        setenv(cuda_path, right[i], 1);
        assert_int_equal(fkda_read_cuda_path(&path, where), FKDA_OK);
        assert_string_equal(fkda_cuda_path_name(path), right[i]);
    }
    setenv(cuda_path, "", 1); /* counts as unset */
    assert_int_equal(fkda_read_cuda_path(&path, where), FKDA_OK);
    assert_int_equal(path, FKDA_CUDA_PATH_AUTO);
    for (int i = 0; i < 5; i++) {
        char wanted[FKDA_REASON_BYTES];
        setenv(cuda_path, wrong[i], 1);
        assert_int_equal(fkda_read_cuda_path(&path, where), FKDA_ERROR_INVALID_ARGUMENT);
        snprintf(wanted, sizeof wanted, "%s: '%s', wanted auto, sm80, sm90 or sm90-forward",
                 cuda_path, wrong[i]);
        assert_string_equal(reason, wanted);
        fkda_info info;
        assert_int_equal(fkda_get_info(&info, reason, sizeof reason), FKDA_ERROR_INVALID_ARGUMENT);
        assert_string_equal(reason, wanted);
    }
    struct problem p; /* the CPU does not care */
    problem_init(&p, (struct problem_sizes){.T = 3});
    problem_run(&p, fkda_forward);
    problem_free(&p);
}

/* Through the public calls: nothing is written, and the definition does not care. */
static void test_calls_read_the_environment(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        clear_environment(NULL);
        setenv(names[i], "nonsense", 1);
        struct problem p;
        problem_init(&p, (struct problem_sizes){.T = 3});
        p.args.num_threads = 0;
        problem_refused(&p, fkda_forward, FKDA_ERROR_INVALID_ARGUMENT, names[i]);
        problem_run(&p, fkda_reference);
        fkda_info info;
        memset(&info, 0xff, sizeof info);
        assert_int_equal(fkda_get_info(&info, p.reason, sizeof p.reason),
                         FKDA_ERROR_INVALID_ARGUMENT);
        assert_memory_equal(p.reason, names[i], strlen(names[i]));
        for (size_t j = 0; j < sizeof info; j++)
            assert_int_equal(((unsigned char *)&info)[j], 0xff);
        problem_free(&p);
    }
    clear_environment(NULL);
    setenv(names[0], "portable", 1);
    setenv(names[2], "1", 1);
    struct problem p;
    fkda_report report;
    problem_init(&p, (struct problem_sizes){.T = 3, .H = 4});
    p.args.report = &report;
    p.args.num_threads = 0;
    problem_run(&p, fkda_forward);
    assert_string_equal(report.kernel, "cpu/portable/prefill_fp32");
    assert_int_equal(report.num_threads, 1);
    problem_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_defaults, clear_environment, clear_environment),
        cmocka_unit_test_setup_teardown(test_right_values, clear_environment, clear_environment),
        cmocka_unit_test_setup_teardown(test_wrong_values, clear_environment, clear_environment),
        cmocka_unit_test_setup_teardown(test_a_field_beats_the_environment, clear_environment,
                                        clear_environment),
        cmocka_unit_test_setup_teardown(test_long_value, clear_environment, clear_environment),
        cmocka_unit_test_setup_teardown(test_cuda_path, clear_environment, clear_environment),
        cmocka_unit_test_setup_teardown(test_calls_read_the_environment, clear_environment,
                                        clear_environment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
