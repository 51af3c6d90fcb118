/* cuda_backend.c: forward and decode on a device: guard, kernels, launches, and what the runtime's
 * errors mean.
 *
 * The runtime is linked statically and finds the driver when it is first called, so that a library
 * with CUDA kernels loads on any machine.
 */
#include <stdio.h>

#include "cuda/cuda_backend.h"
#include "cuda/cuda_launch.h"
#include "cuda/cuda_paths.h"
#include "cuda/cuda_plan.h"
#include "cuda/decode_plan.h"
#include "cuda/segment_plan.h"

/* ---- Errors ---------------------------------------------------------------------------------- */

struct version_text {
    char text[24];
};

static struct version_text format_version(int version)
{
    struct version_text shown;
    snprintf(shown.text, sizeof shown.text, "%d.%d", version / 1000, version % 1000 / 10);
    return shown;
}

/* Why no device can be used at all; NULL: that is not what `error` says. */
static const char *explain_absence(cudaError_t error, char *text, size_t bytes)
{
    int driver = 0;
    switch (error) {
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
        if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
            snprintf(text, bytes, "no NVIDIA driver on this machine");
        else
            snprintf(text, bytes, "the driver is for CUDA %s, wanted one for %s or later",
                     format_version(driver).text, format_version(CUDART_VERSION).text);
        return text;
    case cudaErrorNoDevice:
        snprintf(text, bytes, "the driver finds no device");
        return text;
    default:
        return NULL;
    }
}

static fkda_status fail_no_kernels(struct fkda_reason reason, int device)
{
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return fkda_fail(reason, FKDA_ERROR_UNSUPPORTED,
                     "device: cuda:%d has compute capability %d.%d, this build has kernels for %s",
                     device, major, minor, FKDA_CUDA_ARCHS);
}

/* The runtime remembers an error until it is asked: asked here, so the next call starts clean. */
static fkda_status fail_cuda(struct fkda_reason reason, cudaError_t error, int device)
{
    char text[96];
    int count = 0;
    fkda_status status;
    switch (error) {
    case cudaErrorInvalidDevice:
        if (cudaGetDeviceCount(&count) != cudaSuccess)
            count = 0;
        status = fkda_fail(reason, FKDA_ERROR_INVALID_ARGUMENT,
                           "device_index: %d, wanted below %d (devices found)", device, count);
        break;
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorUnsupportedPtxVersion:
        status = fail_no_kernels(reason, device);
        break;
    default:
        if (explain_absence(error, text, sizeof text))
            status = fkda_fail(reason, FKDA_ERROR_DEVICE, "device: cuda, %s", text);
        else
            status = fkda_fail(reason, FKDA_ERROR_DEVICE, "device: cuda:%d, %s (%s)", device,
                               cudaGetErrorString(error), cudaGetErrorName(error));
    }
    cudaGetLastError();
    return status;
}

/* ---- Device ---------------------------------------------------------------------------------- */

/* Makes a device the current one; *before is the one that leave_device brings back. */
static fkda_status enter_device(int device, int *before, struct fkda_reason reason)
{
    cudaError_t error = cudaGetDevice(before);
    if (error == cudaSuccess && *before != device)
        error = cudaSetDevice(device);
    return error == cudaSuccess ? FKDA_OK : fail_cuda(reason, error, device);
}

/* `status` is what has happened meanwhile. */
static fkda_status leave_device(int device, int before, fkda_status status,
                                struct fkda_reason reason)
{
    const cudaError_t error = before == device ? cudaSuccess : cudaSetDevice(before);
    return error == cudaSuccess || status != FKDA_OK ? status : fail_cuda(reason, error, before);
}

/* ---- Forward --------------------------------------------------------------------------------- */

/* What is enough for either path, on any device. */
fkda_status fkda_cuda_workspace_bytes(const struct fkda_plan *plan, size_t *bytes,
                                      struct fkda_reason reason)
{
    struct fkda_cuda_work work;
    fkda_status status = fkda_cuda_plan_forward(plan, &work, reason);
    if (status != FKDA_OK)
        return status;
    const size_t split = fkda_cuda_most_segment_bytes(plan->T, plan->N, plan->HV, plan->varlen);
    *bytes = split > work.workspace_bytes ? split : work.workspace_bytes;
    return FKDA_OK;
}

static fkda_status check_workspace(const fkda_args *args, size_t bytes, struct fkda_reason reason)
{
    if (bytes <= (args->workspace ? args->workspace_bytes : 0))
        return FKDA_OK;
    if (args->report)
        args->report->workspace_bytes = bytes; /* what to come back with */
    if (!args->workspace)
        return fkda_fail(reason, FKDA_ERROR_WORKSPACE,
                         "workspace: NULL, wanted %zu bytes of device memory (on CUDA the library "
                         "allocates nothing)",
                         bytes);
    return fkda_fail(reason, FKDA_ERROR_WORKSPACE, "workspace_bytes: %zu, wanted at least %zu",
                     args->workspace_bytes, bytes);
}

