/* tf32.cuh: fp32 as two tf32 terms, whose products keep about 21 bits and the range of fp32. */
#ifndef FKDA_PTX_TF32_CUH
#define FKDA_PTX_TF32_CUH

#include <stdint.h>

/* x as what the tensor core would see of it, which drops the low bits, and the rest, which is
 * exact here and loses its own low bits there. Rounding (cvt.rna) instead takes three more
 * instructions. */
static __device__ __forceinline__ void split_tf32(float x, uint32_t *high, uint32_t *low)
{
    *high = __float_as_uint(x) & 0xffffe000u;
    *low = __float_as_uint(x - __uint_as_float(*high));
}

#endif
