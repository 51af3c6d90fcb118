/* kernel_set.inc.h: the functions of a kernel set, written once.
 *
 * A set's file includes its vec_*.h, then this, then defines the functions with external linkage as
 * one line each:   prefill_task   decode_task   set_scratch_bytes
 *
 *     prefill: state -> panels;  per 16 tokens, head: prepare_chunk -> run_chunk;  panels -> state
 *     decode:  prepare_tokens -> walk_rows, on the caller's state in place
 */
#ifndef FKDA_KERNEL_SET_INC_H
#define FKDA_KERNEL_SET_INC_H

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "cpu/task_rows.h"
/* order matters from here on: each file uses those before it */
#include "cpu/vec_math.inc.h"

#include "cpu/prepare.inc.h"

#include "cpu/panel.inc.h"

#include "cpu/rows.inc.h"

enum {
    PREFILL_HEADS =
        8, /* neighbours: their rows of one token share pages and cache lines' fetches */
    /* Panels that take turns: the substitution of one hides behind the pass of the next, and all of
     * them plus a group's coefficients fit the first-level cache. */
    PANELS_TOGETHER = PANEL_VECS == 2 ? 2 : 5,
    /* A tail this short goes by rows: cheaper than another group, and than panels for no more */
    ROW_TOKENS = 4
};

/* One thread's scratch, all parts aligned to 64 bytes. */
struct scratch {
    struct chunk chunk;
    struct token_rows tokens;
    float *work;   /* [ROWS, K] */
    float *image;  /* [VF_LANES, K] */
    float *panels; /* [heads][v_count K] */
};

static size_t fixed_floats(int64_t K)
{
    return (size_t)((CHUNK_GROUPS + 1) * COEF_ROWS * K + CHUNK_GROUPS * TRIANGLE + 4 * CHUNK +
                    2 * CHUNK * VF_LANES + ROWS * K + VF_LANES * K + 64);
}

static struct scratch carve_scratch(void *memory, int64_t K)
{
    float *p = memory;
    struct scratch s;
    s.chunk.slots = s.tokens.channels = p; /* never both at a time */
    p += (CHUNK_GROUPS + 1) * COEF_ROWS * K;
    s.chunk.triangles = p;
    p += CHUNK_GROUPS * TRIANGLE;
    s.chunk.b = s.tokens.b = p;
    s.tokens.kq = p + CHUNK;
    s.chunk.q_factor = s.tokens.q_factor = p + 2 * CHUNK;
    s.chunk.k_factor = s.tokens.k_factor = p + 3 * CHUNK;
    p += 4 * CHUNK;
    s.chunk.squares = p;
    p += 2 * CHUNK * VF_LANES;
    s.work = p;
    p += ROWS * K;
    s.image = p;
    p += VF_LANES * K;
    s.panels = p + (16 - (p - (float *)memory) % 16) % 16;
    return s;
}

static size_t set_scratch_bytes(const struct fkda_plan *plan)
{
    size_t floats = fixed_floats(plan->K);
    if (plan->max_sequence_tokens > ROW_TOKENS)
        floats += (size_t)(fkda_heads_per_task(plan, PREFILL_HEADS) * plan->K * plan->V);
    return floats * sizeof(float);
}

/* ---- Prefill --------------------------------------------------------------------------------- */

struct prefill {
    const struct fkda_cpu_task *task;
    const struct fkda_plan *plan;
    struct fkda_sequence seq;
    struct scratch scratch;
    struct gate_constants gates[PREFILL_HEADS];
    int64_t v_per_block;                /* value channels to prefetch per COEF_BLOCK key channels */
    int64_t checkpoint, checkpoint_end; /* the next one to write */
};

static float *panels_of(const struct prefill *run, int64_t h)
{
    return run->scratch.panels + h * run->task->v_count * run->plan->K;
}

/* What the next (chunk, head) will read: tokens t .. end - 1 of a head, one token in each pass. */
struct upcoming {
    int64_t head, key_head, t, end;
};

static void prefetch_row(const struct prefill *run, const struct fkda_view *view, int64_t t,
                         int64_t head, int64_t channels_per_block, struct prefetch_row *ahead)
{
    ahead->row = fkda_row(view, &run->seq, t, head, 0);
    ahead->step = channels_per_block * (int64_t)fkda_element_bytes(view->dtype);
}

