/* test_prefill_bf16.c: prefill with bf16 products (src/cpu/prefill_bf16.h), every set that this
 * machine has, against the float64 definition, and bit by bit against itself. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <cmocka.h>

#include "core/bf16.h"
#include "cpu/kernel_sets.h"
#include "cpu_case.h"

#define BOUND 4e-3

static const fkda_isa sets[] = {FKDA_ISA_AVX512_BF16, FKDA_ISA_AMX_BF16};

static bool usable(fkda_isa isa)
{
    return fkda_cpu_isa_usable() >> isa & 1u;
}

/* Runs the body for every usable set; a machine without any skips the test and says so. */
#define FOR_EACH_SET(isa)                                               \
    if (!usable(sets[0]) && !usable(sets[1])) {                         \
        print_message("no processor support for bf16 products here\n"); \
        skip();                                                         \
    }                                                                   \
    for (size_t set_ = 0; set_ < 2; set_++)                             \
        for (fkda_isa isa = sets[set_]; usable(isa) && isa == sets[set_]; isa = FKDA_ISA_COUNT)

static void run(const fkda_args *args, fkda_isa isa, int threads)
{
    char reason[FKDA_REASON_BYTES] = "";
    fkda_report report;
    fkda_args call = *args;
    call.isa = (int32_t)isa;
    call.precision = FKDA_PRECISION_BF16;
    call.num_threads = threads;
    call.report = &report;
    if (fkda_forward(&call, reason, sizeof reason) != FKDA_OK)
        fail_msg("%s", reason);
    char wanted[64];
    snprintf(wanted, sizeof wanted, "cpu/%s/prefill_bf16", fkda_isa_name(isa));
    assert_string_equal(report.kernel, wanted);
}

static void check(struct cpu_case *c, fkda_isa isa, double out_bound, double state_bound)
{
    cpu_case_poison(c);
    run(&c->args, isa, 1);
    double out =
        cpu_error(c->args.out.data, (fkda_dtype)c->args.out.dtype, c->expected_out, c->out_count);
    double state = c->expected_state
                       ? cpu_error(c->args.final_state.data, (fkda_dtype)c->args.final_state.dtype,
                                   c->expected_state, c->state_count)
                       : 0;
    if (!(out <= out_bound) || !(state <= state_bound))
        fail_msg("%s: T %lld K %lld V %lld: out %.3g, state %.3g", fkda_isa_name(isa),
                 (long long)c->shape.T, (long long)c->shape.K, (long long)c->shape.V, out, state);
}

static void check_shape(const struct cpu_shape *shape)
{
    struct cpu_case c;
    cpu_case_open(&c, shape);
    cpu_case_reference(&c);
    FOR_EACH_SET(isa)
    check(&c, isa, BOUND, BOUND);
    cpu_case_close(&c);
}

/* ---- Against the definition ------------------------------------------------------------------ */

static void every_length(void **state)
{
    (void)state;
    for (int64_t T = 1; T <= 64; T++)
        check_shape(&(struct cpu_shape){.T = T, .H = 2, .seed = (uint64_t)T});
    check_shape(&(struct cpu_shape){.T = 129}); /* one past a group of chunks */
    check_shape(&(struct cpu_shape){.T = 255});
}

static void every_gate(void **state)
{
    (void)state;
    const fkda_gate gates[] = {FKDA_GATE_BOUNDED, FKDA_GATE_SOFTPLUS, FKDA_GATE_ACTIVATED};
    for (int regime = CPU_RANDOM; regime <= CPU_SATURATED; regime++)
        for (int i = 0; i < 3; i++)
            check_shape(&(struct cpu_shape){
                .T = 300, .H = 2, .regime = (enum cpu_regime)regime, .gate = gates[i]});
}

static void every_head_size(void **state)
{
    (void)state;
    const int64_t sizes[] = {32, 64, 96, 128, 160, 256};
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < 6; j++)
            check_shape(&(struct cpu_shape){.T = 53, .K = sizes[i], .V = sizes[j]});
}

