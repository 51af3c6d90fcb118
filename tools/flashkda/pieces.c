/* pieces.c: cuts a call along the tokens.
 *
 * final_state first takes the initial state and is then both the initial and the final state of
 * every piece. With cu_seqlens a piece is a range of packed rows: it ends at a multiple of 16 of
 * the sequence it ends in, and gets offsets of its own for the sequences it touches.
 */
#include "pieces.h"

#include <stdbool.h>
#include <stdlib.h>

#include "reason.h"

static char *element(const fkda_tensor *tensor, int64_t index)
{
    return (char *)tensor->data + index * (int64_t)fkda_dtype_bytes((fkda_dtype)tensor->dtype);
}

/* tensor[..., begin:end, ...] along dimension d. */
static fkda_tensor slice(const fkda_tensor *tensor, int d, int64_t begin, int64_t end)
{
    fkda_tensor view = *tensor;
    if (view.data)
        view.data = element(tensor, begin * view.stride[d]);
    view.shape[d] = end - begin;
    return view;
}

static void slice_tokens(fkda_args *args, int64_t begin, int64_t end)
{
    args->q = slice(&args->q, 1, begin, end);
    args->k = slice(&args->k, 1, begin, end);
    args->v = slice(&args->v, 1, begin, end);
    args->g = slice(&args->g, 1, begin, end);
    args->beta = slice(&args->beta, 1, begin, end);
    args->out = slice(&args->out, 1, begin, end);
}

fkda_args fkda_slice_head(const fkda_args *whole, int64_t h)
{
    fkda_args args = *whole;
    int64_t group = args.q.shape[2] ? args.v.shape[2] / args.q.shape[2] : 0;
    int64_t first = h * group, last = first + group;
    args.q = slice(&args.q, 2, h, h + 1);
    args.k = slice(&args.k, 2, h, h + 1);
    args.v = slice(&args.v, 2, first, last);
    args.g = slice(&args.g, 2, first, last);
    args.beta = slice(&args.beta, 2, first, last);
    args.out = slice(&args.out, 2, first, last);
    if (args.A_log.ndim)
        args.A_log = slice(&args.A_log, 0, first, last);
    if (args.dt_bias.ndim == 2)
        args.dt_bias = slice(&args.dt_bias, 0, first, last);
    else if (args.dt_bias.ndim == 1)
        args.dt_bias = slice(&args.dt_bias, 0, first * args.k.shape[3], last * args.k.shape[3]);
    if (args.initial_state.ndim)
        args.initial_state = slice(&args.initial_state, 1, first, last);
    if (args.final_state.ndim)
        args.final_state = slice(&args.final_state, 1, first, last);
    return args;
}

void fkda_warm_up(const fkda_args *whole)
{
    fkda_args args = *whole;
    if (args.q.shape[0] == 0 || args.q.shape[1] == 0)
        return;
    fkda_tensor *rows[] = {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.out};
    int64_t end = args.q.shape[1] < FKDA_CHUNK_TOKENS ? args.q.shape[1] : FKDA_CHUNK_TOKENS;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = slice(rows[i], 0, 0, 1);
    slice_tokens(&args, 0, end);
    args.cu_seqlens = args.initial_state = args.final_state = (fkda_tensor){.data = NULL};
    args.report = NULL;
    int64_t elements = end * args.v.shape[2] * args.v.shape[3];
    void *out = calloc((size_t)elements + 1, fkda_dtype_bytes((fkda_dtype)args.out.dtype));
    args.out = fkda_tensor_contiguous(out, (fkda_dtype)args.out.dtype, 4, args.out.shape);
    if (out)
        (void)fkda_forward(&args, NULL, 0); /* what is wrong the call that counts will say */
    free(out);
}

static int64_t offset_at(const fkda_tensor *offsets, int64_t n)
{
    const char *data = element(offsets, n * offsets->stride[0]);
    return offsets->dtype == FKDA_I32 ? *(const int32_t *)data : *(const int64_t *)data;
}

/* What the library will check too; the walk below must not rely on unchecked numbers. */
static bool offsets_are_valid(const fkda_args *args)
{
    const fkda_tensor *cu = &args->cu_seqlens;
    if (cu->ndim != 1 || cu->shape[0] < 1 || (cu->dtype != FKDA_I32 && cu->dtype != FKDA_I64) ||
        args->q.ndim != 4 || args->q.shape[0] != 1 || offset_at(cu, 0) != 0)
        return false;
    for (int64_t n = 1; n < cu->shape[0]; n++) {
        if (offset_at(cu, n) < offset_at(cu, n - 1))
            return false;
    }
    return offset_at(cu, cu->shape[0] - 1) <= args->q.shape[1];
}