static void prefetch_token(const struct prefill *run, struct upcoming *next, struct group_io *io)
{
    const struct fkda_plan *plan = run->plan;
    if (next->t >= next->end) {
        for (int i = 0; i < AHEAD; i++) /* what is at hand: costs nothing */
            io->ahead[i].row = (const char *)run->scratch.chunk.triangles, io->ahead[i].step = 0;
        return;
    }
    prefetch_row(run, &plan->q, next->t, next->key_head, COEF_BLOCK, &io->ahead[0]);
    prefetch_row(run, &plan->k, next->t, next->key_head, COEF_BLOCK, &io->ahead[1]);
    prefetch_row(run, &plan->g, next->t, next->head, COEF_BLOCK, &io->ahead[2]);
    prefetch_row(run, &plan->v, next->t, next->head, run->v_per_block, &io->ahead[3]);
    prefetch_row(run, &plan->out, next->t, next->head, run->v_per_block, &io->ahead[4]);
    next->t++;
}

/* The rows of v and out of a chunk, from value channel v_begin of the task on. */
struct chunk_rows {
    const char *v[CHUNK];
    char *out[CHUNK];
    int64_t v_bytes, out_bytes; /* of an element */
};

static void open_rows(const struct prefill *run, int64_t head, int64_t t0, int64_t count,
                      struct chunk_rows *rows)
{
    const struct fkda_plan *plan = run->plan;
    rows->v_bytes = (int64_t)fkda_element_bytes(plan->v.dtype);
    rows->out_bytes = (int64_t)fkda_element_bytes(plan->out.dtype);
    for (int64_t t = 0; t < count; t++) {
        rows->v[t] = fkda_row(&plan->v, &run->seq, t0 + t, head, run->task->v_begin);
        rows->out[t] = fkda_row(&plan->out, &run->seq, t0 + t, head, run->task->v_begin);
    }
}

/* Fills io field by field: a struct copied whole right after its fields were written would wait for
 * every store before it, those of the state included. */
static void open_group(const struct prefill *run, const struct chunk_rows *rows, int64_t group,
                       int64_t left, int64_t v, struct group_io *io)
{
    io->triangle = run->scratch.chunk.triangles + group * TRIANGLE;
    io->b = run->scratch.chunk.b + group * GROUP;
    io->k_factor = run->scratch.chunk.k_factor + group * GROUP;
    io->q_factor = run->scratch.chunk.q_factor + group * GROUP;
    io->count = left < GROUP ? left : GROUP;
    for (int64_t t = 0; t < io->count; t++) {
        io->v[t] = rows->v[group * GROUP + t] + v * rows->v_bytes;
        io->out[t] = rows->out[group * GROUP + t] + v * rows->out_bytes;
    }
}

static void run_pass(const struct prefill *run, float *panel, int64_t group, bool wide, float *u,
                     const struct group_io *io)
{
    const int64_t K = run->plan->K;
    const float *slot = run->scratch.chunk.slots + group * COEF_ROWS * K;
    if (!wide)
        narrow_pass(panel, slot, K, group > 0, u, io);
    else if (group > 0)
        pass_next(panel, slot, K, u, io);
    else
        pass_first(panel, slot, K, u, io);
}

/* All passes of a prepared chunk over the panels of one head. */
static void run_chunk(const struct prefill *run, int64_t h, int64_t t0, int64_t count,
                      struct upcoming *next)
{
    const int64_t K = run->plan->K, v_count = run->task->v_count;
    const int64_t groups = (count + GROUP - 1) / GROUP;
    const float *last_slot = run->scratch.chunk.slots + groups * COEF_ROWS * K;
    float u[PANELS_TOGETHER][GROUP * PANEL_WIDTH] __attribute__((aligned(64)));
    struct chunk_rows rows;
    open_rows(run, run->task->head_begin + h, t0, count, &rows);
    struct group_io io = {.v_bf16 = rows.v_bytes == 2, .out_bf16 = rows.out_bytes == 2};
    const int64_t together = PANELS_TOGETHER * PANEL_WIDTH;
    for (int64_t base = 0; base < v_count; base += together) {
        int64_t end = base + together < v_count ? base + together : v_count;
        float *panels = panels_of(run, h);
        for (int64_t g = 0; g < groups; g++) {
            int p = 0;
            for (int64_t v = base; v < end; v += PANEL_WIDTH, p++) {
                prefetch_token(run, next, &io);
                open_group(run, &rows, g, count - g * GROUP, v, &io);
                run_pass(run, panels + v * K, g, v_count - v >= PANEL_WIDTH, u[p], &io);
            }
        }
        int p = 0;
        for (int64_t v = base; v < end; v += PANEL_WIDTH, p++) {
            if (v_count - v >= PANEL_WIDTH)
                pass_flush(panels + v * K, last_slot, K, u[p]);
            else
                narrow_flush(panels + v * K, last_slot, K, u[p]);
        }
    }
}

