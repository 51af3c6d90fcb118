/* What must not change a single bit: threads, cuts at 16 tokens, checkpoints, strides, index
 * dtypes, repetition, dirty memory, a neighbour's NaN. Every kernel set, fp32 prefill. */
#include <fenv.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu_tests.h"

/* Outputs of a run, to compare another one with. */
struct saved {
    void *out, *state;
    size_t out_bytes, state_bytes;
};

static struct saved save(struct cpu_case *c)
{
    struct saved s = {.out_bytes = tensor_bytes(&c->args.out),
                      .state_bytes = tensor_bytes(&c->args.final_state)};
    s.out = cpu_case_alloc(c, s.out_bytes);
    s.state = cpu_case_alloc(c, s.state_bytes);
    memcpy(s.out, c->args.out.data, s.out_bytes);
    memcpy(s.state, c->args.final_state.data, s.state_bytes);
    return s;
}

static void assert_same(const struct cpu_case *c, const struct saved *s)
{
    assert_memory_equal(c->args.out.data, s->out, s->out_bytes);
    assert_memory_equal(c->args.final_state.data, s->state, s->state_bytes);
}

static void threads(void **unused)
{
    (void)unused;
    static const int counts[] = {2, 3, 7};
    static const struct cpu_shape shapes[] = {
        {.T = 53, .H = 5, .HV = 10},
        {.T = 53, .H = 1},                   /* split by value channels */
        {.T = 35, .H = 1, .K = 64, .V = 48}, /* which do not divide evenly */
        {.B = 3, .T = 5, .H = 2},
    };
    FOR_EACH_ISA(isa)
    {
        for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
            struct cpu_case c;
            cpu_case_open(&c, &shapes[i]);
            run_forward(&c.args, isa, 1);
            struct saved one = save(&c);
            for (int k = 0; k < 3; k++) {
                cpu_case_poison(&c);
                run_forward(&c.args, isa, counts[k]);
                assert_same(&c, &one);
            }
            cpu_case_close(&c);
        }
    }
}

/* What the caller has set for its own arithmetic is neither used nor changed. */
static void rounding_mode(void **unused)
{
    (void)unused;
    FOR_EACH_ISA(isa)
    {
        struct cpu_case c;
        cpu_case_open(&c, &(struct cpu_shape){.T = 53, .H = 4, .q = FKDA_F32, .out = FKDA_F32});
        c.args.scale = 0.125; /* a float32: nothing to round on the way in */
        run_forward(&c.args, isa, 1);
        struct saved nearest = save(&c);
        for (int threads = 1; threads <= 3; threads += 2) {
            cpu_case_poison(&c);
            assert_int_equal(fesetround(FE_UPWARD), 0);
            run_forward(&c.args, isa, threads);
            assert_int_equal(fegetround(), FE_UPWARD);
            assert_int_equal(fesetround(FE_TONEAREST), 0);
            assert_same(&c, &nearest);
        }
        cpu_case_close(&c);
    }
}

/* Narrows a [B, T, ...] tensor to tokens from t on; B is 1. */
static void narrow(fkda_tensor *tensor, int64_t t, int64_t count)
{
    char *data = tensor->data;
    tensor->data =
        data + t * tensor->stride[1] * (int64_t)fkda_dtype_bytes((fkda_dtype)tensor->dtype);
    tensor->shape[1] = count;
}

static fkda_args narrowed(const fkda_args *args, int64_t t, int64_t count)
{
    fkda_args part = *args;
    narrow(&part.q, t, count);
    narrow(&part.k, t, count);
    narrow(&part.v, t, count);
    narrow(&part.g, t, count);
    narrow(&part.beta, t, count);
    narrow(&part.out, t, count);
    return part;
}

static void two_calls(void **unused)
{
    (void)unused;
    static const int64_t lengths[] = {33, 64, 67, 85};
    FOR_EACH_ISA(isa)
    {
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            struct cpu_case c;
            cpu_case_open(&c, &(struct cpu_shape){.T = lengths[i], .H = 3});
            run_forward(&c.args, isa, 1);
            struct saved whole = save(&c);
            for (int64_t cut = 16; cut < lengths[i]; cut += 16) {
                cpu_case_poison(&c);
                fkda_args first = narrowed(&c.args, 0, cut);
                run_forward(&first, isa, 1);
                fkda_args second = narrowed(&c.args, cut, lengths[i] - cut);
                second.initial_state = c.args.final_state; /* and in place */
                run_forward(&second, isa, 2);
                assert_same(&c, &whole);
            }
            cpu_case_close(&c);
        }
    }
}

