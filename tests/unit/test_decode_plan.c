/* test_decode_plan.c: device tensors through validation to the arguments of the decode kernels,
 * without a device. Pointers are numbers here: nothing may read what they point to. */
#include <stdio.h>
#include <string.h>

#include "cuda/decode_plan.h"
#include "device_call.h"
#include "problem.h"

/* N 3, T 2, H 2, HV 4, V 128 */
enum { N = 3, T = 2, H = 2, HV = 4, SLOTS = 9 };

static fkda_args call_of(int64_t V)
{
    fkda_args args = device_call_of(N, T, H, HV, V);
    args.A_log = tensor(0x70000000000, FKDA_F32, 1, HV, 0, 0, 0);
    args.dt_bias = tensor(0x80000000000, FKDA_F32, 2, HV, 128, 0, 0);
    args.final_state = tensor(0x90000000000, FKDA_F32, 4, N, HV, V, 128);
    return args;
}

/* Every sequence has T columns of a pool. */
static fkda_args draft_call(int64_t columns)
{
    fkda_args args = call_of(128);
    args.final_state = tensor(0x90000000000, FKDA_F32, 4, SLOTS, HV, 128, 128);
    args.state_indices = tensor(0xa0000000000, FKDA_I32, 2, N, columns, 0, 0);
    args.num_accepted_tokens = tensor(0xb0000000000, FKDA_I64, 1, N, 0, 0, 0);
    return args;
}

static fkda_status plan_of(const fkda_args *args, struct fkda_decode_args *kernel, char *text)
{
    struct fkda_reason reason = {text, FKDA_REASON_BYTES};
    struct fkda_plan plan;
    text[0] = '\0';
    fkda_status status = fkda_validate(args, FKDA_CALL_DECODE, &plan, reason);
    return status == FKDA_OK ? fkda_cuda_plan_decode(&plan, kernel, reason) : status;
}

static struct fkda_decode_args accept(fkda_args args)
{
    char reason[FKDA_REASON_BYTES];
    struct fkda_decode_args kernel;
    const fkda_status status = plan_of(&args, &kernel, reason);
    if (status != FKDA_OK)
        fail_msg("%s: %s", fkda_status_name(status), reason);
    return kernel;
}

static void refuse(fkda_args args, fkda_status wanted, const char *begins)
{
    char reason[FKDA_REASON_BYTES];
    struct fkda_decode_args kernel;
    const fkda_status status = plan_of(&args, &kernel, reason);
    if (status != wanted || strncmp(reason, begins, strlen(begins)) != 0)
        fail_msg("%s: '%s', wanted '%s'", fkda_status_name(status), reason, begins);
}

/* ---- Division -------------------------------------------------------------------------------- */

/* As the kernels divide. */
static int64_t divide(int64_t x, struct fkda_divisor by)
{
    return by.multiplier ? (int64_t)((uint64_t)x * by.multiplier >> 32 >> by.shift) : x;
}

/* Quotients next to every multiple that a rounding could push over, for every size of a grid. */
static void test_divisors(void **state)
{
    (void)state;
    for (int64_t heads = 1; heads <= 1030; heads++) {
        fkda_args args = call_of(128);
        fkda_tensor *const tensors[] = {&args.q,    &args.k,   &args.v,     &args.g,
                                        &args.beta, &args.out, &args.A_log, &args.dt_bias};
        for (int i = 0; i < 6; i++)
            *tensors[i] = tensor(0x100000000000 * (uintptr_t)(i + 1), FKDA_BF16, i == 4 ? 3 : 4, 1,
                                 1, heads, 128);
        args.A_log = args.dt_bias = (fkda_tensor){0};
        args.final_state = tensor(0x800000000000, FKDA_F32, 4, 1, heads, 128, 128);
        const struct fkda_decode_args kernel = accept(args);
        const int64_t most = INT32_MAX, last = most / heads;
        for (int64_t n = 0; n <= last; n += 1 + last / 50)
            for (int64_t x = n * heads - 1; x <= n * heads + 1; x++)
                if (x >= 0 && x <= most)
                    assert_int_equal(divide(x, kernel.by_HV), x / heads);
        assert_int_equal(divide(most, kernel.by_HV), most / heads);
    }
}

static void test_grouped_heads_and_slices(void **state)
{
    (void)state;
    struct fkda_decode_args kernel = accept(call_of(128));
    for (int h = 0; h < HV; h++)
        assert_int_equal(divide(h, kernel.by_heads_per_key), h * H / HV);
    for (int64_t V = 16; V <= 256; V += 16) {
        kernel = accept(call_of(V));
        assert_int_equal(kernel.V, V);
        assert_int_equal(kernel.slices, (V + DECODE_ROWS - 1) / DECODE_ROWS);
        for (int64_t block = 0; block < N * HV * kernel.slices; block++)
            assert_int_equal(divide(block, kernel.by_slices), block / kernel.slices);
    }
}

/* ---- How tensors are accessed ---------------------------------------------------------------- */

