/* bench_cpu_kernels.c: for people who work on the CPU kernels. What share of this core's own
 * limits, measured in the same run, does each kernel set reach?
 *
 *     bench_cpu_kernels [--isa NAME] [--threads N] [--quick]
 *
 * Prefill counts 6 K V operations per token and head; decode counts the state read and written.
 * Pin it (taskset -c 1) and leave the machine alone: each figure is the least of several runs. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/kernel_sets.h"
#include "cpu_case.h"

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- Limits of the core ---------------------------------------------------------------------- */

#define FMA_CHAINS 12
#define FMA_ROUNDS 2000000

static volatile float sink;

/* FMA_CHAINS independent chains hide the latency of two units. Returns FLOP/s. */
#define PEAK_BODY(type, lanes, set1, fma, first)     \
    type sum[FMA_CHAINS];                            \
    const type a = set1(0.999f), b = set1(1e-3f);    \
    for (int i = 0; i < FMA_CHAINS; i++)             \
        sum[i] = set1((float)i);                     \
    double start = now();                            \
    for (int round = 0; round < FMA_ROUNDS; round++) \
        for (int i = 0; i < FMA_CHAINS; i++)         \
            sum[i] = fma(sum[i], a, b);              \
    double seconds = now() - start;                  \
    float total = 0;                                 \
    for (int i = 0; i < FMA_CHAINS; i++)             \
        total += first(sum[i]);                      \
    sink = total;                                    \
    return 2.0 * (lanes)*FMA_CHAINS * FMA_ROUNDS / seconds

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static double peak_avx512(void)
{
    PEAK_BODY(__m512, 16, _mm512_set1_ps, _mm512_fmadd_ps, _mm512_cvtss_f32);
}

__attribute__((target("avx2,fma"))) static double peak_avx2(void)
{
    PEAK_BODY(__m256, 8, _mm256_set1_ps, _mm256_fmadd_ps, _mm256_cvtss_f32);
}
#endif

#define SCALAR_SET(x)       (x)
#define SCALAR_FMA(a, b, c) ((a) * (b) + (c))

static double peak_portable(void)
{
    typedef float vec4 __attribute__((vector_size(16)));
#define VEC4_SET(x)   ((vec4){x, x, x, x})
#define VEC4_FIRST(x) ((x)[0])
    PEAK_BODY(vec4, 4, VEC4_SET, SCALAR_FMA, VEC4_FIRST);
}

static double peak_once(fkda_isa isa)
{
#if defined(__x86_64__)
    if (isa >= FKDA_ISA_AVX512)
        return peak_avx512();
    if (isa == FKDA_ISA_AVX2)
        return peak_avx2();
#endif
    (void)isa;
    return peak_portable();
}

static double peak(fkda_isa isa)
{
    double best = 0;
    for (int i = 0; i < 7; i++) {
        double p = peak_once(isa);
        best = p > best ? p : best;
    }
    return best;
}

/* Bytes read plus written per second by memcpy between two buffers far larger than the caches. */
static double copy_bandwidth(size_t bytes)
{
    char *from = malloc(bytes), *to = malloc(bytes);
    if (!from || !to)
        exit(1);
    memset(from, 1, bytes);
    memset(to, 2, bytes);
    double best = 1e30;
    for (int i = 0; i < 5; i++) {
        double start = now();
        memcpy(to, from, bytes);
        double seconds = now() - start;
        best = seconds < best ? seconds : best;
    }
    free(from);
    free(to);
    return 2.0 * (double)bytes / best;
}

/* ---- Kernels --------------------------------------------------------------------------------- */

static void check(fkda_status status, const char *reason)
{
    if (status == FKDA_OK)
        return;
    fprintf(stderr, "%s: %s\n", fkda_status_name(status), reason);
    exit(1);
}

static double prefill_seconds(fkda_isa isa, int threads, int64_t T, enum cpu_regime regime,
                              int repeats)
{
    struct cpu_case c;
    char reason[FKDA_REASON_BYTES] = "";
    cpu_case_open(&c, &(struct cpu_shape){.T = T, .H = 32, .regime = regime, .seed = 1});
    c.args.isa = (int32_t)isa;
    c.args.num_threads = threads;
    c.args.precision = FKDA_PRECISION_FP32;
    check(fkda_workspace_bytes(&c.args, &c.args.workspace_bytes, reason, sizeof reason), reason);
    c.args.workspace = cpu_case_alloc(&c, c.args.workspace_bytes);
    double best = 1e30;
    for (int i = 0; i < repeats; i++) {
        double start = now();
        check(fkda_forward(&c.args, reason, sizeof reason), reason);
        double seconds = now() - start;
        best = seconds < best ? seconds : best;
    }
    cpu_case_close(&c);
    return best;
}

