/* prefill_bf16.h: prefill with bf16 products, for the two sets that have them.
 *
 * Per chunk of 16 tokens, with the operands of prepare_bf16.h and the entering state S0 (carried in
 * fp32, met by the products through its bf16 shadow):
 *
 *     A, P   from kd ki^T and qd ki^T                                    pair_products
 *     pk = kd S0^T,  o = qd S0^T                                         row_products
 *     u_t = b_t (v_t - pk_t) - sum_{s<t} A[t,s] u_s       in fp32        solve_block
 *     o += P u,  S1 = S0 diag(2^(G_C)) + u^T kr           16 bits each   finish_panel
 *
 * Included by prefill_amx_bf16.c and prefill_avx512_bf16.c behind these products, which are theirs,
 * and KR_SPLIT: whether kr, P and u are two bf16 terms (tiles) or fp32 (vector FMAs).
 */
#ifndef FKDA_PREFILL_BF16_H
#define FKDA_PREFILL_BF16_H

enum { BF16_HEADS = 8 }; /* a task's at most */

/* u of one block of 16 value channels: forward substitution in registers. `odd` says which. */
BF16_INLINE void solve_block(struct work *work, const struct chunk *chunk, struct rows v,
                             int64_t channel, int odd)
{
    const float *pk = work->pk + odd * BLOCK;
    vf u[CHUNK];
#pragma GCC unroll 16
    for (int t = 0; t < CHUNK; t++) {
        vf x = _mm512_setzero_ps();
        if (t < chunk->tokens) {
            struct pair row = pair_load(v.first + t * v.stride_bytes, v.dtype, channel);
            x = _mm512_mul_ps(odd ? row.odd : row.even, _mm512_set1_ps(chunk->b[t]));
        }
        x = _mm512_fnmadd_ps(_mm512_load_ps(pk + t * 16), _mm512_set1_ps(chunk->b_pk[t]), x);
#pragma GCC unroll 16
        for (int s = 0; s < t; s++)
            x = _mm512_fnmadd_ps(u[s], _mm512_set1_ps(chunk->a[t * CHUNK + s]), x);
        u[t] = x;
    }
    store_u(work, odd, u);
}

static void store_outputs(const struct work *work, const struct chunk *chunk, int64_t channel)
{
    const struct fkda_view *out = &work->head->plan->out;
    struct rows rows = rows_of(work->head, out, chunk->begin, work->head->index);
    const vf factor = _mm512_set1_ps(1.0f / REFERENCE);
    for (int64_t t = 0; t < chunk->tokens; t++) {
        const float *x = work->out + t * 16;
        char *row = (char *)(uintptr_t)rows.first + t * rows.stride_bytes;
        struct pair o = {_mm512_mul_ps(_mm512_load_ps(x), factor),
                         _mm512_mul_ps(_mm512_load_ps(x + BLOCK), factor)};
        if (work->stream)
            _mm512_stream_si512((void *)((uint16_t *)(void *)row + channel), pair_to_bf16(o));
        else
            pair_store(row, out->dtype, channel, o);
    }
}

/* One chunk on one panel: value channels `channel` to channel + 31. */
BF16_INLINE void run_panel(struct work *work, const struct chunk *chunk, int64_t panel, int64_t K,
                           bool bf16_rows)
{
    int64_t channel = work->v_begin + panel * 32;
    if (chunk->walk) {
        walk_panel(work, chunk, panel);
    } else {
        struct rows v = rows_of(work->head, &work->head->plan->v, chunk->begin, work->head->index);
        if (bf16_rows)
            v.dtype = FKDA_BF16;
        row_products(work, chunk, panel, K);
        solve_block(work, chunk, v, channel, 0);
        solve_block(work, chunk, v, channel, 1);
        finish_panel(work, chunk, panel, K);
    }
    store_outputs(work, chunk, channel);
}

/* While chunk i of `chunks` is on a panel: four tokens of the next group's q and k are fetched, and
 * the lines that the next chunk on a panel writes. */
