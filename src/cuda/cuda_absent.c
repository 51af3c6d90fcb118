/* cuda_absent.c: stands in for cuda_backend.c in a library without CUDA kernels. Arguments were
 * validated before; what only CUDA refuses in them matters no more. */
#include <stdio.h>

#include "cuda/cuda_backend.h"

static fkda_status refuse(struct fkda_reason reason)
{
    return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                     "device: cuda, this build has no CUDA kernels, wanted cpu");
}

fkda_status fkda_cuda_workspace_bytes(const struct fkda_plan *plan, size_t *bytes,
                                      struct fkda_reason reason)
{
    (void)plan;
    (void)bytes;
    return refuse(reason);
}

fkda_status fkda_cuda_forward(const fkda_args *args, const struct fkda_plan *plan,
                              struct fkda_reason reason)
{
    (void)args;
    (void)plan;
    return refuse(reason);
}

fkda_status fkda_cuda_decode(const fkda_args *args, const struct fkda_plan *plan,
                             struct fkda_reason reason)
{
    (void)args;
    (void)plan;
    return refuse(reason);
}

void fkda_cuda_get_info(fkda_info *info, enum fkda_cuda_path wish)
{
    (void)wish;
    info->num_devices = 0;
    info->cuda_archs[0] = '\0';
    snprintf(info->cuda_status, sizeof info->cuda_status, "this build has no CUDA kernels");
}
