/* kernel_sets.h: the kernel sets by name, and what a set may take from another one.
 *
 * A set is built where the compiler knows its instructions (CMakeLists.txt defines FKDA_HAVE_...).
 */
#ifndef FKDA_KERNEL_SETS_H
#define FKDA_KERNEL_SETS_H

#include "cpu/cpu_backend.h"

extern const struct fkda_cpu_kernels fkda_cpu_kernels_portable;
extern const struct fkda_cpu_kernels fkda_cpu_kernels_avx2;
extern const struct fkda_cpu_kernels fkda_cpu_kernels_avx512;
extern const struct fkda_cpu_kernels fkda_cpu_kernels_avx512_bf16;
extern const struct fkda_cpu_kernels fkda_cpu_kernels_amx_bf16;

/* The sets with bf16 products take their fp32 prefill and decode from here. */
void fkda_avx512_prefill_fp32(const struct fkda_cpu_task *task);
void fkda_avx512_decode(const struct fkda_cpu_task *task);
size_t fkda_avx512_scratch_bytes(const struct fkda_plan *plan);
bool fkda_avx512_usable(void);

/* cpu_detect.c: what the processor has and the operating system saves on a context switch. */
enum {
    FKDA_FEATURE_AVX2_FMA = 1u << 0,
    FKDA_FEATURE_AVX512 = 1u << 1, /* F, BW, DQ, VL */
    FKDA_FEATURE_AVX512_BF16 = 1u << 2,
    FKDA_FEATURE_AMX_BF16 = 1u << 3 /* the processor's part; the system must also grant it */
};
uint32_t fkda_cpu_features(void);

#endif /* FKDA_KERNEL_SETS_H */
