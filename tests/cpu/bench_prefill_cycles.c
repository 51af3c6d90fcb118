/* bench_prefill_cycles.c: for people who work on the fp32 prefill of the AVX-512 set. Where do the
 * cycles of a token and head go?
 *
 *     taskset -c 1 bench_prefill_cycles [seconds per line]
 *
 * A cycle is what two FMA instructions take in a loop right before and after the sample.
 * Samples are many and, but for the whole calls, far shorter than a time slice, so that other
 * programs on the machine change the first quartile little. The products of a token and head
 * are 1536 cycles (K = V = 128). */
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <x86intrin.h>

#include "cpu/kernel_sets.h"
#include "cpu/vec_avx512.h"

#include "cpu/kernel_set.inc.h"
#include "cpu_case.h"

enum { MAX_SAMPLES = 200000, HEADS = 8 };

static double seconds_per_line = 0.5;
static double samples[MAX_SAMPLES];

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- What a cycle is ------------------------------------------------------------------------- */

enum { CHAINS = 12, ROUNDS = 1000 };

static void multiply_add(void *argument)
{
    __m512 sum[CHAINS];
    const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(1e-3f);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++)
        sum[i] = _mm512_set1_ps((float)i);
    for (int round = 0; round < ROUNDS; round++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++)
            sum[i] = _mm512_fmadd_ps(sum[i], a, b);
    }
    float total = 0;
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++)
        total += _mm512_cvtss_f32(sum[i]);
    *(volatile float *)argument = total;
}

/* ---- Samples --------------------------------------------------------------------------------- */

static uint64_t ticks_of(void (*body)(void *), void *argument)
{
    void (*volatile call)(void *) = body; /* not to be inlined and moved out of the interval */
    _mm_lfence();
    uint64_t start = __rdtsc();
    _mm_lfence();
    call(argument);
    _mm_lfence();
    return __rdtsc() - start;
}

/* Ticks of two FMA instructions; the least of three, since the first loop after other work is slow.
 */
static double cycle_ticks(void)
{
    float sink;
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < 3; i++) {
        uint64_t ticks = ticks_of(multiply_add, &sink);
        least = ticks < least ? ticks : least;
    }
    return (double)least / (CHAINS * ROUNDS / 2);
}

/* Each sample is divided by the length of a cycle around it, since the clock rate may change. */
static void print_line(const char *what, double per_sample, void (*body)(void *), void *argument)
{
    size_t count = 0;
    for (double end = seconds_now() + seconds_per_line;
         count < 20 || (seconds_now() < end && count < MAX_SAMPLES); count++) {
        double before = cycle_ticks();
        body(argument); /* its data into the caches, and the clock rate that it runs at */
        uint64_t ticks = ticks_of(body, argument);
        double after = cycle_ticks();
        samples[count] = (double)ticks / (before < after ? before : after) / per_sample;
    }
    qsort(samples, count, sizeof *samples, by_size);
    printf("  %-40s %8.1f  [%.1f .. %.1f]\n", what, samples[count / 4], samples[count / 20],
           samples[count / 2]);
}

/* ---- Parts ----------------------------------------------------------------------------------- */

struct parts {
    struct prefill run;
    struct fkda_cpu_task task;
    struct group_io io;
    float *u;
};

static void one_preparation(void *argument)
{
    struct parts *p = argument;
    prepare_chunk(p->run.plan, &p->run.seq, &p->run.gates[0], 0, 0, CHUNK, &p->run.scratch.chunk);
}

static void one_pass(void *argument)
{
    struct parts *p = argument;
    run_pass(&p->run, p->run.scratch.panels, 1, true, p->u, &p->io);
}

static void one_chunk(void *argument)
{
    struct parts *p = argument;
    struct upcoming none = {.end = 0};
    run_chunk(&p->run, 0, 0, CHUNK, &none);
}

static void chunk_of_heads(void *argument)
{
    struct parts *p = argument;
    for (int64_t h = 0; h < HEADS; h++) {
        struct upcoming none = {.end = 0};
        run_chunk(&p->run, h, 0, CHUNK, &none);
    }
}

static void parts(struct cpu_case *c)
{
    static float u[GROUP * PANEL_WIDTH] __attribute__((aligned(64)));
    struct fkda_plan plan;
    char reason[FKDA_REASON_BYTES] = "";
    struct fkda_reason why = {reason, sizeof reason};
    if (fkda_validate(&c->args, FKDA_CALL_FORWARD, &plan, why) != FKDA_OK) {
        fprintf(stderr, "%s\n", reason);
        exit(1);
    }
    struct parts p = {.u = u};
    p.task = (struct fkda_cpu_task){.plan = &plan, .head_count = HEADS, .v_count = plan.V};
    p.task.scratch = cpu_case_alloc(c, set_scratch_bytes(&plan));
    memset(p.task.scratch, 0, set_scratch_bytes(&plan));
    p.run = (struct prefill){.task = &p.task,
                             .plan = &plan,
                             .seq = fkda_plan_sequence(&plan, 0),
                             .scratch = carve_scratch(p.task.scratch, plan.K),
                             .v_per_block = plan.V * COEF_BLOCK / plan.K};
    p.run.gates[0] = gate_of_head(&plan, 0);
    print_line("preparation, rows in the first cache", CHUNK, one_preparation, &p);
    struct upcoming none = {.end = 0};
    struct chunk_rows rows;
    p.io = (struct group_io){.v_bf16 = true, .out_bf16 = true};
    prefetch_token(&p.run, &none, &p.io);
    open_rows(&p.run, 0, 0, CHUNK, &rows);
    open_group(&p.run, &rows, 1, CHUNK, 0, &p.io);
    double per_token = GROUP / (double)(plan.V / PANEL_WIDTH);
    print_line("pass, panel in the first cache", per_token, one_pass, &p);
    print_line("passes of a chunk, one head", CHUNK, one_chunk, &p);
    print_line("passes of a chunk, 8 heads in turn", CHUNK * HEADS, chunk_of_heads, &p);
}

static void whole_call(void *argument)
{
    char reason[FKDA_REASON_BYTES] = "";
    if (fkda_forward(argument, reason, sizeof reason) != FKDA_OK) {
        fprintf(stderr, "%s\n", reason);
        exit(1);
    }
}

static void call_of(int64_t T, int64_t H, bool with_parts)
{
    struct cpu_case c;
    char reason[FKDA_REASON_BYTES] = "", what[64];
    cpu_case_open(&c, &(struct cpu_shape){.T = T, .H = H, .seed = 1});
    c.args.isa = FKDA_ISA_AVX512;
    c.args.precision = FKDA_PRECISION_FP32;
    c.args.num_threads = 1;
    if (fkda_workspace_bytes(&c.args, &c.args.workspace_bytes, reason, sizeof reason) != FKDA_OK) {
        fprintf(stderr, "%s\n", reason);
        exit(1);
    }
    c.args.workspace = cpu_case_alloc(&c, c.args.workspace_bytes);
    if (with_parts)
        parts(&c);
    snprintf(what, sizeof what, "whole call, H %d T %d", (int)H, (int)T);
    print_line(what, (double)(T * H), whole_call, &c.args);
    cpu_case_close(&c);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        seconds_per_line = atof(argv[1]);
    if (!(fkda_cpu_features() & FKDA_FEATURE_AVX512)) {
        fprintf(stderr, "this processor has no AVX-512\n");
        return 77;
    }
    printf("cycles a token and head, first quartile [a twentieth .. median]\n");
    call_of(64, 8, true);
    call_of(512, 1, false);
    call_of(512, 8, false);
    call_of(512, 32, false);
    return 0;
}
