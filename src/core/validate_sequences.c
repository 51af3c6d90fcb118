/* validate_sequences.c: what the index tensors hold. Reads each entry once or twice, changes
 * nothing.
 *
 * Costs O(N + M) plus S / 8 bytes where slots of a pool are written (1/4096 of the smallest pool).
 */
#include <stdlib.h>
#include <string.h>

#include "core/checks.h"

static fkda_status check_cu_seqlens(const struct fkda_check *check, struct fkda_plan *plan)
{
    int64_t begin = fkda_index_at(plan->cu_seqlens, 0);
    if (begin != 0)
        return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "cu_seqlens[0]: %lld, wanted 0", (long long)begin);
    plan->max_sequence_tokens = 0;
    for (int64_t n = 0; n < plan->N; n++) {
        int64_t end = fkda_index_at(plan->cu_seqlens, n + 1);
        if (end < begin || end > plan->T)
            return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "cu_seqlens[%lld]: %lld, wanted from %lld (the entry before) to %lld "
                             "(T of q)",
                             (long long)(n + 1), (long long)end, (long long)begin,
                             (long long)plan->T);
        if (end - begin > plan->max_sequence_tokens)
            plan->max_sequence_tokens = end - begin;
        if (check->call == FKDA_CALL_DECODE && end - begin > FKDA_MAX_DECODE_TOKENS)
            return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "cu_seqlens[%lld]: sequence %lld has %lld tokens, wanted at most %d",
                             (long long)(n + 1), (long long)n, (long long)(end - begin),
                             FKDA_MAX_DECODE_TOKENS);
        begin = end;
    }
    plan->num_tokens = begin;
    return FKDA_OK;
}

/* ---- Slots ----------------------------------------------------------------------------------- */

/* Which slots are written, a bit each; small pools (decode's usual) need no allocation. */
struct slot_set {
    uint64_t *words;
    uint64_t small[512];
};

static bool slot_set_init(struct slot_set *set, int64_t slots)
{
    size_t words = (size_t)(slots / 64 + 1);
    set->words = set->small;
    if (words > sizeof set->small / sizeof set->small[0])
        set->words = calloc(words, sizeof *set->words);
    else
        memset(set->small, 0, words * sizeof *set->words);
    return set->words != NULL;
}

static void slot_set_free(struct slot_set *set)
{
    if (set->words != set->small)
        free(set->words);
}

static bool slot_set_has(const struct slot_set *set, int64_t slot)
{
    return (set->words[slot / 64] >> (slot % 64)) & 1u;
}

static void slot_set_add(struct slot_set *set, int64_t slot)
{
    set->words[slot / 64] |= (uint64_t)1 << (slot % 64);
}

static int64_t states_written(const struct fkda_plan *plan, int64_t n)
{
    return plan->num_accepted_tokens.data ? fkda_plan_sequence(plan, n).length : 1;
}

static fkda_status check_slot_range(const struct fkda_check *check, const struct fkda_plan *plan,
                                    int64_t slots, int64_t columns)
{
    for (int64_t n = 0; n < plan->N; n++) {
        for (int64_t t = 0; t < columns; t++) {
            int64_t slot = fkda_plan_write_slot(plan, n, t);
            if (slot < -1 || slot >= slots)
                return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                                 "state_indices[%lld, %lld]: %lld, wanted -1 or a slot from 0 to "
                                 "%lld",
                                 (long long)n, (long long)t, (long long)slot,
                                 (long long)(slots - 1));
        }
    }
    return FKDA_OK;
}

/* No slot may be written twice, nor written by one sequence and read by another: sequences run at
 * the same time. */
static fkda_status check_slot_writes(const struct fkda_check *check, const struct fkda_plan *plan,
                                     struct slot_set *set)
{
    for (int64_t n = 0; n < plan->N; n++) {
        if (fkda_plan_read_slot(plan, n) < 0)
            continue;
        int64_t count = states_written(plan, n);
        for (int64_t t = 0; t < count; t++) {
            int64_t slot = fkda_plan_write_slot(plan, n, t);
            if (slot < 0)
                continue;
            if (slot_set_has(set, slot))
                return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                                 "state_indices[%lld, %lld]: slot %lld is written twice, wanted "
                                 "distinct slots",
                                 (long long)n, (long long)t, (long long)slot);
            slot_set_add(set, slot);
        }
    }
    if (!plan->num_accepted_tokens.data)
        return FKDA_OK; /* each sequence reads the one slot it writes */
    for (int64_t n = 0; n < plan->N; n++) {
        int64_t read = fkda_plan_read_slot(plan, n);
        bool own = read < 0 || !slot_set_has(set, read);
        int64_t count = states_written(plan, n);
        for (int64_t t = 0; t < count && !own; t++)
            own = fkda_plan_write_slot(plan, n, t) == read;
        if (!own)
            return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "state_indices[%lld]: slot %lld is read here and written by another "
                             "sequence, wanted distinct slots",
                             (long long)n, (long long)read);
    }
    return FKDA_OK;
}

