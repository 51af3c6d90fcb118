/* kernel_sets.c: the kernel sets in this library, as data. */
#include <stdatomic.h>

#include "cpu/kernel_sets.h"

static const struct fkda_cpu_kernels *const sets[FKDA_ISA_COUNT] = {
    [FKDA_ISA_PORTABLE] = &fkda_cpu_kernels_portable,
#ifdef FKDA_HAVE_AVX2
    [FKDA_ISA_AVX2] = &fkda_cpu_kernels_avx2,
#endif
#ifdef FKDA_HAVE_AVX512
    [FKDA_ISA_AVX512] = &fkda_cpu_kernels_avx512,
#endif
#ifdef FKDA_HAVE_AVX512_BF16
    [FKDA_ISA_AVX512_BF16] = &fkda_cpu_kernels_avx512_bf16,
#endif
#ifdef FKDA_HAVE_AMX_BF16
    [FKDA_ISA_AMX_BF16] = &fkda_cpu_kernels_amx_bf16,
#endif
};

const struct fkda_cpu_kernels *fkda_cpu_kernels_for(fkda_isa isa)
{
    return isa > FKDA_ISA_AUTO && isa < FKDA_ISA_COUNT ? sets[isa] : NULL;
}

uint32_t fkda_cpu_isa_built(void)
{
    uint32_t built = 0;
    for (int i = 0; i < FKDA_ISA_COUNT; i++)
        if (sets[i])
            built |= 1u << i;
    return built;
}

uint32_t fkda_cpu_isa_usable(void)
{
    static _Atomic uint32_t remembered; /* 0: not asked yet; portable is always usable */
    uint32_t usable = atomic_load_explicit(&remembered, memory_order_relaxed);
    if (usable)
        return usable;
    for (int i = 0; i < FKDA_ISA_COUNT; i++)
        if (sets[i] && sets[i]->usable())
            usable |= 1u << i;
    atomic_store_explicit(&remembered, usable, memory_order_relaxed);
    return usable;
}
