/* Prefill of every kernel set against the float64 definition: gates, regimes, lengths, sizes,
 * dtypes */
#include <math.h>

#include "cpu_tests.h"

/* Rounding to bfloat16 alone costs 1.6e-3, and a little more by chance where values are few. */
static double bound_out(const struct cpu_case *c)
{
    if (c->shape.out == FKDA_F32)
        return BOUND_OUT_F32;
    return c->out_count < 4096 ? 1.9e-3 : BOUND_OUT_BF16;
}

/* One shape on every kernel set; the reference is computed once. */
static void check_shape(const struct cpu_shape *shape)
{
    struct cpu_case c;
    cpu_case_open(&c, shape);
    cpu_case_reference(&c);
    FOR_EACH_ISA(isa)
    {
        cpu_case_poison(&c);
        run_forward(&c.args, isa, 1);
        double out = cpu_error(c.args.out.data, c.shape.out, c.expected_out, c.out_count);
        double state = 0;
        if (!c.shape.no_final)
            state =
                cpu_error(c.args.final_state.data, c.shape.final, c.expected_state, c.state_count);
        double bound_state = c.shape.final == FKDA_BF16 ? BOUND_OUT_BF16 : BOUND_STATE;
        if (!(out <= bound_out(&c)) || !(state <= bound_state))
            fail_msg("%s B %d T %d H %d HV %d K %d V %d regime %d gate %d: out %.3g state %.3g",
                     fkda_isa_name(isa), (int)c.shape.B, (int)c.shape.T, (int)c.shape.H,
                     (int)c.shape.HV, (int)c.shape.K, (int)c.shape.V, (int)c.shape.regime,
                     (int)c.shape.gate, out, state);
    }
    cpu_case_close(&c);
}

static void every_gate_and_regime(void **unused)
{
    (void)unused;
    for (int gate = FKDA_GATE_BOUNDED; gate <= FKDA_GATE_ACTIVATED; gate++) {
        for (int regime = CPU_RANDOM; regime <= CPU_SATURATED; regime++) {
            if (regime == CPU_NO_DECAY)
                continue; /* its error is bounded by what float32 decays can say: see below */
            struct cpu_shape shape = {.T = 203,
                                      .H = 2,
                                      .regime = (enum cpu_regime)regime,
                                      .gate = (fkda_gate)gate,
                                      .out = FKDA_F32};
            check_shape(&shape);
            shape.out = FKDA_BF16;
            check_shape(&shape);
        }
    }
}

static void every_length_to_64(void **unused)
{
    (void)unused;
    for (int64_t T = 1; T <= 64; T++) {
        check_shape(&(struct cpu_shape){.T = T, .out = FKDA_F32, .seed = (uint64_t)T});
        check_shape(&(struct cpu_shape){
            .T = T, .K = 64, .V = 64, .regime = CPU_SLOW, .out = FKDA_F32, .seed = (uint64_t)T});
    }
}

static void every_head_size(void **unused)
{
    (void)unused;
    for (int64_t K = 16; K <= 256; K += 16) {
        int64_t V = 272 - K;
        check_shape(&(struct cpu_shape){.T = 37, .K = K, .V = V, .out = FKDA_F32});
        check_shape(&(struct cpu_shape){.T = 3, .K = K, .V = V, .out = FKDA_F32});
    }
    check_shape(&(struct cpu_shape){.T = 50, .K = 128, .V = 256, .out = FKDA_F32});
    check_shape(&(struct cpu_shape){.T = 50, .K = 256, .V = 256, .out = FKDA_F32});
}

static void grouped_value_heads(void **unused)
{
    (void)unused;
    check_shape(&(struct cpu_shape){.T = 50, .H = 3, .HV = 6, .out = FKDA_F32});
    check_shape(&(struct cpu_shape){.B = 2, .T = 3, .H = 1, .HV = 5, .out = FKDA_F32});
}