static void store_panels(const struct prefill *run, int64_t h, const struct fkda_state_view *view,
                         int64_t slot)
{
    const struct fkda_cpu_task *task = run->task;
    int64_t head = task->head_begin + h;
    for (int64_t v = 0; v < task->v_count && view->data; v += VF_LANES)
        store_rows(panels_of(run, h), run->plan->K, task->v_count, v,
                   fkda_state_row(run->plan, view, slot, head, task->v_begin + v), view->dtype);
}

/* The checkpoint due after `tokens` tokens, if there is one. */
static void store_checkpoint(struct prefill *run, int64_t tokens)
{
    const struct fkda_plan *plan = run->plan;
    for (; run->checkpoint < run->checkpoint_end; run->checkpoint++) {
        int64_t offset = fkda_index_at(plan->checkpoint_offsets, run->checkpoint);
        if (offset > tokens)
            return;
        for (int64_t h = 0; h < run->task->head_count && offset == tokens; h++)
            store_panels(run, h, &plan->checkpoint_state, run->checkpoint);
    }
}

static void copy_state(const struct prefill *run, int64_t h, const struct fkda_state_view *to,
                       int64_t slot)
{
    const struct fkda_plan *plan = run->plan;
    const struct fkda_cpu_task *task = run->task;
    int64_t head = task->head_begin + h;
    const void *from =
        fkda_state_row(plan, &plan->initial_state, run->seq.slot, head, task->v_begin);
    void *image = fkda_state_row(plan, to, slot, head, task->v_begin);
    if (!image || image == from)
        return;
    for (int64_t i = 0; i < task->v_count * plan->K; i++)
        fkda_store_element(image, to->dtype, i,
                           from ? fkda_load_element(from, plan->initial_state.dtype, i) : 0.0f);
}

/* The last `count` tokens by rows: from the panels, or from the initial state if there are none. */
static void run_tail(const struct prefill *run, int64_t h, int64_t t0, int64_t count)
{
    const struct fkda_plan *plan = run->plan;
    const struct fkda_cpu_task *task = run->task;
    struct row_walk walk = {.plan = plan,
                            .seq = &run->seq,
                            .n = task->n,
                            .head = task->head_begin + h,
                            .t0 = t0,
                            .count = count,
                            .tokens = &run->scratch.tokens,
                            .work = run->scratch.work};
    prepare_tokens(plan, &run->seq, walk.head, t0, count, walk.tokens);
    for (int64_t v = 0; v < task->v_count; v += VF_LANES) {
        if (t0 > 0)
            store_rows(panels_of(run, h), plan->K, task->v_count, v, run->scratch.image, FKDA_F32);
        for (int64_t r = v; r < v + VF_LANES; r += ROWS) {
            if (t0 > 0)
                walk_rows(&walk, run->scratch.image + (r - v) * plan->K, FKDA_F32,
                          task->v_begin + r);
            else
                walk_rows(&walk,
                          fkda_state_row(plan, &plan->initial_state, run->seq.slot, walk.head,
                                         task->v_begin + r),
                          plan->initial_state.dtype, task->v_begin + r);
        }
    }
}

static void zero_outputs(const struct fkda_cpu_task *task, const struct fkda_sequence *seq)
{
    const struct fkda_view *out = &task->plan->out;
    size_t bytes = (size_t)task->v_count * fkda_element_bytes(out->dtype);
    for (int64_t t = 0; t < seq->length; t++)
        for (int64_t h = 0; h < task->head_count; h++)
            memset(fkda_row(out, seq, t, task->head_begin + h, task->v_begin), 0, bytes);
}

