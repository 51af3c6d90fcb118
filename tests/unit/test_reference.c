/* test_reference.c: the definition, against numbers worked out by hand and against a second
 * statement of the mathematics with dense matrices:
 *
 *     S_t = S_{t-1} D_t (I - b_t k_t k_t^T) + b_t v_t k_t^T,   o_t = scale S_t q_t,
 *     D_t = diag(exp g_t)
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/bf16.h"
#include "problem.h"

#define K 16
#define V 16

static void assert_near(double got, double wanted, double tolerance)
{
    if (!(fabs(got - wanted) <= tolerance * (1 + fabs(wanted))))
        fail_msg("got %.17g, wanted %.17g", got, wanted);
}

/* One head of K 16, V 16; float64 outputs; nothing inside: no norm, beta and gate activated. */
static void init_plain(struct problem *p, int64_t T)
{
    problem_init(p, (struct problem_sizes){.T = T});
    p->args.out = problem_poisoned(p, FKDA_F64, 4, p->args.out.shape);
    p->args.final_state = problem_poisoned(p, FKDA_F64, 4, p->args.final_state.shape);
    p->args.initial_state = (fkda_tensor){.data = NULL};
    p->args.A_log = p->args.dt_bias = p->args.initial_state;
    p->args.flags = 0;
    p->args.gate = FKDA_GATE_ACTIVATED;
    p->args.scale = 0.5;
    fkda_tensor *inputs[] = {&p->args.q, &p->args.k, &p->args.v, &p->args.g, &p->args.beta};
    for (int i = 0; i < 5; i++)
        memset(inputs[i]->data, 0, (size_t)problem_elements(inputs[i]) * sizeof(float));
}

static void set(const fkda_tensor *tensor, int64_t t, int64_t channel, double value)
{
    problem_set(tensor, t * tensor->shape[3] + channel, value);
}

static double out_at(const struct problem *p, int64_t t, int64_t j)
{
    return problem_get(&p->args.out, t * V + j);
}

static double state_at(const struct problem *p, int64_t j, int64_t i)
{
    return problem_get(&p->args.final_state, j * K + i);
}

/* ---- By hand --------------------------------------------------------------------------------- */

/* S = b v k^T has one element: v_3 = 7, k_5 = 2, b = 0.25: S[3][5] = 3.5; out_3 = 0.5 * 3.5 q_5. */
static void test_one_token(void **state)
{
    (void)state;
    struct problem p;
    init_plain(&p, 1);
    set(&p.args.k, 0, 5, 2);
    set(&p.args.v, 0, 3, 7);
    set(&p.args.q, 0, 5, 10);
    set(&p.args.q, 0, 6, 1000); /* meets a zero of S */
    problem_set(&p.args.beta, 0, 0.25);
    problem_run(&p, fkda_reference);
    for (int j = 0; j < V; j++) {
        assert_true(out_at(&p, 0, j) == (j == 3 ? 17.5 : 0));
        for (int i = 0; i < K; i++)
            assert_true(state_at(&p, j, i) == (j == 3 && i == 5 ? 3.5 : 0));
    }
    problem_free(&p);
}

/* k = e_0 twice, b = 1/2, decay of channel 0 one half:
 *     S = 1/2 v_0 = 4;  decays to 2;  u = 1/2 (6 - 2) = 2;  S = 4. */
static void test_two_tokens_delta_rule(void **state)
{
    (void)state;
    struct problem p;
    init_plain(&p, 2);
    for (int t = 0; t < 2; t++) {
        set(&p.args.k, t, 0, 1);
        set(&p.args.q, t, 0, 1);
        set(&p.args.g, t, 0, log(0.5));
        problem_set(&p.args.beta, t, 0.5);
    }
    set(&p.args.v, 0, 1, 8);
    set(&p.args.v, 1, 1, 6);
    problem_run(&p, fkda_reference);
    assert_near(out_at(&p, 0, 1), 0.5 * 4, 1e-7);
    assert_near(out_at(&p, 1, 1), 0.5 * 4, 1e-7);
    assert_near(state_at(&p, 1, 0), 4, 1e-7); /* log(0.5) was rounded to float32 */
    problem_free(&p);
}

