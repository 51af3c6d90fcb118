/* bulk_copy.cuh: copies of whole blocks of bytes by the copy engine (sm_90). Addresses and sizes
 * are multiples of 16 bytes. */
#ifndef FKDA_PTX_BULK_COPY_CUH
#define FKDA_PTX_BULK_COPY_CUH

#include "cuda/ptx/mbarrier.cuh"

/* Counts the bytes on the barrier. */
static __device__ __forceinline__ void bulk_copy(void *shared, const void *global, uint32_t bytes,
                                                 uint64_t *barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

static __device__ __forceinline__ void bulk_prefetch_l2(const void *global, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

#endif