static void test_the_plain_call(void **state)
{
    (void)state;
    assert_true(accept(call_of(128)).plain);
    fkda_args args = call_of(128);
    args.final_state.dtype = FKDA_BF16;
    assert_true(accept(args).plain);
    args.A_log = args.dt_bias = (fkda_tensor){0};
    assert_true(accept(args).plain);
    assert_true(accept(draft_call(T)).plain);
}

/* Whatever the plain kernels may not assume leads to the others. */
static void test_calls_that_are_not_plain(void **state)
{
    (void)state;
    static const size_t views[] = {offsetof(fkda_args, q),    offsetof(fkda_args, k),
                                   offsetof(fkda_args, v),    offsetof(fkda_args, g),
                                   offsetof(fkda_args, beta), offsetof(fkda_args, out)};
    for (size_t i = 0; i < sizeof views / sizeof views[0]; i++) {
        fkda_args args = call_of(128);
        fkda_tensor *const view = (fkda_tensor *)((char *)&args + views[i]);
        view->dtype = FKDA_F32;
        assert_false(accept(args).plain);
        args = call_of(128);
        view->data = at((uintptr_t)view->data + 0x100000000000);
        view->stride[0] = (int64_t)INT32_MAX / 8 * 8;
        assert_true(accept(args).plain);
        view->stride[0] += 8;
        assert_false(accept(args).plain);
    }
    fkda_args args = call_of(128);
    args.dt_bias.data = at(0x80000000004);
    assert_false(accept(args).plain);
    args = call_of(128);
    args.final_state.data = at(0x90000000008);
    assert_false(accept(args).plain);
    args.final_state.data = at(0x90000000000);
    args.final_state.stride[0] += 4;
    assert_true(accept(args).plain);
    args.final_state.dtype = FKDA_BF16; /* four of them are 8 bytes, 16 are wanted */
    assert_false(accept(args).plain);
}

static void test_alignment_chooses_the_access(void **state)
{
    (void)state;
    fkda_args args = call_of(128);
    args.q.data = at(0x10000000002);
    args.k.stride[1] += 2;
    args.g = tensor(0x40000000000, FKDA_F32, 4, N, T, HV, 128);
    args.v = tensor(0x30000000000, FKDA_F32, 4, N, T, HV, 128);
    struct fkda_decode_args kernel = accept(args);
    assert_int_equal(kernel.q_access, DECODE_BF16_NARROW);
    assert_int_equal(kernel.k_access, DECODE_BF16_NARROW);
    assert_int_equal(kernel.g_access, DECODE_F32);
    assert_int_equal(kernel.dt_bias_access, DECODE_F32);
    assert_true(kernel.v_is_f32 && !kernel.beta_is_f32 && !kernel.out_is_f32 && kernel.wide_state);
    args.k.stride[1] += 2; /* a multiple of four again */
    args.g.data = at(0x40000000008);
    args.dt_bias.stride[0] = 130;
    args.final_state = tensor(0x90000000000, FKDA_BF16, 4, N, HV, 128, 128);
    args.final_state.stride[0] += 4;
    kernel = accept(args);
    assert_int_equal(kernel.k_access, DECODE_BF16);
    assert_int_equal(kernel.g_access, DECODE_F32_NARROW);
    assert_int_equal(kernel.dt_bias_access, DECODE_F32_NARROW);
    assert_false(kernel.wide_state);
}

