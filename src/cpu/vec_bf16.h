/* vec_bf16.h: pairs of zmm registers over 32 neighbouring channels, and bf16 packed two to a word.
 *
 * Loading 32 bf16 values takes one instruction a register when even and odd channels part: the even
 * ones shift up, the odd ones only lose their neighbour. Packing two registers puts them back, so
 * bf16 rows in memory are always in natural order. NaNs are made canonical where they come from
 * fp32, since rounding by an integer addition would carry the payload 0x7fffffff into the sign.
 */
#ifndef FKDA_VEC_BF16_H
#define FKDA_VEC_BF16_H

#include <math.h>
#include <string.h>

#include "cpu/task_rows.h"
#include "cpu/vec_avx512.h"

#define BF16_INLINE static inline __attribute__((always_inline))

struct pair {
    vf even, odd; /* channels 0, 2, ..., 30 and 1, 3, ..., 31 */
};

BF16_INLINE __m512i bits_of(vf x)
{
    return _mm512_castps_si512(x);
}

BF16_INLINE vf float_of(__m512i x)
{
    return _mm512_castsi512_ps(x);
}

BF16_INLINE vf quiet_nan(vf x)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x, _mm512_set1_ps(NAN));
}

/* The part of x that bf16 holds without rounding. */
BF16_INLINE vf upper_half(vf x)
{
    return float_of(_mm512_and_si512(bits_of(x), _mm512_set1_epi32((int)0xffff0000u)));
}

BF16_INLINE struct pair pair_zero(void)
{
    return (struct pair){_mm512_setzero_ps(), _mm512_setzero_ps()};
}

BF16_INLINE struct pair pair_load_bf16(const void *row)
{
    __m512i x = _mm512_loadu_si512(row);
    return (struct pair){float_of(_mm512_slli_epi32(x, 16)), upper_half(float_of(x))};
}

BF16_INLINE struct pair pair_load_f32(const float *row)
{
    const __m512i even =
        _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
    vf low = _mm512_loadu_ps(row), high = _mm512_loadu_ps(row + 16);
    return (struct pair){quiet_nan(_mm512_permutex2var_ps(low, even, high)),
                         quiet_nan(_mm512_permutex2var_ps(low, odd, high))};
}

/* 32 channels from `channel` on, a multiple of 32. */
BF16_INLINE struct pair pair_load(const void *row, fkda_dtype dtype, int64_t channel)
{
    return dtype == FKDA_BF16 ? pair_load_bf16((const uint16_t *)row + channel)
                              : pair_load_f32((const float *)row + channel);
}

BF16_INLINE void pair_store_f32(float *row, struct pair x)
{
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    _mm512_storeu_ps(row, _mm512_permutex2var_ps(x.even, low, x.odd));
    _mm512_storeu_ps(row + 16, _mm512_permutex2var_ps(x.even, high, x.odd));
}

/* Word i: the upper halves of low[i] and high[i]. */
BF16_INLINE __m512i pack_cut(vf low, vf high)
{
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(bits_of(low), 16), bits_of(high));
}

/* The same, rounded to nearest (a tie away from zero). */
BF16_INLINE __m512i pack_round(vf low, vf high)
{
    const __m512i half = _mm512_set1_epi32(0x8000);
    return pack_cut(float_of(_mm512_add_epi32(bits_of(low), half)),
                    float_of(_mm512_add_epi32(bits_of(high), half)));
}

/* What pack_cut left behind, rounded: both together are right to 17 bits, without a bias. */
BF16_INLINE __m512i pack_rest(vf low, vf high)
{
    return pack_round(_mm512_sub_ps(low, upper_half(low)), _mm512_sub_ps(high, upper_half(high)));
}

/* pack_round, and in *rest what the rounding lost: both together are right to 16 bits. */
BF16_INLINE __m512i pack_round_rest(vf low, vf high, __m512i *rest)
{
    __m512i main = pack_round(low, high);
    *rest = pack_cut(_mm512_sub_ps(low, float_of(_mm512_slli_epi32(main, 16))),
                     _mm512_sub_ps(high, upper_half(float_of(main))));
    return main;
}