/* The decay acts before the prediction, channel by channel, on columns (value rows come first). */
static void test_decay_acts_on_key_channels(void **state)
{
    (void)state;
    struct problem p;
    init_plain(&p, 1);
    p.args.initial_state = problem_random(&p, FKDA_F64, 4, p.args.final_state.shape);
    for (int i = 0; i < K; i++)
        set(&p.args.g, 0, i, -0.125 * i);
    problem_run(&p, fkda_reference);
    for (int j = 0; j < V; j++)
        for (int i = 0; i < K; i++)
            assert_near(state_at(&p, j, i),
                        exp(-0.125 * i) * problem_get(&p.args.initial_state, j * K + i), 1e-15);
    problem_free(&p);
}

/* Case 20: the state e_2 e_9^T (row 2, column 9) answers q = e_9 in value channel 2. */
static void test_state_layout(void **state)
{
    (void)state;
    static const int64_t lengths[] = {1, 33};
    for (int l = 0; l < 2; l++) {
        struct problem p;
        init_plain(&p, lengths[l]);
        p.args.initial_state = problem_random(&p, FKDA_F64, 4, p.args.final_state.shape);
        for (int64_t i = 0; i < V * K; i++)
            problem_set(&p.args.initial_state, i, i == 2 * K + 9 ? 1 : 0);
        set(&p.args.q, lengths[l] - 1, 9, 1);
        problem_run(&p, fkda_reference);
        for (int j = 0; j < V; j++)
            assert_true(out_at(&p, lengths[l] - 1, j) == (j == 2 ? 0.5 : 0));
        problem_free(&p);
    }
}

static void test_norm(void **state)
{
    (void)state;
    struct problem p;
    init_plain(&p, 2);
    p.args.flags = FKDA_QK_L2NORM;
    for (int i = 0; i < K; i++) {
        set(&p.args.k, 0, i, 3);
        set(&p.args.q, 0, i, -1e-3);
    }
    set(&p.args.v, 0, 0, 1);
    problem_set(&p.args.beta, 0, 1);
    problem_run(&p, fkda_reference);
    double k = 3 / sqrt(16 * 9 + 1e-6), q = (double)-1e-3f;
    q /= sqrt(16 * q * q + 1e-6);
    assert_near(state_at(&p, 0, 0), k, 1e-15);
    assert_near(out_at(&p, 0, 0), 0.5 * 16 * k * q, 1e-15);
    assert_true(out_at(&p, 1, 0) == 0); /* the second token is all zero: 0, not NaN */
    problem_free(&p);
}

/* ---- Gates and beta -------------------------------------------------------------------------- */

/* Decay of channel 0 after one token, seen in a state of ones. */
static double decay(fkda_gate gate, double g_raw, const float *A_log, const float *dt_bias,
                    double lower_bound)
{
    struct problem p;
    init_plain(&p, 1);
    p.args.gate = (int32_t)gate;
    p.args.lower_bound = lower_bound;
    p.args.initial_state = problem_random(&p, FKDA_F64, 4, p.args.final_state.shape);
    for (int64_t i = 0; i < V * K; i++)
        problem_set(&p.args.initial_state, i, 1);
    const int64_t one = 1, channels = K;
    float bias[K];
    if (A_log)
        p.args.A_log = fkda_tensor_contiguous((void *)(uintptr_t)A_log, FKDA_F32, 1, &one);
    for (int i = 0; i < K && dt_bias; i++)
        bias[i] = *dt_bias;
    if (dt_bias)
        p.args.dt_bias = fkda_tensor_contiguous(bias, FKDA_F32, 1, &channels);
    set(&p.args.g, 0, 0, g_raw);
    problem_run(&p, fkda_reference);
    double got = state_at(&p, 5, 0);
    problem_free(&p);
    return got;
}

