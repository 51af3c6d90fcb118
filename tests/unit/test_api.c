/* test_api.c: the public calls from end to end: results against the definition, workspace, kernel
 * choice, report, info. What each kernel set computes is tested in tests/cpu. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/cpu_backend.h"
#include "problem.h"

/* RMS(got - wanted) / RMS(wanted); NaN anywhere gives NaN, which passes no comparison. */
static double ratio(const fkda_tensor *got, const fkda_tensor *wanted)
{
    double error = 0, size = 0;
    for (int64_t i = 0; i < problem_elements(wanted); i++) {
        double w = problem_get(wanted, i), d = problem_get(got, i) - w;
        error += d * d;
        size += w * w;
    }
    return sqrt(error / size);
}

static void against_reference(struct problem *p)
{
    fkda_tensor out = p->args.out, final = p->args.final_state;
    problem_run(p, fkda_forward);
    p->args.out = problem_poisoned(p, FKDA_F64, 4, out.shape);
    p->args.final_state = problem_poisoned(p, FKDA_F64, 4, final.shape);
    problem_run(p, fkda_reference);
    assert_true(ratio(&out, &p->args.out) < (out.dtype == FKDA_F32 ? 1e-6 : 1.75e-3));
    assert_true(ratio(&final, &p->args.final_state) < (final.dtype == FKDA_F32 ? 1e-6 : 1.75e-3));
    p->args.out = out;
    p->args.final_state = final;
}

static void test_forward(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.B = 2, .T = 37, .H = 2, .HV = 4, .K = 64, .V = 32});
    p.args.num_threads = 0;
    against_reference(&p);
    p.args.out = problem_poisoned(&p, FKDA_BF16, 4, p.args.out.shape);
    p.args.final_state = problem_poisoned(&p, FKDA_BF16, 4, p.args.final_state.shape);
    against_reference(&p);
    problem_free(&p);
}

/* Case 37: the smallest, the largest, and sizes that differ or are no power of two. */
static void test_head_sizes(void **state)
{
    (void)state;
    static const int64_t sizes[][2] = {{16, 16}, {256, 256}, {16, 256}, {256, 16}, {48, 112}};
    for (int i = 0; i < 5; i++) {
        struct problem p;
        problem_init(&p, (struct problem_sizes){.T = 19, .K = sizes[i][0], .V = sizes[i][1]});
        against_reference(&p);
        problem_free(&p);
    }
}

static void test_gates_and_flags(void **state)
{
    (void)state;
    for (int i = 0; i < 24; i++) {
        struct problem p;
        problem_init(&p, (struct problem_sizes){.T = 35, .H = 2});
        p.args.flags = (uint32_t)i % 8;
        p.args.gate = i / 8;
        if (!(p.args.flags & FKDA_QK_L2NORM)) /* keep the state from growing */
            for (int64_t j = 0; j < problem_elements(&p.args.k); j++)
                problem_set(&p.args.k, j, problem_get(&p.args.k, j) * 0.25);
        if (p.args.gate == FKDA_GATE_ACTIVATED) {
            p.args.A_log = p.args.dt_bias = (fkda_tensor){.data = NULL};
            for (int64_t j = 0; j < problem_elements(&p.args.g); j++)
                problem_set(&p.args.g, j, -fabs(problem_get(&p.args.g, j)));
        }
        against_reference(&p);
        problem_free(&p);
    }
}

/* Tokens one at a time, and some at a time, against all at once. */
static void test_decode_continues_prefill(void **state)
{
    (void)state;
    static const int64_t cuts[] = {0, 1, 2, 5, 21, 22};
    enum { T = 22, H = 2, ROW = H * 16 };
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = T, .H = H});
    fkda_tensor out = p.args.out, final = p.args.final_state;
    p.args.out = problem_poisoned(&p, FKDA_F64, 4, out.shape);
    p.args.final_state = problem_poisoned(&p, FKDA_F64, 4, final.shape);
    problem_run(&p, fkda_reference);
    fkda_tensor wanted_out = p.args.out, wanted_final = p.args.final_state;

    fkda_tensor *rows[] = {&p.args.q, &p.args.k, &p.args.v, &p.args.g, &p.args.beta, &p.args.out};
    memcpy(final.data, p.args.initial_state.data, H * 16 * 16 * sizeof(float));
    p.args.out = out;
    p.args.final_state = final;
    p.args.initial_state = (fkda_tensor){.data = NULL};
    fkda_tensor whole[6];
    for (int i = 0; i < 6; i++)
        whole[i] = *rows[i];
    for (int c = 0; c + 1 < 6; c++) {
        for (int i = 0; i < 6; i++) {
            rows[i]->data = (float *)whole[i].data + cuts[c] * whole[i].stride[1];
            rows[i]->shape[1] = cuts[c + 1] - cuts[c];
        }
        problem_run(&p, fkda_decode);
    }
    assert_true(ratio(&out, &wanted_out) < 1e-6);
    assert_true(ratio(&final, &wanted_final) < 1e-6);
    problem_free(&p);
}

