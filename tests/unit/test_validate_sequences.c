/* test_validate_sequences.c: what cu_seqlens, state_indices, num_accepted_tokens and checkpoints
 * may hold, for int32 and int64 alike. Results of right ones are tested in test_reference.c. */
#include <stdlib.h>
#include <string.h>

#include "core/plan.h"
#include "problem.h"

#define INVALID FKDA_ERROR_INVALID_ARGUMENT

static const fkda_dtype index_dtypes[] = {FKDA_I32, FKDA_I64};

static fkda_tensor absent(void)
{
    return (fkda_tensor){.data = NULL};
}

/* ---- cu_seqlens ------------------------------------------------------------------------------ */

struct list {
    const char *reason; /* NULL: accepted */
    int count;
    int64_t values[8];
};

static void test_cu_seqlens(void **state)
{
    (void)state;
    static const struct list lists[] = {
        {NULL, 3, {0, 17, 48}},
        {NULL, 4, {0, 17, 17, 40}},
        {NULL, 3, {0, 0, 0}},
        {NULL, 1, {0}},
        {"cu_seqlens[0]: 1, wanted 0", 2, {1, 17}},
        {"cu_seqlens[0]: -1, wanted 0", 3, {-1, 17, 48}},
        {"cu_seqlens[2]: 10, wanted from 20 (the entry before) to 48 (T of q)", 4, {0, 20, 10, 48}},
        {"cu_seqlens[2]: 4096, wanted from 17", 3, {0, 17, 4096}},
        {"cu_seqlens[1]: 49, wanted from 0", 3, {0, 49, 49}},
        {"cu_seqlens[1]: -5, wanted from 0", 3, {0, -5, 48}},
        {"cu_seqlens[2]: 2147483647, wanted from 16", 3, {0, 16, INT32_MAX}},
    };
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        for (int j = 0; j < 2; j++) {
            struct problem p;
            int64_t n = lists[i].count - 1;
            problem_init(&p, (struct problem_sizes){.T = 48, .N = n ? n : 1});
            p.args.initial_state.shape[0] = p.args.final_state.shape[0] = n;
            p.args.cu_seqlens =
                problem_indices(&p, index_dtypes[j], lists[i].count, lists[i].values);
            if (lists[i].reason) {
                problem_refused(&p, fkda_forward, INVALID, lists[i].reason);
                problem_refused(&p, fkda_reference, INVALID, lists[i].reason);
            } else {
                problem_run(&p, fkda_forward);
                problem_run(&p, fkda_reference);
            }
            problem_free(&p);
        }
    }
}

static void test_cu_seqlens_int64_is_not_truncated(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 48, .N = 1});
    p.args.cu_seqlens = INDICES(&p, FKDA_I64, 0, 48 + (INT64_C(1) << 32));
    problem_refused(&p, fkda_forward, INVALID, "cu_seqlens[1]: 4294967344, wanted from 0");
    problem_free(&p);
}

static void test_cu_seqlens_with_stride(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 48, .N = 2});
    p.args.cu_seqlens = INDICES(&p, FKDA_I32, 0, -99, 17, -99, 48);
    p.args.cu_seqlens.shape[0] = 3;
    p.args.cu_seqlens.stride[0] = 2;
    problem_run(&p, fkda_forward);
    problem_free(&p);
}

static void test_decode_lengths(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 33, .N = 2});
    p.args.initial_state = absent();
    p.args.cu_seqlens = INDICES(&p, FKDA_I32, 0, 16, 33);
    problem_refused(&p, fkda_decode, INVALID,
                    "cu_seqlens[2]: sequence 1 has 17 tokens, wanted at most 16");
    p.args.cu_seqlens = INDICES(&p, FKDA_I32, 0, 16, 32);
    problem_run(&p, fkda_decode);
    p.args.cu_seqlens = absent();
    p.args.final_state.shape[0] = 1;
    problem_refused(&p, fkda_decode, INVALID, "q: T = 33 tokens, wanted from 1 to 16");
    problem_free(&p);

    problem_init(&p, (struct problem_sizes){.T = 0});
    p.args.initial_state = absent();
    problem_refused(&p, fkda_decode, INVALID, "q: T = 0 tokens, wanted from 1 to 16");
    problem_free(&p);
}

