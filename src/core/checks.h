/* checks.h: what the files of validation share.
 *
 *     validate.c            options, shapes against each other, the plan
 *     validate_tensors.c    one tensor by itself (dtype, strides, extent), and overlap between them
 *     validate_sequences.c  the contents of cu_seqlens, state_indices, checkpoints, accepted tokens
 *     options.c             environment variables
 *
 * Every check reads, none writes; the first one that fails says argument, value seen, value wanted.
 */
#ifndef FKDA_CHECKS_H
#define FKDA_CHECKS_H

#include "core/plan.h"

/* The tensors of fkda_args in the order in which they are checked. */
enum fkda_argument {
    FKDA_ARG_Q,
    FKDA_ARG_K,
    FKDA_ARG_V,
    FKDA_ARG_G,
    FKDA_ARG_BETA,
    FKDA_ARG_A_LOG,
    FKDA_ARG_DT_BIAS,
    FKDA_ARG_CU_SEQLENS,
    FKDA_ARG_OUT,
    FKDA_ARG_INITIAL_STATE,
    FKDA_ARG_FINAL_STATE,
    FKDA_ARG_STATE_INDICES,
    FKDA_ARG_NUM_ACCEPTED_TOKENS,
    FKDA_ARG_CHECKPOINT_STATE,
    FKDA_ARG_CHECKPOINT_OFFSETS,
    FKDA_ARG_CHECKPOINT_INDPTR,
    FKDA_ARG_COUNT
};

/* Bytes [begin, end) of the caller's memory; begin == end: nothing. */
struct fkda_extent {
    uintptr_t begin, end;
};

struct fkda_check {
    const fkda_args *args;
    enum fkda_call call;
    struct fkda_reason reason;
    const fkda_tensor *tensor[FKDA_ARG_COUNT]; /* NULL: absent */
    struct fkda_extent extent[FKDA_ARG_COUNT];
};

const char *fkda_argument_name(enum fkda_argument which);

/* "[1, 17, 2, 128]" */
struct fkda_shape_text {
    char text[FKDA_MAX_NDIM * 22 + 4];
};
struct fkda_shape_text fkda_format_shape(int ndim, const int64_t *shape);

/* Each tensor by itself; fills check->tensor and check->extent. */
fkda_status fkda_check_tensors(struct fkda_check *check);
/* Outputs against themselves, each other, the inputs and the workspace. Needs the extents. */
fkda_status fkda_check_overlap(const struct fkda_check *check);
/* What the index tensors hold; fills num_tokens and max_sequence_tokens. Needs every view. */
fkda_status fkda_check_sequences(const struct fkda_check *check, struct fkda_plan *plan);

/* options.c: a field that is 0 takes its environment variable, else stays 0 (`*isa` AUTO,
 * `*precision` DEFAULT) or becomes the number of threads the process may use. Fields were validated
 * before. */
fkda_status fkda_resolve_environment(const fkda_args *args, fkda_isa *isa,
                                     fkda_precision *precision, int *num_threads,
                                     struct fkda_reason reason);

/* Kernels of the CUDA forward (src/cuda/cuda_paths.h). */
enum fkda_cuda_path {
    FKDA_CUDA_PATH_AUTO,
    FKDA_CUDA_PATH_SM80,
    FKDA_CUDA_PATH_SM90,
    FKDA_CUDA_PATH_SM90_FORWARD /* sm90, by the kernel `forward` alone */
};

const char *fkda_cuda_path_name(enum fkda_cuda_path path); /* "auto", "sm80", ... */

/* options.c: FLASH_KDA_CUDA_PATH. */
fkda_status fkda_read_cuda_path(enum fkda_cuda_path *path, struct fkda_reason reason);

/* More threads than this are refused: a mistake, and starting them could bring the process down. */
#define FKDA_MAX_THREADS 1024

#define FKDA_MAX_DECODE_TOKENS 16

#endif /* FKDA_CHECKS_H */
