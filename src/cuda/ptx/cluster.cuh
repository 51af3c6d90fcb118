/* cluster.cuh: the shared memory of the other block of a cluster (sm_90). Addresses there are those
 * of the own block's variables, mapped. */
#ifndef FKDA_PTX_CLUSTER_CUH
#define FKDA_PTX_CLUSTER_CUH

#include <stdint.h>

#include "cuda/ptx/mbarrier.cuh"

static __device__ __forceinline__ int cluster_rank(void)
{
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* Where the block of that rank has what this one has at `p`. */
static __device__ __forceinline__ uint32_t cluster_address(const void *p, int rank)
{
    uint32_t at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
    return at;
}

/* All threads of the cluster have come here, and what they wrote before is seen. */
static __device__ __forceinline__ void cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

/* An arrival, ordered behind what the thread has read and written as within its block: to release
 * it to the whole cluster would wait for its stores to global memory. Enough for who has only read,
 * and has what it read, or sends what follows by a copy. */
static __device__ __forceinline__ void cluster_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives, and makes the phase wait for `bytes` of bulk copies too. */
static __device__ __forceinline__ void cluster_arrive_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

/* Copies from this block's shared memory, and counts the bytes on a barrier of the other. */
static __device__ __forceinline__ void cluster_copy(uint32_t to, const void *from, uint32_t bytes,
                                                    uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "r"(shared_address(from)), "r"(bytes), "r"(barrier)
                 : "memory");
}

#endif
