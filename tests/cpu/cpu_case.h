/* cpu_case.h: one call on random inputs, for the tests and the benchmark of the CPU kernels. */
#ifndef CPU_CASE_H
#define CPU_CASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "flash_kda.h"

/* random: g normal; slow: decay near 0.999; one: decay 1 up to 1e-8, small beta; saturated: g +8 */
enum cpu_regime { CPU_RANDOM, CPU_SLOW, CPU_NO_DECAY, CPU_SATURATED };

/* What a case looks like; 0 where not given means the default in brackets. */
struct cpu_shape {
    int64_t B, T, H, HV, K, V;        /* [1, -, 1, H, 128, 128] */
    int64_t N;                        /* > 0: varlen with cu, B is 1 */
    const int64_t *cu;                /* [N + 1] */
    fkda_dtype q, k, v, g, beta, out; /* [BF16] */
    fkda_dtype initial, final;        /* [F32]; FKDA_DTYPE_INVALID and has_... false: absent */
    bool no_initial, no_final;
    enum cpu_regime regime;
    fkda_gate gate;
    uint32_t flags; /* [FKDA_FLAGS_DEFAULT] */
    uint64_t seed;
};

/* Owns every buffer of args. `expected_*` are float64, filled by cpu_case_reference. */
struct cpu_case {
    struct cpu_shape shape;
    fkda_args args;
    void *buffers[24];
    int num_buffers;
    size_t out_count, state_count;
    double *expected_out, *expected_state;
};

void cpu_case_open(struct cpu_case *c, const struct cpu_shape *shape);
void cpu_case_close(struct cpu_case *c);
void *cpu_case_alloc(struct cpu_case *c, size_t bytes); /* 64-byte aligned, freed by close */

/* Fills out, final_state and checkpoint_state with NaN. */
void cpu_case_poison(struct cpu_case *c);

/* Float64 reference into expected_out and expected_state. */
void cpu_case_reference(struct cpu_case *c);

/* RMS(actual - expected) / RMS(expected); infinite where a NaN or a wrong infinity is found. */
double cpu_error(const void *actual, fkda_dtype dtype, const double *expected, size_t count);

/* Uniform bits; *seed is the state. */
uint64_t cpu_random(uint64_t *seed);
double cpu_normal(uint64_t *seed);

#endif /* CPU_CASE_H */
