/* avx512.c: the kernel set for AVX-512 (F, BW, DQ, VL). */
#include "cpu/kernel_sets.h"
#include "cpu/vec_avx512.h"

#include "cpu/kernel_set.inc.h"

bool fkda_avx512_usable(void)
{
    return fkda_cpu_features() & FKDA_FEATURE_AVX512;
}

void fkda_avx512_prefill_fp32(const struct fkda_cpu_task *task)
{
    prefill_task(task);
}

void fkda_avx512_decode(const struct fkda_cpu_task *task)
{
    decode_task(task);
}

size_t fkda_avx512_scratch_bytes(const struct fkda_plan *plan)
{
    return set_scratch_bytes(plan);
}

const struct fkda_cpu_kernels fkda_cpu_kernels_avx512 = {
    .isa = FKDA_ISA_AVX512,
    .name = "avx512",
    .usable = fkda_avx512_usable,
    .prefill_fp32 = fkda_avx512_prefill_fp32,
    .decode = fkda_avx512_decode,
    .scratch_bytes = fkda_avx512_scratch_bytes,
    .v_multiple = PANEL_WIDTH,
    .prefill_heads = PREFILL_HEADS,
};
