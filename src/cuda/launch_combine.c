/* launch_combine.c: grid of the combine step. The kernels' host symbols stand for them here. */
#include <stdatomic.h>

#include "cuda/launch_combine.h"

void fkda_combine_16_sm90(struct fkda_combine_args args);
void fkda_combine_32_sm90(struct fkda_combine_args args);

static const void *combine_kernel(int rows)
{
    return rows == 16 ? (const void *)fkda_combine_16_sm90 : (const void *)fkda_combine_32_sm90;
}

cudaError_t fkda_cuda_load_combine(const struct fkda_combine_args *args, int device)
{
    /* Kernels that are ready, a bit for each device. Two threads may both come here first: they do
     * the same twice. */
    static _Atomic uint64_t loaded[2];
    _Atomic uint64_t *const ready = &loaded[args->rows == 16];
    const uint64_t bit = device < 64 ? (uint64_t)1 << device : 0;
    if (atomic_load_explicit(ready, memory_order_acquire) & bit)
        return cudaSuccess;

    /* Loading may allocate, which a thread that captures in global mode is not allowed to. */
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess)
        return error;
    struct cudaFuncAttributes attributes; /* asking for them brings the code to the device */
    error = cudaFuncGetAttributes(&attributes, combine_kernel(args->rows));
    const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error == cudaSuccess)
        error = restored;
    if (error == cudaSuccess)
        atomic_fetch_or_explicit(ready, bit, memory_order_release);
    return error;
}

cudaError_t fkda_cuda_launch_combine(const struct fkda_combine_args *args, cudaStream_t stream)
{
    struct fkda_combine_args a = *args;
    void *params[] = {&a};
    if (a.sequences.N == 0)
        return cudaSuccess; /* nothing is written, and cu_seqlens[1] is not there */
    const unsigned slabs = (unsigned)(TILE_K / a.rows);
    const dim3 grid = {(unsigned)a.sequences.N * (unsigned)a.HV * slabs, 1, 1};
    const dim3 block = {32 * COMBINE_WARPS, 1, 1};
    return cudaLaunchKernel(combine_kernel(a.rows), grid, block, params, 0, stream);
}