static void test_bounded_gate(void **state)
{
    (void)state;
    const float log2f_ = 0.6931472f, quarter = 0.25f;
    const double lower = (double)-1e-3f;
    assert_near(decay(FKDA_GATE_BOUNDED, 0, NULL, NULL, -5), exp(-2.5), 1e-15);
    assert_near(decay(FKDA_GATE_BOUNDED, 0, NULL, NULL, -1e-3), exp(lower / 2), 1e-15);
    assert_true(decay(FKDA_GATE_BOUNDED, 3, NULL, NULL, 0) == 1);
    assert_true(decay(FKDA_GATE_BOUNDED, 3, NULL, NULL, -0.0) == 1);
    /* exp(A_log) = 2 (as float32), g + bias = 0.75 */
    double x = exp((double)log2f_) * 0.75;
    assert_near(decay(FKDA_GATE_BOUNDED, 0.5, &log2f_, &quarter, -5), exp(-5 / (1 + exp(-x))),
                1e-15);
    assert_near(decay(FKDA_GATE_BOUNDED, 50, NULL, NULL, -5), exp(-5), 1e-15);
    assert_near(decay(FKDA_GATE_BOUNDED, -20, NULL, NULL, -5), 1 - 5 * exp(-20), 1e-16);
    assert_true(decay(FKDA_GATE_BOUNDED, -1e30, NULL, NULL, -5) == 1);
    assert_near(decay(FKDA_GATE_BOUNDED, 1e30, NULL, NULL, -5), exp(-5), 1e-15);
}

static void test_softplus_gate(void **state)
{
    (void)state;
    const float log2f_ = 0.6931472f, quarter = 0.25f;
    assert_near(decay(FKDA_GATE_SOFTPLUS, 0, NULL, NULL, 0), 0.5, 1e-15);
    double x = log1p(exp(0.75)) * exp((double)log2f_);
    assert_near(decay(FKDA_GATE_SOFTPLUS, 0.5, &log2f_, &quarter, 0), exp(-x), 1e-15);
    assert_near(decay(FKDA_GATE_SOFTPLUS, 60, NULL, NULL, 0) / exp(-60), 1, 1e-13);
    assert_true(decay(FKDA_GATE_SOFTPLUS, 1e30, NULL, NULL, 0) == 0);
    assert_true(decay(FKDA_GATE_SOFTPLUS, -1e30, NULL, NULL, 0) == 1);
}

static void test_activated_gate(void **state)
{
    (void)state;
    assert_near(decay(FKDA_GATE_ACTIVATED, -0.5, NULL, NULL, 0), exp(-0.5), 1e-15);
    assert_true(decay(FKDA_GATE_ACTIVATED, 0, NULL, NULL, 0) == 1);
    assert_true(decay(FKDA_GATE_ACTIVATED, -1e30, NULL, NULL, 0) == 0);
}

/* With k = v = e_0 and no state, S[0][0] is b itself. */
static double beta_seen(uint32_t flags, double raw)
{
    struct problem p;
    init_plain(&p, 1);
    p.args.flags = flags;
    set(&p.args.k, 0, 0, 1);
    set(&p.args.v, 0, 0, 1);
    problem_set(&p.args.beta, 0, raw);
    problem_run(&p, fkda_reference);
    double got = state_at(&p, 0, 0);
    problem_free(&p);
    return got;
}

static void test_beta(void **state)
{
    (void)state;
    assert_true(beta_seen(0, 0.75) == 0.75);
    assert_true(beta_seen(FKDA_ALLOW_NEG_EIGVAL, 0.75) == 1.5);
    assert_true(beta_seen(FKDA_BETA_SIGMOID, 0) == 0.5);
    assert_true(beta_seen(FKDA_BETA_SIGMOID | FKDA_ALLOW_NEG_EIGVAL, 0) == 1);
    assert_near(beta_seen(FKDA_BETA_SIGMOID, 1), 1 / (1 + exp(-1)), 1e-15);
    assert_near(beta_seen(FKDA_BETA_SIGMOID, -700) / exp(-700), 1, 1e-12);
    assert_true(beta_seen(FKDA_BETA_SIGMOID, 1000) == 1);
    assert_true(beta_seen(FKDA_BETA_SIGMOID, -1000) == 0);
}

/* ---- A second statement ---------------------------------------------------------------------- */

