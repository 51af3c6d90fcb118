/* cpu_backend.c: cuts a call into tasks and spreads them over threads.
 *
 * A task is some neighbouring heads of one sequence, or some value channels of one head when there
 * are fewer (sequence, head) pairs than threads: value rows are independent in the recurrence. The
 * cut changes which thread computes what, never a bit of the result. Threads take the next task
 * when they finish one, the longest sequences first.
 */
#include <stdio.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "cpu/after_fork.h"
#include "cpu/cpu_backend.h"
#include "cpu/task_rows.h"

#define ALIGNMENT 64

/* How a call is cut: HV heads in `groups` groups, V channels in `pieces` pieces. */
struct cut {
    int64_t heads, groups;    /* heads of a group: the last one may have fewer */
    int64_t channels, pieces; /* likewise */
};

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* ---- Where a call is cut --------------------------------------------------------------------- */

/* Time of the slowest thread, in tokens x heads: whole rounds of the longest task, or an even share
 * and a part of one task more when sequences differ. `fixed` is the share of a task's time that
 * does not shrink with its channels (gates and norms). */
static double slowest_thread(const struct fkda_plan *plan, struct cut cut)
{
    const double fixed = 0.15;
    double task = (double)plan->max_sequence_tokens * (double)cut.heads *
                  (fixed + (1 - fixed) * (double)cut.channels / (double)plan->V);
    double all = task * (double)(plan->N * cut.groups * cut.pieces);
    int64_t rounds = ceil_div(plan->N * cut.groups * cut.pieces, plan->num_threads);
    if (plan->num_tokens == plan->N * plan->max_sequence_tokens)
        return task * (double)rounds;
    double share = (double)plan->num_tokens / (double)(plan->N * plan->max_sequence_tokens);
    double even = all * share / plan->num_threads + task / 2;
    return even > task ? even : task;
}

static struct cut choose_cut(const struct fkda_plan *plan, const struct fkda_cpu_kernels *kernels)
{
    int64_t panels = ceil_div(plan->V, kernels->v_multiple);
    struct cut best = {0};
    double best_time = 0;
    int64_t most = fkda_heads_per_task(plan, kernels->prefill_heads);
    for (int64_t heads = most; heads >= 1; heads--) {
        for (int64_t pieces = 1; pieces <= (heads == 1 ? panels : 1); pieces++) {
            struct cut cut = {.heads = heads,
                              .groups = ceil_div(plan->HV, heads),
                              .channels = ceil_div(panels, pieces) * kernels->v_multiple};
            cut.pieces = ceil_div(plan->V, cut.channels);
            if (cut.channels > plan->V)
                cut.channels = plan->V;
            double time = slowest_thread(plan, cut);
            if (best.heads == 0 || time < 0.98 * best_time) {
                best = cut;
                best_time = time;
            }
        }
    }
    return best;
}

/* ---- Order of the sequences ------------------------------------------------------------------ */

static bool lengths_differ(const struct fkda_plan *plan)
{
    return plan->num_tokens != plan->N * plan->max_sequence_tokens;
}

static int length_class(int64_t length)
{
    int bits = 0;
    while (length >> bits && bits < 62)
        bits++;
    return bits;
}

/* Sequences by falling power of two of their length: a counting sort of N entries. */
static void sort_sequences(const struct fkda_plan *plan, int64_t *order)
{
    int64_t next[64] = {0}, at = 0;
    for (int64_t n = 0; n < plan->N; n++)
        next[length_class(fkda_plan_sequence(plan, n).length)]++;
    for (int i = 63; i >= 0; i--) {
        int64_t count = next[i];
        next[i] = at;
        at += count;
    }
    for (int64_t n = 0; n < plan->N; n++)
        order[next[length_class(fkda_plan_sequence(plan, n).length)]++] = n;
}

/* ---- Workspace: order [N], then one scratch per thread --------------------------------------- */

static size_t round_up(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static size_t order_bytes(const struct fkda_plan *plan)
{
    return plan->N > 1 ? round_up((size_t)plan->N * sizeof(int64_t)) : 0;
}

/* Depends on shapes only, so that a query and the call agree. */
static int threads_for(const struct fkda_plan *plan)
{
    int64_t panels = ceil_div(plan->V, fkda_cpu_kernels_for(plan->isa)->v_multiple);
    int64_t heads = plan->N * plan->HV;
    if (heads >= plan->num_threads)
        return plan->num_threads;
    int64_t tasks = heads * panels;
    return tasks < 1 ? 1 : tasks < plan->num_threads ? (int)tasks : plan->num_threads;
}

size_t fkda_cpu_workspace_bytes(const struct fkda_plan *plan)
{
    size_t scratch = round_up(fkda_cpu_kernels_for(plan->isa)->scratch_bytes(plan));
    return ALIGNMENT + order_bytes(plan) + (size_t)threads_for(plan) * scratch;
}

/* ---- Tasks over threads ---------------------------------------------------------------------- */

/* Subnormal operands cost over a hundred cycles each, and channels that decay to nothing make them;
 * while a task runs they count as 0. Rounding to nearest and masked exceptions are set as well:
 * what the caller has chosen holds for its own thread only, and results must not depend on which
 * thread runs a task; a caller that traps overflows must not be stopped by a gate that has
 * closed. */
static unsigned enter_float_mode(void)
{
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0u); /* flush to zero, denormals are zero, to nearest, no exception traps */
    return before;
#else
    return 0;
#endif
}

