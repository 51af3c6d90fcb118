/* cuda_paths.h: which kernels take a call. Plain C without the CUDA runtime, so that it is built,
 * and tested, everywhere.
 *
 *     sm80   prepare and recurrence: every call that cuda_plan.c accepts, on every architecture
 *     sm90   the fused kernels, Hopper alone; takes fewer calls; pairs of blocks, and sequences cut
 *            into segments, when there are fewer chains (a sequence and value head each) than SMs
 */
#ifndef FKDA_CUDA_PATHS_H
#define FKDA_CUDA_PATHS_H

#include "core/checks.h"
#include "cuda/segments.h"

struct fkda_cuda_device {
    int major, minor; /* compute capability */
    int num_sms;
    bool sm90_built; /* this library has the kernels of path sm90 */
};

/* FKDA_OK, or FKDA_ERROR_UNSUPPORTED and why path sm90 takes no call on this device. */
fkda_status fkda_cuda_check_sm90_device(const struct fkda_cuda_device *device,
                                        struct fkda_reason reason);

/* The same for this call; data pointers count by their alignment. */
fkda_status fkda_cuda_check_sm90(const struct fkda_plan *plan,
                                 const struct fkda_cuda_device *device, struct fkda_reason reason);

/* wish: FLASH_KDA_CUDA_PATH. *path: SM80 or SM90. *segments: for path sm90, its arrays not yet
 * placed. `note` takes why that is not the fastest there is, "" where it is. Fails only for a wish
 * that cannot be had. */
fkda_status fkda_cuda_choose_path(const struct fkda_plan *plan,
                                  const struct fkda_cuda_device *device, enum fkda_cuda_path wish,
                                  enum fkda_cuda_path *path, struct fkda_segments *segments,
                                  struct fkda_reason note, struct fkda_reason reason);

#endif
