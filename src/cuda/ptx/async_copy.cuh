/* async_copy.cuh: cp.async of sm_80, global to shared memory. */
#ifndef FKDA_PTX_ASYNC_COPY_CUH
#define FKDA_PTX_ASYNC_COPY_CUH

#include <stdint.h>

static __device__ __forceinline__ void cp_async_16(void *shared, const void *global)
{
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global)
                 : "memory");
}

static __device__ __forceinline__ void cp_async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most PENDING of this thread's groups are under way. */
#define cp_async_wait(PENDING) asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory")

#endif
