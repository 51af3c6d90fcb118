/* recipe.c: see recipe.h. */
#include "recipe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BACKED_BYTES ((__int128)1 << 16)

/* ---- Bytes of the input, then zeros ---------------------------------------------------------- */

UNOBSERVED uint8_t fuzz_take(struct source *s)
{
    if (s->size == 0)
        return 0;
    s->size--;
    return *s->data++;
}

UNOBSERVED static int64_t below(struct source *s, int64_t count)
{
    return fuzz_take(s) % count;
}

/* Mostly values near the edges of some rule. */
UNOBSERVED static int64_t take_any(struct source *s)
{
    static const int64_t edges[] = {
        0,         1,         -1,        2,         3,        15,       16,       17,
        32,        48,        64,        128,       255,      256,      257,      272,
        INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, 1L << 32, 1L << 62, 1L << 60, INT64_MAX / 2};
    uint8_t kind = fuzz_take(s);
    if (kind < 192)
        return edges[kind % (sizeof edges / sizeof edges[0])];
    if (kind < 240)
        return (int8_t)fuzz_take(s);
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value = value << 8 | fuzz_take(s);
    return (int64_t)value;
}

UNOBSERVED static double take_double(struct source *s)
{
    static const double edges[] = {1, 0.125, 0, -0.0, -1, -5, -5.0000001, -2.5, 1e-300, 1e300, 4};
    uint8_t kind = fuzz_take(s);
    if (kind >= 250)
        return kind % 2 ? (double)NAN : (double)INFINITY;
    return edges[kind % (sizeof edges / sizeof edges[0])];
}

/* ---- A valid call ---------------------------------------------------------------------------- */

static const size_t offsets[FKDA_ARG_COUNT] = {
    [FKDA_ARG_Q] = offsetof(fkda_args, q),
    [FKDA_ARG_K] = offsetof(fkda_args, k),
    [FKDA_ARG_V] = offsetof(fkda_args, v),
    [FKDA_ARG_G] = offsetof(fkda_args, g),
    [FKDA_ARG_BETA] = offsetof(fkda_args, beta),
    [FKDA_ARG_A_LOG] = offsetof(fkda_args, A_log),
    [FKDA_ARG_DT_BIAS] = offsetof(fkda_args, dt_bias),
    [FKDA_ARG_CU_SEQLENS] = offsetof(fkda_args, cu_seqlens),
    [FKDA_ARG_OUT] = offsetof(fkda_args, out),
    [FKDA_ARG_INITIAL_STATE] = offsetof(fkda_args, initial_state),
    [FKDA_ARG_FINAL_STATE] = offsetof(fkda_args, final_state),
    [FKDA_ARG_STATE_INDICES] = offsetof(fkda_args, state_indices),
    [FKDA_ARG_NUM_ACCEPTED_TOKENS] = offsetof(fkda_args, num_accepted_tokens),
    [FKDA_ARG_CHECKPOINT_STATE] = offsetof(fkda_args, checkpoint_state),
    [FKDA_ARG_CHECKPOINT_OFFSETS] = offsetof(fkda_args, checkpoint_offsets),
    [FKDA_ARG_CHECKPOINT_INDPTR] = offsetof(fkda_args, checkpoint_indptr),
};

static fkda_tensor *tensor_of(struct trial *t, int which)
{
    return (fkda_tensor *)(void *)((char *)&t->args + offsets[which]);
}

static fkda_tensor shaped(struct source *s, fkda_dtype a, fkda_dtype b, int ndim, int64_t d0,
                          int64_t d1, int64_t d2, int64_t d3)
{
    const int64_t shape[] = {d0, d1, d2, d3};
    return fkda_tensor_contiguous(NULL, fuzz_take(s) % 2 ? b : a, ndim, shape);
}