/* S <- S M + b v k^T with M = D (I - b k k^T) as a matrix. */
static void dense_step(double S[V][K], const double *q, const double *k, const double *v,
                       const double *g, double b, double scale, double *o)
{
    double M[K][K], next[V][K];
    for (int i = 0; i < K; i++)
        for (int j = 0; j < K; j++)
            M[i][j] = exp(g[i]) * ((i == j ? 1 : 0) - b * k[i] * k[j]);
    for (int r = 0; r < V; r++) {
        o[r] = 0;
        for (int j = 0; j < K; j++) {
            next[r][j] = b * v[r] * k[j];
            for (int i = 0; i < K; i++)
                next[r][j] += S[r][i] * M[i][j];
            o[r] += scale * next[r][j] * q[j];
        }
    }
    memcpy(S, next, sizeof next);
}

static void test_against_dense_matrices(void **state)
{
    (void)state;
    enum { T = 50, H = 2, HV = 4 };
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = T, .H = H, .HV = HV});
    p.args.out = problem_poisoned(&p, FKDA_F64, 4, p.args.out.shape);
    p.args.final_state = problem_poisoned(&p, FKDA_F64, 4, p.args.final_state.shape);
    problem_run(&p, fkda_reference);
    const fkda_args *a = &p.args;
    for (int h = 0; h < HV; h++) {
        double S[V][K];
        for (int i = 0; i < V * K; i++)
            S[i / K][i % K] = problem_get(&a->initial_state, h * V * K + i);
        for (int t = 0; t < T; t++) {
            double q[K], k[K], v[V], g[K], o[V], qq = 0, kk = 0;
            for (int i = 0; i < K; i++) {
                q[i] = problem_get(&a->q, (t * H + h / 2) * K + i);
                k[i] = problem_get(&a->k, (t * H + h / 2) * K + i);
                v[i] = problem_get(&a->v, (t * HV + h) * V + i);
                qq += q[i] * q[i];
                kk += k[i] * k[i];
                double x =
                    problem_get(&a->g, (t * HV + h) * K + i) + problem_get(&a->dt_bias, h * K + i);
                g[i] = -5 / (1 + exp(-exp(problem_get(&a->A_log, h)) * x));
            }
            for (int i = 0; i < K; i++) {
                q[i] /= sqrt(qq + 1e-6);
                k[i] /= sqrt(kk + 1e-6);
            }
            double b = 1 / (1 + exp(-problem_get(&a->beta, t * HV + h)));
            dense_step(S, q, k, v, g, b, (double)(float)a->scale, o);
            for (int j = 0; j < V; j++)
                assert_near(problem_get(&a->out, (t * HV + h) * V + j), o[j], 1e-13);
        }
        for (int i = 0; i < V * K; i++)
            assert_near(problem_get(&a->final_state, h * V * K + i), S[i / K][i % K], 1e-13);
    }
    problem_free(&p);
}

/* ---- Dtypes and strides ---------------------------------------------------------------------- */

/* bfloat16 and float32 outputs are the float64 result, rounded once. */
static void test_outputs_are_rounded_once(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 20, .H = 2});
    fkda_tensor out[3], final[3];
    static const fkda_dtype dtypes[] = {FKDA_F64, FKDA_F32, FKDA_BF16};
    for (int i = 0; i < 3; i++) {
        out[i] = p.args.out = problem_poisoned(&p, dtypes[i], 4, p.args.out.shape);
        final[i] = p.args.final_state =
            problem_poisoned(&p, dtypes[i], 4, p.args.final_state.shape);
        problem_run(&p, fkda_reference);
    }
    fkda_tensor *all[] = {out, final};
    for (int j = 0; j < 2; j++) {
        for (int64_t i = 0; i < problem_elements(&all[j][0]); i++) {
            double exact = problem_get(&all[j][0], i);
            assert_true(problem_get(&all[j][1], i) == (double)(float)exact);
            assert_int_equal(((uint16_t *)all[j][2].data)[i], fkda_bf16_from_double(exact));
        }
    }
    problem_free(&p);
}

