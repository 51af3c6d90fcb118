/* global_load.cuh: global memory with a word on the caches. */
#ifndef FKDA_PTX_GLOBAL_LOAD_CUH
#define FKDA_PTX_GLOBAL_LOAD_CUH

/* Memory that nobody writes while the kernel runs, read once by this SM. Volatile: it is issued
 * where it stands, long before its first use. */
static __device__ __forceinline__ float2 load_once_f32x2(const float *from)
{
    float2 x;
    asm volatile("ld.global.nc.L1::no_allocate.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x.x), "=f"(x.y)
                 : "l"(from));
    return x;
}

/* Asks for the cache line of an address to be brought to L2. */
static __device__ __forceinline__ void prefetch_l2(const void *from)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

#endif
