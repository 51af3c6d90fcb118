/* test_segment_plan.c: src/cuda/segment_plan.c, how a forward is cut into segments. */
#include "cuda/segment_plan.h"
#include "problem.h"

enum { SMS = 132 };

static const struct fkda_segment_costs *const costs = &fkda_segment_costs_sm90;

static double predict(int64_t T, int64_t N, int64_t HV, struct fkda_cut cut)
{
    return fkda_cuda_predict_sm90_us(T, N, HV, SMS, cut, costs);
}

static struct fkda_cut choose(int64_t T, int64_t N, int64_t HV)
{
    return fkda_cuda_choose_cut(T, N, HV, SMS, costs);
}

static int64_t divide_up(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static int64_t chunks_of(int64_t T, int64_t N)
{
    return divide_up(divide_up(T, N), SEGMENT_CHUNK_TOKENS);
}

/* What a choice has to be whatever the costs are. */
static void test_any_choice_is_a_gain(void **state)
{
    (void)state;
    for (int64_t N = 1; N <= 40; N += 3)
        for (int64_t HV = 1; HV <= 160; HV += HV < 8 ? 1 : 9)
            for (int64_t T = 1; T <= 1 << 20; T = T * 3 + 1) {
                const struct fkda_cut cut = choose(T, N, HV), whole = {0, 0};
                if (cut.chunks == 0)
                    continue;
                assert_true(cut.chunks >= LEAST_PIECE_CHUNKS);
                assert_true(cut.first >= cut.chunks);
                assert_true(cut.first < chunks_of(T, N));
                assert_true(predict(T, N, HV, cut) < costs->worthwhile * predict(T, N, HV, whole));
            }
}

/* No other cut is predicted to be faster by more than what rounding up to whole chunks does. */
static void test_the_best_cut_is_found(void **state)
{
    (void)state;
    const int64_t calls[][3] = {{8192, 1, 12}, {8192, 1, 4}, {8192, 1, 32}, {8192, 1, 16},
                                {2048, 1, 12}, {6000, 3, 5}, {65536, 1, 12}};
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        const int64_t T = calls[i][0], N = calls[i][1], HV = calls[i][2], chunks = chunks_of(T, N);
        const struct fkda_cut chosen = choose(T, N, HV);
        assert_true(chosen.chunks > 0);
        for (int32_t length = LEAST_PIECE_CHUNKS; length < chunks; length++)
            for (int32_t first = length; first < chunks; first++)
                if ((divide_up(chunks - first, length) + 1) * N * HV <= MOST_ROUNDS * SMS)
                    assert_true(predict(T, N, HV, chosen) <=
                                1.02 * predict(T, N, HV, (struct fkda_cut){length, first}));
    }
}

static void test_enough_chains_are_not_split(void **state)
{
    (void)state;
    assert_int_equal(choose(8192, 1, 128).chunks, 0);
    assert_int_equal(choose(8192, 1, SMS).chunks, 0);
    assert_int_equal(choose(1 << 20, 1, SMS + 1).chunks, 0);
    assert_int_equal(choose(1 << 20, 64, 4).chunks, 0);
    assert_int_equal(choose(INT32_MAX - 16, INT32_MAX / 8, 8).chunks, 0);
}

static void test_short_calls_are_not_split(void **state)
{
    (void)state;
    assert_int_equal(choose(0, 1, 1).chunks, 0);
    assert_int_equal(choose(0, 0, 1).chunks, 0);
    assert_int_equal(choose(1, 1, 1).chunks, 0);
    assert_int_equal(choose(LEAST_PIECE_CHUNKS * SEGMENT_CHUNK_TOKENS, 1, 1).chunks, 0);
    assert_int_equal(choose(128 * 8, 8, 1).chunks, 0);
}

/* By hand. 8192 tokens of 12 heads, in first segments of 64 chunks and 8 others of 24 each: of 66
 * pairs of SMs 54 have no first segment, and walk 54 others while it is walked; then there are 42.
 * Where others are short, all 96 are done meanwhile. */
