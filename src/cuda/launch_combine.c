/* launch_combine.c: grid of the combine step. The kernels' host symbols stand for them here. */
#include "cuda/launch_combine.h"
#include "cuda/kernel_loader.h"

void fkda_combine_8_sm90(struct fkda_combine_args args);
void fkda_combine_16_sm90(struct fkda_combine_args args);

static const void *combine_kernel(int rows)
{
    return rows == 8 ? (const void *)fkda_combine_8_sm90 : (const void *)fkda_combine_16_sm90;
}

/* context: the rows of a block. Asking for attributes brings the code to the device. */
static cudaError_t load(void *context)
{
    struct cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, combine_kernel(*(const int *)context));
}

cudaError_t fkda_cuda_load_combine(const struct fkda_combine_args *args, int device)
{
    static _Atomic uint64_t loaded[2];
    int rows = args->rows;
    return fkda_cuda_load_once(&loaded[rows == 8], device, load, &rows);
}

cudaError_t fkda_cuda_launch_combine(const struct fkda_combine_args *args, cudaStream_t stream)
{
    struct fkda_combine_args a = *args;
    void *params[] = {&a};
    if (a.sequences.N == 0)
        return cudaSuccess; /* nothing is written, and cu_seqlens[1] is not there */
    const unsigned slabs = (unsigned)(TILE_K / a.rows);
    return fkda_cuda_launch_dependent(combine_kernel(a.rows),
                                      (unsigned)a.sequences.N * (unsigned)a.HV * slabs,
                                      32 * COMBINE_WARPS, 0, params, stream);
}
