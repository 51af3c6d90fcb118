/* panel.inc.h: the state of one head as panels [K][PANEL_WIDTH value channels], and passes over it.
 *
 * A panel lies in the first-level cache. Per group of four tokens one pass over its K rows applies
 * the rank-4 update of the group before and accumulates the products with the next four tokens:
 *
 *     s <- D s + sum_t u_t Kr_t        pk_t += Kd_t s        pq_t += Qd_t s
 *
 * then  u_t = b_t (v_t - pk_t - sum_(s<t) A_ts u_s)   and   out_t = pq_t + sum_(s<=t) P_ts u_s.
 * Between chunks the panel holds the state itself, in float32 and in no other coordinates, so a call
 * that ends there and one that goes on continue from the same bits. */
#ifndef FKDA_PANEL_INC_H
#define FKDA_PANEL_INC_H

enum { PANEL_WIDTH = PANEL_VECS * VF_LANES };

/* A row that will be read soon; a pass fetches `step` bytes of it per block of channels. A dozen or
 * so lines can be under way at once, and the processor stalls beyond: hence a few at a time. */
struct prefetch_row {
    const char *row;
    int64_t step;
};

/* What a pass reads and writes besides the state: the group's tokens, from one value channel on. */
struct group_io {
    const float *triangle, *b;
    const void *v[GROUP];
    void *out[GROUP];
    int64_t count; /* tokens that exist */
    bool v_bf16, out_bf16;
    struct prefetch_row ahead[4];
};

/* Where a row stands in its update: add = sum of the u_t Kr_t so far. */
struct row_update {
    vf add[PANEL_VECS];
};

FKDA_BODY void update_step(struct row_update *row, int t, int vecs, const float *coef,
                           const vf u[PANEL_VECS][GROUP])
{
    vf kr = vf_set1(coef[(ROW_KR + t) * COEF_BLOCK]);
    for (int i = 0; i < vecs; i++)
        row->add[i] = t == 0 ? vf_mul(u[i][0], kr) : vf_fma(u[i][t], kr, row->add[i]);
}

/* s <- D s + add: last, so that the sum does not wait for s, and so that of what is rounded at the
 * size of the state there is one operation in four tokens. */
FKDA_BODY void update_finish(const struct row_update *row, int vecs, const float *coef,
                             float *panel, vf s[PANEL_VECS])
{
    vf d = vf_set1(coef[ROW_D * COEF_BLOCK]);
    for (int i = 0; i < vecs; i++) {
        s[i] = vf_fma(vf_load(panel + i * VF_LANES), d, row->add[i]);
        vf_store(panel + i * VF_LANES, s[i]);
    }
}

FKDA_BODY void update_row(vf s[PANEL_VECS], int vecs, const float *coef, float *panel,
                          const vf u[PANEL_VECS][GROUP])
{
    struct row_update row;
#pragma GCC unroll 4
    for (int t = 0; t < GROUP; t++)
        update_step(&row, t, vecs, coef, u);
    update_finish(&row, vecs, coef, panel, s);
}

FKDA_BODY void load_u(const float *u, int vecs, vf into[PANEL_VECS][GROUP])
{
    for (int i = 0; i < vecs; i++)
        for (int t = 0; t < GROUP; t++)
            into[i][t] = vf_load(u + (t * PANEL_VECS + i) * VF_LANES);
}

/* u and out of a group from its products pk, pq; vector i of the panel. */
FKDA_BODY void solve_group(const struct group_io *io, int i, const vf pk[GROUP], const vf pq[GROUP],
                           float *u_out)
{
    const float *triangle = io->triangle;
    vf u[GROUP], o[GROUP];
#pragma GCC unroll 4
    for (int t = 0; t < GROUP; t++) {
        o[t] = pq[t];
        u[t] = vf_zero();
        if (t < io->count) {
            vf x = vf_sub(load_channels(io->v[t], io->v_bf16, i * VF_LANES), pk[t]);
            for (int s = 0; s < t; s++)
                x = vf_fnma(vf_set1(triangle[TRIANGLE_A(t, s)]), u[s], x);
            u[t] = vf_mul(vf_set1(io->b[t]), x);
        }
        vf_store(u_out + (t * PANEL_VECS + i) * VF_LANES, u[t]);
        for (int s = 0; s <= t; s++)
            o[t] = vf_fma(vf_set1(triangle[TRIANGLE_P(t, s)]), u[s], o[t]);
    }
    for (int t = 0; t < io->count; t++) {
        if (io->out_bf16)
            vf_store_bf16((uint16_t *)io->out[t] + i * VF_LANES, o[t]);
        else
            vf_storeu((float *)io->out[t] + i * VF_LANES, o[t]);
    }
}

FKDA_BODY void multiply_token(int t, int vecs, const float *coef, const vf s[PANEL_VECS],
                              vf pk[PANEL_VECS][GROUP], vf pq[PANEL_VECS][GROUP])
{
    vf kd = vf_set1(coef[(ROW_KD + t) * COEF_BLOCK]);
    for (int i = 0; i < vecs; i++)
        pk[i][t] = vf_fma(kd, s[i], pk[i][t]);
    vf qd = vf_set1(coef[(ROW_QD + t) * COEF_BLOCK]);
    for (int i = 0; i < vecs; i++)
        pq[i][t] = vf_fma(qd, s[i], pq[i][t]);
}

