/* recipe.h: how the fuzz targets of the library turn bytes into a call.
 *
 * An input is a recipe: a small valid call, then up to 12 fields of it overwritten with any value,
 * then some pointers spoilt. What the tensors point to:
 *   - an index tensor: exactly the memory that its (overwritten) shape and strides reach, in an
 *     allocation of its own, so that AddressSanitizer sees the first byte beyond;
 *   - the others likewise if `floats` is set, else addresses that nobody may touch.
 * Tensors too large for that get such an address as well; then `backed` is false.
 */
#ifndef FKDA_FUZZ_RECIPE_H
#define FKDA_FUZZ_RECIPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/checks.h"

/* Coverage feedback from such functions would only lead the fuzzer astray, and slow it down. */
#define UNOBSERVED __attribute__((no_sanitize("coverage")))

/* The bytes of the input, then zeros. */
struct source {
    const uint8_t *data;
    size_t size;
};

uint8_t fuzz_take(struct source *s);

struct trial {
    fkda_args args;
    int64_t B, T, H, HV, K, V, N, S, M;
    enum fkda_call call;
    void *owned[FKDA_ARG_COUNT];
    bool backed; /* every tensor has its memory */
};

void fuzz_make_trial(struct trial *t, struct source *s, bool floats);
void fuzz_free_trial(struct trial *t);

/* Aborts with the text unless the condition holds. */
void fuzz_require(bool condition, const char *what);
/* A reason must begin with an argument's name and fit its buffer. */
void fuzz_require_reason(const char *reason);

#endif /* FKDA_FUZZ_RECIPE_H */
