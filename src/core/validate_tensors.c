/* validate_tensors.c: each tensor by itself, and which of them share memory. */
#include <stdio.h>

#include "core/checks.h"

#define BIT(dtype) (1u << (dtype))
#define FLOATS     (BIT(FKDA_BF16) | BIT(FKDA_F32))
#define INDICES    (BIT(FKDA_I32) | BIT(FKDA_I64))

struct rule {
    const char *name, *layout;
    size_t offset; /* in fkda_args */
    uint32_t dtypes;
    int8_t min_ndim, max_ndim;
    bool required, output;
    bool float64_too; /* in fkda_reference */
    int8_t dense;     /* trailing dimensions that must be contiguous */
};

#define RULE(field, layout_, dtypes_, min_, max_, ...)                           \
    {                                                                            \
        .name = #field, .layout = layout_, .offset = offsetof(fkda_args, field), \
        .dtypes = dtypes_, .min_ndim = min_, .max_ndim = max_, __VA_ARGS__       \
    }

static const struct rule rules[FKDA_ARG_COUNT] = {
    [FKDA_ARG_Q] = RULE(q, "[B, T, H, K]", FLOATS, 4, 4, .required = true, .dense = 1),
    [FKDA_ARG_K] = RULE(k, "[B, T, H, K]", FLOATS, 4, 4, .required = true, .dense = 1),
    [FKDA_ARG_V] = RULE(v, "[B, T, HV, V]", FLOATS, 4, 4, .required = true, .dense = 1),
    [FKDA_ARG_G] = RULE(g, "[B, T, HV, K]", FLOATS, 4, 4, .required = true, .dense = 1),
    [FKDA_ARG_BETA] = RULE(beta, "[B, T, HV]", FLOATS, 3, 3, .required = true, .dense = 1),
    [FKDA_ARG_A_LOG] = RULE(A_log, "[HV]", BIT(FKDA_F32), 1, 1, .dense = 0),
    [FKDA_ARG_DT_BIAS] = RULE(dt_bias, "[HV, K] or [HV * K]", BIT(FKDA_F32), 1, 2, .dense = 1),
    [FKDA_ARG_CU_SEQLENS] = RULE(cu_seqlens, "[N + 1]", INDICES, 1, 1, .dense = 0),
    [FKDA_ARG_OUT] = RULE(out, "[B, T, HV, V]", FLOATS, 4, 4, .required = true, .dense = 1,
                          .output = true, .float64_too = true),
    [FKDA_ARG_INITIAL_STATE] =
        RULE(initial_state, "[N, HV, V, K]", FLOATS, 4, 4, .dense = 2, .float64_too = true),
    [FKDA_ARG_FINAL_STATE] = RULE(final_state, "[N, HV, V, K]", FLOATS, 4, 4, .dense = 2,
                                  .output = true, .float64_too = true),
    [FKDA_ARG_STATE_INDICES] = RULE(state_indices, "[N] or [N, T]", INDICES, 1, 2, .dense = 0),
    [FKDA_ARG_NUM_ACCEPTED_TOKENS] = RULE(num_accepted_tokens, "[N]", INDICES, 1, 1, .dense = 0),
    [FKDA_ARG_CHECKPOINT_STATE] = RULE(checkpoint_state, "[M, HV, V, K]", FLOATS, 4, 4, .dense = 2,
                                       .output = true, .float64_too = true),
    [FKDA_ARG_CHECKPOINT_OFFSETS] = RULE(checkpoint_offsets, "[M]", INDICES, 1, 1, .dense = 0),
    [FKDA_ARG_CHECKPOINT_INDPTR] = RULE(checkpoint_indptr, "[N + 1]", INDICES, 1, 1, .dense = 0),
};

const char *fkda_argument_name(enum fkda_argument which)
{
    return rules[which].name;
}

struct fkda_shape_text fkda_format_shape(int ndim, const int64_t *shape)
{
    struct fkda_shape_text shown = {"["};
    size_t used = 1;
    for (int i = 0; i < ndim && i < FKDA_MAX_NDIM; i++)
        used += (size_t)snprintf(shown.text + used, sizeof shown.text - used, "%s%lld",
                                 i ? ", " : "", (long long)shape[i]);
    snprintf(shown.text + used, sizeof shown.text - used, "]");
    return shown;
}

static bool is_empty(const fkda_tensor *tensor)
{
    for (int i = 0; i < tensor->ndim; i++)
        if (tensor->shape[i] == 0)
            return true;
    return false;
}