#ifndef RB
#define RB 16
#endif
/* COEF_BLOCK rows. */
FKDA_BODY void pass_block(float *panel, const float *coef, bool update, int vecs,
                          const vf before[PANEL_VECS][GROUP], vf pk[PANEL_VECS][GROUP],
                          vf pq[PANEL_VECS][GROUP])
{
    vf s[PANEL_VECS];
    for (int64_t r = 0; r < COEF_BLOCK; r += RB) {
        if (update)
            for (int64_t d = r; d < r + RB; d++)
                update_row(s, vecs, coef + d, panel + d * vecs * VF_LANES, before);
        for (int64_t d = r; d < r + RB; d++) {
            for (int i = 0; i < vecs; i++)
                s[i] = vf_load(panel + (d * vecs + i) * VF_LANES);
#pragma GCC unroll 4
            for (int t = 0; t < GROUP; t++)
                multiply_token(t, vecs, coef + d, s, pk, pq);
        }
    }
}

/* One group over a panel of `vecs` vectors. u: of the group before, then of this one. */
FKDA_BODY void pass_body(float *panel, const float *slot, int64_t K, bool update, int vecs,
                         float *u, const struct group_io *io)
{
    vf pk[PANEL_VECS][GROUP], pq[PANEL_VECS][GROUP], before[PANEL_VECS][GROUP];
    for (int i = 0; i < vecs; i++)
        for (int t = 0; t < GROUP; t++)
            pk[i][t] = pq[i][t] = vf_zero();
    if (update)
        load_u(u, vecs, before);
    for (int64_t block = 0; block < K / COEF_BLOCK; block++) {
        for (int i = 0; i < 4; i++)
            __builtin_prefetch(io->ahead[i].row + block * io->ahead[i].step, 0, 2);
        pass_block(panel, slot, update, vecs, before, pk, pq);
        panel += COEF_BLOCK * vecs * VF_LANES;
        slot += COEF_ROWS * COEF_BLOCK;
    }
    for (int i = 0; i < vecs; i++)
        solve_group(io, i, pk[i], pq[i], u);
}

/* Applies the update of the last group, so that the panel holds the state after it. */
FKDA_BODY void flush_body(float *panel, const float *slot, int64_t K, int vecs, const float *u)
{
    vf last[PANEL_VECS][GROUP], s[PANEL_VECS];
    load_u(u, vecs, last);
    for (int64_t block = 0; block < K; block += COEF_BLOCK, slot += COEF_ROWS * COEF_BLOCK)
        for (int64_t d = 0; d < COEF_BLOCK; d++, panel += vecs * VF_LANES)
            update_row(s, vecs, slot + d, panel, last);
}

static void pass_first(float *panel, const float *slot, int64_t K, float *u,
                       const struct group_io *io)
{
    pass_body(panel, slot, K, false, PANEL_VECS, u, io);
}

static void pass_next(float *panel, const float *slot, int64_t K, float *u,
                      const struct group_io *io)
{
    pass_body(panel, slot, K, true, PANEL_VECS, u, io);
}

static void pass_flush(float *panel, const float *slot, int64_t K, const float *u)
{
    flush_body(panel, slot, K, PANEL_VECS, u);
}

/* A last panel that is only half as wide (V an odd multiple of 16, panels of 32). */
static void narrow_pass(float *panel, const float *slot, int64_t K, bool update, float *u,
                        const struct group_io *io)
{
    if (update)
        pass_body(panel, slot, K, true, 1, u, io);
    else
        pass_body(panel, slot, K, false, 1, u, io);
}

static void narrow_flush(float *panel, const float *slot, int64_t K, const float *u)
{
    flush_body(panel, slot, K, 1, u);
}

/* ---- Between [V, K] images and panels -------------------------------------------------------- */

static int panel_vecs(int64_t v_left)
{
    return v_left < PANEL_WIDTH ? 1 : PANEL_VECS;
}

/* panels <- rows [v_count, K] of an image; NULL: zeros. */
static void load_panels(float *panels, int64_t K, int64_t v_count, const void *image,
                        fkda_dtype dtype)
{
    int64_t v = 0;
    while (v < v_count) {
        int vecs = panel_vecs(v_count - v);
        float *panel = panels + v * K;
        for (int i = 0; i < vecs; i++, v += VF_LANES) {
            for (int64_t d = 0; d < K; d += VF_LANES) {
                vf r[VF_LANES];
                for (int64_t j = 0; j < VF_LANES; j++) {
                    int64_t at = (v + j) * K + d;
                    r[j] = vf_zero();
                    if (image)
                        r[j] = dtype == FKDA_BF16 ? vf_load_bf16((const uint16_t *)image + at)
                                                  : vf_loadu((const float *)image + at);
                }
                vf_transpose(r);
                for (int64_t j = 0; j < VF_LANES; j++)
                    vf_store(panel + ((d + j) * vecs + i) * VF_LANES, r[j]);
            }
        }
    }
}

/* VF_LANES rows of an image, from value channel v on, out of the panels. */
static void store_rows(const float *panels, int64_t K, int64_t v_count, int64_t v, void *rows,
                       fkda_dtype dtype)
{
    int64_t start = v / PANEL_WIDTH * PANEL_WIDTH, i = (v - start) / VF_LANES;
    int vecs = panel_vecs(v_count - start);
    const float *panel = panels + start * K;
    for (int64_t d = 0; d < K; d += VF_LANES) {
        vf r[VF_LANES];
        for (int64_t j = 0; j < VF_LANES; j++)
            r[j] = vf_load(panel + ((d + j) * vecs + i) * VF_LANES);
        vf_transpose(r);
        for (int64_t j = 0; j < VF_LANES; j++) {
            if (dtype == FKDA_BF16)
                vf_store_bf16((uint16_t *)rows + j * K + d, r[j]);
            else
                vf_storeu((float *)rows + j * K + d, r[j]);
        }
    }
}

#endif /* FKDA_PANEL_INC_H */