/* Draft tokens: the state after token t lands in slot [n, t]; the next call starts from the slot of
 * the last accepted one. Slot -1 is not kept; a row that starts at -1 gets zeros. */
static void test_decode_drafts(void **state)
{
    (void)state;
    enum { T = 3, IMAGE = 256 };
    struct problem p;
    problem_init(&p, (struct problem_sizes){.B = 3, .T = T, .N = 9});
    p.args.initial_state = (fkda_tensor){.data = NULL};
    float before[9 * IMAGE];
    uint64_t seed = 3;
    for (int i = 0; i < 9 * IMAGE; i++)
        ((float *)p.args.final_state.data)[i] = before[i] = (float)problem_uniform(&seed);
    const int64_t shape[] = {3, T};
    fkda_tensor slots = INDICES(&p, FKDA_I32, 4, 1, 7, -1, -1, -1, 0, -1, 8);
    p.args.state_indices = fkda_tensor_contiguous(slots.data, FKDA_I32, 2, shape);
    p.args.num_accepted_tokens = INDICES(&p, FKDA_I64, 2, 1, 3);
    problem_run(&p, fkda_decode);

    static const int64_t start[] = {1, -1, 8};
    static const int64_t written[3][T] = {{4, 1, 7}, {-1, -1, -1}, {0, -1, 8}};
    float *after = p.args.final_state.data;
    for (int n = 0; n < 3; n++) {
        for (int t = 0; t < T; t++) {
            const float *out = (const float *)p.args.out.data + (n * T + t) * 16;
            if (start[n] < 0) {
                for (int j = 0; j < 16; j++)
                    assert_true(out[j] == 0);
                continue;
            }
            struct problem one; /* tokens 0..t of row n, from the slot it starts at */
            problem_init(&one, (struct problem_sizes){.T = t + 1});
            fkda_tensor *from[] = {&p.args.q, &p.args.k, &p.args.v, &p.args.g, &p.args.beta};
            fkda_tensor *to[] = {&one.args.q, &one.args.k, &one.args.v, &one.args.g,
                                 &one.args.beta};
            for (int i = 0; i < 5; i++)
                to[i]->data = (float *)from[i]->data + n * from[i]->stride[0];
            one.args.A_log = p.args.A_log;
            one.args.dt_bias = p.args.dt_bias;
            memcpy(one.args.initial_state.data, before + start[n] * IMAGE, IMAGE * sizeof(float));
            problem_run(&one, fkda_reference);
            for (int j = 0; j < 16; j++)
                assert_float_equal(out[j], ((float *)one.args.out.data)[t * 16 + j], 1e-5);
            for (int i = 0; i < IMAGE && written[n][t] >= 0; i++)
                assert_float_equal(after[written[n][t] * IMAGE + i],
                                   ((float *)one.args.final_state.data)[i], 1e-5);
            problem_free(&one);
        }
    }
    static const int unwritten[] = {2, 3, 5, 6};
    for (int i = 0; i < 4; i++)
        assert_memory_equal(after + unwritten[i] * IMAGE, before + unwritten[i] * IMAGE,
                            IMAGE * sizeof(float));
    problem_free(&p);
}

/* ---- Workspace ------------------------------------------------------------------------------- */

static void test_workspace(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 40, .H = 2});
    size_t bytes = 0;
    problem_run(&p, fkda_forward);
    float wanted[40 * 2 * 16];
    memcpy(wanted, p.args.out.data, sizeof wanted);
    assert_int_equal(fkda_workspace_bytes(&p.args, &bytes, NULL, 0), FKDA_OK);
    assert_true(bytes > 0);

    for (size_t offset = 0; offset < 64; offset += 7) { /* any alignment; dirty; nothing past it */
        unsigned char *memory = malloc(offset + bytes);
        assert_non_null(memory);
        memset(memory, 0xff, offset + bytes);
        problem_poison(&p);
        p.args.workspace = memory + offset;
        p.args.workspace_bytes = bytes;
        problem_run(&p, fkda_forward);
        assert_memory_equal(p.args.out.data, wanted, sizeof wanted);
        for (size_t i = 0; i < offset; i++)
            assert_int_equal(memory[i], 0xff);
        p.args.workspace_bytes = bytes - 1;
        problem_refused(&p, fkda_forward, FKDA_ERROR_WORKSPACE, "workspace_bytes: ");
        p.args.workspace_bytes = 0;
        problem_refused(&p, fkda_forward, FKDA_ERROR_WORKSPACE, "workspace_bytes: 0, wanted at");
        free(memory);
    }
    problem_free(&p);
}

