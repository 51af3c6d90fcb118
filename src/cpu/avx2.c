/* avx2.c: the kernel set for AVX2 with FMA. */
#include "cpu/kernel_sets.h"
#include "cpu/vec_avx2.h"

#include "cpu/kernel_set.inc.h"

static bool usable(void)
{
    return fkda_cpu_features() & FKDA_FEATURE_AVX2_FMA;
}

const struct fkda_cpu_kernels fkda_cpu_kernels_avx2 = {
    .isa = FKDA_ISA_AVX2,
    .name = "avx2",
    .usable = usable,
    .prefill_fp32 = prefill_task,
    .decode = decode_task,
    .scratch_bytes = set_scratch_bytes,
    .v_multiple = 16,
    .prefill_heads = PREFILL_HEADS,
};