/* One call per state of a pool that is larger than the caches; the mean over the pool. */
static double decode_seconds(fkda_isa isa, int threads, int64_t slots, fkda_dtype state)
{
    struct cpu_case c;
    char reason[FKDA_REASON_BYTES] = "";
    const int64_t pool_shape[] = {slots, 32, 128, 128}, one[] = {1};
    cpu_case_open(&c, &(struct cpu_shape){.T = 1, .H = 32, .no_initial = true, .seed = 1});
    size_t bytes = (size_t)slots * 32 * 128 * 128 * fkda_dtype_bytes(state);
    void *pool = cpu_case_alloc(&c, bytes);
    memset(pool, 0, bytes);
    int64_t slot = 0;
    c.args.final_state = fkda_tensor_contiguous(pool, state, 4, pool_shape);
    c.args.state_indices = fkda_tensor_contiguous(&slot, FKDA_I64, 1, one);
    c.args.isa = (int32_t)isa;
    c.args.num_threads = threads;
    double best = 1e30;
    for (int i = 0; i < 4; i++) {
        double start = now();
        for (slot = 0; slot < slots; slot++)
            check(fkda_decode(&c.args, reason, sizeof reason), reason);
        double seconds = (now() - start) / (double)slots;
        best = seconds < best ? seconds : best;
    }
    cpu_case_close(&c);
    return best;
}

static void bench_set(fkda_isa isa, int threads, bool quick, double bandwidth, int64_t slots)
{
    static const int64_t lengths[] = {512, 2048, 8192};
    double limit = peak(isa);
    printf("%s: FMA peak %.1f GFLOP/s\n", fkda_isa_name(isa), limit * 1e-9);
    for (size_t i = 0; i < (quick ? 2 : 3); i++) {
        double seconds =
            prefill_seconds(isa, threads, lengths[i], CPU_RANDOM, lengths[i] == 8192 ? 3 : 7);
        double before = limit, rate = 6.0 * 128 * 128 * 32 * (double)lengths[i] / seconds;
        limit = peak(isa);
        limit = limit > before ? limit : before; /* the fairer one: the core never went faster */
        printf(
            "  prefill T %-5lld %8.2f ms  %6.3f us/token/head  %6.1f GFLOP/s  %5.1f %% of peak\n",
            (long long)lengths[i], seconds * 1e3, seconds * 1e6 / 32 / (double)lengths[i],
            rate * 1e-9, 100 * rate / limit);
    }
    for (int d = FKDA_BF16; d <= FKDA_F32; d++) {
        double seconds = decode_seconds(isa, threads, slots, (fkda_dtype)d);
        double bytes = 2.0 * 32 * 128 * 128 * (double)fkda_dtype_bytes((fkda_dtype)d);
        printf("  decode %-8s %8.1f us  %6.2f GB/s  %5.1f %% of copy\n",
               fkda_dtype_name((fkda_dtype)d), seconds * 1e6, bytes / seconds * 1e-9,
               100 * bytes / seconds / bandwidth);
    }
}

int main(int argc, char **argv)
{
    int threads = 1;
    bool quick = false;
    const char *only = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0)
            quick = true;
        else if (strcmp(argv[i], "--isa") == 0 && i + 1 < argc)
            only = argv[++i];
        else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc)
            threads = atoi(argv[++i]);
        else {
            fprintf(stderr, "usage: %s [--isa NAME] [--threads N] [--quick]\n", argv[0]);
            return 2;
        }
    }
    int64_t slots = quick ? 192 : 512; /* 2 MiB each in float32 */
    double bandwidth = copy_bandwidth((size_t)(quick ? 256 : 768) << 20);
    printf("copy: %.2f GB/s read and written\n", bandwidth * 1e-9);
    for (int isa = FKDA_ISA_PORTABLE; isa < FKDA_ISA_COUNT; isa++)
        if (fkda_cpu_isa_usable() >> isa & 1u &&
            (only ? strcmp(only, fkda_isa_name((fkda_isa)isa)) == 0 : isa <= FKDA_ISA_AVX512))
            bench_set((fkda_isa)isa, threads, quick, bandwidth, slots);
    return 0;
}
