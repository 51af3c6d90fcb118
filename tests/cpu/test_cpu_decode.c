/* Decode of every kernel set: against the definition, state pools, padding, draft tokens. */
#include <math.h>
#include <string.h>

#include "cpu_tests.h"

static void *copy_of(struct cpu_case *c, const fkda_tensor *tensor)
{
    void *copy = cpu_case_alloc(c, tensor_bytes(tensor));
    memcpy(copy, tensor->data, tensor_bytes(tensor));
    return copy;
}

/* Moves a case's initial state into final_state, where decode reads it. */
static void prepare_state(struct cpu_case *c, const void *initial)
{
    cpu_case_poison(c);
    memcpy(c->args.final_state.data, initial, tensor_bytes(&c->args.final_state));
    memset(&c->args.initial_state, 0, sizeof c->args.initial_state);
}

static void matches_the_definition(void **unused)
{
    (void)unused;
    static const struct cpu_shape shapes[] = {
        {.B = 2, .T = 1, .H = 3},
        {.B = 2, .T = 16, .H = 2, .HV = 4, .regime = CPU_SLOW},
        {.B = 1, .T = 5, .K = 64, .V = 64, .gate = FKDA_GATE_SOFTPLUS},
        {.B = 1, .T = 2, .K = 256, .V = 48, .gate = FKDA_GATE_ACTIVATED},
        {.B = 2, .T = 3, .initial = FKDA_BF16, .final = FKDA_BF16},
        {.B = 1, .T = 1, .q = FKDA_F32, .v = FKDA_F32, .out = FKDA_F32},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct cpu_case c;
        cpu_case_open(&c, &shapes[i]);
        cpu_case_reference(&c);
        void *initial = copy_of(&c, &c.args.initial_state);
        bool bf16_state = c.shape.final == FKDA_BF16;
        const double bound_bf16 = 1.8e-3; /* few values: what rounding costs scatters */
        FOR_EACH_ISA(isa)
        {
            prepare_state(&c, initial);
            run_decode(&c.args, isa, 2);
            double out = cpu_error(c.args.out.data, c.shape.out, c.expected_out, c.out_count);
            double state =
                cpu_error(c.args.final_state.data, c.shape.final, c.expected_state, c.state_count);
            if (!(out <= (c.shape.out == FKDA_BF16 ? bound_bf16 : BOUND_OUT_F32)) ||
                !(state <= (bf16_state ? bound_bf16 : BOUND_STATE)))
                fail_msg("%s shape %d: out %.3g state %.3g", fkda_isa_name(isa), (int)i, out,
                         state);
        }
        cpu_case_close(&c);
    }
}

/* Slots [3, -1, 0] of a pool of 5: the others, and the padded sequence's, keep their bytes. */
static void pool_with_padding(void **unused)
{
    (void)unused;
    const int64_t pool_shape[] = {5, 2, 128, 128}, rows[] = {3};
    int32_t slots[] = {3, -1, 0};
    FOR_EACH_ISA(isa)
    {
        struct cpu_case c;
        cpu_case_open(&c, &(struct cpu_shape){.B = 3, .T = 2, .H = 2});
        size_t image = (size_t)2 * 128 * 128 * sizeof(float);
        float *pool = cpu_case_alloc(&c, 5 * image), *plain = cpu_case_alloc(&c, 3 * image);
        for (size_t i = 0; i < 5 * image / sizeof(float); i++)
            pool[i] = 0.1f * (float)((int)(i % 13) - 6);
        for (int n = 0; n < 3; n++)
            memcpy((char *)plain + (size_t)n * image,
                   (char *)pool + (size_t)(slots[n] < 0 ? 1 : slots[n]) * image, image);
        float *before = cpu_case_alloc(&c, 5 * image);
        memcpy(before, pool, 5 * image);

        prepare_state(&c, plain);
        run_decode(&c.args, isa, 1);
        uint16_t *out = copy_of(&c, &c.args.out);
        memset(c.args.out.data, 0xff, tensor_bytes(&c.args.out));
        float *states = copy_of(&c, &c.args.final_state);
        c.args.final_state = fkda_tensor_contiguous(pool, FKDA_F32, 4, pool_shape);
        c.args.state_indices = fkda_tensor_contiguous(slots, FKDA_I32, 1, rows);
        run_decode(&c.args, isa, 2);

        size_t row = tensor_bytes(&c.args.out) / 3;
        const char *now = c.args.out.data;
        assert_memory_equal(now, out, row);
        assert_memory_equal(now + 2 * row, (char *)out + 2 * row, row);
        for (size_t i = 0; i < row; i++)
            assert_int_equal(now[row + i], 0);
        assert_memory_equal((char *)pool + 3 * image, states, image);
        assert_memory_equal(pool, (char *)states + 2 * image, image);
        assert_memory_equal((char *)pool + image, (char *)before + image, 2 * image);
        assert_memory_equal((char *)pool + 4 * image, (char *)before + 4 * image, image);
        cpu_case_close(&c);
    }
}

