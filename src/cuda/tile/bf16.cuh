/* bf16.cuh: a pair of bf16 values in one register, as two fp32. */
#ifndef FKDA_TILE_BF16_CUH
#define FKDA_TILE_BF16_CUH

#include <stdint.h>

static __device__ __forceinline__ float bf16_low(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

static __device__ __forceinline__ float bf16_high(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

#endif