/* ---- state_indices --------------------------------------------------------------------------- */

static void test_state_indices(void **state)
{
    (void)state;
    static const struct list lists[] = {
        {NULL, 3, {3, -1, 0}},
        {NULL, 3, {-1, -1, -1}},
        {NULL, 3, {2, 1, 0}},
        {"state_indices[1, 0]: -2, wanted -1 or a slot from 0 to 3", 3, {0, -2, 1}},
        {"state_indices[2, 0]: 4, wanted -1 or a slot from 0 to 3", 3, {0, 1, 4}},
        {"state_indices[2, 0]: slot 3 is written twice, wanted distinct slots", 3, {3, 0, 3}},
    };
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        for (int j = 0; j < 2; j++) {
            struct problem p;
            problem_init(&p, (struct problem_sizes){.B = 3, .T = 2, .N = 4});
            p.args.state_indices =
                problem_indices(&p, index_dtypes[j], lists[i].count, lists[i].values);
            fkda_tensor initial = p.args.initial_state;
            for (int k = 0; k < 3; k++) {
                problem_call call = k == 0 ? fkda_forward : k == 1 ? fkda_reference : fkda_decode;
                p.args.initial_state = k == 2 ? absent() : initial;
                if (lists[i].reason)
                    problem_refused(&p, call, INVALID, lists[i].reason);
                else
                    problem_run(&p, call);
            }
            problem_free(&p);
        }
    }
}

/* Sequences may start from one shared slot as long as no state is written. */
static void test_shared_slots_may_be_read(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.B = 3, .T = 2, .N = 2});
    p.args.final_state = absent();
    p.args.state_indices = INDICES(&p, FKDA_I64, 1, 1, 1);
    problem_run(&p, fkda_forward);
    problem_run(&p, fkda_reference);
    p.args.state_indices = INDICES(&p, FKDA_I64, 1, 2, 1);
    problem_refused(&p, fkda_forward, INVALID, "state_indices[1, 0]: 2, wanted -1 or a slot");
    problem_free(&p);
}

static void test_indices_without_states(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.B = 3, .T = 2});
    p.args.initial_state = p.args.final_state = absent();
    p.args.state_indices = INDICES(&p, FKDA_I64, 123456789, -1, 0);
    problem_run(&p, fkda_forward);
    p.args.state_indices = INDICES(&p, FKDA_I64, 0, -2, 0);
    problem_refused(&p, fkda_forward, INVALID, "state_indices[1, 0]: -2, wanted -1 or a slot");
    problem_free(&p);
}

static void test_pools_of_different_size(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.B = 2, .T = 2, .N = 4});
    p.args.state_indices = INDICES(&p, FKDA_I64, 0, 1);
    p.args.initial_state.shape[0] = 3;
    problem_refused(&p, fkda_forward, INVALID,
                    "initial_state: shape [3, 1, 16, 16], wanted [4, 1, 16, 16] (slots");
    problem_free(&p);
}

/* A pool too large for the set on the stack. The memory behind it is not looked at. */
static void test_large_pool(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.B = 4, .T = 2, .N = 4});
    p.args.initial_state = absent();
    p.args.final_state.shape[0] = 1000000;
    p.args.state_indices = INDICES(&p, FKDA_I32, 999999, 0, 65536, 999999);
    problem_refused(&p, fkda_forward, INVALID, "state_indices[3, 0]: slot 999999 is written twice");
    problem_refused(&p, fkda_decode, INVALID, "state_indices[3, 0]: slot 999999 is written twice");
    p.args.state_indices = INDICES(&p, FKDA_I32, 999999, 0, 65536, 1000000);
    problem_refused(&p, fkda_forward, INVALID, "state_indices[3, 0]: 1000000, wanted -1 or a slot");
    problem_free(&p);
}

