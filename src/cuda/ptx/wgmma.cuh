/* wgmma.cuh: warpgroup products with B in shared memory and fp32 accumulators.
 *
 * A warpgroup is 4 warps; warp w holds rows 16 w .. 16 w + 15 of A [64, 16] and of D [64, N], each
 * laid out as in mma.cuh. B is named by a descriptor of its place and layout in shared memory.
 */
#ifndef FKDA_PTX_WGMMA_CUH
#define FKDA_PTX_WGMMA_CUH

#include <stdint.h>

enum { WGMMA_SWIZZLE_NONE = 0, WGMMA_SWIZZLE_128 = 1 };

/* Descriptor of a matrix at `address` (shared memory); offsets in bytes:
 *     K-major, no swizzle  tiles of 8 rows x 16 B; `leading` to the next 16 B of K, `stride` to the
 *                          next 8 rows
 *     K-major, 128 B       rows of 128 B, their 16-byte pieces permuted by row % 8; `stride` to the
 *                          next 8 rows
 *     MN-major, no swizzle tiles of 8 of K x 16 B of MN; `leading` to the next 8 of K, `stride` to
 *                          the next 16 B of MN
 *     MN-major, 128 B      the same with 64 of MN in a row; `leading` to the next 64 of MN,
 *                          `stride` to the next 8 of K */
static __device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, int leading,
                                                            int stride, int swizzle)
{
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)(leading >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32 | (uint64_t)swizzle << 62;
}

/* The descriptor of what lies `pieces` of 16 bytes further on. Addresses do not carry. */
static __device__ __forceinline__ uint64_t wgmma_ahead(uint64_t descriptor, int pieces)
{
    const uint32_t low = (uint32_t)descriptor + (uint32_t)pieces;
    return descriptor >> 32 << 32 | low;
}

static __device__ __forceinline__ void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Pins registers that a wgmma reads or writes: their last ordinary write stays before the fence. */
static __device__ __forceinline__ void wgmma_pin_f32(float *d, int n)
{
#pragma unroll
    for (int i = 0; i < n; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

static __device__ __forceinline__ void wgmma_pin_u32(uint32_t *a, int n)
{
#pragma unroll
    for (int i = 0; i < n; i++)
        asm volatile("" : "+r"(a[i])::"memory");
}

#define wgmma_wait(PENDING) \
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory")

/* accumulate: a literal; 0 sets D instead of adding to it.
 * D[64, 32] += A[64, 16] B[16, 32], fp16, A in registers, B K-major */
static __device__ __forceinline__ void wgmma_m64n32k16(float *d, const uint32_t a[4], uint64_t b,
                                                       int accumulate)
{
    asm volatile("{ .reg .pred accumulate_d; setp.ne.b32 accumulate_d, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, accumulate_d, 1, 1, 0; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

/* D[64, 16] += A[64, 16] B[16, 16], fp16, A in registers, B MN-major */
static __device__ __forceinline__ void wgmma_m64n16k16_mn(float *d, const uint32_t a[4], uint64_t b,
                                                          int accumulate)
{
    asm volatile("{ .reg .pred accumulate_d; setp.ne.b32 accumulate_d, %13, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "{%8, %9, %10, %11}, %12, accumulate_d, 1, 1, 1; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

/* D[64, 128] += A[64, 16] B[16, 128], fp16, A in registers, B MN-major */
static __device__ __forceinline__ void wgmma_m64n128k16(float *d, const uint32_t a[4], uint64_t b,
                                                        int accumulate)
{
    asm volatile("{ .reg .pred accumulate_d; setp.ne.b32 accumulate_d, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, "
                 "%24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, "
                 "%40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, "
                 "%56, %57, %58, %59, %60, %61, %62, %63}, "
                 "{%64, %65, %66, %67}, %68, accumulate_d, 1, 1, 1; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                   "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                   "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
                   "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
                   "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

/* D[64, N] += A[64, 8] B[8, N], tf32 (mma.cuh), A in registers, B K-major */
static __device__ __forceinline__ void wgmma_m64n8k8_tf32(float *d, const uint32_t a[4], uint64_t b,
                                                          int accumulate)
{
    asm volatile("{ .reg .pred accumulate_d; setp.ne.b32 accumulate_d, %9, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 "
                 "{%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, %8, accumulate_d, 1, 1; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

static __device__ __forceinline__ void wgmma_m64n16k8_tf32(float *d, const uint32_t a[4],
                                                           uint64_t b, int accumulate)
{
    asm volatile("{ .reg .pred accumulate_d; setp.ne.b32 accumulate_d, %13, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k8.f32.tf32.tf32 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "{%8, %9, %10, %11}, %12, accumulate_d, 1, 1; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

static __device__ __forceinline__ void wgmma_m64n32k8_tf32(float *d, const uint32_t a[4],
                                                           uint64_t b, int accumulate)
{
    asm volatile("{ .reg .pred accumulate_d; setp.ne.b32 accumulate_d, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, accumulate_d, 1, 1; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

/* D[64, 32] += A[64, 16] B[16, 32], A and B K-major in shared memory; both of type TYPE */
#define DEFINE_WGMMA_M64N32K16_SHARED(name, TYPE)                                                 \
    static __device__ __forceinline__ void name(float *d, uint64_t a, uint64_t b, int accumulate) \
    {                                                                                             \
        asm volatile("{ .reg .pred accumulate_d; setp.ne.b32 accumulate_d, %18, 0;\n"             \
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " "              \
                     "{%0, %1, %2, %3, %4, %5, %6, %7, "                                          \
                     "%8, %9, %10, %11, %12, %13, %14, %15}, "                                    \
                     "%16, %17, accumulate_d, 1, 1, 0, 0; }"                                      \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),    \
                       "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),  \
                       "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])                         \
                     : "l"(a), "l"(b), "r"(accumulate));                                          \
    }
DEFINE_WGMMA_M64N32K16_SHARED(wgmma_m64n32k16_bf16, "bf16")
DEFINE_WGMMA_M64N32K16_SHARED(wgmma_m64n32k16_f16, "f16")

/* D[64, 64] += A[64, 16] B[16, 64], the same, bf16 */
static __device__ __forceinline__ void wgmma_m64n64k16_bf16(float *d, uint64_t a, uint64_t b,
                                                            int accumulate)
{
    asm volatile("{ .reg .pred accumulate_d; setp.ne.b32 accumulate_d, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, "
                 "%24, %25, %26, %27, %28, %29, %30, %31}, "
                 "%32, %33, accumulate_d, 1, 1, 0, 0; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b), "r"(accumulate));
}

#endif
