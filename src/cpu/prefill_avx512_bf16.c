/* prefill_avx512_bf16.c: bf16 prefill with VDPBF16PS, which adds two products of bf16 values to
 * each of 16 sums: twice the rate of fp32 where the processor has full-width units for it.
 *
 * What meets the entering state, the larger half of the work, is bf16. What is written into the
 * state is fp32: with kr in two bf16 terms it would take as many dot products as it takes FMAs. So
 * are the products among the tokens, a tenth of the work.
 */
#include "cpu/kernel_sets.h"
#include "cpu/kernel_sets_bf16.h"
#include "cpu/state_bf16.h"

#define KR_SPLIT false

enum { ROWS = 8 }; /* tokens at once: 8 x 2 sums, and two loads for 16 products */

BF16_INLINE vf dot(vf sum, __m512i left, __m512i right)
{
    return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
}

/* Two neighbouring channels of a bf16 row, in every word. */
BF16_INLINE __m512i two_channels(const uint16_t *at)
{
    int32_t word;
    memcpy(&word, at, sizeof word);
    return _mm512_set1_epi32(word);
}

/* Four rows of kd or qd times four of ki^T, in fp32: 16 sums of 16 parts each. */
BF16_INLINE void add_pairs(vf sums[CHUNK], const float *left, const float *right, int64_t K)
{
    for (int64_t c = 0; c < K; c += 32) {
        for (int64_t half = 0; half < 32; half += 16) {
            const float *x = left + c * CHUNK + half, *y = right + c * CHUNK + half;
            vf ki[4];
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++)
                ki[s] = _mm512_load_ps(y + s * 32);
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++) {
                vf row = _mm512_load_ps(x + t * 32);
#pragma GCC unroll 4
                for (int s = 0; s < 4; s++)
                    sums[t * 4 + s] = _mm512_fmadd_ps(row, ki[s], sums[t * 4 + s]);
            }
        }
    }
}

/* Blocks of 4 x 4 on and below the diagonal: what is above it is never looked at. */
BF16_INLINE void pair_rows(float *raw, const float *left, const float *right, int64_t K)
{
    for (int64_t t = 0; t < CHUNK; t += 4) {
        for (int64_t s = 0; s <= t; s += 4) {
            vf sums[CHUNK];
#pragma GCC unroll 16
            for (int i = 0; i < CHUNK; i++)
                sums[i] = _mm512_setzero_ps();
            add_pairs(sums, left + t * 32, right + s * 32, K);
            vf block = vf_sum_rows(sums);
            _mm_store_ps(raw + t * CHUNK + s, _mm512_castps512_ps128(block));
            _mm_store_ps(raw + (t + 1) * CHUNK + s, _mm512_extractf32x4_ps(block, 1));
            _mm_store_ps(raw + (t + 2) * CHUNK + s, _mm512_extractf32x4_ps(block, 2));
            _mm_store_ps(raw + (t + 3) * CHUNK + s, _mm512_extractf32x4_ps(block, 3));
        }
    }
}

/* a_raw = kd ki^T and p_raw = qd ki^T. */
BF16_INLINE void pair_products(const struct chunk *chunk, struct draft *draft, int64_t K)
{
    (void)chunk;
    pair_rows(draft->a_raw, draft->kd32, draft->ki32, K);
    pair_rows(draft->p_raw, draft->qd32, draft->ki32, K);
}

/* ROWS rows of kd or qd times the panel's two blocks of S^T. */
BF16_INLINE void add_row_products(vf sums[ROWS][2], const uint16_t *rows, const uint16_t *shadow,
                                  int64_t K)
{
    for (int64_t k = 0; k < K; k += 2) {
        __m512i s0 = _mm512_load_si512(shadow + k * 16);
        __m512i s1 = _mm512_load_si512(shadow + (K + k) * 16);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            __m512i x = two_channels(rows + r * K + k);
            sums[r][0] = dot(sums[r][0], x, s0);
            sums[r][1] = dot(sums[r][1], x, s1);
        }
    }
}

BF16_INLINE void store_rows(float *to, vf sums[ROWS][2])
{
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        _mm512_store_ps(to + r * 16, sums[r][0]);
        _mm512_store_ps(to + BLOCK + r * 16, sums[r][1]);
    }
}

BF16_INLINE void zero_rows(vf sums[ROWS][2])
{
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
}