/* Every slot of a pool once, then one of them a second time: around the edges of its words. */
static void test_every_slot_once(void **state)
{
    (void)state;
    static const int64_t edges[] = {0, 1, 63, 64, 65, 127, 128};
    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++) {
        struct problem p;
        problem_init(&p, (struct problem_sizes){.B = 130, .T = 1, .N = 130});
        p.args.initial_state = absent();
        int64_t slots[130];
        for (int64_t n = 0; n < 130; n++)
            slots[n] = 129 - n;
        p.args.state_indices = problem_indices(&p, FKDA_I64, 130, slots);
        problem_run(&p, fkda_decode);
        ((int64_t *)p.args.state_indices.data)[0] = edges[i];
        problem_refused(&p, fkda_decode, INVALID, "state_indices[");
        problem_free(&p);
    }
}

/* ---- num_accepted_tokens --------------------------------------------------------------------- */

struct draft {
    const char *reason; /* NULL: accepted */
    int64_t slots[2][3], accepted[2];
};

/* N 2, T 3: the state after token t goes to slots[n][t], it starts from slots[n][accepted - 1]. */
static void test_drafts(void **state)
{
    (void)state;
    static const struct draft drafts[] = {
        {NULL, {{0, 1, 2}, {3, 4, 5}}, {1, 3}},
        {NULL, {{0, 1, 2}, {-1, -1, -1}}, {2, 1}},
        {NULL, {{0, 1, 2}, {-1, -1, -1}}, {2, 0}}, /* a padded row */
        {NULL, {{0, -1, 2}, {3, 4, -1}}, {1, 2}},  /* states after some tokens are not kept */
        {NULL, {{0, -1, 2}, {3, 4, 2}}, {2, 1}},   /* row 0 starts at -1: it writes nothing */
        {"num_accepted_tokens[0]: 0, wanted from 1 to 3", {{0, 1, 2}, {3, 4, 5}}, {0, 1}},
        {"num_accepted_tokens[1]: 4, wanted from 1 to 3", {{0, 1, 2}, {3, 4, 5}}, {1, 4}},
        {"num_accepted_tokens[1]: -1, wanted from 1 to 3", {{0, 1, 2}, {-1, -1, -1}}, {1, -1}},
        {"num_accepted_tokens[1]: 0, wanted from 1 to 3", {{0, 1, 2}, {-1, -1, 3}}, {1, 0}},
        {"state_indices[1, 2]: 6, wanted -1 or a slot", {{0, 1, 2}, {3, 4, 6}}, {1, 1}},
        {"state_indices[0, 1]: -3, wanted -1 or a slot", {{0, -3, 2}, {3, 4, 5}}, {1, 1}},
        {"state_indices[0, 2]: slot 0 is written twice", {{0, 1, 0}, {3, 4, 5}}, {1, 1}},
        {"state_indices[1, 0]: slot 2 is written twice", {{0, 1, 2}, {2, 4, 5}}, {1, 1}},
    };
    for (size_t i = 0; i < sizeof drafts / sizeof drafts[0]; i++) {
        for (int j = 0; j < 2; j++) {
            struct problem p;
            problem_init(&p, (struct problem_sizes){.B = 2, .T = 3, .N = 6});
            p.args.initial_state = absent();
            const int64_t shape[] = {2, 3};
            fkda_tensor slots = problem_indices(&p, index_dtypes[j], 6, drafts[i].slots[0]);
            p.args.state_indices = fkda_tensor_contiguous(slots.data, index_dtypes[j], 2, shape);
            p.args.num_accepted_tokens =
                problem_indices(&p, index_dtypes[1 - j], 2, drafts[i].accepted);
            if (drafts[i].reason)
                problem_refused(&p, fkda_decode, INVALID, drafts[i].reason);
            else
                problem_run(&p, fkda_decode);
            problem_free(&p);
        }
    }
}

