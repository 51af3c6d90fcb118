/* vec_avx512.h: 16 floats in a zmm register. One wrapper per operation; vec_avx2.h and
 * vec_portable.h have the same names. Where an operand may be NaN, the second one decides. */
#ifndef FKDA_VEC_AVX512_H
#define FKDA_VEC_AVX512_H

#include <immintrin.h>
#include <stdint.h>

typedef __m512 vf;

enum {
    VF_LANES = 16,
    PANEL_VECS = 2,   /* vectors side by side in a panel */
    VECS_TOGETHER = 2 /* of them at once: 8 of u and 16 sums fill the 32 registers */
};

static inline vf vf_zero(void)
{
    return _mm512_setzero_ps();
}

static inline vf vf_set1(float x)
{
    return _mm512_set1_ps(x);
}

static inline vf vf_load(const float *p)
{
    return _mm512_load_ps(p);
}

static inline vf vf_loadu(const float *p)
{
    return _mm512_loadu_ps(p);
}

static inline void vf_store(float *p, vf a)
{
    _mm512_store_ps(p, a);
}

static inline void vf_storeu(float *p, vf a)
{
    _mm512_storeu_ps(p, a);
}

static inline vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}

static inline vf vf_sub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}

static inline vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}

static inline vf vf_div(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}

static inline vf vf_sqrt(vf a)
{
    return _mm512_sqrt_ps(a);
}

/* a b + c */
static inline vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

/* c - a b */
static inline vf vf_fnma(vf a, vf b, vf c)
{
    return _mm512_fnmadd_ps(a, b, c);
}

static inline vf vf_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}

static inline vf vf_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}

static inline vf vf_abs(vf a)
{
    return _mm512_abs_ps(a);
}

/* x = *n + the result, *n whole, |result| <= 1/2; any x, infinities included. */
static inline vf vf_split(vf x, vf *n)
{
    vf f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    *n = _mm512_sub_ps(x, f);
    return f;
}

/* 1 / a within 1 ulp for a from 1 to 2^126: a division takes four times as long. */
static inline vf vf_reciprocal(vf a)
{
    vf r = _mm512_rcp14_ps(a);
    return _mm512_fmadd_ps(r, _mm512_fnmadd_ps(a, r, _mm512_set1_ps(1.0f)), r);
}

/* a 2^n for whole n */
static inline vf vf_scale2(vf a, vf n)
{
    return _mm512_scalef_ps(a, n);
}

static inline vf vf_load_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* Bits that round to bfloat16 (nearest, ties to even) when the lower half is cut off. */
static inline __m512i vf_rounded_bits(vf a)
{
    __m512i bits = _mm512_castps_si512(a);
    __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    __m512i half = _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fff), odd, _mm512_set1_epi32(0x8000));
    return _mm512_mask_or_epi32(_mm512_add_epi32(bits, half), nan, bits,
                                _mm512_set1_epi32(0x400000));
}

static inline void vf_store_bf16(uint16_t *p, vf a)
{
    __m512i upper = _mm512_srli_epi32(vf_rounded_bits(a), 16);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(upper));
}

/* a, then b: 32 values that fill a cache line. */
static inline void vf_store_bf16_pair(uint16_t *p, vf a, vf b)
{
    const __m512i upper_halves =
        _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                         25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    _mm512_storeu_si512(
        p, _mm512_permutex2var_epi16(vf_rounded_bits(a), upper_halves, vf_rounded_bits(b)));
}

/* Lane i becomes lane j of row i and back. */
static inline void vf_transpose(vf r[16])
{
    vf t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    }
}

/* Lane i: the sum of all lanes of rows[i]. */
static inline vf vf_sum_rows(const vf rows[16])
{
    vf a[8], b[4];
    for (int i = 0; i < 8; i++) /* in each 128-bit part: 2 i, 2 i + 1 in turn, two sums each */
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                             _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
    for (int i = 0; i < 4; i++) /* in each 128-bit part: rows 4 i up to 4 i + 3 */
        b[i] = _mm512_add_ps(_mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44),
                             _mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee));
    vf c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88),
                         _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
    vf d = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88),
                         _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
}

#endif /* FKDA_VEC_AVX512_H */