BF16_INLINE void aim_panel_fetch(struct work *work, int64_t panel, int64_t i, int64_t chunks)
{
    const struct head *head = work->head;
    const struct fkda_plan *plan = head->plan;
    const int64_t token = work->next_t + 4 * (panel * chunks + i);
    const int64_t next_key = work->next_head / plan->heads_per_key;
    struct panel_fetch *ahead = &work->ahead;
    ahead->q = rows_of(head, &plan->q, token, next_key);
    ahead->k = rows_of(head, &plan->k, token, next_key);
    if (work->stream) { /* writes need no line: ask for one that is at hand, which costs nothing */
        ahead->out = (struct rows){(const char *)work->ring, 0, FKDA_BF16};
        return;
    }
    int64_t begin = work->chunks[0].begin, index = head->index, next_panel = panel + 1;
    if (i + 1 < chunks) {
        begin = work->chunks[i + 1].begin;
        next_panel = panel;
    } else if (next_panel == work->blocks / 2) {
        begin = work->next_t;
        index = work->next_head;
        next_panel = 0;
    }
    const int64_t channel = work->v_begin + 32 * next_panel;
    ahead->out = rows_of(head, &plan->out, begin, index);
    ahead->out.first += channel * (int64_t)fkda_element_bytes(plan->out.dtype);
}

/* While chunk i of `chunks`, which begins with token t, is prepared: the rows of the next one, and
 * its own v. */
BF16_INLINE struct chunk_fetch aim_chunk_fetch(const struct work *work, int64_t t, int64_t i,
                                               int64_t chunks)
{
    const struct head *head = work->head;
    const struct fkda_plan *plan = head->plan;
    const bool same_group = i + 1 < chunks;
    const int64_t next_t = same_group ? t + CHUNK : work->next_t;
    const int64_t next_head = same_group ? head->index : work->next_head;
    const int64_t next_key = next_head / plan->heads_per_key;
    struct chunk_fetch ahead = {.q = rows_of(head, &plan->q, next_t, next_key),
                                .k = rows_of(head, &plan->k, next_t, next_key),
                                .g = rows_of(head, &plan->g, next_t, next_head),
                                .v = rows_of(head, &plan->v, t, head->index),
                                .v_count = work->blocks * 16};
    ahead.v.first += work->v_begin * (int64_t)fkda_element_bytes(plan->v.dtype);
    return ahead;
}

/* `count` tokens from t0 on, at most GROUP chunks. */
BF16_INLINE void run_group(struct work *work, int64_t t0, int64_t count, int64_t K, bool bf16_rows,
                           fkda_gate gate)
{
    int64_t chunks = (count + CHUNK - 1) / CHUNK;
    for (int64_t i = 0; i < chunks; i++) {
        struct chunk *chunk = &work->chunks[i];
        chunk->begin = t0 + i * CHUNK;
        chunk->tokens = count - i * CHUNK < CHUNK ? count - i * CHUNK : CHUNK;
        const struct chunk_fetch ahead = aim_chunk_fetch(work, chunk->begin, i, chunks);
        prepare_chunk(chunk, work->draft, work->head, &ahead, K, bf16_rows, gate, KR_SPLIT);
        if (!chunk->walk) {
            pair_products(chunk, work->draft, K);
            finish_pairs(chunk, work->draft, KR_SPLIT);
        }
    }
    for (int64_t panel = 0; panel < work->blocks / 2; panel++) {
        for (int64_t i = 0; i < chunks; i++) {
            aim_panel_fetch(work, panel, i, chunks);
            run_panel(work, &work->chunks[i], panel, K, bf16_rows);
        }
    }
}

/* The common case as its own copy of the code, then any other. */
static void run_group_128(struct work *work, int64_t t0, int64_t count)
{
    run_group(work, t0, count, 128, true, FKDA_GATE_BOUNDED);
}

static void run_group_any(struct work *work, int64_t t0, int64_t count)
{
    const struct fkda_plan *plan = work->head->plan;
    run_group(work, t0, count, plan->K, false, plan->gate);
}

static void zero_outputs(const struct fkda_cpu_task *task, const struct head *head)
{
    const struct fkda_view *out = &task->plan->out;
    for (int64_t t = 0; t < head->seq.length; t++) {
        void *row = fkda_row(out, &head->seq, t, head->index, 0);
        for (int64_t v = task->v_begin; v < task->v_begin + task->v_count; v += 32)
            pair_store(row, out->dtype, v, pair_zero());
    }
}

