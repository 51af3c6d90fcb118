/* bench_copy.c: memory bandwidth, as bytes read plus bytes written per second. Two ways, the better
 * one counts: a copy (memcpy) and an update in place, which is what decode does to its states. Both
 * walk in windows over much more memory than the caches hold; the best window counts, since
 * whatever else the machine does only makes it slower.
 */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "program.h"

#define WINDOW_BYTES ((size_t)32 << 20) /* of one timing: some milliseconds */

/* In place: every element is read and written. */
static void update(float *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        values[i] += 1;
}

/* Seconds of one pass over `count` floats of `memory`: copies the lower half to the upper one, or
 * updates all of it. */
static double time_pass(float *memory, size_t count, int threads, bool copy)
{
    double start = fkda_read_clock();
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int part = 0; part < threads; part++) {
        size_t share = count / 2 / (size_t)threads;
        float *low = memory + share * (size_t)part, *high = low + count / 2;
        if (copy) {
            memcpy(high, low, share * sizeof *memory);
        } else {
            update(low, share);
            update(high, share);
        }
    }
    return fkda_read_clock() - start;
}

double fkda_measure_copy(int threads, size_t bytes)
{
    size_t window = WINDOW_BYTES / sizeof(float), count = bytes / sizeof(float) / window * window;
    float *memory = malloc(count * sizeof *memory);
    if (!memory)
        return 0;
    memset(memory, 0, count * sizeof *memory);
    double best = 0;
    for (size_t at = 0; at < 2 * count; at += window) {
        float *start = memory + at % count;
        double copied = 1e-9 * WINDOW_BYTES / time_pass(start, window, threads, true);
        best = copied > best ? copied : best;
    }
    for (size_t at = 0; at < 2 * count; at += window) {
        float *start = memory + at % count;
        double updated = 2e-9 * WINDOW_BYTES / time_pass(start, window, threads, false);
        best = updated > best ? updated : best;
    }
    free(memory);
    return best;
}
