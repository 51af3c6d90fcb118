/* cuda_paths.c: what path sm90 takes, and when it is the faster one; see cuda_paths.h. */
#include "cuda/cuda_paths.h"
#include "cuda/segment_plan.h"

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

/* How path sm90 takes the call, and the time that is predicted for it. */
static struct fkda_segments plan_segments(const struct fkda_plan *plan,
                                          const struct fkda_cuda_device *device,
                                          enum fkda_cuda_path wish, double *us)
{
    const struct fkda_segment_costs *costs = &fkda_segment_costs_sm90;
    const int64_t T = plan->varlen ? plan->T : plan->B * plan->T;
    if (wish == FKDA_CUDA_PATH_SM90_FORWARD)
        return (struct fkda_segments){0};
    const struct fkda_cut cut = fkda_cuda_choose_cut(T, plan->N, plan->HV, device->num_sms, costs);
    *us = plan->N == 0
              ? 0.0
              : fkda_cuda_predict_sm90_us(T, plan->N, plan->HV, device->num_sms, cut, costs);
    struct fkda_segments segments = fkda_cuda_plan_segments(plan->T, plan->N, plan->varlen, cut);
    segments.pairs = cut.chunks || fkda_cuda_has_pairs(plan->N * plan->HV, device->num_sms);
    return segments;
}

fkda_status fkda_cuda_choose_path(const struct fkda_plan *plan,
                                  const struct fkda_cuda_device *device, enum fkda_cuda_path wish,
                                  enum fkda_cuda_path *path, struct fkda_segments *segments,
                                  struct fkda_reason note, struct fkda_reason reason)
{
    char why[FKDA_REASON_BYTES];
    double sm90_us = 0.0;
    fkda_fail(note, FKDA_OK, "%s", "");
    *path = FKDA_CUDA_PATH_SM80;
    if (wish == FKDA_CUDA_PATH_SM80)
        return fkda_fail(note, FKDA_OK, "FLASH_KDA_CUDA_PATH: sm80");
    if (fkda_cuda_check_sm90(plan, device, (struct fkda_reason){why, sizeof why}) != FKDA_OK)
        return wish == FKDA_CUDA_PATH_AUTO
                   ? fkda_fail(note, FKDA_OK, "%s", why)
                   : fkda_fail(reason, FKDA_ERROR_UNSUPPORTED, "FLASH_KDA_CUDA_PATH: %s: %s",
                               fkda_cuda_path_name(wish), why);
    *segments = plan_segments(plan, device, wish, &sm90_us);
    if (wish == FKDA_CUDA_PATH_AUTO && plan->N > 0) {
        const int64_t T = plan->varlen ? plan->T : plan->B * plan->T;
        const double sm80_us = fkda_cuda_predict_sm80_us(T, plan->N, plan->HV, device->num_sms);
        if (sm80_us < sm90_us)
            return fkda_fail(note, FKDA_OK,
                             "sm90 is the slower path for %lld tokens, %lld sequences of %lld "
                             "value heads",
                             (long long)T, (long long)plan->N, (long long)plan->HV);
    }
    *path = FKDA_CUDA_PATH_SM90;
    return FKDA_OK;
}
