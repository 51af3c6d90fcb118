/* detect_bf16.c: may this process use tiles? The processor must have them, and Linux must be asked
 * once per process before the first one, since they enlarge what a signal frame saves. */
#if defined(__linux__)
#define _GNU_SOURCE /* syscall */
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cpu/kernel_sets.h"
#include "cpu/kernel_sets_bf16.h"

bool fkda_avx512_bf16_usable(void)
{
    return fkda_cpu_features() & FKDA_FEATURE_AVX512_BF16;
}

bool fkda_amx_usable(void)
{
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return fkda_cpu_features() & FKDA_FEATURE_AMX_BF16 &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}
