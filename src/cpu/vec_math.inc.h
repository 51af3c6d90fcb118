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

/* Functions on up to EACH vectors, step by step side by side: one chain of dependent operations
 * takes over a hundred cycles, and a processor's scheduler, some 100 entries, sees few chains that
 * follow one another. Bounds hold for each. */
enum { EACH = 8 };

#define FKDA_EACH(i, count) _Pragma("GCC unroll 8") for (int i = 0; i < (count); i++)

FKDA_BODY void vm_fma_each(vf p[EACH], const vf f[EACH], float c, int count)
{
    FKDA_EACH(i, count)
    p[i] = vf_fma(p[i], f[i], vf_set1(c));
}

/* x <- 2^x within 1 ulp (1.2 without FMA); x below -126.5 gives 0, above 128 infinity, NaN stays
 * NaN. The polynomial has the form 1 + f P(f): its error vanishes with f, so decays near 1 are not
 * biased. */
FKDA_BODY void vm_exp2_each(vf x[EACH], int count)
{
    vf n[EACH], f[EACH], p[EACH];
    FKDA_EACH(i, count)
    f[i] = vf_split(x[i], &n[i]);
    FKDA_EACH(i, count)
    p[i] = vf_fma(f[i], vf_set1(0x1.41fbbcp-13f), vf_set1(0x1.5f3e54p-10f));
    vm_fma_each(p, f, 0x1.3b2d4cp-7f, count);
    vm_fma_each(p, f, 0x1.c6aee8p-5f, count);
    vm_fma_each(p, f, 0x1.ebfbdcp-3f, count);
    vm_fma_each(p, f, 0x1.62e430p-1f, count);
    vm_fma_each(p, f, 1.0f, count);
    FKDA_EACH(i, count)
    x[i] = vf_scale2(p[i], n[i]);
}

/* y <- 1 / (1 + 2^y): the sigmoid of x for y = -x log2(e), within 2.5 ulp; not less than 2^-126. */
FKDA_BODY void vm_sigmoid_exp2_each(vf y[EACH], int count)
{
    FKDA_EACH(i, count)
    y[i] = vf_min(vf_set1(126.0f), y[i]);
    vm_exp2_each(y, count);
    FKDA_EACH(i, count)
    y[i] = vf_reciprocal(vf_add(vf_set1(1.0f), y[i]));
}

/* y <- 2^(1 / (inverse (1 + 2^y))): the decay of a bounded gate, inverse being 1 over the base-2
 * logarithm of the deepest decay, from -2^60 to 0. The logarithm is right to 3 ulp. For y above 64
 * it counts as that at 64: the decay is 1 either way. The inner polynomial is one degree short of
 * vm_exp2_each's: 0.8 ulp, which need not vanish with f. */
FKDA_BODY void vm_decay_each(vf y[EACH], vf inverse, int count)
{
    vf n[EACH], f[EACH], p[EACH];
    FKDA_EACH(i, count)
    f[i] = vf_split(vf_min(vf_set1(64.0f), y[i]), &n[i]);
    FKDA_EACH(i, count)
    p[i] = vf_fma(f[i], vf_set1(0x1.5bba14p-10f), vf_set1(0x1.3cea88p-7f));
    vm_fma_each(p, f, 0x1.c6b752p-5f, count);
    vm_fma_each(p, f, 0x1.ebf9bcp-3f, count);
    vm_fma_each(p, f, 0x1.62e42ap-1f, count);
    vm_fma_each(p, f, 1.0f, count);
    FKDA_EACH(i, count)
    y[i] = vf_reciprocal(vf_fma(vf_scale2(p[i], n[i]), inverse, inverse));
    vm_exp2_each(y, count);
}

FKDA_BODY vf vm_exp2(vf x)
{
    vf each[EACH] = {x};
    vm_exp2_each(each, 1);
    return each[0];
}

FKDA_BODY vf vm_sigmoid_exp2(vf y)
{
    vf each[EACH] = {y};
    vm_sigmoid_exp2_each(each, 1);
    return each[0];
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
