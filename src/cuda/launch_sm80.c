/* launch_sm80.c: grids of the portable forward. The kernels' host symbols stand for them here. */
#include "cuda/cuda_launch.h"
#include "flash_kda.h"

void fkda_prepare_bounded_sm80(struct fkda_prepare_args args);
void fkda_prepare_softplus_sm80(struct fkda_prepare_args args);
void fkda_prepare_activated_sm80(struct fkda_prepare_args args);
void fkda_recurrence_1_sm80(struct fkda_recurrence_args args);
void fkda_recurrence_2_sm80(struct fkda_recurrence_args args);
void fkda_recurrence_4_sm80(struct fkda_recurrence_args args);
void fkda_recurrence_8_sm80(struct fkda_recurrence_args args);

enum { PREPARE_THREADS = 128, STAGES = 4, VALUE_BYTES = 512 };

static const void *prepare_kernel(int gate)
{
    return gate == FKDA_GATE_BOUNDED    ? (const void *)fkda_prepare_bounded_sm80
           : gate == FKDA_GATE_SOFTPLUS ? (const void *)fkda_prepare_softplus_sm80
                                        : (const void *)fkda_prepare_activated_sm80;
}

static const void *recurrence_kernel(unsigned warps)
{
    return warps == 1   ? (const void *)fkda_recurrence_1_sm80
           : warps == 2 ? (const void *)fkda_recurrence_2_sm80
           : warps == 4 ? (const void *)fkda_recurrence_4_sm80
                        : (const void *)fkda_recurrence_8_sm80;
}

cudaError_t fkda_cuda_launch_sm80(const struct fkda_prepare_args *prepare,
                                  const struct fkda_recurrence_args *recurrence, int64_t tiles,
                                  cudaStream_t stream)
{
    struct fkda_prepare_args p = *prepare;
    struct fkda_recurrence_args r = *recurrence;
    void *prepare_params[] = {&p}, *recurrence_params[] = {&r};
    cudaError_t error = cudaSuccess;

    if (tiles > 0) {
        const dim3 grid = {(unsigned)(tiles * p.HV), 1, 1}, block = {PREPARE_THREADS, 1, 1};
        error = cudaLaunchKernel(prepare_kernel(p.gate), grid, block, prepare_params, 0, stream);
        if (error != cudaSuccess)
            return error;
    }
    const unsigned warps = (unsigned)(r.V / 16 / r.slices);
    const size_t ring_bytes = STAGES * (IMAGE_BYTES + VALUE_BYTES * (size_t)warps);
    error = cudaFuncSetAttribute(recurrence_kernel(warps),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, (int)ring_bytes);
    if (error != cudaSuccess)
        return error;
    const dim3 grid = {(unsigned)(r.sequences.N * r.HV * r.slices), 1, 1};
    const dim3 block = {32 * warps, 1, 1};
    return cudaLaunchKernel(recurrence_kernel(warps), grid, block, recurrence_params, ring_bytes,
                            stream);
}
