/* problem.c: see problem.h. */
#include "problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/bf16.h"

double problem_uniform(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(*seed >> 11) / 4503599627370496.0 - 1.0;
}

static void *add_buffer(struct problem *p, size_t bytes, bool output)
{
    assert_true(p->num_buffers < PROBLEM_MAX_BUFFERS);
    void *data = malloc(bytes ? bytes : 1); /* exact: a sanitizer sees one byte too many */
    assert_non_null(data);
    memset(data, output ? 0xff : 0, bytes);
    p->buffers[p->num_buffers++] = (struct problem_buffer){data, bytes, output};
    return data;
}

void *problem_input(struct problem *p, size_t bytes)
{
    return add_buffer(p, bytes, false);
}

void *problem_output(struct problem *p, size_t bytes)
{
    return add_buffer(p, bytes, true);
}

int64_t problem_elements(const fkda_tensor *tensor)
{
    int64_t count = 1;
    for (int i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    return count;
}

double problem_get(const fkda_tensor *tensor, int64_t i)
{
    switch (tensor->dtype) {
    case FKDA_BF16:
        return (double)fkda_bf16_to_float(((const uint16_t *)tensor->data)[i]);
    case FKDA_F32:
        return (double)((const float *)tensor->data)[i];
    default:
        return ((const double *)tensor->data)[i];
    }
}

void problem_set(const fkda_tensor *tensor, int64_t i, double value)
{
    switch (tensor->dtype) {
    case FKDA_BF16:
        ((uint16_t *)tensor->data)[i] = fkda_bf16_from_double(value);
        break;
    case FKDA_F32:
        ((float *)tensor->data)[i] = (float)value;
        break;
    default:
        ((double *)tensor->data)[i] = value;
        break;
    }
}

static fkda_tensor contiguous(struct problem *p, fkda_dtype dtype, int ndim, const int64_t *shape,
                              bool output)
{
    fkda_tensor tensor = fkda_tensor_contiguous(NULL, dtype, ndim, shape);
    tensor.data =
        add_buffer(p, (size_t)problem_elements(&tensor) * fkda_dtype_bytes(dtype), output);
    return tensor;
}

fkda_tensor problem_random(struct problem *p, fkda_dtype dtype, int ndim, const int64_t *shape)
{
    fkda_tensor tensor = contiguous(p, dtype, ndim, shape, false);
    uint64_t seed = 17 + (uint64_t)p->num_buffers;
    for (int64_t i = 0; i < problem_elements(&tensor); i++)
        problem_set(&tensor, i, problem_uniform(&seed));
    return tensor;
}

fkda_tensor problem_poisoned(struct problem *p, fkda_dtype dtype, int ndim, const int64_t *shape)
{
    return contiguous(p, dtype, ndim, shape, true);
}

fkda_tensor problem_indices(struct problem *p, fkda_dtype dtype, int64_t count,
                            const int64_t *values)
{
    fkda_tensor tensor = contiguous(p, dtype, 1, &count, false);
    for (int64_t i = 0; i < count; i++) {
        if (dtype == FKDA_I32)
            ((int32_t *)tensor.data)[i] = (int32_t)values[i];
        else
            ((int64_t *)tensor.data)[i] = values[i];
    }
    return tensor;
}

void problem_init(struct problem *p, struct problem_sizes sizes)
{
    memset(p, 0, sizeof *p);
    p->B = sizes.B ? sizes.B : 1;
    p->T = sizes.T;
    p->H = sizes.H ? sizes.H : 1;
    p->HV = sizes.HV ? sizes.HV : p->H;
    p->K = sizes.K ? sizes.K : 16;
    p->V = sizes.V ? sizes.V : 16;
    p->N = sizes.N ? sizes.N : p->B;
    const int64_t key[] = {p->B, p->T, p->H, p->K}, value[] = {p->B, p->T, p->HV, p->V};
    const int64_t gate[] = {p->B, p->T, p->HV, p->K}, state[] = {p->N, p->HV, p->V, p->K};
    fkda_args_init(&p->args);
    p->args.scale = 1.0 / sqrt((double)p->K);
    p->args.num_threads = 1; /* hundreds of calls of microseconds each */
    p->args.q = problem_random(p, FKDA_F32, 4, key);
    p->args.k = problem_random(p, FKDA_F32, 4, key);
    p->args.v = problem_random(p, FKDA_F32, 4, value);
    p->args.g = problem_random(p, FKDA_F32, 4, gate);
    p->args.beta = problem_random(p, FKDA_F32, 3, gate);
    p->args.A_log = problem_random(p, FKDA_F32, 1, gate + 2);
    p->args.dt_bias = problem_random(p, FKDA_F32, 2, gate + 2);
    p->args.initial_state = problem_random(p, FKDA_F32, 4, state);
    p->args.out = problem_poisoned(p, FKDA_F32, 4, value);
    p->args.final_state = problem_poisoned(p, FKDA_F32, 4, state);
}

void problem_free(struct problem *p)
{
    for (int i = 0; i < p->num_buffers; i++)
        free(p->buffers[i].data);
    p->num_buffers = 0;
}

void problem_poison(struct problem *p)
{
    for (int i = 0; i < p->num_buffers; i++)
        if (p->buffers[i].output)
            memset(p->buffers[i].data, 0xff, p->buffers[i].bytes);
}

void problem_assert_untouched(const struct problem *p)
{
    for (int i = 0; i < p->num_buffers; i++)
        for (size_t j = 0; j < p->buffers[i].bytes && p->buffers[i].output; j++)
            assert_int_equal(((const unsigned char *)p->buffers[i].data)[j], 0xff);
}

uint64_t problem_hash_inputs(const struct problem *p)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (int i = 0; i < p->num_buffers; i++)
        for (size_t j = 0; j < p->buffers[i].bytes && !p->buffers[i].output; j++)
            hash = (hash ^ ((const unsigned char *)p->buffers[i].data)[j]) * 1099511628211u;
    return hash;
}

