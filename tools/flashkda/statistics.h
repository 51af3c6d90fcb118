/* statistics.h: errors against a reference, and what a layer's gates look like. */
#ifndef FLASHKDA_STATISTICS_H
#define FLASHKDA_STATISTICS_H

#include <stddef.h>
#include <stdint.h>

#include "flash_kda.h"

/* Sums over elements; errors of several parts are added up. NaN anywhere makes the ratio NaN. */
struct error_sums {
    double error, reference; /* sums of squares */
    double largest;          /* absolute error */
};

/* Element `index` of a bf16, fp32 or fp64 tensor's memory. */
double fkda_load_element(const fkda_tensor *tensor, int64_t index);

/* Compares two tensors of one shape, up to 4 dimensions; rows of dimension 1 from `rows` on are
 * left out (rows < 0: none). */
void fkda_add_errors(struct error_sums *sums, const fkda_tensor *got, const fkda_tensor *wanted,
                     int64_t rows);
void fkda_merge_errors(struct error_sums *sums, const struct error_sums *part);
/* RMS(error) / RMS(reference); 0 without any error, infinity against a zero reference. */
double fkda_error_ratio(const struct error_sums *sums);

/* Log-decays g of a layer (natural logarithm, per token, head and key channel) and its betas after
 * the sigmoid, over at most about a million values spread evenly. */
enum { FKDA_DECAY_BINS = 28 };
#define FKDA_DECAY_FIRST (-6.0) /* log10(-g) where the first bin starts */
#define FKDA_DECAY_STEP  0.25

struct decay_statistics {
    int64_t count;
    double mean, p01, p10, p50, p90, p99; /* of g; p01: the fastest decay */
    int64_t bins[FKDA_DECAY_BINS];        /* of log10(-g); the outer ones take what lies beyond */
    double beta_mean, beta_p99;
};

/* Zeros where there is nothing to count. FKDA_ERROR_OUT_OF_MEMORY is the only error. */
fkda_status fkda_measure_decay(const fkda_args *args, struct decay_statistics *decay);

/* The p-quantile (0 to 1) of ascending values, interpolated. */
double fkda_quantile(const double *sorted, size_t count, double p);
void fkda_sort_values(double *values, size_t count);

#endif /* FLASHKDA_STATISTICS_H */