static fkda_status call_dense(fkda_call_function *call, const fkda_args *whole,
                              const struct piece_options *options, char *reason,
                              size_t reason_bytes)
{
    fkda_status status = FKDA_OK;
    int64_t T = whole->q.shape[1];
    for (int64_t begin = 0; begin < T && !status; begin += options->tokens) {
        int64_t end = T - begin > options->tokens ? begin + options->tokens : T;
        fkda_args args = *whole;
        slice_tokens(&args, begin, end);
        status = call(&args, reason, reason_bytes);
        if (!status && options->advance)
            options->advance(options->context, (end - begin) * args.q.shape[0]);
    }
    return status;
}

/* `offsets` has room for N + 1. */
static fkda_status call_packed(fkda_call_function *call, const fkda_args *whole, int64_t *offsets,
                               const struct piece_options *options, char *reason,
                               size_t reason_bytes)
{
    const fkda_tensor *cu = &whole->cu_seqlens;
    int64_t N = cu->shape[0] - 1, total = offset_at(cu, N), n = 0;
    fkda_status status = FKDA_OK;
    for (int64_t begin = 0, end; begin < total && !status; begin = end) {
        while (offset_at(cu, n + 1) <= begin)
            n++;
        int64_t last = n; /* the sequence that the piece ends in */
        end = total - begin > options->tokens ? begin + options->tokens : total;
        while (offset_at(cu, last + 1) < end)
            last++;
        if (end < offset_at(cu, last + 1)) /* cut inside it: back to a multiple of 16 */
            end -= (end - offset_at(cu, last)) % FKDA_CHUNK_TOKENS;
        if (end == offset_at(cu, last) && last > n)
            last--;
        offsets[0] = 0;
        for (int64_t i = n; i <= last; i++) {
            int64_t stop = offset_at(cu, i + 1);
            offsets[i - n + 1] = (stop < end ? stop : end) - begin;
        }
        const int64_t count = last - n + 2;
        fkda_args args = *whole;
        slice_tokens(&args, begin, end);
        args.cu_seqlens = fkda_tensor_contiguous(offsets, FKDA_I64, 1, &count);
        args.initial_state = slice(&args.initial_state, 0, n, last + 1);
        args.final_state = slice(&args.final_state, 0, n, last + 1);
        status = call(&args, reason, reason_bytes);
        if (!status && options->advance)
            options->advance(options->context, end - begin);
    }
    return status;
}

fkda_status fkda_call_in_pieces(fkda_call_function *call, const fkda_args *args,
                                const struct piece_options *options, char *reason,
                                size_t reason_bytes)
{
    bool packed = args->cu_seqlens.ndim != 0, whole = options->tokens == 0;
    /* What is not worth cutting, and what the library must refuse in its own words. */
    if (args->q.ndim != 4 || args->final_state.ndim != 4 || args->q.shape[1] <= options->tokens ||
        (packed && !offsets_are_valid(args)))
        whole = true;
    if (whole) {
        fkda_status status = call(args, reason, reason_bytes);
        if (!status && options->advance)
            options->advance(options->context, args->q.shape[0] * args->q.shape[1]);
        return status;
    }
    /* A call without tokens: final_state becomes the initial state, or 0. */
    fkda_args empty = *args;
    int64_t *offsets = NULL;
    if (packed) {
        offsets = calloc((size_t)args->cu_seqlens.shape[0], sizeof *offsets);
        if (!offsets)
            return (fkda_status)fail((struct reason){reason, reason_bytes},
                                     FKDA_ERROR_OUT_OF_MEMORY,
                                     "no memory for the offsets of a piece");
        empty.cu_seqlens = fkda_tensor_contiguous(offsets, FKDA_I64, 1, args->cu_seqlens.shape);
    }
    slice_tokens(&empty, 0, 0);
    fkda_status status = call(&empty, reason, reason_bytes);
    if (!status) {
        fkda_args in_place = *args;
        in_place.initial_state = in_place.final_state;
        status = packed ? call_packed(call, &in_place, offsets, options, reason, reason_bytes)
                        : call_dense(call, &in_place, options, reason, reason_bytes);
    }
    free(offsets);
    return status;
}
