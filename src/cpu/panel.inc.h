/* panel.inc.h: the state of one head as panels [K][PANEL_WIDTH value channels], and passes over it.
 *
 * A panel lies in the first-level cache. Per group of four tokens one pass over its K rows applies
 * the rank-4 update of the group before and accumulates the products with the next four tokens:
 *
 *     s <- D s + sum_t u_t Kr_t        pk_t += Kd_t s        pq_t += Qd_t s
 *
 * then, with kf_t and qf_t the factors that normalise k_t and q_t (and scale),
 *
 *     u_t   = kf_t b_t (v_t - kf_t (pk_t + sum_(s<t) A_ts u_s))
 *     out_t = qf_t (pq_t + sum_(s<=t) P_ts u_s)
 *
 * Between chunks the panel holds the state itself, in float32 and in no other coordinates, so a
 * call that ends there and one that goes on continue from the same bits. */
#ifndef FKDA_PANEL_INC_H
#define FKDA_PANEL_INC_H

enum {
    PANEL_WIDTH = PANEL_VECS * VF_LANES,
    AHEAD = 5 /* rows fetched ahead: q, k, g, v to be read, out to be written */
};

/* A row that will be read soon; a pass fetches `step` bytes of it per block of channels. A dozen or
 * so lines can be under way at once, and the processor stalls beyond: hence a few at a time. */
struct prefetch_row {
    const char *row;
    int64_t step;
};

/* What a pass reads and writes besides the state: the group's tokens, from one value channel on. */
struct group_io {
    const float *triangle, *b, *k_factor, *q_factor;
    const void *v[GROUP];
    void *out[GROUP];
    int64_t count; /* tokens that exist */
    bool v_bf16, out_bf16;
    struct prefetch_row ahead[AHEAD];
};

/* One vector for each token of a group. Named fields, not an array: they live in registers. */
struct four {
    vf t0, t1, t2, t3;
};

/* Vector i of what a group leaves for its update: u is [GROUP][PANEL_VECS] vectors. */
FKDA_BODY struct four load_four(const float *u, int i)
{
    const int64_t step = PANEL_VECS * VF_LANES;
    u += i * VF_LANES;
    return (struct four){vf_load(u), vf_load(u + step), vf_load(u + 2 * step),
                         vf_load(u + 3 * step)};
}

/* s <- D s + sum_t u_t Kr_t: the sum first, so that it does not wait for s, and so that of what is
 * rounded at the size of the state there is one operation in four tokens. */
FKDA_BODY vf update_row(const float *coef, const float *panel, const struct four *u)
{
    coef += ROW_KR * COEF_BLOCK;
    vf add = vf_mul(u->t0, vf_set1(coef[0]));
    add = vf_fma(u->t1, vf_set1(coef[COEF_BLOCK]), add);
    add = vf_fma(u->t2, vf_set1(coef[2 * COEF_BLOCK]), add);
    add = vf_fma(u->t3, vf_set1(coef[3 * COEF_BLOCK]), add);
    vf d = vf_set1(coef[(ROW_D - ROW_KR) * COEF_BLOCK]);
    return vf_fma(vf_load(panel), d, add);
}

/* sum_t += row t of coef times s */
FKDA_BODY void multiply_row(const float *coef, vf s, struct four *sum)
{
    sum->t0 = vf_fma(vf_set1(coef[0]), s, sum->t0);
    sum->t1 = vf_fma(vf_set1(coef[COEF_BLOCK]), s, sum->t1);
    sum->t2 = vf_fma(vf_set1(coef[2 * COEF_BLOCK]), s, sum->t2);
    sum->t3 = vf_fma(vf_set1(coef[3 * COEF_BLOCK]), s, sum->t3);
}

/* Products of a group with one vector of the panel. */
struct products {
    struct four k, q;
};

/* COEF_BLOCK rows, first all updates and then all products: an update is a chain of five dependent
 * operations, and with the products in between the scheduler is too small to see the next chain.
 * Rows are `stride` floats apart; `vecs` vectors of them are taken, u1 and p1 for the second. */
FKDA_BODY void update_block(float *panel, int64_t stride, const float *coef, int vecs,
                            const struct four *u0, const struct four *u1)
{
#pragma GCC unroll 4
    for (int64_t d = 0; d < COEF_BLOCK; d++, coef++, panel += stride) {
        vf s0 = update_row(coef, panel, u0), s1 = s0;
        if (vecs == 2)
            s1 = update_row(coef, panel + VF_LANES, u1);
        vf_store(panel, s0); /* both after the last coefficient is read: each is read once */
        if (vecs == 2)
            vf_store(panel + VF_LANES, s1);
    }
}

