/* cuda_launch.h: the forward's two launches, in plain C. */
#ifndef FKDA_CUDA_LAUNCH_H
#define FKDA_CUDA_LAUNCH_H

#include <cuda_runtime_api.h>

#include "cuda/tile_image.h"

/* Makes sure that the kernels which these arguments choose are on the device and may use the shared
 * memory they need. Does something once per kernel and device, also while a graph is captured. */
cudaError_t fkda_cuda_load_sm80(const struct fkda_prepare_args *prepare,
                                const struct fkda_recurrence_args *recurrence, int device);

/* `tiles`: images per head in the workspace; `device` is the current one. Queues both kernels on
 * the stream; never waits. */
cudaError_t fkda_cuda_launch_sm80(const struct fkda_prepare_args *prepare,
                                  const struct fkda_recurrence_args *recurrence, int64_t tiles,
                                  cudaStream_t stream);

#endif