#ifdef FKDA_CUDA_HAVE_SM90
#define SM90_BUILT true
#else
#define SM90_BUILT false
#endif

/* What the choice of a path looks at. Leaves no error behind. */
static cudaError_t ask_device(int device, struct fkda_cuda_device *facts)
{
    const struct {
        enum cudaDeviceAttr attribute;
        int *value;
    } questions[] = {
        {cudaDevAttrComputeCapabilityMajor, &facts->major},
        {cudaDevAttrComputeCapabilityMinor, &facts->minor},
        {cudaDevAttrMultiProcessorCount, &facts->num_sms},
    };
    cudaError_t error = cudaSuccess;
    facts->sm90_built = SM90_BUILT;
    for (size_t i = 0; i < sizeof questions / sizeof questions[0] && error == cudaSuccess; i++)
        error = cudaDeviceGetAttribute(questions[i].value, questions[i].attribute, device);
    if (error != cudaSuccess)
        cudaGetLastError();
    return error;
}

static cudaError_t launch_sm80(struct fkda_cuda_work *work, int device, int num_sms,
                               cudaStream_t stream)
{
    struct fkda_recurrence_args *recurrence = &work->recurrence;
    recurrence->slices = fkda_cuda_choose_slices(
        recurrence->V, (int64_t)recurrence->sequences.N * recurrence->HV, num_sms);
    cudaError_t error = fkda_cuda_load_sm80(&work->prepare, recurrence, device);
    if (error == cudaSuccess)
        error = fkda_cuda_launch_sm80(&work->prepare, recurrence, work->tiles, stream);
    return error;
}

static cudaError_t launch_sm90(const struct fkda_cuda_work *work,
                               const struct fkda_segments *segments, int device, int num_sms,
                               cudaStream_t stream)
{
#ifdef FKDA_CUDA_HAVE_SM90
    cudaError_t error = fkda_cuda_load_sm90(device);
    if (error == cudaSuccess)
        error = fkda_cuda_launch_sm90(&work->prepare, &work->recurrence, segments, device, num_sms,
                                      stream);
    return error;
#else
    (void)work, (void)segments, (void)device, (void)num_sms, (void)stream;
    return cudaErrorNoKernelImageForDevice; /* cuda_paths.c never chooses it */
#endif
}

static void name_kernels(const struct fkda_plan *plan, const struct fkda_cuda_work *work,
                         enum fkda_cuda_path path, const struct fkda_segments *segments,
                         fkda_report *report)
{
    static const char *const gates[] = {"bounded", "softplus", "activated"};
    char *const kernel = report->kernel;
    if (plan->N == 0)
        snprintf(kernel, sizeof report->kernel, "cuda/none");
    else if (path == FKDA_CUDA_PATH_SM90)
        snprintf(kernel, sizeof report->kernel, "cuda/sm90/%s%s_%s",
                 segments->pairs ? "pairs" : "forward", segments->chunks ? "+combine+join" : "",
                 gates[plan->gate]);
    else
        snprintf(kernel, sizeof report->kernel, "cuda/sm80/prepare_%s+recurrence_%d",
                 gates[plan->gate], (int)(plan->V / 16 / work->recurrence.slices));
}

/* Queues the kernels of that path, with the device current meanwhile. */
static fkda_status launch(struct fkda_cuda_work *work, enum fkda_cuda_path path,
                          const struct fkda_segments *segments, int device, int num_sms,
                          cudaStream_t stream, struct fkda_reason reason)
{
    int before = 0;
    fkda_status status = enter_device(device, &before, reason);
    if (status != FKDA_OK)
        return status;
    const cudaError_t error = path == FKDA_CUDA_PATH_SM90
                                  ? launch_sm90(work, segments, device, num_sms, stream)
                                  : launch_sm80(work, device, num_sms, stream);
    if (error != cudaSuccess)
        status = fail_cuda(reason, error, device);
    return leave_device(device, before, status, reason);
}

