/* test_segment_plan.c: src/cuda/segment_plan.c, how a forward is cut into segments. */
#include "cuda/segment_plan.h"
#include "problem.h"

enum { SMS = 132 };

static const struct fkda_segment_costs *const costs = &fkda_segment_costs_sm90;

static double predict(int64_t T, int64_t N, int64_t HV, int64_t chunks)
{
    return fkda_cuda_predict_segments_us(T, N, HV, SMS, chunks, costs);
}

static int choose(int64_t T, int64_t N, int64_t HV)
{
    return fkda_cuda_choose_segment(T, N, HV, SMS, costs);
}

/* What a choice has to be whatever the costs are. */
static void test_any_choice_is_a_gain(void **state)
{
    (void)state;
    for (int64_t N = 1; N <= 40; N += 3)
        for (int64_t HV = 1; HV <= 160; HV += HV < 8 ? 1 : 9)
            for (int64_t T = 1; T <= 1 << 20; T = T * 3 + 1) {
                const int64_t chunks = choose(T, N, HV);
                if (chunks == 0)
                    continue;
                assert_true(chunks > 0);
                assert_int_equal(chunks % SEGMENT_UNIT_CHUNKS, 0);
                assert_true(chunks * SEGMENT_CHUNK_TOKENS < T / N + SEGMENT_CHUNK_TOKENS);
                assert_true(predict(T, N, HV, chunks) < costs->worthwhile * predict(T, N, HV, 0));
            }
}

/* No other length of the same unit is predicted to be faster. */
static void test_the_best_length_is_found(void **state)
{
    (void)state;
    const int64_t calls[][3] = {{8192, 1, 12}, {8192, 1, 4}, {8192, 1, 32},
                                {2048, 1, 12}, {6000, 3, 5}, {65536, 1, 12}};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        const int64_t T = calls[i][0], N = calls[i][1], HV = calls[i][2];
        const int chosen = choose(T, N, HV);
        assert_true(chosen > 0);
        /* below 256 segments, which are never wanted here */
        for (int64_t chunks = SEGMENT_UNIT_CHUNKS; chunks * SEGMENT_CHUNK_TOKENS < T / N;
             chunks += SEGMENT_UNIT_CHUNKS)
            assert_true(predict(T, N, HV, chosen) <= predict(T, N, HV, chunks));
    }
}

static void test_enough_chains_are_not_split(void **state)
{
    (void)state;
    assert_int_equal(choose(8192, 1, 96), 0);
    assert_int_equal(choose(8192, 1, SMS), 0);
    assert_int_equal(choose(1 << 20, 1, SMS + 1), 0);
    assert_int_equal(choose(1 << 20, 64, 4), 0);
    assert_int_equal(choose(INT32_MAX - 16, INT32_MAX / 8, 8), 0);
}

static void test_short_calls_are_not_split(void **state)
{
    (void)state;
    assert_int_equal(choose(0, 1, 1), 0);
    assert_int_equal(choose(0, 0, 1), 0);
    assert_int_equal(choose(1, 1, 1), 0);
    assert_int_equal(choose(SEGMENT_UNIT_CHUNKS * SEGMENT_CHUNK_TOKENS, 1, 1), 0);
    assert_int_equal(choose(128 * 8, 8, 1), 0);
}

/* By hand: 8192 tokens of 12 heads in 11 segments of 24 chunks are 240 blocks in the first pass and
 * 132 in the second. */
static void test_prediction(void **state)
{
    (void)state;
    const struct fkda_segment_costs plain = {.chunk_us = 3.0,
                                             .start_us = 2.0,
                                             .pass1_share = 0.75,
                                             .combine_us = 1.0,
                                             .launch_us = 4.0,
                                             .worthwhile = 0.95};
    const double expected = (3.0 * 24 + 2.0) * (0.75 * 2 + 1) + 11 * 1.0 + 2 * 4.0;
    assert_true(fkda_cuda_predict_segments_us(8192, 1, 12, 132, 24, &plain) == expected);
    assert_true(fkda_cuda_predict_segments_us(8192, 1, 12, 132, 0, &plain) == 3.0 * 256 + 2.0);
    assert_true(fkda_cuda_predict_segments_us(8192, 1, 12, 132, 256, &plain) == 3.0 * 256 + 2.0);
    assert_true(fkda_cuda_predict_segments_us(8192, 1, 133, 132, 0, &plain) ==
                2 * (3.0 * 256 + 2.0));
}