static void every_dtype(void **state)
{
    (void)state;
    for (int bits = 0; bits < 128; bits += 3) {
        fkda_dtype d[7];
        for (int i = 0; i < 7; i++)
            d[i] = bits >> i & 1 ? FKDA_F32 : FKDA_BF16;
        check_shape(&(struct cpu_shape){.T = 37,
                                        .q = d[0],
                                        .k = d[1],
                                        .v = d[2],
                                        .g = d[3],
                                        .beta = d[4],
                                        .out = d[5],
                                        .initial = d[6],
                                        .final = d[(bits + 1) % 7]});
    }
}

static void every_flag(void **state)
{
    (void)state;
    for (uint32_t flags = 1; flags < 8; flags++)
        for (int regime = CPU_RANDOM; regime <= CPU_SATURATED; regime++)
            check_shape(&(struct cpu_shape){
                .T = 70, .H = 2, .HV = 4, .flags = flags, .regime = (enum cpu_regime)regime});
}

static void scale_values(fkda_tensor *tensor, size_t count, double factor)
{
    for (size_t i = 0; i < count; i++) {
        if (tensor->dtype == FKDA_BF16) {
            uint16_t *x = (uint16_t *)tensor->data + i;
            *x = fkda_bf16_from_double((double)fkda_bf16_to_float(*x) * factor);
        } else {
            ((float *)tensor->data)[i] *= (float)factor;
        }
    }
}

/* Values and state of any size, keys and queries of any size before the norm. */
static void magnitudes(void **state)
{
    (void)state;
    const double factors[] = {1e-20, 1e-6, 1e6, 1e20, 1e30};
    for (int i = 0; i < 5; i++) {
        struct cpu_case c;
        cpu_case_open(&c, &(struct cpu_shape){.T = 70});
        scale_values(&c.args.v, c.out_count, factors[i]);
        scale_values(&c.args.initial_state, c.state_count, factors[i]);
        cpu_case_reference(&c);
        FOR_EACH_SET(isa)
        check(&c, isa, BOUND, BOUND);
        cpu_case_close(&c);
    }
    const double key_factors[] = {1e-20, 1e-3, 1e3, 1e20};
    for (int i = 0; i < 4; i++) {
        struct cpu_case c;
        cpu_case_open(&c, &(struct cpu_shape){.T = 70});
        scale_values(&c.args.k, 70 * 128, key_factors[i]);
        scale_values(&c.args.q, 70 * 128, key_factors[3 - i]);
        cpu_case_reference(&c);
        FOR_EACH_SET(isa)
        check(&c, isa, BOUND, BOUND);
        cpu_case_close(&c);
    }
}

/* Decays that leave the range of the factors for some chunks: minus infinity, and down to 2^-2000 a
 * token, between chunks that stay inside. */
static void deep_gates(void **state)
{
    (void)state;
    struct cpu_case c;
    cpu_case_open(&c, &(struct cpu_shape){.T = 100, .gate = FKDA_GATE_ACTIVATED, .g = FKDA_F32});
    float *g = c.args.g.data;
    uint64_t seed = 5;
    for (int t = 20; t < 60; t++)
        for (int i = 0; i < 128; i++)
            g[t * 128 + i] = (float)(-50 * cpu_normal(&seed) * cpu_normal(&seed));
    for (int t = 20; t < 60; t++)
        for (int i = 0; i < 128; i++)
            if (g[t * 128 + i] > 0)
                g[t * 128 + i] = -g[t * 128 + i];
    g[81 * 128 + 5] = -INFINITY;
    cpu_case_reference(&c);
    FOR_EACH_SET(isa)
    check(&c, isa, BOUND, BOUND);
    cpu_case_close(&c);
}

