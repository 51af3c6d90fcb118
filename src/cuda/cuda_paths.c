/* cuda_paths.c: what path sm90 takes, and when it is the faster one; see cuda_paths.h. */
#include "cuda/cuda_paths.h"

/* Measured on 132 SMs: a chain is one block, and with fewer of them too many SMs have none, while
 * path sm80 spreads what needs no state over all. */
#define MIN_CHAINS 96
#define MIN_SMS    132

/* Of the copy engine's descriptors (tensor maps). */
#define ROW_BYTES        16
#define MAX_STRIDE_BYTES ((int64_t)1 << 40)

#define HEAD_SIZE    128
#define CHUNK_TOKENS 32

fkda_status fkda_cuda_check_sm90_device(const struct fkda_cuda_device *device,
                                        struct fkda_reason reason)
{
    if (device->major != 9 || device->minor != 0)
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED, "compute capability %d.%d, wanted 9.0",
                         device->major, device->minor);
    if (!device->sm90_built)
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                         "this build has no kernels for 90a (FLASH_KDA_CUDA_ARCHS)");
    return FKDA_OK;
}

static fkda_status check_kind(const struct fkda_plan *plan, struct fkda_reason reason)
{
    if (plan->gate != FKDA_GATE_BOUNDED)
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                         "gate without a lower bound, wanted a bounded one");
    if (plan->V != HEAD_SIZE)
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED, "v: head size V = %lld, wanted %d",
                         (long long)plan->V, HEAD_SIZE);
    if (plan->g.dtype != FKDA_BF16)
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED, "g: dtype %s, wanted bfloat16",
                         fkda_dtype_name(plan->g.dtype));
    if (plan->checkpoint_state.data && plan->num_checkpoints > 0)
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                         "checkpoint_state: %lld checkpoints, wanted none",
                         (long long)plan->num_checkpoints);
    if (plan->T > INT32_MAX - CHUNK_TOKENS) /* rows are counted in 32 bits */
        return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED, "q: T = %lld tokens, wanted at most %d",
                         (long long)plan->T, INT32_MAX - CHUNK_TOKENS);
    return FKDA_OK;
}

/* Inputs come by tensor maps, out is written 16 bytes at a time. */
static fkda_status check_rows(const struct fkda_plan *plan, struct fkda_reason reason)
{
    const struct {
        const char *name;
        const struct fkda_view *view;
        int64_t heads;
    } tensors[] = {
        {"q", &plan->q, plan->H},  {"k", &plan->k, plan->H},      {"v", &plan->v, plan->HV},
        {"g", &plan->g, plan->HV}, {"out", &plan->out, plan->HV},
    };
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        const struct fkda_view *view = tensors[i].view;
        const int64_t item = (int64_t)fkda_dtype_bytes(view->dtype);
        const int64_t sizes[] = {plan->B, plan->T, tensors[i].heads};
        const int64_t strides[] = {view->stride_b, view->stride_t, view->stride_h};
        if ((uintptr_t)view->data % ROW_BYTES)
            return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                             "%s: data at %p, wanted a multiple of %d bytes", tensors[i].name,
                             view->data, ROW_BYTES);
        for (int d = 0; d < 3; d++) {
            if (sizes[d] <= 1)
                continue;
            if (strides[d] * item % ROW_BYTES || strides[d] == 0 ||
                strides[d] >= MAX_STRIDE_BYTES / item)
                return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                                 "%s: stride %lld of dimension %d, wanted a multiple of %lld from "
                                 "there to below %lld",
                                 tensors[i].name, (long long)strides[d], d,
                                 (long long)(ROW_BYTES / item),
                                 (long long)(MAX_STRIDE_BYTES / item));
        }
    }
    return FKDA_OK;
}

fkda_status fkda_cuda_check_sm90(const struct fkda_plan *plan,
                                 const struct fkda_cuda_device *device, struct fkda_reason reason)
{
    fkda_status status = fkda_cuda_check_sm90_device(device, reason);
    if (status == FKDA_OK)
        status = check_kind(plan, reason);
    if (status == FKDA_OK)
        status = check_rows(plan, reason);
    return status;
}

fkda_status fkda_cuda_choose_path(const struct fkda_plan *plan,
                                  const struct fkda_cuda_device *device, enum fkda_cuda_path wish,
                                  enum fkda_cuda_path *path, struct fkda_reason note,
                                  struct fkda_reason reason)
{
    char why[FKDA_REASON_BYTES];
    fkda_fail(note, FKDA_OK, "%s", "");
    *path = FKDA_CUDA_PATH_SM80;
    switch (wish) {
    case FKDA_CUDA_PATH_SM80:
        return fkda_fail(note, FKDA_OK, "FLASH_KDA_CUDA_PATH: sm80");
    case FKDA_CUDA_PATH_SM90:
        if (fkda_cuda_check_sm90(plan, device, (struct fkda_reason){why, sizeof why}) != FKDA_OK)
            return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED, "FLASH_KDA_CUDA_PATH: sm90: %s", why);
        *path = FKDA_CUDA_PATH_SM90;
        return FKDA_OK;
    case FKDA_CUDA_PATH_AUTO:
        break;
    }
    const int64_t chains = plan->N * plan->HV;
    if (fkda_cuda_check_sm90(plan, device, note) != FKDA_OK)
        return FKDA_OK;
    if (chains * MIN_SMS < (int64_t)MIN_CHAINS * device->num_sms)
        return fkda_fail(note, FKDA_OK, "%lld sequences of %lld value heads, too few for %d SMs",
                         (long long)plan->N, (long long)plan->HV, device->num_sms);
    *path = FKDA_CUDA_PATH_SM90;
    return FKDA_OK;
}
