/* test_tensor.c: dtypes, instruction set names, and the constructors. */
#include <string.h>

#include "problem.h"

static void test_dtypes(void **state)
{
    (void)state;
    static const struct {
        fkda_dtype dtype;
        const char *name;
        size_t bytes;
    } wanted[] = {
        {FKDA_DTYPE_INVALID, "invalid", 0}, {FKDA_BF16, "bfloat16", 2},    {FKDA_F32, "float32", 4},
        {FKDA_F64, "float64", 8},           {FKDA_I32, "int32", 4},        {FKDA_I64, "int64", 8},
        {FKDA_F16, "float16", 2},           {(fkda_dtype)7, "invalid", 0},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        assert_string_equal(fkda_dtype_name(wanted[i].dtype), wanted[i].name);
        assert_int_equal(fkda_dtype_bytes(wanted[i].dtype), wanted[i].bytes);
    }
}

static void test_isa_names(void **state)
{
    (void)state;
    static const char *const wanted[FKDA_ISA_COUNT] = {"auto",   "portable",    "avx2",
                                                       "avx512", "avx512_bf16", "amx_bf16"};
    for (int i = 0; i < FKDA_ISA_COUNT; i++)
        assert_string_equal(fkda_isa_name((fkda_isa)i), wanted[i]);
    assert_string_equal(fkda_isa_name(FKDA_ISA_COUNT), "invalid");
}

static void test_contiguous_strides(void **state)
{
    (void)state;
    float data[1];
    const int64_t shape[] = {2, 3, 5, 7};
    fkda_tensor tensor = fkda_tensor_contiguous(data, FKDA_F32, 4, shape);
    const int64_t strides[] = {105, 35, 7, 1};
    assert_ptr_equal(tensor.data, data);
    assert_int_equal(tensor.dtype, FKDA_F32);
    assert_int_equal(tensor.ndim, 4);
    assert_memory_equal(tensor.shape, shape, sizeof shape);
    assert_memory_equal(tensor.stride, strides, sizeof strides);
}

/* An empty dimension must not make the strides of the others 0. */
static void test_contiguous_empty(void **state)
{
    (void)state;
    const int64_t shape[] = {2, 0, 5};
    fkda_tensor tensor = fkda_tensor_contiguous(NULL, FKDA_BF16, 3, shape);
    assert_int_equal(tensor.stride[0], 5);
    assert_int_equal(tensor.stride[1], 5);
    assert_int_equal(tensor.stride[2], 1);
}

/* What is wrong is kept for validation to name; nothing outside the struct is touched. */
static void test_contiguous_keeps_what_is_wrong(void **state)
{
    (void)state;
    const int64_t huge[] = {INT64_MAX, INT64_MAX, INT64_MAX};
    fkda_tensor tensor = fkda_tensor_contiguous(NULL, FKDA_F32, 3, huge);
    assert_true(tensor.stride[0] == INT64_MAX);
    tensor = fkda_tensor_contiguous(NULL, FKDA_F32, FKDA_MAX_NDIM + 1, huge);
    assert_int_equal(tensor.ndim, FKDA_MAX_NDIM + 1);
    tensor = fkda_tensor_contiguous(NULL, FKDA_F32, -3, huge);
    assert_int_equal(tensor.ndim, -3);
    tensor = fkda_tensor_contiguous(NULL, FKDA_F32, 2, NULL);
    assert_int_equal(tensor.ndim, 2);
}

static void test_args_init(void **state)
{
    (void)state;
    fkda_args args;
    memset(&args, 0xff, sizeof args);
    fkda_args_init(&args);
    assert_int_equal(args.version, FKDA_ARGS_VERSION);
    assert_int_equal(args.flags, FKDA_QK_L2NORM | FKDA_BETA_SIGMOID);
    assert_int_equal(args.gate, FKDA_GATE_BOUNDED);
    assert_true(args.lower_bound == -5.0 && args.scale == 0.0);
    assert_null(args.q.data);
    assert_int_equal(args.checkpoint_indptr.ndim, 0);
    assert_null(args.workspace);
    assert_null(args.report);
    fkda_args_init(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_isa_names),
        cmocka_unit_test(test_contiguous_strides),
        cmocka_unit_test(test_contiguous_empty),
        cmocka_unit_test(test_contiguous_keeps_what_is_wrong),
        cmocka_unit_test(test_args_init),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
