/* test_pieces.c: tools/flashkda/pieces.c. One call and the same work in pieces give the same bits,
 * for packed and dense sequences, with and without an initial state; heads can be sliced out.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "pieces.h"

enum { B = 2, T = 83, H = 2, HV = 4, D = 128, MAX_N = 8 };

struct buffers {
    float q[B * T * H * D], k[B * T * H * D], v[B * T * HV * D], g[B * T * HV * D];
    float beta[B * T * HV], A_log[HV], dt_bias[HV * D];
    float initial[MAX_N * HV * D * D];
    float out[2][B * T * HV * D], state[2][MAX_N * HV * D * D];
};

static float draw(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (float)(*seed >> 40) / 8388608.0f - 1.0f;
}

static void fill(float *values, size_t count, uint64_t *seed)
{
    for (size_t i = 0; i < count; i++)
        values[i] = 2 * draw(seed);
}

static int make_buffers(void **state)
{
    uint64_t seed = 1;
    struct buffers *x = malloc(sizeof *x);
    *state = x;
    if (!x)
        return -1;
    fill(x->q, sizeof x->q / sizeof(float), &seed);
    fill(x->k, sizeof x->k / sizeof(float), &seed);
    fill(x->v, sizeof x->v / sizeof(float), &seed);
    fill(x->g, sizeof x->g / sizeof(float), &seed);
    fill(x->beta, sizeof x->beta / sizeof(float), &seed);
    fill(x->A_log, sizeof x->A_log / sizeof(float), &seed);
    fill(x->dt_bias, sizeof x->dt_bias / sizeof(float), &seed);
    fill(x->initial, sizeof x->initial / sizeof(float), &seed);
    return 0;
}

static int free_buffers(void **state)
{
    free(*state);
    return 0;
}

static void poison(struct buffers *x)
{
    memset(x->out, 0xFF, sizeof x->out);
    memset(x->state, 0xFF, sizeof x->state);
}

/* offsets NULL: dense, else packed with n sequences (and batch 1). `which` of the outputs. */
static fkda_args make_args(struct buffers *x, int32_t *offsets, int64_t n, int which)
{
    const int64_t batch = offsets ? 1 : B, count = n + 1;
    const int64_t keys[] = {batch, T, H, D}, values[] = {batch, T, HV, D}, heads[] = {HV};
    const int64_t betas[] = {batch, T, HV}, bias[] = {HV, D}, states[] = {n, HV, D, D};
    fkda_args args;
    fkda_args_init(&args);
    args.scale = 0.1;
    args.q = fkda_tensor_contiguous(x->q, FKDA_F32, 4, keys);
    args.k = fkda_tensor_contiguous(x->k, FKDA_F32, 4, keys);
    args.v = fkda_tensor_contiguous(x->v, FKDA_F32, 4, values);
    args.g = fkda_tensor_contiguous(x->g, FKDA_F32, 4, values);
    args.beta = fkda_tensor_contiguous(x->beta, FKDA_F32, 3, betas);
    args.A_log = fkda_tensor_contiguous(x->A_log, FKDA_F32, 1, heads);
    args.dt_bias = fkda_tensor_contiguous(x->dt_bias, FKDA_F32, 2, bias);
    args.out = fkda_tensor_contiguous(x->out[which], FKDA_F32, 4, values);
    args.initial_state = fkda_tensor_contiguous(x->initial, FKDA_F32, 4, states);
    args.final_state = fkda_tensor_contiguous(x->state[which], FKDA_F32, 4, states);
    if (offsets)
        args.cu_seqlens = fkda_tensor_contiguous(offsets, FKDA_I32, 1, &count);
    return args;
}

static void count_tokens(void *context, int64_t num_tokens)
{
    *(int64_t *)context += num_tokens;
}

static void expect_same(struct buffers *x, int32_t *offsets, int64_t n, int64_t tokens,
                        bool initial)
{
    int64_t done = 0;
    const struct piece_options pieces = {tokens, count_tokens, &done};
    char reason[FKDA_REASON_BYTES] = "";
    poison(x);
    fkda_args whole = make_args(x, offsets, n, 0), cut = make_args(x, offsets, n, 1);
    if (!initial)
        whole.initial_state = cut.initial_state = (fkda_tensor){.data = NULL};
    assert_int_equal(fkda_forward(&whole, reason, sizeof reason), FKDA_OK);
    assert_int_equal(fkda_call_in_pieces(fkda_forward, &cut, &pieces, reason, sizeof reason),
                     FKDA_OK);
    assert_string_equal(reason, "");
    assert_int_equal(done, offsets ? offsets[n] : B * T);
    assert_memory_equal(x->out[0], x->out[1], sizeof x->out[0]);
    assert_memory_equal(x->state[0], x->state[1], sizeof x->state[0]);
}

