/* global_access.cuh: accesses to global memory with a word on the caches, for data that is read
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

/* Where the compiler cannot see that a pointer is one to global memory. */
static __device__ __forceinline__ float2 ld_global_f32x2(const float *p)
{
    float2 x;
    asm volatile("ld.global.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(p) : "memory");
    return x;
}

static __device__ __forceinline__ uint32_t ld_global_u32(const void *p)
{
    uint32_t x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

static __device__ __forceinline__ uint32_t ld_global_u16(const void *p)
{
    uint16_t x;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(p) : "memory");
    return x;
}

/* 16 bytes at once, which the compiler does not make of every assignment. */
static __device__ __forceinline__ void st_global_u32x4(void *p, uint4 x)
{
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}

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

/* Asks for a block of bytes, multiples of 16, to be brought to L2. */
static __device__ __forceinline__ void prefetch_block_l2(const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

#endif
