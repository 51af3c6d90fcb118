/* segment_plan.c: the cost model behind a split; see segment_plan.h. */
#include "cuda/segment_plan.h"

#include "cuda/tile_image.h"

/* Beyond this many segments a sequence, the combine step alone takes longer than is gained. */
#define MOST_SEGMENTS 256

#define MOST_BLOCK_TOKENS 2048

const struct fkda_segment_costs fkda_segment_costs_sm90 = {
    .chunk_us = 2.4,
    .start_us = 9.0,
    .item_us = 3.0,
    .combine_us = 1.3,
    .join_us = 0.008,
    .launch_us = 3.0,
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
    return chains * (TILE_K / 8) <= num_sms ? 8 : 16;
}

int fkda_cuda_choose_join_shares(int64_t pairs, int64_t chunks, int num_sms)
{
    const int64_t wanted = divide_up(2 * (int64_t)num_sms, pairs);
    return (int)(wanted < chunks ? wanted : chunks);
}

/* Blocks run in rounds of one for each SM. */
static double rounds(int64_t blocks, int num_sms)
{
    return (double)divide_up(blocks, num_sms);
}

/* Time of blocks that take so many items each. */
static double items_us(int64_t items, int64_t tokens, int per_block, int num_sms,
                       const struct fkda_segment_costs *costs)
{
    const double chunks = (double)divide_up(tokens, SEGMENT_CHUNK_TOKENS);
    return rounds(divide_up(items, per_block), num_sms) *
           (costs->start_us - costs->item_us +
            per_block * (costs->chunk_us * chunks + costs->item_us));
}

int fkda_cuda_choose_items(int64_t items, int64_t tokens, int num_sms,
                           const struct fkda_segment_costs *costs)
{
    int best = 1;
    /* nobody knows how unequal they are: blocks stay short, so that they even out */
    for (int n = 2; n <= MOST_BLOCK_ITEMS && n * tokens <= MOST_BLOCK_TOKENS; n++)
        if (items_us(items, tokens, n, num_sms, costs) <
            items_us(items, tokens, best, num_sms, costs))
            best = n;
    return best;
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
        return items_us(chains, T / N, fkda_cuda_choose_items(chains, T / N, num_sms, costs),
                        num_sms, costs);
    const int64_t segments = divide_up(chunks, segment_chunks);
    const int64_t combine_blocks = chains * TILE_K / fkda_cuda_choose_combine_rows(chains, num_sms);
    const double walk = rounds((2 * segments - 1) * chains, num_sms);
    const double combine = (double)segments * rounds(combine_blocks, num_sms);
    const double join = (double)((chunks - segment_chunks) * chains) * 132.0 / num_sms;
    return (costs->chunk_us * (double)segment_chunks + costs->start_us) * walk +
           costs->combine_us * combine + costs->join_us * join + 2 * costs->launch_us;
}

int fkda_cuda_choose_segment(int64_t T, int64_t N, int64_t HV, int num_sms,
                             const struct fkda_segment_costs *costs)
{
    if (T <= 0 || N <= 0 || HV <= 0 || N > num_sms / HV)
        return 0; /* every SM has a chain: more work can only cost */
    const int64_t chunks = chunks_of_sequence(T, N);
    /* all SMs busy with every chunk once, of which splits make nearly two */
    const double once_us = costs->chunk_us * (double)(chunks * N * HV) / num_sms;
    double best_us = costs->worthwhile * fkda_cuda_predict_segments_us(T, N, HV, num_sms, 0, costs);
    int64_t best = 0, before = chunks;
    for (int64_t wanted = 2; wanted <= MOST_SEGMENTS; wanted++) {
        const int64_t length = divide_up(chunks, wanted);
        if (length < LEAST_SEGMENT_CHUNKS)
            break;
        if (length == before)
            continue;
        before = length;
        const double segments = (double)divide_up(chunks, length);
        if (once_us * (2 - 1 / segments) + costs->combine_us * segments >= best_us)
            break; /* so take more segments, at least */
        const double us = fkda_cuda_predict_segments_us(T, N, HV, num_sms, length, costs);
        if (us < best_us) {
            best_us = us;
            best = length;
        }
    }
    return (int)best;
}

/* Measured on 132 SMs: preparation and recurrence are bound by memory (the first two), a long chain
 * by its own latency (the third). */
double fkda_cuda_predict_sm80_us(int64_t T, int64_t N, int64_t HV, int num_sms)
{
    const double prepare_us = 0.0092, recurrence_us = 0.0132, tile_us = 0.85, launches_us = 12.0;
    const int64_t tiles = divide_up(divide_up(T, N), TILE_TOKENS);
    const double images = (double)tiles * (double)N * (double)HV * 132.0 / num_sms;
    const double chain = tile_us * (double)tiles, all = recurrence_us * images;
    return launches_us + prepare_us * images + (chain > all ? chain : all);
}

struct fkda_segments fkda_cuda_plan_segments(int64_t T, int64_t N, int varlen, int32_t chunks)
{
    const int64_t tokens = (int64_t)SEGMENT_CHUNK_TOKENS * chunks;
    if (chunks == 0)
        return (struct fkda_segments){0};
    return (struct fkda_segments){
        .chunks = chunks,
        .per_sequence = fkda_cuda_segments_of(T, tokens),
        .slots = fkda_cuda_segment_slots(T, N, varlen, tokens),
    };
}

enum { SEGMENT_ALIGNMENT = 256, IMAGE_ITEMS = TILE_K * TILE_K };

size_t fkda_cuda_segment_bytes(const struct fkda_segments *segments, int64_t HV)
{
    const size_t pairs = (size_t)(segments->slots * HV);
    const size_t chunk = RESPONSE_BYTES + FORCED_BYTES;
    const size_t bytes =
        pairs * (2 * IMAGE_ITEMS * sizeof(float) + (size_t)segments->chunks * chunk);
    return bytes ? bytes + SEGMENT_ALIGNMENT - 1 : 0;
}

void fkda_cuda_place_segments(struct fkda_segments *segments, int64_t HV, void *workspace)
{
    const uintptr_t at = (uintptr_t)workspace;
    const uintptr_t skip = (SEGMENT_ALIGNMENT - at % SEGMENT_ALIGNMENT) % SEGMENT_ALIGNMENT;
    const int64_t pairs = segments->slots * HV;
    segments->entry = (float *)(void *)((char *)workspace + skip);
    segments->transition = segments->entry + pairs * IMAGE_ITEMS;
    segments->response = (char *)(segments->transition + pairs * IMAGE_ITEMS);
    segments->forced = segments->response + pairs * segments->chunks * RESPONSE_BYTES;
}

size_t fkda_cuda_most_segment_bytes(int64_t T, int64_t N, int64_t HV, int varlen)
{
    if (T <= 0 || N <= 0 || N > MOST_SMS / HV)
        return 0;
    const struct fkda_segments most = fkda_cuda_plan_segments(T, N, varlen, LEAST_SEGMENT_CHUNKS);
    return fkda_cuda_segment_bytes(&most, HV);
}