/* One token each, so that later columns are read from but not written. */
static void test_draft_reads_what_another_writes(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.B = 2, .T = 1, .N = 6});
    p.args.initial_state = absent();
    const int64_t shape[] = {2, 2};
    p.args.state_indices = INDICES(&p, FKDA_I32, 0, 1, 2, 0);
    p.args.state_indices = fkda_tensor_contiguous(p.args.state_indices.data, FKDA_I32, 2, shape);
    p.args.num_accepted_tokens = INDICES(&p, FKDA_I32, 1, 1);
    problem_run(&p, fkda_decode);
    p.args.num_accepted_tokens = INDICES(&p, FKDA_I32, 1, 2);
    problem_refused(&p, fkda_decode, INVALID,
                    "state_indices[1]: slot 0 is read here and written by another sequence");
    problem_free(&p);
}

/* More tokens than columns: there is no slot for the last state. */
static void test_draft_needs_a_column_for_each_token(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.B = 2, .T = 3, .N = 6});
    p.args.initial_state = absent();
    const int64_t shape[] = {2, 2};
    fkda_tensor slots = INDICES(&p, FKDA_I32, 0, 1, 2, 3);
    p.args.state_indices = fkda_tensor_contiguous(slots.data, FKDA_I32, 2, shape);
    p.args.num_accepted_tokens = INDICES(&p, FKDA_I32, 1, 1);
    problem_refused(&p, fkda_decode, INVALID,
                    "state_indices: shape [2, 2], wanted at least 3 columns");
    problem_free(&p);
}

/* ---- Checkpoints ----------------------------------------------------------------------------- */

struct checkpoints {
    const char *reason; /* NULL: accepted */
    int count;
    int64_t offsets[6];
    int64_t indptr[3]; /* all 0: absent */
};

/* Sequences of 20 and 40 tokens. */
static void test_checkpoints(void **state)
{
    (void)state;
    static const struct checkpoints cases[] = {
        {NULL, 2, {16, 32}, {0}},
        {NULL, 4, {0, 16, 16, 32}, {0}},
        {NULL, 4, {-1, 16, -1, -1}, {0}},
        {NULL, 4, {16, 0, 16, 32}, {0, 1, 4}},
        {NULL, 3, {16, 32, 999}, {0, 1, 2}}, /* the last one belongs to no sequence */
        {NULL, 0, {0}, {0}},
        {"checkpoint_offsets[0]: 15, wanted -1 or a multiple of 16", 2, {15, 32}, {0}},
        {"checkpoint_offsets[0]: 32, wanted -1 or a multiple of 16 above -1 and up to 20",
         2,
         {32, 32},
         {0}},
        {"checkpoint_offsets[1]: 48, wanted -1 or a multiple of 16 above -1 and up to 40",
         2,
         {16, 48},
         {0}},
        {"checkpoint_offsets[0]: -16, wanted -1 or a multiple of 16", 2, {-16, 32}, {0}},
        {"checkpoint_offsets[3]: 16, wanted -1 or a multiple of 16 above 32",
         4,
         {0, 16, 32, 16},
         {0}},
        {"checkpoint_offsets[3]: 16, wanted -1 or a multiple of 16 above 16",
         4,
         {0, 16, 16, 16},
         {0}},
        {"checkpoint_indptr[0]: 1, wanted from 0 to 0", 2, {16, 16}, {1, 1, 2}},
        {"checkpoint_indptr[2]: 0, wanted from 1 to 2", 2, {16, 16}, {0, 1, 0}},
        {"checkpoint_indptr[2]: 3, wanted from 1 to 2", 2, {16, 16}, {0, 1, 3}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int j = 0; j < 2; j++) {
            const struct checkpoints *c = &cases[i];
            struct problem p;
            problem_init(&p, (struct problem_sizes){.T = 60, .N = 2});
            p.args.cu_seqlens = INDICES(&p, FKDA_I64, 0, 20, 60);
            const int64_t shape[] = {c->count, 1, 16, 16};
            p.args.checkpoint_state = problem_poisoned(&p, FKDA_F32, 4, shape);
            p.args.checkpoint_offsets = problem_indices(&p, index_dtypes[j], c->count, c->offsets);
            if (c->indptr[0] || c->indptr[1] || c->indptr[2])
                p.args.checkpoint_indptr = problem_indices(&p, index_dtypes[1 - j], 3, c->indptr);
            if (c->reason) {
                problem_refused(&p, fkda_forward, INVALID, c->reason);
                problem_refused(&p, fkda_reference, INVALID, c->reason);
            } else {
                problem_run(&p, fkda_forward);
                problem_run(&p, fkda_reference);
            }
            problem_free(&p);
        }
    }
}