static void test_prediction(void **state)
{
    (void)state;
    struct fkda_segment_costs plain = {.chunk_us = 4.0,
                                       .pair_us = 1.0,
                                       .later_us = 2.0,
                                       .start_us = 3.0,
                                       .combine_us = 1.0,
                                       .join_us = 0.5,
                                       .launch_us = 4.0,
                                       .worthwhile = 0.95};
    const struct fkda_cut whole = {0, 0}, cut = {24, 64}, all = {24, 256};
    const double others = 9 * 1.0 + 0.5 * (256 - 64) * 12 + 2 * 4.0;
    assert_true(fkda_cuda_predict_sm90_us(8192, 1, 12, 132, cut, &plain) ==
                2 * (2.0 * 24 + 3.0) + others);
    plain.later_us = 1.0;
    assert_true(fkda_cuda_predict_sm90_us(8192, 1, 12, 132, cut, &plain) == 64 + 3.0 + others);
    assert_true(fkda_cuda_predict_sm90_us(8192, 1, 66, 132, whole, &plain) == 256 + 3.0);
    assert_true(fkda_cuda_predict_sm90_us(8192, 1, 12, 132, all, &plain) == 256 + 3.0);
    assert_true(fkda_cuda_predict_sm90_us(8192, 1, 67, 132, whole, &plain) == 4.0 * 256 + 3.0);
    assert_true(fkda_cuda_predict_sm90_us(8192, 1, 133, 132, whole, &plain) ==
                2 * (4.0 * 256 + 3.0));
}

/* All arrays lie in what is asked for, wherever that begins, one behind the other. */
static void test_places(void **state)
{
    (void)state;
    const int64_t HV = 3;
    struct fkda_segments segments = fkda_cuda_plan_segments(1000, 2, 1, (struct fkda_cut){4, 9});
    assert_int_equal(segments.slots, 1000 / 128 + 2 - 1);
    const size_t bytes = fkda_cuda_segment_bytes(&segments, HV);
    const uintptr_t pairs = (uintptr_t)segments.slots * HV, images = pairs * 128 * 128 * 4;
    for (uintptr_t start = 4096; start < 4096 + 512; start++) {
        fkda_cuda_place_segments(&segments, HV, (void *)start);
        const uintptr_t entry = (uintptr_t)segments.entry;
        assert_int_equal(entry % 256, 0);
        assert_true(entry >= start);
        assert_int_equal((uintptr_t)segments.transition, entry + images);
        assert_int_equal((uintptr_t)segments.response, entry + 2 * images);
        assert_int_equal((uintptr_t)segments.forced,
                         entry + 2 * images + pairs * 4 * RESPONSE_BYTES);
        assert_int_equal((uintptr_t)segments.exponent,
                         (uintptr_t)segments.forced + pairs * 4 * FORCED_BYTES);
        assert_true((uintptr_t)(segments.exponent + pairs * 4 * EXPONENTS) <= start + bytes);
    }
    segments = fkda_cuda_plan_segments(1000, 2, 1, (struct fkda_cut){0, 0});
    assert_int_equal(segments.chunks, 0);
    assert_int_equal(fkda_cuda_segment_bytes(&segments, HV), 0);
}

/* The number that a caller gets without a device is enough for what is chosen on one. */
static void test_the_most_is_enough(void **state)
{
    (void)state;
    size_t chosen = 0;
    for (int sms = 78; sms <= 264; sms += 31)
        for (int64_t N = 1; N <= 100; N += N / 2 + 1)
            for (int64_t HV = 1; HV <= 100; HV += HV / 3 + 1)
                for (int64_t T = 1; T <= 1 << 21; T = T * 5 / 2 + 1)
                    for (int varlen = 0; varlen <= 1; varlen++) {
                        const int64_t tokens = varlen ? T : N * T;
                        const struct fkda_cut cut = fkda_cuda_choose_cut(tokens, N, HV, sms, costs);
                        const struct fkda_segments segments =
                            fkda_cuda_plan_segments(T, N, varlen, cut);
                        const size_t bytes = fkda_cuda_segment_bytes(&segments, HV);
                        assert_true(bytes <= fkda_cuda_most_segment_bytes(T, N, HV, varlen));
                        chosen += bytes > 0;
                    }
    assert_true(chosen > 100);
    assert_int_equal(fkda_cuda_most_segment_bytes(8192, 1, MOST_SMS + 1, 1), 0);
    assert_int_equal(fkda_cuda_most_segment_bytes(0, 4, 4, 0), 0);
    assert_int_equal(fkda_cuda_most_segment_bytes(64, 0, 4, 1), 0);
}