static void test_dense(void **state)
{
    for (int64_t tokens = 16; tokens <= 96; tokens += 16) {
        expect_same(*state, NULL, B, tokens, true);
        expect_same(*state, NULL, B, tokens, false);
    }
}

static void test_packed(void **state)
{
    int32_t lists[][MAX_N + 1] = {
        {0, 83},
        {0, 17, 83},
        {0, 0, 0, 17, 17, 48, 48, 83, 83},
        {0, 1, 2, 3, 35, 36, 52, 70}, /* rows past 70 belong to nobody */
        {0, 16, 32, 48, 64, 80, 81, 82, 83},
    };
    const int64_t counts[] = {1, 2, 8, 7, 8};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (int64_t tokens = 16; tokens <= 64; tokens += 16) {
            expect_same(*state, lists[i], counts[i], tokens, true);
            expect_same(*state, lists[i], counts[i], tokens, false);
        }
    }
}

/* Whatever is wrong, the library says it, and nothing is written before. */
static void test_errors_pass_through(void **state)
{
    struct buffers *x = *state;
    const struct piece_options pieces = {16, NULL, NULL};
    int32_t descending[] = {0, 40, 20, 83}, outside[] = {0, 40, 84}, shifted[] = {1, 40, 83};
    int32_t *lists[] = {descending, outside, shifted};
    const int64_t counts[] = {3, 2, 2};
    unsigned char *bytes = (unsigned char *)x->state[0];
    for (size_t i = 0; i < 3; i++) {
        char direct[FKDA_REASON_BYTES] = "", through[FKDA_REASON_BYTES] = "";
        poison(x);
        fkda_args args = make_args(x, lists[i], counts[i], 0);
        assert_int_equal(fkda_forward(&args, direct, sizeof direct), FKDA_ERROR_INVALID_ARGUMENT);
        assert_int_equal(fkda_call_in_pieces(fkda_forward, &args, &pieces, through, sizeof through),
                         FKDA_ERROR_INVALID_ARGUMENT);
        assert_string_equal(through, direct);
        for (size_t at = 0; at < sizeof x->state[0]; at++)
            assert_true(bytes[at] == 0xFF);
    }
    char reason[FKDA_REASON_BYTES] = "";
    fkda_args args = make_args(x, NULL, B, 0);
    args.lower_bound = -7;
    assert_int_equal(fkda_call_in_pieces(fkda_forward, &args, &pieces, reason, sizeof reason),
                     FKDA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(reason, "lower_bound"));
    assert_true(bytes[0] == 0xFF);
}

/* The heads one by one, sliced out as views, give the bits of the whole. */
static void test_slice_head(void **state)
{
    struct buffers *x = *state;
    char reason[FKDA_REASON_BYTES] = "";
    poison(x);
    fkda_args whole = make_args(x, NULL, B, 0), parts = make_args(x, NULL, B, 1);
    assert_int_equal(fkda_reference(&whole, reason, sizeof reason), FKDA_OK);
    for (int64_t h = 0; h < H; h++) {
        fkda_args head = fkda_slice_head(&parts, h);
        assert_int_equal(head.q.shape[2], 1);
        assert_int_equal(head.v.shape[2], HV / H);
        assert_int_equal(fkda_reference(&head, reason, sizeof reason), FKDA_OK);
    }
    assert_memory_equal(x->out[0], x->out[1], sizeof x->out[0]);
    assert_memory_equal(x->state[0], x->state[1], sizeof x->state[0]);

    const int64_t flat[] = {HV * D};
    parts.dt_bias = fkda_tensor_contiguous(x->dt_bias, FKDA_F32, 1, flat);
    memset(x->out[1], 0xFF, sizeof x->out[1]);
    for (int64_t h = 0; h < H; h++) {
        fkda_args head = fkda_slice_head(&parts, h);
        assert_int_equal(fkda_reference(&head, reason, sizeof reason), FKDA_OK);
    }
    assert_memory_equal(x->out[0], x->out[1], sizeof x->out[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dense),
        cmocka_unit_test(test_packed),
        cmocka_unit_test(test_errors_pass_through),
        cmocka_unit_test(test_slice_head),
    };
    return cmocka_run_group_tests_name("pieces", tests, make_buffers, free_buffers);
}
