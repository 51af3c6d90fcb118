/* kernel_sets.c: the kernel sets in this library, as data. */
#include "cpu/cpu_backend.h"

extern const struct fkda_cpu_kernels fkda_cpu_kernels_portable;

static const struct fkda_cpu_kernels *const sets[FKDA_ISA_COUNT] = {
    [FKDA_ISA_PORTABLE] = &fkda_cpu_kernels_portable,
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
    uint32_t usable = 0;
    for (int i = 0; i < FKDA_ISA_COUNT; i++)
        if (sets[i] && sets[i]->usable())
            usable |= 1u << i;
    return usable;
}