/* Data pointers are not looked at, neither is what index tensors hold. */
static void test_workspace_without_data(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 40, .H = 2, .N = 2});
    p.args.cu_seqlens = INDICES(&p, FKDA_I32, 0, 20, 40);
    p.args.state_indices = INDICES(&p, FKDA_I64, 1, 0);
    p.args.checkpoint_state = problem_poisoned(&p, FKDA_F32, 4, p.args.final_state.shape);
    p.args.checkpoint_offsets = INDICES(&p, FKDA_I64, 16, 16);
    size_t with = 1, without = 2;
    assert_int_equal(fkda_workspace_bytes(&p.args, &with, NULL, 0), FKDA_OK);
    fkda_tensor *tensors[] = {&p.args.q,
                              &p.args.k,
                              &p.args.v,
                              &p.args.g,
                              &p.args.beta,
                              &p.args.A_log,
                              &p.args.dt_bias,
                              &p.args.out,
                              &p.args.cu_seqlens,
                              &p.args.initial_state,
                              &p.args.final_state,
                              &p.args.state_indices,
                              &p.args.checkpoint_state,
                              &p.args.checkpoint_offsets};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        tensors[i]->data = i % 2 ? NULL : (void *)8;
    assert_int_equal(fkda_workspace_bytes(&p.args, &without, NULL, 0), FKDA_OK);
    assert_int_equal(with, without);
    char reason[FKDA_REASON_BYTES];
    assert_int_equal(fkda_workspace_bytes(&p.args, NULL, reason, sizeof reason),
                     FKDA_ERROR_INVALID_ARGUMENT);
    assert_string_equal(reason, "bytes: NULL, wanted a size_t");
    problem_free(&p);
}

/* What was asked for shapes is enough whatever cu_seqlens turns out to hold. */
static void test_workspace_covers_any_cut(void **state)
{
    (void)state;
    static const int64_t cuts[][5] = {
        {0, 0, 0, 0, 48}, {0, 1, 2, 3, 4}, {0, 12, 24, 36, 48}, {0, 48, 48, 48, 48}, {0}};
    for (int i = 0; i < 5; i++) {
        struct problem p;
        size_t bytes = 0;
        problem_init(&p, (struct problem_sizes){.T = 48, .H = 3, .K = 128, .V = 128, .N = 4});
        p.args.cu_seqlens = problem_indices(&p, FKDA_I32, 5, cuts[i]);
        assert_int_equal(fkda_workspace_bytes(&p.args, &bytes, NULL, 0), FKDA_OK);
        p.args.workspace = problem_input(&p, bytes);
        p.args.workspace_bytes = bytes;
        char reason[FKDA_REASON_BYTES];
        fkda_status status = fkda_forward(&p.args, reason, sizeof reason);
        assert_string_equal(reason, "");
        assert_int_equal(status, FKDA_OK);
        problem_free(&p);
    }
}

/* ---- Kernel choice, report, info ------------------------------------------------------------- */

static void test_every_isa_runs_or_says_why(void **state)
{
    (void)state;
    fkda_info info;
    assert_int_equal(fkda_get_info(&info, NULL, 0), FKDA_OK);
    for (int precision = FKDA_PRECISION_FP32; precision <= FKDA_PRECISION_BF16; precision++) {
        for (int isa = FKDA_ISA_AUTO; isa < FKDA_ISA_COUNT; isa++) {
            struct problem p;
            fkda_report report;
            char wanted[64];
            problem_init(&p, (struct problem_sizes){.T = 20, .K = 128, .V = 128});
            p.args.isa = isa;
            p.args.precision = precision;
            const struct fkda_cpu_kernels *kernels = fkda_cpu_kernels_for((fkda_isa)isa);
            bool bf16 = precision == FKDA_PRECISION_BF16, any_bf16 = false;
            for (int i = 1; i < FKDA_ISA_COUNT; i++)
                any_bf16 |=
                    (info.isa_usable >> i & 1u) && fkda_cpu_kernels_for((fkda_isa)i)->prefill_bf16;
            if (isa != FKDA_ISA_AUTO && !(info.isa_usable >> isa & 1u)) {
                snprintf(wanted, sizeof wanted, "isa: %s is not ", fkda_isa_name((fkda_isa)isa));
                problem_refused(&p, fkda_forward, FKDA_ERROR_UNSUPPORTED, wanted);
            } else if (bf16 && (isa ? !kernels->prefill_bf16 : !any_bf16)) {
                snprintf(wanted, sizeof wanted, "precision: bf16 with isa %s, wanted",
                         fkda_isa_name((fkda_isa)isa));
                problem_refused(&p, fkda_forward, FKDA_ERROR_UNSUPPORTED, wanted);
            } else {
                p.args.report = &report;
                problem_run(&p, fkda_forward);
                snprintf(wanted, sizeof wanted, "cpu/%s/prefill_%s",
                         isa ? fkda_isa_name((fkda_isa)isa) : "", bf16 ? "bf16" : "fp32");
                if (isa)
                    assert_string_equal(report.kernel, wanted);
                else
                    assert_memory_equal(report.kernel, "cpu/", 4);
            }
            problem_free(&p);
        }
    }
}

