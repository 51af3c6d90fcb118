/* cpu_tests.h: cmocka, and what the tests of the CPU kernels share. */
#ifndef CPU_TESTS_H
#define CPU_TESTS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cpu/kernel_sets.h"
#include "cpu_case.h"

#define BOUND_STATE    1e-6
#define BOUND_OUT_F32  1e-6
#define BOUND_OUT_BF16 1.75e-3

/* Runs fp32 prefill with one kernel set; fails the test with the reason if the call does. */
static inline void run_forward(fkda_args *args, fkda_isa isa, int threads)
{
    char reason[FKDA_REASON_BYTES] = "";
    args->isa = (int32_t)isa;
    args->precision = FKDA_PRECISION_FP32;
    args->num_threads = threads;
    if (fkda_forward(args, reason, sizeof reason) != FKDA_OK)
        fail_msg("%s", reason);
}

static inline void run_decode(fkda_args *args, fkda_isa isa, int threads)
{
    char reason[FKDA_REASON_BYTES] = "";
    args->isa = (int32_t)isa;
    args->num_threads = threads;
    if (fkda_decode(args, reason, sizeof reason) != FKDA_OK)
        fail_msg("%s", reason);
}

/* for (each kernel set that this machine can run) */
#define FOR_EACH_ISA(isa)                                               \
    for (fkda_isa isa = FKDA_ISA_PORTABLE; isa < FKDA_ISA_COUNT; isa++) \
        if (fkda_cpu_isa_usable() >> isa & 1u)

static inline size_t tensor_bytes(const fkda_tensor *tensor)
{
    size_t bytes = fkda_dtype_bytes((fkda_dtype)tensor->dtype);
    for (int i = 0; i < tensor->ndim; i++)
        bytes *= (size_t)tensor->shape[i];
    return bytes;
}

#endif /* CPU_TESTS_H */