static void describe_valid(struct trial *t, struct source *s)
{
    static const int64_t sizes[] = {16, 32, 48, 64, 80, 96};
    fkda_args *a = &t->args;
    t->call = (enum fkda_call)below(s, 4);
    bool decode = t->call == FKDA_CALL_DECODE, varlen = fuzz_take(s) % 2;
    t->B = varlen ? 1 : below(s, 4);
    t->T = decode && !varlen ? 1 + below(s, 16) : below(s, 40);
    t->H = 1 + below(s, 2);
    t->HV = t->H * (1 + below(s, 2));
    t->K = sizes[fuzz_take(s) % 16 < 12 ? 0 : below(s, 6)];
    t->V = sizes[fuzz_take(s) % 16 < 12 ? 0 : below(s, 6)];
    t->N = varlen ? below(s, 5) : t->B;
    bool pool = fuzz_take(s) % 2, drafts = decode && pool && fuzz_take(s) % 2;
    if (drafts && !varlen)
        t->T = 1 + t->T % 4; /* so that a small pool has a slot for each token */
    t->S = pool ? 1 + below(s, drafts ? 24 : 8) : t->N;
    t->M = t->N * below(s, 3);
    fkda_args_init(a);
    a->flags = fuzz_take(s) % 8;
    a->gate = (int32_t)below(s, 3);
    a->scale = fuzz_take(s) % 8 ? 0.25 : take_double(s);
    a->lower_bound = fuzz_take(s) % 2 ? -5 : take_double(s);
    a->isa = fuzz_take(s) % 2 ? FKDA_ISA_AUTO : (int32_t)below(s, FKDA_ISA_COUNT);
    a->precision = fuzz_take(s) % 4 ? 0 : (int32_t)below(s, 3);
    a->num_threads = fuzz_take(s) % 64 ? 1 : 2;
    a->q = shaped(s, FKDA_BF16, FKDA_F32, 4, t->B, t->T, t->H, t->K);
    a->k = shaped(s, FKDA_BF16, FKDA_F32, 4, t->B, t->T, t->H, t->K);
    a->v = shaped(s, FKDA_BF16, FKDA_F32, 4, t->B, t->T, t->HV, t->V);
    a->g = shaped(s, FKDA_BF16, FKDA_F32, 4, t->B, t->T, t->HV, t->K);
    a->beta = shaped(s, FKDA_BF16, FKDA_F32, 3, t->B, t->T, t->HV, 0);
    a->out = shaped(s, FKDA_BF16, FKDA_F32, 4, t->B, t->T, t->HV, t->V);
    if (a->gate != FKDA_GATE_ACTIVATED && fuzz_take(s) % 2) {
        a->A_log = shaped(s, FKDA_F32, FKDA_F32, 1, t->HV, 0, 0, 0);
        a->dt_bias = fuzz_take(s) % 2 ? shaped(s, FKDA_F32, FKDA_F32, 2, t->HV, t->K, 0, 0)
                                      : shaped(s, FKDA_F32, FKDA_F32, 1, t->HV * t->K, 0, 0, 0);
    }
    if (varlen)
        a->cu_seqlens = shaped(s, FKDA_I32, FKDA_I64, 1, t->N + 1, 0, 0, 0);
    if (!decode && fuzz_take(s) % 2)
        a->initial_state = shaped(s, FKDA_BF16, FKDA_F32, 4, t->S, t->HV, t->V, t->K);
    if (decode || fuzz_take(s) % 2)
        a->final_state = shaped(s, FKDA_BF16, FKDA_F32, 4, t->S, t->HV, t->V, t->K);
    if (pool)
        a->state_indices = shaped(s, FKDA_I32, FKDA_I64, drafts ? 2 : 1, t->N,
                                  varlen ? 1 + below(s, 6) : t->T, 0, 0);
    if (drafts)
        a->num_accepted_tokens = shaped(s, FKDA_I32, FKDA_I64, 1, t->N, 0, 0, 0);
    if (!decode && fuzz_take(s) % 4 == 0) {
        a->checkpoint_state = shaped(s, FKDA_BF16, FKDA_F32, 4, t->M, t->HV, t->V, t->K);
        a->checkpoint_offsets = shaped(s, FKDA_I32, FKDA_I64, 1, t->M, 0, 0, 0);
        if (fuzz_take(s) % 2)
            a->checkpoint_indptr = shaped(s, FKDA_I32, FKDA_I64, 1, t->N + 1, 0, 0, 0);
    }
}

/* ---- Overwriting fields ---------------------------------------------------------------------- */

static void overwrite_option(fkda_args *a, struct source *s)
{
    switch (below(s, 10)) {
    case 0:
        a->version = (uint32_t)take_any(s);
        break;
    case 1:
        a->flags = (uint32_t)take_any(s);
        break;
    case 2:
        a->gate = (int32_t)take_any(s);
        break;
    case 3:
        a->device = (int32_t)take_any(s);
        break;
    case 4:
        a->scale = take_double(s);
        break;
    case 5:
        a->lower_bound = take_double(s);
        break;
    case 6:
        a->num_threads = (int32_t)take_any(s);
        break;
    case 7:
        a->isa = (int32_t)take_any(s);
        break;
    case 8:
        a->precision = (int32_t)take_any(s);
        break;
    default:
        a->workspace_bytes = (size_t)take_any(s);
        break;
    }
}