/* In natural order. Ties to even and every NaN kept: this is what the caller sees. */
BF16_INLINE __m512i pair_to_bf16(struct pair x)
{
    const __m512i natural =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(natural, (__m512i)_mm512_cvtne2ps_pbh(x.odd, x.even));
}

BF16_INLINE void pair_store(void *row, fkda_dtype dtype, int64_t channel, struct pair x)
{
    if (dtype == FKDA_F32)
        pair_store_f32((float *)row + channel, x);
    else
        _mm512_storeu_si512((uint16_t *)row + channel, pair_to_bf16(x));
}

/* 2^x, relative error below 3e-6 (a gate's rounding to bf16 costs a thousand times that). */
BF16_INLINE vf exp2_short(vf x)
{
    vf f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* in [0, 1) */
    vf p = _mm512_fmadd_ps(_mm512_set1_ps(0.01353417f), f, _mm512_set1_ps(0.05201146f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24144276f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69300383f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.00000259f));
    return _mm512_scalef_ps(p, x);
}

/* 2^x to fp32 accuracy, exact at whole numbers. */
BF16_INLINE vf exp2_full(vf x)
{
    vf f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf p = _mm512_fmadd_ps(_mm512_set1_ps(1.53533618e-4f), f, _mm512_set1_ps(1.33988744e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.61843736e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55033247e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40226479e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147203e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, _mm512_sub_ps(x, f));
}

/* 2^x and 2^-x, relative error 1e-7: 2^f = e(f f) + f o(f f), and 2^-f has the other sign. */
BF16_INLINE void exp2_both(vf x, vf *up, vf *down)
{
    vf f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf ff = _mm512_mul_ps(f, f);
    vf e = _mm512_fmadd_ps(_mm512_set1_ps(0.00967188f), ff, _mm512_set1_ps(0.24022235f));
    vf o = _mm512_fmadd_ps(_mm512_set1_ps(0.00134004f), ff, _mm512_set1_ps(0.05550327f));
    e = _mm512_fmadd_ps(e, ff, _mm512_set1_ps(1.0f));
    o = _mm512_fmadd_ps(o, ff, _mm512_set1_ps(0.69314721f));
    *up = _mm512_scalef_ps(_mm512_fmadd_ps(f, o, e), _mm512_sub_ps(x, f));
    *down = _mm512_scalef_ps(_mm512_fnmadd_ps(f, o, e), _mm512_sub_ps(f, x));
}

/* log2(1 + 2^x): the softplus gate in base 2. log(1 + e) = 2 artanh(e / (2 + e)), e <= 1. */
BF16_INLINE vf log2_1p_exp2(vf x)
{
    vf e = exp2_full(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
    vf s = _mm512_div_ps(e, _mm512_add_ps(e, _mm512_set1_ps(2.0f))), ss = _mm512_mul_ps(s, s);
    vf p = _mm512_set1_ps(1.0f / 13.0f);
    p = _mm512_fmadd_ps(p, ss, _mm512_set1_ps(1.0f / 11.0f));
    p = _mm512_fmadd_ps(p, ss, _mm512_set1_ps(1.0f / 9.0f));
    p = _mm512_fmadd_ps(p, ss, _mm512_set1_ps(1.0f / 7.0f));
    p = _mm512_fmadd_ps(p, ss, _mm512_set1_ps(1.0f / 5.0f));
    p = _mm512_fmadd_ps(p, ss, _mm512_set1_ps(1.0f / 3.0f));
    p = _mm512_fmadd_ps(p, ss, _mm512_set1_ps(1.0f));
    vf tail = _mm512_mul_ps(_mm512_mul_ps(s, p), _mm512_set1_ps(2.88539008f)); /* 2 log2(e) */
    return _mm512_add_ps(tail, _mm512_max_ps(x, _mm512_setzero_ps()));
}

#endif /* FKDA_VEC_BF16_H */
