/* kernel_loader.c: see kernel_loader.h. */
#include "cuda/kernel_loader.h"

cudaError_t fkda_cuda_load_relaxed(fkda_kernel_loader *load, void *context)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess)
        return error;
    error = load(context);
    const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
    return error == cudaSuccess ? restored : error;
}

cudaError_t fkda_cuda_load_once(_Atomic uint64_t *ready, int device, fkda_kernel_loader *load,
                                void *context)
{
    const uint64_t bit = device < 64 ? (uint64_t)1 << device : 0;
    if (atomic_load_explicit(ready, memory_order_acquire) & bit)
        return cudaSuccess;
    const cudaError_t error = fkda_cuda_load_relaxed(load, context);
    if (error == cudaSuccess)
        atomic_fetch_or_explicit(ready, bit, memory_order_release);
    return error;
}

cudaError_t fkda_cuda_launch_dependent(const void *kernel, unsigned blocks, unsigned threads,
                                       size_t shared_bytes, void **params, cudaStream_t stream)
{
    cudaLaunchAttribute dependent = {.id = cudaLaunchAttributeProgrammaticStreamSerialization,
                                     .val.programmaticStreamSerializationAllowed = 1};
    const cudaLaunchConfig_t config = {
        .gridDim = {blocks, 1, 1},
        .blockDim = {threads, 1, 1},
        .dynamicSmemBytes = shared_bytes,
        .stream = stream,
        .attrs = &dependent,
        .numAttrs = 1,
    };
    return cudaLaunchKernelExC(&config, kernel, params);
}
