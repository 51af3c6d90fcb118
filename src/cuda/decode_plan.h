/* decode_plan.h: a plan becomes the arguments of the decode kernels. Plain C without the CUDA
 * runtime, so that it is built, and tested, everywhere. */
#ifndef FKDA_DECODE_PLAN_H
#define FKDA_DECODE_PLAN_H

#include "core/plan.h"
#include "cuda/decode_args.h"

/* Fills everything, or says which argument CUDA does not take. */
fkda_status fkda_cuda_plan_decode(const struct fkda_plan *plan, struct fkda_decode_args *args,
                                  struct fkda_reason reason);

#endif