static void leave_float_mode(unsigned before)
{
#ifdef __SSE__
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

struct run {
    const struct fkda_plan *plan;
    const struct fkda_cpu_kernels *kernels;
    void (*function)(const struct fkda_cpu_task *task);
    struct cut cut;
    const int64_t *order; /* NULL: as they come */
    char *scratch;
    size_t scratch_stride;
    int64_t tasks;
    int threads;
};

static void run_task(const struct run *run, int64_t i, size_t thread)
{
    const struct fkda_plan *plan = run->plan;
    const struct cut *cut = &run->cut;
    int64_t piece = i % cut->pieces, group = i / cut->pieces % cut->groups;
    int64_t n = i / (cut->pieces * cut->groups);
    struct fkda_cpu_task task = {.plan = plan,
                                 .n = run->order ? run->order[n] : n,
                                 .head_begin = group * cut->heads,
                                 .head_count = cut->heads,
                                 .v_begin = piece * cut->channels,
                                 .v_count = cut->channels,
                                 .scratch = run->scratch + thread * run->scratch_stride};
    if (task.head_begin + task.head_count > plan->HV)
        task.head_count = plan->HV - task.head_begin;
    if (task.v_begin + task.v_count > plan->V)
        task.v_count = plan->V - task.v_begin;
    unsigned mode = enter_float_mode();
    run->function(&task);
    leave_float_mode(mode);
}

static void run_in_parallel(void *argument)
{
    const struct run *run = argument;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic) num_threads(run->threads)
    for (int64_t i = 0; i < run->tasks; i++)
        run_task(run, i, (size_t)omp_get_thread_num());
#else
    for (int64_t i = 0; i < run->tasks; i++)
        run_task(run, i, 0);
#endif
}

static void run_tasks(const struct fkda_plan *plan, void *workspace,
                      void (*function)(const struct fkda_cpu_task *task))
{
    char *base = (char *)workspace + (ALIGNMENT - (uintptr_t)workspace % ALIGNMENT) % ALIGNMENT;
    struct run run = {.plan = plan,
                      .kernels = fkda_cpu_kernels_for(plan->isa),
                      .function = function,
                      .scratch = base + order_bytes(plan)};
    run.cut = choose_cut(plan, run.kernels);
    run.scratch_stride = round_up(run.kernels->scratch_bytes(plan));
    if (plan->N > 1 && lengths_differ(plan)) {
        sort_sequences(plan, (int64_t *)(void *)base);
        run.order = (const int64_t *)(void *)base;
    }
    run.tasks = plan->N * run.cut.groups * run.cut.pieces;
    run.threads = threads_for(plan);
    if (run.threads > 1 && run.tasks > 1 && fkda_call_after_fork(run_in_parallel, &run))
        return;
    for (int64_t i = 0; i < run.tasks; i++)
        run_task(&run, i, 0);
}

static void fill_report(const struct fkda_plan *plan, const char *what, fkda_report *report)
{
    if (!report)
        return;
    memset(report, 0, sizeof *report);
    snprintf(report->kernel, sizeof report->kernel, "cpu/%s/%s",
             fkda_cpu_kernels_for(plan->isa)->name, what);
    report->num_threads = threads_for(plan);
    report->num_tokens = plan->num_tokens;
    report->workspace_bytes = fkda_cpu_workspace_bytes(plan);
}

fkda_status fkda_cpu_forward(const struct fkda_plan *plan, void *workspace, fkda_report *report,
                             struct fkda_reason reason)
{
    const struct fkda_cpu_kernels *kernels = fkda_cpu_kernels_for(plan->isa);
    bool bf16 = plan->precision == FKDA_PRECISION_BF16;
    if (bf16 && (plan->K % kernels->bf16_multiple || plan->V % kernels->bf16_multiple)) {
        bool key = plan->K % kernels->bf16_multiple != 0;
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                         "precision: bf16 with head size %s = %lld, wanted a multiple of %lld",
                         key ? "K" : "V", (long long)(key ? plan->K : plan->V),
                         (long long)kernels->bf16_multiple);
    }
    run_tasks(plan, workspace, bf16 ? kernels->prefill_bf16 : kernels->prefill_fp32);
    fill_report(plan, bf16 ? "prefill_bf16" : "prefill_fp32", report);
    return FKDA_OK;
}

fkda_status fkda_cpu_decode(const struct fkda_plan *plan, void *workspace, fkda_report *report,
                            struct fkda_reason reason)
{
    (void)reason;
    run_tasks(plan, workspace, fkda_cpu_kernels_for(plan->isa)->decode);
    fill_report(plan, "decode", report);
    return FKDA_OK;
}
