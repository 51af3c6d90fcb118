/* cuda_absent.c: stands in for cuda_backend.c in a library without CUDA kernels. Arguments are
 * checked the same, so that a wrong one is named either way. */
#include <stdio.h>

#include "cuda/cuda_backend.h"
#include "cuda/cuda_plan.h"

static fkda_status refuse(const struct fkda_plan *plan, struct fkda_reason reason)
{
    struct fkda_cuda_work work;
    fkda_status status = fkda_cuda_plan_forward(plan, &work, reason);
    if (status == FKDA_OK)
        status = fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                           "device: cuda, this build has no CUDA kernels, wanted cpu");
    return status;
}

fkda_status fkda_cuda_workspace_bytes(const struct fkda_plan *plan, size_t *bytes,
                                      struct fkda_reason reason)
{
    (void)bytes;
    return refuse(plan, reason);
}

fkda_status fkda_cuda_forward(const fkda_args *args, const struct fkda_plan *plan,
                              struct fkda_reason reason)
{
    (void)args;
    return refuse(plan, reason);
}

void fkda_cuda_get_info(fkda_info *info)
{
    info->num_devices = 0;
    info->cuda_archs[0] = '\0';
    snprintf(info->cuda_status, sizeof info->cuda_status, "this build has no CUDA kernels");
}