/* Both arrays lie in what is asked for, wherever that begins. */
static void test_places(void **state)
{
    (void)state;
    const int64_t HV = 3;
    struct fkda_segments segments = fkda_cuda_plan_segments(1000, 2, 1, 4);
    assert_int_equal(segments.slots, 1000 / 128 + 2);
    const size_t bytes = fkda_cuda_segment_bytes(&segments, HV);
    const uintptr_t images = (uintptr_t)segments.slots * 3 * 128 * 128 * sizeof(float);
    for (uintptr_t start = 4096; start < 4096 + 512; start++) {
        fkda_cuda_place_segments(&segments, HV, (void *)start);
        const uintptr_t entry = (uintptr_t)segments.entry;
        assert_int_equal(entry % 256, 0);
        assert_true(entry >= start);
        assert_int_equal((uintptr_t)segments.transition, entry + images);
        assert_true(entry + 2 * images <= start + bytes);
    }
    segments = fkda_cuda_plan_segments(1000, 2, 1, 0);
    assert_int_equal(segments.chunks, 0);
    assert_int_equal(fkda_cuda_segment_bytes(&segments, HV), 0);
}

static void test_slots(void **state)
{
    (void)state;
    assert_int_equal(fkda_cuda_segments_of(0, 128), 1);
    assert_int_equal(fkda_cuda_segments_of(128, 128), 1);
    assert_int_equal(fkda_cuda_segments_of(129, 128), 2);
    assert_int_equal(fkda_cuda_segment_slots(0, 3, 0, 128), 3);
    assert_int_equal(fkda_cuda_segment_slots(129, 3, 0, 128), 6);
    assert_int_equal(fkda_cuda_segment_slots(INT32_MAX, 2, 0, 128), 2 * ((1LL << 31) / 128));
}

/* Varlen: cu[n] / segment + n is where the segments of sequence n begin. */
static void test_slots_of_ragged_sequences_do_not_meet(void **state)
{
    (void)state;
    const int64_t lengths[] = {0, 1, 127, 128, 129, 0, 0, 1000, 128, 128, 3, 0};
    const int64_t count = sizeof lengths / sizeof lengths[0];
    for (int64_t segment = 128; segment <= 1024; segment *= 2) {
        int64_t cu = 0, free_slot = 0;
        for (int64_t n = 0; n < count; n++) {
            const int64_t base = cu / segment + n;
            assert_true(base >= free_slot);
            free_slot = base + fkda_cuda_segments_of(lengths[n], segment);
            cu += lengths[n];
        }
        assert_true(free_slot <= fkda_cuda_segment_slots(cu, count, 1, segment));
    }
}

static void test_rows_of_a_combine_block(void **state)
{
    (void)state;
    assert_int_equal(fkda_cuda_choose_combine_rows(1, SMS), 8);
    assert_int_equal(fkda_cuda_choose_combine_rows(8, SMS), 8);
    assert_int_equal(fkda_cuda_choose_combine_rows(9, SMS), 16);
}

/* Several sequences a block: only where they are short and more than the SMs, and never so many
 * that an SM stays without a block that had one before. */
static void test_items_of_a_block(void **state)
{
    (void)state;
    const int64_t calls[][3] = {{4096, 64, 8}, {1024, 256, 8},  {768, 1024, 2},  {576, 1365, 1},
                                {131, 1, 1},   {132, 64, 1},    {96, 8192, 1},   {0, 0, 1},
                                {4096, 0, 8},  {1 << 30, 1, 8}, {4096, 65536, 1}};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++)
        assert_int_equal(fkda_cuda_choose_items(calls[i][0], calls[i][1], SMS, costs), calls[i][2]);
    for (int64_t items = 1; items < 5000; items += 37)
        for (int64_t tokens = 1; tokens < 4096; tokens *= 3) {
            const int n = fkda_cuda_choose_items(items, tokens, SMS, costs);
            assert_in_range(n, 1, MOST_BLOCK_ITEMS);
            if (items <= SMS)
                assert_int_equal(n, 1);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_choice_is_a_gain),
        cmocka_unit_test(test_the_best_length_is_found),
        cmocka_unit_test(test_enough_chains_are_not_split),
        cmocka_unit_test(test_short_calls_are_not_split),
        cmocka_unit_test(test_prediction),
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_slots),
        cmocka_unit_test(test_slots_of_ragged_sequences_do_not_meet),
        cmocka_unit_test(test_rows_of_a_combine_block),
        cmocka_unit_test(test_items_of_a_block),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