static void checkpoints(void **unused)
{
    (void)unused;
    static const int64_t cu[] = {0, 130, 150, 150, 182}, cuts[] = {0, 48, 128, 16, -1, 0, 32},
                         indptr[] = {0, 3, 4, 6, 7};
    const int64_t M = 7, H = 2, rows[] = {M}, entries[] = {5}, shape[] = {M, H, 128, 128};
    FOR_EACH_ISA(isa)
    {
        struct cpu_case c;
        cpu_case_open(&c, &(struct cpu_shape){.T = 190, .H = H, .N = 4, .cu = cu});
        size_t image = (size_t)H * 128 * 128 * sizeof(float);
        char *states = cpu_case_alloc(&c, (size_t)M * image);
        c.args.checkpoint_state = fkda_tensor_contiguous(states, FKDA_F32, 4, shape);
        c.args.checkpoint_offsets = fkda_tensor_contiguous((void *)cuts, FKDA_I64, 1, rows);
        c.args.checkpoint_indptr = fkda_tensor_contiguous((void *)indptr, FKDA_I64, 1, entries);
        cpu_case_poison(&c);
        run_forward(&c.args, isa, 3);
        char *prefix = cpu_case_alloc(&c, 4 * image);
        for (int n = 0; n < 4; n++) {
            for (int64_t m = indptr[n]; m < indptr[n + 1]; m++) {
                if (cuts[m] < 0) { /* left as it was */
                    for (size_t b = 0; b < image; b++)
                        assert_int_equal((unsigned char)states[(size_t)m * image + b], 0xff);
                    continue;
                }
                fkda_args alone = narrowed(&c.args, cu[n], cuts[m]);
                const int64_t one[] = {1, H, 128, 128};
                memset(&alone.cu_seqlens, 0, sizeof alone.cu_seqlens);
                memset(&alone.checkpoint_state, 0, sizeof alone.checkpoint_state);
                memset(&alone.checkpoint_offsets, 0, sizeof alone.checkpoint_offsets);
                memset(&alone.checkpoint_indptr, 0, sizeof alone.checkpoint_indptr);
                alone.initial_state = fkda_tensor_contiguous(
                    (char *)c.args.initial_state.data + (size_t)n * image, FKDA_F32, 4, one);
                alone.final_state = fkda_tensor_contiguous(prefix, FKDA_F32, 4, one);
                run_forward(&alone, isa, 1);
                assert_memory_equal(prefix, states + (size_t)m * image, image);
            }
        }
        cpu_case_close(&c);
    }
}

/* The same numbers with rows further apart, at an address that is only a multiple of an element. */
static void spread(struct cpu_case *c, fkda_tensor *tensor)
{
    size_t bytes = fkda_dtype_bytes((fkda_dtype)tensor->dtype);
    fkda_tensor wide = *tensor;
    int last = tensor->ndim - 1;
    bool channels = last == 3; /* beta has none: its last dimension is the heads */
    int64_t run = tensor->shape[last] * (channels ? tensor->shape[last - 1] : 1);
    int64_t rows = tensor->shape[0] * tensor->shape[1];
    wide.stride[1] = run + 3;
    wide.stride[0] = wide.stride[1] * tensor->shape[1];
    char *data = cpu_case_alloc(c, (size_t)(rows * wide.stride[1] + 8) * bytes);
    memset(data, 0xff, (size_t)(rows * wide.stride[1] + 8) * bytes);
    wide.data = data + bytes;
    for (int64_t r = 0; r < rows; r++)
        memcpy((char *)wide.data + (size_t)(r * wide.stride[1]) * bytes,
               (char *)tensor->data + (size_t)(r * run) * bytes, (size_t)run * bytes);
    *tensor = wide;
}

