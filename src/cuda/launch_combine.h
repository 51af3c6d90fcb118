/* launch_combine.h: the combine step of a split forward, in plain C. */
#ifndef FKDA_CUDA_LAUNCH_COMBINE_H
#define FKDA_CUDA_LAUNCH_COMBINE_H

#include <cuda_runtime_api.h>

#include "cuda/combine_args.h"

/* Makes sure that the kernel which these arguments choose is on the device, the current one. Does
 * something once per kernel and device, also while a graph is captured. */
cudaError_t fkda_cuda_load_combine(const struct fkda_combine_args *args, int device);

/* Queues the kernel on the stream; never waits. */
cudaError_t fkda_cuda_launch_combine(const struct fkda_combine_args *args, cudaStream_t stream);

#endif
