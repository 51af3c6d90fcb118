/* launch_decode.c: the one grid of decode. The kernels' host symbols stand for them here. */
#include <stdbool.h>

#include "cuda/cuda_launch.h"
#include "cuda/kernel_loader.h"

void fkda_decode_f32_sm80(struct fkda_decode_args args);
void fkda_decode_bf16_sm80(struct fkda_decode_args args);
void fkda_decode_f32_any_sm80(struct fkda_decode_args args);
void fkda_decode_bf16_any_sm80(struct fkda_decode_args args);
void fkda_decode_f32_slab_sm80(struct fkda_decode_args args);
void fkda_decode_bf16_slab_sm80(struct fkda_decode_args args);

static const void *const kernels[] = {
    (const void *)fkda_decode_bf16_sm80,      (const void *)fkda_decode_f32_sm80,
    (const void *)fkda_decode_bf16_any_sm80,  (const void *)fkda_decode_f32_any_sm80,
    (const void *)fkda_decode_bf16_slab_sm80, (const void *)fkda_decode_f32_slab_sm80,
};

enum { KERNELS = sizeof kernels / sizeof kernels[0], SLAB_KERNELS = 4, DEVICES = 64 };

/* Most blocks of a launch that may begin while the kernel ahead ends: about one for each
 * multiprocessor. With more, those that wait take the room of those that work. */
enum { DEPENDENT_BLOCKS = 128 };

/* Shared memory of a slab kernel. */
static size_t slab_bytes(bool is_f32, int token_slots)
{
    const int rows = is_f32 ? DECODE_SLAB_ROWS_F32 : DECODE_SLAB_ROWS_BF16;
    return DECODE_SLAB_BYTES + (size_t)token_slots * (size_t)(DECODE_TOKEN_BYTES + 4 * rows);
}

/* What is known of a kernel on a device. */
enum { UNKNOWN = 0, LOADED = 1, LOADED_DEPENDENT = 2 };

struct kernel {
    int which, known;
};

/* Asking for the attributes brings the code to the device. Code for sm_90 and later waits for the
 * kernel ahead by itself (dependent_launch.cuh); PTX of an earlier architecture does not. */
static cudaError_t load(void *context)
{
    struct kernel *const k = context;
    struct cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernels[k->which]);
    if (error == cudaSuccess && k->which >= SLAB_KERNELS)
        error = cudaFuncSetAttribute(kernels[k->which], cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     (int)slab_bytes(k->which % 2, DECODE_MOST_TOKENS));
    if (error == cudaSuccess)
        k->known = attributes.ptxVersion >= 90 ? LOADED_DEPENDENT : LOADED;
    return error;
}

/* Loads once per kernel and device. Two threads may both come here first: both load. */
static cudaError_t find_kernel(int which, int device, int *known)
{
    static _Atomic int found[KERNELS][DEVICES];
    _Atomic int *const entry = device < DEVICES ? &found[which][device] : NULL;
    *known = entry ? atomic_load_explicit(entry, memory_order_acquire) : UNKNOWN;
    if (*known != UNKNOWN)
        return cudaSuccess;
    struct kernel k = {which, UNKNOWN};
    const cudaError_t error = fkda_cuda_load_relaxed(load, &k);
    *known = k.known;
    if (error == cudaSuccess && entry)
        atomic_store_explicit(entry, *known, memory_order_release);
    return error;
}

cudaError_t fkda_cuda_launch_decode(const struct fkda_decode_args *args, int device,
                                    cudaStream_t stream)
{
    const int bf16 = args->slab ? SLAB_KERNELS : args->plain ? 0 : 2;
    const int which = bf16 + (args->state.is_f32 ? 1 : 0);
    int known;
    if (args->sequences.N == 0 || args->sequences.T == 0)
        return cudaSuccess; /* no token: nothing is written */
    const cudaError_t error = find_kernel(which, device, &known);
    if (error != cudaSuccess)
        return error;

    struct fkda_decode_args a = *args;
    void *params[] = {&a};
    cudaLaunchAttribute dependent = {.id = cudaLaunchAttributeProgrammaticStreamSerialization,
                                     .val.programmaticStreamSerializationAllowed = 1};
    const unsigned blocks = (unsigned)a.sequences.N * (unsigned)a.HV * (unsigned)a.slices;
    const cudaLaunchConfig_t config = {
        .gridDim = {blocks, 1, 1},
        .blockDim = {32 * DECODE_WARPS, 1, 1},
        .dynamicSmemBytes = a.slab ? slab_bytes(a.state.is_f32, a.token_slots) : 0,
        .stream = stream,
        .attrs = &dependent,
        .numAttrs = known == LOADED_DEPENDENT && !a.slab && blocks <= DEPENDENT_BLOCKS ? 1 : 0,
    };
    return cudaLaunchKernelExC(&config, kernels[which], params);
}