static void overwrite_tensor(struct trial *t, struct source *s)
{
    fkda_tensor *tensor = tensor_of(t, (int)below(s, FKDA_ARG_COUNT));
    int dimension = (int)below(s, FKDA_MAX_NDIM);
    switch (below(s, 8)) {
    case 0:
        tensor->dtype = (int32_t)take_any(s);
        break;
    case 1:
        tensor->ndim = (int32_t)take_any(s);
        break;
    case 2:
        tensor->shape[dimension] = take_any(s);
        break;
    case 3:
        tensor->stride[dimension] = take_any(s);
        break;
    case 4: /* padded rows: valid for all but the states' images */
        if (tensor->ndim >= 2 && tensor->ndim <= FKDA_MAX_NDIM)
            for (int i = 0; i < tensor->ndim - 1 && i < 2; i++)
                tensor->stride[i] = (int64_t)((uint64_t)tensor->stride[i] * 2);
        break;
    case 5: /* a broadcast */
        tensor->stride[dimension] = 0;
        break;
    case 6:
        *tensor = (fkda_tensor){.data = NULL};
        break;
    default: /* the same shape as another tensor */
        *tensor = *tensor_of(t, (int)below(s, FKDA_ARG_COUNT));
        break;
    }
}

/* ---- Memory ---------------------------------------------------------------------------------- */

/* Bytes that the tensor reaches, or -1 where that makes no sense. Written apart from validation. */
UNOBSERVED static __int128 reach_bytes(const fkda_tensor *tensor)
{
    if (tensor->ndim < 1 || tensor->ndim > FKDA_MAX_NDIM || tensor->dtype < FKDA_BF16 ||
        tensor->dtype > FKDA_F16)
        return -1;
    __int128 last = 0;
    bool empty = false;
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] < 0)
            return -1;
        empty |= tensor->shape[i] == 0;
        if (tensor->shape[i] > 1) {
            if (tensor->stride[i] < 0)
                return -1;
            last += (__int128)(tensor->shape[i] - 1) * tensor->stride[i];
            if (last > (__int128)1 << 90)
                return last; /* far too much already */
        }
    }
    return empty ? 0 : (last + 1) * (__int128)fkda_dtype_bytes((fkda_dtype)tensor->dtype);
}

static bool is_index(const fkda_tensor *tensor)
{
    return tensor->dtype == FKDA_I32 || tensor->dtype == FKDA_I64;
}

UNOBSERVED static void fill_index(struct trial *t, int which, fkda_tensor *tensor, size_t bytes,
                                  struct source *s)
{
    size_t item = fkda_dtype_bytes((fkda_dtype)tensor->dtype);
    bool ascending = which == FKDA_ARG_CU_SEQLENS || which == FKDA_ARG_CHECKPOINT_INDPTR;
    int64_t top = which == FKDA_ARG_CU_SEQLENS ? t->T : t->M, value = 0;
    bool wild = fuzz_take(s) % 8 == 0;
    for (size_t i = 0; i < bytes / item; i++) {
        if (wild)
            value = take_any(s);
        else if (ascending) {
            int64_t step = i == 0 ? 0 : below(s, t->call == FKDA_CALL_DECODE ? 7 : 33);
            value = value + step > top ? top : value + step;
        } else if (which == FKDA_ARG_STATE_INDICES)
            value = fuzz_take(s) % 8 ? (int64_t)i % (t->S ? t->S : 1) : below(s, t->S + 1) - 1;
        else if (which == FKDA_ARG_NUM_ACCEPTED_TOKENS)
            value = fuzz_take(s) % 4 ? 1 : below(s, 18);
        else
            value = 16 * (below(s, 4) - 1) + (fuzz_take(s) % 16 ? 0 : 1);
        if (which == FKDA_ARG_CHECKPOINT_OFFSETS && !wild && value == -16)
            value = -1;
        if (item == 4)
            ((int32_t *)tensor->data)[i] = (int32_t)value;
        else if (item == 8)
            ((int64_t *)tensor->data)[i] = value;
    }
}

/* Small numbers of either float dtype from a fixed pattern, then a few special ones. */
UNOBSERVED static void fill_float(fkda_tensor *tensor, size_t bytes, struct source *s)
{
    static const float values[] = {0, 0.5f,  -0.5f, 1,   -1,    3,      -3,
                                   8, -8.0f, 50,    -50, 1e30f, -1e30f, 1e-30f};
    static uint16_t pattern[1024];
    if (!pattern[1]) {
        uint32_t seed = 1;
        for (size_t i = 0; i < 1024; i++) {
            seed = seed * 1103515245u + 12345u;
            pattern[i] = (uint16_t)(0x3e00 + (seed >> 16 & 0x81ff)); /* 2^-3 to 2^0, either sign */
        }
    }
    for (size_t i = 0; i < bytes; i += sizeof pattern)
        memcpy((char *)tensor->data + i, pattern,
               bytes - i < sizeof pattern ? bytes - i : sizeof pattern);
    size_t special = fuzz_take(s), first = fuzz_take(s);
    for (size_t i = first; i < bytes / 4 && special < 64; i += 101) {
        float value = special == 63 ? NAN : special == 62 ? INFINITY : values[(special + i) % 14];
        memcpy((float *)tensor->data + i, &value, sizeof value);
    }
}

