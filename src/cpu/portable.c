/* portable.c: the kernel set for any processor. */
#include "cpu/kernel_sets.h"
#include "cpu/vec_portable.h"

#include "cpu/kernel_set.inc.h"

static bool always(void)
{
    return true;
}

const struct fkda_cpu_kernels fkda_cpu_kernels_portable = {
    .isa = FKDA_ISA_PORTABLE,
    .name = "portable",
    .usable = always,
    .prefill_fp32 = prefill_task,
    .decode = decode_task,
    .scratch_bytes = set_scratch_bytes,
    .v_multiple = 16,
    .prefill_heads = PREFILL_HEADS,
};
