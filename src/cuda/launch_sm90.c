/* launch_sm90.c: tensor maps and grid of the fused Hopper forward. In builds with 90a only. */
#include <stdatomic.h>

#include "cuda/cuda_launch.h"
#include "cuda/forward_sm90.h"
#include "cuda/kernel_loader.h"
#include "cuda/launch_combine.h"
#include "cuda/segment_plan.h"

void fkda_forward_sm90(struct fkda_forward_sm90_args args);
void fkda_pairs_sm90(struct fkda_forward_sm90_args args);
void fkda_join_sm90(struct fkda_join_args args);

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

static cudaError_t load(void *context)
{
    (void)context;
    const struct {
        const void *kernel;
        int shared_bytes;
    } kernels[] = {
        {(const void *)fkda_forward_sm90, FORWARD_SM90_SHARED_BYTES},
        {(const void *)fkda_pairs_sm90, FORWARD_SM90_SHARED_BYTES},
        {(const void *)fkda_join_sm90, JOIN_SHARED_BYTES},
    };
    cudaError_t error = find_encoder();
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0] && error == cudaSuccess; i++)
        error = cudaFuncSetAttribute(kernels[i].kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     kernels[i].shared_bytes); /* brings the code, too */
    return error;
}

cudaError_t fkda_cuda_load_sm90(int device)
{
    static _Atomic uint64_t loaded;
    return fkda_cuda_load_once(&loaded, device, load, NULL);
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

static cudaError_t make_maps(struct fkda_forward_sm90_args *args)
{
    const struct fkda_prepare_args *p = &args->prepare;
    const int64_t HV = p->HV, H = HV / p->heads_per_key, T = p->sequences.T;
    const int64_t B = p->sequences.cu_seqlens.data ? 1 : p->sequences.N;
    encode_function *const encode = atomic_load_explicit(&encoder, memory_order_acquire);
    if (T == 0) /* every sequence is empty, and nobody reads the maps */
        return cudaSuccess;
    cudaError_t error = make_map(encode, &args->maps[MAP_Q], &p->q, H, T, B);
    if (error == cudaSuccess)
        error = make_map(encode, &args->maps[MAP_K], &p->k, H, T, B);
    if (error == cudaSuccess)
        error = make_map(encode, &args->maps[MAP_V], &args->recurrence.v, HV, T, B);
    if (error == cudaSuccess)
        error = make_map(encode, &args->maps[MAP_G], &p->g, HV, T, B);
    return error;
}

static cudaError_t launch(const void *kernel, int64_t blocks, struct fkda_forward_sm90_args *args,
                          cudaStream_t stream)
{
    void *params[] = {args};
    const dim3 grid = {(unsigned)blocks, 1, 1}, block = {FORWARD_SM90_THREADS, 1, 1};
    return cudaLaunchKernel(kernel, grid, block, params, FORWARD_SM90_SHARED_BYTES, stream);
}

/* A block takes one item or several. */
static cudaError_t launch_forward(struct fkda_forward_sm90_args *args, int64_t items, int per_block,
                                  cudaStream_t stream)
{
    args->items = items;
    args->items_per_block = per_block;
    return launch((const void *)fkda_forward_sm90, (items + per_block - 1) / per_block, args,
                  stream);
}

/* Two blocks take one item. */
static cudaError_t launch_pairs(struct fkda_forward_sm90_args *args, int64_t items,
                                cudaStream_t stream)
{
    args->items = items;
    args->items_per_block = 1;
    return launch((const void *)fkda_pairs_sm90, 2 * items, args, stream);
}

static struct fkda_combine_args combine_args_of(const struct fkda_recurrence_args *r,
                                                const struct fkda_segments *segments, int num_sms)
{
    return (struct fkda_combine_args){
        .segments = *segments,
        .sequences = r->sequences,
        .final_state = r->final_state,
        .state_indices = r->state_indices,
        .num_slots = r->num_slots,
        .HV = r->HV,
        .rows = fkda_cuda_choose_combine_rows((int64_t)r->sequences.N * r->HV, num_sms),
    };
}

static cudaError_t join(const struct fkda_recurrence_args *r, const struct fkda_segments *segments,
                        int num_sms, cudaStream_t stream)
{
    const int64_t images = segments->slots * r->HV;
    const int64_t later = images - (int64_t)r->sequences.N * r->HV; /* those of first ones apart */
    const int shares =
        fkda_cuda_choose_join_shares(later > 0 ? later : images, segments->chunks, num_sms);
    struct fkda_join_args args = {
        .segments = *segments,
        .out = r->out,
        .sequences = r->sequences,
        .state_indices = r->state_indices,
        .num_slots = r->num_slots,
        .scale = r->scale,
        .HV = r->HV,
        .shares = shares,
        .share_chunks = (segments->chunks + shares - 1) / shares,
    };
    void *params[] = {&args};
    return fkda_cuda_launch_dependent((const void *)fkda_join_sm90, (unsigned)(images * shares),
                                      JOIN_THREADS, JOIN_SHARED_BYTES, params, stream);
}

static int64_t average_tokens(const struct fkda_prepare_args *prepare)
{
    const struct fkda_cuda_sequences *s = &prepare->sequences;
    return s->cu_seqlens.data ? s->T / s->N : s->T;
}

cudaError_t fkda_cuda_launch_sm90(const struct fkda_prepare_args *prepare,
                                  const struct fkda_recurrence_args *recurrence,
                                  const struct fkda_segments *segments, int device, int num_sms,
                                  cudaStream_t stream)
{
    struct fkda_forward_sm90_args args = {
        .prepare = *prepare, .recurrence = *recurrence, .segments = *segments};
    const int64_t chains = (int64_t)recurrence->sequences.N * recurrence->HV;
    const int64_t images = segments->slots * recurrence->HV;
    const struct fkda_cuda_sequences *sequences = &recurrence->sequences;
    /* where all blocks run at once their order is nothing */
    args.longest_first = segments->chunks == 0 && sequences->cu_seqlens.data && chains > num_sms &&
                         sequences->N <= ORDERED_SEQUENCES;
    cudaError_t error = make_maps(&args);
    if (error !=
        cudaSuccess) { /* a thread's first call has no context yet, which the driver wants */
        error = cudaSetDevice(device);
        if (error == cudaSuccess)
            error = make_maps(&args);
    }
    if (error != cudaSuccess)
        return error;
    if (segments->chunks == 0 && segments->pairs)
        return launch_pairs(&args, chains, stream);
    if (segments->chunks == 0)
        return launch_forward(&args, chains,
                              fkda_cuda_choose_items(chains, average_tokens(prepare), num_sms,
                                                     &fkda_segment_costs_sm90),
                              stream);
    const struct fkda_combine_args combine = combine_args_of(recurrence, segments, num_sms);
    error = fkda_cuda_load_combine(&combine, device); /* before anything is written */
    if (error == cudaSuccess)
        error = launch_pairs(&args, chains + images, stream);
    if (error == cudaSuccess)
        error = fkda_cuda_launch_combine(&combine, stream);
    if (error == cudaSuccess)
        error = join(recurrence, segments, num_sms, stream);
    return error;
}
