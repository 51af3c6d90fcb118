/* segment_plan.c: the cost model behind a split; see segment_plan.h. */
#include "cuda/segment_plan.h"

#include "cuda/tile_image.h"

#define MOST_BLOCK_TOKENS 2048

const struct fkda_segment_costs fkda_segment_costs_sm90 = {
    .chunk_us = 2.4,
    .pair_us = 1.45,
    .later_us = 1.92,
    .start_us = 9.0,
    .item_us = 3.0,
    .combine_us = 1.3,
    .join_us = 0.008,
    .launch_us = 4.5,
    .worthwhile = 0.95,
};

static int64_t divide_up(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

int fkda_cuda_choose_combine_rows(int64_t chains, int num_sms)
{
    return chains * (TILE_K / 8) <= num_sms ? 8 : 16;
}

int fkda_cuda_choose_join_shares(int64_t segments, int64_t chunks, int num_sms)
{
    const int64_t most = 2 * (int64_t)num_sms / segments; /* two blocks run on an SM */
    const int64_t shares = most < chunks ? most : chunks;
    return shares > 1 ? (int)shares : 1;
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

int fkda_cuda_has_pairs(int64_t chains, int num_sms)
{
    return chains <= num_sms / 2;
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

/* Segments of a cut sequence of so many chunks behind the first one. */
static int64_t later_segments(int64_t chunks, struct fkda_cut cut)
{
    return cut.chunks && chunks > cut.first ? divide_up(chunks - cut.first, cut.chunks) : 0;
}

/* Pairs of blocks walk all first segments, then the others; those without a first one in the last
 * round of them begin with the others at once. */
static double walk_us(int64_t chains, int64_t later, int64_t pairs, struct fkda_cut cut,
                      const struct fkda_segment_costs *costs)
{
    const double first_us = costs->start_us + costs->pair_us * cut.first;
    const double later_us = costs->start_us + costs->later_us * cut.chunks;
    const int64_t free = pairs - chains % pairs; /* in the last round */
    const int64_t meanwhile = free * (int64_t)(first_us / later_us);
    const double before = first_us * (double)(chains / pairs);
    const double beside = later_us * (double)divide_up(later, free);
    const double behind =
        first_us + (later > meanwhile ? later_us * (double)divide_up(later - meanwhile, pairs) : 0);
    const double last = beside < behind ? beside : behind;
    return before + (last > first_us ? last : first_us);
}

double fkda_cuda_predict_sm90_us(int64_t T, int64_t N, int64_t HV, int num_sms, struct fkda_cut cut,
                                 const struct fkda_segment_costs *costs)
{
    const int64_t chains = N * HV, chunks = chunks_of_sequence(T, N);
    const int64_t later = later_segments(chunks, cut);
    if (later == 0 && fkda_cuda_has_pairs(chains, num_sms))
        return costs->start_us + costs->pair_us * (double)chunks;
    if (later == 0)
        return items_us(chains, T / N, fkda_cuda_choose_items(chains, T / N, num_sms, costs),
                        num_sms, costs);
    const int64_t combine_blocks = chains * TILE_K / fkda_cuda_choose_combine_rows(chains, num_sms);
    const double combine = (double)(later + 1) * rounds(combine_blocks, num_sms);
    const double join = (double)((chunks - cut.first) * chains) * 132.0 / num_sms;
    return walk_us(chains, later * chains, num_sms / 2, cut, costs) + costs->combine_us * combine +
           costs->join_us * join + 2 * costs->launch_us;
}

/* The length of `later` segments behind a first one with which all SMs are busy until the end:
 * pairs without a first segment in the last round walk the others in rounds of their own
 * meanwhile. */
static double balanced_length(int64_t chunks, int64_t chains, int64_t later, int64_t pairs,
                              const struct fkda_segment_costs *costs)
{
    const double beside = (double)divide_up(later * chains, pairs - chains % pairs);
    const double starts = (beside - 1) * costs->start_us / costs->pair_us;
    return ((double)chunks - starts) / ((double)later + beside * costs->later_us / costs->pair_us);
}

struct fkda_cut fkda_cuda_choose_cut(int64_t T, int64_t N, int64_t HV, int num_sms,
                                     const struct fkda_segment_costs *costs)
{
    struct fkda_cut best = {0, 0};
    num_sms = num_sms < MOST_SMS ? num_sms : MOST_SMS;
    if (T <= 0 || N <= 0 || HV <= 0 || N > num_sms / HV || num_sms < 2)
        return best; /* every SM has a chain: more work can only cost */
    const int64_t chunks = chunks_of_sequence(T, N), chains = N * HV;
    double best_us = costs->worthwhile * fkda_cuda_predict_sm90_us(T, N, HV, num_sms, best, costs);
    for (int64_t later = 1; (later + 1) * chains <= MOST_ROUNDS * num_sms; later++) {
        const double balanced = balanced_length(chunks, chains, later, num_sms / 2, costs);
        if (balanced < LEAST_PIECE_CHUNKS - 1)
            break;
        for (int up = 0; up <= 1; up++) {
            const int32_t length = (int32_t)balanced + up;
            const struct fkda_cut cut = {length, (int32_t)(chunks - later * length)};
            if (length < LEAST_PIECE_CHUNKS || cut.first < length)
                continue;
            const double us = fkda_cuda_predict_sm90_us(T, N, HV, num_sms, cut, costs);
            if (us < best_us) {
                best_us = us;
                best = cut;
            }
        }
    }
    return best;
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

struct fkda_segments fkda_cuda_plan_segments(int64_t T, int64_t N, int varlen, struct fkda_cut cut)
{
    const int64_t tokens = (int64_t)SEGMENT_CHUNK_TOKENS * cut.chunks;
    if (cut.chunks == 0)
        return (struct fkda_segments){0};
    const int32_t lead = cut.first / cut.chunks;
    const int64_t per_sequence = lead + later_segments(divide_up(T, SEGMENT_CHUNK_TOKENS), cut);
    const int64_t pieces = varlen ? T / tokens + N : N * per_sequence;
    return (struct fkda_segments){
        .chunks = cut.chunks,
        .first = cut.first,
        .lead = lead,
        .per_sequence = per_sequence,
        .slots = pieces > lead ? pieces - (lead - 1) : 1,
    };
}

enum { SEGMENT_ALIGNMENT = 256, IMAGE_ITEMS = TILE_K * TILE_K };

#define STATES_BYTES (2 * (size_t)IMAGE_ITEMS * sizeof(float)) /* entry and transition */
#define CHUNK_BYTES  (RESPONSE_BYTES + FORCED_BYTES + EXPONENTS * sizeof(int32_t))

size_t fkda_cuda_segment_bytes(const struct fkda_segments *segments, int64_t HV)
{
    const size_t pairs = (size_t)(segments->slots * HV);
    const size_t bytes = pairs * (STATES_BYTES + (size_t)segments->chunks * CHUNK_BYTES);
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
    segments->exponent =
        (int32_t *)(void *)(segments->forced + pairs * segments->chunks * FORCED_BYTES);
}

/* Pieces have at most half of the average sequence's chunks, rounded up, and LEAST_PIECE_CHUNKS or
 * more; varlen has N pieces more than their tokens are. More sequences than are ever split count as
 * that many: who has room for them may come with fewer. */
size_t fkda_cuda_most_segment_bytes(int64_t T, int64_t N, int64_t HV, int varlen)
{
    if (T <= 0 || N <= 0 || HV > MOST_SMS)
        return 0;
    const int64_t tokens = varlen ? T : N * T;
    N = N < MOST_SMS / HV ? N : MOST_SMS / HV;
    const int64_t by_length = (tokens / (SEGMENT_CHUNK_TOKENS * LEAST_PIECE_CHUNKS) + N) * HV;
    const int64_t by_number = MOST_ROUNDS * MOST_SMS + N * HV;
    const int64_t pieces = by_length < by_number ? by_length : by_number;
    const int64_t chunks = (3 * divide_up(tokens, 2 * SEGMENT_CHUNK_TOKENS) + 3 * N) * HV;
    return (size_t)pieces * STATES_BYTES + (size_t)chunks * CHUNK_BYTES + SEGMENT_ALIGNMENT - 1;
}
