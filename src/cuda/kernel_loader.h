/* kernel_loader.h: kernels brought to a device before their first launch, and started. */
#ifndef FKDA_CUDA_KERNEL_LOADER_H
#define FKDA_CUDA_KERNEL_LOADER_H

#include <stdatomic.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

typedef cudaError_t fkda_kernel_loader(void *context);

/* Calls load(context). Loading may allocate, which a thread that captures in global mode is not
 * allowed to: its mode is relaxed meanwhile. */
cudaError_t fkda_cuda_load_relaxed(fkda_kernel_loader *load, void *context);

/* The same once for each device, of which `ready` holds a bit. Two threads may both come first:
 * they do the same twice. */
cudaError_t fkda_cuda_load_once(_Atomic uint64_t *ready, int device, fkda_kernel_loader *load,
                                void *context);

/* Starts a kernel whose blocks may begin before the one ahead of it on the stream has ended, and
 * wait for that by themselves (dependent_launch.cuh). */
cudaError_t fkda_cuda_launch_dependent(const void *kernel, unsigned blocks, unsigned threads,
                                       size_t shared_bytes, void **params, cudaStream_t stream);

#endif