/* ---- The plan -------------------------------------------------------------------------------- */

static void test_plan_of_sequences(void **state)
{
    (void)state;
    struct problem p;
    struct fkda_plan plan;
    problem_init(&p, (struct problem_sizes){.T = 48, .H = 2, .HV = 6, .N = 4});
    p.args.cu_seqlens = INDICES(&p, FKDA_I32, 0, 17, 17, 40);
    p.args.state_indices = INDICES(&p, FKDA_I64, 2, -1, 3);
    assert_int_equal(
        fkda_validate(&p.args, FKDA_CALL_FORWARD, &plan, (struct fkda_reason){NULL, 0}), FKDA_OK);
    assert_int_equal(plan.N, 3);
    assert_int_equal(plan.num_tokens, 40);
    assert_int_equal(plan.max_sequence_tokens, 23);
    assert_int_equal(plan.heads_per_key, 3);
    static const int64_t wanted[3][3] = {{0, 17, 2}, {17, 0, -1}, {17, 23, 3}};
    for (int n = 0; n < 3; n++) {
        struct fkda_sequence seq = fkda_plan_sequence(&plan, n);
        assert_int_equal(seq.batch, 0);
        assert_int_equal(seq.begin, wanted[n][0]);
        assert_int_equal(seq.length, wanted[n][1]);
        assert_int_equal(seq.slot, wanted[n][2]);
    }
    problem_free(&p);

    problem_init(&p, (struct problem_sizes){.B = 3, .T = 7});
    assert_int_equal(
        fkda_validate(&p.args, FKDA_CALL_FORWARD, &plan, (struct fkda_reason){NULL, 0}), FKDA_OK);
    struct fkda_sequence seq = fkda_plan_sequence(&plan, 2);
    assert_int_equal(seq.batch, 2);
    assert_int_equal(seq.begin, 0);
    assert_int_equal(seq.length, 7);
    assert_int_equal(seq.slot, 2);
    assert_int_equal(plan.num_tokens, 21);
    problem_free(&p);
}

int main(void)
{
    unsetenv("FLASH_KDA_CPU_ISA");
    unsetenv("FLASH_KDA_PRECISION");
    unsetenv("FLASH_KDA_NUM_THREADS");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cu_seqlens),
        cmocka_unit_test(test_cu_seqlens_int64_is_not_truncated),
        cmocka_unit_test(test_cu_seqlens_with_stride),
        cmocka_unit_test(test_decode_lengths),
        cmocka_unit_test(test_state_indices),
        cmocka_unit_test(test_shared_slots_may_be_read),
        cmocka_unit_test(test_indices_without_states),
        cmocka_unit_test(test_pools_of_different_size),
        cmocka_unit_test(test_large_pool),
        cmocka_unit_test(test_every_slot_once),
        cmocka_unit_test(test_drafts),
        cmocka_unit_test(test_draft_reads_what_another_writes),
        cmocka_unit_test(test_draft_needs_a_column_for_each_token),
        cmocka_unit_test(test_checkpoints),
        cmocka_unit_test(test_plan_of_sequences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