/* Each tensor float32 by itself, then all of them. */
static void every_input_dtype(void **unused)
{
    (void)unused;
    for (int which = 0; which <= 6; which++) {
        struct cpu_shape shape = {.T = 53, .H = 2};
        fkda_dtype *fields[] = {&shape.q, &shape.k, &shape.v, &shape.g, &shape.beta, &shape.out};
        for (int i = 0; i < 6; i++)
            if (which == i || which == 6)
                *fields[i] = FKDA_F32;
        check_shape(&shape);
        shape.T = 2;
        check_shape(&shape);
    }
}

static void every_state_dtype(void **unused)
{
    (void)unused;
    static const int64_t lengths[] = {0, 2, 16, 35, 49};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        for (int mix = 0; mix < 9; mix++) {
            struct cpu_shape shape = {.T = lengths[i], .out = FKDA_F32};
            shape.no_initial = mix % 3 == 2;
            shape.no_final = mix / 3 == 2;
            shape.initial = mix % 3 == 1 ? FKDA_BF16 : FKDA_F32;
            shape.final = mix / 3 == 1 ? FKDA_BF16 : FKDA_F32;
            check_shape(&shape);
        }
    }
}

static void every_flag(void **unused)
{
    (void)unused;
    for (uint32_t flags = 1; flags < 8; flags++) {
        check_shape(&(struct cpu_shape){.T = 70, .flags = flags, .out = FKDA_F32});
        check_shape(&(struct cpu_shape){.T = 2, .flags = flags, .out = FKDA_F32});
    }
}

static void ragged_sequences(void **unused)
{
    (void)unused;
    static const int64_t cu[] = {0, 65, 131, 131, 202, 281, 283};
    check_shape(&(struct cpu_shape){.T = 283, .H = 2, .N = 6, .cu = cu, .out = FKDA_F32});
}

/* The error of a long slow sequence is that of a short one (H 1, K V 64 to keep the test short). */
static void error_does_not_grow(void **unused)
{
    (void)unused;
    static const int64_t lengths[] = {1024, 16384};
    for (int i = 0; i < 2; i++)
        check_shape(&(struct cpu_shape){
            .T = lengths[i], .K = 64, .V = 64, .regime = CPU_SLOW, .out = FKDA_F32});
}

/* Decay 1 - 1e-8: what float32 cannot say of a decay may cost 1e-8 a token, and no more. */
static void almost_no_decay(void **unused)
{
    (void)unused;
    struct cpu_case c;
    cpu_case_open(&c, &(struct cpu_shape){
                          .T = 4096, .K = 64, .V = 64, .regime = CPU_NO_DECAY, .out = FKDA_F32});
    cpu_case_reference(&c);
    FOR_EACH_ISA(isa)
    {
        cpu_case_poison(&c);
        run_forward(&c.args, isa, 1);
        assert_true(cpu_error(c.args.out.data, FKDA_F32, c.expected_out, c.out_count) < 4e-5);
        assert_true(cpu_error(c.args.final_state.data, FKDA_F32, c.expected_state, c.state_count) <
                    4e-5);
    }
    cpu_case_close(&c);
}

/* Softplus and activated gates far below what a product of 16 decays can hold, infinite ones too.
 */
static void deep_gates(void **unused)
{
    (void)unused;
    for (int variant = 0; variant < 3; variant++) {
        struct cpu_case c;
        cpu_case_open(
            &c, &(struct cpu_shape){.T = 67,
                                    .H = 2,
                                    .g = FKDA_F32,
                                    .out = FKDA_F32,
                                    .gate = variant ? FKDA_GATE_ACTIVATED : FKDA_GATE_SOFTPLUS});
        float *g = c.args.g.data;
        for (int64_t i = 0; i < 67 * 2 * 128; i++)
            if (variant == 2)
                g[i] = i % 7 == 3 ? -INFINITY : g[i];
            else
                g[i] *= i % 3 == 0 ? 40.0f : 1.0f;
        if (variant == 1) /* growth is allowed too */
            for (int64_t i = 0; i < 67 * 2 * 128; i++)
                g[i] = i % 3 == 0 && g[i] > 0 ? -g[i] : g[i];
        cpu_case_reference(&c);
        FOR_EACH_ISA(isa)
        {
            cpu_case_poison(&c);
            run_forward(&c.args, isa, 1);
            double out = cpu_error(c.args.out.data, FKDA_F32, c.expected_out, c.out_count);
            double state =
                cpu_error(c.args.final_state.data, FKDA_F32, c.expected_state, c.state_count);
            if (!(out <= BOUND_OUT_F32) || !(state <= BOUND_STATE))
                fail_msg("%s variant %d: out %.3g state %.3g", fkda_isa_name(isa), variant, out,
                         state);
        }
        cpu_case_close(&c);
    }
}

