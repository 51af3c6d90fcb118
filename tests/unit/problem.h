/* problem.h: a small valid call with its own buffers, for tests to run or to spoil.
 *
 * Inputs are random float32; outputs start poisoned (every byte 0xff, a NaN in each float dtype),
 * so that a test can tell what was written.
 */
#ifndef FKDA_TEST_PROBLEM_H
#define FKDA_TEST_PROBLEM_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "flash_kda.h"

#define PROBLEM_MAX_BUFFERS 48

struct problem {
    fkda_args args;
    int64_t B, T, H, HV, K, V, N;
    char reason[FKDA_REASON_BYTES];
    struct problem_buffer {
        void *data;
        size_t bytes;
        bool output;
    } buffers[PROBLEM_MAX_BUFFERS];
    int num_buffers;
};

/* Letters of flash_kda.h; 0 means: B 1, H 1, HV as H, K and V 16, N as B. T is taken as it is. */
struct problem_sizes {
    int64_t B, T, H, HV, K, V, N;
};

/* q, k, v, g, beta, A_log, dt_bias, out, initial_state and final_state, all float32. */
void problem_init(struct problem *p, struct problem_sizes sizes);
void problem_free(struct problem *p);

/* Memory that lives as long as the problem. Inputs are zero, outputs poisoned. */
void *problem_input(struct problem *p, size_t bytes);
void *problem_output(struct problem *p, size_t bytes);

/* Contiguous tensors: random input, poisoned output, indices of the given dtype. */
fkda_tensor problem_random(struct problem *p, fkda_dtype dtype, int ndim, const int64_t *shape);
fkda_tensor problem_poisoned(struct problem *p, fkda_dtype dtype, int ndim, const int64_t *shape);
fkda_tensor problem_indices(struct problem *p, fkda_dtype dtype, int64_t count,
                            const int64_t *values);
#define INDICES(p, dtype, ...)                                                               \
    problem_indices(p, dtype, (int64_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), \
                    (int64_t[]){__VA_ARGS__})

void problem_poison(struct problem *p);
void problem_assert_untouched(const struct problem *p);
uint64_t problem_hash_inputs(const struct problem *p);

/* A number in [-1, 1) from a fixed sequence. */
double problem_uniform(uint64_t *seed);

/* Element i of a contiguous tensor's data. */
double problem_get(const fkda_tensor *tensor, int64_t i);
void problem_set(const fkda_tensor *tensor, int64_t i, double value);
int64_t problem_elements(const fkda_tensor *tensor);

typedef fkda_status (*problem_call)(const fkda_args *args, char *reason, size_t reason_bytes);
/* Runs the call and fails the test with its reason unless it returns FKDA_OK. */
void problem_run(struct problem *p, problem_call call);
/* Runs the call; wants this status, a reason that begins with `reason`, and nothing written. */
void problem_refused(struct problem *p, problem_call call, fkda_status status, const char *reason);

#endif /* FKDA_TEST_PROBLEM_H */
