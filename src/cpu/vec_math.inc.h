/* vec_math.inc.h: elementary functions on vectors. Included after a vec_*.h.
 *
 * Coefficients are minimax fits of the relative error (weighted least squares on Chebyshev nodes,
 * rounded to float); bounds are stated in units of the last place (ulp) of the result and checked
 * over the whole range by tests/cpu/test_vec_math.c.
 */
#ifndef FKDA_VEC_MATH_INC_H
#define FKDA_VEC_MATH_INC_H

/* Bodies that are specialised by literal arguments; without it a compiler may merge variants. */
#define FKDA_BODY static inline __attribute__((always_inline))

/* A loop that wants all registers: not to be merged into its caller. */
#define FKDA_KERNEL static __attribute__((noinline))

#define LOG2E 1.44269504088896340736f

/* 2^x within 1 ulp (1.2 without FMA); x below -126.5 gives 0, above 128 infinity, NaN stays NaN.
 * The polynomial has the form 1 + f P(f): its error vanishes with f, so decays near 1 are not
 * biased. */
FKDA_BODY vf vm_exp2(vf x)
{
    vf n, f = vf_split(x, &n);
    vf p = vf_set1(0x1.41fbbcp-13f);
    p = vf_fma(p, f, vf_set1(0x1.5f3e54p-10f));
    p = vf_fma(p, f, vf_set1(0x1.3b2d4cp-7f));
    p = vf_fma(p, f, vf_set1(0x1.c6aee8p-5f));
    p = vf_fma(p, f, vf_set1(0x1.ebfbdcp-3f));
    p = vf_fma(p, f, vf_set1(0x1.62e430p-1f));
    return vf_scale2(vf_fma(p, f, vf_set1(1.0f)), n);
}

/* 2^x within 2 ulp: a degree less, for where the error is not compounded. */
FKDA_BODY vf vm_exp2_short(vf x)
{
    vf n, f = vf_split(x, &n);
    vf p = vf_set1(0x1.5bba14p-10f);
    p = vf_fma(p, f, vf_set1(0x1.3cea88p-7f));
    p = vf_fma(p, f, vf_set1(0x1.c6b752p-5f));
    p = vf_fma(p, f, vf_set1(0x1.ebf9bcp-3f));
    p = vf_fma(p, f, vf_set1(0x1.62e42ap-1f));
    return vf_scale2(vf_fma(p, f, vf_set1(1.0f)), n);
}

/* 1 / (1 + 2^y): the sigmoid of x for y = -x log2(e), within 2.5 ulp; not less than 2^-126. */
FKDA_BODY vf vm_sigmoid_exp2(vf y)
{
    return vf_reciprocal(vf_add(vf_set1(1.0f), vm_exp2_short(vf_min(vf_set1(126.0f), y))));
}

/* log(1 + e^x) within 4 ulp, and within |x| ulp where x < -4: max(x, 0) + log1p(e^-|x|), the latter
 * as 2 atanh(z / (2 + z)). */
FKDA_BODY vf vm_softplus(vf x)
{
    vf z = vm_exp2(vf_mul(vf_abs(x), vf_set1(-LOG2E)));
    vf r = vf_div(z, vf_add(z, vf_set1(2.0f)));
    vf w = vf_mul(r, r);
    vf p = vf_set1(0x1.f3fac8p-4f);
    p = vf_fma(p, w, vf_set1(0x1.b62240p-4f));
    p = vf_fma(p, w, vf_set1(0x1.251382p-3f));
    p = vf_fma(p, w, vf_set1(0x1.99962cp-3f));
    p = vf_fma(p, w, vf_set1(0x1.55555ap-2f));
    p = vf_fma(p, w, vf_set1(1.0f));
    return vf_fma(vf_add(r, r), p, vf_max(vf_zero(), x));
}

#endif /* FKDA_VEC_MATH_INC_H */