/* exp(A_log) far outside float32, biases of both signs; and a caller that traps what overflows. */
static void huge_gate_factors(void **state)
{
    (void)state;
    static const float logs[] = {80.0f, 88.0f, 100.0f, 1000.0f};
    for (int i = 0; i < 8; i++) {
        struct cpu_case c;
        cpu_case_open(&c, &(struct cpu_shape){
                              .T = 53, .gate = i % 2 ? FKDA_GATE_SOFTPLUS : FKDA_GATE_BOUNDED});
        ((float *)c.args.A_log.data)[0] = logs[i / 2];
        cpu_case_reference(&c);
        FOR_EACH_SET(isa)
        {
#ifdef __SSE__
            unsigned before = _mm_getcsr();
            _mm_setcsr(before & ~0x680u); /* invalid, divide by zero, overflow */
#endif
            check(&c, isa, BOUND, BOUND);
#ifdef __SSE__
            assert_int_equal(_mm_getcsr() & 0xffc0u, before & ~0x680u & 0xffc0u);
            _mm_setcsr(before);
#endif
        }
        cpu_case_close(&c);
    }
}

/* cases.md 1: one key for all tokens (q = k), values of period 16, b near 1, hardly any decay; and
 * sixteen keys that differ by a thousandth. What is written along directions that are never read
 * must not pile up. */
static void collinear_keys(void **state)
{
    (void)state;
    for (int near = 0; near < 2; near++) {
        struct cpu_case c;
        int64_t T = near ? 16 : 4096;
        cpu_case_open(
            &c,
            &(struct cpu_shape){
                .T = T, .no_initial = true, .k = FKDA_F32, .q = FKDA_F32, .regime = CPU_NO_DECAY});
        float *q = c.args.q.data, *k = c.args.k.data;
        uint16_t *v = c.args.v.data, *beta = c.args.beta.data, *g = c.args.g.data;
        uint64_t seed = 9;
        for (int64_t t = 0; t < T; t++) {
            for (int i = 0; i < 128; i++) {
                if (t)
                    k[t * 128 + i] = k[i] + (near ? 1e-3f * (float)cpu_normal(&seed) : 0);
                q[t * 128 + i] = k[t * 128 + i];
                if (t >= 16)
                    v[t * 128 + i] = v[(t - 16) * 128 + i];
                g[t * 128 + i] = fkda_bf16_from_float(-12);
            }
            beta[t] = fkda_bf16_from_float(8);
        }
        cpu_case_reference(&c);
        FOR_EACH_SET(isa)
        check(&c, isa, BOUND, BOUND);
        cpu_case_close(&c);
    }
}

/* cases.md 23: the error does not grow with the sequence. */
static void long_slow_decay(void **state)
{
    (void)state;
    for (int64_t T = 1024; T <= 16384; T *= 16)
        check_shape(&(struct cpu_shape){.T = T, .regime = CPU_NO_DECAY});
}

/* ---- Bit by bit ------------------------------------------------------------------------------ */

struct result {
    uint8_t *out, *state;
    size_t out_bytes, state_bytes;
};

static void *copy(const void *data, size_t bytes)
{
    void *p = malloc(bytes + 1);
    assert_non_null(p);
    memcpy(p, data, bytes);
    return p;
}

static struct result keep(const struct cpu_case *c)
{
    struct result r;
    r.out_bytes = c->out_count * fkda_dtype_bytes((fkda_dtype)c->args.out.dtype);
    r.state_bytes = c->state_count * fkda_dtype_bytes((fkda_dtype)c->args.final_state.dtype);
    r.out = copy(c->args.out.data, r.out_bytes);
    r.state = copy(c->args.final_state.data, r.state_bytes);
    return r;
}

static void drop(struct result *r)
{
    free(r->out);
    free(r->state);
}

static void assert_same(const struct cpu_case *c, const struct result *r)
{
    assert_memory_equal(c->args.out.data, r->out, r->out_bytes);
    assert_memory_equal(c->args.final_state.data, r->state, r->state_bytes);
}

static void threads_and_repeats(void **state)
{
    (void)state;
    const int64_t cu[] = {0, 17, 17, 48, 181};
    const struct cpu_shape shapes[] = {
        {.T = 200, .H = 1}, {.T = 150, .H = 3, .V = 256}, {.T = 181, .H = 5, .N = 4, .cu = cu}};
    for (int i = 0; i < 3; i++) {
        struct cpu_case c;
        cpu_case_open(&c, &shapes[i]);
        FOR_EACH_SET(isa)
        {
            cpu_case_poison(&c);
            run(&c.args, isa, 1);
            struct result r = keep(&c);
            for (int threads = 2; threads <= 9; threads++) { /* more than heads: V is cut too */
                cpu_case_poison(&c);
                run(&c.args, isa, threads);
                assert_same(&c, &r);
            }
            for (int repeat = 0; repeat < 50; repeat++) {
                cpu_case_poison(&c);
                run(&c.args, isa, 1 + repeat % 2);
                assert_same(&c, &r);
            }
            drop(&r);
        }
        cpu_case_close(&c);
    }
}

