/* launch_sm90.c: tensor maps and grid of the fused Hopper forward. In builds with 90a only. */
#include <stdatomic.h>

#include "cuda/cuda_launch.h"
#include "cuda/forward_sm90.h"

void fkda_forward_sm90(struct fkda_forward_sm90_args args);
void fkda_summaries_sm90(struct fkda_forward_sm90_args args);
void fkda_segments_sm90(struct fkda_forward_sm90_args args);

enum { BOX_TOKENS = 32, BOX_CHANNELS = 64, ITEM_BYTES = 2 };

/* One entry of the driver, which this library is not linked with. */
typedef CUresult encode_function(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                 const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                 const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static _Atomic(encode_function *) encoder;

static cudaError_t find_encoder(void)
{
    void *entry = NULL;
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                               12000, cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess)
        return error;
    if (result != cudaDriverEntryPointSuccess)
        return cudaErrorNotSupported;
    atomic_store_explicit(&encoder, (encode_function *)entry, memory_order_release);
    return cudaSuccess;
}

static cudaError_t load(void)
{
    const void *const kernels[] = {(const void *)fkda_forward_sm90,
                                   (const void *)fkda_summaries_sm90,
                                   (const void *)fkda_segments_sm90};
    cudaError_t error = find_encoder();
    for (int i = 0; i < 3 && error == cudaSuccess; i++) /* brings the code to the device, too */
        error = cudaFuncSetAttribute(kernels[i], cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     FORWARD_SM90_SHARED_BYTES);
    return error;
}

cudaError_t fkda_cuda_load_sm90(int device)
{
    /* A bit for each device, as in launch_sm80.c. */
    static _Atomic uint64_t loaded;
    const uint64_t bit = device < 64 ? (uint64_t)1 << device : 0;
    if (atomic_load_explicit(&loaded, memory_order_acquire) & bit)
        return cudaSuccess;

    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess)
        return error;
    error = load();
    const cudaError_t restored = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error == cudaSuccess)
        error = restored;
    if (error == cudaSuccess)
        atomic_fetch_or_explicit(&loaded, bit, memory_order_release);
    return error;
}

/* view: [B, T, heads, 128] bf16, rows 16-byte aligned. */
static cudaError_t make_map(encode_function *encode, CUtensorMap *map,
                            const struct fkda_cuda_view *view, int64_t heads, int64_t T, int64_t B)
{
    const cuuint64_t sizes[4] = {TILE_K, (cuuint64_t)heads, (cuuint64_t)T, (cuuint64_t)B};
    const cuuint64_t strides[3] = {
        /* a dimension of one has no stride that counts, and may come with any */
        ITEM_BYTES * (cuuint64_t)(heads > 1 ? view->stride_h : TILE_K),
        ITEM_BYTES * (cuuint64_t)(T > 1 ? view->stride_t : TILE_K),
        ITEM_BYTES * (cuuint64_t)(B > 1 ? view->stride_b : TILE_K),
    };
    const cuuint32_t box[4] = {BOX_CHANNELS, 1, BOX_TOKENS, 1}, steps[4] = {1, 1, 1, 1};
    const CUresult result =
        encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)(uintptr_t)view->data, sizes,
               strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t fkda_cuda_launch_sm90(const struct fkda_prepare_args *prepare,
                                  const struct fkda_recurrence_args *recurrence,
                                  cudaStream_t stream)
{
    /* segments of 0 chunks: sequences are whole */
    struct fkda_forward_sm90_args args = {.prepare = *prepare, .recurrence = *recurrence};
    const int64_t HV = prepare->HV, H = HV / prepare->heads_per_key;
    const int64_t T = prepare->sequences.T;
    const int64_t B = prepare->sequences.cu_seqlens.data ? 1 : prepare->sequences.N;
    encode_function *const encode = atomic_load_explicit(&encoder, memory_order_acquire);
    cudaError_t error = cudaSuccess;
    if (T > 0) { /* else every sequence is empty, and nobody reads the maps */
        error = make_map(encode, &args.q, &prepare->q, H, T, B);
        if (error == cudaSuccess)
            error = make_map(encode, &args.k, &prepare->k, H, T, B);
        if (error == cudaSuccess)
            error = make_map(encode, &args.v, &recurrence->v, HV, T, B);
        if (error == cudaSuccess)
            error = make_map(encode, &args.g, &prepare->g, HV, T, B);
    }
    if (error != cudaSuccess)
        return error;
    void *params[] = {&args};
    const dim3 grid = {(unsigned)recurrence->sequences.N * (unsigned)HV, 1, 1};
    const dim3 block = {FORWARD_SM90_THREADS, 1, 1};
    return cudaLaunchKernel((const void *)fkda_forward_sm90, grid, block, params,
                            FORWARD_SM90_SHARED_BYTES, stream);
}