static fkda_status check_dtype(const struct fkda_check *check, const struct rule *rule,
                               const fkda_tensor *tensor)
{
    uint32_t allowed = rule->dtypes;
    if (rule->float64_too && check->call == FKDA_CALL_REFERENCE)
        allowed |= BIT(FKDA_F64);
    if (tensor->dtype > 0 && tensor->dtype < 32 && (allowed & BIT(tensor->dtype)))
        return FKDA_OK;

    char wanted[64] = "";
    size_t used = 0;
    for (int i = 1; i < 32; i++) {
        if (allowed & BIT(i))
            used += (size_t)snprintf(wanted + used, sizeof wanted - used, "%s%s",
                                     used ? " or " : "", fkda_dtype_name((fkda_dtype)i));
    }
    return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT, "%s: dtype %s (%d), wanted %s",
                     rule->name, fkda_dtype_name((fkda_dtype)tensor->dtype), (int)tensor->dtype,
                     wanted);
}

static fkda_status check_shape(const struct fkda_check *check, const struct rule *rule,
                               const fkda_tensor *tensor)
{
    if (tensor->ndim < rule->min_ndim || tensor->ndim > rule->max_ndim)
        return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT, "%s: %d dimensions, wanted %s",
                         rule->name, (int)tensor->ndim, rule->layout);
    /* Empty dimensions count as 1, so that no product of a part of the sizes overflows later. */
    int64_t bytes = 8;
    for (int i = 0; i < tensor->ndim; i++) {
        int64_t size = tensor->shape[i];
        if (size < 0)
            return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "%s: shape %s, wanted no negative size", rule->name,
                             fkda_format_shape(tensor->ndim, tensor->shape).text);
        if (__builtin_mul_overflow(bytes, size ? size : 1, &bytes))
            return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "%s: shape %s, wanted a product that fits 64 bits", rule->name,
                             fkda_format_shape(tensor->ndim, tensor->shape).text);
    }
    return FKDA_OK;
}

static fkda_status check_strides(const struct fkda_check *check, const struct rule *rule,
                                 const fkda_tensor *tensor)
{
    int64_t dense = 1; /* stride that a contiguous dimension i has */
    /* entries of their own: their number is then bounded by the memory that holds them */
    const int least = rule->dtypes == INDICES ? 1 : 0;
    if (is_empty(tensor))
        return FKDA_OK; /* whatever the strides are */
    for (int i = tensor->ndim - 1; i >= 0; i--) {
        int64_t size = tensor->shape[i], stride = tensor->stride[i];
        if (size <= 1)
            continue; /* never stepped along */
        if (i >= tensor->ndim - rule->dense) {
            if (stride != dense)
                return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                                 "%s: stride %lld of dimension %d, wanted %lld (contiguous%s)",
                                 rule->name, (long long)stride, i, (long long)dense,
                                 rule->dense > 1 ? " [V, K]" : "");
            dense *= size;
        } else if (stride < least) {
            return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "%s: stride %lld of dimension %d, wanted %d or more", rule->name,
                             (long long)stride, i, least);
        }
    }
    return FKDA_OK;
}

/* Bytes from the first to the last element; checked against the address space. */
static fkda_status check_extent(const struct fkda_check *check, const struct rule *rule,
                                const fkda_tensor *tensor, struct fkda_extent *extent)
{
    *extent = (struct fkda_extent){0, 0};
    int64_t elements = is_empty(tensor) ? 0 : 1;
    bool overflow = false;
    for (int i = 0; i < tensor->ndim && elements; i++) {
        int64_t step = 0;
        if (tensor->shape[i] > 1)
            overflow |= __builtin_mul_overflow(tensor->shape[i] - 1, tensor->stride[i], &step);
        overflow |= __builtin_add_overflow(elements, step, &elements);
        if (overflow)
            break;
    }
    size_t item = fkda_dtype_bytes((fkda_dtype)tensor->dtype);
    int64_t bytes = 0;
    uintptr_t end = 0;
    overflow = overflow || __builtin_mul_overflow(elements, (int64_t)item, &bytes);
    overflow = overflow || __builtin_add_overflow((uintptr_t)tensor->data, (uintptr_t)bytes, &end);
    if (overflow)
        return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "%s: shape %s and its strides reach past 64-bit addresses", rule->name,
                         fkda_format_shape(tensor->ndim, tensor->shape).text);
    if (elements == 0 || check->call == FKDA_CALL_WORKSPACE)
        return FKDA_OK;
    if (!tensor->data)
        return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "%s: data is NULL, wanted %s elements", rule->name,
                         fkda_format_shape(tensor->ndim, tensor->shape).text);
    if ((uintptr_t)tensor->data % item)
        return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "%s: data at %p, wanted a multiple of %d bytes", rule->name, tensor->data,
                         (int)item);
    *extent = (struct fkda_extent){(uintptr_t)tensor->data, end};
    return FKDA_OK;
}