FKDA_BODY void multiply_block(const float *panel, int64_t stride, const float *coef,
                              struct products *p0, struct products *p1)
{
#pragma GCC unroll 4
    for (int64_t d = 0; d < COEF_BLOCK; d++, coef++, panel += stride) {
        vf s0 = vf_load(panel), s1 = vf_load(panel + VF_LANES);
        multiply_row(coef + ROW_KD * COEF_BLOCK, s0, &p0->k);
        multiply_row(coef + ROW_KD * COEF_BLOCK, s1, &p1->k);
        multiply_row(coef + ROW_QD * COEF_BLOCK, s0, &p0->q);
        multiply_row(coef + ROW_QD * COEF_BLOCK, s1, &p1->q);
    }
}

/* One vector. Eight sums are as many as FMA has latency times ports, so that every delay would
 * count: the products with k have sums of their own for odd rows. */
FKDA_BODY void multiply_block_of_one(const float *panel, int64_t stride, const float *coef,
                                     struct products *p, struct four *odd_k)
{
    struct four even = p->k, odd = *odd_k, q = p->q; /* in registers until the end */
#pragma GCC unroll 2
    for (int64_t d = 0; d < COEF_BLOCK; d += 2, coef += 2, panel += 2 * stride) {
        vf s0 = vf_load(panel), s1 = vf_load(panel + stride);
        multiply_row(coef + ROW_KD * COEF_BLOCK, s0, &even);
        multiply_row(coef + ROW_QD * COEF_BLOCK, s0, &q);
        multiply_row(coef + 1 + ROW_KD * COEF_BLOCK, s1, &odd);
        multiply_row(coef + 1 + ROW_QD * COEF_BLOCK, s1, &q);
    }
    p->k = even;
    p->q = q;
    *odd_k = odd;
}

/* ---- From products to u and out -------------------------------------------------------------- */

/* u_t for x = pk_t + sum_(s<t) A_ts u_s; 0 for a token past the end. */
FKDA_BODY vf solve_token(const struct group_io *io, int t, int i, vf x, float *u_out)
{
    vf u = vf_zero();
    if (t < io->count) {
        vf v = load_channels(io->v[t], io->v_bf16, i * VF_LANES);
        u = vf_mul(vf_set1(io->b[t]), vf_fnma(vf_set1(io->k_factor[t]), x, v));
    }
    vf_store(u_out + (t * PANEL_VECS + i) * VF_LANES, u);
    return u;
}

FKDA_BODY vf triangle_fma(const struct group_io *io, int entry, vf u, vf sum)
{
    return vf_fma(vf_set1(io->triangle[entry]), u, sum);
}

/* Vector i of the panel: stores u, returns out. */
FKDA_BODY struct four solve_group(const struct group_io *io, int i, const struct products *p,
                                  float *u_out)
{
    vf u0 = solve_token(io, 0, i, p->k.t0, u_out);
    vf x1 = triangle_fma(io, TRIANGLE_A(1, 0), u0, p->k.t1);
    vf x2 = triangle_fma(io, TRIANGLE_A(2, 0), u0, p->k.t2);
    vf x3 = triangle_fma(io, TRIANGLE_A(3, 0), u0, p->k.t3);
    vf u1 = solve_token(io, 1, i, x1, u_out);
    x2 = triangle_fma(io, TRIANGLE_A(2, 1), u1, x2);
    x3 = triangle_fma(io, TRIANGLE_A(3, 1), u1, x3);
    vf u2 = solve_token(io, 2, i, x2, u_out);
    x3 = triangle_fma(io, TRIANGLE_A(3, 2), u2, x3);
    vf u3 = solve_token(io, 3, i, x3, u_out);

    struct four o;
    o.t0 = triangle_fma(io, TRIANGLE_P(0, 0), u0, p->q.t0);
    o.t1 = triangle_fma(io, TRIANGLE_P(1, 0), u0, p->q.t1);
    o.t1 = triangle_fma(io, TRIANGLE_P(1, 1), u1, o.t1);
    o.t2 = triangle_fma(io, TRIANGLE_P(2, 0), u0, p->q.t2);
    o.t2 = triangle_fma(io, TRIANGLE_P(2, 1), u1, o.t2);
    o.t2 = triangle_fma(io, TRIANGLE_P(2, 2), u2, o.t2);
    o.t3 = triangle_fma(io, TRIANGLE_P(3, 0), u0, p->q.t3);
    o.t3 = triangle_fma(io, TRIANGLE_P(3, 1), u1, o.t3);
    o.t3 = triangle_fma(io, TRIANGLE_P(3, 2), u2, o.t3);
    o.t3 = triangle_fma(io, TRIANGLE_P(3, 3), u3, o.t3);
    return o;
}

/* Token t of out, o0 and (vecs 2) o1 being its channels before the factor. */
FKDA_BODY void store_out(const struct group_io *io, int t, int vecs, vf o0, vf o1)
{
    if (t >= io->count)
        return;
    vf factor = vf_set1(io->q_factor[t]);
    o0 = vf_mul(factor, o0);
    o1 = vf_mul(factor, o1);
    if (io->out_bf16 && vecs == 2) {
        vf_store_bf16_pair(io->out[t], o0, o1);
    } else if (io->out_bf16) {
        vf_store_bf16(io->out[t], o0);
    } else {
        vf_storeu(io->out[t], o0);
        if (vecs == 2)
            vf_storeu((float *)io->out[t] + VF_LANES, o1);
    }
}