/* Tokens [begin, begin + T) of a tensor [1, T, ...]. */
static fkda_tensor tokens(fkda_tensor tensor, int64_t begin, int64_t T)
{
    tensor.data = (char *)tensor.data +
                  begin * tensor.stride[1] * (int64_t)fkda_dtype_bytes((fkda_dtype)tensor.dtype);
    tensor.shape[1] = T;
    return tensor;
}

static fkda_args piece(const fkda_args *args, int64_t begin, int64_t T)
{
    fkda_args p = *args;
    p.q = tokens(args->q, begin, T);
    p.k = tokens(args->k, begin, T);
    p.v = tokens(args->v, begin, T);
    p.g = tokens(args->g, begin, T);
    p.beta = tokens(args->beta, begin, T);
    p.out = tokens(args->out, begin, T);
    return p;
}

/* One call against two, cut at multiples of 16, the fp32 state handed over in place. */
static void cut_calls(void **state)
{
    (void)state;
    const enum cpu_regime regimes[] = {CPU_RANDOM, CPU_SLOW};
    for (int i = 0; i < 2; i++) {
        struct cpu_case c;
        cpu_case_open(&c, &(struct cpu_shape){.T = 293, .H = 2, .regime = regimes[i]});
        FOR_EACH_SET(isa)
        {
            cpu_case_poison(&c);
            run(&c.args, isa, 1);
            struct result r = keep(&c);
            for (int64_t cut = 16; cut < 293; cut += 16) {
                cpu_case_poison(&c);
                fkda_args first = piece(&c.args, 0, cut), second = piece(&c.args, cut, 293 - cut);
                run(&first, isa, 1);
                second.initial_state = second.final_state;
                run(&second, isa, 2);
                assert_same(&c, &r);
            }
            drop(&r);
        }
        cpu_case_close(&c);
    }
}

/* cases.md 47: a checkpoint is the final state of the prefix run alone. */
static void checkpoints(void **state)
{
    (void)state;
    enum { M = 7 };
    int64_t offsets[M] = {0, 16, 48, -1, 128, 144, 288};
    struct cpu_case c;
    cpu_case_open(&c, &(struct cpu_shape){.T = 300, .H = 2});
    const int64_t shape[] = {M, 2, 128, 128}, offsets_shape[] = {M};
    float *saved = cpu_case_alloc(&c, M * 2 * 128 * 128 * sizeof(float));
    size_t bytes = 2 * 128 * 128 * sizeof(float);
    FOR_EACH_SET(isa)
    {
        memset(saved, 0xff, M * bytes);
        fkda_args args = c.args;
        args.checkpoint_state = fkda_tensor_contiguous(saved, FKDA_F32, 4, shape);
        args.checkpoint_offsets = fkda_tensor_contiguous(offsets, FKDA_I64, 1, offsets_shape);
        cpu_case_poison(&c);
        run(&c.args, isa, 1);
        struct result r = keep(&c);
        cpu_case_poison(&c);
        run(&args, isa, 2);
        assert_same(&c, &r);
        drop(&r);
        for (int m = 0; m < M; m++) {
            if (offsets[m] < 0) {
                for (size_t i = 0; i < bytes; i++)
                    assert_int_equal(((uint8_t *)saved)[(size_t)m * bytes + i], 0xff);
                continue;
            }
            fkda_args prefix = piece(&c.args, 0, offsets[m]);
            run(&prefix, isa, 1);
            assert_memory_equal((char *)saved + (size_t)m * bytes, c.args.final_state.data, bytes);
        }
    }
    cpu_case_close(&c);
}

