/* segment_plan.c: the cost model behind a split; see segment_plan.h. */
#include "cuda/segment_plan.h"

#include "cuda/tile_image.h"

/* Beyond this many segments a sequence, the combine step alone takes longer than is gained. */
#define MOST_SEGMENTS 256

const struct fkda_segment_costs fkda_segment_costs_sm90 = {
    .chunk_us = 3.0,
    .pass1_share = 0.8,
    .combine_us = 1.0,
    .launch_us = 4.0,
    .worthwhile = 0.95,
};

static int64_t divide_up(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

int64_t fkda_cuda_segments_of(int64_t tokens, int64_t segment_tokens)
{
    return tokens > 0 ? divide_up(tokens, segment_tokens) : 1;
}

int64_t fkda_cuda_segment_slots(int64_t T, int64_t N, int varlen, int64_t segment_tokens)
{
    return varlen ? T / segment_tokens + N : N * fkda_cuda_segments_of(T, segment_tokens);
}

int fkda_cuda_choose_combine_rows(int64_t chains, int num_sms)
{
    return chains * (TILE_K / 16) <= num_sms ? 16 : 32;
}

/* Blocks run in rounds of one for each SM. */
static double rounds(int64_t blocks, int num_sms)
{
    return (double)divide_up(blocks, num_sms);
}

static int64_t chunks_of_sequence(int64_t T, int64_t N)
{
    return divide_up(divide_up(T, N), SEGMENT_CHUNK_TOKENS);
}

double fkda_cuda_predict_segments_us(int64_t T, int64_t N, int64_t HV, int num_sms,
                                     int64_t segment_chunks, const struct fkda_segment_costs *costs)
{
    const int64_t chains = N * HV, chunks = chunks_of_sequence(T, N);
    if (segment_chunks == 0 || segment_chunks >= chunks)
        return costs->chunk_us * rounds(chains, num_sms) * (double)chunks;
    const int64_t segments = divide_up(chunks, segment_chunks);
    const int64_t combine_blocks = chains * TILE_K / fkda_cuda_choose_combine_rows(chains, num_sms);
    const double pass1 = costs->pass1_share * rounds(2 * (segments - 1) * chains, num_sms);
    const double pass2 = rounds(segments * chains, num_sms);
    const double combine = (double)segments * rounds(combine_blocks, num_sms);
    return costs->chunk_us * (double)segment_chunks * (pass1 + pass2) +
           costs->combine_us * combine + 2 * costs->launch_us;
}

int fkda_cuda_choose_segment(int64_t T, int64_t N, int64_t HV, int num_sms,
                             const struct fkda_segment_costs *costs)
{
    if (T <= 0 || N <= 0 || HV <= 0 || N > num_sms / HV)
        return 0; /* every SM has a chain: a second pass can only cost */
    const int64_t chunks = chunks_of_sequence(T, N);
    double best_us = costs->worthwhile * fkda_cuda_predict_segments_us(T, N, HV, num_sms, 0, costs);
    int64_t best = 0;
    for (int64_t segments = 2; segments <= MOST_SEGMENTS; segments++) {
        const int64_t length =
            divide_up(divide_up(chunks, segments), SEGMENT_UNIT_CHUNKS) * SEGMENT_UNIT_CHUNKS;
        if (length >= chunks)
            continue;
        const double us = fkda_cuda_predict_segments_us(T, N, HV, num_sms, length, costs);
        if (us < best_us) {
            best_us = us;
            best = length;
        }
    }
    return (int)best;
}