void problem_run(struct problem *p, problem_call call)
{
    uint64_t before = problem_hash_inputs(p);
    fkda_status status = call(&p->args, p->reason, sizeof p->reason);
    if (status != FKDA_OK)
        fail_msg("%s: %s", fkda_status_name(status), p->reason);
    assert_string_equal(p->reason, "");
    assert_true(problem_hash_inputs(p) == before);
}

void problem_refused(struct problem *p, problem_call call, fkda_status status, const char *reason)
{
    problem_poison(p);
    uint64_t before = problem_hash_inputs(p);
    fkda_report report;
    memset(&report, 0xff, sizeof report);
    p->args.report = &report;
    memset(p->reason, 'x', sizeof p->reason);
    fkda_status got = call(&p->args, p->reason, sizeof p->reason);
    p->args.report = NULL;
    if (got != status || strncmp(p->reason, reason, strlen(reason)) != 0)
        fail_msg("%s: '%.255s', wanted %s: '%s...'", fkda_status_name(got), p->reason,
                 fkda_status_name(status), reason);
    assert_true(strlen(p->reason) + 1 < sizeof p->reason); /* room left: nothing was cut off */
    if (status == FKDA_ERROR_WORKSPACE) {
        size_t bytes = 0; /* the one thing that is reported then */
        assert_int_equal(fkda_workspace_bytes(&p->args, &bytes, NULL, 0), FKDA_OK);
        assert_int_equal(report.workspace_bytes, bytes);
        memset(&report.workspace_bytes, 0xff, sizeof report.workspace_bytes);
    }
    for (size_t i = 0; i < sizeof report; i++)
        assert_int_equal(((const unsigned char *)&report)[i], 0xff);
    problem_assert_untouched(p);
    assert_true(problem_hash_inputs(p) == before);
}