/* Case 16: q, k, v as slices of one [B, T, 3, H, K] tensor; case 15: beta with padded rows. */
static void test_strided_inputs(void **state)
{
    (void)state;
    enum { B = 2, T = 9, H = 3 };
    struct problem p;
    problem_init(&p, (struct problem_sizes){.B = B, .T = T, .H = H});
    problem_run(&p, fkda_reference);
    float wanted[B * T * H * V];
    memcpy(wanted, p.args.out.data, sizeof wanted);

    float *fused = problem_input(&p, sizeof(float) * B * T * 3 * H * K);
    float *rows = problem_input(&p, sizeof(float) * B * T * (H + 3));
    fkda_tensor *parts[] = {&p.args.q, &p.args.k, &p.args.v};
    for (int i = 0; i < 3; i++) {
        for (int64_t row = 0; row < B * T; row++)
            memcpy(fused + (row * 3 + i) * H * K, (float *)parts[i]->data + row * H * K,
                   sizeof(float) * H * K);
        parts[i]->data = fused + i * H * K;
        parts[i]->stride[0] = T * 3 * H * K;
        parts[i]->stride[1] = 3 * H * K;
    }
    for (int64_t row = 0; row < B * T; row++)
        memcpy(rows + row * (H + 3) + 2, (float *)p.args.beta.data + row * H, sizeof(float) * H);
    p.args.beta.data = rows + 2;
    p.args.beta.stride[0] = T * (H + 3);
    p.args.beta.stride[1] = H + 3;
    problem_poison(&p);
    problem_run(&p, fkda_reference);
    assert_memory_equal(p.args.out.data, wanted, sizeof wanted);
    problem_free(&p);
}

static void test_dt_bias_flat_is_the_same(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 5, .H = 3});
    problem_run(&p, fkda_reference);
    float wanted[5 * 3 * V];
    memcpy(wanted, p.args.out.data, sizeof wanted);
    p.args.dt_bias.ndim = 1;
    p.args.dt_bias.shape[0] = 3 * K;
    p.args.dt_bias.stride[0] = 1;
    problem_poison(&p);
    problem_run(&p, fkda_reference);
    assert_memory_equal(p.args.out.data, wanted, sizeof wanted);
    problem_free(&p);
}

/* Cases 18 and 19: every float input as bfloat16 is the same as its exact float32 copy; states of
 * mixed dtypes. */
static void test_bf16_inputs(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 20, .H = 2});
    fkda_tensor *inputs[] = {&p.args.q, &p.args.k,    &p.args.v,
                             &p.args.g, &p.args.beta, &p.args.initial_state};
    fkda_tensor halves[6];
    for (int i = 0; i < 6; i++) {
        halves[i] = problem_random(&p, FKDA_BF16, inputs[i]->ndim, inputs[i]->shape);
        for (int64_t j = 0; j < problem_elements(&halves[i]); j++)
            problem_set(inputs[i], j, problem_get(&halves[i], j));
    }
    problem_run(&p, fkda_reference);
    float out[20 * 2 * V], final[2 * V * K];
    memcpy(out, p.args.out.data, sizeof out);
    memcpy(final, p.args.final_state.data, sizeof final);
    for (int i = 0; i < 6; i++) { /* one more of them in bfloat16 each time */
        *inputs[i] = halves[i];
        problem_poison(&p);
        problem_run(&p, fkda_reference);
        assert_memory_equal(p.args.out.data, out, sizeof out);
        assert_memory_equal(p.args.final_state.data, final, sizeof final);
    }
    problem_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_token),
        cmocka_unit_test(test_two_tokens_delta_rule),
        cmocka_unit_test(test_decay_acts_on_key_channels),
        cmocka_unit_test(test_state_layout),
        cmocka_unit_test(test_norm),
        cmocka_unit_test(test_bounded_gate),
        cmocka_unit_test(test_softplus_gate),
        cmocka_unit_test(test_activated_gate),
        cmocka_unit_test(test_beta),
        cmocka_unit_test(test_against_dense_matrices),
        cmocka_unit_test(test_outputs_are_rounded_once),
        cmocka_unit_test(test_strided_inputs),
        cmocka_unit_test(test_dt_bias_flat_is_the_same),
        cmocka_unit_test(test_bf16_inputs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