fkda_status fkda_cuda_forward(const fkda_args *args, const struct fkda_plan *plan,
                              struct fkda_reason reason)
{
    struct fkda_cuda_work work;
    struct fkda_cuda_device facts;
    fkda_report report = {.num_tokens = plan->num_tokens};
    enum fkda_cuda_path wish, path = FKDA_CUDA_PATH_SM80;
    struct fkda_segments segments = {0};
    fkda_status status = fkda_cuda_plan_forward(plan, &work, reason);
    if (status == FKDA_OK)
        status = fkda_read_cuda_path(&wish, reason);
    if (status != FKDA_OK)
        return status;
    const cudaError_t error = ask_device(args->device_index, &facts);
    if (error == cudaSuccess)
        status = fkda_cuda_choose_path(
            plan, &facts, wish, &path, &segments,
            (struct fkda_reason){report.note, args->report ? sizeof report.note : 0}, reason);
    if (status == FKDA_OK) {
        report.workspace_bytes = path == FKDA_CUDA_PATH_SM80
                                     ? work.workspace_bytes
                                     : fkda_cuda_segment_bytes(&segments, plan->HV);
        status = check_workspace(args, report.workspace_bytes, reason);
    }
    if (status == FKDA_OK && error != cudaSuccess) /* a wrong argument is named before */
        status = fail_cuda(reason, error, args->device_index);
    if (status != FKDA_OK)
        return status;
    if (report.workspace_bytes && path == FKDA_CUDA_PATH_SM80)
        fkda_cuda_place_images(&work, args->workspace);
    else if (report.workspace_bytes)
        fkda_cuda_place_segments(&segments, plan->HV, args->workspace);
    if (plan->N > 0)
        status =
            launch(&work, path, &segments, args->device_index, facts.num_sms, args->stream, reason);
    if (status == FKDA_OK && args->report) {
        name_kernels(plan, &work, path, &segments, &report);
        *args->report = report;
    }
    return status;
}

/* ---- Decode ---------------------------------------------------------------------------------- */

fkda_status fkda_cuda_decode(const fkda_args *args, const struct fkda_plan *plan,
                             struct fkda_reason reason)
{
    struct fkda_decode_args kernel_args;
    const int device = args->device_index;
    int before = 0;
    fkda_status status = fkda_cuda_plan_decode(plan, &kernel_args, reason);
    if (status == FKDA_OK)
        status = enter_device(device, &before, reason);
    if (status != FKDA_OK)
        return status;
    const cudaError_t error = fkda_cuda_launch_decode(&kernel_args, device, args->stream);
    if (error != cudaSuccess)
        status = fail_cuda(reason, error, device);
    status = leave_device(device, before, status, reason);
    if (status == FKDA_OK && args->report) {
        *args->report = (fkda_report){.num_tokens = plan->num_tokens};
        snprintf(args->report->kernel, sizeof args->report->kernel, "cuda/sm80/decode_%s%s",
                 kernel_args.state.is_f32 ? "f32" : "bf16",
                 kernel_args.slab    ? "_slab"
                 : kernel_args.plain ? ""
                                     : "_any");
    }
    return status;
}

/* ---- Information ----------------------------------------------------------------------------- */

/* What a call may get at best on device 0. */
static void describe_paths(fkda_info *info, enum fkda_cuda_path wish)
{
    struct fkda_cuda_device facts;
    enum fkda_cuda_path path = FKDA_CUDA_PATH_SM80;
    if (ask_device(0, &facts) != cudaSuccess)
        return;
    if (wish == FKDA_CUDA_PATH_SM80)
        snprintf(info->cuda_note, sizeof info->cuda_note, "FLASH_KDA_CUDA_PATH: sm80");
    else if (fkda_cuda_check_sm90_device(
                 &facts, (struct fkda_reason){info->cuda_note, sizeof info->cuda_note}) == FKDA_OK)
        path = FKDA_CUDA_PATH_SM90;
    snprintf(info->cuda_path, sizeof info->cuda_path, "%s", fkda_cuda_path_name(path));
}

void fkda_cuda_get_info(fkda_info *info, enum fkda_cuda_path wish)
{
    struct cudaDeviceProp properties;
    char absence[96];
    int count = 0;
    info->num_devices = 0;
    snprintf(info->cuda_archs, sizeof info->cuda_archs, "%s", FKDA_CUDA_ARCHS);
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count == 0)
        error = cudaErrorNoDevice;
    if (error == cudaSuccess)
        error = cudaGetDeviceProperties(&properties, 0);
    if (error == cudaSuccess) {
        info->num_devices = count;
        snprintf(info->cuda_status, sizeof info->cuda_status, "%.127s", properties.name);
        describe_paths(info, wish);
    } else if (explain_absence(error, absence, sizeof absence)) {
        snprintf(info->cuda_status, sizeof info->cuda_status, "%s", absence);
    } else {
        snprintf(info->cuda_status, sizeof info->cuda_status, "%s (%s)", cudaGetErrorString(error),
                 cudaGetErrorName(error));
    }
    cudaGetLastError();
}