/* Draft tokens: slot [n, t] holds the state after token t, read from [n, accepted - 1]. */
static void draft_tokens(void **unused)
{
    (void)unused;
    enum { N = 2, T = 3, SLOTS = 7 };
    const int64_t pool_shape[] = {SLOTS, 1, 128, 128}, columns[] = {N, T}, rows[] = {N};
    int64_t slots[N * T] = {1, 2, 3, 6, 5, 4}, accepted[N] = {2, 1};
    const size_t image = (size_t)128 * 128 * sizeof(float);
    FOR_EACH_ISA(isa)
    {
        struct cpu_case c;
        cpu_case_open(&c, &(struct cpu_shape){.B = N, .T = T, .no_initial = true});
        char *pool = cpu_case_alloc(&c, SLOTS * image), *before = cpu_case_alloc(&c, SLOTS * image);
        for (size_t i = 0; i < SLOTS * image / sizeof(float); i++)
            ((float *)pool)[i] = 0.1f * (float)((int)(i % 11) - 5);
        memcpy(before, pool, SLOTS * image);
        fkda_args args = c.args;
        args.final_state = fkda_tensor_contiguous(pool, FKDA_F32, 4, pool_shape);
        args.state_indices = fkda_tensor_contiguous(slots, FKDA_I64, 2, columns);
        args.num_accepted_tokens = fkda_tensor_contiguous(accepted, FKDA_I64, 1, rows);
        run_decode(&args, isa, 2);
        uint16_t *out = copy_of(&c, &args.out);
        assert_memory_equal(pool, before, image); /* slot 0 belongs to nobody */
        for (int t = 1; t <= T; t++) { /* the first t tokens alone end in slot [n, t - 1] */
            const int64_t lengths[] = {0, t, 2 * t}, cu_shape[] = {3};
            const int64_t q_shape[] = {1, 2 * t, 1, 128}, beta_shape[] = {1, 2 * t, 1};
            fkda_args alone = c.args;
            fkda_tensor *from[] = {&c.args.q, &c.args.k, &c.args.v, &c.args.g};
            fkda_tensor *to[] = {&alone.q, &alone.k, &alone.v, &alone.g};
            for (int i = 0; i < 4; i++) {
                char *data = cpu_case_alloc(&c, (size_t)(2 * t) * 256);
                for (int n = 0; n < N; n++)
                    memcpy(data + n * t * 256, (char *)from[i]->data + n * T * 256,
                           (size_t)t * 256);
                *to[i] = fkda_tensor_contiguous(data, FKDA_BF16, 4, q_shape);
            }
            uint16_t beta[2 * T];
            for (int n = 0; n < N; n++)
                memcpy(beta + n * t, (uint16_t *)c.args.beta.data + n * T,
                       (size_t)t * sizeof(uint16_t));
            alone.beta = fkda_tensor_contiguous(beta, FKDA_BF16, 3, beta_shape);
            alone.cu_seqlens = fkda_tensor_contiguous((void *)lengths, FKDA_I64, 1, cu_shape);
            alone.out.shape[0] = 1;
            alone.out.shape[1] = 2 * t;
            memcpy(c.args.final_state.data, before + slots[accepted[0] - 1] * (int64_t)image,
                   image);
            memcpy((char *)c.args.final_state.data + image,
                   before + slots[T + accepted[1] - 1] * (int64_t)image, image);
            run_decode(&alone, isa, 1);
            for (int n = 0; n < N; n++) {
                assert_memory_equal((char *)c.args.final_state.data + (size_t)n * image,
                                    pool + slots[n * T + t - 1] * (int64_t)image, image);
                assert_memory_equal((uint16_t *)alone.out.data + n * t * 128, out + n * T * 128,
                                    (size_t)t * 256);
            }
        }
        cpu_case_close(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matches_the_definition),
        cmocka_unit_test(pool_with_padding),
        cmocka_unit_test(draft_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