static void strided_inputs(void **unused)
{
    (void)unused;
    static const int64_t lengths[] = {3, 35};
    FOR_EACH_ISA(isa)
    {
        for (int i = 0; i < 2; i++) {
            struct cpu_case c;
            cpu_case_open(&c, &(struct cpu_shape){.B = 2, .T = lengths[i], .H = 4});
            run_forward(&c.args, isa, 1);
            struct saved plain = save(&c);
            cpu_case_poison(&c);
            spread(&c, &c.args.q);
            spread(&c, &c.args.k);
            spread(&c, &c.args.v);
            spread(&c, &c.args.g);
            spread(&c, &c.args.beta);
            run_forward(&c.args, isa, 2);
            assert_same(&c, &plain);
            cpu_case_close(&c);
        }
    }
}

static void int32_offsets(void **unused)
{
    (void)unused;
    static const int64_t cu[] = {0, 17, 48};
    static const int64_t entries[] = {3};
    int32_t narrow_cu[] = {0, 17, 48};
    FOR_EACH_ISA(isa)
    {
        struct cpu_case c;
        cpu_case_open(&c, &(struct cpu_shape){.T = 48, .H = 2, .N = 2, .cu = cu});
        run_forward(&c.args, isa, 1);
        struct saved wide = save(&c);
        cpu_case_poison(&c);
        c.args.cu_seqlens = fkda_tensor_contiguous(narrow_cu, FKDA_I32, 1, entries);
        run_forward(&c.args, isa, 1);
        assert_same(&c, &wide);
        cpu_case_close(&c);
    }
}

/* 50 runs on two threads; the workspace is dirty, at an odd address, not read before written. */
static void repeats_with_dirty_workspace(void **unused)
{
    (void)unused;
    FOR_EACH_ISA(isa)
    {
        struct cpu_case c;
        char reason[FKDA_REASON_BYTES];
        size_t bytes = 0;
        cpu_case_open(&c, &(struct cpu_shape){.T = 61, .H = 3});
        c.args.isa = (int32_t)isa;
        c.args.num_threads = 2;
        assert_int_equal(fkda_workspace_bytes(&c.args, &bytes, reason, sizeof reason), FKDA_OK);
        unsigned char *workspace = cpu_case_alloc(&c, bytes + 1);
        c.args.workspace = workspace + 1;
        c.args.workspace_bytes = bytes;
        memset(workspace, 0, bytes + 1);
        run_forward(&c.args, isa, 2);
        struct saved first = save(&c);
        for (int i = 0; i < 50; i++) {
            cpu_case_poison(&c);
            memset(workspace, i % 2 ? 0xff : 0x7f, bytes + 1);
            run_forward(&c.args, isa, 2);
            assert_same(&c, &first);
        }
        cpu_case_close(&c);
    }
}

/* NaN in one head of one sequence stays there. */
static void nan_of_a_neighbour(void **unused)
{
    (void)unused;
    static const int64_t cu[] = {0, 17, 48};
    FOR_EACH_ISA(isa)
    {
        for (int which = 0; which < 5; which++) {
            struct cpu_case c;
            cpu_case_open(&c, &(struct cpu_shape){.T = 60, .H = 2, .N = 2, .cu = cu});
            run_forward(&c.args, isa, 1);
            struct saved clean = save(&c);
            cpu_case_poison(&c);
            fkda_tensor *inputs[] = {&c.args.q, &c.args.k, &c.args.v, &c.args.g, &c.args.beta};
            size_t row = tensor_bytes(inputs[which]) / 60;
            memset((char *)inputs[which]->data + 17 * row, 0xff, 43 * row);
            run_forward(&c.args, isa, 1);
            assert_memory_equal(c.args.out.data, clean.out, 17 * clean.out_bytes / 60);
            assert_memory_equal(c.args.final_state.data, clean.state, clean.state_bytes / 2);
            const uint16_t *out = c.args.out.data; /* and is not swallowed: last token, head 1 */
            float last;
            uint32_t bits = (uint32_t)out[(47 * 2 + 1) * 128] << 16;
            memcpy(&last, &bits, sizeof last);
            assert_true(isnan(last));
            for (size_t i = 48 * 256; i < 60 * 256; i++) /* rows of no sequence */
                assert_int_equal(out[i], 0xffff);
            cpu_case_close(&c);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads),
        cmocka_unit_test(rounding_mode),
        cmocka_unit_test(two_calls),
        cmocka_unit_test(checkpoints),
        cmocka_unit_test(strided_inputs),
        cmocka_unit_test(int32_offsets),
        cmocka_unit_test(repeats_with_dirty_workspace),
        cmocka_unit_test(nan_of_a_neighbour),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