static fkda_status check_accepted(const struct fkda_check *check, const struct fkda_plan *plan,
                                  int64_t columns)
{
    for (int64_t n = 0; n < plan->N; n++) {
        int64_t accepted = fkda_index_at(plan->num_accepted_tokens, n);
        bool padding = accepted == 0;
        for (int64_t t = 0; t < columns && padding; t++)
            padding = fkda_plan_write_slot(plan, n, t) == -1;
        if (!padding && (accepted < 1 || accepted > columns))
            return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "num_accepted_tokens[%lld]: %lld, wanted from 1 to %lld (0 only where "
                             "all slots are -1)",
                             (long long)n, (long long)accepted, (long long)columns);
    }
    return FKDA_OK;
}

static fkda_status check_columns(const struct fkda_check *check, const struct fkda_plan *plan)
{
    const fkda_tensor *indices = check->tensor[FKDA_ARG_STATE_INDICES];
    if (!plan->num_accepted_tokens.data || plan->state_indices_columns >= plan->max_sequence_tokens)
        return FKDA_OK;
    return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                     "state_indices: shape %s, wanted at least %lld columns (tokens of the "
                     "longest sequence)",
                     fkda_format_shape(indices->ndim, indices->shape).text,
                     (long long)plan->max_sequence_tokens);
}

static fkda_status check_slots(const struct fkda_check *check, const struct fkda_plan *plan)
{
    int64_t slots = plan->num_slots; /* without states only -1 matters */
    int64_t columns = plan->state_indices_columns;
    fkda_status status = check_columns(check, plan);
    if (status == FKDA_OK)
        status = check_slot_range(check, plan, slots, columns);
    if (status == FKDA_OK && plan->num_accepted_tokens.data)
        status = check_accepted(check, plan, columns);
    if (status != FKDA_OK || !plan->final_state.data)
        return status;

    struct slot_set set;
    if (!slot_set_init(&set, slots))
        return fkda_fail(check->reason, FKDA_ERROR_OUT_OF_MEMORY,
                         "state_indices: no memory for a set of %lld slots", (long long)slots);
    status = check_slot_writes(check, plan, &set);
    slot_set_free(&set);
    return status;
}

/* ---- Checkpoints ----------------------------------------------------------------------------- */

static fkda_status check_indptr(const struct fkda_check *check, const struct fkda_plan *plan,
                                int64_t count)
{
    int64_t before = 0;
    for (int64_t n = 0; n <= plan->N; n++) {
        int64_t entry = fkda_index_at(plan->checkpoint_indptr, n);
        if (n == 0 ? entry != 0 : entry < before || entry > count)
            return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "checkpoint_indptr[%lld]: %lld, wanted from %lld to %lld",
                             (long long)n, (long long)entry, (long long)before,
                             (long long)(n == 0 ? 0 : count));
        before = entry;
    }
    return FKDA_OK;
}

static fkda_status check_checkpoints(const struct fkda_check *check, const struct fkda_plan *plan)
{
    fkda_status status = FKDA_OK;
    if (plan->checkpoint_indptr.data)
        status = check_indptr(check, plan, check->tensor[FKDA_ARG_CHECKPOINT_STATE]->shape[0]);
    for (int64_t n = 0; n < plan->N && status == FKDA_OK; n++) {
        int64_t first, last, length = fkda_plan_sequence(plan, n).length, before = -1;
        fkda_plan_checkpoints(plan, n, &first, &last);
        for (int64_t m = first; m < last; m++) {
            int64_t offset = fkda_index_at(plan->checkpoint_offsets, m);
            if (offset == -1)
                continue;
            if (offset <= before || offset > length || offset % FKDA_CHUNK_TOKENS)
                return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                                 "checkpoint_offsets[%lld]: %lld, wanted -1 or a multiple of %d "
                                 "above %lld and up to %lld (length of sequence %lld)",
                                 (long long)m, (long long)offset, FKDA_CHUNK_TOKENS,
                                 (long long)before, (long long)length, (long long)n);
            before = offset;
        }
    }
    return status;
}

fkda_status fkda_check_sequences(const struct fkda_check *check, struct fkda_plan *plan)
{
    plan->num_tokens = plan->B * plan->T;
    plan->max_sequence_tokens = plan->T;
    if (check->call == FKDA_CALL_WORKSPACE)
        return FKDA_OK; /* contents are not looked at */
    if (plan->device == FKDA_CUDA) {
        /* Nor can they be: the kernels read them, and clamp what would lead outside memory. */
        if (!plan->varlen)
            return check_columns(check, plan);
        plan->num_tokens = -1;
        return FKDA_OK;
    }
    fkda_status status = FKDA_OK;
    if (plan->cu_seqlens.data)
        status = check_cu_seqlens(check, plan);
    if (status == FKDA_OK && plan->state_indices.data)
        status = check_slots(check, plan);
    if (status == FKDA_OK && plan->checkpoint_state.data)
        status = check_checkpoints(check, plan);
    return status;
}