BF16_INLINE void row_products(struct work *work, const struct chunk *chunk, int64_t panel,
                              int64_t K)
{
    for (int64_t t = 0; t < CHUNK; t += ROWS) {
        vf sums[ROWS][2];
        zero_rows(sums);
        add_row_products(sums, chunk->kd + t * K, work->shadow + panel * K * 32, K);
        store_rows(work->pk + t * 16, sums);
    }
}

BF16_INLINE void store_u(struct work *work, int block, const vf u[CHUNK])
{
#pragma GCC unroll 16
    for (int t = 0; t < CHUNK; t++)
        _mm512_store_ps((float *)work->u + block * BLOCK + t * 16, u[t]);
}

/* out = qd S^T + P u. */
BF16_INLINE void panel_outputs(struct work *work, const struct chunk *chunk, const uint16_t *shadow,
                               int64_t K)
{
    const float *u = (const float *)work->u;
    for (int64_t t = 0; t < CHUNK; t += ROWS) {
        vf sums[ROWS][2];
        zero_rows(sums);
        add_row_products(sums, chunk->qd + t * K, shadow, K);
        for (int64_t s = 0; s < t + ROWS; s++) {
            vf u0 = _mm512_load_ps(u + s * 16), u1 = _mm512_load_ps(u + BLOCK + s * 16);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                vf p = _mm512_set1_ps(chunk->p[(t + r) * CHUNK + s]);
                sums[r][0] = _mm512_fmadd_ps(p, u0, sums[r][0]);
                sums[r][1] = _mm512_fmadd_ps(p, u1, sums[r][1]);
            }
        }
        store_rows(work->out + t * 16, sums);
    }
}

/* Eight tokens of the update S diag(2^(G_C)) + u^T kr, two key channels at a time; the first eight
 * apply the decay, the last eight renew the shadow. */
BF16_INLINE void update_half(float *state, uint16_t *shadow, const struct chunk *chunk,
                             const float *u, int64_t K, bool last)
{
    vf u0[8], u1[8];
    const int first_token = last ? 8 : 0;
#pragma GCC unroll 8
    for (int t = 0; t < 8; t++) {
        u0[t] = _mm512_load_ps(u + (first_token + t) * 16);
        u1[t] = _mm512_load_ps(u + BLOCK + (first_token + t) * 16);
    }
    for (int64_t k = 0; k < K; k += 2) {
        const float *kr = chunk->kr + (k / 32 * CHUNK + first_token) * 32 + k % 32 / 2;
        float *rows = state + k * 16;
        vf s[2][2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            s[0][i] = _mm512_load_ps(rows + i * 16);
            s[1][i] = _mm512_load_ps(rows + (K + i) * 16);
            if (!last) {
                vf decay = _mm512_set1_ps(chunk->decay[k + i]);
                s[0][i] = _mm512_mul_ps(s[0][i], decay);
                s[1][i] = _mm512_mul_ps(s[1][i], decay);
            }
        }
#pragma GCC unroll 8
        for (int t = 0; t < 8; t++) {
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                vf x = _mm512_set1_ps(kr[t * 32 + i * 16]);
                s[0][i] = _mm512_fmadd_ps(x, u0[t], s[0][i]);
                s[1][i] = _mm512_fmadd_ps(x, u1[t], s[1][i]);
            }
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            _mm512_store_ps(rows + i * 16, s[0][i]);
            _mm512_store_ps(rows + (K + i) * 16, s[1][i]);
        }
        if (last) {
            _mm512_store_si512(shadow + k * 16, pack_round(s[0][0], s[0][1]));
            _mm512_store_si512(shadow + (K + k) * 16, pack_round(s[1][0], s[1][1]));
        }
    }
}

BF16_INLINE void finish_panel(struct work *work, const struct chunk *chunk, int64_t panel,
                              int64_t K)
{
    float *state = work->state + panel * K * 32;
    uint16_t *shadow = work->shadow + panel * K * 32;
    panel_outputs(work, chunk, shadow, K);
    update_half(state, shadow, chunk, (const float *)work->u, K, false);
    update_half(state, shadow, chunk, (const float *)work->u, K, true);
}

#include "cpu/prefill_bf16.h"

DEFINE_BF16_SET(avx512_bf16, FKDA_ISA_AVX512_BF16, fkda_avx512_bf16_usable, prefill_task);
