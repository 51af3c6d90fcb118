/* cpu_backend.h: the CPU backend's two faces: what api.c calls, and what a kernel set provides.
 *
 *     fkda_forward -> fkda_validate -> fkda_cpu_forward -> tasks over threads -> kernel set
 *
 * A kernel set is one instruction set's functions; selection is data (kernel_sets.c). Every
 * function works on one task and writes nothing outside it, so any split over threads gives the
 * same bits.
 */
#ifndef FKDA_CPU_BACKEND_H
#define FKDA_CPU_BACKEND_H

#include "core/plan.h"

/* One unit of work: value heads [head_begin, head_begin + head_count) of sequence n, value channels
 * [v_begin, v_begin + v_count) of each. `scratch` is this thread's, 64-byte aligned, dirty. */
struct fkda_cpu_task {
    const struct fkda_plan *plan;
    int64_t n;
    int64_t head_begin, head_count;
    int64_t v_begin, v_count;
    void *scratch;
};

struct fkda_cpu_kernels {
    fkda_isa isa;
    const char *name;     /* fkda_isa_name(isa) */
    bool (*usable)(void); /* this processor and operating system can run them */
    /* Prefill of a task, chunks of FKDA_CHUNK_TOKENS from the start of the sequence. */
    void (*prefill_fp32)(const struct fkda_cpu_task *task);
    void (*prefill_bf16)(const struct fkda_cpu_task *task); /* NULL: this set has none */
    /* Token by token on the [V, K] rows: decode (states read and written by slot). */
    void (*decode)(const struct fkda_cpu_task *task);
    size_t (*scratch_bytes)(const struct fkda_plan *plan); /* per thread, any of the functions */
    int64_t v_multiple;    /* v_begin and v_count are multiples of this */
    int64_t prefill_heads; /* neighbouring heads that one task should take */
    int64_t bf16_multiple; /* prefill_bf16 takes K and V that are multiples of this */
};

/* Kernel sets that are in this library; NULL where the compiler could not build one. */
const struct fkda_cpu_kernels *fkda_cpu_kernels_for(fkda_isa isa);
uint32_t fkda_cpu_isa_built(void);
uint32_t fkda_cpu_isa_usable(void); /* detected once, then remembered */

size_t fkda_cpu_workspace_bytes(const struct fkda_plan *plan);
/* workspace: at least fkda_cpu_workspace_bytes, any alignment. report may be NULL. */
fkda_status fkda_cpu_forward(const struct fkda_plan *plan, void *workspace, fkda_report *report,
                             struct fkda_reason reason);
fkda_status fkda_cpu_decode(const struct fkda_plan *plan, void *workspace, fkda_report *report,
                            struct fkda_reason reason);

#endif /* FKDA_CPU_BACKEND_H */
