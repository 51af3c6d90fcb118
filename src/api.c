/* api.c: the public calls.
 *
 *     fkda_args -> fkda_validate -> struct fkda_plan -> resolve_options -> workspace -> CPU backend
 *                                                    -> CUDA backend
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/checks.h"
#include "core/plan.h"
#include "cpu/cpu_backend.h"
#include "cuda/cuda_backend.h"
#include "ref/reference.h"

#define WORKSPACE_ALIGNMENT 64

typedef fkda_status (*backend_call)(const struct fkda_plan *plan, void *workspace,
                                    fkda_report *report, struct fkda_reason reason);

static struct fkda_reason open_reason(char *text, size_t bytes)
{
    if (text && bytes > 0)
        text[0] = '\0';
    return (struct fkda_reason){.text = text, .bytes = text ? bytes : 0};
}

/* ---- Kernel choice --------------------------------------------------------------------------- */

static fkda_isa fastest(uint32_t usable)
{
    for (int i = FKDA_ISA_COUNT - 1; i > FKDA_ISA_PORTABLE; i--)
        if (usable >> i & 1u)
            return (fkda_isa)i;
    return FKDA_ISA_PORTABLE;
}

static uint32_t with_bf16_prefill(uint32_t usable)
{
    for (int i = FKDA_ISA_PORTABLE; i < FKDA_ISA_COUNT; i++) {
        const struct fkda_cpu_kernels *kernels = fkda_cpu_kernels_for((fkda_isa)i);
        if (!kernels || !kernels->prefill_bf16)
            usable &= ~(1u << i);
    }
    return usable;
}

static void list_isas(uint32_t set, char *text, size_t bytes)
{
    size_t used = 0;
    text[0] = '\0';
    for (int i = FKDA_ISA_PORTABLE; i < FKDA_ISA_COUNT; i++)
        if (set >> i & 1u)
            used += (size_t)snprintf(text + used, bytes - used, "%s%s", used ? ", " : "",
                                     fkda_isa_name((fkda_isa)i));
}

/* A wish (0: none) becomes what will run, or an error that lists what can. */
static fkda_status choose_isa(const fkda_args *args, fkda_isa *isa, fkda_precision precision,
                              struct fkda_reason reason)
{
    const char *isa_from = args->isa != FKDA_ISA_AUTO ? "isa" : "FLASH_KDA_CPU_ISA";
    const char *precision_from =
        args->precision != FKDA_PRECISION_DEFAULT ? "precision" : "FLASH_KDA_PRECISION";
    uint32_t usable = fkda_cpu_isa_usable();
    char names[96];
    if (*isa != FKDA_ISA_AUTO && !(usable >> *isa & 1u)) {
        list_isas(usable, names, sizeof names);
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                         "%s: %s is not %s, wanted one of: auto, %s", isa_from, fkda_isa_name(*isa),
                         fkda_cpu_isa_built() >> *isa & 1u ? "usable on this processor"
                                                           : "in this build",
                         names);
    }
    if (precision == FKDA_PRECISION_BF16) {
        usable = with_bf16_prefill(usable);
        if (!usable || (*isa != FKDA_ISA_AUTO && !(usable >> *isa & 1u))) {
            list_isas(usable, names, sizeof names);
            return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                             "%s: bf16 with isa %s, wanted fp32, or one of the isas: %s",
                             precision_from, fkda_isa_name(*isa),
                             usable ? names : "(none is usable here)");
        }
    }
    if (*isa == FKDA_ISA_AUTO)
        *isa = fastest(usable);
    return FKDA_OK;
}

static fkda_status resolve_options(const fkda_args *args, enum fkda_call call,
                                   struct fkda_plan *plan, struct fkda_reason reason)
{
    fkda_status status =
        fkda_resolve_environment(args, &plan->isa, &plan->precision, &plan->num_threads, reason);
    if (status != FKDA_OK)
        return status;
    /* Decode has one arithmetic; its precision is fp32 whatever prefill is set to. */
    if (call == FKDA_CALL_DECODE || plan->precision == FKDA_PRECISION_DEFAULT)
        plan->precision = FKDA_PRECISION_FP32;
    return choose_isa(args, &plan->isa, plan->precision, reason);
}

/* ---- Calls ----------------------------------------------------------------------------------- */