/* Enough slabs of all sequences together, in a plain call: two of a head in fp32, one in bf16. */
static void test_large_batches_pass_through_shared_memory(void **state)
{
    (void)state;
    static const struct {
        int64_t sequences, V;
        fkda_dtype state;
        bool slab;
    } cases[] = {
        {1, 128, FKDA_F32, false},   {63, 128, FKDA_F32, false}, {64, 128, FKDA_F32, true},
        {127, 48, FKDA_F32, false},  {128, 48, FKDA_F32, true},  {127, 128, FKDA_BF16, false},
        {128, 128, FKDA_BF16, true}, {64, 144, FKDA_BF16, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fkda_args args = call_of(cases[i].V);
        fkda_tensor *const tensors[] = {&args.q,    &args.k,   &args.v,          &args.g,
                                        &args.beta, &args.out, &args.final_state};
        for (int j = 0; j < 7; j++) {
            tensors[j]->shape[0] = cases[i].sequences;
            tensors[j]->data = at((uintptr_t)tensors[j]->data << 4);
        }
        args.final_state.dtype = cases[i].state;
        struct fkda_decode_args kernel = accept(args);
        const int64_t slab_rows =
            cases[i].state == FKDA_F32 ? DECODE_SLAB_ROWS_F32 : DECODE_SLAB_ROWS_BF16;
        const int64_t rows = cases[i].slab ? slab_rows : DECODE_ROWS;
        assert_int_equal(kernel.slab, cases[i].slab);
        assert_int_equal(kernel.slices, (cases[i].V + rows - 1) / rows);
        assert_int_equal(kernel.token_slots, T);
        args.g.dtype = FKDA_F32;
        kernel = accept(args);
        assert_false(kernel.slab);
        assert_int_equal(kernel.slices, (cases[i].V + DECODE_ROWS - 1) / DECODE_ROWS);
    }
}

/* ---- Slots ----------------------------------------------------------------------------------- */

static void test_states_without_a_pool(void **state)
{
    (void)state;
    const struct fkda_decode_args kernel = accept(call_of(128));
    assert_null(kernel.state_indices.data);
    assert_null(kernel.num_accepted_tokens.data);
    assert_int_equal(kernel.num_slots, N);
    assert_int_equal(kernel.columns_to_write, 0);
    assert_int_equal(kernel.state.stride_slot, HV * 128 * 128);
}

static void test_a_pool(void **state)
{
    (void)state;
    fkda_args args = call_of(128);
    args.final_state = tensor(0x90000000000, FKDA_F32, 4, SLOTS, HV, 128, 128);
    args.state_indices = tensor(0xa0000000000, FKDA_I64, 1, N, 0, 0, 0);
    args.state_indices.stride[0] = 5;
    const struct fkda_decode_args kernel = accept(args);
    assert_int_equal(kernel.num_slots, SLOTS);
    assert_true(kernel.state_indices.is_int64);
    assert_int_equal(kernel.state_indices.stride, 5);
    assert_int_equal(kernel.state_indices_columns, 1);
    assert_int_equal(kernel.columns_to_write, 0);
}

static void test_draft_tokens(void **state)
{
    (void)state;
    fkda_args args = draft_call(T + 1);
    args.state_indices.stride[0] = 20;
    args.state_indices.stride[1] = 4;
    const struct fkda_decode_args kernel = accept(args);
    assert_false(kernel.state_indices.is_int64);
    assert_true(kernel.num_accepted_tokens.is_int64);
    assert_int_equal(kernel.state_indices.stride, 20);
    assert_int_equal(kernel.state_indices_stride_t, 4);
    assert_int_equal(kernel.state_indices_columns, T + 1);
    assert_int_equal(kernel.columns_to_write, T + 1);
    refuse(draft_call(T - 1), FKDA_ERROR_INVALID_ARGUMENT, "state_indices: shape [3, 1], wanted");
}

static void test_sequences(void **state)
{
    (void)state;
    fkda_args args = call_of(128);
    fkda_tensor *const tensors[] = {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.out};
    for (int i = 0; i < 6; i++) {
        tensors[i]->shape[0] = 1;
        tensors[i]->shape[1] = 40;
    }
    args.cu_seqlens = tensor(0xc0000000000, FKDA_I32, 1, N + 1, 0, 0, 0);
    const struct fkda_decode_args kernel = accept(args);
    assert_int_equal(kernel.sequences.N, N);
    assert_int_equal(kernel.sequences.T, 40);
    assert_ptr_equal(kernel.sequences.cu_seqlens.data, at(0xc0000000000));
    assert_int_equal(kernel.token_slots, DECODE_MOST_TOKENS); /* of any of them, as far as known */
}

/* ---- Refusals -------------------------------------------------------------------------------- */

static void test_sizes_are_refused(void **state)
{
    (void)state;
    fkda_args args = call_of(128);
    args.q = tensor(0x10000000000, FKDA_BF16, 4, N, T, H, 64);
    args.k = tensor(0x20000000000, FKDA_BF16, 4, N, T, H, 64);
    args.g = tensor(0x40000000000, FKDA_BF16, 4, N, T, HV, 64);
    args.dt_bias = tensor(0x80000000000, FKDA_F32, 2, HV, 64, 0, 0);
    args.final_state = tensor(0x90000000000, FKDA_F32, 4, N, HV, 128, 64);
    refuse(args, FKDA_ERROR_UNSUPPORTED, "q: head size K = 64, wanted 128 on CUDA");

    args = call_of(128);
    fkda_tensor *const tensors[] = {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.out};
    const int64_t slices = 128 / DECODE_ROWS, most = INT32_MAX / slices / HV;
    for (int i = 0; i < 6; i++) {
        tensors[i]->shape[0] = 1;
        tensors[i]->shape[1] = 16;
    }
    args.final_state = tensor((uintptr_t)1 << 60, FKDA_F32, 4, most + 1, HV, 128, 128);
    args.cu_seqlens = tensor(0xc0000000000, FKDA_I32, 1, most + 2, 0, 0, 0);
    char begins[80];
    snprintf(begins, sizeof begins, "cu_seqlens: %lld sequences of 4 value heads",
             (long long)most + 1);
    refuse(args, FKDA_ERROR_UNSUPPORTED, begins);
    args.cu_seqlens.shape[0]--;
    args.final_state.shape[0]--;
    accept(args);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_divisors),
        cmocka_unit_test(test_grouped_heads_and_slices),
        cmocka_unit_test(test_the_plain_call),
        cmocka_unit_test(test_calls_that_are_not_plain),
        cmocka_unit_test(test_alignment_chooses_the_access),
        cmocka_unit_test(test_large_batches_pass_through_shared_memory),
        cmocka_unit_test(test_states_without_a_pool),
        cmocka_unit_test(test_a_pool),
        cmocka_unit_test(test_draft_tokens),
        cmocka_unit_test(test_sequences),
        cmocka_unit_test(test_sizes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
