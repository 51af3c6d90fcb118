/* bench_peak.c: what this machine's vector units can do, measured: long chains of independent
 * multiply-adds on registers. Each instruction set has a loop of its own, compiled for it by a
 * function attribute; which of them may run is asked of the library.
 */
#include <string.h>

#include "bench.h"
#include "program.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_X86 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#if (defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11)
#define HAVE_X86_BF16 1 /* the compiler knows vdpbf16ps and tiles */
#endif
#endif

#define CHAINS      16 /* independent accumulators: latency 4 x 2 units, twice over */
#define SECONDS     0.004
#define REPETITIONS 40

typedef void loop_function(int64_t rounds);

/* Keeps a value alive without storing it. */
#define KEEP(value) __asm__ volatile("" : : "x"(value))
/* The value may have changed, as far as the compiler knows: no folding of the loop. */
#define TOUCH(value) __asm__ volatile("" : "+x"(value))

/* What plain C may use: 16-byte vectors, fused only where the compiler's target does so. */
typedef float vector4 __attribute__((vector_size(16)));

static void loop_portable(int64_t rounds)
{
    vector4 sums[12], factor = {1, 1, 1, 1}, term = {0, 0, 0, 0};
    memset(sums, 0, sizeof sums);
    for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < 12; j++)
            sums[j] = sums[j] * factor + term;
#if defined(HAVE_X86)
        TOUCH(factor);
#else
        __asm__ volatile("" ::: "memory");
#endif
    }
    vector4 total = sums[0];
    for (int j = 1; j < 12; j++)
        total += sums[j];
    volatile float sink = total[0];
    (void)sink;
}

#ifdef HAVE_X86
__attribute__((target("avx2,fma"))) static void loop_avx2(int64_t rounds)
{
    __m256 sums[12], factor = _mm256_set1_ps(1), term = _mm256_setzero_ps();
    for (int j = 0; j < 12; j++)
        sums[j] = _mm256_setzero_ps();
    for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < 12; j++)
            sums[j] = _mm256_fmadd_ps(sums[j], factor, term);
        TOUCH(factor);
    }
    for (int j = 0; j < 12; j++)
        KEEP(sums[j]);
}

__attribute__((target("avx512f"))) static void loop_avx512(int64_t rounds)
{
    __m512 sums[CHAINS], factor = _mm512_set1_ps(1), term = _mm512_setzero_ps();
    for (int j = 0; j < CHAINS; j++)
        sums[j] = _mm512_setzero_ps();
    for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 16
        for (int j = 0; j < CHAINS; j++)
            sums[j] = _mm512_fmadd_ps(sums[j], factor, term);
        __asm__ volatile("" : "+v"(factor));
    }
    for (int j = 0; j < CHAINS; j++)
        __asm__ volatile("" : : "v"(sums[j]));
}

#endif

#ifdef HAVE_X86_BF16
__attribute__((target("avx512f,avx512bf16"))) static void loop_avx512_bf16(int64_t rounds)
{
    __m512 sums[CHAINS], values = _mm512_set1_ps(1);
    for (int j = 0; j < CHAINS; j++)
        sums[j] = _mm512_setzero_ps();
    for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 16
        for (int j = 0; j < CHAINS; j++)
            sums[j] = _mm512_dpbf16_ps(sums[j], (__m512bh)values, (__m512bh)values);
        __asm__ volatile("" : "+v"(values));
    }
    for (int j = 0; j < CHAINS; j++)
        __asm__ volatile("" : : "v"(sums[j]));
}

/* Four tiles of sums, two of each factor: eight tiles, as the hardware has. */
__attribute__((target("amx-tile,amx-bf16"))) static void loop_amx_bf16(int64_t rounds)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } layout;
    memset(&layout, 0, sizeof layout);
    layout.palette = 1;
    for (int i = 0; i < 8; i++) {
        layout.row_bytes[i] = 64;
        layout.rows[i] = 16;
    }
    /* The intrinsic tells some compilers that it reads 8 bytes only: all 64 must be written now. */
    __asm__ volatile("" : : "r"(&layout) : "memory");
    _tile_loadconfig(&layout);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t i = 0; i < rounds; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
}

/* Linux gives the tile registers to processes that ask. */
static bool request_tiles(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

/* Seconds from the first start to the last end of `threads` threads that run `loop` together. */
static double time_loop(loop_function *loop, int64_t rounds, int threads)
{
    double first = 0, last = 0;
    (void)threads; /* without OpenMP */
#pragma omp parallel num_threads(threads)
    {
#pragma omp barrier
        double start = fkda_read_clock();
        loop(rounds);
        double end = fkda_read_clock();
#pragma omp critical(peak_times)
        {
            first = first == 0 || start < first ? start : first;
            last = end > last ? end : last;
        }
    }
    return last - first;
}

/* GFLOP/s of `threads` threads that run `loop` together: the best of several runs, since whatever
 * else the machine does only makes it slower. */
static double measure(loop_function *loop, double flops_per_round, int threads)
{
#ifndef _OPENMP
    threads = 1;
#endif
    int64_t rounds = 1000;
    double seconds, best = 0;
    while ((seconds = time_loop(loop, rounds, 1)) < SECONDS / 4)
        rounds *= 2;
    rounds = (int64_t)((double)rounds * SECONDS / seconds) + 1;
    for (int repetition = 0; repetition < REPETITIONS; repetition++) {
        seconds = time_loop(loop, rounds, threads);
        double rate = 1e-9 * flops_per_round * (double)rounds * threads / seconds;
        best = rate > best ? rate : best;
    }
    return best;
}

static bool is_usable(fkda_isa isa)
{
    fkda_info info;
    return fkda_get_info(&info, NULL, 0) == FKDA_OK && (info.isa_usable >> isa & 1);
}

double fkda_measure_fma(fkda_isa isa, int threads)
{
    if (!is_usable(isa))
        return 0;
    switch (isa) {
#ifdef HAVE_X86
    case FKDA_ISA_AVX2:
        return measure(loop_avx2, 12 * 8 * 2, threads);
    case FKDA_ISA_AVX512:
    case FKDA_ISA_AVX512_BF16:
    case FKDA_ISA_AMX_BF16:
        return measure(loop_avx512, CHAINS * 16 * 2, threads);
#endif
    case FKDA_ISA_PORTABLE:
        return measure(loop_portable, 12 * 4 * 2, threads);
    default:
        return 0;
    }
}

double fkda_measure_bf16(fkda_isa isa, int threads)
{
#ifdef HAVE_X86_BF16
    if (isa == FKDA_ISA_AVX512_BF16 && is_usable(isa))
        return measure(loop_avx512_bf16, CHAINS * 32 * 2, threads);
    if (isa == FKDA_ISA_AMX_BF16 && is_usable(isa) && request_tiles())
        return measure(loop_amx_bf16, 4 * 16 * 16 * 32 * 2, threads);
#endif
    (void)isa;
    (void)threads;
    return 0;
}
