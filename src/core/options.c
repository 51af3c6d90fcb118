/* options.c: the environment variables FLASH_KDA_CPU_ISA, FLASH_KDA_PRECISION,
 * FLASH_KDA_NUM_THREADS and FLASH_KDA_CUDA_PATH.
 *
 * They are read at each call of their device, and only where the caller left the field of fkda_args
 * at 0 (the last has none). An empty value counts as unset; a wrong one is an error that lists the
 * right ones.
 */
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "core/checks.h"

static const char *environment(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

_Static_assert(FKDA_ISA_COUNT == 6, "read_isa lists the names");
static fkda_status read_isa(fkda_isa *isa, struct fkda_reason reason)
{
    const char *value = environment("FLASH_KDA_CPU_ISA");
    if (!value)
        return FKDA_OK;
    for (int i = FKDA_ISA_AUTO; i < FKDA_ISA_COUNT; i++) {
        if (strcmp(value, fkda_isa_name((fkda_isa)i)) == 0) {
            *isa = (fkda_isa)i;
            return FKDA_OK;
        }
    }
    return fkda_fail(
        reason, FKDA_ERROR_INVALID_ARGUMENT,
        "FLASH_KDA_CPU_ISA: '%.60s', wanted auto, portable, avx2, avx512, avx512_bf16 or "
        "amx_bf16",
        value);
}

static fkda_status read_precision(fkda_precision *precision, struct fkda_reason reason)
{
    const char *value = environment("FLASH_KDA_PRECISION");
    if (!value)
        return FKDA_OK;
    if (strcmp(value, "fp32") == 0)
        *precision = FKDA_PRECISION_FP32;
    else if (strcmp(value, "bf16") == 0)
        *precision = FKDA_PRECISION_BF16;
    else
        return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "FLASH_KDA_PRECISION: '%.60s', wanted fp32 or bf16", value);
    return FKDA_OK;
}

static fkda_status read_num_threads(int *num_threads, struct fkda_reason reason)
{
    const char *value = environment("FLASH_KDA_NUM_THREADS");
    if (!value)
        return FKDA_OK;
    int number = 0;
    for (const char *c = value; number >= 0 && *c; c++) {
        number = *c >= '0' && *c <= '9' ? 10 * number + (*c - '0') : -1;
        if (number > FKDA_MAX_THREADS)
            number = -1;
    }
    if (number < 1)
        return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                         "FLASH_KDA_NUM_THREADS: '%.60s', wanted a number from 1 to %d", value,
                         FKDA_MAX_THREADS);
    *num_threads = number;
    return FKDA_OK;
}

static int process_threads(void)
{
#ifdef _OPENMP
    int number = omp_get_max_threads(); /* knows the affinity mask and OMP_NUM_THREADS */
    return number < 1 ? 1 : number > FKDA_MAX_THREADS ? FKDA_MAX_THREADS : number;
#else
    return 1;
#endif
}

fkda_status fkda_resolve_environment(const fkda_args *args, fkda_isa *isa,
                                     fkda_precision *precision, int *num_threads,
                                     struct fkda_reason reason)
{
    *isa = (fkda_isa)args->isa;
    *precision = (fkda_precision)args->precision;
    *num_threads = args->num_threads;

    fkda_status status = FKDA_OK;
    if (*isa == FKDA_ISA_AUTO)
        status = read_isa(isa, reason);
    if (status == FKDA_OK && *precision == FKDA_PRECISION_DEFAULT)
        status = read_precision(precision, reason);
    if (status == FKDA_OK && *num_threads == 0)
        status = read_num_threads(num_threads, reason);
    if (status == FKDA_OK && *num_threads == 0)
        *num_threads = process_threads();
    return status;
}

const char *fkda_cuda_path_name(enum fkda_cuda_path path)
{
    static const char *const names[] = {"auto", "sm80", "sm90", "sm90-forward"};
    return names[path];
}

fkda_status fkda_read_cuda_path(enum fkda_cuda_path *path, struct fkda_reason reason)
{
    const char *value = environment("FLASH_KDA_CUDA_PATH");
    *path = FKDA_CUDA_PATH_AUTO;
    if (!value)
        return FKDA_OK;
    for (int i = FKDA_CUDA_PATH_AUTO; i <= FKDA_CUDA_PATH_SM90_FORWARD; i++) {
        if (strcmp(value, fkda_cuda_path_name((enum fkda_cuda_path)i)) == 0) {
            *path = (enum fkda_cuda_path)i;
            return FKDA_OK;
        }
    }
    return fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                     "FLASH_KDA_CUDA_PATH: '%.60s', wanted auto, sm80, sm90 or sm90-forward",
                     value);
}
