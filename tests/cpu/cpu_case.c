/* cpu_case.c: see cpu_case.h. */
#include "cpu_case.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/bf16.h"

#define TWO_PI 6.283185307179586476925

uint64_t cpu_random(uint64_t *seed)
{
    uint64_t z = (*seed += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static double uniform(uint64_t *seed)
{
    return ((double)(cpu_random(seed) >> 11) + 0.5) / 9007199254740992.0;
}

double cpu_normal(uint64_t *seed)
{
    double radius = sqrt(-2 * log(uniform(seed)));
    return radius * cos(TWO_PI * uniform(seed));
}

void *cpu_case_alloc(struct cpu_case *c, size_t bytes)
{
    void *p = aligned_alloc(64, (bytes / 64 + 1) * 64);
    assert(p && c->num_buffers < (int)(sizeof c->buffers / sizeof c->buffers[0]));
    c->buffers[c->num_buffers++] = p;
    return p;
}

static void store(void *data, fkda_dtype dtype, size_t i, double x)
{
    if (dtype == FKDA_BF16)
        ((uint16_t *)data)[i] = fkda_bf16_from_double(x);
    else
        ((float *)data)[i] = (float)x;
}

static fkda_tensor normal_tensor(struct cpu_case *c, fkda_dtype dtype, int ndim,
                                 const int64_t *shape, double mean, double deviation,
                                 uint64_t *seed)
{
    size_t count = 1;
    for (int i = 0; i < ndim; i++)
        count *= (size_t)shape[i];
    void *data = cpu_case_alloc(c, count * fkda_dtype_bytes(dtype));
    for (size_t i = 0; i < count; i++)
        store(data, dtype, i, mean + deviation * cpu_normal(seed));
    return fkda_tensor_contiguous(data, dtype, ndim, shape);
}

static int64_t given(int64_t value, int64_t otherwise)
{
    return value ? value : otherwise;
}

static fkda_dtype dtype_or(fkda_dtype value, fkda_dtype otherwise)
{
    return value != FKDA_DTYPE_INVALID ? value : otherwise;
}

static void set_defaults(struct cpu_shape *s)
{
    s->B = given(s->B, 1);
    s->H = given(s->H, 1);
    s->HV = given(s->HV, s->H);
    s->K = given(s->K, 128);
    s->V = given(s->V, 128);
    s->q = dtype_or(s->q, FKDA_BF16);
    s->k = dtype_or(s->k, FKDA_BF16);
    s->v = dtype_or(s->v, FKDA_BF16);
    s->g = dtype_or(s->g, FKDA_BF16);
    s->beta = dtype_or(s->beta, FKDA_BF16);
    s->out = dtype_or(s->out, FKDA_BF16);
    s->initial = dtype_or(s->initial, FKDA_F32);
    s->final = dtype_or(s->final, FKDA_F32);
    if (!s->flags)
        s->flags = FKDA_FLAGS_DEFAULT;
}

/* Mean and deviation of g and beta, and the spread of A_log and dt_bias, by regime. */
static void regime_inputs(struct cpu_case *c, uint64_t *seed)
{
    static const struct {
        double g_mean, g_deviation, beta_mean, beta_deviation, head_mean, head_deviation;
    } table[] = {[CPU_RANDOM] = {0, 1, 0, 1, 0.5, 0.29},
                 [CPU_SLOW] = {-8.5, 0.5, 0, 1, 0, 0},
                 [CPU_NO_DECAY] = {-20, 0, -4, 0, 0, 0},
                 [CPU_SATURATED] = {8, 2, 0, 1, 0.5, 0.29}};
    const struct cpu_shape *s = &c->shape;
    const int64_t g_shape[] = {s->B, s->T, s->HV, s->K}, beta_shape[] = {s->B, s->T, s->HV};
    const int64_t bias_shape[] = {s->HV, s->K};
    double g_mean = table[s->regime].g_mean, g_deviation = table[s->regime].g_deviation;
    double beta_mean = table[s->regime].beta_mean;
    if (s->gate == FKDA_GATE_ACTIVATED) {
        g_mean = s->regime == CPU_SLOW ? -1e-3 : -2;
        g_deviation = s->regime == CPU_SLOW ? 2e-4 : 0.4;
    }
    if (!(s->flags & FKDA_BETA_SIGMOID))
        beta_mean = 0.5;
    c->args.g = normal_tensor(c, s->g, 4, g_shape, g_mean, g_deviation, seed);
    c->args.beta =
        normal_tensor(c, s->beta, 3, beta_shape, beta_mean,
                      s->flags & FKDA_BETA_SIGMOID ? table[s->regime].beta_deviation : 0.1, seed);
    if (s->gate == FKDA_GATE_ACTIVATED)
        return;
    c->args.A_log = normal_tensor(c, FKDA_F32, 1, bias_shape, table[s->regime].head_mean,
                                  table[s->regime].head_deviation, seed);
    c->args.dt_bias = normal_tensor(c, FKDA_F32, 2, bias_shape, table[s->regime].head_mean,
                                    table[s->regime].head_deviation, seed);
}

void cpu_case_open(struct cpu_case *c, const struct cpu_shape *shape)
{
    memset(c, 0, sizeof *c);
    c->shape = *shape;
    struct cpu_shape *s = &c->shape;
    set_defaults(s);
    uint64_t seed = s->seed + 1;
    fkda_args_init(&c->args);
    c->args.scale = 1 / sqrt((double)s->K);
    c->args.flags = s->flags;
    c->args.gate = (int32_t)s->gate;
    const int64_t q_shape[] = {s->B, s->T, s->H, s->K}, v_shape[] = {s->B, s->T, s->HV, s->V};
    double k_deviation = s->flags & FKDA_QK_L2NORM ? 1 : 1 / sqrt((double)s->K);
    c->args.q = normal_tensor(c, s->q, 4, q_shape, 0, k_deviation, &seed);
    c->args.k = normal_tensor(c, s->k, 4, q_shape, 0, k_deviation, &seed);
    c->args.v = normal_tensor(c, s->v, 4, v_shape, 0, 1, &seed);
    regime_inputs(c, &seed);
    int64_t sequences = s->N ? s->N : s->B;
    if (s->N) {
        const int64_t cu_shape[] = {s->N + 1};
        int64_t *cu = cpu_case_alloc(c, (size_t)(s->N + 1) * sizeof *cu);
        memcpy(cu, s->cu, (size_t)(s->N + 1) * sizeof *cu);
        c->args.cu_seqlens = fkda_tensor_contiguous(cu, FKDA_I64, 1, cu_shape);
    }
    const int64_t state_shape[] = {sequences, s->HV, s->V, s->K};
    c->out_count = (size_t)(s->B * s->T * s->HV * s->V);
    c->state_count = (size_t)(sequences * s->HV * s->V * s->K);
    if (!s->no_initial)
        c->args.initial_state = normal_tensor(c, s->initial, 4, state_shape, 0, 0.1, &seed);
    if (!s->no_final)
        c->args.final_state =
            fkda_tensor_contiguous(cpu_case_alloc(c, c->state_count * fkda_dtype_bytes(s->final)),
                                   s->final, 4, state_shape);
    c->args.out = fkda_tensor_contiguous(cpu_case_alloc(c, c->out_count * fkda_dtype_bytes(s->out)),
                                         s->out, 4, v_shape);
    cpu_case_poison(c);
}

void cpu_case_close(struct cpu_case *c)
{
    for (int i = 0; i < c->num_buffers; i++)
        free(c->buffers[i]);
    memset(c, 0, sizeof *c);
}

static void poison(const fkda_tensor *tensor)
{
    if (tensor->ndim == 0)
        return;
    size_t bytes = fkda_dtype_bytes((fkda_dtype)tensor->dtype);
    for (int i = 0; i < tensor->ndim; i++)
        bytes *= (size_t)tensor->shape[i];
    memset(tensor->data, 0xff, bytes); /* a NaN in every dtype */
}

void cpu_case_poison(struct cpu_case *c)
{
    poison(&c->args.out);
    poison(&c->args.final_state);
    poison(&c->args.checkpoint_state);
}

void cpu_case_reference(struct cpu_case *c)
{
    char reason[FKDA_REASON_BYTES];
    fkda_args args = c->args;
    c->expected_out = cpu_case_alloc(c, c->out_count * sizeof(double));
    memset(c->expected_out, 0, c->out_count * sizeof(double));
    args.out.data = c->expected_out;
    args.out.dtype = FKDA_F64;
    if (args.final_state.ndim) {
        c->expected_state = cpu_case_alloc(c, c->state_count * sizeof(double));
        args.final_state.data = c->expected_state;
        args.final_state.dtype = FKDA_F64;
    }
    memset(&args.checkpoint_state, 0, sizeof args.checkpoint_state);
    memset(&args.checkpoint_offsets, 0, sizeof args.checkpoint_offsets);
    memset(&args.checkpoint_indptr, 0, sizeof args.checkpoint_indptr);
    fkda_status status = fkda_reference(&args, reason, sizeof reason);
    assert(status == FKDA_OK);
    (void)status;
}

double cpu_error(const void *actual, fkda_dtype dtype, const double *expected, size_t count)
{
    double error = 0, size = 0;
    for (size_t i = 0; i < count; i++) {
        double x = dtype == FKDA_BF16 ? (double)fkda_bf16_to_float(((const uint16_t *)actual)[i])
                                      : (double)((const float *)actual)[i];
        if (!isfinite(x) || !isfinite(expected[i]))
            return INFINITY;
        error += (x - expected[i]) * (x - expected[i]);
        size += expected[i] * expected[i];
    }
    if (size == 0)
        return error == 0 ? 0 : INFINITY;
    return sqrt(error / size);
}