/* cases.md 2 and 30: what a neighbour or a padded row holds is never read, and those rows are never
 * written. */
static void neighbours(void **state)
{
    (void)state;
    const int64_t cu[] = {0, 17, 48};
    struct cpu_case c;
    cpu_case_open(&c, &(struct cpu_shape){.T = 70, .H = 2, .N = 2, .cu = cu});
    size_t row = 2 * 128, image = 2 * 128 * 128;
    FOR_EACH_SET(isa)
    {
        cpu_case_poison(&c);
        run(&c.args, isa, 1);
        struct result r = keep(&c);
        for (size_t i = 48 * row; i < 70 * row; i++)
            assert_int_equal(((uint16_t *)c.args.out.data)[i], 0xffff);
        fkda_tensor *inputs[] = {&c.args.q, &c.args.k, &c.args.v, &c.args.g};
        for (int i = 0; i < 4; i++) {
            uint16_t *data = inputs[i]->data;
            uint16_t *saved = copy(data, 70 * row * 2);
            memset(data + 17 * row, 0xff, 53 * row * 2);
            cpu_case_poison(&c);
            run(&c.args, isa, 1);
            assert_memory_equal(c.args.out.data, r.out, 17 * row * 2);
            assert_memory_equal(c.args.final_state.data, r.state, image * 4);
            for (size_t j = 20 * row; j < 21 * row; j++) /* and a NaN does not get lost */
                assert_true(i == 1 || (((uint16_t *)c.args.out.data)[j] & 0x7fff) > 0x7f80);
            memcpy(data, saved, 70 * row * 2);
            free(saved);
        }
        drop(&r);
    }
    cpu_case_close(&c);
}

/* Inputs and outputs with gaps, a pool of states with a padded slot, int32 offsets. */
static void strides_and_slots(void **state)
{
    (void)state;
    const int64_t cu[] = {0, 35, 60, 99};
    struct cpu_case c;
    cpu_case_open(&c, &(struct cpu_shape){.T = 99, .H = 2, .N = 3, .cu = cu});
    enum { ROW = 3 * 2 * 128 };
    uint16_t *wide = cpu_case_alloc(&c, 99 * ROW * 2), *wide_out = cpu_case_alloc(&c, 99 * ROW * 2);
    const uint16_t *v = c.args.v.data;
    for (int t = 0; t < 99; t++)
        memcpy(wide + t * ROW + 32, v + t * 256, 512);
    const size_t image = 2 * 128 * 128;
    float *pool = cpu_case_alloc(&c, 5 * image * 4);
    const int64_t pool_shape[] = {5, 2, 128, 128}, three[] = {3}, four[] = {4};
    int32_t slots[] = {4, -1, 0}, cu32[] = {0, 35, 60, 99};
    FOR_EACH_SET(isa)
    {
        cpu_case_poison(&c);
        run(&c.args, isa, 1);
        memset(pool, 0xff, 5 * image * 4);
        memset(wide_out, 0xff, 99 * ROW * 2);
        memcpy(pool + 4 * image, c.args.initial_state.data, image * 4);
        memcpy(pool, (float *)c.args.initial_state.data + 2 * image, image * 4);
        fkda_args args = c.args;
        args.v.data = wide + 32;
        args.v.stride[0] = 99 * ROW;
        args.v.stride[1] = ROW;
        args.out.data = wide_out + 64;
        args.out.stride[0] = 99 * ROW;
        args.out.stride[1] = ROW;
        args.cu_seqlens = fkda_tensor_contiguous(cu32, FKDA_I32, 1, four);
        args.state_indices = fkda_tensor_contiguous(slots, FKDA_I32, 1, three);
        args.initial_state = args.final_state =
            fkda_tensor_contiguous(pool, FKDA_F32, 4, pool_shape);
        run(&args, isa, 2);
        const float *final = c.args.final_state.data;
        assert_memory_equal(pool + 4 * image, final, image * 4);
        assert_memory_equal(pool, final + 2 * image, image * 4);
        for (size_t i = image; i < 4 * image; i++)
            assert_int_equal(((uint32_t *)(void *)pool)[i], 0xffffffff);
        for (int t = 0; t < 99; t++) {
            const uint16_t *got = wide_out + t * ROW + 64;
            for (int i = 0; i < 256 && t >= 35 && t < 60; i++)
                assert_int_equal(got[i], 0);
            if (t < 35 || t >= 60)
                assert_memory_equal(got, (uint16_t *)c.args.out.data + t * 256, 512);
            assert_int_equal(got[256], 0xffff);
            assert_int_equal(got[-1], 0xffff);
        }
    }
    cpu_case_close(&c);
}

