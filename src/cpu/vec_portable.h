/* vec_portable.h: 4 floats as a vector type of the C compiler (gcc and clang, any processor). The
 * names of vec_avx512.h. */
#ifndef FKDA_VEC_PORTABLE_H
#define FKDA_VEC_PORTABLE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "core/bf16.h"

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vf_bits __attribute__((vector_size(16)));
typedef uint32_t vf_ubits __attribute__((vector_size(16)));

enum { VF_LANES = 4, PANEL_VECS = 1, VECS_TOGETHER = 1 };

static inline vf vf_zero(void)
{
    return (vf){0, 0, 0, 0};
}

static inline vf vf_set1(float x)
{
    return (vf){x, x, x, x};
}

static inline vf vf_loadu(const float *p)
{
    vf a;
    memcpy(&a, p, sizeof a);
    return a;
}

static inline vf vf_load(const float *p)
{
    return *(const vf *)__builtin_assume_aligned(p, 16);
}

static inline void vf_storeu(float *p, vf a)
{
    memcpy(p, &a, sizeof a);
}

static inline void vf_store(float *p, vf a)
{
    *(vf *)__builtin_assume_aligned(p, 16) = a;
}

static inline vf vf_add(vf a, vf b)
{
    return a + b;
}

static inline vf vf_sub(vf a, vf b)
{
    return a - b;
}

static inline vf vf_mul(vf a, vf b)
{
    return a * b;
}

static inline vf vf_div(vf a, vf b)
{
    return a / b;
}

static inline vf vf_sqrt(vf a)
{
    return (vf){sqrtf(a[0]), sqrtf(a[1]), sqrtf(a[2]), sqrtf(a[3])};
}

/* a b + c */
static inline vf vf_fma(vf a, vf b, vf c)
{
    return a * b + c;
}

/* c - a b */
static inline vf vf_fnma(vf a, vf b, vf c)
{
    return c - a * b;
}

static inline vf vf_select(vf_bits mask, vf a, vf b)
{
    return (vf)((mask & (vf_bits)a) | (~mask & (vf_bits)b));
}

static inline vf vf_min(vf a, vf b)
{
    return vf_select(a < b, a, b);
}

static inline vf vf_max(vf a, vf b)
{
    return vf_select(a > b, a, b);
}

static inline vf vf_abs(vf a)
{
    return (vf)((vf_bits)a & 0x7fffffff);
}

/* x = *n + the result, *n whole, |result| <= 1/2; x is held within [-127, 128]. Adding 1.5 2^23
 * leaves no bits below one. */
static inline vf vf_split(vf x, vf *n)
{
    const vf magic = vf_set1(12582912.0f);
    x = vf_min(vf_set1(128.0f), vf_max(vf_set1(-127.0f), x));
    *n = (x + magic) - magic;
    return x - *n;
}

/* 1 / a within 1 ulp for a from 1 to 2^126 */
static inline vf vf_reciprocal(vf a)
{
    return vf_set1(1.0f) / a;
}

/* a 2^n for whole n in [-127, 128]; 2^-127 counts as 0, 2^128 as infinity. A NaN stays one: it is
 * in a as well, whatever its n converts to. */
static inline vf vf_scale2(vf a, vf n)
{
    vf_ubits exponent = (vf_ubits)(n + vf_set1(12582912.0f)) - 0x4b400000u + 127u;
    return a * (vf)(exponent << 23);
}

static inline vf vf_load_bf16(const uint16_t *p)
{
    return (vf){fkda_bf16_to_float(p[0]), fkda_bf16_to_float(p[1]), fkda_bf16_to_float(p[2]),
                fkda_bf16_to_float(p[3])};
}

static inline void vf_store_bf16(uint16_t *p, vf a)
{
    for (int i = 0; i < 4; i++)
        p[i] = fkda_bf16_from_float(a[i]);
}

/* a, then b. */
static inline void vf_store_bf16_pair(uint16_t *p, vf a, vf b)
{
    vf_store_bf16(p, a);
    vf_store_bf16(p + VF_LANES, b);
}

/* Lane i becomes lane j of row i and back. */
static inline void vf_transpose(vf r[4])
{
    vf a = r[0], b = r[1], c = r[2], d = r[3];
    r[0] = (vf){a[0], b[0], c[0], d[0]};
    r[1] = (vf){a[1], b[1], c[1], d[1]};
    r[2] = (vf){a[2], b[2], c[2], d[2]};
    r[3] = (vf){a[3], b[3], c[3], d[3]};
}

/* Lane i: the sum of all lanes of rows[i]. */
static inline vf vf_sum_rows(const vf rows[4])
{
    vf t[4] = {rows[0], rows[1], rows[2], rows[3]};
    vf_transpose(t);
    return (t[0] + t[1]) + (t[2] + t[3]);
}

#endif /* FKDA_VEC_PORTABLE_H */