/* Whole chunks of all heads, and a tail that is not walked by rows. */
static void run_panels(struct prefill *run, int64_t tokens)
{
    const struct fkda_cpu_task *task = run->task;
    const struct fkda_plan *plan = run->plan;
    for (int64_t h = 0; h < task->head_count; h++) {
        run->gates[h] = gate_of_head(plan, task->head_begin + h);
        load_panels(panels_of(run, h), plan->K, task->v_count,
                    fkda_state_row(plan, &plan->initial_state, run->seq.slot, task->head_begin + h,
                                   task->v_begin),
                    plan->initial_state.dtype);
    }
    store_checkpoint(run, 0);
    for (int64_t t = 0; t < tokens; t += CHUNK) {
        int64_t count = tokens - t < CHUNK ? tokens - t : CHUNK;
        for (int64_t h = 0; h < task->head_count; h++) {
            int64_t head = task->head_begin + h;
            bool last = h + 1 == task->head_count;
            struct upcoming next = {.head = last ? task->head_begin : head + 1,
                                    .t = last ? t + CHUNK : t};
            next.key_head = next.head / plan->heads_per_key;
            next.end = next.t + CHUNK < tokens ? next.t + CHUNK : tokens;
            prepare_chunk(plan, &run->seq, &run->gates[h], head, t, count, &run->scratch.chunk);
            run_chunk(run, h, t, count, &next);
        }
        store_checkpoint(run, t + count);
    }
}

static void prefill_task(const struct fkda_cpu_task *task)
{
    const struct fkda_plan *plan = task->plan;
    struct prefill run = {.task = task,
                          .plan = plan,
                          .seq = fkda_plan_sequence(plan, task->n),
                          .scratch = carve_scratch(task->scratch, plan->K),
                          .v_per_block = plan->V * COEF_BLOCK / plan->K};
    if (run.seq.slot < 0) {
        zero_outputs(task, &run.seq);
        return;
    }
    fkda_plan_checkpoints(plan, task->n, &run.checkpoint, &run.checkpoint_end);
    int64_t tail = run.seq.length % CHUNK;
    if (tail > ROW_TOKENS)
        tail = 0;
    int64_t tokens = run.seq.length - tail;
    if (tokens > 0)
        run_panels(&run, tokens);
    for (int64_t h = 0; h < task->head_count; h++) {
        if (tokens == 0)
            for (int64_t m = run.checkpoint; m < run.checkpoint_end; m++)
                if (fkda_index_at(plan->checkpoint_offsets, m) == 0)
                    copy_state(&run, h, &plan->checkpoint_state, m);
        if (tail > 0)
            run_tail(&run, h, tokens, tail);
        else if (tokens > 0)
            store_panels(&run, h, &plan->final_state, run.seq.slot);
        else
            copy_state(&run, h, &plan->final_state, run.seq.slot);
    }
}

/* ---- Decode ---------------------------------------------------------------------------------- */

static void decode_task(const struct fkda_cpu_task *task)
{
    const struct fkda_plan *plan = task->plan;
    struct fkda_sequence seq = fkda_plan_sequence(plan, task->n);
    if (seq.slot < 0) {
        zero_outputs(task, &seq);
        return;
    }
    struct scratch scratch = carve_scratch(task->scratch, plan->K);
    for (int64_t h = 0; h < task->head_count && seq.length > 0; h++) {
        struct row_walk walk = {.plan = plan,
                                .seq = &seq,
                                .n = task->n,
                                .head = task->head_begin + h,
                                .count = seq.length,
                                .tokens = &scratch.tokens,
                                .work = scratch.work,
                                .every_state = plan->num_accepted_tokens.data != NULL};
        prepare_tokens(plan, &seq, walk.head, 0, seq.length, walk.tokens);
        for (int64_t v = task->v_begin; v < task->v_begin + task->v_count; v += ROWS)
            walk_rows(&walk, fkda_state_row(plan, &plan->final_state, seq.slot, walk.head, v),
                      plan->final_state.dtype, v);
    }
}

#endif /* FKDA_KERNEL_SET_INC_H */
