/* cpu_backend.c: one task for each sequence and value head, spread over OpenMP threads. */
#include <stdio.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "cpu/cpu_backend.h"

#define ALIGNMENT 64

static size_t scratch_stride(const struct fkda_plan *plan)
{
    size_t bytes = fkda_cpu_kernels_for(plan->isa)->scratch_bytes(plan);
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static int threads_for(const struct fkda_plan *plan)
{
    int64_t tasks = plan->N * plan->HV;
    return tasks < plan->num_threads ? (tasks < 1 ? 1 : (int)tasks) : plan->num_threads;
}

size_t fkda_cpu_workspace_bytes(const struct fkda_plan *plan)
{
    return ALIGNMENT + (size_t)threads_for(plan) * scratch_stride(plan);
}

static void run_tasks(const struct fkda_plan *plan, void *workspace,
                      void (*function)(const struct fkda_cpu_task *task))
{
    size_t stride = scratch_stride(plan);
    char *base = (char *)workspace;
    base += (ALIGNMENT - (uintptr_t)base % ALIGNMENT) % ALIGNMENT;
    int64_t tasks = plan->N * plan->HV;
#pragma omp parallel for schedule(dynamic) num_threads(threads_for(plan))
    for (int64_t i = 0; i < tasks; i++) {
#ifdef _OPENMP
        size_t thread = (size_t)omp_get_thread_num();
#else
        size_t thread = 0;
#endif
        struct fkda_cpu_task task = {.plan = plan,
                                     .n = i / plan->HV,
                                     .head_begin = i % plan->HV,
                                     .head_count = 1,
                                     .v_begin = 0,
                                     .v_count = plan->V,
                                     .scratch = base + thread * stride};
        function(&task);
    }
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
    (void)reason;
    const struct fkda_cpu_kernels *kernels = fkda_cpu_kernels_for(plan->isa);
    bool bf16 = plan->precision == FKDA_PRECISION_BF16;
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
