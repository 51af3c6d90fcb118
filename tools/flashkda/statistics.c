/* statistics.c: see statistics.h. */
#include "statistics.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SAMPLES (1 << 20)

double fkda_load_element(const fkda_tensor *tensor, int64_t index)
{
    switch (tensor->dtype) {
    case FKDA_F64:
        return ((const double *)tensor->data)[index];
    case FKDA_F32:
        return (double)((const float *)tensor->data)[index];
    default: { /* bf16: the upper half of a float */
        uint32_t bits = (uint32_t)((const uint16_t *)tensor->data)[index] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return (double)value;
    }
    }
}

void fkda_add_errors(struct error_sums *sums, const fkda_tensor *got, const fkda_tensor *wanted,
                     int64_t rows)
{
    int64_t shape[4] = {1, 1, 1, 1}, x[4] = {0}, y[4] = {0};
    for (int d = 0; d < got->ndim; d++) {
        shape[d] = got->shape[d];
        x[d] = got->stride[d];
        y[d] = wanted->stride[d];
    }
    if (rows >= 0 && rows < shape[1])
        shape[1] = rows;
    for (int64_t a = 0; a < shape[0]; a++) {
        for (int64_t b = 0; b < shape[1]; b++) {
            for (int64_t c = 0; c < shape[2]; c++) {
                int64_t i = a * x[0] + b * x[1] + c * x[2], j = a * y[0] + b * y[1] + c * y[2];
                for (int64_t d = 0; d < shape[3]; d++) {
                    double value = fkda_load_element(wanted, j + d * y[3]);
                    double error = fkda_load_element(got, i + d * x[3]) - value;
                    sums->error += error * error;
                    sums->reference += value * value;
                    if (isnan(error) || fabs(error) > sums->largest) /* a NaN stays */
                        sums->largest = fabs(error);
                }
            }
        }
    }
}

void fkda_merge_errors(struct error_sums *sums, const struct error_sums *part)
{
    sums->error += part->error;
    sums->reference += part->reference;
    if (isnan(part->largest) || part->largest > sums->largest)
        sums->largest = part->largest;
}

double fkda_error_ratio(const struct error_sums *sums)
{
    if (sums->error == 0 && sums->reference == sums->reference)
        return 0;
    return sqrt(sums->error / sums->reference);
}

static int compare_values(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void fkda_sort_values(double *values, size_t count)
{
    if (count)
        qsort(values, count, sizeof *values, compare_values);
}

double fkda_quantile(const double *sorted, size_t count, double p)
{
    if (count == 0)
        return 0;
    double at = p * (double)(count - 1);
    size_t i = (size_t)at;
    double next = i + 1 < count ? sorted[i + 1] : sorted[i];
    return sorted[i] + (at - (double)i) * (next - sorted[i]);
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* The gate of flash_kda.h for head h and channel c. */
static double log_decay(const fkda_args *args, double g, int64_t h, int64_t c)
{
    if (args->gate == FKDA_GATE_ACTIVATED)
        return g;
    const fkda_tensor *A = &args->A_log, *bias = &args->dt_bias;
    int64_t K = args->g.shape[3];
    double factor = A->ndim ? exp(fkda_load_element(A, h * A->stride[0])) : 1;
    if (bias->ndim)
        g += fkda_load_element(bias, bias->ndim == 2 ? h * bias->stride[0] + c * bias->stride[1]
                                                     : (h * K + c) * bias->stride[0]);
    if (args->gate == FKDA_GATE_BOUNDED)
        return args->lower_bound * sigmoid(factor * g);
    return -factor * (g > 0 ? g + log1p(exp(-g)) : log1p(exp(g)));
}

static void count_decay(struct decay_statistics *decay, double g)
{
    double at = (log10(g < 0 ? -g : 1e-300) - FKDA_DECAY_FIRST) / FKDA_DECAY_STEP;
    int bin = at >= FKDA_DECAY_BINS ? FKDA_DECAY_BINS - 1 : at > 0 ? (int)at : 0;
    decay->bins[bin]++;
    decay->mean += g;
}

/* Walks the elements of a [B, T, heads, channels] or [B, T, heads] tensor in steps, so that at most
 * MAX_SAMPLES are seen. The step has no divisor in common with usual head sizes. */
static int64_t sample_step(const fkda_tensor *tensor, int64_t *total)
{
    *total = 1;
    for (int d = 0; d < tensor->ndim; d++)
        *total *= tensor->shape[d];
    int64_t step = *total / MAX_SAMPLES + 1;
    return step % 2 ? step : step + 1;
}

static void measure_gate(const fkda_args *args, double *values, struct decay_statistics *decay)
{
    const fkda_tensor *g = &args->g;
    int64_t total, step = sample_step(g, &total);
    size_t count = 0;
    for (int64_t i = 0; i < total; i += step) {
        int64_t c = i % g->shape[3], h = i / g->shape[3] % g->shape[2];
        int64_t row = i / g->shape[3] / g->shape[2], t = row % g->shape[1], b = row / g->shape[1];
        int64_t at = b * g->stride[0] + t * g->stride[1] + h * g->stride[2] + c * g->stride[3];
        double value = log_decay(args, fkda_load_element(g, at), h, c);
        if (isnan(value))
            continue;
        count_decay(decay, value);
        values[count++] = value;
    }
    fkda_sort_values(values, count);
    decay->count = (int64_t)count;
    decay->mean /= count ? (double)count : 1;
    decay->p01 = fkda_quantile(values, count, 0.01);
    decay->p10 = fkda_quantile(values, count, 0.1);
    decay->p50 = fkda_quantile(values, count, 0.5);
    decay->p90 = fkda_quantile(values, count, 0.9);
    decay->p99 = fkda_quantile(values, count, 0.99);
}

static void measure_beta(const fkda_args *args, double *values, struct decay_statistics *decay)
{
    const fkda_tensor *beta = &args->beta;
    int64_t total, step = sample_step(beta, &total);
    size_t count = 0;
    for (int64_t i = 0; i < total; i += step) {
        int64_t h = i % beta->shape[2], row = i / beta->shape[2];
        int64_t t = row % beta->shape[1], b = row / beta->shape[1];
        double value = fkda_load_element(beta, b * beta->stride[0] + t * beta->stride[1] +
                                                   h * beta->stride[2]);
        value = args->flags & FKDA_BETA_SIGMOID ? sigmoid(value) : value;
        value = args->flags & FKDA_ALLOW_NEG_EIGVAL ? 2 * value : value;
        if (isnan(value))
            continue;
        decay->beta_mean += value;
        values[count++] = value;
    }
    fkda_sort_values(values, count);
    decay->beta_mean /= count ? (double)count : 1;
    decay->beta_p99 = fkda_quantile(values, count, 0.99);
}

fkda_status fkda_measure_decay(const fkda_args *args, struct decay_statistics *decay)
{
    *decay = (struct decay_statistics){.count = 0};
    double *values = malloc((MAX_SAMPLES + 1) * sizeof *values);
    if (!values)
        return FKDA_ERROR_OUT_OF_MEMORY;
    measure_gate(args, values, decay);
    measure_beta(args, values, decay);
    free(values);
    return FKDA_OK;
}