/* exp(A_log) far outside float32: gates that are open or closed, a token without decay among them,
 * and a length that leaves empty places in its last group. */
static void huge_gate_factors(void **unused)
{
    (void)unused;
    static const float logs[] = {-100.0f, 80.0f, 88.0f, 100.0f, 700.0f};
    for (size_t i = 0; i < 2 * (sizeof logs / sizeof logs[0]); i++) {
        struct cpu_case c;
        cpu_case_open(&c,
                      &(struct cpu_shape){.T = 23,
                                          .g = FKDA_F32,
                                          .out = FKDA_F32,
                                          .gate = i % 2 ? FKDA_GATE_SOFTPLUS : FKDA_GATE_BOUNDED});
        ((float *)c.args.A_log.data)[0] = logs[i / 2];
        float *g = c.args.g.data;
        for (int64_t t = 0; t < 23; t++)
            for (int64_t d = 0; d < 128; d++)
                g[t * 128 + d] = t % 5 == 2 ? -3000.0f : 10 * g[t * 128 + d];
        cpu_case_reference(&c);
        FOR_EACH_ISA(isa)
        {
            cpu_case_poison(&c);
            run_forward(&c.args, isa, 1);
            double out = cpu_error(c.args.out.data, FKDA_F32, c.expected_out, c.out_count);
            double state =
                cpu_error(c.args.final_state.data, FKDA_F32, c.expected_state, c.state_count);
            if (!(out <= BOUND_OUT_F32) || !(state <= BOUND_STATE))
                fail_msg("%s A_log %g gate %d: out %.3g state %.3g", fkda_isa_name(isa),
                         (double)logs[i / 2], (int)c.args.gate, out, state);
        }
        cpu_case_close(&c);
    }
}

/* Values and states near the ends of float32: linear in both, so the ratio is the same. */
static void large_and_small_values(void **unused)
{
    (void)unused;
    static const float sizes[] = {1e-25f, 1e-10f, 1e15f, 1e35f};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        struct cpu_case c;
        cpu_case_open(&c, &(struct cpu_shape){
                              .T = 75, .v = FKDA_F32, .out = FKDA_F32, .regime = CPU_SATURATED});
        float *v = c.args.v.data, *S = c.args.initial_state.data;
        for (int64_t i = 0; i < 75 * 128; i++)
            v[i] *= sizes[s];
        for (int64_t i = 0; i < 128 * 128; i++)
            S[i] *= sizes[s];
        cpu_case_reference(&c);
        FOR_EACH_ISA(isa)
        {
            cpu_case_poison(&c);
            run_forward(&c.args, isa, 1);
            double out = cpu_error(c.args.out.data, FKDA_F32, c.expected_out, c.out_count);
            double state =
                cpu_error(c.args.final_state.data, FKDA_F32, c.expected_state, c.state_count);
            if (!(out <= BOUND_OUT_F32) || !(state <= BOUND_STATE))
                fail_msg("%s size %g: out %.3g state %.3g", fkda_isa_name(isa), (double)sizes[s],
                         out, state);
        }
        cpu_case_close(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_gate_and_regime),
        cmocka_unit_test(every_length_to_64),
        cmocka_unit_test(every_head_size),
        cmocka_unit_test(grouped_value_heads),
        cmocka_unit_test(every_input_dtype),
        cmocka_unit_test(every_state_dtype),
        cmocka_unit_test(every_flag),
        cmocka_unit_test(ragged_sequences),
        cmocka_unit_test(error_does_not_grow),
        cmocka_unit_test(almost_no_decay),
        cmocka_unit_test(deep_gates),
        cmocka_unit_test(huge_gate_factors),
        cmocka_unit_test(large_and_small_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