static void test_report(void **state)
{
    (void)state;
    struct problem p;
    fkda_report report;
    memset(&report, 0xff, sizeof report);
    problem_init(&p, (struct problem_sizes){.T = 40, .H = 2, .N = 3});
    p.args.cu_seqlens = INDICES(&p, FKDA_I32, 0, 9, 9, 33);
    p.args.num_threads = 2;
    p.args.report = &report;
    problem_run(&p, fkda_forward);
    assert_int_equal(report.num_tokens, 33);
    assert_in_range(report.num_threads, 1, 2);
    assert_true(report.workspace_bytes > 0);
    assert_int_equal(report.reserved, 0);
    problem_run(&p, fkda_reference);
    assert_string_equal(report.kernel, "reference/float64");
    assert_int_equal(report.num_tokens, 33);
    assert_int_equal(report.num_threads, 1);
    problem_free(&p);
}

static void test_info(void **state)
{
    (void)state;
    fkda_info info;
    char reason[FKDA_REASON_BYTES] = "x";
    memset(&info, 0xff, sizeof info);
    assert_int_equal(fkda_get_info(&info, reason, sizeof reason), FKDA_OK);
    assert_string_equal(reason, "");
    assert_string_equal(info.version, FKDA_VERSION_STRING);
    assert_true(info.isa_usable >> FKDA_ISA_PORTABLE & 1u);
    assert_int_equal(info.isa_usable & ~info.isa_built, 0);
    assert_true(info.isa_usable >> info.isa_chosen & 1u);
    assert_true(info.num_threads >= 1);
    assert_string_equal(info.cuda_archs, FKDA_TEST_CUDA_ARCHS);
    if (!*FKDA_TEST_CUDA_ARCHS) {
        assert_int_equal(info.num_devices, 0);
        assert_string_equal(info.cuda_status, "this build has no CUDA kernels");
        assert_string_equal(info.cuda_path, "");
        assert_string_equal(info.cuda_note, "");
    }
    assert_int_equal(fkda_get_info(NULL, reason, sizeof reason), FKDA_ERROR_INVALID_ARGUMENT);
    assert_string_equal(reason, "info: NULL, wanted a fkda_info");
}

/* Without a reason buffer nothing changes but the missing text. */
static void test_reason_is_optional(void **state)
{
    (void)state;
    struct problem p;
    problem_init(&p, (struct problem_sizes){.T = 3});
    assert_int_equal(fkda_forward(&p.args, NULL, 100), FKDA_OK);
    p.args.scale = 0;
    assert_int_equal(fkda_forward(&p.args, NULL, 100), FKDA_ERROR_INVALID_ARGUMENT);
    char one[2] = "xy";
    assert_int_equal(fkda_forward(&p.args, one, 1), FKDA_ERROR_INVALID_ARGUMENT);
    assert_memory_equal(one, "\0y", 2);
    assert_int_equal(fkda_forward(&p.args, one + 1, 0), FKDA_ERROR_INVALID_ARGUMENT);
    assert_memory_equal(one, "\0y", 2);
    problem_free(&p);
}

int main(void)
{
    unsetenv("FLASH_KDA_CPU_ISA");
    unsetenv("FLASH_KDA_PRECISION");
    unsetenv("FLASH_KDA_NUM_THREADS");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward),
        cmocka_unit_test(test_head_sizes),
        cmocka_unit_test(test_gates_and_flags),
        cmocka_unit_test(test_decode_continues_prefill),
        cmocka_unit_test(test_decode_drafts),
        cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_workspace_without_data),
        cmocka_unit_test(test_workspace_covers_any_cut),
        cmocka_unit_test(test_every_isa_runs_or_says_why),
        cmocka_unit_test(test_report),
        cmocka_unit_test(test_info),
        cmocka_unit_test(test_reason_is_optional),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
