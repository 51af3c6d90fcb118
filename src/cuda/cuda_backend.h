/* cuda_backend.h: the CUDA backend's face: what api.c calls.
 *
 *     fkda_forward -> fkda_validate -> fkda_cuda_forward -> cuda_plan.c -> cuda_paths.c
 *                  -> launch_sm80.c or launch_sm90.c
 *     fkda_decode  -> fkda_validate -> fkda_cuda_decode -> decode_plan.c -> launch_decode.c
 *
 * cuda_backend.c is in builds with CUDA, cuda_absent.c in the others.
 */
#ifndef FKDA_CUDA_BACKEND_H
#define FKDA_CUDA_BACKEND_H

#include "core/checks.h"
#include "core/plan.h"

/* Of device memory, enough for every path. Asks no device: the same on every card, and without
 * one. */
fkda_status fkda_cuda_workspace_bytes(const struct fkda_plan *plan, size_t *bytes,
                                      struct fkda_reason reason);

/* Queues the forward on args->stream of args->device_index and returns: no synchronisation, no
 * allocation, may be captured in a graph. `plan` is that of args. */
fkda_status fkda_cuda_forward(const fkda_args *args, const struct fkda_plan *plan,
                              struct fkda_reason reason);

/* The same for decode, which needs no workspace. */
fkda_status fkda_cuda_decode(const fkda_args *args, const struct fkda_plan *plan,
                             struct fkda_reason reason);

/* Fills the fields about CUDA. Never fails: no driver is an answer too. */
void fkda_cuda_get_info(fkda_info *info, enum fkda_cuda_path wish);

#endif