/* cases.md 3 and 4. */
static void empty_sequences(void **state)
{
    (void)state;
    const int64_t cu[] = {0, 0, 0, 17, 17, 48, 48, 48};
    check_shape(&(struct cpu_shape){.T = 48, .H = 2, .N = 7, .cu = cu});
    check_shape(&(struct cpu_shape){
        .T = 48, .H = 2, .N = 7, .cu = cu, .no_initial = true, .final = FKDA_BF16});
    check_shape(&(struct cpu_shape){.T = 0, .B = 2, .initial = FKDA_BF16, .final = FKDA_BF16});
}

/* From 16 MB on, outputs whose rows are whole cache lines are stored past the caches. What they are
 * does not depend on it: the same call with an output that begins two bytes later. */
static void outputs_past_the_caches(void **state)
{
    (void)state;
    const int64_t cu[] = {0, 1001, 2053};
    struct cpu_case c;
    cpu_case_open(&c, &(struct cpu_shape){.T = 2053, .HV = 32, .N = 2, .cu = cu});
    const size_t bytes = c.out_count * 2;
    assert_true(bytes >= 16 << 20);
    uint16_t *shifted = cpu_case_alloc(&c, bytes + 2);
    fkda_args args = c.args;
    args.out.data = shifted + 1;
    FOR_EACH_SET(isa)
    {
        memset(shifted, 0xff, bytes + 2);
        run(&args, isa, 1);
        for (int threads = 1; threads <= 2; threads++) {
            cpu_case_poison(&c);
            run(&c.args, isa, threads);
            assert_memory_equal(c.args.out.data, shifted + 1, bytes);
        }
    }
    cpu_case_close(&c);
}

/* ---- Refusals -------------------------------------------------------------------------------- */

static void unsupported_head_sizes(void **state)
{
    (void)state;
    const struct {
        int64_t K, V;
        const char *says;
    } cases[] = {{48, 64, "K = 48"}, {64, 48, "V = 48"}, {16, 16, "K = 16"}};
    for (int i = 0; i < 3; i++) {
        struct cpu_case c;
        cpu_case_open(&c, &(struct cpu_shape){.T = 20, .K = cases[i].K, .V = cases[i].V});
        FOR_EACH_SET(isa)
        {
            char reason[FKDA_REASON_BYTES] = "";
            cpu_case_poison(&c);
            struct result r = keep(&c);
            c.args.isa = (int32_t)isa;
            c.args.precision = FKDA_PRECISION_BF16;
            assert_int_equal(fkda_forward(&c.args, reason, sizeof reason), FKDA_ERROR_UNSUPPORTED);
            assert_non_null(strstr(reason, cases[i].says));
            assert_same(&c, &r);
            drop(&r);
        }
        cpu_case_close(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_length),      cmocka_unit_test(every_gate),
        cmocka_unit_test(every_head_size),   cmocka_unit_test(every_dtype),
        cmocka_unit_test(every_flag),        cmocka_unit_test(magnitudes),
        cmocka_unit_test(deep_gates),        cmocka_unit_test(collinear_keys),
        cmocka_unit_test(long_slow_decay),   cmocka_unit_test(threads_and_repeats),
        cmocka_unit_test(cut_calls),         cmocka_unit_test(checkpoints),
        cmocka_unit_test(neighbours),        cmocka_unit_test(strides_and_slots),
        cmocka_unit_test(empty_sequences),   cmocka_unit_test(unsupported_head_sizes),
        cmocka_unit_test(huge_gate_factors), cmocka_unit_test(outputs_past_the_caches),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