static void store_states(struct work *work, const struct fkda_cpu_task *task,
                         const struct fkda_state_view *view, int64_t slot)
{
    for (int64_t i = 0; i < task->head_count; i++) {
        select_head(work, task, i);
        state_store(work, view, slot);
    }
}

/* Whether whole lines are written, and so many of them that none would be in a cache when the
 * caller reads it: then storing past the caches saves reading the lines first. */
static bool outputs_pass_the_caches(const struct fkda_plan *plan)
{
    const struct fkda_view *out = &plan->out;
    const uintptr_t strides =
        (uintptr_t)out->stride_b | (uintptr_t)out->stride_t | (uintptr_t)out->stride_h;
    return out->dtype == FKDA_BF16 && ((uintptr_t)out->data | 2 * strides) % 64 == 0 &&
           plan->num_tokens * plan->HV * plan->V * 2 >= 16 << 20;
}

/* The heads take turns, a group of chunks each: their rows of a token lie side by side, most often
 * on one page, and a head alone would meet more pages than a processor remembers before the next
 * head meets them again. */
static void prefill_task(const struct fkda_cpu_task *task)
{
    const struct fkda_plan *plan = task->plan;
    const struct fkda_sequence seq = fkda_plan_sequence(plan, task->n);
    const bool common = plan->K == 128 && plan->gate == FKDA_GATE_BOUNDED &&
                        plan->q.dtype == FKDA_BF16 && plan->k.dtype == FKDA_BF16 &&
                        plan->v.dtype == FKDA_BF16 && plan->g.dtype == FKDA_BF16;
    struct work work;
    int64_t next, last;
    work_begin(&work, task);
    work.stream = outputs_pass_the_caches(plan);
    fkda_plan_checkpoints(plan, task->n, &next, &last);
    for (int64_t i = 0; i < task->head_count; i++) {
        select_head(&work, task, i);
        head_begin(work.head, plan, task->n, task->head_begin + i);
        if (seq.slot < 0)
            zero_outputs(task, work.head);
        else
            state_load(&work, &plan->initial_state, seq.slot);
    }
    if (seq.slot < 0)
        return;
    for (int64_t t = 0;;) {
        for (; next < last && fkda_index_at(plan->checkpoint_offsets, next) <= t; next++)
            if (fkda_index_at(plan->checkpoint_offsets, next) == t)
                store_states(&work, task, &plan->checkpoint_state, next);
        if (t >= seq.length)
            break;
        int64_t end = next < last ? fkda_index_at(plan->checkpoint_offsets, next) : seq.length;
        int64_t count = end - t < GROUP * CHUNK ? end - t : GROUP * CHUNK;
        for (int64_t i = 0; i < task->head_count; i++) {
            const bool last_head = i + 1 == task->head_count;
            select_head(&work, task, i);
            work.next_head = task->head_begin + (last_head ? 0 : i + 1);
            work.next_t = last_head ? t + count : t;
            if (common)
                run_group_128(&work, t, count);
            else
                run_group_any(&work, t, count);
        }
        t += count;
    }
    store_states(&work, task, &plan->final_state, seq.slot);
    _mm_sfence(); /* streamed outputs before whatever tells the caller that they are there */
}

static size_t scratch_bytes(const struct fkda_plan *plan)
{
    size_t fp32 = fkda_avx512_scratch_bytes(plan);
    size_t bf16 = work_bytes(plan->K, plan->V, fkda_heads_per_task(plan, BF16_HEADS));
    return fp32 > bf16 ? fp32 : bf16;
}

/* A set whose fp32 functions are those of the AVX-512 set. */
#define DEFINE_BF16_SET(set, isa_value, is_usable, prefill)  \
    const struct fkda_cpu_kernels fkda_cpu_kernels_##set = { \
        .isa = (isa_value),                                  \
        .name = #set,                                        \
        .usable = (is_usable),                               \
        .prefill_fp32 = fkda_avx512_prefill_fp32,            \
        .prefill_bf16 = (prefill),                           \
        .decode = fkda_avx512_decode,                        \
        .scratch_bytes = scratch_bytes,                      \
        .v_multiple = 32,                                    \
        .prefill_heads = BF16_HEADS,                         \
        .bf16_multiple = 32,                                 \
    }

#endif /* FKDA_PREFILL_BF16_H */