UNOBSERVED static void back_tensor(struct trial *t, int which, struct source *s, bool floats)
{
    fkda_tensor *tensor = tensor_of(t, which);
    if (tensor->ndim == 0)
        return;
    __int128 bytes = reach_bytes(tensor);
    bool index = is_index(tensor);
    if (bytes < 0 || bytes > (index ? MAX_BACKED_BYTES / 64 : MAX_BACKED_BYTES) ||
        !(index || floats)) {
        /* Validation reads indices, but nothing of the others: aligned, apart, never touched. */
        tensor->data = index ? NULL : (void *)(((uintptr_t)which + 1) << 40);
        t->backed = false;
        return;
    }
    size_t count = (size_t)bytes;
    t->owned[which] = malloc(count ? count : 1);
    fuzz_require(t->owned[which] != NULL, "out of memory");
    tensor->data = t->owned[which];
    if (index)
        fill_index(t, which, tensor, count, s);
    else
        fill_float(tensor, count, s);
}

/* Some tensors end up on another's memory, at NULL, or one byte off. */
UNOBSERVED static void spoil_pointers(struct trial *t, struct source *s)
{
    for (int left = (int)(fuzz_take(s) % 8) - 5; left > 0; left--) {
        fkda_tensor *tensor = tensor_of(t, (int)below(s, FKDA_ARG_COUNT));
        int other = (int)below(s, FKDA_ARG_COUNT);
        switch (below(s, 4)) {
        case 0:
            tensor->data = NULL;
            break;
        case 1:
            if (tensor->data && (uintptr_t)tensor->data % 2 == 0) { /* twice is aligned again */
                tensor->data = (char *)tensor->data + 1;
                t->backed = t->backed && fkda_dtype_bytes((fkda_dtype)tensor->dtype) > 1;
            }
            break;
        default: /* only where the other's memory is large enough, and real if it is read */
            if (tensor->ndim && reach_bytes(tensor) >= 0 &&
                reach_bytes(tensor) <= reach_bytes(tensor_of(t, other)) &&
                (t->owned[other] ? tensor_of(t, other)->data == t->owned[other]
                                 : !is_index(tensor)))
                tensor->data = tensor_of(t, other)->data;
            break;
        }
    }
    if (fuzz_take(s) % 16 == 0)
        *tensor_of(t, FKDA_ARG_INITIAL_STATE) = *tensor_of(t, FKDA_ARG_FINAL_STATE);
}

/* ---- The trial ------------------------------------------------------------------------------- */

void fuzz_make_trial(struct trial *t, struct source *s, bool floats)
{
    memset(t, 0, sizeof *t);
    t->backed = true;
    describe_valid(t, s);
    for (int left = (int)(fuzz_take(s) % 24) - 12; left > 0; left--) {
        if (fuzz_take(s) % 4 == 0)
            overwrite_option(&t->args, s);
        else
            overwrite_tensor(t, s);
    }
    if (t->args.num_threads > 4 && t->args.num_threads <= FKDA_MAX_THREADS)
        t->args.num_threads = 4; /* starting hundreds of threads would only be slow */
    for (int i = 0; i < FKDA_ARG_COUNT; i++)
        back_tensor(t, i, s, floats);
    spoil_pointers(t, s);
}

void fuzz_free_trial(struct trial *t)
{
    for (int i = 0; i < FKDA_ARG_COUNT; i++)
        free(t->owned[i]);
}

void fuzz_require(bool condition, const char *what)
{
    if (condition)
        return;
    fprintf(stderr, "broken: %s\n", what);
    abort();
}

UNOBSERVED void fuzz_require_reason(const char *reason)
{
    static const char *const options[] = {
        "version",     "flags", "gate",      "device",    "scale",           "lower_bound",
        "num_threads", "isa",   "precision", "workspace", "workspace_bytes", "no memory"};
    size_t length = strcspn(reason, ":[");
    bool known = strncmp(reason, "no memory", 9) == 0;
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++)
        known |= strlen(options[i]) == length && strncmp(reason, options[i], length) == 0;
    for (int i = 0; i < FKDA_ARG_COUNT; i++) {
        const char *name = fkda_argument_name((enum fkda_argument)i);
        known |= strlen(name) == length && strncmp(reason, name, length) == 0;
    }
    fuzz_require(known, reason);
    fuzz_require(strlen(reason) < FKDA_REASON_BYTES - 1, "the reason was cut short");
}
