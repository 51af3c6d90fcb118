/* bench.h: the parts of `flashkda bench`.
 *
 *     command_bench (which cases, output) -> bench_cases (timing of one) -> bench_inputs (tensors)
 *                                         -> bench_peak, bench_copy (ceilings of this machine)
 */
#ifndef FLASHKDA_BENCH_H
#define FLASHKDA_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "flash_kda.h"
#include "layers.h"

enum bench_regime {
    BENCH_RANDOM, /* g, beta, q, k, v from N(0, 1), A_log and dt_bias uniform in [0, 1): most of the
                     state is gone after a token */
    BENCH_SLOW,   /* g from N(-8.5, 0.5^2), A_log and dt_bias 0: log-decays near -0.001 */
    BENCH_TRAINED /* the layers of a file, repeated */
};

enum bench_kind { BENCH_PREFILL, BENCH_DECODE };

struct bench_case {
    enum bench_kind kind;
    enum bench_regime regime;
    int64_t N, T, H; /* prefill: N 1; decode: T 1 */
    fkda_isa isa;
    fkda_precision precision;
    int threads;
};

struct bench_result {
    fkda_report report;
    int64_t samples;
    double min_ms, p10_ms, median_ms, p90_ms;
    double cpu_ms, min_cpu_ms; /* processor time of a call, all threads, median and least: what it
                               takes where something else is running too */
    double flops, bytes;       /* of a call: useful operations, memory that must move */
    double error_out, error_state; /* RMS ratio to float64, of head 0 of sequence 0 */
};

struct bench_budget {
    double seconds; /* of sampling per case */
    int64_t min_samples;
    size_t pool_bytes; /* of states in decode: more than the caches hold */
};

/* Ceilings of one number of threads. */
struct bench_ceiling {
    double fma[FKDA_ISA_COUNT];  /* fp32 GFLOP/s of the vectors that this kernel set uses */
    double bf16[FKDA_ISA_COUNT]; /* bf16 products with fp32 sums; 0 where the set has none */
    double copy;                 /* GB/s, bytes read plus bytes written */
};

/* bench_peak.c. GFLOP/s over `threads` threads, the best of several short runs. 0: not on this
 * machine or compiler. */
double fkda_measure_fma(fkda_isa isa, int threads);
double fkda_measure_bf16(fkda_isa isa, int threads);

/* bench_copy.c. Best of many windows over `bytes` of memory; 0 without memory. */
double fkda_measure_copy(int threads, size_t bytes);

/* bench_inputs.c. Tensors of a case; free with fkda_free_inputs. False without memory.
 * `trained` holds the layers for BENCH_TRAINED. */
struct bench_inputs {
    fkda_args args; /* complete but for isa, precision, num_threads and report */
    void *blocks[12];
    int num_blocks;
    int64_t num_slots; /* decode: states in the pool */
    int64_t *slots;    /* 0, 1, ..., num_slots - 1 */
};
bool fkda_make_inputs(const struct bench_case *item, const struct layer_list *trained,
                      size_t pool_bytes, struct bench_inputs *inputs);
void fkda_free_inputs(struct bench_inputs *inputs);

/* bench_cases.c. Times one case and compares head 0 with the definition. */
fkda_status fkda_time_case(const struct bench_case *item, struct bench_inputs *inputs,
                           const struct bench_budget *budget, struct bench_result *result,
                           char *reason, size_t reason_bytes);

#endif /* FLASHKDA_BENCH_H */
