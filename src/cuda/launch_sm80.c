/* launch_sm80.c: grids of the portable forward. The kernels' host symbols stand for them here. */
#include "cuda/cuda_launch.h"
#include "cuda/kernel_loader.h"
#include "flash_kda.h"

void fkda_prepare_bounded_sm80(struct fkda_prepare_args args);
void fkda_prepare_softplus_sm80(struct fkda_prepare_args args);
void fkda_prepare_activated_sm80(struct fkda_prepare_args args);
void fkda_recurrence_1_sm80(struct fkda_recurrence_args args);
void fkda_recurrence_2_sm80(struct fkda_recurrence_args args);
void fkda_recurrence_4_sm80(struct fkda_recurrence_args args);
void fkda_recurrence_8_sm80(struct fkda_recurrence_args args);

static const void *prepare_kernel(int gate)
{
    return gate == FKDA_GATE_BOUNDED    ? (const void *)fkda_prepare_bounded_sm80
           : gate == FKDA_GATE_SOFTPLUS ? (const void *)fkda_prepare_softplus_sm80
                                        : (const void *)fkda_prepare_activated_sm80;
}

static unsigned warps_of(const struct fkda_recurrence_args *args)
{
    return (unsigned)(args->V / 16 / args->slices);
}

static const void *recurrence_kernel(unsigned warps)
{
    return warps == 1   ? (const void *)fkda_recurrence_1_sm80
           : warps == 2 ? (const void *)fkda_recurrence_2_sm80
           : warps == 4 ? (const void *)fkda_recurrence_4_sm80
                        : (const void *)fkda_recurrence_8_sm80;
}

static size_t ring_bytes(unsigned warps)
{
    return STAGES * (IMAGE_BYTES + VALUE_BYTES * (size_t)warps);
}

struct kernels {
    int gate;
    unsigned warps;
};

static cudaError_t load(void *context)
{
    const struct kernels *const k = context;
    struct cudaFuncAttributes attributes; /* asking for them brings the code to the device */
    cudaError_t error = cudaFuncGetAttributes(&attributes, prepare_kernel(k->gate));
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(recurrence_kernel(k->warps),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     (int)ring_bytes(k->warps));
    return error;
}

cudaError_t fkda_cuda_load_sm80(const struct fkda_prepare_args *prepare,
                                const struct fkda_recurrence_args *recurrence, int device)
{
    static _Atomic uint64_t loaded[3][9];
    struct kernels k = {prepare->gate, warps_of(recurrence)};
    return fkda_cuda_load_once(&loaded[k.gate][k.warps], device, load, &k);
}

cudaError_t fkda_cuda_launch_sm80(const struct fkda_prepare_args *prepare,
                                  const struct fkda_recurrence_args *recurrence, int64_t tiles,
                                  cudaStream_t stream)
{
    struct fkda_prepare_args p = *prepare;
    struct fkda_recurrence_args r = *recurrence;
    void *prepare_params[] = {&p}, *recurrence_params[] = {&r};

    if (r.sequences.N == 0)
        return cudaSuccess; /* no sequence: nothing is written, and cu_seqlens[1] is not there */
    if (tiles > 0) {
        const int64_t images = tiles * p.HV;
        const dim3 grid = {(unsigned)((images + PREPARE_WARPS - 1) / PREPARE_WARPS), 1, 1};
        const dim3 block = {32 * PREPARE_WARPS, 1, 1};
        cudaError_t error =
            cudaLaunchKernel(prepare_kernel(p.gate), grid, block, prepare_params, 0, stream);
        if (error != cudaSuccess)
            return error;
    }
    const unsigned warps = warps_of(&r);
    const dim3 grid = {(unsigned)r.sequences.N * (unsigned)r.HV * (unsigned)r.slices, 1, 1};
    const dim3 block = {32 * warps, 1, 1};
    return cudaLaunchKernel(recurrence_kernel(warps), grid, block, recurrence_params,
                            ring_bytes(warps), stream);
}
