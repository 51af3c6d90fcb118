/* mma.cuh: one wrapper per tensor-core instruction of sm_80 and later.
 *
 * Fragment letters as in the PTX manual: g = lane / 4, t = lane % 4. For m16n8k16 (16-bit operands)
 *     A  a0 (g, 2t..2t+1)   a1 (g+8, 2t..)   a2 (g, 2t+8..)   a3 (g+8, 2t+8..)      row, column
 *     B  b0 (k 2t..2t+1, n g)   b1 (k 2t+8.., n g)
 *     D  d0, d1 (g, 2t..2t+1)   d2, d3 (g+8, 2t..2t+1)
 */
#ifndef FKDA_PTX_MMA_CUH
#define FKDA_PTX_MMA_CUH

#include <stdint.h>

/* D += A B, fp16 operands, fp32 accumulators */
static __device__ __forceinline__ void mma_m16n8k16_f16(float d[4], const uint32_t a[4],
                                                        uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* D = A B */
static __device__ __forceinline__ void mma_m16n8k16_f16_new(float d[4], const uint32_t a[4],
                                                            uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

/* D += A B, bf16 operands. */
static __device__ __forceinline__ void mma_m16n8k16_bf16(float d[4], const uint32_t a[4],
                                                         uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* D += A B, tf32 operands (fp32 registers, whose low 13 bits are dropped), fp32 accumulators.
 *     A  a0 (g, t)   a1 (g+8, t)   a2 (g, t+4)   a3 (g+8, t+4)
 *     B  b0 (k t, n g)   b1 (k t+4, n g) */
static __device__ __forceinline__ void mma_m16n8k8_tf32(float d[4], const uint32_t a[4],
                                                        uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Transposes an 8 x 8 tile of 16-bit values held by a warp: in (row g, columns 2t..2t+1). Volatile:
 * it needs the whole warp, so it must not move to a branch that uses its result. */
static __device__ __forceinline__ uint32_t movmatrix_trans(uint32_t a)
{
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

/* Four 8 x 8 tiles of 16-bit values from shared memory; lane l gives the address of row l % 8 of
 * tile l / 8. Lane (g, t) receives (row g, columns 2t..2t+1) of each. */
static __device__ __forceinline__ void ldmatrix_x4(uint32_t d[4], const void *shared)
{
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

/* The same, each tile transposed: (rows 2t..2t+1, column g). */
static __device__ __forceinline__ void ldmatrix_x4_trans(uint32_t d[4], const void *shared)
{
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(address)
                 : "memory");
}

/* Two of them, transposed; lanes 0..15 give the addresses. */
static __device__ __forceinline__ void ldmatrix_x2_trans(uint32_t d[2], const void *shared)
{
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(address)
                 : "memory");
}

/* The inverse of ldmatrix_x4_trans. */
static __device__ __forceinline__ void stmatrix_x4_trans(void *shared, const uint32_t d[4])
{
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
        "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
        : "memory");
}

/* Two fp32 to packed fp16, `low` in the lower half, round to nearest even. */
static __device__ __forceinline__ uint32_t cvt_rn_f16x2(float low, float high)
{
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

static __device__ __forceinline__ uint32_t cvt_rn_bf16x2(float low, float high)
{
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

#endif