fkda_status fkda_check_tensors(struct fkda_check *check)
{
    for (int i = 0; i < FKDA_ARG_COUNT; i++) {
        const struct rule *rule = &rules[i];
        const fkda_tensor *tensor =
            (const fkda_tensor *)(const void *)((const char *)check->args + rule->offset);
        check->tensor[i] = NULL;
        check->extent[i] = (struct fkda_extent){0, 0};
        if (tensor->ndim == 0 && !tensor->data) {
            if (rule->required)
                return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                                 "%s: absent, wanted %s", rule->name, rule->layout);
            continue;
        }
        fkda_status status = check_shape(check, rule, tensor);
        if (status == FKDA_OK)
            status = check_dtype(check, rule, tensor);
        if (status == FKDA_OK)
            status = check_strides(check, rule, tensor);
        if (status == FKDA_OK)
            status = check_extent(check, rule, tensor, &check->extent[i]);
        if (status != FKDA_OK)
            return status;
        check->tensor[i] = tensor;
    }
    return FKDA_OK;
}

/* ---- Overlap --------------------------------------------------------------------------------- */

static bool extents_meet(struct fkda_extent a, struct fkda_extent b)
{
    return a.begin < b.end && b.begin < a.end;
}

/* The very same elements in the same order: a state that is updated in place. */
static bool same_view(const fkda_tensor *a, const fkda_tensor *b)
{
    if (a->data != b->data || a->dtype != b->dtype || a->ndim != b->ndim)
        return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i] || (a->shape[i] > 1 && a->stride[i] != b->stride[i]))
            return false;
    return true;
}

/* Elements of an output must be distinct: from the smallest stride up, each dimension has to step
 * over all that lies below it. */
static fkda_status check_distinct_elements(const struct fkda_check *check, const struct rule *rule,
                                           const fkda_tensor *tensor)
{
    int order[FKDA_MAX_NDIM], count = 0;
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] <= 1)
            continue;
        int at = count++;
        for (; at > 0 && tensor->stride[order[at - 1]] > tensor->stride[i]; at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    int64_t reach = 1;
    for (int i = 0; i < count; i++) {
        int64_t stride = tensor->stride[order[i]];
        if (stride < reach)
            return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "%s: stride %lld of dimension %d makes elements overlap, wanted at "
                             "least %lld",
                             rule->name, (long long)stride, order[i], (long long)reach);
        reach += (tensor->shape[order[i]] - 1) * stride;
    }
    return FKDA_OK;
}

static fkda_status check_workspace(const struct fkda_check *check)
{
    const fkda_args *args = check->args;
    if (!args->workspace)
        return FKDA_OK;
    struct fkda_extent workspace = {.begin = (uintptr_t)args->workspace};
    if (__builtin_add_overflow(workspace.begin, args->workspace_bytes, &workspace.end))
        return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "workspace_bytes: %zu, wanted no more than the address space holds",
                         args->workspace_bytes);
    for (int i = 0; i < FKDA_ARG_COUNT; i++)
        if (extents_meet(workspace, check->extent[i]))
            return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "workspace: shares memory with %s, wanted memory of its own",
                             rules[i].name);
    return FKDA_OK;
}

fkda_status fkda_check_overlap(const struct fkda_check *check)
{
    for (int i = 0; i < FKDA_ARG_COUNT; i++) {
        if (!rules[i].output || check->extent[i].begin == check->extent[i].end)
            continue;
        fkda_status status = check_distinct_elements(check, &rules[i], check->tensor[i]);
        if (status != FKDA_OK)
            return status;
        for (int j = 0; j < FKDA_ARG_COUNT; j++) {
            if (j == i || (rules[j].output && j < i) ||
                !extents_meet(check->extent[i], check->extent[j]))
                continue;
            if (i == FKDA_ARG_FINAL_STATE && j == FKDA_ARG_INITIAL_STATE &&
                same_view(check->tensor[i], check->tensor[j]))
                continue;
            return fkda_fail(check->reason, FKDA_ERROR_INVALID_ARGUMENT,
                             "%s: shares memory with %s, wanted memory of its own%s", rules[i].name,
                             rules[j].name,
                             i == FKDA_ARG_FINAL_STATE && j == FKDA_ARG_INITIAL_STATE
                                 ? " or the very same view"
                                 : "");
        }
    }
    return check_workspace(check);
}