/* ---- Passes ---------------------------------------------------------------------------------- */

/* A pass fetches what is ahead, block by block. */
FKDA_BODY void fetch_ahead(const struct group_io *io, int64_t block)
{
    for (int i = 0; i < AHEAD - 1; i++)
        __builtin_prefetch(io->ahead[i].row + block * io->ahead[i].step, 0, 2);
    __builtin_prefetch(io->ahead[AHEAD - 1].row + block * io->ahead[AHEAD - 1].step, 1, 3);
}

/* Vector i of a panel of `vecs`, by itself. */
FKDA_BODY struct products walk_one(float *panel, const float *slot, int64_t K, bool update, int i,
                                   int vecs, const float *u, const struct group_io *io)
{
    const struct four zero = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    const int64_t stride = vecs * VF_LANES;
    struct products p = {zero, zero};
    struct four own = zero, odd = zero;
    if (update)
        own = load_four(u, i);
    panel += i * VF_LANES;
    for (int64_t block = 0; block < K / COEF_BLOCK; block++) {
        if (i == 0)
            fetch_ahead(io, block);
        if (update)
            update_block(panel, stride, slot, 1, &own, &own);
        multiply_block_of_one(panel, stride, slot, &p, &odd);
        panel += COEF_BLOCK * stride;
        slot += COEF_ROWS * COEF_BLOCK;
    }
    p.k.t0 = vf_add(p.k.t0, odd.t0);
    p.k.t1 = vf_add(p.k.t1, odd.t1);
    p.k.t2 = vf_add(p.k.t2, odd.t2);
    p.k.t3 = vf_add(p.k.t3, odd.t3);
    return p;
}

/* Both vectors of a panel side by side. */
FKDA_BODY void walk_two(float *panel, const float *slot, int64_t K, bool update, const float *u,
                        const struct group_io *io, struct products *p0, struct products *p1)
{
    const struct four zero = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    const int64_t stride = 2 * VF_LANES;
    struct four u0 = zero, u1 = zero;
    *p0 = *p1 = (struct products){zero, zero};
    if (update) {
        u0 = load_four(u, 0);
        u1 = load_four(u, 1);
    }
    for (int64_t block = 0; block < K / COEF_BLOCK; block++) {
        fetch_ahead(io, block);
        if (update)
            update_block(panel, stride, slot, 2, &u0, &u1);
        multiply_block(panel, stride, slot, p0, p1);
        panel += COEF_BLOCK * stride;
        slot += COEF_ROWS * COEF_BLOCK;
    }
}

/* One group over a panel of `vecs` vectors. u: of the group before, then of this one. */
FKDA_BODY void pass_body(float *panel, const float *slot, int64_t K, bool update, int vecs,
                         float *u, const struct group_io *io)
{
    struct products p0, p1;
    if (vecs == 2 && VECS_TOGETHER == 2) {
        walk_two(panel, slot, K, update, u, io, &p0, &p1);
    } else {
        p0 = walk_one(panel, slot, K, update, 0, vecs, u, io);
        p1 = vecs == 2 ? walk_one(panel, slot, K, update, 1, vecs, u, io) : p0;
    }
    struct four o0 = solve_group(io, 0, &p0, u), o1 = o0;
    if (vecs == 2)
        o1 = solve_group(io, 1, &p1, u);
    store_out(io, 0, vecs, o0.t0, o1.t0);
    store_out(io, 1, vecs, o0.t1, o1.t1);
    store_out(io, 2, vecs, o0.t2, o1.t2);
    store_out(io, 3, vecs, o0.t3, o1.t3);
}

/* Applies the update of the last group, so that the panel holds the state after it. */
FKDA_BODY void flush_body(float *panel, const float *slot, int64_t K, int vecs, const float *u)
{
    struct four u0 = load_four(u, 0), u1 = load_four(u, vecs - 1);
    for (int64_t block = 0; block < K / COEF_BLOCK; block++)
        update_block(panel + block * COEF_BLOCK * vecs * VF_LANES, vecs * VF_LANES,
                     slot + block * COEF_ROWS * COEF_BLOCK, vecs, &u0, &u1);
}

FKDA_KERNEL void pass_first(float *panel, const float *slot, int64_t K, float *u,
                            const struct group_io *io)
{
    pass_body(panel, slot, K, false, PANEL_VECS, u, io);
}

FKDA_KERNEL void pass_next(float *panel, const float *slot, int64_t K, float *u,
                           const struct group_io *io)
{
    pass_body(panel, slot, K, true, PANEL_VECS, u, io);
}

FKDA_KERNEL void pass_flush(float *panel, const float *slot, int64_t K, const float *u)
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