/* Runs `backend` with the caller's workspace, or with one that lives as long as the call. */
static fkda_status run_with_workspace(const fkda_args *args, const struct fkda_plan *plan,
                                      backend_call backend, struct fkda_reason reason)
{
    size_t bytes = fkda_cpu_workspace_bytes(plan);
    if (args->workspace) {
        if (args->workspace_bytes < bytes) {
            if (args->report)
                args->report->workspace_bytes = bytes;
            return fkda_fail(reason, FKDA_ERROR_WORKSPACE,
                             "workspace_bytes: %zu, wanted at least %zu", args->workspace_bytes,
                             bytes);
        }
        return backend(plan, args->workspace, args->report, reason);
    }
    size_t rounded = (bytes / WORKSPACE_ALIGNMENT + 1) * WORKSPACE_ALIGNMENT;
    void *workspace = aligned_alloc(WORKSPACE_ALIGNMENT, rounded);
    if (!workspace)
        return fkda_fail(reason, FKDA_ERROR_OUT_OF_MEMORY, "workspace: no memory for %zu bytes",
                         rounded);
    fkda_status status = backend(plan, workspace, args->report, reason);
    free(workspace);
    return status;
}

static fkda_status call_backend(const fkda_args *args, enum fkda_call call, backend_call backend,
                                struct fkda_reason reason)
{
    struct fkda_plan plan;
    fkda_status status = fkda_validate(args, call, &plan, reason);
    if (status == FKDA_OK && plan.device == FKDA_CUDA)
        return call == FKDA_CALL_DECODE ? fkda_cuda_decode(args, &plan, reason)
                                        : fkda_cuda_forward(args, &plan, reason);
    if (status == FKDA_OK)
        status = resolve_options(args, call, &plan, reason);
    if (status == FKDA_OK)
        status = run_with_workspace(args, &plan, backend, reason);
    return status;
}

fkda_status fkda_forward(const fkda_args *args, char *reason, size_t reason_bytes)
{
    return call_backend(args, FKDA_CALL_FORWARD, fkda_cpu_forward,
                        open_reason(reason, reason_bytes));
}

fkda_status fkda_decode(const fkda_args *args, char *reason, size_t reason_bytes)
{
    return call_backend(args, FKDA_CALL_DECODE, fkda_cpu_decode, open_reason(reason, reason_bytes));
}

fkda_status fkda_reference(const fkda_args *args, char *reason, size_t reason_bytes)
{
    struct fkda_reason where = open_reason(reason, reason_bytes);
    struct fkda_plan plan;
    fkda_status status = fkda_validate(args, FKDA_CALL_REFERENCE, &plan, where);
    if (status == FKDA_OK)
        status = fkda_reference_forward(&plan, where);
    if (status == FKDA_OK && args->report) {
        *args->report = (fkda_report){.num_threads = 1, .num_tokens = plan.num_tokens};
        snprintf(args->report->kernel, sizeof args->report->kernel, "reference/float64");
    }
    return status;
}

fkda_status fkda_workspace_bytes(const fkda_args *args, size_t *bytes, char *reason,
                                 size_t reason_bytes)
{
    struct fkda_reason where = open_reason(reason, reason_bytes);
    struct fkda_plan plan;
    if (!bytes)
        return fkda_fail(where, FKDA_ERROR_INVALID_ARGUMENT, "bytes: NULL, wanted a size_t");
    fkda_status status = fkda_validate(args, FKDA_CALL_WORKSPACE, &plan, where);
    if (status == FKDA_OK && plan.device == FKDA_CUDA)
        return fkda_cuda_workspace_bytes(&plan, bytes, where);
    if (status == FKDA_OK)
        status = resolve_options(args, FKDA_CALL_WORKSPACE, &plan, where);
    if (status == FKDA_OK)
        *bytes = fkda_cpu_workspace_bytes(&plan);
    return status;
}

fkda_status fkda_get_info(fkda_info *info, char *reason, size_t reason_bytes)
{
    struct fkda_reason where = open_reason(reason, reason_bytes);
    if (!info)
        return fkda_fail(where, FKDA_ERROR_INVALID_ARGUMENT, "info: NULL, wanted a fkda_info");
    fkda_args defaults;
    fkda_args_init(&defaults);
    struct fkda_plan plan = {.isa = FKDA_ISA_AUTO};
    enum fkda_cuda_path path;
    fkda_status status = resolve_options(&defaults, FKDA_CALL_FORWARD, &plan, where);
    if (status == FKDA_OK)
        status = fkda_read_cuda_path(&path, where);
    if (status != FKDA_OK)
        return status;
    *info = (fkda_info){.isa_built = fkda_cpu_isa_built(),
                        .isa_usable = fkda_cpu_isa_usable(),
                        .isa_chosen = (int32_t)plan.isa,
                        .num_threads = plan.num_threads};
    snprintf(info->version, sizeof info->version, "%s", fkda_version());
    fkda_cuda_get_info(info, path);
    return FKDA_OK;
}