/* Room for many sequences is room for fewer, and for fewer tokens. */
static void test_the_most_is_enough_for_less(void **state)
{
    (void)state;
    for (int64_t HV = 1; HV <= 150; HV += HV / 2 + 1)
        for (int64_t N = 1; N <= 300; N += N / 3 + 1)
            for (int64_t T = 1; T <= 1 << 20; T = T * 3 + 1) {
                const size_t most = fkda_cuda_most_segment_bytes(T, N, HV, 1);
                assert_true(fkda_cuda_most_segment_bytes(T, N - N / 2, HV, 1) <= most);
                assert_true(fkda_cuda_most_segment_bytes(T - T / 3, N, HV, 1) <= most);
            }
}

static void test_slots(void **state)
{
    (void)state;
    const struct fkda_cut cut = {4, 4};
    assert_int_equal(fkda_cuda_plan_segments(0, 3, 0, cut).slots, 3);
    assert_int_equal(fkda_cuda_plan_segments(129, 3, 0, cut).slots, 6);
    assert_int_equal(fkda_cuda_plan_segments(INT32_MAX, 2, 0, cut).slots, 2 * ((1LL << 31) / 128));
    assert_int_equal(fkda_cuda_plan_segments(257, 3, 0, (struct fkda_cut){4, 8}).slots, 8);
    assert_int_equal(fkda_cuda_plan_segments(257, 3, 0, (struct fkda_cut){4, 9}).slots, 5);
    assert_int_equal(fkda_cuda_plan_segments(129, 1, 0, (struct fkda_cut){4, 36}).slots, 1);
    assert_int_equal(fkda_cuda_plan_segments(129, 1, 0, (struct fkda_cut){4, 11}).lead, 2);
}

/* Varlen: cu[n] / piece + n is where the numbers of sequence n begin, as many as its first segment
 * has pieces, and one for each later one. */
static void test_slots_of_ragged_sequences_do_not_meet(void **state)
{
    (void)state;
    const int64_t lengths[] = {0, 1, 127, 128, 129, 0, 0, 1000, 128, 128, 3, 0};
    const int64_t count = sizeof lengths / sizeof lengths[0];
    for (int32_t chunks = 4; chunks <= 32; chunks *= 2)
        for (int32_t first = chunks; first <= 3 * chunks; first++) {
            const int64_t piece = 32 * (int64_t)chunks, lead = first / chunks;
            int64_t cu = 0, free_slot = 0;
            for (int64_t n = 0; n < count; n++) {
                const int64_t base = cu / piece + n, later = lengths[n] - 32 * (int64_t)first;
                assert_true(base >= free_slot);
                free_slot = base + (later > 0 ? lead + divide_up(later, piece) : 1);
                cu += lengths[n];
            }
            const struct fkda_cut cut = {chunks, first};
            assert_true(free_slot - (lead - 1) <= fkda_cuda_plan_segments(cu, count, 1, cut).slots);
        }
}

/* Blocks of the join step: two for each SM where segments are few, and never without a chunk. */
static void test_shares_of_a_join(void **state)
{
    (void)state;
    assert_int_equal(fkda_cuda_choose_join_shares(60, 43, SMS), 4);
    assert_int_equal(fkda_cuda_choose_join_shares(1, 43, SMS), 43);
    assert_int_equal(fkda_cuda_choose_join_shares(1000, 43, SMS), 1);
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
        cmocka_unit_test(test_the_best_cut_is_found),
        cmocka_unit_test(test_enough_chains_are_not_split),
        cmocka_unit_test(test_short_calls_are_not_split),
        cmocka_unit_test(test_prediction),
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_the_most_is_enough),
        cmocka_unit_test(test_the_most_is_enough_for_less),
        cmocka_unit_test(test_slots),
        cmocka_unit_test(test_slots_of_ragged_sequences_do_not_meet),
        cmocka_unit_test(test_shares_of_a_join),
        cmocka_unit_test(test_rows_of_a_combine_block),
        cmocka_unit_test(test_items_of_a_block),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
