/* cuda_launch.h: the launches of the forward's two paths and of decode, in plain C. */
#ifndef FKDA_CUDA_LAUNCH_H
#define FKDA_CUDA_LAUNCH_H

#include <cuda_runtime_api.h>

#include "cuda/decode_args.h"
#include "cuda/segments.h"
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

/* The same for the fused kernels. launch_sm90.c is there where FKDA_CUDA_HAVE_SM90 is defined. */
cudaError_t fkda_cuda_load_sm90(int device);

/* What cuda_paths.c lets pass; loaded before. Queues one kernel, or three for segments, whose
 * arrays have been placed in the workspace; `device` is the current one. */
cudaError_t fkda_cuda_launch_sm90(const struct fkda_prepare_args *prepare,
                                  const struct fkda_recurrence_args *recurrence,
                                  const struct fkda_segments *segments, int device, int num_sms,
                                  cudaStream_t stream);

/* `device` is the current one. Queues the kernel on the stream; never waits. Its blocks may be
 * scheduled while the kernel ahead of it drains, and wait for its end before they read anything. */
cudaError_t fkda_cuda_launch_decode(const struct fkda_decode_args *args, int device,
                                    cudaStream_t stream);

#endif
