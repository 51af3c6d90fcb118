/* global_access.cuh: accesses to global memory that pass by the L1 cache, for data that is read
 * once and written once. Volatile, so that they are issued in the order of the code. */
#ifndef FKDA_PTX_GLOBAL_ACCESS_CUH
#define FKDA_PTX_GLOBAL_ACCESS_CUH

#include <stdint.h>

static __device__ __forceinline__ uint4 ld_global_stream_u32x4(const void *p)
{
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(p)
                 : "memory");
    return x;
}

static __device__ __forceinline__ uint2 ld_global_stream_u32x2(const void *p)
{
    uint2 x;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];"
                 : "=r"(x.x), "=r"(x.y)
                 : "l"(p)
                 : "memory");
    return x;
}

/* 16 bytes at once, which the compiler does not make of every assignment. */
static __device__ __forceinline__ void st_global_u32x4(void *p, uint4 x)
{
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}

#endif
